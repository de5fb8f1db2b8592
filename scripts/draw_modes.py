#!/usr/bin/env python3
"""Draw the memory of two GPUs in each mode, and the data they exchange in a training step.

    python scripts/draw_modes.py                       # writes figures/modes.png
    python scripts/draw_modes.py --out modes.svg

utils/MODES.md explains the picture. Its content is the table `MODES`; nothing is measured.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils import launch

launch.prepare()  # before torch is imported, which takes seconds

from compare import pictures

from utils.errors import UserError, exit_with

COLOURS = {"weights": "#9cc4e4", "gradients": "#f4b183"}
COLOURS |= {"momentum": "#b7d7a8", "masters": "#d9c2e9"}
BOX, BAR = 3.0, 2.7  # widths: the box of a GPU; a bar of 4 bytes per weight
# Parts of these 4 bytes on GPU 0 and GPU 1: (begin, end). "/": a temporary copy.
ALL, HALF, SHARDS = [(0, 1), (0, 1)], [(0, 0.5), (0, 0.5)], [(0, 0.5), (0.5, 1)]
MODES = {  # title: processes, tensors: (name, parts, temporary on), a step: (arrow, label)
    "DP: imagenet_dp.py": (1, [
        ("weights", ALL, " /"), ("gradients", ALL, " /"), ("momentum", [(0, 1), (0, 0)], "  "),
    ], [
        ("->", "1 forward: images and\nall weights, every time"),
        ("<-", "logits; GPU 0\ncomputes the loss"),
        ("<-", "2 after backward: all\ngradients, summed"),
        ("", "3 step: GPU 0 alone"),
    ]),
    "DDP: imagenet_ddp.py": (2, [
        ("weights", ALL, "  "), ("gradients", ALL, "  "), ("momentum", ALL, "  "),
    ], [
        ("", "1 forward: nothing"),
        ("<->", "2 while backward\ncomputes: all-reduce\nof gradients"),
        ("", "3 step: the same\nin both processes"),
    ]),
    "FSDP: imagenet_fsdp.py": (2, [
        ("a block's weights", HALF, "//"), ("weights", SHARDS, "  "),
        ("gradients", SHARDS, "  "), ("momentum", SHARDS, "  "),
    ], [
        ("<->", "1 forward: all-gather\nweights, block by block"),
        ("<->", "2 backward: gather\nagain; reduce-scatter\ngradients"),
        ("", "3 step: each process\nupdates its own shard"),
    ]),
    "Apex O2: imagenet_ddp_apex.py": (2, [
        ("float16 weights", HALF, "  "), ("float16 gradients", HALF, "  "),
        ("float32 gradients", ALL, "//"), ("float32 masters", ALL, "  "),
        ("float32 momentum", ALL, "  "),
    ], [
        ("", "1 forward: nothing"),
        ("<->", "2 while backward\ncomputes: all-reduce\nof float16 gradients"),
        ("", "3 step: masters first, or\nall skip it (overflow)"),
    ]),
}  # fmt: skip


def draw_mode(axes: Any, title: str) -> None:
    """Draw one mode: two GPUs and their memory, and the phases of a step between them."""
    from matplotlib.patches import FancyBboxPatch

    processes, tensors, phases = MODES[title]
    axes.set(xlim=(-0.3, 10.3), ylim=(-0.9, 5.5))
    axes.axis("off")
    axes.set_title(title, weight="bold", loc="left")

    def box(left: float, low: float, width: float, height: float, **looks: Any) -> None:
        axes.bar(left, height, width, low, align="edge", **looks)

    frames = [(0, 10)] if processes == 1 else [(0, BOX), (10 - BOX, BOX)]
    for number, (left, width) in enumerate(frames):
        looks = {"boxstyle": "round,pad=0.2", "ls": "--", "fc": "none", "ec": "0.5"}
        axes.add_patch(FancyBboxPatch((left, -0.55), width, 5.8, **looks))
        axes.text(left + width / 2, -0.5, f"process {number}", ha="center", color="0.4")
    for gpu, left in enumerate((0, 10 - BOX)):
        box(left, 0, BOX, 5.2, fc="0.95", ec="black")
        axes.text(left + BOX / 2, 4.65, f"GPU {gpu}", ha="center", weight="bold")
        space, begins = min(1.1, 4.45 / len(tensors)), left + (BOX - BAR) / 2
        for row, (name, parts, temporary) in enumerate(tensors, 1):
            (begin, end), low, high = parts[gpu], 4.5 - space * row, space - 0.15
            box(begins, low, BAR, high, fill=False, ec="0.75", ls=":")
            if end > begin:
                looks = {"fc": COLOURS[name.split()[-1]], "hatch": 3 * temporary[gpu].strip()}
                box(begins + begin * BAR, low, (end - begin) * BAR, high, ec="white", **looks)
                side, x = ("right", BAR - 0.07) if begin else ("left", 0.07)
                axes.text(begins + x, low + high / 2, name, ha=side, va="center", size=9.5)
    for row, (arrow, label) in enumerate(phases):
        top = 4.95 - row * 4.9 / len(phases)
        axes.text(5, top, label, ha="center", va="top", size=11)
        if arrow:
            low = top - 0.2 - 0.42 * len(label.splitlines())
            ends = (10 - BOX - 0.35, low), (BOX + 0.35, low)
            axes.annotate("", *ends, arrowprops={"arrowstyle": arrow, "lw": 2, "color": "#8e1f24"})


def main() -> int:
    looks = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=looks)
    text = "picture to write: PNG, SVG or PDF (default: figures/modes.png)"
    parser.add_argument("--out", type=Path, default=ROOT / "figures/modes.png", help=text)
    out = parser.parse_args().out
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.6), dpi=140, layout="constrained", facecolor="white")
    for axes, title in zip(figure.subplots(2, 2).flat, MODES, strict=True):
        draw_mode(axes, title)
    text = "Width of a bar: bytes per weight (dotted frame: 4). Hatched: a temporary copy."
    figure.supxlabel(f"{text} Activations are not shown.", size=11)
    try:
        pictures.save(figure, out)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {out}: {error}: name another file with --out") from None
    return 0


if __name__ == "__main__":
    exit_with(main)
