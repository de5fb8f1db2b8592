#!/usr/bin/env python3
"""What would more nodes bring? A forecast of step time and throughput, as a table and a picture.

    python scripts/forecast_scaling.py --arch resnet50 --batch-size 208 --gpu-images-per-s 400 \\
        --network-gbit 25 --nodes 1,2,4,8,...,1024
    python scripts/forecast_scaling.py --from runs/one_node --network-gbit 10 --comm fp16
    python scripts/forecast_scaling.py --from runs/one_node runs/two_nodes runs/four_nodes

With --from, the run on the fewest processes shows how fast one of them computes; further runs are
listed beside the forecast, with its error. --fit-network takes what the network really gives from
the second of them. Below the table are the efficiencies of all ways to exchange gradients that
--comm of the training script has, and which of them auto would take. The model is that of
scripts/forecast/scaling.py and scripts/forecast/model.py.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import utils.launch.installed  # noqa: E402, F401 (a missing package becomes one sentence)

from forecast import buckets, picture, scaling  # noqa: E402
from forecast.measured import MeasuredRun, read_run  # noqa: E402
from forecast.scaling import Cluster, Forecast, Measured, Workload  # noqa: E402

from utils.comm import methods as comm_methods  # noqa: E402
from utils.errors import UserError, go_on_without_reader, report  # noqa: E402
from utils.option_types import amount, number, positive  # noqa: E402

METHODS = ("fp32", "fp16", "int8", "int4", "powersgd:32")  # bf16 costs as fp16 does
MOST_COLUMNS = 12

above_0 = number(float, 0, exclusive=True)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        work, cluster, runs = plan(args)
        counts = gpu_counts(args, cluster)
    except UserError as error:
        return report(error)
    counts = sorted({*counts, *(run.gpus for run in runs)})
    rows = [scaling.forecast(work, cluster, gpus) for gpus in counts]
    measured = {run.gpus: run.measured for run in runs}
    print(describe(work, cluster, args))
    print(table(rows, measured))
    print(methods(work, cluster, [row.gpus for row in rows if row.nodes > 1]))
    sentence = verdict(work, cluster, rows, args.worth)
    print(sentence)
    if args.out:
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            title = f"{args.arch}, {work.batch} images per GPU, {cluster.network_gbit:g} Gbit/s"
            picture.draw(rows, measured, title, args.out)
        except (OSError, ValueError) as fault:
            return report(UserError(f"cannot write {args.out}: {fault}"))
        print(f"picture: {args.out}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Cluster()
    group = parser.add_argument_group("the training")
    group.add_argument("-a", "--arch", help="any model that the training scripts take (resnet50)")
    group.add_argument("--classes", type=positive, metavar="N", help="of the last layer (1000)")
    group.add_argument(
        "-b", "--batch-size", type=positive, metavar="N", help="images per GPU (128)"
    )
    group.add_argument(
        "--gpu-images-per-s",
        type=above_0,
        metavar="X",
        help="speed of one GPU alone; --dummy of the training scripts measures it",
    )
    group.add_argument(
        "--comm", default="fp32", metavar="METHOD",
        help=f"how gradients are exchanged: {', '.join(comm_methods.NAMES)} (%(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--from", dest="runs", nargs="+", type=Path, default=[], metavar="RUN",
        help="run directories: model, batch and speed are those of the run on the fewest processes",
    )  # fmt: skip
    group.add_argument(
        "--fit-network", action="store_true", help="fit --protocol to the second of the runs"
    )
    group = parser.add_argument_group("the machines")
    group.add_argument(
        "--nodes", default="1,2,4,...,1024", metavar="LIST", help="numbers of nodes (%(default)s)"
    )
    group.add_argument(
        "--gpus", metavar="LIST", help="or numbers of GPUs, which fill node after node"
    )
    group.add_argument("--gpus-per-node", type=positive, metavar="N", help="(1, or as in the runs)")
    for name, kind, value, text in (
        ("network-gbit", above_0, default.network_gbit, "a node's link, Gbit/s"),
        ("local-gbit", above_0, default.local_gbit, "between GPUs of a node; NVLink: 400 or more"),
        ("latency-us", amount, default.latency_s * 1e6, "of a hop between nodes; InfiniBand: 5"),
        (
            "protocol",
            above_0,
            default.protocol,
            "share of the link that all-reduce gets; 1 for a measured bandwidth",
        ),
        ("jitter", amount, default.jitter, "how much the slowest lags; quiet clusters: 0.01"),
        ("worth", amount, 0.5, "a node is worth it if it adds this share of the first node's rate"),
    ):
        group.add_argument(
            f"--{name}", type=kind, default=value, metavar="X", help=f"{text} (%(default)g)"
        )
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw a picture (PNG, SVG, PDF)")
    return parser.parse_args(argv)


def plan(args: argparse.Namespace) -> tuple[Workload, Cluster, list[MeasuredRun]]:
    """Workload, cluster, and the measured runs in the order of their size. Raises `UserError`."""
    runs = sorted((read_run(path) for path in args.runs), key=lambda run: run.gpus)
    first = runs[0] if runs else None
    if first is not None:
        args.arch = args.arch or first.arch
        args.classes = args.classes or first.classes
        args.batch_size = args.batch_size or first.batch
        args.gpus_per_node = args.gpus_per_node or max(-(-r.gpus // r.nodes) for r in runs)
        for run in runs:
            if (run.arch or args.arch, run.batch) != (args.arch, args.batch_size):
                raise UserError(
                    f"{run.path} trained {run.arch} with {run.batch} images per process, not "
                    f"{args.arch} with {args.batch_size}: such runs cannot share a forecast"
                )
    elif args.gpu_images_per_s is None:
        raise UserError("how fast is one GPU? Give --gpu-images-per-s X, or --from RUN")
    args.arch, args.batch_size = args.arch or "resnet50", args.batch_size or 128
    cluster = Cluster(
        gpus_per_node=args.gpus_per_node or 1,
        network_gbit=args.network_gbit,
        protocol=args.protocol,
        local_gbit=args.local_gbit,
        latency_s=args.latency_us / 1e6,
        jitter=args.jitter,
    )
    how, packed = comm_methods.parse(args.comm), buckets.of(args.arch, args.classes or 1000)
    work = Workload(args.batch_size, args.gpu_images_per_s or 1.0, packed, how)
    if args.gpu_images_per_s is None:
        work = scaling.fit_compute(work, cluster, first.measured)
    if args.fit_network:
        if len(runs) < 2 or runs[1].nodes < 2:
            raise UserError("--fit-network needs a second RUN, on several nodes")
        cluster = scaling.fit_network(work, cluster, runs[1].measured)
    return work, cluster, runs


def gpu_counts(args: argparse.Namespace, cluster: Cluster) -> list[int]:
    """Numbers of GPUs to forecast, from --gpus or --nodes. Raises `UserError`."""
    if args.gpus:
        return numbers(args.gpus, "--gpus")
    return [nodes * cluster.gpus_per_node for nodes in numbers(args.nodes, "--nodes")]


def numbers(text: str, option: str) -> list[int]:
    """``1,2,4,...,32`` as [1, 2, 4, 8, 16, 32]; three dots continue as the two numbers before them.

    Raises: `UserError`.
    """
    wrong = UserError(f"{option} {text} is not a rising list like 1,2,4,...,64")
    found: list[int] = []
    dots = False
    for word in text.replace(" ", "").split(","):
        if word in ("...", "…"):
            dots = True
            continue
        if not word.isdecimal() or int(word) <= (found[-1] if found else 0):
            raise wrong
        if dots:
            if len(found) < 2:
                raise wrong
            doubles = found[-1] == 2 * found[-2] or found[-1] == 2
            step = found[-1] - found[-2]
            while (after := 2 * found[-1] if doubles else found[-1] + step) < int(word):
                found.append(after)
        found.append(int(word))
        dots = False
    if dots or found[-1] > 1_000_000 or len(found) > 10_000:
        raise wrong
    return found


def describe(work: Workload, cluster: Cluster, args: argparse.Namespace) -> str:
    """The assumptions, in one paragraph."""
    return (
        f"{args.arch}: {work.batch} images per GPU at {work.images_per_s:.4g} images/s alone, "
        f"{work.wire_bytes / 1e6:.1f} MB of {work.how.name} gradients per step; "
        f"{cluster.gpus_per_node} GPU{'s' * (cluster.gpus_per_node > 1)} per node\n"
        f"network {cluster.network_gbit:g} Gbit/s x {cluster.protocol:.2g}, "
        f"{1e6 * cluster.latency_s:g} us per hop; in a node {cluster.local_gbit:g} Gbit/s; "
        f"jitter {cluster.jitter:g}\n"
    )


def table(rows: list[Forecast], measured: dict[int, Measured]) -> str:
    """The forecast, one line per number of GPUs; with the measured steps if there are any."""
    head = ["nodes", "GPUs", "ms per step", "compute", "slowest", "exchange", "exposed"]
    head += ["images/s", "speed-up", "efficiency"]
    head += ["measured ms", "error"] if measured else []
    lines = [head]
    for row in rows:
        parts = (row.step_s, row.compute_s, row.straggler_s, row.exchange_s, row.exposed_s)
        lone = row.batch / row.compute_s
        line = [str(row.nodes), str(row.gpus), *(f"{1000 * part:.1f}" for part in parts)]
        line += [f"{row.images_per_s:.0f}", f"{row.images_per_s / lone:.2f}"]
        line.append(f"{100 * row.efficiency:.0f} %")
        if measured:
            point = measured.get(row.gpus)
            line.append(f"{1000 * point.step_s:.1f}" if point else "-")
            line.append(f"{percent(row.step_s / point.step_s - 1)} %" if point else "-")
        lines.append(line)
    return in_columns(lines)


def in_columns(lines: list[list[str]]) -> str:
    """Lines of words, right-aligned in columns."""
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, wide)) for line in lines) + "\n"


def methods(work: Workload, cluster: Cluster, counts: list[int]) -> str:
    """The efficiency with each way to exchange gradients, and the one that --comm auto takes."""
    counts = counts[:MOST_COLUMNS]
    if not counts:
        return ""
    names = [*METHODS, *(() if work.how.name in METHODS else (work.how.name,))]
    found = scaling.compare(work, cluster, counts, names)
    lines = [["efficiency, %, on GPUs", *map(str, counts)]]
    for name, rows in found.items():
        lines.append([name, *(f"{100 * row.efficiency:.0f}" for row in rows)])
    lines.append(["--comm auto takes", *(scaling.choice(work, cluster, n)[1] for n in counts)])
    return in_columns(lines)


def percent(share: float) -> str:
    """A signed share in per cent; what rounds to nothing is +0.0."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def verdict(work: Workload, cluster: Cluster, rows: list[Forecast], worth: float) -> str:
    """From which node on more nodes are not worth it, and by which criterion."""
    most = max(2, *(row.nodes for row in rows))
    found = scaling.not_worth_it(work, cluster, most, worth)
    rule = f"a node is worth it if it adds at least {worth:.0%} of the images/s of the first"
    if found is None:
        return f"Each node up to {most} is worth it ({rule})."
    node, gain = found
    what = f"adds {gain:.1%}" if gain >= 0 else f"takes away {-gain:.1%}"
    return f"Not worth it: node {node}, which {what}, and each after it ({rule})."


if __name__ == "__main__":
    go_on_without_reader()
    sys.exit(main())
