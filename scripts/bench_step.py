#!/usr/bin/env python3
"""Compare the speed of each script's training step with that of the usual loops.

    python scripts/bench_step.py -a resnet18 -b 32 \\
        --cases examples,torchvision,nd,ddp
    python scripts/bench_step.py -a resnet50 -b 256 \\
        --cases examples+fp16,nd+fp16,O2,nd+fp16+compile
    python scripts/bench_step.py --data DATA --cases examples,nd+off \\
        --peer \\
        "timm=python ../timm/train.py {data} --model resnet18 -b 32 --epochs 1"

A case is the name of a loop, with + and additions. Loops of this suite: nd, dp, ddp, fsdp, and O0
to O3 (Apex). Other loops: examples and torchvision, from scripts/bench/peer_loops.py. Additions:
off, fp16 or bf16 (--amp), channels_last (examples, torchvision), compile, x2 (two processes), and
options of the loop as NAME=VALUE, such as compile=max-autotune or comm=int8.

Without --data, the bench times the training step alone, on one batch that is used again and again.
With --data, it trains an epoch on image files. Each case then trains on few images,
and again on more. Only the difference counts, so start-up and evaluation are not included. --peer
adds another project's script; the bench replaces {data} in its command by the folder.

Each ratio compares a case with the first one, and is the median over the rounds. On a CPU it
compares CPU time, which depends least on other programs. On a GPU it compares images/s. All cases
get --threads threads. Nothing else is tuned.

Exit code 75: the machine is too slow or too busy to measure any case.
"""

import argparse
import json
import math
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

from utils.start import launch, signals

launch.prepare()  # before torch is imported, which takes seconds

from utils.start.cores import usable_cores
from utils.start.option_types import DocstringFormatter, Parser, count, place, positive


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=DocstringFormatter)
    add = parser.add_argument
    add("-a", "--arch", default="resnet18", help="model (%(default)s)")
    add("-b", "--batch-size", type=positive, default=32, help="images per process (%(default)s)")
    text = "side of the crops (%(default)s)"
    add("--image-size", type=positive, default=224, metavar="PX", help=text)
    text, cases = "see above (%(default)s)", "examples,torchvision,nd"
    add("--cases", type=lambda x: x.split(","), default=cases, metavar="LIST", help=text)
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each case (%(default)s)")
    text = "threads per process (%(default)s)"
    add("--threads", type=positive, default=usable_cores(), help=text)
    text = "time limit of a run; a case that takes longer is left out (%(default)s)"
    add("--limit", type=positive, default=1800, metavar="SECONDS", help=text)
    add = parser.add_argument_group("from image files").add_argument
    add("--data", type=place, metavar="DATA", help="folder with train/ and val/")
    text = "data loading workers (%(default)s)"
    add("-j", "--workers", type=count, default=2, metavar="N", help=text)
    text = "images of the shorter run, at least one of each class (%(default)s)"
    add("--few", type=positive, default=64, metavar="N", help=text)
    text = "additional images of the longer run; images repeat if DATA has fewer (%(default)s)"
    add("--more", type=positive, default=256, metavar="N", help=text)
    text = "also time this command, in which {data} is replaced; may be repeated"
    add("--peer", action="append", default=[], metavar="NAME=COMMAND", help=text)
    return parser.parse_args(argv)


if __name__ == "__main__":
    parse(None)  # before torch is imported
    launch.print_first_line(sys.stderr)

from bench import commands, rounds

from utils.data.sources import SUFFIXES
from utils.start.errors import INTERRUPTED, UserError, exit_with
from utils.start.gpu_check import check_gpus

SCRIPTS = {name: f"imagenet_{name}.py" for name in ("nd", "dp", "ddp", "fsdp")}
SCRIPTS |= dict.fromkeys(("O0", "O1", "O2", "O3"), "imagenet_ddp_apex.py")
TIME_STEP = "scripts/bench/time_step.py"
PEERS = dict.fromkeys(("examples", "torchvision"), "scripts/bench/peer_loops.py")
ADDITIONS = {word: ["--amp", word] for word in ("off", "fp16", "bf16")}
ADDITIONS |= {"channels_last": ["--channels-last"], "compile": ["--compile", "default"]}
COLUMNS = {
    "images/s": ("images_per_s", ".1f"),
    "ms per step": ("ms_per_step", ".1f"),
    "CPU ms per image": ("cpu_ms_per_image", ".1f"),
    "host ms": ("host_ms_per_step", ".2f"),
    "GiB": ("peak_gib", ".2f"),
    "ratio": ("ratio", ".2f"),
}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    ends = (signal.SIGTERM, signal.SIGHUP)
    signals.handle(lambda number, _: sys.exit(128 + number), ends)  # the case, too
    check_gpus()
    print(page(measure(args), args))
    return 0


def command(case: str, args: argparse.Namespace, out: Path, data: Path | None = None) -> list[str]:
    """Build the command that times a step, or trains an epoch on ``data``. Raises: `UserError`."""
    kind, *words = case.split("+")
    if kind not in SCRIPTS | PEERS:
        raise UserError(f"--cases: {kind!r} is not one of {', '.join(SCRIPTS | PEERS)}")
    alone = kind in ("nd", "dp")  # without torchrun
    processes = 0 if alone or kind in PEERS else 1
    options = ["-a", args.arch, "-b", str(args.batch_size), "--image-size", str(args.image_size)]
    options += ["--opt-level", kind] if kind.startswith("O") else []
    for word in words:
        if re.fullmatch(r"x[1-9]\d*", word) and not alone:
            processes = int(word[1:])
        elif word in ADDITIONS:
            options += ADDITIONS[word]
        elif re.fullmatch(r"\w[\w-]*=.+", word):
            options.append(f"--{word}")
        else:
            raise UserError(f"--cases {case}: {kind} cannot be combined with {word!r}")
    options += ["-j", str(args.workers)] if data else []
    if kind in PEERS:
        options = [PEERS[kind], kind, *options, *(["--data", str(data)] if data else [])]
    else:
        start = [SCRIPTS[kind]] if data else [TIME_STEP, SCRIPTS[kind].removesuffix(".py")]
        options = [*start, *options, "--lr", "0.001"]
        if data:
            options += ["--output-dir", str(out), "--name", "case", "--epochs", "1", str(data)]
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [sys.executable, *(run if processes else ()), str(ROOT / options[0]), *options[1:]]


# ---- measuring


def run(words: list[str], args: argparse.Namespace, folder: Path = ROOT) -> str:
    """Run a command in ``folder``. Returns: its output. Raises: `UserError`."""
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "passive"}
    advice = ": a smaller -b, --image-size or --arch, or a larger --limit"
    return commands.run([words], args.limit, advice, cwd=folder, env=env)[0]


def measure(args: argparse.Namespace) -> dict[str, list[rounds.Figures]]:
    """Return the figures of each case, by round. A case that fails is reported and left out."""
    for case in args.cases:
        command(case, args, Path())
    peers = dict(one.partition("=")[::2] for one in args.peer)
    if not all(peers.values()) or (peers and not args.data):
        raise UserError("--peer takes NAME=COMMAND, and needs --data")
    with tempfile.TemporaryDirectory() as place:
        runs = Path(place) / "runs"
        few_and_more = link_images(args, Path(place)) if args.data else []

        def figures_of(case: str) -> rounds.Figures:
            if args.data:
                return difference(case, peers, args, few_and_more, runs)
            one = json.loads(run(command(case, args, runs), args).splitlines()[-1])
            one["peak_gib"] = one["peak_memory_bytes"] / 2**30
            images = args.batch_size  # of a step of this process; the usual loops do not say it
            if "global_batch" in one:
                images = one["global_batch"] / one["world_size"]
            return one | {"cpu_ms_per_image": one["cpu_ms_per_step"] / images}

        return rounds.measure((*peers, *args.cases), args.rounds, figures_of)


def link_images(args: argparse.Namespace, place: Path) -> list[Path]:
    """Make two data sets of links to images of ``--data``: --few images, or one of each class if
    these are more, and --more in addition."""
    train = args.data / "train"
    classes = sorted(path for path in train.iterdir() if path.is_dir()) if train.is_dir() else []
    images = [sorted(p for p in one.iterdir() if p.suffix.lower() in SUFFIXES) for one in classes]
    if not images or not all(images):
        raise UserError(f"{train} has no classes with images: name another folder with --data")
    folders, few = [place / "few", place / "more"], max(args.few, len(classes))
    for folder, images_to_train in zip(folders, (few, few + args.more), strict=True):
        val = max(args.batch_size, len(classes))
        for part, total in (("train", images_to_train), ("val", val)):
            for number in range(total):
                turn, group = divmod(number, len(classes))
                source = images[group][turn % len(images[group])].resolve()
                link = folder / part / classes[group].name / f"{turn:06}{source.suffix}"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(source)
    return folders


def difference(
    case: str, peers: dict[str, str], args: argparse.Namespace, few_and_more: list[Path], runs: Path
) -> rounds.Figures:
    """Time per image: a run on more images, minus a run on few. Raises: `UserError`."""
    # The first run of a case is not counted: it reads libraries from disk, and cuDNN chooses and
    # compiles kernels, which may take longer than the images.
    times = []
    for data in (few_and_more[0], *few_and_more):
        words = [word.replace("{data}", str(data)) for word in shlex.split(peers.get(case, ""))]
        # A peer writes where it runs, so that is ``runs``; its files are named from here.
        named = [x for x in words if "/" in x or x.endswith(".py")]
        words = [os.path.abspath(x) if x in named and os.path.exists(x) else x for x in words]
        runs.mkdir(exist_ok=True)
        began, cpu = time.perf_counter(), rounds.cpu_seconds()
        run(words or command(case, args, runs, data), args, runs if words else ROOT)
        times.append((time.perf_counter() - began, rounds.cpu_seconds() - cpu))
        shutil.rmtree(runs, ignore_errors=True)
    _, (few, few_cpu), (more, more_cpu) = times
    if more <= few or more_cpu <= few_cpu:
        raise UserError(
            f"the shorter run took {few:.1f} s ({few_cpu:.1f} s of CPU time), {args.more} images "
            f"more {more:.1f} s ({more_cpu:.1f} s): increase --more, or use a less busy machine",
            code=INTERRUPTED,
        )
    factors = map(int, re.findall(r"\+(?:x|accum-steps=)(\d+)", case))  # of a step
    return {
        "images_per_s": args.more / (more - few),
        "ms_per_step": 1000 * (more - few) * math.prod(factors, start=args.batch_size) / args.more,
        "cpu_ms_per_image": 1000 * (more_cpu - few_cpu) / args.more,
    }


def page(results: dict[str, list[rounds.Figures]], args: argparse.Namespace) -> str:
    """Return the table in Markdown, and a description of the measurement."""
    import torch

    device, key, what = f"the CPU, {args.threads} threads", "cpu_ms_per_image", "CPU time"
    if torch.cuda.is_available():
        device, key, what = torch.cuda.get_device_name(), "images_per_s", "images/s"
    about = (
        f"{args.arch}, {args.batch_size} images of {args.image_size} pixels per step and process, "
        f"{'from image files, read and trained' if args.data else 'the step alone'}, on {device}; "
        f"torch {torch.__version__}. Medians of {args.rounds} interleaved rounds. The ratio "
        f"compares {what} with the first row."
    )
    base = next(iter(results.values()))
    for case, each in results.items():
        rounds.add_ratio(each, base, key)
        waits = {place for one in each for place in one.get("host_waits", ())}
        if waits:
            names = ", ".join(sorted("/".join(Path(place).parts[-2:]) for place in waits))
            about += f" In a step of {case} the host waits for the GPU: {names}."
    return f"{rounds.table('case', results, COLUMNS)}\n\n{about}"


if __name__ == "__main__":
    exit_with(main)
