#!/usr/bin/env python3
"""Check nodes before training on them: this machine alone, or all hosts of a file over ssh. Or run
it by hand on each node at the same time, with the --master and --port that training will use.

    bash scripts/doctor.sh --data DIR
    bash scripts/doctor.sh HOSTS_FILE --data DIR -a resnet50 -b 64
    python scripts/doctor.py --rank R --nodes N --master IP --data DIR

It begins with the pre-flight check of a run (ports in both directions, code, torch). Then each node
checks itself: GPUs, disk space, limits, data set, speed of reading and decoding. Node 0 compares
the nodes' versions, data and clocks, and compares the time of an all-reduce with that of a step.

Node 0 prints the findings. The exit code is the same on every node: 0 if all is well, 1 after
warnings (training works, but read them), 2 after errors (training would fail).
"""

import argparse
import io
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/ssh")]

import hosts
from checks.findings import ERROR, MARKS, WARNING, Finding
from job import Job

from utils.start import addresses, errors, launch, preflight
from utils.start.errors import UserError
from utils.start.option_types import (
    count,
    from_environment,
    non_negative,
    number,
    path,
    port,
    positive,
)


def parse() -> argparse.Namespace:
    env, parser = os.environ, hosts.make_parser("doctor.sh", __doc__)
    hosts.add_node_options(parser)
    add = parser.add_argument
    rank, nodes = env.get("NODE_RANK", "0"), env.get("WORLD_SIZE", "1")
    add("--rank", type=count, default=rank, metavar="R", help="rank of this node")
    add("--nodes", type=positive, default=nodes, metavar="N", help="number of nodes")
    add("--master", default=env.get("MASTER_ADDR"), metavar="IP", help="address of node 0")
    add("--port", type=port, help="port of node 0 (8888; with HOSTS_FILE a free one)")
    add("--data", metavar="DIR", help="image folder ($IMAGENET_DIR, else /data)")
    add("-a", "--arch", default="resnet50", help="model whose step is estimated")
    add("-b", "--batch-size", type=positive, default=128, metavar="N", help="images per process")
    add("--image-size", type=positive, default=224, metavar="PX", help="side of the crops")
    text = "images/s that one GPU trains, measured by bench_step.py; default: published figures"
    add("--need", type=number(float, 0, 1e9, exclusive=True), metavar="IMAGES_PER_S", help=text)
    add("--output-dir", default="runs", metavar="DIR", help="where runs will be written")
    text = "how long to wait for the other nodes (60; with HOSTS_FILE 20)"
    add("--wait", type=non_negative, metavar="SECONDS", help=text)
    parser.set_defaults(grace=5.0, elastic=None)
    args = parser.parse_args()
    # Over ssh, all nodes start at the same time, so none has to wait long.
    if args.wait is None:
        args.wait = 20 if args.hosts else 60
    if not args.hosts:
        if args.nodes > 1 and not args.master:
            raise UserError(f"--nodes {args.nodes} needs --master, the IP address of node 0")
        if args.rank >= args.nodes:
            raise UserError(f"--rank {args.rank} is not one of 0 to {args.nodes - 1}")
        args.master = args.master or "127.0.0.1"
        args.port = args.port or from_environment("MASTER_PORT", port, 8888)
        args.data = path(args.data or env.get("IMAGENET_DIR", "/data"))
        args.output_dir = path(args.output_dir)
    return args


def examine(args: argparse.Namespace) -> int:
    """Check this node together with the others, and print the findings. Returns: the exit code."""
    launch.prepare()  # before torch is imported, which takes seconds
    is_printed = args.rank == 0
    try:
        if args.nodes > 1:
            preflight.meet(args.rank, args.nodes, 1, (args.master, args.port), args.wait)
        else:
            args.port = addresses.free_port()
        if is_printed:
            launch.print_first_line()
        from checks import together  # imports torch

        from utils.model import models

        models.check_name(args.arch)
        findings = together.check_all(args)
    except (UserError, RuntimeError) as error:
        findings, is_printed = [Finding(ERROR, str(error).partition("\n")[0])], True
    for level, text, why in findings if is_printed else ():
        print(f"{MARKS[level]} {text}", *([why] if why else []), sep="\n    ")
    levels = [level for level, *_ in findings]
    total = f"all is well ({len(findings)} checks)"
    if max(levels):
        numbers = {"error": levels.count(ERROR), "warning": levels.count(WARNING)}
        total = ", ".join(f"{n} {word}{'s' * (n != 1)}" for word, n in numbers.items())
    print(f"node {args.rank}: {total}" + " (see node 0)" * (args.rank > 0), flush=True)
    return max(levels)


def over_ssh(args: argparse.Namespace) -> int:
    """Run this program on every host of a file. Returns its exit code."""
    machines = [replace(host, slots=None) for host in hosts.read(args.hosts)]
    names = ("data", "arch", "batch_size", "image_size", "need", "output_dir", "wait")
    options = [(name.replace("_", "-"), getattr(args, name)) for name in names]
    command = ["scripts/doctor.py", *(f"--{n}={v}" for n, v in options if v is not None)]
    return Job(args, command, machines, "doctor").run()


def main() -> int:
    args = parse()
    if args.hosts:
        return over_ssh(args)
    # When one node has finished, the ssh job ends the others. This one may still have to print.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(4))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal without UTF-8
    return examine(args)


if __name__ == "__main__":
    errors.exit_with(main)
