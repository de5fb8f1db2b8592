#!/usr/bin/env python3
"""Measure each way to exchange gradients, and print the --comm option to use on your network.

    sudo .venv/bin/python scripts/bench_network.py --nodes 2,4 --gbit 1 -- -a resnet18 -b 8

or, between real machines, the same command on each with its own --rank:

    python scripts/bench_network.py --nodes 2 --master 172.31.0.10 --rank 0 -- -a resnet50 -b 64

The first command simulates the nodes by network namespaces of this machine, whose links the kernel
limits to --gbit. Each node runs `imagenet_ddp.py --dummy --comm METHOD` with the options after --,
one process per GPU, or one without a GPU. Methods take turns, round by round; the figures are
medians. MB is what a node sends per step, counted by its interfaces, headers included. Efficiency
is the time of a step of one node alone, divided by that of this step. The recommended method is the
most exact one whose step takes at most 5 % longer than the shortest. Simulated nodes share the
cores of one machine: compare methods there, and measure efficiency on real nodes.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils import launch

launch.prepare()  # before torch is imported, which takes seconds

from bench import commands, namespaces, rounds
from compare.table import markdown_table

from utils.errors import UserError, report, tolerate_broken_pipe
from utils.option_types import list_of, number, positive

METHODS = "fp32,fp16,int8,int4,powersgd:4"
PORT = 29555


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        measured = {count: measure(count, args) for count in args.nodes}
    except UserError as error:
        return report(error)
    if args.rank:
        return 0
    head = ["nodes", "method", "MB sent", "step, ms", "images/s", "efficiency"]
    rows = [row for count, found in measured.items() for row in rows_of(count, found)]
    print(markdown_table([*head, f"to {args.methods[0]}"], rows))
    for count, times in measured.items():
        print(recommendation(count, times))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    counts, above_0 = list_of(number(int, 2)), number(float, 0, exclusive=True)
    add("--nodes", default=[2], type=counts, metavar="LIST", help="such as 2,4,8 (2)")
    add("--methods", default=METHODS.split(","), type=_methods, metavar="LIST", help=f"({METHODS})")
    add("--rounds", type=positive, default=3, metavar="N", help="(%(default)s)")
    text = "of one run; one that takes longer ends the bench (%(default)s)"
    add("--limit", type=positive, default=600, metavar="SECONDS", help=text)
    add("--gbit", type=above_0, default=10.0, metavar="X", help="of each simulated link, Gbit/s")
    group = parser.add_argument_group("between real machines")
    group.add_argument("--master", metavar="IP", help="of rank 0; the links are not limited then")
    group.add_argument("--rank", type=number(int, 0), default=0, metavar="R", help="of this node")
    group.add_argument("--port", type=positive, default=PORT, help="of rank 0 (%(default)s)")
    args = parser.parse_args(argv[:end])
    args.options = argv[end + 1 :]
    if args.master and len(args.nodes) > 1:
        parser.error("--nodes takes one number with --master")
    return args


def _methods(text: str) -> list[str]:
    from utils.extras import compress

    try:
        return [compress.parse(word).name for word in text.split(",")]
    except UserError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from None


def measure(count: int, args: argparse.Namespace) -> dict[str, list[rounds.Figures]]:
    """The summaries of each round on ``count`` nodes, by method, after "alone", one node's.

    They are empty on machines other than rank 0's.
    """
    with places(count, args) as (nodes, master):

        def figures_of(method: str) -> rounds.Figures:
            if method != "alone":
                return run(nodes, count, method, master, args)
            return {} if args.rank else run(nodes[:1], 1, "fp32", master, args)

        print(f"... {count} nodes", file=sys.stderr, flush=True)
        return rounds.measure(["alone", *args.methods], args.rounds, figures_of, strict=True)


@contextlib.contextmanager
def places(count: int, args: argparse.Namespace) -> Iterator[tuple[list[list[str]], str]]:
    """The command prefix of each local node, and the address of rank 0."""
    if args.master:
        yield [[]], args.master
        return
    with namespaces.network(count) as nodes:
        for node in nodes:
            namespaces.limit(node, f"{int(args.gbit * 1e9)}bit", "200ms")
        yield [list(node.enter) for node in nodes], namespaces.address(0)


def run(
    nodes: list[list[str]], count: int, method: str, master: str, args: argparse.Namespace
) -> rounds.Figures:
    """The summary of the run; empty on ranks other than 0. Raises: `UserError`."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory() as out:
        each = []
        for rank, enter in enumerate(nodes, args.rank):
            words = [*enter, sys.executable, str(ROOT / "imagenet_ddp.py"), "--dummy"]
            words += ["--comm", method, "--world-size", str(count), "--rank", str(rank)]
            words += ["--dist-url", f"tcp://{master}:{args.port}", *args.options]
            each.append([*words, "--output-dir", f"{out}/{rank}", "--name", "case"])
        late = f"{method} on {count} nodes takes longer than --limit"
        for rank, done in enumerate(commands.run(each, args.limit, late, env=env, cwd=ROOT)):
            if done.returncode:
                said = commands.last_lines(done)
                raise UserError(f"node {rank + args.rank} failed: {said}")
        summary = Path(f"{out}/0/case/summary.json")
        return json.loads(summary.read_text()) if not args.rank else {}


def rows_of(count: int, found: dict[str, list[rounds.Figures]]) -> list[list[str]]:
    """Medians over the rounds; the last column is the speed-up to the first method."""
    alone, first, *_ = found.values()
    columns = [
        rounds.middle("network_mb_per_step", ".1f"),
        rounds.middle("ms_per_step", ".0f"),
        rounds.middle("images_per_s", ".0f"),
        rounds.speed_up(alone, "ms_per_step", ".0%"),
        rounds.speed_up(first, "ms_per_step"),
    ]
    names = [name for name in found if name != "alone"]
    return [[str(count), name, *(cell(found[name]) for cell in columns)] for name in names]


def recommendation(count: int, found: dict[str, list[rounds.Figures]]) -> str:
    """A line with the option to use on ``count`` nodes, and what it saves."""
    from utils.extras import compress

    names = sorted(set(found) - {"alone"}, key=compress.exactness, reverse=True)
    times = {name: median(one["ms_per_step"] for one in found[name]) for name in names}
    best = compress.most_exact(times)
    others = [f"{n}: {times[n]:.0f} ms" for n in ("fp32", "fp16") if n in times and n != best]
    compared = f" ({', '.join(others)})" if others else ""
    return f"{count} nodes: use --comm {best}, {times[best]:.0f} ms per step{compared}"


if __name__ == "__main__":
    tolerate_broken_pipe()
    sys.exit(main())
