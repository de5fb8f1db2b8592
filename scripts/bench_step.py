#!/usr/bin/env python3
"""Compare the speed of each script's training step with that of the usual loops.

    python scripts/bench_step.py -a resnet18 -b 32 --cases examples,torchvision,nd,ddp
    python scripts/bench_step.py -a resnet50 -b 256 --cases examples+fp16,nd+fp16,O2,nd+fp16+compile
    python scripts/bench_step.py --data DATA --cases examples,nd+off \\
        --peer "timm=python ../timm/train.py {data} --model resnet18 -b 32 -j 2 --epochs 1"

A case is the name of a loop, with + and additions. Loops of this suite: nd, dp, ddp, fsdp, and O0
to O3 (Apex). Other loops: examples and torchvision, from scripts/bench/peer_loops.py. Additions:
off, fp16 or bf16 (--amp), channels_last (examples, torchvision), compile or compile=MODE,
comm=METHOD (ddp only), x2 (two processes).

Without --data, the bench times the training step alone, on one batch that is used again and again.
With --data, it trains an epoch on image files and evaluates. Each case then trains on few images,
and again on more. Only the difference counts, so start-up and evaluation are not included. --peer
adds a script of another project; {data} in its command is replaced by the folder.

Each ratio compares a case with the first one, and is the median over the rounds. On a CPU it
compares CPU time, which other programs disturb least; on a GPU, images/s. All cases get --threads
threads. Nothing else is tuned.

Exit code 75: the machine is too slow or too busy to measure any case.
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
    add("-a", "--arch", default="resnet18", help="model (%(default)s)")
    add("-b", "--batch-size", type=positive, default=32, help="images per process (%(default)s)")
    add(
        "--image-size",
        type=positive,
        default=224,
        metavar="PX",
        help="side of the crops (%(default)s)",
    )
    add(
        "--cases", default="examples,torchvision,nd", metavar="LIST", help="see above (%(default)s)"
    )
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each case (%(default)s)")
    text = "threads per process (%(default)s)"
    add("--threads", type=positive, default=launch.usable_cores(), help=text)
    text = "longest run of a case; a case that takes longer is left out (%(default)s)"
    add("--limit", type=positive, default=1800, metavar="SECONDS", help=text)
    group = parser.add_argument_group("from image files")
    group.add_argument("--data", type=Path, metavar="DATA", help="folder with train/ and val/")
    text = "data loading workers (%(default)s)"
    group.add_argument("-j", "--workers", type=count, default=2, metavar="N", help=text)
    text = "images of the shorter run (%(default)s)"
    group.add_argument("--few", type=positive, default=64, metavar="N", help=text)
    text = "additional images of the longer run; images repeat if DATA has fewer (%(default)s)"
    group.add_argument("--more", type=positive, default=256, metavar="N", help=text)
    text = "also time this command, in which {data} is replaced; may be repeated"
    group.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help=text)
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
    """The command that times a case's step, or trains an epoch on ``data``."""
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
    """Run a command. Returns: its output, wall seconds and CPU seconds. Raises: `UserError`."""
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "passive"}
    late = f"takes longer than --limit {args.limit} seconds: a smaller -b, --image-size or "
    late += "--arch, or a larger --limit"
    began, cpu = time.perf_counter(), _children_cpu()
    (done,) = commands.run([words], args.limit, late, cwd=folder, env=env)
    if done.returncode:
        reason = commands.last_lines(done) or done.returncode
        raise UserError(f"{shlex.join(words)} failed: {reason}")
    return done.stdout, time.perf_counter() - began, _children_cpu() - cpu


def _children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


def measure(args: argparse.Namespace) -> dict[str, list[rounds.Figures]]:
    """The figures of each case, by round. A case that fails is reported and left out."""
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
    """The figures of `utils.extras.dummy.time_steps` for a case. Raises: `UserError`."""
    shutil.rmtree(runs, ignore_errors=True)
    printed = run(command(case, args, runs), args, ROOT)[0]
    summary = runs / "case" / "summary.json"
    figures = json.loads(summary.read_text() if summary.exists() else printed.splitlines()[-1])
    return figures | {"cpu_ms_per_image": figures["cpu_ms_per_step"] / args.batch_size}


def few_and_more(args: argparse.Namespace, place: Path) -> tuple[Path, ...]:
    """Two data sets of links to the images of ``--data``, and an empty folder for runs."""
    train = args.data / "train"
    classes = sorted(path for path in train.iterdir() if path.is_dir()) if train.is_dir() else []
    images = [sorted(p for p in one.iterdir() if p.suffix.lower() in SUFFIXES) for one in classes]
    if not images or not all(images):
        raise UserError(f"{train} has no classes with images")
    folders = []
    for name, images_to_train in (("few", args.few), ("more", args.few + args.more)):
        for part, total in (("train", images_to_train), ("val", args.batch_size)):
            for number in range(max(total, len(classes))):
                group, turn = number % len(classes), number // len(classes)
                source = images[group][turn % len(images[group])].resolve()
                link = place / name / part / classes[group].name / f"{turn:06}{source.suffix}"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source)
        folders.append(place / name)
    return (*folders, place / "runs")


def difference(
    case: str, peers: dict[str, str], args: argparse.Namespace, folders: tuple[Path, ...]
) -> rounds.Figures:
    """Time per image: a run on more images, minus a run on few. Raises: `UserError`."""
    *sets, runs = folders
    # The first run of a case is not counted: it reads libraries from disk, and cuDNN chooses and
    # compiles kernels, which may take longer than the images.
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
            f"{more:.1f} s ({more_cpu:.1f} s): increase --more, or use a less busy machine",
            code=INTERRUPTED,
        )
    return {
        "images_per_s": args.more / (more - few),
        "ms_per_step": 1000 * (more - few) * args.batch_size / args.more,
        "cpu_ms_per_image": 1000 * (more_cpu - few_cpu) / args.more,
    }


# ---- the table


def page(results: dict[str, list[rounds.Figures]], args: argparse.Namespace) -> str:
    """The table in Markdown, and what was measured."""
    import torch

    cuda = torch.cuda.is_available()
    first, middle = next(iter(results.values())), rounds.middle
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
    about = (
        f"{args.arch}, {args.batch_size} images of {args.image_size} pixels per step and process, "
        f"{what}, on {device}; torch {torch.__version__}. Medians of {args.rounds} interleaved "
        f"rounds. The ratio compares {'images/s' if cuda else 'CPU time'} with the first row."
    )
    for case, each in results.items():
        waits = {place for one in each for place in one.get("host_waits", ())}
        names = sorted("/".join(Path(place).parts[-2:]) for place in waits)
        if names:
            about += f" In a step of {case} the host waits for the GPU: {', '.join(names)}."
    return f"{rounds.table('case', results, columns)}\n\n{about}"


if __name__ == "__main__":
    tolerate_broken_pipe()
    sys.exit(main())
