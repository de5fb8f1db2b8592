"""How the processes of a job start, and what each is told in its environment. No torch.

Each process finds its place as torchrun tells it: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. `utils.launch.world` joins them.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

from utils.errors import UserError
from utils.launch import supervise
from utils.option_types import count, from_environment, port, positive, seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    """How the processes of a distributed run find each other."""
    add: Callable[..., Any] = parser.add_argument_group(
        "processes and nodes",
        "Under torchrun or torch.distributed.launch the environment decides, and the first four "
        "are\nignored. Started by hand, type the same command on each node with its own --rank.",
    ).add_argument
    add("-n", "--world-size", type=positive, metavar="NODES", help="number of nodes; default 1")
    add("-nr", "--rank", type=count, metavar="R", help="rank of this node, 0 to NODES - 1")
    text = "processes on this node; default: one per GPU, or one without GPUs"
    add("-g", "--gpus", type=positive, metavar="N", help=text)
    add("--dist-url", metavar="tcp://IP:PORT", help="address of node 0")
    text = "nccl with GPUs, else gloo; nccl without a GPU falls back to gloo and says so"
    add("--dist-backend", choices=("nccl", "gloo"), help=text)
    text = "how long to wait for other nodes before giving up"
    add("--dist-timeout", type=seconds, default=300.0, metavar="SECONDS", help=text)
    add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    add("--sync-bn", action="store_true", help="batch norm over the batches of all GPUs")


def single_process() -> Any:
    """The `World` of a script that runs as one process. Imports torch, which this file does not."""
    from utils.launch import world

    return world.single_process()


def process_group(args: Any) -> Any:
    """A context with the `World` of this process; see `utils.launch.world.process_group`."""
    from utils.launch import world

    return world.process_group(args)


def run(worker: Callable[[Any], int], args: Any) -> int:
    """Run ``worker(args)`` in each process of this node.

    Under torchrun or torch.distributed.launch this process is one of them. Otherwise it starts
    ``-g`` processes (default: one per GPU; one without GPUs) of node ``--rank`` of ``--world-size``
    nodes. MASTER_ADDR, MASTER_PORT, WORLD_SIZE (nodes) and NODE_RANK in the environment are the
    defaults of ``--dist-url``, ``--world-size`` and ``--rank``.

    Returns: the exit code for this process. Raises: `UserError`.
    """
    if "LOCAL_RANK" in os.environ:
        _check_environment()
        return worker(args)
    import torch

    rank, nodes, (host, number) = _node(args)
    visible = torch.cuda.device_count()
    processes = args.gpus or max(visible, 1)
    if visible and processes > visible:
        raise UserError(f"-g {processes} asks for more GPUs than the {visible} of this node")
    if nodes > 1:
        from utils.launch import preflight

        check = preflight.Preflight(rank, nodes, (host, number), args.dist_timeout, _names(args))
        check.meet(processes)
    job = {"WORLD_SIZE": nodes * processes, "LOCAL_WORLD_SIZE": processes}
    job |= {"MASTER_ADDR": host, "MASTER_PORT": number}
    ranks = [
        job | {"RANK": rank * processes + local, "LOCAL_RANK": local} for local in range(processes)
    ]
    return supervise.supervise(worker, args, ranks)


def _names(args: Any) -> Any:
    """What the pre-flight check calls the values of this command line."""
    from utils.launch.preflight import Names

    if os.environ.get(supervise.MARKER, "").startswith("launcher"):  # multi_node_train.sh
        return Names()
    return Names(
        "WORLD_SIZE" if args.world_size is None else "--world-size (-n)",
        "NODE_RANK" if args.rank is None else "--rank (-nr)",
        "port in --dist-url" if args.dist_url else "MASTER_PORT",
    )


def _node(args: Any) -> tuple[int, int, tuple[str, int]]:
    """This node's rank, the number of nodes, and node 0's host and port. Raises: `UserError`."""
    from utils.launch import network

    nodes, rank = args.world_size, args.rank
    if nodes is None:
        nodes = from_environment("WORLD_SIZE", positive, 1)
    if rank is None:
        rank = from_environment("NODE_RANK", count, 0)
    if rank >= nodes:
        raise UserError(f"--rank {rank} is not one of the node ranks 0 to {nodes - 1}")
    if args.dist_url:
        return rank, nodes, network.parse_tcp_url(args.dist_url)
    if "MASTER_ADDR" in os.environ:
        number = from_environment("MASTER_PORT", port, 29500)
        return rank, nodes, (os.environ["MASTER_ADDR"], number)
    if nodes > 1:
        raise UserError(
            f"{nodes} nodes need the address of node 0: --dist-url tcp://IP:PORT, "
            "or MASTER_ADDR and MASTER_PORT in the environment"
        )
    return rank, nodes, ("127.0.0.1", network.free_port())


def _check_environment() -> None:
    """Raise `UserError` unless the environment tells this process its place."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    found = {name: os.environ.get(name, "") for name in names}
    *numbers, address = found.values()
    if address and all(number.isdecimal() for number in numbers):
        rank, size, local, local_size, number = map(int, numbers)
        if local <= rank < size and local < local_size <= size and 0 < number < 65536:
            return
    raise UserError(
        f"{' '.join(f'{name}={value}' for name, value in found.items())} in the environment is not "
        "the place of a process in a job: start with torchrun, or unset LOCAL_RANK",
        alike=True,
    )
