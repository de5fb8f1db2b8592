#!/usr/bin/env python3
"""What each way to exchange gradients costs on a network: bytes, time, and how much is hidden.

    sudo .venv/bin/python scripts/bench_network.py
    sudo .venv/bin/python scripts/bench_network.py --models vgg19 --gbit 25,10,5 --nodes 2,4,8

or, between machines as they are, the same line on each with its own --rank:

    python scripts/bench_network.py --nodes 2 --master 172.31.0.10 --rank 0 --gbit 10

The first makes the nodes itself: network namespaces of this machine, whose links the kernel limits.
Each runs DistributedDataParallel with the exchange of the training script (--comm), on tensors of
the model's shapes that become ready in their order; in place of computing it sleeps. Sleeps are
--slow-down times as long and links so many times slower; tensors, buckets and links are --shrink
times smaller: so a few cores can play eight nodes. The table is in the units of the real thing.
Methods take turns, round by round. Bytes are counted by the interfaces, headers included.
"""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import utils.launch.installed  # noqa: E402, F401 (a missing package becomes one sentence)

from bench import namespaces, network_table  # noqa: E402
from bench.network_table import Case  # noqa: E402
from compare import table as tables  # noqa: E402
from forecast_scaling import METHODS, above_0, numbers  # noqa: E402

from utils.comm import methods  # noqa: E402
from utils.errors import UserError, go_on_without_reader, report  # noqa: E402
from utils.launch.network import free_port  # noqa: E402
from utils.option_types import positive  # noqa: E402

WORKER = ROOT / "scripts/bench/network_node.py"
PORT = 29555


@dataclass(frozen=True)
class Model:
    """What one T4 computes per step, in seconds: an estimate, with AMP and in float32."""

    classes: int
    amp_s: float
    fp32_s: float


# VGG-19 with 32 images per step, the others with 64. With AMP: 160 and 400 images/s (VGG-19 and
# ResNet-50), and for ViT-B/32 the latter by multiply-adds (4.09 and 4.41 G per image). In float32:
# 3 x 2 x 19.6, 4.09 and 4.41 GFLOP per image at 5 of the T4's 8.1 TFLOP/s.
MODELS = {
    "vgg19": Model(20, 0.200, 0.753),
    "resnet50": Model(1000, 0.160, 0.314),
    "vit_b_32": Model(1000, 0.173, 0.339),
}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        cases = plan(args)
        found = []
        for case in cases:
            print(f"... {case}", file=sys.stderr, flush=True)
            found.append((case, measure(case, args)))
        if not args.rank:
            finish(args, found)
    except UserError as error:
        return report(error)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", default="vgg19,resnet50", metavar="LIST", help="%(default)s; or vit_b_32")
    add("--nodes", default="2,4,8", metavar="LIST", help="(%(default)s)")
    add("--gbit", default="10", metavar="LIST", help="of each node's link, Gbit/s (%(default)s)")
    add("--precision", default="amp", metavar="LIST", help="amp, fp32 or both (%(default)s)")
    add("--compute-s", type=above_0, metavar="X", help="seconds of compute per step (a T4's)")
    add("--methods", default=",".join(METHODS), metavar="LIST", help="(%(default)s)")
    add("--slow-down", type=positive, metavar="S", help="(20; 1 with --master)")
    add("--shrink", type=positive, metavar="N", help="(16; 1 with --master)")
    add("--rounds", type=positive, default=3, metavar="N", help="(%(default)s)")
    add("--steps", type=positive, default=2, metavar="N", help="per method and round (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="keep all measurements")
    text = "also write the table into this file (default: %(const)s)"
    add("--results", nargs="?", type=Path, const=Path("RESULTS.md"), metavar="FILE", help=text)
    add("--title", default="Ways to exchange gradients", help="of the section in --results")
    group = parser.add_argument_group("between machines as they are")
    group.add_argument("--master", metavar="IP", help="of rank 0; the links are not limited then")
    group.add_argument("--rank", type=int, default=0, metavar="R", help="of this machine")
    group.add_argument("--port", type=positive, default=PORT, help="of rank 0 (%(default)s)")
    group.add_argument("--interface", default="", metavar="IF", help="(the default one)")
    args = parser.parse_args(argv)
    args.slow_down = args.slow_down or (1 if args.master else 20)
    args.shrink = args.shrink or (1 if args.master else 16)
    return args


def plan(args: argparse.Namespace) -> list[Case]:
    """All combinations that the options ask for. Raises: `UserError`."""
    models, precisions = args.models.split(","), args.precision.split(",")
    wanted = args.methods.split(",")
    names = tuple(name if name == "auto" else methods.parse(name).name for name in wanted)
    nodes = numbers(args.nodes, "--nodes")
    try:
        rates = [float(word) for word in args.gbit.split(",")]
    except ValueError:
        rates = [0.0]
    if min(rates) <= 0:
        raise UserError(f"--gbit {args.gbit} is not a list of rates in Gbit/s")
    if nodes[0] < 2 or (args.master and len(nodes) > 1):
        raise UserError(f"--nodes {args.nodes}: at least 2, and one number with --master")
    for given, known, option in (
        (models, MODELS, "--models"),
        (precisions, ("amp", "fp32"), "--precision"),
    ):
        if not set(given) <= set(known):
            raise UserError(f"{option} takes {', '.join(known)}, not {','.join(given)}")
    cases = []
    for arch, precision, gbit, count in itertools.product(models, precisions, rates, nodes):
        model = MODELS[arch]
        compute = args.compute_s or (model.amp_s if precision == "amp" else model.fp32_s)
        scale = args.slow_down, args.shrink
        cases.append(Case(arch, model.classes, precision, compute, gbit, count, names, *scale))
    return cases


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 says; nothing in the others. Raises: `UserError`."""
    order = {
        "arch": case.arch,
        "classes": case.classes,
        "shrink": case.shrink,
        "compute_s": case.compute_s,
        "slow_down": case.slow_down,
        "methods": case.methods,
        "rounds": args.rounds,
        "steps": args.steps,
        "nodes": case.nodes,
    }
    if args.master:
        place = {"rank": args.rank, "master": args.master, "port": args.port}
        return wait([start([], order | place | {"interface": args.interface})], main=not args.rank)
    with namespaces.network(case.nodes) as nodes:
        for node in nodes:
            # A large burst would be a good part of a small bucket.
            rate = case.link_bits_per_s
            burst = max(16_000, int(rate / 8 * 0.002))
            namespaces.limit(node, f"{int(rate)}bit", f"{burst}", "200ms")
        place = {"master": namespaces.address(0), "port": free_port(), "interface": "eth0"}
        started = [
            # So that they end with this process, however it ends.
            start(["setpriv", "--pdeathsig", "KILL", *node.enter], order | place | {"rank": rank})
            for rank, node in enumerate(nodes)
        ]
        return wait(started)


def start(inside: list[str], order: dict[str, Any]) -> subprocess.Popen:
    """A node's process."""
    command = [*inside, sys.executable, str(WORKER), json.dumps(order)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    env["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # addresses here have no names
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True)


def wait(started: list[subprocess.Popen], main: bool = True) -> dict[str, Any]:
    """What the first of the processes has printed, when all have ended. Raises: `UserError`."""
    try:
        out = [one.communicate()[0] for one in started]
    finally:
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                one.kill()
    if any(one.returncode for one in started):
        raise UserError("a node failed: see above")
    return json.loads(out[0]) if main else {}


def finish(args: argparse.Namespace, found: list[tuple[Case, dict[str, Any]]]) -> None:
    """Print the table, and write what was asked for. Raises: `UserError`."""
    head, rows = network_table.table(found)
    print(network_table.as_text(head, rows))
    remarks = network_table.remarks(found)
    print("\n".join(remarks))
    if args.json:
        content = [{"case": vars(case), "found": one} for case, one in found]
        args.json.write_text(json.dumps(content, indent=1))
    if args.results:
        command = shlex.join(["python", "scripts/bench_network.py", *sys.argv[1:]])
        section = network_table.section(args.title, command, (head, rows), remarks)
        tables.put(args.results, "bench_network", args.title, section)


if __name__ == "__main__":
    go_on_without_reader()
    sys.exit(main())
