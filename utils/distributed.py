"""Where a process stands in the job: launch styles, process group, ranks, reductions.

Facts about ranks are computed once, into a `World`; nothing else asks torch.distributed for them.
"""

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils import failures, network, preflight, processes
from utils.errors import UserError


@dataclass(frozen=True)
class World:
    """The job as one of its processes sees it (``rank`` of ``size``, on ``nodes`` nodes)."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    nodes: int = 1
    control: Any = None  # a gloo group: small decisions travel on the CPU and never stall the GPU

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files."""
        return self.rank == 0

    @property
    def device_ids(self) -> list[int] | None:
        """What DistributedDataParallel wants to hear: this process's GPU, or None on the CPU."""
        return [self.local_rank] if self.device.type == "cuda" else None


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


def single_process() -> World:
    """The world of a script that runs as one process: the first GPU, or the CPU without one."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return World(device)


def launch(train: Callable[[Any, World], int], args: Any) -> int:
    """Run ``train(args, world)`` in each process that this node owes to the job.

    Under torchrun or torch.distributed.launch this process is one of them. Otherwise it starts
    ``-g`` processes (default: one a GPU; one without GPUs) of node ``--rank`` of ``--world-size``
    nodes. MASTER_ADDR, MASTER_PORT, WORLD_SIZE (nodes) and NODE_RANK in the environment stand in
    for ``--dist-url``, ``--world-size`` and ``--rank``.

    Returns: the exit code for this process. Raises: `UserError`.
    """
    if "LOCAL_RANK" in os.environ:
        processes.die_with_parent()
        return _run(train, args, _place_from_torchrun())
    places = _places_of_this_node(args)
    return processes.supervise([(_run, (train, args, place)) for place in places])


def _place_from_torchrun() -> Place:
    try:
        env = {key: os.environ[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    except KeyError as missing:
        raise UserError(
            f"LOCAL_RANK is set but {missing} is not: start with torchrun, or unset LOCAL_RANK",
            alike=True,
        ) from None
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env["RANK"] == "0":
        # torch 2.14 no longer tells attempts apart in the store that it shares with torchrun.
        print(
            "note: a restart may meet the addresses of processes that have ended: set "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun --max-restarts, as "
            "scripts/elastic_train.sh does",
            flush=True,
        )
    return Place(
        rank=int(env["RANK"]),
        size=int(env["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        init_method="env://",
        master=env["MASTER_ADDR"],
        port=int(env["MASTER_PORT"]),
    )


def _places_of_this_node(args: Any) -> list[Place]:
    nodes = args.world_size if args.world_size is not None else _env_int("WORLD_SIZE", 1)
    node = args.rank if args.rank is not None else _env_int("NODE_RANK", 0)
    if not 0 <= node < nodes:
        raise UserError(f"--rank {node} is not one of the node ranks 0 to {nodes - 1}")
    gpus = torch.cuda.device_count()
    local_size = args.gpus or max(gpus, 1)
    if gpus and local_size > gpus:
        raise UserError(f"-g {local_size} asks for more GPUs than the {gpus} of this node")

    if args.dist_url:
        host, port = network.parse_tcp_url(args.dist_url)
    elif "MASTER_ADDR" in os.environ:
        host, port = os.environ["MASTER_ADDR"], _env_int("MASTER_PORT", 29500)
    elif nodes == 1:
        host, port = "127.0.0.1", network.free_port()
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
            init_method=f"tcp://{host}:{port}",
            master=host,
            port=port,
        )
        for local in range(local_size)
    ]


def _env_int(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:
        raise UserError(f"{name}={os.environ[name]} in the environment is not a number") from None


def _run(train: Callable[[Any, World], int], args: Any, place: Place) -> int:
    os.environ["RANK"] = str(place.rank)
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    world = _join(args, place)
    peers: list[failures.Peer] = []
    try:
        peers = gather(
            failures.Peer(_node_name(world), network.address_towards(place.master)), world
        )
        check_versions(world)
        code = train(args, world)
    except (RuntimeError, TimeoutError) as fault:
        sentence = failures.explain(fault, world.rank, peers, args.dist_timeout)
        if sentence is None:
            raise
        raise UserError(sentence) from fault
    dist.destroy_process_group()
    return code


def _join(args: Any, place: Place) -> World:
    """Make the process group of ``place`` and the device of this process."""
    backend = _choose_backend(args.dist_backend, place)
    nodes = place.size // place.local_size
    if torch.cuda.is_available():
        if place.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"{place.local_size} processes on this node, but it has only "
                f"{torch.cuda.device_count()} GPUs: start one process a GPU"
            )
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        # Started by hand, each process would take all cores, and they would fight for them.
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, processes.usable_cores() // place.local_size))

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
            f"the {place.size} processes of the job did not all come to {master} within "
            f"{seconds:g} s: are all nodes started, with different node ranks, and is every port "
            f"between them open? ({text.splitlines()[0] if text else type(fault).__name__})"
        )
    return (
        f"could not join the job at {master} within {seconds:g} s: is every port between the nodes "
        f"open, not only the master's? ({text.splitlines()[0] if text else type(fault).__name__})"
    )


def from_main(compute: Callable[[], Any], world: World) -> Any:
    """Compute something in rank 0 alone and give its (picklable) result to every process.

    A `UserError` raised in rank 0 is raised in every process, so that all end together.
    """
    if world.size == 1:
        return compute()
    box: list[Any] = [None, None]
    if world.is_main:
        try:
            box[0] = compute()
        except UserError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0, group=world.control)
    if box[1] is not None:
        raise UserError(box[1], alike=True)
    return box[0]


def gather(value: Any, world: World) -> list[Any]:
    """Every process's (picklable) ``value``, in the order of ranks, for every process."""
    if world.size == 1:
        return [value]
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, value, group=world.control)
    return found


def first_on_node(compute: Callable[[], Any], world: World) -> Any:
    """Compute something in the first process of each node, then in its other processes.

    A `UserError` raised in any of the first is raised in every process, so that all end together.
    """
    result, error = None, None
    if world.local_rank == 0:
        try:
            result = compute()
        except UserError as fault:
            error = str(fault)
    errors = [text for text in gather(error, world) if text]
    if errors:
        raise UserError(errors[0], alike=True)
    return result if world.local_rank == 0 else compute()


def check_alike(
    what: str, value: Any, world: World, parts: Callable[[], dict[str, str]] | None = None
) -> None:
    """Raise `UserError`, naming the nodes, unless ``value`` is the same in every process.

    ``parts()``, asked only when it is not, lets the sentence name the first part that differs.
    """
    found = gather((_node_name(world), value), world)
    if any(other != found[0][1] for _, other in found):
        nodes = dict.fromkeys(f"{node} has {other}" for node, other in found)
        first = gather((_node_name(world), parts()), world) if parts else []
        raise UserError(
            f"{what} differs between the nodes: "
            + "; ".join([*nodes, *([preflight.first_difference(first)] if first else [])]),
            alike=True,
        )


def check_versions(world: World) -> None:
    """Raise `UserError`, naming the nodes, unless all run the same code and fitting versions."""
    if world.size == 1:
        return
    mine = {
        "this code": preflight.code(Path(sys.argv[0])),
        "torch": preflight.release(preflight.torch_version()),
    }
    if world.device.type == "cuda":
        mine["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    fault = preflight.unlike(gather((_node_name(world), mine), world))
    if fault:
        raise UserError(fault, alike=True)


def _node_name(world: World) -> str:
    # Cloned machines often have one name: the number of the node tells them apart.
    return f"{socket.gethostname()} (node {world.rank // world.local_size})"


def sum_over_ranks(values: Tensor, world: World) -> Tensor:
    """Sum ``values`` (any shape, on the world's device) over all processes, in place."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


@torch.no_grad()
def copy_from_main(model: nn.Module, world: World, parameters: bool = True) -> None:
    """Give every process rank 0's buffers and, unless told otherwise, parameters."""
    if world.size > 1:
        tensors = list(model.buffers()) + (list(model.parameters()) if parameters else [])
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
