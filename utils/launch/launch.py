"""How the processes of a job start and meet: launch styles, process group, devices."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from utils.errors import LOST_PEER, UserError
from utils.launch import agreement, faults, gpus, kernels, network, preflight, supervise
from utils.launch.world import World, gather, node_name
from utils.option_types import count, from_environment, port, positive, seconds


@dataclass(frozen=True)
class Place:
    """Which process of the job this is, before there is a process group."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    init_method: str
    master: str  # host name or IP address of the master
    port: int


def add_options(parser: argparse.ArgumentParser) -> None:
    """How the processes of a distributed run find each other."""
    group = parser.add_argument_group(
        "processes and nodes",
        "Under torchrun or torch.distributed.launch the environment decides, and the first four "
        "are\nignored. Started by hand, type the same line on each node with its own --rank.",
    )
    group.add_argument(
        "-n", "--world-size", type=positive, metavar="NODES", help="number of nodes; default 1"
    )
    group.add_argument(
        "-nr", "--rank", type=count, metavar="R", help="rank of this node, 0 to NODES - 1"
    )
    group.add_argument(
        "-g",
        "--gpus",
        type=positive,
        metavar="N",
        help="processes on this node; default: one per GPU, or one without GPUs",
    )
    group.add_argument("--dist-url", metavar="tcp://IP:PORT", help="address of node 0")
    group.add_argument(
        "--dist-backend",
        choices=("nccl", "gloo"),
        help="nccl with GPUs, else gloo; nccl without a GPU falls back to gloo and says so",
    )
    group.add_argument(
        "--dist-timeout",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait for other nodes before giving up",
    )
    group.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    group.add_argument(
        "--sync-bn", action="store_true", help="batch norm over the batches of all GPUs"
    )


def single_process() -> World:
    """The world of a script that runs as one process: the first GPU, or the CPU without one."""
    gpus.check()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kernels.settle(device)
    return World(device)


def run(worker: Callable[[Any, Place], int], args: Any) -> int:
    """Run ``worker(args, place)`` in each process of this node.

    Under torchrun or torch.distributed.launch this process is one of them. Otherwise it starts
    ``-g`` processes (default: one per GPU; one without GPUs) of node ``--rank`` of ``--world-size``
    nodes. MASTER_ADDR, MASTER_PORT, WORLD_SIZE (nodes) and NODE_RANK in the environment stand in
    for ``--dist-url``, ``--world-size`` and ``--rank``.

    Returns: the exit code for this process. Raises: `UserError`.
    """
    gpus.check()
    if "LOCAL_RANK" in os.environ:
        return worker(args, _place_from_torchrun())
    places = _places_of_this_node(args)
    first = places[0]
    if first.size > first.local_size:
        nodes, node = first.size // first.local_size, first.rank // first.local_size
        master = (first.master, first.port)
        check = preflight.Preflight(node, nodes, master, args.dist_timeout, _typed(args))
        check.begin()
        check.finish(first.local_size)
    return supervise.supervise([(worker, (args, place)) for place in places])


def _typed(args: Any) -> preflight.Names:
    """What the user has typed to say which node this is."""
    if os.environ.get(supervise.MARKER, "").startswith("launcher"):
        return preflight.Names("NODES", "NODE_RANK", "MASTER_PORT")  # multi_node_train.sh
    return preflight.Names(
        "WORLD_SIZE" if args.world_size is None else "--world-size (-n)",
        "NODE_RANK" if args.rank is None else "--rank (-nr)",
        "port in --dist-url" if args.dist_url else "MASTER_PORT",
    )


def _place_from_torchrun() -> Place:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(
                f"LOCAL_RANK is set but {name} is not: start with torchrun, or unset LOCAL_RANK",
                alike=True,
            )
    rank, size = from_environment("RANK", count), from_environment("WORLD_SIZE", positive)
    if rank >= size:
        raise UserError(f"RANK={rank} in the environment, but WORLD_SIZE={size}: unset them")
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and rank == 0:
        # torch 2.14 no longer tells attempts apart in the store that it shares with torchrun.
        print(
            "note: a restart may meet the addresses of processes that have ended: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun --max-restarts, as "
            "scripts/elastic_train.sh does",
            flush=True,
        )
    return Place(
        rank=rank,
        size=size,
        local_rank=from_environment("LOCAL_RANK", count),
        local_size=from_environment("LOCAL_WORLD_SIZE", positive, 1),
        init_method="env://",
        master=os.environ["MASTER_ADDR"],
        port=from_environment("MASTER_PORT", port),
    )


def _places_of_this_node(args: Any) -> list[Place]:
    nodes = (
        args.world_size
        if args.world_size is not None
        else from_environment("WORLD_SIZE", positive, 1)
    )
    node = args.rank if args.rank is not None else from_environment("NODE_RANK", count, 0)
    if not 0 <= node < nodes:
        raise UserError(f"--rank {node} is not one of the node ranks 0 to {nodes - 1}")
    visible = torch.cuda.device_count()
    local_size = args.gpus or max(visible, 1)
    if visible and local_size > visible:
        raise UserError(f"-g {local_size} asks for more GPUs than the {visible} of this node")

    if args.dist_url:
        host, number = network.parse_tcp_url(args.dist_url)
    elif "MASTER_ADDR" in os.environ:
        host, number = os.environ["MASTER_ADDR"], from_environment("MASTER_PORT", port, 29500)
    elif nodes == 1:
        host, number = "127.0.0.1", network.free_port()
    else:
        raise UserError(
            f"{nodes} nodes need the address of node 0: --dist-url tcp://IP:PORT, "
            "or MASTER_ADDR and MASTER_PORT in the environment"
        )
    return [
        Place(
            rank=node * local_size + local,
            size=nodes * local_size,
            local_rank=local,
            local_size=local_size,
            init_method=f"tcp://{host}:{number}",
            master=host,
            port=number,
        )
        for local in range(local_size)
    ]


@contextmanager
def process_group(args: Any, place: Place) -> Iterator[World]:
    """torch.distributed's process group, which all processes of the job join at the master's port.

    Gives this process's `World`. Raises: `UserError` when the processes do not meet, when their
    nodes differ in code or versions, and, inside the context, when the communication fails.
    """
    os.environ["RANK"] = str(place.rank)
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    world = _join(args, place)
    peers: list[faults.Peer] = []
    try:
        me = faults.Peer(node_name(world), network.address_towards(place.master))
        peers = gather(me, world)
        _check_versions(world)
        yield world
    except (RuntimeError, TimeoutError) as fault:
        sentence = faults.of_collective(fault, world.rank, peers, args.dist_timeout)
        if sentence is None:
            raise
        raise UserError(sentence, code=LOST_PEER) from fault
    # Not after an exception: the process then ends at once, instead of waiting for the others.
    dist.destroy_process_group()


def _join(args: Any, place: Place) -> World:
    """Make the process group of ``place`` and the device of this process."""
    backend = _choose_backend(args.dist_backend, place)
    nodes = place.size // place.local_size
    if torch.cuda.is_available():
        if place.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"{place.local_size} processes on this node, but it has only "
                f"{torch.cuda.device_count()} GPUs: start one process per GPU"
            )
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
        kernels.settle(device)
    else:
        device = torch.device("cpu")
        # Started by hand, each process would take all cores, and they would fight for them.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, supervise.usable_cores() // place.local_size))

    # gloo looks up this host's own name, which often gives 127.0.1.1 or nothing; NCCL may take
    # Docker's bridge. The interface that leads to the master is right ("=": not a prefix).
    interface = network.interface_towards(place.master) if nodes > 1 else network.LOOPBACK
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if nodes > 1:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")

    timeout = timedelta(seconds=args.dist_timeout)
    if args.sync_bn and device.type == "cpu":
        raise UserError("--sync-bn needs GPUs: torch has no SyncBatchNorm for the CPU", alike=True)
    if place.rank != 0:
        network.wait_for_master(place.master, place.port, args.dist_timeout)
    try:
        dist.init_process_group(
            backend,
            init_method=place.init_method,
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
        )
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError, OSError) as fault:
        raise UserError(_why_no_group(fault, place, args.dist_timeout)) from fault
    return World(device, place.rank, place.size, place.local_rank, place.local_size, nodes, control)


def _choose_backend(wanted: str | None, place: Place) -> str:
    if wanted == "nccl" and not torch.cuda.is_available():
        # A fall-back, not an error: the documented multi-GPU command lines, which name nccl, can
        # then be tried on any machine before GPUs are paid for.
        if place.rank == 0:
            print("note: no GPU here, so gloo is used in place of nccl", flush=True)
        return "gloo"
    return wanted or ("nccl" if torch.cuda.is_available() else "gloo")


def _why_no_group(fault: Exception, place: Place, seconds: float) -> str:
    text = str(fault)
    master = f"{place.master}:{place.port}"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return f"port {place.port} of {place.master} is taken by another program: choose another"
    if place.rank == 0:
        return (
            f"the {place.size} processes of the job did not all arrive at {master} within "
            f"{seconds:g} s: are all nodes started, with different node ranks, and is every port "
            f"between them open? ({text.splitlines()[0] if text else type(fault).__name__})"
        )
    return (
        f"could not join the job at {master} within {seconds:g} s: is every port between the nodes "
        f"open, not only the master's? ({text.splitlines()[0] if text else type(fault).__name__})"
    )


def _check_versions(world: World) -> None:
    """Raise `UserError`, naming the nodes, unless all run the same code and fitting versions."""
    if world.size == 1:
        return
    mine = {
        "this code": agreement.code(Path(sys.argv[0])),
        "torch": agreement.release(agreement.torch_version()),
    }
    if world.device.type == "cuda":
        mine["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    fault = agreement.unlike(gather((node_name(world), mine), world))
    if fault:
        raise UserError(fault, alike=True)
