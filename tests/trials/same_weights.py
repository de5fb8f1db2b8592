#!/usr/bin/env python3
"""Train with an old commit and with the files of this folder, and compare the results bit for bit.

    python tests/trials/same_weights.py f59f9ac [--only nd fsdp] [--jobs 2]

Each case is a short training of drawn images, made by the commit and by these files. Equal must be
weights, optimiser state, averages, loss scale, state of --comm, and each epoch's losses and
accuracies; times, speeds and paths are left out. A case with a resume is trained twice more: these
files are killed in the middle of an epoch and resumed, and these files resume what the commit left
when it was stopped. A case that must fail has to end with the same error line and snapshot.

A process of a run is a fork that has torch and other packages loaded, but nothing of this
repository; it gets a command line, and the environment that torchrun would give it. Runs are kept
in --output-dir; those of a commit are reused. CPU only; a few seconds a case; needs pytest.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import torch
from conftest import STAND_IN, draw_folder, environment

LIMIT = 600  # seconds that a command may take
# What a process has loaded before it gets its command line: packages alone.
LOADED = "numpy tensorboard torch torchvision.transforms.v2 torch.utils.tensorboard tqdm"
LOADED += " torch.distributed.fsdp torch.distributed.tensor torch._dynamo matplotlib"
MIDDLE = re.compile(r"^Epoch 2/3 step +[2-9]", re.MULTILINE)  # a run that is killed has come so far
COMMON = "--image-size 32 -j 1 -p 1 --epochs 3 --lr 0.02 --crop-scale 0.5 --snapshot-minutes 0"
EVERYTHING = "--accum-steps 2 --ema 0.9 --mixup 0.2 --cutmix 1"
# Left out: figures that differ from one time to the next, and what only printed lines need.
TIMES = re.compile(
    "Throughput|Time|IO/(?!bad)|GPU|CPU|[Ss]econds|images_per_s|elapsed|printed|comm/nodes"
)


@dataclass(frozen=True)
class Case:
    """A command line: imagenet_SCRIPT.py, of ``size`` processes on ``nodes`` nodes."""

    script: str
    options: str
    size: int = 1
    nodes: int = 1
    resume: bool = False  # is it killed and resumed as well?
    code: int = 0  # exit code


FULL, RESNET, VIT = "-a tiny_full", "-a tiny_resnet", "-a tiny_vit"  # of tests/stand_in
CASES = {
    "nd": Case(
        "nd", f"{FULL} -b 9 --lr-schedule cosine --warmup-epochs 1 --wd-norm 0", resume=True
    ),
    "nd_mixing": Case("nd", f"{FULL} -b 6 {EVERYTHING} --clip-grad 1", resume=True),
    "nd_sizes": Case("nd", "-a squeezenet1_1 -b 12 --progressive 32,48,64", resume=True),
    "nd_smooth": Case("nd", f"{VIT} -b 12 --optimizer adamw --label-smoothing 0.1", resume=True),
    "nd_adamw": Case("nd", f"{FULL} -b 12 --optimizer adamw --amp bf16 --lr-schedule linear"),
    "nd_resnet": Case("nd", "-b 24 --optimizer nesterov --lr-scaling linear"),
    "nd_fp16": Case("nd", f"{FULL} -b 12 --amp fp16 --clip-grad 1", resume=True),
    "nd_freeze": Case("nd", f"{RESNET} -b 12 --freeze"),
    "dp": Case("dp", f"{RESNET} -b 10 --accum-steps 2 --activation-checkpointing"),
    "ddp": Case("ddp", f"{FULL} -b 6 {EVERYTHING}", 2, resume=True),
    "ddp_odd": Case("ddp", f"{FULL} -b 7 --no-channels-last --val-image-size 40", 3),
    "ddp_fp16": Case("ddp", f"{FULL} -b 6 --comm fp16", 2),
    "ddp_int8": Case("ddp", f"{RESNET} -b 6 --comm int8", 2, resume=True),
    "ddp_int4": Case("ddp", f"{VIT} -b 3 --comm int4 --accum-steps 2 --optimizer adamw", 2),
    "ddp_skips": Case("ddp", f"{VIT} -b 6 --comm int4 --amp fp16 --lr 3", 2, resume=True),
    "nodes_int8": Case("ddp", f"{RESNET} -b 3 --comm int8", 4, nodes=2, resume=True),
    "fsdp": Case("fsdp", f"{VIT} -b 6 {EVERYTHING} --clip-grad 1", 2, resume=True),
    "fsdp_none": Case("fsdp", f"{RESNET} -b 6 --reshard none --optimizer adamw --amp bf16", 2),
    "fsdp_node": Case("fsdp", f"{RESNET} -b 3 --reshard node --ema 0.9", 4, nodes=2),
    "apex_o0": Case("ddp_apex", f"{FULL} -b 6 --opt-level O0", 2),
    "apex_o1": Case("ddp_apex", f"{FULL} -b 6 --opt-level O1 --clip-grad 1", 2, resume=True),
    "apex_o2": Case("ddp_apex", f"{FULL} -b 6 --opt-level O2 {EVERYTHING}", 2, resume=True),
    "apex_o2_squeeze": Case("ddp_apex", "-a squeezenet1_1 -b 12 --opt-level O2", 2),
    "apex_o3": Case("ddp_apex", f"{FULL} -b 6 --opt-level O3 --loss-scale 64", 2),
    "diverged": Case("ddp", f"{FULL} -b 6 --lr 1e9", 2, code=2),
    "scale_lost": Case("nd", f"{VIT} -b 6 --lr 1e9 --amp fp16", code=2),
    "bad_files": Case("nd", f"{FULL} -b 6 --max-bad-files 1", code=2),
    "accuracy": Case("nd", f"{FULL} -b 9 --desired-acc 1 --start-epoch 1"),
}


# ---- what a run has left, as comparable values


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of dictionaries and lists, by name."""
    if isinstance(value, dict):
        value = {str(key): entry for key, entry in value.items()}
    elif isinstance(value, (list, tuple)):
        value = {str(number): entry for number, entry in enumerate(value)}
    else:
        yield name, value
        return
    for key, entry in value.items():
        yield from flat(entry, f"{name}/{key}" if name else key)


def by_position(optimizer: dict[str, Any]) -> dict[str, Any]:
    """Optimiser state by the parameters' positions, whether they are named or numbered."""
    groups = optimizer["param_groups"]
    order = [parameter for group in groups for parameter in group["params"]]
    state = {number: optimizer["state"].get(name) for number, name in enumerate(order)}
    rates = [{key: x for key, x in group.items() if key != "params"} for group in groups]
    return {"state": {number: x for number, x in state.items() if x}, "groups": rates}


def of_snapshot(content: dict[str, Any]) -> dict[str, Any]:
    """The parts of a snapshot, today's or f59f9ac's, under one set of names."""
    parts = {name: content.get(name) for name in ("model", "ema", "scaler", "comm", "progress")}
    if (parts["comm"] or {}).get("method") == "fp32":  # as f59f9ac wrote; today there is no entry
        parts["comm"] = None
    return parts | {"optimizer": by_position(content["optimizer"]), "classes": content["classes"]}


def as_text(value: Any) -> str:
    """A tensor's digest, or the value with all digits."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def results(run: Path, log: Path) -> dict[str, str]:
    """All that must be equal, by name."""
    values: dict[str, Any] = {}
    if (run / "snapshot.pt").is_file():
        snapshot = torch.load(run / "snapshot.pt", map_location="cpu", weights_only=True)
        values["snapshot"] = of_snapshot(snapshot)
    if (run / "best.pt").is_file():
        values["best"] = torch.load(run / "best.pt", map_location="cpu", weights_only=True)
    if (run / "summary.json").is_file():
        summary = json.loads((run / "summary.json").read_text())
        names = ("best_", "epochs_done", "global_batch", "val_", "test_", "finished_because")
        values["summary"] = {key: x for key, x in summary.items() if key.startswith(names)}
    lines = log.read_text().splitlines()
    errors = {line.replace(str(run), "RUN") for line in lines if line.startswith("error: ")}
    values["errors"] = sorted(errors)
    return {name: as_text(x) for name, x in flat(values) if not TIMES.search(name)}


# ---- how it is run


def process(tree: str, words: list[str], env: dict[str, str], log: str) -> None:
    """Run a script of ``tree`` in this process, which is a fork of one with packages loaded."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(tree)
    os.environ.clear()
    os.environ.update(env)
    others = {str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts"), str(Path(__file__).parent)}
    sys.path[:] = [tree, STAND_IN, *(place for place in sys.path if place not in others)]
    assert not [name for name in sys.modules if name.split(".")[0] == "utils"]
    torch.set_num_threads(1)
    sys.argv = words
    runpy.run_path(f"{tree}/{words[0]}", run_name="__main__")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Trial:
    """All runs of the ``cases`` of an old commit and of this folder."""

    def __init__(self, folder: Path, old: Path, commit: str):
        self.folder, self.trees = folder, {"old": old, "new": ROOT}
        self.kept = {
            "old": folder / f"{commit[:12]}_torch{torch.__version__}",
            "new": folder / "new",
        }
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(LOADED.split())
        self.starting = threading.Lock()

    def command(self, case: Case, run: Path, more: str = "") -> list[str]:
        data = self.folder / ("bad" if "bad-files" in case.options else "data")
        line = f"imagenet_{case.script}.py {COMMON} {case.options} --name {run.name} {more}"
        return [*line.split(), "--output-dir", str(run.parent), str(data)]

    def run(self, tree: str, case: Case, run: Path, more: str = "", end: int = 0) -> None:
        """Run a case until it ends, or until its second epoch, when it gets the signal ``end``.

        Its output goes to RUN.log. Raises: RuntimeError for another exit code than is due.
        """
        run.parent.mkdir(parents=True, exist_ok=True)
        log, words, env = run.with_suffix(".log"), self.command(case, run, more), environment()
        with open(log, "a") as out:
            out.write(" ".join(words) + "\n")
        began, per_node, job = log.stat().st_size, case.size // case.nodes, []
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        place |= {"WORLD_SIZE": str(case.size), "LOCAL_WORLD_SIZE": str(per_node)}
        for rank in range(case.size):
            if case.script not in ("nd", "dp"):
                env |= place | {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node)}
            what = (str(self.trees[tree]), words, dict(env), str(log))
            job.append(self.context.Process(target=process, args=what))
        with self.starting:
            for one in job:
                one.start()
        code, deadline = case.code, time.monotonic() + LIMIT
        try:
            while any(one.is_alive() for one in job):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"takes longer than {LIMIT} s, see {log}")
                if end and MIDDLE.search(log.read_bytes()[began:].decode()):
                    for one in job:
                        os.kill(one.pid, end)
                    end, code = 0, -end if end == signal.SIGKILL else 75
                time.sleep(0.02)
        finally:
            for one in job:
                one.kill()
        codes = [one.exitcode for one in job]
        if end or any(one != code for one in codes):
            raise RuntimeError(f"exit codes {codes} instead of {code}, see {log}")

    def whole(self, tree: str, name: str) -> dict[str, str]:
        """The results of a whole run, which an old commit makes once."""
        case, run = CASES[name], self.kept[tree] / name
        log, done = run.with_suffix(".log"), run.with_suffix(".json")
        line = " ".join([*self.command(case, run), str(case.size), str(case.nodes)])
        if tree == "old" and done.is_file():
            kept = json.loads(done.read_text())
            if kept.pop("command") == line:
                return kept
        shutil.rmtree(run, ignore_errors=True)
        log.unlink(missing_ok=True)
        self.run(tree, case, run)
        values = results(run, log)
        if not case.code:
            # Another batch: the last round reaches one process alone.
            other = run.with_name(f"{name}_evaluated")
            shutil.rmtree(other, ignore_errors=True)
            self.run(tree, case, other, f"-e -b 5 --resume {run}/best.pt")
            evaluated = results(other, log)
            values |= {f"evaluated/{key}": text for key, text in evaluated.items()}
        done.write_text(json.dumps(values | {"command": line}))
        return values

    def continued(self, first: str, name: str) -> dict[str, str]:
        """The results of these files, which resume a run that was killed in its second epoch."""
        case, run = CASES[name], self.folder / "new" / f"{name}_{first}_killed"
        shutil.rmtree(run, ignore_errors=True)
        run.with_suffix(".log").unlink(missing_ok=True)
        self.run(first, case, run, end=signal.SIGKILL if first == "new" else signal.SIGTERM)
        self.run("new", case, run, "--resume auto")
        return results(run, run.with_suffix(".log"))

    def compare(self, name: str) -> int:
        """Print a line for each run of a case that is compared. Returns how many differ."""
        runs = [("new", self.whole, "new")]
        if CASES[name].resume:
            runs += [("killed, resumed", self.continued, "new")]
            runs += [("old snapshot, resumed", self.continued, "old")]
        differ = 0
        try:
            old = self.whole("old", name)
            for what, make, tree in runs:
                values = make(tree, name)
                names = [key for key in old if not TIMES.search(key)]  # of kept runs, too
                if make == self.continued:
                    names = [key for key in names if not key.startswith("evaluated/")]
                # Today an epoch without unreadable files has no such entry.
                none = {key: "0.0" for key in names if key.endswith("IO/bad_files")}
                unlike = [key for key in names if old[key] != values.get(key, none.get(key))]
                print(f"{name}: {what}: {len(names)} compared, {len(unlike)} differ", flush=True)
                for key in unlike[:8]:
                    print(f"    {key}: {old[key]} became {values.get(key)}", flush=True)
                differ += bool(unlike)
        except RuntimeError as error:
            print(f"{name}: {error}", flush=True)
            differ += 1
        return differ


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("commit", metavar="OLD", help="commit to compare with")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    parser.add_argument("--jobs", type=int, default=2, help="cases at the same time (%(default)s)")
    default = ROOT / "runs/same_weights"
    parser.add_argument("--output-dir", type=Path, default=default, metavar="DIR")
    args = parser.parse_args()
    git = ["git", "-C", str(ROOT)]
    parse = [*git, "rev-parse", "--verify", f"{args.commit}^{{commit}}"]
    commit = subprocess.run(parse, check=True, capture_output=True, text=True).stdout.strip()
    folder = args.output_dir.resolve()
    for part in ("data", "bad"):
        if not (folder / part).exists():
            draw_folder(folder / part, train=33)
    for number in range(3):
        (folder / f"bad/train/class_0/{10 * number:03}.JPEG").write_bytes(b"no image")
    old = folder / f"tree_{os.getpid()}"
    subprocess.run([*git, "worktree", "add", "--detach", "--quiet", str(old), commit], check=True)
    pool = ThreadPoolExecutor(args.jobs)
    try:
        differ = sum(pool.map(Trial(folder, old, commit).compare, args.only))
    finally:
        pool.shutdown(cancel_futures=True)
        subprocess.run([*git, "worktree", "remove", "--force", str(old)], check=True)
    print(f"{len(list(args.only))} cases, {differ} runs differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
