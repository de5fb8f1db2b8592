"""The training scripts from their command lines to their ends on a GPU that is played."""

import functools
import importlib.util
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from conftest import ROOT
from fake_cuda import Gpu
from fake_torch import fake_cuda
from running import STAND_IN
from torch.utils._python_dispatch import _disable_current_modes

from utils.data.dataset import ImageBatches
from utils.launch import supervise
from utils.model import models
from utils.run import snapshots
from utils.train import dummy, epoch, evaluation

SCRIPTS = ("imagenet_nd", "imagenet_dp", "imagenet_ddp", "imagenet_ddp_apex", "imagenet_fsdp")


@dataclass
class Ran:
    """A run that has ended."""

    code: int
    gpu: Gpu
    session: Any
    folder: Path = Path()

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Those of its convolutions and matrix products."""
        return {dtype for _, dtype in self.gpu.heavy}


def load(script: str, change: tuple[str, str] | None = None) -> ModuleType:
    """A script as a module, with ``change`` (text, other text) made in its source."""
    text = (ROOT / f"{script}.py").read_text()
    if change is not None:
        assert change[0] in text, f"{script}.py has no {change[0]!r} any more"
        text = text.replace(*change)
    module = ModuleType(script)
    exec(compile(text, str(ROOT / f"{script}.py"), "exec"), module.__dict__)
    return module


@contextmanager
def changed(function: Callable[..., Any], old: str, new: str) -> Iterator[None]:
    """A function or method of this repository with ``new`` for ``old`` in its source."""
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{function.__qualname__} has no {old!r} any more"
    space = dict(function.__globals__)
    exec(compile(source.replace(old, new), function.__code__.co_filename, "exec"), space)
    before = function.__code__
    function.__code__ = inspect.unwrap(space[function.__name__]).__code__
    try:
        yield
    finally:
        function.__code__ = before


@contextmanager
def command_line(script: str, options: tuple[Any, ...], job: tuple[int, int]) -> Iterator[None]:
    """What a script finds in sys.argv and, as under torchrun, in the environment."""
    nodes, gpus = job
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "LOCAL_RANK": "0"}
    env |= {"WORLD_SIZE": str(nodes * gpus), "LOCAL_WORLD_SIZE": str(gpus)}
    argv = [str(ROOT / f"{script}.py"), *map(str, options)]
    with mock.patch.object(sys, "argv", argv), mock.patch.dict("os.environ", env):
        yield


def run(
    script: str | ModuleType,
    *options: Any,
    job: tuple[int, int] = (1, 1),
    excused: tuple[str, ...] = (),
) -> Ran:
    """Run a script on ``job`` = (nodes, GPUs of each), as its rank 0, and return when it ends.

    From the end of the first step of an epoch to the end of the last but one, and between the
    batches of an evaluation, the host must not wait for the device, save in functions of the names
    ``excused``.
    """
    module = load(script) if isinstance(script, str) else script
    with ExitStack() as stack:
        stack.enter_context(command_line(module.__name__, options, job))
        gpu = stack.enter_context(fake_cuda(job[1]))
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        # A slot of the ring is written again when its upload has passed, which was batches ago.
        gpu.excused = (*excused, "take")
        sessions = _watch(stack, gpu)
        stack.callback(_stop_sampling, sessions)

        def patch(place: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(place, name, value))

        write, faults = snapshots.write, []

        def write_values(content: Any, path: Path) -> None:
            try:
                write(_with_values(content, gpu), path)
            except Exception as fault:  # in the thread that writes
                faults.append(fault)

        if "apex" in options:
            stack.callback(_forget, "apex")
            stack.enter_context(mock.patch.object(sys, "path", [f"{STAND_IN}_apex", *sys.path]))
        logger = logging.getLogger("utils")
        patch(logger, "handlers", [*logger.handlers])  # a run adds its own
        patch(models, "timm", stand_in("timm"))
        patch(snapshots, "write", write_values)
        patch(ImageBatches, "fill", _unseen(ImageBatches.fill))
        patch(supervise, "die_with_parent", lambda *_: None)
        code = module.main()
        if faults:
            raise faults[0]
        return Ran(code, gpu, sessions[-1] if sessions else None)


def stand_in(name: str) -> ModuleType:
    """A package of tests/stand_in."""
    spec = importlib.util.spec_from_file_location(name, f"{STAND_IN}/{name}/__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _with_values(content: Any, gpu: Gpu) -> Any:
    """What a snapshot holds, with zeros for the values that there are not."""
    if isinstance(content, torch.Tensor):
        # Its `device` is another one while another thread is in the middle of an operation.
        device = getattr(content, "fake_device", content.device)
        assert device.type == "cpu", "a snapshot of what is on the device"
        gpu.use(content, False, gpu.host)
        zeros = torch.empty_strided(content.shape, content.stride(), dtype=content.dtype)
        return zeros.zero_()
    if isinstance(content, dict):
        return {key: _with_values(value, gpu) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(_with_values(value, gpu) for value in content)
    return content


def _stop_sampling(sessions: list[Any]) -> None:
    """End the threads of runs that a fault has ended: they would read the GPUs of later tests."""
    for session in sessions:
        if session.watch is not None and not session.watch.ended.is_set():
            session.watch.close()


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a worker does: it has no GPU to look at, and here it is quicker so."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return call


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


def _watch(stack: ExitStack, gpu: Gpu) -> list[Any]:
    """Let no one wait in the middle of training, evaluation and ``--dummy``."""
    sessions: list[Any] = []
    train, evaluate, time_step = epoch.train, evaluation.evaluate, dummy.time_step

    def quietly(work: Callable[[], Any], quiet: Callable[[], bool]) -> Any:
        gpu.quiet = quiet
        gpu.heavy.clear()  # of what came before the first step
        try:
            return work()
        finally:
            gpu.quiet = lambda: False

    def train_watched(session: Any, step: Any) -> Any:
        sessions.append(session)
        last = session.train.sampler.steps_per_epoch - 1
        return quietly(lambda: train(session, step), lambda: 1 <= session.state.step < last)

    def evaluate_watched(session: Any, predict: Any, batches: Any) -> Any:
        done = 0

        def counted(images: torch.Tensor) -> torch.Tensor:
            nonlocal done
            done += 1
            return predict(images)

        last = batches.sampler.rounds
        return quietly(lambda: evaluate(session, counted, batches), lambda: 1 <= done < last)

    def time_watched(session: Any, step: Any) -> int:
        sessions.append(session)
        done, inside = 0, False

        def counted(*args: Any) -> Any:
            nonlocal done, inside
            inside = True
            out = step(*args)
            done, inside = done + 1, False
            return out

        return quietly(lambda: time_step(session, counted), lambda: inside and done > 0)

    stack.enter_context(mock.patch.object(epoch, "train", train_watched))
    stack.enter_context(mock.patch.object(evaluation, "evaluate", evaluate_watched))
    stack.enter_context(mock.patch.object(dummy, "time_step", time_watched))
    return sessions


# What changes the step, but not its precision.
EVERYTHING = "--accum-steps 2 --clip-grad 1 --label-smoothing 0.1 --no-channels-last --ema 0.9"
MIXED = "--mixup 0.2 --cutmix 1 --val-flip"  # of pairs, which four processes would cut
JOBS = {"imagenet_nd": (1, 1), "imagenet_dp": (1, 2)}  # nodes, GPUs of each


@dataclass
class Runs:
    """Runs scripts on the images of ``data``, into ``folder``/run, a tiny model for an epoch."""

    data: Path
    folder: Path
    batch: int = 8  # of all processes; three times that in DATA/train

    def __call__(
        self,
        script: str | ModuleType,
        *options: Any,
        job: tuple[int, int] | None = None,
        **more: Any,
    ) -> Ran:
        name = script if isinstance(script, str) else script.__name__
        nodes, gpus = job or JOBS.get(name, (2, 2))
        processes = nodes * gpus if name not in JOBS else 1
        # Three steps: in the middle one nobody may wait.
        batch = self.batch // processes // (2 if "--accum-steps" in options else 1)
        fixed = ("-a", "tiny_full", "--image-size", 32, "-b", batch, "-j", 0, "--epochs", 1)
        place = ("--output-dir", self.folder, "--name", "run")
        done = run(script, *fixed, *place, *options, self.data, job=(nodes, gpus), **more)
        assert done.code == 0
        done.folder = self.folder / "run"
        return done

    def dummy(self, script: str, arch: str, size: int = 64, *more: Any) -> Ran:
        """A few steps of ``--dummy``."""
        few = {"WARMUP_STEPS": 1, "TIMED_STEPS": 1, "CHOOSING_STEPS": 1, "AHEAD": 1}
        few["_host_waits"] = lambda step: []
        with mock.patch.multiple(dummy, **few):
            options = ("--dummy", "-a", arch, "--image-size", size, "-b", 4)
            return self(script, *options, "--classes", 10, *more)
