#!/usr/bin/env python3
"""What would more nodes bring? A forecast of step time and throughput, as a table and a picture.

    python scripts/forecast_scaling.py --arch resnet50 --batch-size 208 --gpu-images-per-s 400 \\
        --network-gbit 25 --nodes 1,2,4,8,...,1024
    python scripts/forecast_scaling.py --from runs/one_node --network-gbit 10 --comm fp16
    python scripts/forecast_scaling.py --from runs/one_node runs/two_nodes runs/four_nodes

With --from, the run on the fewest processes tells how fast one of them computes; further runs stand
in the table beside the forecast, with its error. --fit-network lets the second of them also tell
what the network really gives. The model is that of scripts/forecast/scaling.py.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from forecast import scaling  # noqa: E402
from forecast.measured import MeasuredRun, read_run  # noqa: E402
from forecast.scaling import Cluster, Forecast, Measured, Workload  # noqa: E402

from utils.errors import UserError, report  # noqa: E402

COLOURS = {"compute": "#2563a0", "slowest GPU": "#f8d060", "communication": "#8e1f24"}


MAY_BE_0 = ("latency_us", "overlap", "jitter")


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
    sentence = verdict(work, cluster, rows, args.worth)
    print(sentence)
    if args.out:
        try:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            title = f"{args.arch}, {work.batch} images a GPU, {cluster.network_gbit:g} Gbit/s"
            draw(rows, measured, title, args.out)
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
    group.add_argument("--classes", type=int, metavar="N", help="of the last layer (1000)")
    group.add_argument("-b", "--batch-size", type=int, metavar="N", help="images a GPU (128)")
    group.add_argument(
        "--gpu-images-per-s", type=float, metavar="X", help="of one GPU alone; --dummy measures it"
    )
    group.add_argument(
        "--comm", choices=tuple(scaling.BYTES), default="fp32", help="gradients (%(default)s)"
    )
    group.add_argument(
        "--from", dest="runs", nargs="+", type=Path, default=[], metavar="RUN",
        help="run directories: model, batch and speed are those of the run on the fewest processes",
    )  # fmt: skip
    group.add_argument(
        "--fit-network", action="store_true", help="let the second of the runs decide --protocol"
    )
    group = parser.add_argument_group("the machines")
    group.add_argument(
        "--nodes", default="1,2,4,...,1024", metavar="LIST", help="to look at (%(default)s)"
    )
    group.add_argument("--gpus", metavar="LIST", help="or numbers of GPUs, which fill the nodes")
    group.add_argument("--gpus-per-node", type=int, metavar="N", help="(1)")
    for name, value, text in (
        ("network-gbit", default.network_gbit, "a node's link, Gbit/s"),
        ("local-gbit", default.local_gbit, "between the GPUs of a node; NVLink: 400 and more"),
        ("latency-us", default.latency_s * 1e6, "a hop between nodes; InfiniBand: 5"),
        (
            "protocol",
            default.protocol,
            "share of the link that all-reduce gets; 1 for a measured bandwidth",
        ),
        ("overlap", default.overlap, "share of backward that hides communication"),
        ("jitter", default.jitter, "how much later the slowest is; quiet clusters: 0.01"),
        ("worth", 0.5, "a node is worth it if it adds this share of what the first one does"),
    ):
        group.add_argument(
            f"--{name}", type=float, default=value, metavar="X", help=f"{text} (%(default)g)"
        )
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw a picture (PNG, SVG, PDF)")
    return parser.parse_args(argv)


def plan(args: argparse.Namespace) -> tuple[Workload, Cluster, list[MeasuredRun]]:
    """Workload, cluster, and the measured runs in the order of their size. Raises `UserError`."""
    positive = ("network_gbit", "local_gbit", "protocol", "gpu_images_per_s", "gpus_per_node")
    for name in (*positive, "batch_size", "classes", "latency_us", "overlap", "jitter"):
        value = getattr(args, name)
        if value is not None and (value < 0 or (value == 0 and name not in MAY_BE_0)):
            raise UserError(f"--{name.replace('_', '-')} {value:g} is too small")
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
                    f"{run.path} trained {run.arch} with {run.batch} images a process, not "
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
        overlap=args.overlap,
        jitter=args.jitter,
    )
    size = scaling.parameters(args.arch, args.classes or 1000) * scaling.BYTES[args.comm]
    work = Workload(args.batch_size, args.gpu_images_per_s or 1.0, size)
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
    """``1,2,4,...,32`` as [1, 2, 4, 8, 16, 32]; three dots go on as the two numbers before them.

    Raises: `UserError`.
    """
    wrong = UserError(f"{option} {text} is not a rising list like 1,2,4,...,64")
    found: list[int] = []
    goes_on = False
    for word in text.replace(" ", "").split(","):
        if word in ("...", "…"):
            goes_on = True
            continue
        if not word.isdecimal() or int(word) <= (found[-1] if found else 0):
            raise wrong
        if goes_on:
            if len(found) < 2:
                raise wrong
            doubles = found[-1] == 2 * found[-2] or found[-1] == 2
            step = found[-1] - found[-2]
            while (after := 2 * found[-1] if doubles else found[-1] + step) < int(word):
                found.append(after)
        found.append(int(word))
        goes_on = False
    if goes_on or found[-1] > 1_000_000 or len(found) > 10_000:
        raise wrong
    return found


def describe(work: Workload, cluster: Cluster, args: argparse.Namespace) -> str:
    """The assumptions, in one paragraph."""
    return (
        f"{args.arch}: {work.batch} images a GPU at {work.images_per_s:.4g} images/s alone, "
        f"{work.gradient_bytes / 1e6:.1f} MB of {args.comm} gradients a step; "
        f"{cluster.gpus_per_node} GPU{'s' * (cluster.gpus_per_node > 1)} a node\n"
        f"network {cluster.network_gbit:g} Gbit/s x {cluster.protocol:.2g}, "
        f"{1e6 * cluster.latency_s:g} us a hop; in a node {cluster.local_gbit:g} Gbit/s; "
        f"overlap {cluster.overlap:g}, jitter {cluster.jitter:g}\n"
    )


def table(rows: list[Forecast], measured: dict[int, Measured]) -> str:
    """The forecast, one line a number of GPUs; with a measured column if there is any."""
    head = ["nodes", "GPUs", "ms a step", "compute", "slowest", "all-reduce", "exposed"]
    head += ["images/s", "speed-up", "efficiency"]
    head += ["measured ms", "error"] if measured else []
    lines = [head]
    for row in rows:
        parts = (row.step_s, row.compute_s, row.straggler_s, row.all_reduce_s, row.exposed_s)
        lone = row.batch / row.compute_s
        line = [str(row.nodes), str(row.gpus), *(f"{1000 * part:.1f}" for part in parts)]
        line += [f"{row.images_per_s:.0f}", f"{row.images_per_s / lone:.2f}"]
        line.append(f"{100 * row.efficiency:.0f} %")
        if measured:
            point = measured.get(row.gpus)
            line.append(f"{1000 * point.step_s:.1f}" if point else "-")
            line.append(f"{percent(row.step_s / point.step_s - 1)} %" if point else "-")
        lines.append(line)
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, wide)) for line in lines) + "\n"


def percent(share: float) -> str:
    """A signed share in per cent; what rounds to nothing is +0.0."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def verdict(work: Workload, cluster: Cluster, rows: list[Forecast], worth: float) -> str:
    """From which node on another one is not worth it, and by which criterion."""
    most = max(2, *(row.nodes for row in rows))
    found = scaling.not_worth_it(work, cluster, most, worth)
    rule = f"a node is worth it if it adds at least {worth:.0%} of the images/s of the first"
    if found is None:
        return f"Each node up to {most} is worth it ({rule})."
    node, gain = found
    what = f"adds {gain:.1%}" if gain >= 0 else f"takes away {-gain:.1%}"
    return f"Not worth it: node {node}, which {what}, and each after it ({rule})."


def draw(rows: list[Forecast], measured: dict[int, Measured], title: str, out: Path) -> None:
    """Throughput against GPUs, and what a step consists of, into the file ``out``."""
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    with matplotlib.style.context(["default", {"font.size": 13, "savefig.dpi": 150}]):
        figure = Figure(figsize=(8, 10), layout="constrained")
        rate, parts = figure.subplots(2, 1)
        gpus = [row.gpus for row in rows]
        lone = rows[0].batch / rows[0].compute_s
        rate.plot(gpus, [lone * n for n in gpus], "--", color="0.5", label="every GPU counts fully")
        rate.plot(gpus, [r.images_per_s for r in rows], "o-", color="#2563a0", label="forecast")
        if measured:
            found = [n * rows[0].batch / point.step_s for n, point in measured.items()]
            rate.plot(list(measured), found, "X", color="#f28a50", markersize=13,
                      markeredgecolor="black", label="measured")  # fmt: skip
        rate.set(xscale="log", yscale="log", ylabel="images/s, all GPUs", title=title)
        rate.legend(frameon=False)
        places = list(range(len(rows)))
        below = [0.0] * len(rows)
        values = {
            "compute": [1000 * row.compute_s for row in rows],
            "slowest GPU": [1000 * row.straggler_s for row in rows],
            "communication": [1000 * row.exposed_s for row in rows],
        }
        names = {"slowest GPU": "waiting for the slowest GPU",
                 "communication": "communication not hidden"}  # fmt: skip
        for (name, value), hatch in zip(values.items(), ("", "//", ".."), strict=True):
            parts.bar(places, value, 0.7, bottom=below, color=COLOURS[name], hatch=hatch,
                      edgecolor="white", label=names.get(name, name))  # fmt: skip
            below = [a + b for a, b in zip(below, value, strict=True)]
        for place, row in zip(places, rows, strict=True):
            parts.text(place, 0, f"{100 * row.efficiency:.0f}", color="white", ha="center",
                       va="bottom")  # fmt: skip
            if row.gpus in measured:
                parts.plot(place, 1000 * measured[row.gpus].step_s, "X", color="#f28a50",
                           markersize=13, markeredgecolor="black")  # fmt: skip
        parts.set(ylabel="ms a step (in white: efficiency, %)", xlabel="GPUs")
        parts.set_ylim(top=1.25 * max(*below, *(1000 * p.step_s for p in measured.values())))
        for axes in (rate, parts):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="0.9")
            axes.set_axisbelow(True)
        rate.set_xticks(gpus, [str(n) for n in gpus])
        rate.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        rate.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        rate.minorticks_off()
        parts.set_xticks(places, [str(n) for n in gpus])
        parts.legend(frameon=False, loc="upper left", ncols=1)
        figure.savefig(out, metadata={"Software": None} if out.suffix == ".png" else None)


if __name__ == "__main__":
    sys.exit(main())
