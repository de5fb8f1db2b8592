#!/usr/bin/env python3
"""What each way to exchange gradients costs in accuracy: Fashion-MNIST, 4 processes, some seeds.

    python scripts/prepare_data.py fashion-mnist data/fashion
    python tests/trials/comm_accuracy.py data/fashion

Each run trains ResNet-18 with imagenet_ddp.py for equal epochs. One that is finished already is not
repeated; the table at the end shows all that are there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from compare.table import markdown_table  # noqa: E402

from utils.errors import UserError, report  # noqa: E402

METHODS = "fp32,fp16,bf16,int8,int4,powersgd:4,powersgd:8"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, metavar="DATA", help="Fashion-MNIST as image folders")
    parser.add_argument("--methods", default=METHODS, metavar="LIST", help="(%(default)s)")
    parser.add_argument("--seeds", default="0,1,2", metavar="LIST", help="(%(default)s)")
    parser.add_argument("--processes", type=int, default=4, metavar="N", help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=1, metavar="N", help="(%(default)s)")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs/comm", metavar="DIR")
    args = parser.parse_args()
    methods, seeds = args.methods.split(","), args.seeds.split(",")
    try:
        for seed in seeds:
            for method in methods:
                train(args, method, seed)
    except UserError as error:
        return report(error)
    print(table({m: [found(args, m, seed) for seed in seeds] for m in methods}))
    return 0


def folder(args: argparse.Namespace, method: str, seed: str) -> Path:
    return args.output_dir / f"{method.replace(':', '_')}_e{args.epochs}_seed{seed}"


def found(args: argparse.Namespace, method: str, seed: str) -> float | None:
    """Top-1 of the last epoch in per cent; None for a run that is not finished."""
    file = folder(args, method, seed) / "summary.json"
    summary = json.loads(file.read_text()) if file.is_file() else {"epochs_done": 0}
    return summary["val_top1"] if summary["epochs_done"] == args.epochs else None


def train(args: argparse.Namespace, method: str, seed: str) -> None:
    place = folder(args, method, seed)
    if found(args, method, seed) is not None:
        return
    options = (
        f"-a resnet18 -b 64 --image-size 28 --val-resize-size 28 --crop-scale 0.8 --lr 0.05 "
        f"--lr-schedule cosine -j 1 -p 50 --epochs {args.epochs} --seed {seed} --comm {method} "
        f"--name {place.name} --resume auto --output-dir {place.parent}"
    )
    command = [sys.executable, "imagenet_ddp.py", "-g", str(args.processes), *options.split()]
    place.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with open(place / "output.log", "a") as log:
        code = subprocess.call(
            [*command, str(args.data.resolve())], cwd=ROOT, env=env, stdout=log, stderr=log
        )
    if code:
        raise UserError(f"the run ended with exit code {code}: see {place / 'output.log'}")
    print(f"{method}, seed {seed}: {found(args, method, seed):.2f} %", flush=True)


def table(results: dict[str, list[float]]) -> str:
    """A Markdown table: each seed's top-1, mean and spread, and the mean difference to float32."""
    plain = results.get("fp32")
    rows = []
    for method, tops in results.items():
        mean = statistics.fmean(tops)
        less = f"{mean - statistics.fmean(plain):+.2f}" if plain else "-"
        figures = (f"{figure:.2f}" for figure in (*tops, mean, max(tops) - min(tops)))
        rows.append([method, *figures, less])
    count = len(next(iter(results.values())))
    head = ["method", *(f"seed {n}" for n in range(count)), "mean", "spread", "- fp32"]
    return markdown_table(head, rows)


if __name__ == "__main__":
    sys.exit(main())
