#!/usr/bin/env python3
"""The training step of each script beside the usual loops, in interleaved rounds.

    python scripts/bench_step.py -a resnet18 -b 32 --cases examples,torchvision,nd,ddp
    python scripts/bench_step.py -a resnet50 -b 256 --cases examples+fp16,nd+fp16,O2,nd+fp16+compile
    python scripts/bench_step.py --data DATA --cases examples,nd+off \\
        --peer "timm=python ../timm/train.py {data} --model resnet18 -b 32 -j 2 --epochs 1"

A case is a loop (nd, dp, ddp, fsdp, O0 to O3: a script of this suite; examples, torchvision: the
loops of scripts/bench/peer_loops.py) and what is added to it: off, fp16 or bf16 for --amp, compile
or compile=MODE, comm=METHOD for ddp, and x2 for two processes. Without --data, the same batch is
used again and again: the step alone, as --dummy times it. With --data, an epoch from image files,
read, trained and evaluated; each is run on few images and on more, and the difference counts, so
that start-up and evaluation do not. --peer adds a foreign script, whose {data} is replaced by the
folder.

Exit code 75: the machine is too slow or too busy to measure any case.

Ratios are to the first case, medians over the rounds: of CPU time on the CPU, which other programs
disturb least, of images/s on a GPU. All get --threads threads; there is no other tuning.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils import launch

launch.prepare()  # before torch is imported, which takes seconds

from bench import commands, rounds

from utils.errors import INTERRUPTED, UserError, report, tolerate_broken_pipe
from utils.extras.gpu_check import check_gpus
from utils.folder import SUFFIXES
from utils.option_types import count, positive

SCRIPTS = {name: f"imagenet_{name}.py" for name in ("nd", "dp", "ddp", "fsdp")}
SCRIPTS |= dict.fromkeys(("O0", "O1", "O2", "O3"), "imagenet_ddp_apex.py")
PEERS = ("examples", "torchvision")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end the case
    try:
        check_gpus()
        print(page(measure(args), args))
    except UserError as error:
        return report(error)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-a", "--arch", default="resnet18", help="(%(default)s)")
    add("-b", "--batch-size", type=positive, default=32, help="of each process (%(default)s)")
    add("--image-size", type=positive, default=224, metavar="PX", help="(%(default)s)")
    add("--cases", default="examples,torchvision,nd", metavar="LIST", help="(%(default)s)")
    add("--rounds", type=positive, default=3, metavar="N", help="(%(default)s)")
    add("--threads", type=positive, default=launch.usable_cores(), help="(%(default)s)")
    text = "of one case and round; a case that takes longer is left out (%(default)s)"
    add("--limit", type=positive, default=1800, metavar="SECONDS", help=text)
    group = parser.add_argument_group("from image files")
    group.add_argument("--data", type=Path, metavar="DATA", help="folder with train/ and val/")
    group.add_argument("-j", "--workers", type=count, default=2, metavar="N", help="(%(default)s)")
    group.add_argument("--few", type=positive, default=64, metavar="N", help="images (%(default)s)")
    text = "images in addition; the data set's are repeated if they are fewer (%(default)s)"
    group.add_argument("--more", type=positive, default=256, metavar="N", help=text)
    group.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    return parser.parse_args(argv)


# ---- cases


def options_of(case: str, args: argparse.Namespace) -> tuple[str, list[str], int]:
    """A case's loop, its options, and its number of processes. Raises: `UserError`."""
    kind, *more = case.split("+")
    if kind not in (*SCRIPTS, *PEERS):
        raise UserError(f"--cases: {kind!r} is no case: {', '.join((*SCRIPTS, *PEERS))}")
    options = ["-a", args.arch, "-b", str(args.batch_size), "--image-size", str(args.image_size)]
    processes = 0 if kind in ("nd", "dp", *PEERS) else 1
    options += ["--opt-level", kind] if kind.startswith("O") else []
    for word in more:
        name, _, value = word.partition("=")
        if word in ("off", "fp16", "bf16") and not kind.startswith("O"):
            options += ["--amp", word]
        elif word == "channels_last" and kind in PEERS:
            options += ["--channels-last"]
        elif name == "compile" and kind not in ("dp", "fsdp", *PEERS):
            options += ["--compile", value or "default"]
        elif name == "comm" and kind == "ddp":
            options += ["--comm", value]
        elif re.fullmatch(r"x[1-9]\d*", word) and kind not in ("nd", "dp"):
            processes = int(word[1:])
        else:
            raise UserError(f"--cases {case}: {kind} cannot be combined with {word!r}")
    return kind, options, processes


def command(case: str, args: argparse.Namespace, out: Path, data: Path | None = None) -> list[str]:
    """What measures the step of a case alone, or trains an epoch on ``data``."""
    kind, options, processes = options_of(case, args)
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    launcher = [sys.executable, *(run if processes else ())]
    options += ["-j", str(args.workers)] if data else []
    if kind in PEERS:
        options += ["--data", str(data)] if data else []
        return [*launcher, str(ROOT / "scripts/bench/peer_loops.py"), kind, *options]
    options += ["--output-dir", str(out), "--name", "case", "--lr", "0.001"]
    options += ["--epochs", "1", str(data)] if data else ["--dummy"]
    return [*launcher, str(ROOT / SCRIPTS[kind]), *options]


# ---- measuring


def run(words: list[str], args: argparse.Namespace, folder: Path) -> tuple[str, float, float]:
    """What a command prints, its wall seconds and its CPU seconds. Raises: `UserError`."""
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "passive"}
    late = f"takes longer than --limit {args.limit} seconds: a smaller -b, --image-size or "
    late += "--arch, or a larger --limit"
    began, cpu = time.perf_counter(), _children_cpu()
    (done,) = commands.run([words], args.limit, late, cwd=folder, env=env)
    if done.returncode:
        said = commands.last_lines(done) or done.returncode
        raise UserError(f"{shlex.join(words)} failed: {said}")
    return done.stdout, time.perf_counter() - began, _children_cpu() - cpu


def _children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


def measure(args: argparse.Namespace) -> dict[str, list[rounds.Figures]]:
    """The figures of each case, round by round; a case that fails is named and left out."""
    cases = args.cases.split(",")
    for case in cases:
        options_of(case, args)
    peers = dict(one.partition("=")[::2] for one in args.peer)
    if not all(peers.values()) or (peers and not args.data):
        raise UserError("--peer takes NAME=COMMAND, and goes with --data")
    with tempfile.TemporaryDirectory() as place:
        folders = few_and_more(args, Path(place)) if args.data else ()

        def figures_of(case: str) -> rounds.Figures:
            if args.data:
                return difference(case, peers, args, folders)
            return alone(case, args, Path(place) / "runs")

        return rounds.measure((*peers, *cases), args.rounds, figures_of)


def alone(case: str, args: argparse.Namespace, runs: Path) -> rounds.Figures:
    """What `utils.extras.dummy.time_steps` says of a case's step. Raises: `UserError`."""
    shutil.rmtree(runs, ignore_errors=True)
    printed = run(command(case, args, runs), args, ROOT)[0]
    summary = runs / "case" / "summary.json"
    found = json.loads(summary.read_text() if summary.exists() else printed.splitlines()[-1])
    return found | {"cpu_ms_per_image": found["cpu_ms_per_step"] / args.batch_size}


def few_and_more(args: argparse.Namespace, place: Path) -> tuple[Path, ...]:
    """Two data sets of links to the images of ``--data``, and an empty folder for runs."""
    train = args.data / "train"
    classes = sorted(path for path in train.iterdir() if path.is_dir()) if train.is_dir() else []
    images = [sorted(p for p in one.iterdir() if p.suffix.lower() in SUFFIXES) for one in classes]
    if not images or not all(images):
        raise UserError(f"{train} has no classes with images")
    found = []
    for name, wanted in (("few", args.few), ("more", args.few + args.more)):
        for part, total in (("train", wanted), ("val", args.batch_size)):
            for number in range(max(total, len(classes))):
                group, turn = number % len(classes), number // len(classes)
                source = images[group][turn % len(images[group])].resolve()
                link = place / name / part / classes[group].name / f"{turn:06}{source.suffix}"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source)
        found.append(place / name)
    return (*found, place / "runs")


def difference(
    case: str, peers: dict[str, str], args: argparse.Namespace, folders: tuple[Path, ...]
) -> rounds.Figures:
    """Per image, from a run on few images and one on more. Raises: `UserError`."""
    *sets, runs = folders
    # The first run of a case reads libraries from disk and lets cuDNN choose and compile kernels,
    # which may take longer than the images: it is not counted.
    times = []
    for data in (sets[0], *sets):
        words = shlex.split(peers.get(case, ""))
        words = [word.replace("{data}", str(data)) for word in words]
        runs.mkdir(exist_ok=True)
        _, *spent = run(words or command(case, args, runs, data), args, runs if words else ROOT)
        times.append(spent)
        shutil.rmtree(runs, ignore_errors=True)
    _, (few, few_cpu), (more, more_cpu) = times
    if more <= few or more_cpu <= few_cpu:
        raise UserError(
            f"{args.few} images took {few:.1f} s ({few_cpu:.1f} s of CPU time), {args.more} more "
            f"{more:.1f} s ({more_cpu:.1f} s): raise --more, on a quieter machine",
            code=INTERRUPTED,
        )
    return {
        "images_per_s": args.more / (more - few),
        "ms_per_step": 1000 * (more - few) * args.batch_size / args.more,
        "cpu_ms_per_image": 1000 * (more_cpu - few_cpu) / args.more,
    }


# ---- the table


def page(found: dict[str, list[rounds.Figures]], args: argparse.Namespace) -> str:
    """The table in Markdown, and what was measured."""
    import torch

    cuda = torch.cuda.is_available()
    first, middle = next(iter(found.values())), rounds.middle
    columns = {
        "images/s": middle("images_per_s", ".1f"),
        "ms per step": middle("ms_per_step", ".1f"),
        "CPU ms per image": middle("cpu_ms_per_image", ".1f"),
        "host ms": middle("host_ms_per_step", ".2f"),
        "GiB": middle("peak_memory_bytes", ".2f", 2**30),
        "ratio": rounds.speed_up(first, "images_per_s" if cuda else "cpu_ms_per_image", rate=cuda),
    }
    device = torch.cuda.get_device_name() if cuda else f"the CPU, {args.threads} threads"
    what = "from image files, read and trained" if args.data else "the step alone"
    said = (
        f"{args.arch}, {args.batch_size} images of {args.image_size} pixels per step and process, "
        f"{what}, on {device}; torch {torch.__version__}. Medians of {args.rounds} interleaved "
        f"rounds; ratio of {'images/s' if cuda else 'CPU time'}, to the first row."
    )
    for case, each in found.items():
        waits = {place for one in each for place in one.get("host_waits", ())}
        names = sorted("/".join(Path(place).parts[-2:]) for place in waits)
        if names:
            said += f" In a step of {case} the host waits for the GPU: {', '.join(names)}."
    return f"{rounds.table('case', found, columns)}\n\n{said}"


if __name__ == "__main__":
    tolerate_broken_pipe()
    sys.exit(main())
