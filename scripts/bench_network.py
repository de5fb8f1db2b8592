#!/usr/bin/env python3
"""Measure each way to exchange gradients, and print the --comm option to use on your network.

    sudo .venv/bin/python scripts/bench_network.py --nodes 2,4 --gbit 1 -- -a resnet18 -b 8

or, between real machines, the same command on each with its own --rank:

    python scripts/bench_network.py --nodes 2 --master 172.31.0.10 --rank 0 -- -a resnet50 -b 64

The first command simulates the nodes with network namespaces on this machine. The kernel limits
their links to --gbit. Each node runs `imagenet_ddp.py --dummy --comm METHOD` with the options after
--, with one process per GPU (without GPUs, one process). The methods take turns, round by round,
and the table shows medians:

MB sent      bytes that a node sends per step, with headers, counted at its network interface
efficiency   step time of one node alone, divided by this step time

The recommended method is the most exact one whose step takes at most 5 % longer than the shortest.
Simulated nodes share the cores of one machine: compare methods there, and measure efficiency on
real nodes.

    sudo .venv/bin/python scripts/bench_network.py --sleep vgg19 --nodes 2,4,8 --gbit 7.5,25

With --sleep the simulated nodes do not compute. They sleep as long as a GPU (a T4 with AMP) takes
for each layer of the model, and exchange gradients of the same shapes as they become ready. So that
a few cores suffice, sleeps are --slow-down times longer, tensors are --shrink times smaller, and
links are slower by both factors. The table is converted back to the real nodes. With smaller
tensors, PowerSGD sends relatively more.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils import launch

launch.prepare()  # before torch is imported, which takes seconds

from bench import commands, namespaces, rounds
from compare.table import markdown_table

from utils.errors import UserError, exit_with
from utils.option_types import list_of, number, positive

METHODS = "fp32,fp16,int8,int4,powersgd:4"
PORT = 29555


class Model(NamedTuple):
    """Seconds that one T4 computes per step with AMP, estimated from published images/s."""

    classes: int
    batch: int
    compute_s: float


# VGG-19: 160 images/s; ResNet-50: 400.
MODELS = {"vgg19": Model(20, 32, 0.200), "resnet50": Model(1000, 64, 0.160)}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    measured = {place: measure(*place, args) for place in itertools.product(args.gbit, args.nodes)}
    if args.rank:
        return 0
    head = ["Gbit/s", "nodes", "method", "MB sent", "step, ms", "images/s", "efficiency"]
    rows = [row for place, by_method in measured.items() for row in rows_of(place, by_method)]
    first = 1 if args.master else 0  # real links are not limited: their rate is unknown
    print(markdown_table([*head[first:], f"to {args.methods[0]}"], [row[first:] for row in rows]))
    for (gbit, count), by_method in measured.items():
        link = "" if args.master else f" with {gbit:g} Gbit/s"
        print(f"{count} nodes{link}: {recommendation(by_method)}")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    counts, above_0 = list_of(number(int, 2)), number(float, 0, exclusive=True)
    text = "numbers of nodes, such as 2,4,8 (2)"
    add("--nodes", default=[2], type=counts, metavar="LIST", help=text)
    text = f"of --comm ({METHODS})"
    add("--methods", default=METHODS.split(","), type=_methods, metavar="LIST", help=text)
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each case (%(default)s)")
    text = "longest run; one that takes longer ends the benchmark (%(default)s)"
    add("--limit", type=positive, default=600, metavar="SECONDS", help=text)
    text = "rates of the simulated links in Gbit/s, such as 7.5,25 (10)"
    add("--gbit", type=list_of(above_0), default=[10.0], metavar="LIST", help=text)
    text = f"nodes sleep instead of computing this model: {', '.join(MODELS)}"
    add("--sleep", choices=MODELS, metavar="MODEL", help=text)
    text = "with --sleep: factor of time (%(default)s)"
    add("--slow-down", type=positive, default=16, metavar="N", help=text)
    text = "with --sleep: factor of size (%(default)s)"
    add("--shrink", type=positive, default=16, metavar="N", help=text)
    group = parser.add_argument_group("between real machines")
    group.add_argument("--master", metavar="IP", help="address of node 0; links are not limited")
    group.add_argument("--rank", type=number(int, 0), default=0, metavar="R", help="of this node")
    group.add_argument("--port", type=positive, default=PORT, help="port on node 0 (%(default)s)")
    args = parser.parse_args(argv[:end])
    args.options = argv[end + 1 :]
    if args.master and len(args.nodes) > 1:
        parser.error("--nodes takes one number with --master")
    if args.sleep and (args.master or args.options):
        text = "--sleep is for simulated nodes: without --master and without options after --"
        parser.error(text)
    return args


def _methods(text: str) -> list[str]:
    from utils.extras import compress

    try:
        return [compress.parse(word).name for word in text.split(",")]
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def measure(gbit: float, count: int, args: argparse.Namespace) -> dict[str, list[rounds.Figures]]:
    """Measure all methods on ``count`` nodes.

    Returns: figures of each round, by method; "alone" is one node. Empty on nodes other than 0.
    """
    place = f"{count} nodes" if args.master else f"{count} nodes, {gbit:g} Gbit/s"
    print(f"... {place}", file=sys.stderr, flush=True)
    scale = args.slow_down * args.shrink if args.sleep else 1
    with places(gbit / scale, count, args) as (nodes, master):
        if args.sleep:
            return run_sleeping(nodes, count, master, args)

        def figures_of(method: str) -> rounds.Figures:
            if method != "alone":
                return run(nodes, count, method, master, args)
            return {} if args.rank else run(nodes[:1], 1, "fp32", master, args)

        return rounds.measure(["alone", *args.methods], args.rounds, figures_of, strict=True)


@contextlib.contextmanager
def places(
    gbit: float, count: int, args: argparse.Namespace
) -> Iterator[tuple[list[list[str]], str]]:
    """The command prefix of each local node, and the address of rank 0."""
    if args.master:
        yield [[]], args.master
        return
    with namespaces.network(count) as nodes:
        for node in nodes:
            namespaces.limit(node, f"{int(gbit * 1e9)}bit", "200ms")
        yield [list(node.enter) for node in nodes], namespaces.address(0)


def run(
    nodes: list[list[str]], count: int, method: str, master: str, args: argparse.Namespace
) -> rounds.Figures:
    """The summary of the run; empty on ranks other than 0. Raises: `UserError`."""
    with tempfile.TemporaryDirectory() as out:
        each = []
        for rank, enter in enumerate(nodes, args.rank):
            words = [*enter, sys.executable, str(ROOT / "imagenet_ddp.py"), "--dummy"]
            words += ["--comm", method, "--world-size", str(count), "--rank", str(rank)]
            words += ["--dist-url", f"tcp://{master}:{args.port}", *args.options]
            each.append([*words, "--output-dir", f"{out}/{rank}", "--name", "case"])
        run_all(each, f"{method} on {count} nodes", args)
        summary = Path(f"{out}/0/case/summary.json")
        return json.loads(summary.read_text()) if not args.rank else {}


def run_sleeping(
    nodes: list[list[str]], count: int, master: str, args: argparse.Namespace
) -> dict[str, list[rounds.Figures]]:
    """The figures of all methods and rounds, from `bench/sleeping_node.py`. Raises: `UserError`."""
    with tempfile.TemporaryDirectory() as out:
        order = {"arch": args.sleep, **MODELS[args.sleep]._asdict(), "nodes": count}
        order |= {name: getattr(args, name) for name in ("methods", "rounds")}
        order |= {name: getattr(args, name) for name in ("slow_down", "shrink")}
        order |= {"meet": f"tcp://{master}:{args.port}", "out": f"{out}/figures.json"}
        node = [sys.executable, str(ROOT / "scripts/bench/sleeping_node.py")]
        each = [
            [*enter, *node, json.dumps(order | {"rank": rank})] for rank, enter in enumerate(nodes)
        ]
        run_all(each, f"{args.sleep} on {count} nodes", args)
        return json.loads(Path(order["out"]).read_text())


def run_all(commands_of_nodes: list[list[str]], what: str, args: argparse.Namespace) -> None:
    """Run a command on each node, with one thread. Raises: `UserError`."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    late = f"{what} takes longer than --limit"
    done = commands.run(commands_of_nodes, args.limit, late, env=env, cwd=ROOT)
    for rank, one in enumerate(done, args.rank):
        if one.returncode:
            raise UserError(f"node {rank} failed: {commands.last_lines(one)}")


def rows_of(
    place: tuple[float, int], by_method: dict[str, list[rounds.Figures]]
) -> list[list[str]]:
    """Medians over the rounds; the last column is the speed-up to the first method."""
    alone, first, *_ = by_method.values()
    columns = [
        rounds.middle("network_mb_per_step", ".1f"),
        rounds.middle("ms_per_step", ".0f"),
        rounds.middle("images_per_s", ".0f"),
        rounds.speed_up(alone, "ms_per_step", ".0%"),
        rounds.speed_up(first, "ms_per_step"),
    ]
    head = [f"{number:g}" for number in place]
    return [
        [*head, name, *(cell(figures) for cell in columns)]
        for name, figures in by_method.items()
        if name != "alone"
    ]


def recommendation(by_method: dict[str, list[rounds.Figures]]) -> str:
    """The option to use, and what it saves."""
    from utils.extras import compress

    names = sorted(set(by_method) - {"alone"}, key=compress.exactness, reverse=True)
    times = {name: median(one["ms_per_step"] for one in by_method[name]) for name in names}
    best = compress.most_exact(times)
    text = f"use --comm {best}, {times[best]:.0f} ms per step"
    for other in ("fp32", "fp16"):
        if other in times and other != best:
            saved = 1 - times[best] / times[other]
            text += f"; {other}: {times[other]:.0f} ms"
            text += f", so {best} saves {saved:.0%}" if saved > 0 else ""
    return text


if __name__ == "__main__":
    exit_with(main)
