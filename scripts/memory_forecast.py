#!/usr/bin/env python3
"""What will a batch take of a GPU's memory, and how large may it be? No GPU is needed.

    python scripts/memory_forecast.py -a vit_b_32 -b 256 --amp fp16 --gpu-memory 16 --mode fsdp \\
        --processes 4
    python scripts/memory_forecast.py -a resnet50 --mode O2 --gpu-memory 14.7
    python scripts/memory_forecast.py --measured runs/one runs/two

The second only says how large a batch may be: what -b auto of the training scripts should find
there. --measured puts the forecast beside what runs have taken: on a GPU any run, on a CPU those
with -b auto, --dummy among them. The model is scripts/forecast/memory.py; it says what is left out.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import utils.launch.installed  # noqa: E402, F401 (a missing package becomes one sentence)

from forecast import memory  # noqa: E402
from forecast.memory import Forecast, Plan  # noqa: E402

from utils.errors import UserError, go_on_without_reader, report  # noqa: E402
from utils.model import models  # noqa: E402
from utils.option_types import amount, number, positive  # noqa: E402
from utils.train.largest_batch import MARGIN  # noqa: E402
from utils.train.memory import GIB  # noqa: E402

MIB = 2**20


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        print(beside_measured(args.measured) if args.measured else answer(args))
    except UserError as error:
        return report(error)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-a", "--arch", default="resnet50", help="any model of the training scripts (%(default)s)")
    add("-b", "--batch-size", type=positive, metavar="N",
        help="images per process, of nd and dp in all; else only the largest is named")  # fmt: skip
    add("--gpu-memory", type=number(float, 0, exclusive=True), metavar="GIB",
        help="of each GPU, as nvidia-smi shows it: a T4's 16 GB are 15 GiB")  # fmt: skip
    add("--mode", choices=memory.MODES, default="ddp",
        help="nd, dp, ddp, fsdp: the scripts; O2: imagenet_ddp_apex.py (%(default)s)")  # fmt: skip
    add("--processes", type=positive, default=1, metavar="N", help="GPUs in all (%(default)s)")
    add("--processes-per-node", type=positive, metavar="N", help="for --reshard node (all)")
    add("--reshard", choices=memory.RESHARD, default="full", help="as in imagenet_fsdp.py")
    add("--amp", choices=tuple(memory.DTYPES), default="fp16", help="(%(default)s)")
    add("--optimizer", choices=tuple(memory.OPTIMIZERS), default="sgd", help="(%(default)s)")
    add("--image-size", type=positive, default=224, metavar="PX", help="(%(default)s)")
    add("--classes", type=positive, default=1000, metavar="N", help="(%(default)s)")
    add("--accum-steps", type=positive, default=1, metavar="N", help="(%(default)s)")
    add("--reserve", type=amount, default=memory.RESERVE, metavar="GIB",
        help="of the GPU, for CUDA and its libraries: an assumption (%(default)s)")  # fmt: skip
    add("--measured", nargs="+", type=Path, metavar="RUN", help="run directories")
    args = parser.parse_args(argv)
    if not args.measured and args.batch_size is None and args.gpu_memory is None:
        parser.error("say -b, --gpu-memory or both")
    return args


def answer(args: argparse.Namespace) -> str:
    """The forecast that was asked for. Raises: `UserError`."""
    models.check_name(args.arch)
    local = args.processes_per_node or args.processes
    plan = Plan(args.arch, args.mode, args.amp, args.optimizer, args.image_size, args.classes,
                args.processes, local, args.reshard, args.accum_steps)  # fmt: skip
    lines = []
    if args.batch_size:
        found = memory.forecast(plan, args.batch_size)
        lines += [describe(plan, args.batch_size), parts(found)]
        whole = found.total / GIB + args.reserve
        lines += [
            f"and about {args.reserve:g} GiB for CUDA and its libraries (assumed): {whole:.2f} GiB"
            + (f", {whole / args.gpu_memory:.0%} of the GPU's" if args.gpu_memory else "")
        ]
    if args.gpu_memory:
        largest = memory.largest_batch(plan, args.gpu_memory, args.reserve)
        whole = "in all" if plan.mode in ("nd", "dp") else "per process"
        lines += [
            f"largest batch on {args.gpu_memory:g} GiB: {largest} images {whole} (a multiple of "
            f"8; {MARGIN:.0%} left free, as by -b auto)"
            if largest
            else f"not even 8 images of {args.image_size} pixels fit on {args.gpu_memory:g} GiB"
        ]
    return "\n".join(lines)


def describe(plan: Plan, batch: int) -> str:
    """What the forecast is of, in a line."""
    precision = "O2" if plan.mode == "O2" else f"amp {plan.amp}"
    gpus = f"{plan.processes} GPU{'s' * (plan.processes > 1)}"
    how = f"{plan.mode} on {gpus}" + (f", reshard {plan.reshard}" if plan.mode == "fsdp" else "")
    return (
        f"{plan.arch}, {how}, {batch} images of {plan.image_size} pixels per "
        f"{'step' if plan.mode in ('nd', 'dp') else 'process'}, {precision}, {plan.optimizer}:"
    )


def parts(found: Forecast) -> str:
    """The parts of a forecast, one a line."""
    rows = [[name, f"{size / MIB:.0f}"] for name, size in vars(found).items()]
    rows.append(["together", f"{found.total / MIB:.0f}"])
    return aligned([["", "MiB per process"], *rows])


def beside_measured(runs: list[Path]) -> str:
    """A table: what runs have taken, the forecast, and its error. Raises: `UserError`."""
    rows = []
    for run in runs:
        plan, batch, measured = read(run)
        found = memory.forecast(plan, batch).total
        precision = "O2" if plan.mode == "O2" else plan.amp
        where = "CPU (counted)" if plan.on_cpu else "GPU (allocator)"
        rows.append(
            [f"{plan.arch} {plan.image_size} px", f"{plan.mode} x{plan.processes}", precision,
             plan.optimizer, str(batch), where, f"{measured / MIB:.0f}", f"{found / MIB:.0f}",
             f"{found / measured - 1:+.1%}"]
        )  # fmt: skip
    head = ["model", "mode", "precision", "optimizer", "batch", "on"]
    return aligned([[*head, "measured MiB", "forecast MiB", "error"], *rows])


def aligned(rows: list[list[str]]) -> str:
    """Rows as lines, their cells below each other."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(pairs))
        for pairs in (list(zip(row, wide, strict=True)) for row in rows)
    )


def read(run: Path) -> tuple[Plan, int, float]:
    """What a run trained, its batch, and the peak of its tensors in bytes. Raises: `UserError`."""
    options, summary = (_json(run / name) for name in ("options.json", "summary.json"))
    measured = summary.get("tensor_peak_bytes")
    if measured is None:
        raise UserError(f"{run} has not recorded what its tensors took: on a CPU take -b auto")
    level = options.get("opt_level")
    if level not in (None, "O2"):
        raise UserError(f"{run} is of opt level {level}: there is a forecast of O2 alone")
    mode = "O2" if level else options["mode"]
    processes = summary["world_size"]
    plan = Plan(
        options["arch"],
        mode,
        "off" if level else options.get("precision", "off"),
        options.get("optimizer") or "sgd",
        options["image_size"],
        int(options.get("dummy_classes") or summary.get("classes") or 1000),
        processes,
        processes // summary["nodes"],
        options.get("reshard") or "full",
        options["accum_steps"],
        on_cpu=summary["device"] == "cpu",
    )
    return plan, options["batch_size"], float(measured)


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as fault:
        raise UserError(f"{path} cannot be read: is it of a run that has ended?") from fault


if __name__ == "__main__":
    go_on_without_reader()
    sys.exit(main())
