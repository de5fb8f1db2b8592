#!/usr/bin/env python3
"""Measure each way to exchange gradients, and print the --comm option to use on your network.

    sudo .venv/bin/python scripts/bench_network.py --nodes 2,4 --gbit 1 -- \\
        -a resnet18 -b 8

Between real machines, run the same command on each, with its own --rank:

    python scripts/bench_network.py --nodes 2 --master 172.31.0.10 \\
        --rank 0 -- -a resnet50 -b 64

The first command simulates the nodes with network namespaces on this machine. The kernel limits
their links to --gbit. Each node runs `bench/time_step.py imagenet_ddp --comm METHOD` with the
options after --, with one process per GPU (without GPUs, one process). The methods take turns,
round by round, and the table shows medians:

MB sent      bytes that a node sends per step, with headers, counted at its
             network interface
efficiency   step time of one node alone, divided by this step time

The recommended method is the most exact one whose step takes at most 5 % longer than the shortest.
Simulated nodes share the cores of one machine: compare methods there, and measure efficiency on
real nodes.

    sudo .venv/bin/python scripts/bench_network.py --sleep vgg19 \\
        --nodes 2,4,8 --gbit 7.5,25

With --sleep the simulated nodes do not compute. They sleep as long as a GPU (a T4 with AMP) takes
for each layer of the model, and exchange gradients of the same shapes as they become ready. So that
a few cores suffice, sleeps are --slow-down times longer, tensors are --shrink times smaller, and
links are slower by both factors. The table is converted back to the real nodes.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.start import launch

launch.prepare()  # before torch is imported, which takes seconds

from bench import commands, namespaces, rounds

from utils.start.errors import UserError, exit_with
from utils.start.option_types import DocstringFormatter, Parser, list_of, number, positive

METHODS = "fp32,fp16,int8,int4"
ALONE = "alone"  # the case with one node
PORT = 29555
# compute_s: seconds that one T4 computes per step with AMP, estimated from published images/s:
# 160 of VGG-19, 400 of ResNet-50.
MODELS = {
    "vgg19": {"classes": 20, "batch": 32, "compute_s": 0.200},
    "resnet50": {"classes": 1000, "batch": 64, "compute_s": 0.160},
}
COLUMNS = {
    "MB sent": ("network_mb_per_step", ".1f"),
    "step, ms": ("ms_per_step", ".0f"),
    "images/s": ("images_per_s", ".0f"),
    "efficiency": ("efficiency", ".0%"),
}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rows, advice = {}, []
    for gbit, nodes in itertools.product(args.gbit, args.nodes):
        place = f"{nodes} nodes" if args.master else f"{nodes} nodes with {gbit:g} Gbit/s"
        print(f"... {place}", file=sys.stderr, flush=True)
        measured = measure(gbit, nodes, args)
        if args.rank:
            continue
        alone = measured.pop(ALONE)
        for name, each in measured.items():
            rounds.add_ratio(each, alone, "ms_per_step", "efficiency")
            rounds.add_ratio(each, measured[args.methods[0]], "ms_per_step")
            # Real links are not limited: their rate is unknown.
            rows[f"{nodes}|{name}" if args.master else f"{gbit:g}|{nodes}|{name}"] = each
        advice.append(f"{place}: {recommend(measured)}")
    head = "nodes|method" if args.master else "Gbit/s|nodes|method"
    columns = COLUMNS | {f"to {args.methods[0]}": ("ratio", ".2f")}
    if args.rank == 0:
        print(rounds.table(head, rows, columns), *advice, sep="\n")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(description=__doc__, formatter_class=DocstringFormatter)
    add = parser.add_argument
    counts, above_0 = list_of(number(int, 2)), number(float, 0, exclusive=True)
    text = "numbers of nodes, such as 2,4,8 (2)"
    add("--nodes", default=[2], type=counts, metavar="LIST", help=text)
    text = "values of --comm to compare (%(default)s)"
    add("--methods", default=METHODS, type=methods, metavar="LIST", help=text)
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each case (%(default)s)")
    text = "time limit of a run; a longer run ends the benchmark (%(default)s)"
    add("--limit", type=positive, default=600, metavar="SECONDS", help=text)
    text = "rates of the simulated links in Gbit/s, such as 7.5,25 (10)"
    add("--gbit", type=list_of(above_0), default=[10.0], metavar="LIST", help=text)
    text = f"nodes sleep instead of computing this model: {', '.join(MODELS)}"
    add("--sleep", choices=MODELS, metavar="MODEL", help=text)
    text = "with --sleep: make sleeps N times longer (%(default)s)"
    add("--slow-down", type=positive, default=16, metavar="N", help=text)
    text = "with --sleep: make tensors N times smaller (%(default)s)"
    add("--shrink", type=positive, default=16, metavar="N", help=text)
    add = parser.add_argument_group("between real machines").add_argument
    add("--master", metavar="IP", help="address of node 0; links are not limited")
    add("--rank", type=number(int, 0), default=0, metavar="R", help="rank of this node")
    add("--port", type=positive, default=PORT, help="port on node 0 (%(default)s)")
    args = parser.parse_args(argv[:end])
    args.options = argv[end + 1 :]
    if args.master and len(args.nodes) > 1:
        parser.error("--nodes takes one number with --master")
    if args.sleep and (args.master or args.options):
        parser.error("--sleep simulates nodes: leave out --master, and the options after --")
    return args


def methods(text: str) -> list[str]:
    """Parse the value of ``--methods``."""
    launch.print_first_line(sys.stderr)
    from utils.model import compress

    try:
        return [compress.parse(word).name for word in text.split(",")]
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def measure(gbit: float, nodes: int, args: argparse.Namespace) -> dict[str, list[rounds.Figures]]:
    """The figures of `ALONE` and all methods, by round. Raises: `UserError` if one fails."""
    with contextlib.ExitStack() as stack:
        prefixes: list[Sequence[str]] = [()]  # one for the command of each local node
        if not args.master:
            spaces = stack.enter_context(namespaces.network(nodes))
            prefixes = [one.enter for one in spaces]
            scale = args.slow_down * args.shrink if args.sleep else 1
            for one in spaces:
                namespaces.limit(one, f"{int(gbit / scale * 1e9)}bit", "200ms")
        master = args.master or namespaces.address(0)
        is_ipv6 = ":" in master and not master.startswith("[")
        url = f"tcp://[{master}]:{args.port}" if is_ipv6 else f"tcp://{master}:{args.port}"

        def run(words: list[str], count: int = nodes) -> str:
            """Run a command on each local node, with one thread. Returns: rank 0's output."""
            env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
            each = [
                [*prefix, sys.executable, *(word.replace("{rank}", str(rank)) for word in words)]
                for rank, prefix in enumerate(prefixes[:count], args.rank)
            ]
            return commands.run(each, args.limit, ": raise --limit", env=env, cwd=ROOT)[0]

        if args.sleep:
            order = vars(args) | MODELS[args.sleep]
            order |= {"arch": args.sleep, "nodes": nodes, "meet": url, "rank": "{rank}"}
            printed = run([str(ROOT / "scripts/bench/sleeping_node.py"), json.dumps(order)])
            return json.loads(printed.splitlines()[-1])

        def figures_of(method: str) -> rounds.Figures:
            count, comm = (1, "fp32") if method == ALONE else (nodes, method)
            if args.rank and method == ALONE:
                return {}
            words = [str(ROOT / "scripts/bench/time_step.py"), "imagenet_ddp", "--comm", comm]
            words += ["--nodes", str(count), "--node-rank", "{rank}", "--dist-url", url]
            printed = run([*words, *args.options], count)
            return {} if args.rank else json.loads(printed.splitlines()[-1])

        return rounds.measure([ALONE, *args.methods], args.rounds, figures_of, strict=True)


def recommend(measured: dict[str, list[rounds.Figures]]) -> str:
    """Name the option to use, and the time that it saves."""
    from utils.model import compress

    names = [name for name in compress.METHODS if name in measured]  # the most exact one first
    times = {name: median(one["ms_per_step"] for one in measured[name]) for name in names}
    best = compress.most_exact(times)
    text = f"use --comm {best}, {times[best]:.0f} ms per step"
    for other in (name for name in ("fp32", "fp16") if name in times and name != best):
        saved = 1 - times[best] / times[other]
        text += f"; {other}: {times[other]:.0f} ms"
        text += f", so {best} saves {saved:.0%}" if saved > 0 else ""
    return text


if __name__ == "__main__":
    exit_with(main)
