#!/usr/bin/env python3
"""Forecast step time and throughput on more nodes, as a table and a picture.

    python scripts/forecast_scaling.py --arch resnet50 --batch-size 208 --gpu-images-per-s 400 \\
        --network-gbit 25 --nodes 1,2,4,8,16
    python scripts/forecast_scaling.py --from runs/one_node --network-gbit 10 --comm fp16
    python scripts/forecast_scaling.py --from runs/one_node runs/two_nodes runs/four_nodes

With --from, the forecast takes the speed of one GPU from the run on the fewest processes. The table
shows the measured step times of all runs, and the forecast's error. --fit-network fits the real
speed of the network to the second run. A second table compares the methods of --comm. It recommends
the most exact method whose step takes at most 5 % longer than the shortest.
scripts/forecast/model.py describes the model.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils import launch

launch.prepare()  # before torch is imported, which takes seconds

from compare import pictures, runs
from compare.page import Chart
from compare.table import NONE, text_table
from forecast import buckets, model
from forecast.model import Cluster, Forecast, Workload

from utils.errors import UserError, exit_with
from utils.extras import compress
from utils.option_types import list_of, non_negative, number, positive

MOST_COLUMNS = 12


class MeasuredRun(NamedTuple):
    """A run with ``batch`` images per process and step on ``gpus`` processes."""

    path: Path
    arch: str | None
    classes: int
    batch: int
    gpus: int
    nodes: int
    step_s: float


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    work, cluster, measured_runs = plan(args)
    measured = {run.gpus: run.step_s for run in measured_runs}
    gpu_counts = args.gpus or [cluster.gpus_per_node * nodes for nodes in args.nodes]
    rows = [model.forecast(work, cluster, gpus) for gpus in sorted({*gpu_counts, *measured})]
    print(
        f"{args.arch}: {work.batch} images per GPU at {work.images_per_s:.4g} images/s alone, "
        f"{sum(work.wire_bytes) / 1e6:.1f} MB of {work.how.name} gradients per step; "
        f"{cluster.gpus_per_node} GPU{'s' * (cluster.gpus_per_node > 1)} per node\n"
        f"network {cluster.network_gbit:g} Gbit/s x {cluster.protocol:.2g}, "
        f"{1e6 * cluster.latency_s:g} us per hop; in a node {cluster.local_gbit:g} Gbit/s; "
        f"jitter {cluster.jitter:g}\n\n{table(rows, measured)}\n"
    )
    if several := [row.gpus for row in rows if row.nodes > 1]:
        print(methods(work, cluster, several[:MOST_COLUMNS]), end="\n\n")
    if args.out:
        title = f"{args.arch}, {work.batch} images per GPU, {cluster.network_gbit:g} Gbit/s"
        draw(rows, measured, title, args.out)
        print(f"picture: {args.out}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    above_0 = number(float, 0, exclusive=True)
    add = parser.add_argument_group("the training").add_argument
    add("-a", "--arch", help="any model that the training scripts take (resnet50)")
    add("--classes", type=positive, metavar="N", help="number of classes (1000)")
    add("-b", "--batch-size", type=positive, metavar="N", help="images per GPU (128)")
    text = "speed of a single GPU, as the training scripts print with --dummy"
    add("--gpu-images-per-s", type=above_0, metavar="X", help=text)
    text = f"how gradients are exchanged: {', '.join(compress.NAMES)} (%(default)s)"
    add("--comm", default="fp32", metavar="METHOD", help=text)
    text = "run directories; the run on the fewest processes gives model, batch and speed"
    add("--from", dest="runs", nargs="+", type=Path, default=[], metavar="RUN", help=text)
    add("--fit-network", action="store_true", help="fit --protocol to the second run")
    add = parser.add_argument_group("the machines").add_argument
    nodes, numbers = "1,2,4,8,16,32,64,128,256,512,1024", list_of(number(int, 1, 100_000))
    text = "numbers of nodes (%(default)s)"
    add("--nodes", type=numbers, default=nodes, metavar="LIST", help=text)
    text = "numbers of GPUs, in place of --nodes; they fill one node after the other"
    add("--gpus", type=numbers, metavar="LIST", help=text)
    add("--gpus-per-node", type=positive, metavar="N", help="GPUs per node (1, or as in the runs)")
    for name, kind, value, text in (
        ("network-gbit", above_0, Cluster.network_gbit, "network link of a node in Gbit/s"),
        ("local-gbit", above_0, Cluster.local_gbit,
         "link between GPUs of a node in Gbit/s; NVLink: 400 or more"),
        ("latency-us", non_negative, Cluster.latency_s * 1e6,
         "latency between two nodes in microseconds; InfiniBand: 5"),
        ("protocol", above_0, Cluster.protocol,
         "fraction of --network-gbit that all-reduce reaches; 1 if it was measured"),
        ("jitter", non_negative, Cluster.jitter,
         "how far the slowest GPU lags; quiet clusters: 0.01"),
    ):  # fmt: skip
        add(f"--{name}", type=kind, default=value, metavar="X", help=f"{text} (%(default)g)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw a picture (PNG, SVG, PDF)")
    return parser.parse_args(argv)


def read_runs(paths: list[Path]) -> list[MeasuredRun]:
    """Read runs, sorted by number of GPUs. Raises `UserError` for one without size or speed."""
    measured_runs = []
    for run in (run for path in paths for run in runs.find(path)):
        rate = run.usual(runs.RATE)
        # Older suites recorded neither the classes nor the nodes; --gpus-per-node gives these.
        defaults = {"gpus": 0, "global_batch": 0, "class_count": 1000, "nodes": 1}
        gpus, batch, classes, nodes = (int(run.facts.get(x) or y) for x, y in defaults.items())
        if not (rate and gpus and batch):
            raise UserError(f"{run.path} has no speed or no batch size: has it finished an epoch?")
        sizes = (classes, round(batch / gpus), gpus, nodes)
        measured_runs.append(MeasuredRun(run.path, run.facts.get("arch"), *sizes, batch / rate))
    return sorted(measured_runs, key=lambda run: run.gpus)


def plan(args: argparse.Namespace) -> tuple[Workload, Cluster, list[MeasuredRun]]:
    """Return workload, cluster, and the measured runs by number of GPUs. Raises `UserError`."""
    measured_runs = read_runs(args.runs)
    if not measured_runs and args.gpu_images_per_s is None:
        raise UserError("the speed of one GPU is unknown: add --gpu-images-per-s X or --from RUN")
    first = measured_runs[0] if measured_runs else MeasuredRun(Path(), None, 1000, 128, 1, 1, 0)
    args.arch = args.arch or first.arch or "resnet50"
    args.batch_size = args.batch_size or first.batch
    for run in measured_runs:
        if (run.arch or args.arch, run.batch) != (args.arch, args.batch_size):
            raise UserError(
                f"{run.path} trained {run.arch} with {run.batch} images per process, not "
                f"{args.arch} with {args.batch_size}: a forecast needs runs of one model and batch"
            )
    most = max(-(-run.gpus // run.nodes) for run in measured_runs or [first])
    cluster = Cluster(
        gpus_per_node=args.gpus_per_node or most,
        network_gbit=args.network_gbit,
        protocol=args.protocol,
        local_gbit=args.local_gbit,
        latency_s=args.latency_us / 1e6,
        jitter=args.jitter,
    )
    traced = buckets.trace(args.arch, args.classes or first.classes)
    rate, how = args.gpu_images_per_s, compress.parse(args.comm)
    work = Workload(args.batch_size, rate or 1.0, traced, how)
    if rate is None:
        work = model.fit_compute(work, cluster, first.gpus, first.step_s)
    if args.fit_network:
        if len(measured_runs) < 2 or measured_runs[1].gpus <= cluster.gpus_per_node:
            raise UserError("--fit-network needs a second RUN, on several nodes")
        cluster = model.fit_network(work, cluster, measured_runs[1].gpus, measured_runs[1].step_s)
    return work, cluster, measured_runs


def table(rows: list[Forecast], measured: dict[int, float]) -> str:
    """Format the forecast, one line per number of GPUs, with the measured step times if any."""
    head = ["nodes", "GPUs", "ms per step", "compute", "slowest", "exchange", "exposed"]
    head += ["images/s", "speed-up", "efficiency", *(["measured ms", "error"] if measured else [])]
    lines = []
    for row in rows:
        parts = (row.step_s, row.compute_s, row.straggler_s, row.exchange_s, row.exposed_s)
        line = [row.nodes, row.gpus, *(f"{1000 * part:.1f}" for part in parts)]
        line += [f"{row.images_per_s:.0f}", f"{row.gpus * row.efficiency:.2f}"]
        line.append(f"{100 * row.efficiency:.0f} %")
        if step_s := measured.get(row.gpus):
            error = round(100 * (row.step_s / step_s - 1), 1) + 0.0  # no -0.0
            line += [f"{1000 * step_s:.1f}", f"{error:+.1f} %"]
        elif measured:
            line += [NONE, NONE]
        lines.append(line)
    return text_table(head, lines)


def methods(work: Workload, cluster: Cluster, counts: list[int]) -> str:
    """Format the efficiency of each --comm method, and the recommended method."""
    lines = []
    for name in dict.fromkeys((*compress.CANDIDATES, work.how.name)):  # bf16 costs as much as fp16
        one = replace(work, how=compress.parse(name))
        shares = [model.forecast(one, cluster, gpus).efficiency for gpus in counts]
        lines.append([name, *(f"{100 * share:.0f}" for share in shares)])
    lines.append(["recommended", *(model.choice(work, cluster, n)[1] for n in counts)])
    return text_table(["efficiency, %, on GPUs", *counts], lines)


def draw(rows: list[Forecast], measured: dict[int, float], title: str, out: Path) -> None:
    """Draw ``rows`` and ``measured`` (seconds per step by number of GPUs) into the file ``out``.

    Raises: `UserError` for a file that cannot be written, or an unknown file format.
    """
    import matplotlib

    images = rows[0].images_per_s * rows[0].step_s / rows[0].gpus  # per GPU and step

    def chart(title: str, unit: str, log: str, of_run: Callable, **of_row: Callable) -> Chart:
        lines = [
            (name.replace("_", " "), [(row.gpus, of(row)) for row in rows])
            for name, of in of_row.items()
        ]
        if measured:
            lines.append(("measured", [(n, of_run(n, s)) for n, s in sorted(measured.items())]))
        axis = {"whole": True, "ticks": [row.gpus for row in rows], "plain": ["perfect scaling"]}
        return Chart(title, unit, "GPUs", lines, log=log, zero=log == "x", **axis)

    charts = [
        chart(
            title, "images/s, all GPUs", "xy", lambda gpus, step_s: gpus * images / step_s,
            forecast=lambda row: row.images_per_s,
            perfect_scaling=lambda row: row.images_per_s / row.efficiency,
        ),
        chart(
            "Parts of a step", "ms per step", "x", lambda _, step_s: 1000 * step_s,
            forecast=lambda row: 1000 * row.step_s,
            without_communication=lambda row: 1000 * (row.compute_s + row.straggler_s),
            compute_alone=lambda row: 1000 * row.compute_s,
        ),
        chart(
            "Efficiency", "% of perfect scaling", "x",
            lambda _, step_s: 100 * rows[0].compute_s / step_s,
            forecast=lambda row: 100 * row.efficiency,
        ),
    ]  # fmt: skip
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(pictures.MATPLOTLIB):
            pictures.save(pictures.draw_charts(charts), out)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {out}: {error}") from None


if __name__ == "__main__":
    exit_with(main)
