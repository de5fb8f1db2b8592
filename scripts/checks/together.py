"""All nodes together: each checks itself, then their versions, clocks and data are compared."""

import argparse
import os
import platform
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from checks import network, node
from checks.findings import ERROR, OK, WARNING, Finding
from torch.cuda import nccl
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] documented there

from utils.data.sources import Source
from utils.start import addresses, agreement, nvidia
from utils.start.errors import UserError
from utils.start.world import World

START = timedelta(minutes=2)  # for a node to import torch when all have joined
LONG = timedelta(minutes=30)  # listing ImageNet for the first time on a network disk takes minutes
CLOCK_LIMIT = 2.0  # seconds
# What should be the same on all nodes, and why.
COMPARED = {
    "NCCL": "NCCL works only with its own version",
    "Python": "one node unpickles objects that another has pickled",
    "GPUs": "all processes wait for the slowest; -g needs the same number of GPUs",
    "driver": "a torch that works on one node may not work on another",
    "MTU": "large messages can vanish, and training hangs at its first all-reduce",
}


@dataclass
class Report:
    """What a node says about itself."""

    name: str
    gpus: list[str]
    facts: dict[str, object]  # the keys of `COMPARED`
    own: list[Finding]  # their texts are to follow the node's name
    now: float  # its clock, seconds
    need: float | None  # images/s that one of its GPUs trains
    parts: list[str]  # of its data set; none if it cannot be used


def check_all(args: argparse.Namespace) -> list[Finding]:
    """Check each node and the network between them. Collective.

    Returns: the findings, the same on every node.
    """
    gpus: list[str] = []
    sources: dict[str, Source] = {}
    own = list(node.check_machine(args, gpus))
    interface = addresses.interface_towards(args.master)
    if interface:  # so that the doctor's own messages reach node 0
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    world = join(args)
    now = time.time()
    need = node.images_per_gpu(args, gpus)
    own += node.check_data(args, (need or 0) * max(1, len(gpus)), sources)
    name = f"node {args.rank} ({socket.gethostname()})"
    report = Report(name, gpus, facts(interface, gpus), own, now, need, list(sources))
    nodes = world.gather(report)
    shown = ", ".join(nodes[0].gpus) or "none"
    findings = [Finding(OK, f"node 0 has torch {torch.__version__}, GPUs: {shown}")]
    for one in nodes:
        findings += [found._replace(text=one.name + found.text) for found in one.own]
    findings += [*compare_clocks(nodes), *compare_facts(nodes)]
    if all(one.parts for one in nodes):
        findings += compare_data(sources, nodes, world)
    if args.nodes > 1:
        names, needs = [one.name for one in nodes], [one.need for one in nodes]
        findings += network.check_network(args, names, needs, world)
    dist.barrier()
    dist.destroy_process_group()
    return sorted(findings, key=lambda one: one.level)


def join(args: argparse.Namespace) -> World:
    """Join the process group of all nodes, with one process each."""
    store = TCPStore(args.master, args.port, args.nodes, args.rank == 0, timeout=START)
    dist.init_process_group(
        "gloo", store=store, rank=args.rank, world_size=args.nodes, timeout=LONG
    )
    dist.barrier()
    return World(torch.device("cpu"), args.rank, args.nodes, nodes=args.nodes)


def facts(interface: str | None, gpus: list[str]) -> dict[str, object]:
    """What should be the same on all nodes: a value for each key of `COMPARED`."""
    mtu = Path(f"/sys/class/net/{interface}/mtu")
    return {
        "NCCL": dist.is_nccl_available() and nccl.version(),
        "Python": agreement.release(platform.python_version()),
        "GPUs": gpus,
        "driver": nvidia.look().driver or "none",
        "MTU": mtu.read_text().strip() if mtu.exists() else "unknown",
    }


def compare_clocks(nodes: list[Report]) -> Iterator[Finding]:
    """Find clocks that differ from node 0's."""
    for one in nodes:
        ahead = one.now - nodes[0].now
        if abs(ahead) > CLOCK_LIMIT:
            side = "ahead of" if ahead > 0 else "behind"
            text = f"the clock of {one.name} is {abs(ahead):.1f} s {side} that of node 0"
            why = "logs cannot be compared, and object stores reject requests; turn on time "
            why += "synchronisation there (timedatectl set-ntp true, or chrony)"
            yield Finding(WARNING, text, why)


def compare_facts(nodes: list[Report]) -> Iterator[Finding]:
    """Find facts of `COMPARED` that are not the same on all nodes."""
    for key, why in COMPARED.items():
        if mismatch := agreement.describe_mismatch([(x.name, {key: x.facts[key]}) for x in nodes]):
            is_error = key == "NCCL" and any(one.gpus for one in nodes)
            yield Finding(ERROR if is_error else WARNING, mismatch, why)


def compare_data(
    sources: dict[str, Source], nodes: list[Report], world: World
) -> Iterator[Finding]:
    """Find parts of the data set that are not the same on all nodes. Collective."""
    for part in ("train", "val", "test"):
        without = [one.name for one in nodes if part not in one.parts]
        if len(without) == len(nodes):
            continue
        if without:
            text = f"DATA/{part} is missing on {', '.join(without)}"
            yield Finding(ERROR, text, "copy it there, or remove it from the other nodes")
            continue
        try:
            agreement.compare_data(f"DATA/{part}", sources[part], world)
            yield Finding(OK, f"data: {part} {sources[part].fingerprint()}")
        except UserError as error:
            why = "each node selects images by position in its own list; copy the data set again "
            yield Finding(ERROR, str(error), why + "(rsync -a --checksum --delete)")
