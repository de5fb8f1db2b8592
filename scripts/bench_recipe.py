#!/usr/bin/env python3
"""The time that recipes take to an accuracy: several seeds each, in interleaved order.

    python scripts/bench_recipe.py "3 epochs=-a resnet18 --epochs 3 --image-size 48" tiny \\
        --data data/fashion --target-top1 90 --seeds 0,1,2 --results

An arm is a recipe (a name or file, as for --recipe), or LABEL=OPTIONS as typed, which may have a
--recipe among them. Each arm is trained once with each seed until it reaches the target or its
epochs end, in an order that turns round from seed to seed, so that what else the machine does meets
all of them. The first arm is the one that the others are compared with: the ratio is its time by
theirs, per seed.

Time is that of compare_runs.py: from the start of training to the end of the evaluation that
reaches the target. The runs are kept in --out; an interrupted comparison goes on there.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import utils.launch.installed  # noqa: E402, F401 (a missing package becomes one sentence)

from bench import network_table  # noqa: E402
from compare import runs  # noqa: E402
from compare import table as tables  # noqa: E402

from utils import option_types  # noqa: E402
from utils.atomic import save_atomically  # noqa: E402
from utils.errors import UserError, go_on_without_reader, report  # noqa: E402
from utils.launch import supervise  # noqa: E402
from utils.option_types import accuracy, positive  # noqa: E402
from utils.run import provenance  # noqa: E402

FIGURES = "figures.json"  # in a run's folder: what is not in its event file

Figures = dict[str, Any]
Found = dict[str, dict[int, Figures]]  # arm -> seed -> its figures


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and end the run
    try:
        finish(args, measure(args), sys.argv[1:] if argv is None else argv)
    except UserError as error:
        return report(error)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("arms", nargs="+", metavar="RECIPE|LABEL=OPTIONS", help="what is to be compared")
    add("--data", type=Path, required=True, help="with train/ and val/")
    add("--target-top1", type=accuracy, required=True, metavar="A", help="0.9 and 90 are the same")
    add("--seeds", default="0,1,2", metavar="LIST", help="(%(default)s)")
    add("--script", default="imagenet_nd.py", help="(%(default)s)")
    text = "of all arms, as typed: --options '-j 2'; what an arm says itself wins"
    add("--options", default="", metavar="OPTIONS", help=text)
    add("--threads", type=positive, default=supervise.usable_cores(), help="(%(default)s)")
    text = "folder of the runs (default: %(default)s)"
    add("--out", type=Path, default=Path("runs/bench_recipe"), metavar="DIR", help=text)
    text = "also write the table into this file (default: %(const)s)"
    add("--results", nargs="?", type=Path, const=Path("RESULTS.md"), metavar="FILE", help=text)
    add("--title", default="Time to accuracy", help="of the section in --results")
    return parser.parse_args(argv)


def arms_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """The options of each arm, by label. Raises: `UserError`."""
    found: dict[str, list[str]] = {}
    for text in args.arms:
        label, equals, typed = text.partition("=")
        words = shlex.split(typed) if equals else ["--recipe", text]
        if not equals:
            label = option_types.recipe_file(text).stem
        if label in found:
            raise UserError(f"two arms are called {label}: give LABEL=OPTIONS")
        found[label] = [*shlex.split(args.options), *words]
    return found


def measure(args: argparse.Namespace) -> Found:
    """Train all that is not trained yet. Raises: `UserError`."""
    arms = arms_of(args)
    seeds = [int(text) for text in args.seeds.split(",")]
    found: Found = {label: {} for label in arms}
    for number, seed in enumerate(seeds):
        for label in list(arms) if number % 2 == 0 else list(arms)[::-1]:
            name = "".join(c if c.isalnum() else "_" for c in label) + f"_seed{seed}"
            command = [sys.executable, str(ROOT / args.script), *arms[label], "--seed", str(seed)]
            command += ["--desired-acc", f"{args.target_top1:g}", "--name", name]
            command += ["--output-dir", str(args.out), str(args.data)]
            figures = trained(command, args.out / name, args)
            figures |= reached(args.out / name, args.target_top1)
            found[label][seed] = figures
            print(f"{label}, seed {seed}: {in_words(figures)}", file=sys.stderr, flush=True)
    return found


def trained(command: list[str], folder: Path, args: argparse.Namespace) -> Figures:
    """Wall and CPU seconds of a training, which is done now unless it was done before."""
    file = folder / FIGURES
    if file.is_file():
        figures = json.loads(file.read_text())
        if figures["command"] == command[1:] and figures["threads"] == args.threads:
            return figures
    shutil.rmtree(folder, ignore_errors=True)
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "passive"}
    began, before = time.perf_counter(), _children_cpu()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "last.log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            log.seek(0)
            last = [line for line in log.read().splitlines() if line.strip()][-1:]
            raise UserError(f"{shlex.join(command)} failed: {''.join(last)}")
    figures = {
        "command": command[1:],
        "threads": args.threads,
        "wall_s": time.perf_counter() - began,
        "cpu_s": _children_cpu() - before,
    }
    text = json.dumps(figures, indent=1) + "\n"
    save_atomically(lambda out: out.write(text.encode()), file)
    return figures


def _children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


def reached(folder: Path, target: float) -> Figures:
    """The epochs and seconds until a run reached ``target`` (None: never), and its best top-1."""
    run = runs.read(folder)
    first = run.reached(target)
    hours = run.hours.get(first)
    return {
        "best_top1": run.best("Top1/val")[0],
        "epochs": first,
        "seconds": None if hours is None else 3600 * hours,
    }


def in_words(figures: Figures) -> str:
    """One run's figures, for the terminal."""
    top1 = f"best top-1 {figures['best_top1'] or 0:.2f} %, {figures['cpu_s']:.0f} CPU s in all"
    if figures["seconds"] is None:
        return f"not reached; {top1}"
    return f"reached after {figures['seconds']:.0f} s, {figures['epochs']} epochs; {top1}"


# ---- the table


def spread(values: list[float], form: str = ".0f") -> str:
    """Median (lowest to highest); "-" without values."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{median(values):{form}} ({low:{form}} to {high:{form}})"


def ratios(found: Found, label: str, key: str) -> list[float]:
    """The first arm's ``key`` by that of ``label``, for each seed with which both reached it."""
    first = next(iter(found.values()))
    pairs = [(first[seed], one) for seed, one in found[label].items() if seed in first]
    return [a[key] / b[key] for a, b in pairs if a["seconds"] and b["seconds"]]


def table(found: Found) -> tuple[list[str], list[list[str]]]:
    """Head and rows: medians, lowest and highest over the seeds that reached the target."""
    head = ["recipe", "reached", "seconds to target", "epochs", "CPU s of the run"]
    head += ["best top-1, %", "ratio of time", "ratio of CPU time"]
    rows = []
    for label, seeds in found.items():
        done = [one for one in seeds.values() if one["seconds"] is not None]
        row = [label, f"{len(done)} of {len(seeds)}", spread([one["seconds"] for one in done])]
        row.append(spread([one["epochs"] for one in done]))
        row.append(spread([one["cpu_s"] for one in seeds.values()]))
        row.append(spread([one["best_top1"] for one in seeds.values() if one["best_top1"]], ".2f"))
        row += [spread(ratios(found, label, key), ".2f") for key in ("seconds", "cpu_s")]
        rows.append(row)
    return head, rows


def finish(args: argparse.Namespace, found: Found, argv: list[str]) -> None:
    """Print the table, and write what was asked for. Raises: `UserError`."""
    import torch

    head, rows = table(found)
    print(network_table.as_text(head, rows))
    cuda = torch.cuda.is_available()
    machine = provenance.describe(torch.device("cuda" if cuda else "cpu"))
    where = machine.get("gpu") or f"{args.threads} threads of {machine.get('cpu')}"
    first = next(iter(found))
    said = [
        f"Top-1 of {args.target_top1:g} % on {args.data}, {args.script}, seeds {args.seeds}, on "
        f"{where}; torch {torch.__version__}. Medians (lowest to highest); ratios are of "
        f"{first} to each, per seed, interleaved.",
        "The arms:\n"
        + "\n".join(f"- {name}: `{shlex.join(words)}`" for name, words in arms_of(args).items()),
    ]
    print("\n".join(said))
    print(f"curves: python scripts/compare_runs.py {args.out}")
    if args.results:
        command = shlex.join(["python", "scripts/bench_recipe.py", *argv])
        section = network_table.section(args.title, command, (head, rows), ["\n\n".join(said)])
        tables.put(args.results, "bench_recipe", args.title, section)


if __name__ == "__main__":
    go_on_without_reader()
    sys.exit(main())
