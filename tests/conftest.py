"""What the tests share: a tiny image folder, and functions that run the scripts as people do."""

import importlib
import json
import logging
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import leftovers
import pytest
from PIL import Image, ImageDraw

ROOT = Path(__file__).resolve().parents[1]
# Models that cost next to nothing, as timm's, and a sitecustomize.py.
STAND_IN = str(ROOT / "tests" / "stand_in")
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), STAND_IN]
runpy.run_path(f"{STAND_IN}/sitecustomize.py")  # Python does so at the start of other processes
# What the environment of each process says that a test starts, here or on a node.
COMMON = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": STAND_IN}

# A shell that starts the tests in the background makes them and their children ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Processes that tests fork would wait for ever for OpenMP's threads, which a fork does not copy.
os.environ["OMP_NUM_THREADS"] = "1"

# On a CPU with AMX `--amp auto` would take bf16, on others float32: the tests are alike everywhere.
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"

# These need a GPU, or packages that no machine has by accident. Other tests should not skip.
OPTIONAL = ("test_cuda.py", "test_real_apex.py")
_left_out: Counter[str] = Counter()  # reasons

# A model of tests/stand_in that has batch norm and dropout. Training it costs a quarter of one of
# torchvision's smallest.
SMALL = ("-a", "tiny_full", "--image-size", "32", "-j", "1")
# For tests that need a model with more and larger weights, or without tests/stand_in.
TORCHVISION_MODEL = ("-a", "shufflenet_v2_x0_5")
WITH_TORCH = ("imagenet_", *(f"scripts/{x}" for x in ("audit_run", "model_results", "show_images")))
TIMEOUT = 240  # seconds; a limit against hangs, not a measurement
# The files that take longest go first, or one of them would be left for a single worker at the end.
LONGEST = "hang study wrappers doctor elastic job status_cleanup processes signals train_on_nodes"
LONGEST += " commands resume preflight errors"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}.py": number for number, name in enumerate(LONGEST.split())}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """xdist cannot send a failure in whose text a name is not UTF-8: all tests would end."""
    report = yield
    if report.failed and re.search("[\udc80-\udcff]", text := str(report.longrepr)):
        report.longrepr = text.encode(errors="backslashreplace").decode()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    is_optional = Path(report.location[0]).name in OPTIONAL
    if report.skipped and isinstance(report.longrepr, tuple) and not is_optional:
        _left_out[report.longrepr[2].removeprefix("Skipped: ")] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _left_out and os.environ.get("NO_SKIPS") and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    if _left_out and not hasattr(config, "workerinput"):  # the last line
        reasons = "; ".join(f"{count}: {reason}" for reason, count in _left_out.items())
        print(f"left out because something is missing on this machine: {reasons}")


@dataclass(frozen=True)
class Result:
    """A finished command: its exit code, output and error output."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one error line that bad input must cause; fails if there is a traceback."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert "Traceback" not in self.err, self.err
        errors = [line for line in lines if "error" in line]
        assert len(errors) == 1, self.err
        return errors[0]

    def fails_with(self, *words: object) -> None:
        """Check that the command ended with code 2 and one line on stderr, with ``words`` in it."""
        assert self.code == 2, self.out
        assert self.err.strip().splitlines() == [self.sentence], self.err
        for word in words:
            assert str(word) in self.sentence, self.sentence


def environment(**changes: str) -> dict[str, str]:
    """The environment of a command: `COMMON`, no variables of a launcher, plus ``changes``."""
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    clean = {key: value for key, value in os.environ.items() if key not in unwanted}
    return clean | COMMON | changes


_reaper = leftovers.kill_when_this_process_ends()
AT_START = environment()  # before a test has changed it


def activated(**changes: str) -> dict[str, str]:
    """`environment` for a shell in which the virtual environment of this interpreter is active."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
    return environment(**{"PATH": path, "VIRTUAL_ENV": sys.prefix} | changes)


def python(*arguments: object, timeout: float = TIMEOUT, **env: str) -> Result:
    """Run this interpreter in the repository's root, wait for it, and return the result.

    A script that imports torch runs in a fork of a process that has done so.
    """
    if str(arguments[0]).startswith(WITH_TORCH):
        from joined import command  # which itself imports this file

        return command(str(arguments[0]).removesuffix(".py"), *arguments[1:], **env)
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def shell(*lines: str, timeout: float = TIMEOUT, **env: str) -> list[Result]:
    """Type each line into its own shell in the repository's root, all at the same time.

    Also waits for what a shell has left in the background: tee, at the end of a log.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how = {"cwd": ROOT, "env": activated(**env), "start_new_session": True, **pipes}
    typed = [subprocess.Popen(["bash", "-c", line], **how) for line in lines]
    try:
        with ThreadPoolExecutor(len(typed)) as pool:
            said = list(pool.map(lambda one: one.communicate(timeout=timeout), typed))
    finally:
        for one in typed:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
    return [Result(one.returncode, *texts) for one, texts in zip(typed, said, strict=True)]


def train(script: str, *arguments: object, processes: int = 0, **env: str) -> Result:
    """Run a script on a `SMALL` model; in so many ``processes`` if given. It must succeed."""
    words = (*SMALL, *arguments)
    if processes:
        from joined import Job, run_jobs

        with tempfile.TemporaryDirectory() as folder:
            job = Job(script.removesuffix(".py"), words, processes, env=env)
            run_jobs([job], Path(folder))
            out, err = (Path(f"{folder}/job0_rank0{end}").read_text() for end in ("", ".err"))
        return Result(0, out, err)
    result = python(script, *words, **env)
    assert result.code == 0, result.out + result.err
    return result


def summary(run: Path) -> dict:
    """A run's summary.json."""
    return json.loads((run / "summary.json").read_text())


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """All points in a run's event files: tag -> [(x, value)]. Each tag must be in the table."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from utils.comparison import LAYOUT

    events = EventAccumulator(
        str(run), size_guidance={"scalars": 0}, purge_orphaned_data=False
    ).Reload()
    tags = events.Tags()["scalars"]
    patterns = [p for page in LAYOUT.values() for _, listed in page.values() for p in listed]
    assert not [tag for tag in tags if not any(re.match(p, tag) for p in patterns)]
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags}


def draw_folder(root: Path, train: int = 20, val: int = 7) -> Path:
    """Make train/CLASS/*.JPEG and val/CLASS/*.JPEG with that many images in each of 3 classes.

    48 x 40 pixels: noise over a colour and a shape of the class.
    """
    images = [("train", number, i) for number in range(3) for i in range(train)]
    images += [("val", number, i) for number in range(3) for i in range(val)]
    for part, number, i in images:
        source = random.Random(f"{number}{part}{i}")
        colour = [40, 40, 40]
        colour[number] += 150
        image = Image.new("RGB", (48, 40), tuple(c + source.randrange(40) for c in colour))
        pen, x = ImageDraw.Draw(image), source.randrange(20)
        (pen.ellipse if number % 2 else pen.rectangle)((x, 8, x + 20, 28), fill=(240, 240, 240))
        folder = root / part / f"class_{number}"
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{i:03}.JPEG", "JPEG", quality=90)
    return root


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """A test leaves the environment as it was, or others of its worker see what it has set."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    os.environ.clear()
    os.environ.update(before)
    # Of pytest, of torch, and of `launch.prepare`, when a test is the first to import a script.
    by_others = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "OMP_WAIT_POLICY"}
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert not changed - by_others


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The lines that modules of utils log meanwhile, as a run prints them."""
    found, handler, logger = [], logging.Handler(), logging.getLogger("utils")

    def keep(record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        found.append(level + record.getMessage())

    handler.emit = keep
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def parse(monkeypatch) -> Callable[..., dict]:
    """A function that gives the options of a script with the words of a command line."""

    def parsed(name: str, *words: object) -> dict:
        script = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        return vars(script.options.parse(script.parser()))

    return parsed


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A data set of 60 training and 21 validation images in 3 classes. Not to be changed."""
    return draw_folder(tmp_path_factory.mktemp("images") / "data")
