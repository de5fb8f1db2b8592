"""The process group of a job: rank, device, and how processes share values.

Facts about ranks are computed once, into a `World`; nothing else asks torch.distributed for them.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from utils import addons, launch
from utils.errors import LOST_PEER, UserError

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
    def slice(self) -> int:
        """The slice of each global batch that this process trains on, 0 to ``slices`` - 1."""
        return self.rank

    @property
    def slices(self) -> int:
        """How many slices a global batch has: in all current modes, one for each process."""
        return self.size

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files."""
        return self.rank == 0

    @property
    def device_ids(self) -> list[int] | None:
        """For DistributedDataParallel: this process's GPU, or None on the CPU."""
        return [self.local_rank] if self.device.type == "cuda" else None


def single_process() -> World:
    """The world of a script that runs as one process: the first GPU, or the CPU without one."""
    addons.check_gpus()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    choose_kernels(device)
    return World(device)


@contextmanager
def process_group(args: Any) -> Iterator[World]:
    """torch.distributed's process group, which all processes of the job join at the master's port.

    Yields this process's `World`. Raises: `UserError` if processes are missing, if nodes differ in
    code, versions or options, or if communication fails inside the context.
    """
    world = _join(args)
    processes: list[tuple[str, str | None]] = []  # node and address of each rank
    try:
        if check := addons.preflight():
            processes = check.compare_processes(args, world)
        yield world
    except (RuntimeError, TimeoutError) as error:
        if not is_lost_peer(error):
            raise
        text = addons.explain_lost_peer(error, world.rank, processes, args.dist_timeout)
        raise UserError(text, code=LOST_PEER) from error
    # Not after an exception: the process then exits at once, instead of waiting for the others.
    dist.destroy_process_group()


def is_lost_peer(error: Exception) -> bool:
    """Whether a collective has failed because another process is gone or hangs."""
    # An errno means a file or a socket of Python's own, not a collective.
    is_timeout = isinstance(error, TimeoutError) and error.errno is None
    # Words in the errors of gloo, NCCL and the store.
    words = "gloo|nccl|connection (reset|closed|refused)|broken pipe|timed out"
    of_torch = isinstance(error, dist.DistError) or re.search(words, str(error).lower())
    return is_timeout or bool(of_torch)


def _join(args: Any) -> World:
    """Choose this process's device and network interface, and join the process group."""
    addons.check_gpus()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    rank, size, local_rank, local_size, port = (int(os.environ[name]) for name in names)
    master, nodes, seconds = os.environ["MASTER_ADDR"], size // local_size, args.dist_timeout
    backend, device = args.dist_backend, torch.device("cpu")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"{local_size} processes on this node, but it has only "
                f"{torch.cuda.device_count()} GPUs: start one process per GPU"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        choose_kernels(device)
    else:
        if args.sync_bn:
            text = "--sync-bn needs GPUs: torch has no SyncBatchNorm for the CPU"
            raise UserError(text, on_every_rank=True)
        if "OMP_NUM_THREADS" not in os.environ:  # by default each process would use all cores
            torch.set_num_threads(max(1, launch.usable_cores() // local_size))
        # Not an error: the documented multi-GPU command lines, which name nccl, can then be tried
        # on any machine before GPUs are paid for.
        if backend == "nccl" and rank == 0:
            print("note: no GPU here, so gloo is used in place of nccl", flush=True)
        backend = "gloo"

    if check := addons.preflight():
        check.find_master(rank, nodes, (master, port), seconds)
    try:
        timeout = timedelta(seconds=seconds)
        dist.init_process_group(backend or "nccl", rank=rank, world_size=size, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        text = str(error) or type(error).__name__
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise launch.port_in_use(master, port) from error
        raise UserError(
            f"rank {rank} could not join the {size} processes of the job at {master}:{port} "
            f"within {seconds:g} s: are all nodes started, with different node ranks, and is "
            f"every port between them open, not only the master's? ({text.splitlines()[0]})"
        ) from error
    return World(device, rank, size, local_rank, local_size, nodes, control)


def choose_kernels(device: torch.device) -> None:
    """On a GPU, enable cudnn.benchmark (all batches have one size) and TF32.

    With either, results on a GPU are not bit-identical from run to run.
    """
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("high")


def broadcast_from_rank0(compute: Callable[[], Any], world: World) -> Any:
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
        raise UserError(box[1], on_every_rank=True)
    return box[0]


def gather(value: Any, world: World) -> list[Any]:
    """Every process's (picklable) ``value``, in the order of ranks, for every process."""
    values: list[Any] = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value, group=world.control)
    return values


def first_on_node(compute: Callable[[], Any], world: World) -> Any:
    """Compute something in the first process of each node, then in its other processes.

    A `UserError` of any first process is raised in every process, so that all exit together.
    """
    result, message = None, None
    if world.local_rank == 0:
        try:
            result = compute()
        except UserError as error:
            message = str(error)
    if errors := [text for text in gather(message, world) if text]:
        raise UserError(errors[0], on_every_rank=True)
    return result if world.local_rank == 0 else compute()


def node_name(world: World) -> str:
    """Host name and number of this process's node; cloned machines often share a host name."""
    return f"{socket.gethostname()} (node {world.rank // world.local_size})"


@torch.no_grad()
def copy_from_rank0(model: nn.Module, world: World, parameters: bool = True) -> None:
    """Give every process rank 0's buffers and, by default, parameters."""
    if world.size > 1:
        tensors = list(model.buffers()) + (list(model.parameters()) if parameters else [])
        for tensor in tensors:
            here = tensor.device.type == world.device.type
            dist.broadcast(tensor, src=0, group=None if here else world.control)


def form_buckets(replica: nn.Module, world: World, args: Any) -> None:
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
    with torch.enable_grad():
        images = torch.zeros(1, 3, args.image_size, args.image_size, device=world.device)
        replica(images).sum().backward()
    for parameter in replica.parameters():
        parameter.grad = None
    replica.train()


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a sharded tensor (the same memory); a plain tensor is unchanged."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on its device. Collective: all processes that have a shard call it."""
    return tensor.detach().full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Shard ``full``, which every process has, in the same way as ``like``.

    If ``like`` is plain, return ``full`` in its memory layout, which fused optimisers need. If it
    has another shape, return ``full`` itself: loading it then fails. No communication.
    """
    if full.shape != like.shape:
        return full
    if not hasattr(like, "placements"):
        return torch.empty_like(like, dtype=full.dtype, device=full.device).copy_(full)
    from torch.distributed.tensor import distribute_tensor

    full = full.detach().contiguous()
    shard = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    return shard.clone()  # without clone, a shard on the CPU would keep all of ``full`` in memory


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP's `fully_shard` has been called on the model."""
    return hasattr(model, "set_requires_gradient_sync")


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP has gathered, which are out of date or no longer needed."""
    for module in filter(is_sharded, model.modules()):
        module.reshard()
