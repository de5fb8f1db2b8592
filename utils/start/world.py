"""The process group of a job: rank, device, and how processes share values.

Facts about ranks are computed once, into a `World`; nothing else asks torch.distributed for them.
"""

import os
import re
import socket
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.cuda import nccl
from torch.nn.parallel import DistributedDataParallel

from utils.start import agreement, gpu_check, launch, lost_peer, meeting, preflight
from utils.start.cores import usable_cores
from utils.start.errors import LOST_PEER, UserError, printable
from utils.start.hang import Place, Watchdog
from utils.start.option_types import Options

if TYPE_CHECKING:  # the import of the first takes a second
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

T = TypeVar("T")  # a value that processes share

PATIENCE = 1.5  # NCCL's time limit, as a multiple of --dist-timeout
KERNELS = (
    "cudnn.benchmark is on; float32 matrix products and convolutions use TF32 where the GPU has it "
    "(NVIDIA_TF32_OVERRIDE=0 turns it off)"
)


@dataclass(frozen=True)
class World:
    """The job as one of its processes sees it (``rank`` of ``size``, on ``nodes`` nodes)."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    nodes: int = 1
    control: Any = None  # a gloo group: small messages go over the CPU and never stall the GPU

    @property
    def data_parallel_rank(self) -> int:
        """Which share of each global batch this process trains on, 0 to data_parallel_size - 1."""
        return self.rank

    @property
    def data_parallel_size(self) -> int:
        """How many processes share a global batch: in all current modes, all of them."""
        return self.size

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files."""
        return self.rank == 0

    def stage(self, text: str) -> None:
        """Print what the start does next, in rank 0: the log begins with the run directory."""
        if self.is_main:
            print(printable(text), flush=True)

    @property
    def device_ids(self) -> list[int] | None:
        """For DistributedDataParallel: this process's GPU, or None on the CPU."""
        return [self.local_rank] if self.device.type == "cuda" else None

    @property
    def node_name(self) -> str:
        """Host name and number of this node; cloned machines often share a host name."""
        return f"{socket.gethostname()} (node {self.rank // self.local_size})"

    @property
    def where_rank0_is(self) -> str:
        """How other nodes begin an error that rank 0 has: it is of a file there, perhaps."""
        return "" if self.rank < self.local_size else "on node 0: "

    def gather(self, value: T) -> list[T]:
        """Every process's (picklable) ``value``, in the order of ranks, for every process."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values


def single_process() -> World:
    """The world of a script that runs as one process: the first GPU, or the CPU without one."""
    launch.note_copies()
    gpu_check.check_gpus()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    choose_kernels(device)
    return World(device)


@contextmanager
def process_group(args: Options) -> Iterator[World]:
    """torch.distributed's process group, which all processes of the job join at the master's port.

    Yields this process's `World`. Raises: `UserError` if processes are missing, if nodes differ in
    code, versions or options, or if communication fails inside the context.
    """
    world = _join(args)
    processes: list[tuple[str, str | None]] = []  # node and address of each rank
    watchdog = None
    try:
        watchdog = _watch(args, world) if world.size > 1 else None
        release = nccl.version() if world.device_ids else ()
        versions = {"torch": torch.__version__, "NCCL": ".".join(map(str, release))}
        processes = agreement.compare_processes(args, world, versions)
        if world.size > 1:
            nodes = f"{world.nodes} nodes" if world.nodes > 1 else "1 node"
            world.stage(f"{world.size} processes on {nodes} have joined")
        yield world
    except (RuntimeError, TimeoutError) as error:
        if not is_lost_peer(error):
            raise
        if watchdog is not None and (text := watchdog.explain()):
            raise UserError(text, on_every_rank=True, code=LOST_PEER) from error
        text = lost_peer.explain(error, world.rank, processes, args.dist_timeout)
        raise UserError(text, code=LOST_PEER) from error
    finally:
        if watchdog is not None:
            watchdog.close()
    # Not after an exception: the process then exits at once, instead of waiting for the others.
    dist.destroy_process_group()


def is_lost_peer(error: Exception) -> bool:
    """Whether a collective has failed because another process is gone or hangs."""
    if getattr(error, "errno", None) is not None:  # of a file, or of a socket of Python's own
        return False
    is_message = re.search(lost_peer.MESSAGES, str(error).lower())
    return isinstance(error, (TimeoutError, dist.DistError)) or bool(is_message)


def _watch(args: Options, world: World) -> Watchdog | None:
    """Start this process's `Watchdog`."""
    # A new prefix, as torchrun keeps its store when it starts the processes again.
    prefix = world.gather(os.urandom(8).hex())[0]
    in_rank0 = not meeting.is_store_in_agent()
    groups = [group for group in (dist.group.WORLD, world.control) if group is not None]

    def started() -> tuple[int, ...]:
        # There is no public name for it.
        return tuple(
            group._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
            for group in groups
        )

    place = Place(world.rank, world.size, world.node_name, os.getpid(), in_rank0)
    try:
        signs = meeting.Signs(prefix, args.dist_timeout)
        return Watchdog(signs, place, started, args.dist_timeout, meeting.give_up)
    except (OSError, RuntimeError):  # the group has no such store: hangs are then not explained
        return None


def _join(args: Options) -> World:
    """Choose this process's device and network interface, and join the process group."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    rank, size, local_rank, local_size, port = (int(os.environ[name]) for name in names)
    master, nodes, seconds = os.environ["MASTER_ADDR"], size // local_size, args.dist_timeout
    in_agent = meeting.is_store_in_agent()  # which was there before its processes
    wait = min(seconds, preflight.PATIENCE) if in_agent else seconds
    try:
        preflight.find_master(rank, nodes, (master, port), wait)
    except UserError as error:
        if in_agent:
            text = "torchrun on node 0 cannot be reached any more: look at what it has printed"
            raise UserError(text, True, LOST_PEER) from None
        if nodes > 1:
            raise UserError(str(error), error.on_every_rank, LOST_PEER) from None
        raise meeting.missing_ranks([0], size, seconds) from None
    with meeting.explained(rank, size, (master, port), seconds):
        store = meeting.meet_all((master, port), rank, size, seconds)
    world = World(torch.device("cpu"), rank, size, local_rank, local_size, nodes)
    place = (world.node_name, size, rank < local_size, seconds)
    with meeting.failing_together(*place), meeting.explained(rank, size, (master, port), seconds):
        device, backend = _choose_device(args, world)
        timeout = timedelta(seconds=seconds)
        # When NCCL's own time is over, it ends the process without a word about the cause.
        limit = timeout if backend == "gloo" else timeout * PATIENCE
        how = {"store": store, "rank": rank, "world_size": size}
        dist.init_process_group(backend, timeout=limit, **how)
        control = dist.new_group(backend="gloo", timeout=timeout)
    return replace(world, device=device, control=control)


def _choose_device(args: Options, world: World) -> tuple[torch.device, str]:
    """This process's device, and the backend for it. Raises: `UserError`."""
    gpu_check.check_gpus()
    if torch.cuda.is_available():
        if world.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"{world.local_size} processes on this node, but it has only "
                f"{torch.cuda.device_count()} GPUs: start one process per GPU"
            )
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
        choose_kernels(device)
        return device, args.dist_backend or "nccl"
    if args.sync_bn:
        text = "--sync-bn needs GPUs: leave it out (torch has no SyncBatchNorm for the CPU)"
        raise UserError(text, on_every_rank=True)
    if "OMP_NUM_THREADS" not in os.environ:  # by default each process would use all cores
        torch.set_num_threads(max(1, usable_cores() // world.local_size))
    # Not an error: the documented multi-GPU command lines, which name nccl, can then be tried
    # on any machine before GPUs are paid for.
    if args.dist_backend == "nccl" and world.is_main:
        print("note: no GPU here, so gloo is used in place of nccl", flush=True)
    return world.device, "gloo"


def choose_kernels(device: torch.device) -> None:
    """On a GPU, enable cudnn.benchmark (all batches have one size) and TF32.

    With either, results on a GPU are not bit-identical from run to run.
    """
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("high")


def broadcast_from_rank0(compute: Callable[[], T], world: World) -> T:
    """Compute something only in rank 0 and give its (picklable) result to every process.

    A `UserError` raised in rank 0 is raised in every process, so that all exit together.
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
        raise UserError(world.where_rank0_is + box[1], on_every_rank=True)
    return box[0]


def first_on_node(compute: Callable[[], T], world: World) -> T:
    """Compute something in the first process of each node, then in its other processes.

    A `UserError` of any first process is raised in every process, so that all exit together. It
    names the node, unless all nodes have it.
    """
    message: str | None = None
    results: list[T] = []
    if world.local_rank == 0:
        try:
            results.append(compute())
        except UserError as error:
            message = str(error)
    told = world.gather((world.node_name, message))
    if errors := {node: text for node, text in told if text}:
        node, text = next(iter(errors.items()))
        where = f"on {node}: " if len(errors) < world.nodes else ""
        raise UserError(where + text, on_every_rank=True)
    return results[0] if results else compute()


@torch.no_grad()
def copy_from_rank0(model: nn.Module, world: World, parameters: bool = True) -> None:
    """Give every process rank 0's buffers and, by default, parameters."""
    if world.size > 1:
        tensors = list(model.buffers()) + (list(model.parameters()) if parameters else [])
        for tensor in tensors:
            here = tensor.device.type == world.device.type
            dist.broadcast(tensor, src=0, group=None if here else world.control)


def form_buckets(replica: nn.Module, world: World, args: Options) -> None:
    """Have DistributedDataParallel form its final buckets before the first step.

    It begins with one bucket, and forms its final ones after the first backward pass. The rounding
    of a sum over three or more processes depends on the place in the bucket: without this, a
    resumed run would round its first step differently from the original run. The backward pass here
    is of an image of zeros, in evaluation mode, and changes nothing. (It does not apply to Apex's
    own class.)
    """
    if world.size == 1 or args.evaluate or not isinstance(replica, DistributedDataParallel):
        return
    replica.eval()
    with torch.enable_grad(), warnings.catch_warnings():
        # Of a single image, some gradients are slices, as that of a ViT's class token.
        warnings.filterwarnings("ignore", "Grad strides do not match", UserWarning)
        images = torch.zeros(1, 3, args.image_size, args.image_size, device=world.device)
        replica(images).sum().backward()
    for parameter in replica.parameters():
        parameter.grad = None
    replica.train()


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a sharded tensor (the same memory); a plain tensor is unchanged."""
    return tensor.to_local().detach() if _is_shard(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on its device. Collective: all processes that have a shard call it."""
    return tensor.full_tensor().detach() if _is_shard(tensor) else tensor


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Shard ``full``, which every process has, in the same way as ``like``.

    If ``like`` is plain, return ``full`` in its memory layout, which fused optimisers need. If it
    has another shape, return ``full`` itself: loading it then fails. No communication.
    """
    if full.shape != like.shape:
        return full
    if not _is_shard(like):
        return torch.empty_like(like, dtype=full.dtype, device=full.device).copy_(full)
    from torch.distributed.tensor import distribute_tensor

    full = full.detach().contiguous()
    shard = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return shard.clone()  # without clone, a shard on the CPU would keep all of ``full`` in memory


def as_state_dict(tensors: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """``tensors`` with the versions of layers that the state dict ``like`` has beside its tensors.

    MNASNet of torchvision loads nothing without them, and other programs' files may lack them.
    """
    state = OrderedDict(tensors)
    state.__dict__.update(vars(like) if isinstance(like, OrderedDict) else {})
    return state


def _is_shard(tensor: Tensor) -> "TypeGuard[DTensor]":
    return hasattr(tensor, "placements")


def is_sharded(model: nn.Module) -> "TypeGuard[FSDPModule]":
    """Whether FSDP's `fully_shard` has been called on the model."""
    return hasattr(model, "set_requires_gradient_sync")


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP has gathered, which are out of date or no longer needed."""
    for module in filter(is_sharded, model.modules()):
        module.reshard()
