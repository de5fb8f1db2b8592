"""``--comm``: average gradients over processes and send fewer bytes.

    fp16, bf16  torch's communication hooks for DistributedDataParallel
    int8, int4  gradients are sent in blocks with one scale each, in 8 or 4 bits per value. Each
                process sums one part in float32 and sends the mean back in 8 or 4 bits.

All processes get bit-identical gradients. If one is infinite or NaN, it is so on all of them, and
all skip the step. Interface: `Exchange` is a communication hook for DistributedDataParallel and a
part of snapshots.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from utils.model import kernels
from utils.start.errors import UserError
from utils.start.option_types import Options
from utils.start.world import World

# ---- methods

BLOCKS = {8: 256, 4: 128}  # values per scale; the scales add 1.6 and 6 % to the bytes sent
TILE = 2**17  # values that the CPU rounds in one call, so that they stay in its cache
SCALE = 4  # bytes of a block's scale, a float32


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients. ``bytes_per_value``: bytes sent per gradient value, including
    scales. ``bits``: bits per quantised value."""

    name: str
    bytes_per_value: float
    bits: int = 0


METHODS = {  # from most to least exact
    "fp32": Method("fp32", 4),
    "fp16": Method("fp16", 2),
    "bf16": Method("bf16", 2),
    "int8": Method("int8", 1 + SCALE / BLOCKS[8], bits=8),
    "int4": Method("int4", 0.5 + SCALE / BLOCKS[4], bits=4),
}


def parse(name: str) -> Method:
    """Return the method called ``name``. Raises: `UserError` if it is not one of `METHODS`."""
    if name not in METHODS:
        raise UserError(f"unknown method {name}: choose one of {', '.join(METHODS)}")
    return METHODS[name]


WITHIN = 0.05  # a more exact method may make a step longer by this fraction


def most_exact(seconds: dict[str, float]) -> str:
    """Return the first method whose step is longer than the shortest by at most `WITHIN`.

    ``seconds``: the step time of each method, ordered from most to least exact.
    """
    limit = (1 + WITHIN) * min(seconds.values())
    return next(name for name, took in seconds.items() if took <= limit)


def wire_bytes(values: int, how: Method) -> float:
    """Return the bytes that enter the collectives for so many gradient values."""
    return how.bytes_per_value * values


def ring_bytes(size: float, processes: int) -> float:
    """Bytes that each of ``processes`` sends in a ring all-reduce of ``size`` bytes.

    It sends all but its own part, once for the sums and once to distribute them.
    """
    return 2 * (processes - 1) / processes * size


Gradients = Sequence[tuple[int, Tensor]]  # number of the parameter in the model, its gradient
Step = tuple[int, int, int]  # seed, epoch, step: they determine the random numbers


def generator(step: Step, rank: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for a rank in a step. It depends on nothing else, so no state is saved."""
    key, *position = step
    for number in (*position, rank):
        key = (key * 1_000_003 + number + 1) % 2**63
    return torch.Generator(device).manual_seed(key)


def exchange_parts(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part r of ``parts`` [processes * n, ...] to rank r. Returns: the received parts."""
    received, rank, size = torch.empty_like(parts), group.rank(), group.size()
    if parts.is_cuda:
        dist.all_to_all_single(received, parts, group=group)
        return received
    # In measurements, gloo's own all-to-all often sent parts of a few MB at half the link's rate.
    # Start receives before sends.
    theirs, mine = received.chunk(size), parts.chunk(size)
    theirs[rank].copy_(mine[rank])
    others = [(rank + i) % size for i in range(1, size)]
    work = [dist.irecv(theirs[peer], group=group, group_src=peer) for peer in others]
    work += [dist.isend(mine[peer], group=group, group_dst=peer) for peer in others]
    for one in filter(None, work):  # torch's type allows None, which non-members of a group get
        one.wait()
    return received


class Quantised:
    """Send 8 or 4 ``bits`` per value, rounded at random so that the expected value is exact.

    Each process rounds its values once, and the sum is rounded once more. The error of the mean is
    less than 2 / (2**(bits - 1) - 1) times the largest absolute value of the block in any process;
    the expected error is zero (Alistarh et al. 2017, arxiv.org/abs/1610.02132).
    """

    def __init__(self, bits: int, group: dist.ProcessGroup):
        self.bits, self.group = bits, group
        self.block, self.levels = BLOCKS[bits], 2 ** (bits - 1) - 1
        self.width = self.block * bits // 8
        self.tile = TILE // self.block
        self.buffers: dict[tuple[int, ...], Tensor] = {}  # key: numbers of the parameters
        self.noise: tuple[Step, Tensor] | None = None

    def mean(self, gradients: Gradients, step: Step) -> None:
        """Replace ``gradients`` (any float dtype and shape) by their means over the processes."""
        size, tensors = self.group.size(), [gradient for _, gradient in gradients]
        # No block spans two parameters: gradients of layers differ by orders of magnitude.
        rows = [-(-tensor.numel() // self.block) for tensor in tensors]
        key = tuple(number for number, _ in gradients)
        if key not in self.buffers:  # padding is zero; each process sums an equal share of rows
            shape = -(-sum(rows) // size) * size, self.block
            self.buffers[key] = torch.zeros(shape, device=tensors[0].device)
        blocks = self.buffers[key]
        kernels.copy_all(_views(blocks, rows, tensors), tensors)
        to_parts, to_sums = self._random(step, blocks.device)
        received = exchange_parts(self.encode(blocks, to_parts), self.group)
        first, *others = received.chunk(size)  # in the order of ranks
        total = self.decode(first)
        for part in others:
            total = self.decode(part, total)
        part = self.encode(total.div_(size), to_sums)
        whole = part.new_empty((size * len(part), *part.shape[1:]))
        dist.all_gather(list(whole.chunk(size)), part, group=self.group)
        # Do not decode into the buffer: its padding must stay zero.
        kernels.copy_all(tensors, _views(self.decode(whole), rows, tensors))

    def encode(self, blocks: Tensor, noise: Tensor) -> Tensor:
        """Quantise ``blocks``, float32 [n, block]. Each tile of blocks uses the same ``noise``,
        [tile, block] in [0, 1). Returns: uint8 [n, w + 4], values followed by a float32 scale."""
        sent = torch.empty(len(blocks), self.width + SCALE, dtype=torch.uint8, device=blocks.device)
        for part, out in self._pieces(blocks, sent):
            scale = _largest(part).div_(self.levels)
            # Slightly less than 1 / scale: the largest value must not round up past the top level.
            inverse = torch.where(scale > 0, (1 - 1e-6) / scale, scale)  # an infinity becomes NaN
            values = torch.addcmul(noise[: part.shape[-2]], part, inverse).floor_()
            if self.bits == 4:
                values = values[..., : self.width].add(values[..., self.width :], alpha=16)
            out[..., : self.width].view(torch.int8).copy_(values)
            out[..., self.width :].view(torch.float32).copy_(scale)
        return sent

    def decode(self, sent: Tensor, total: Tensor | None = None) -> Tensor:
        """Convert the result of `encode` to float32 [n, block] and add it to ``total``, if given.
        If a block held an infinity, its values are not finite."""
        out = total if total is not None else torch.empty(len(sent), self.block, device=sent.device)
        for part, sums in self._pieces(sent, out):
            scale = part[..., self.width :].view(torch.float32)
            values = part[..., : self.width].view(torch.int8)
            if self.bits == 4:  # low + 16 * high, both from -7 to 7
                values = torch.cat((values << 4 >> 4, values + 8 >> 4), -1)
            if values.device.type == "cpu":
                values = values.float()  # on a GPU, the multiplication converts them
            if total is None:
                torch.mul(values, scale, out=sums)
            else:
                sums.addcmul_(values, scale)
        return out

    def _pieces(self, one: Tensor, two: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield matching rows of both, tile by tile; on a GPU in one piece, to save launches."""
        whole = len(one) - len(one) % self.tile if one.device.type != "cpu" else 0
        if whole:
            shape = whole // self.tile, self.tile, -1
            yield one[:whole].view(shape), two[:whole].view(shape)
        for first in range(whole, len(one), self.tile):
            yield one[first : first + self.tile], two[first : first + self.tile]

    def _random(self, step: Step, device: torch.device) -> Tensor:
        """Return this process's noise for a step, in [0, 1): [2, tile, block].

        The first half rounds the parts, the second the sums, so that their errors are independent.
        """
        if self.noise is None or self.noise[0] != step:
            source, shape = generator(step, self.group.rank(), device), (2, self.tile, self.block)
            self.noise = step, torch.rand(shape, generator=source, device=device)
        return self.noise[1]


def _views(blocks: Tensor, rows: list[int], gradients: list[Tensor]) -> list[Tensor]:
    """Return views of ``blocks``, one for each gradient and in its shape; each takes ``rows``."""
    pairs = zip(gradients, blocks[: sum(rows)].split(rows), strict=True)
    return [part.view(-1)[: gradient.numel()].view(gradient.shape) for gradient, part in pairs]


def _largest(blocks: Tensor) -> Tensor:
    """Return the largest absolute value of each row, [..., 1]; NaN if the row contains a NaN."""
    if blocks.device.type == "cpu":  # there the norm is three times slower
        return blocks.abs().amax(-1, keepdim=True)
    return torch.linalg.vector_norm(blocks, torch.inf, dim=-1, keepdim=True)


# ---- the hook of DistributedDataParallel


class OrderedCollectives:
    """Runs jobs one after the other, in the order in which they were submitted.

    A compressed mean needs two collectives, and more buckets become ready in between. If a callback
    of the first started the second, processes could start them in different orders; gloo would then
    pair collectives of different buckets, and hang or abort. Here one thread (CPU) or stream (GPU)
    handles the buckets in DistributedDataParallel's order, which is the same in all processes.
    """

    def __init__(self, device: torch.device):
        self.device, on_gpu = device, device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.thread = None if on_gpu else ThreadPoolExecutor(1)

    def submit(self, job: Callable[[], None], buffer: Tensor) -> Future[Tensor]:
        """Run ``job`` after all earlier jobs. It changes ``buffer``, the value of the future."""
        if self.thread is not None:
            future: Future[Tensor] = Future()
            self.thread.submit(_run, job, buffer, future)
            return future
        # NCCL's collectives wait in the stream, not on the host, so this method returns at once.
        assert self.stream is not None
        future = Future(devices=[self.device])
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            job()
            future.set_result(buffer)
        return future


@torch.no_grad()
def _run(job: Callable[[], None], buffer: Tensor, future: Future[Any]) -> None:
    try:
        job()
    except Exception as error:  # backward raises it again
        future.set_exception(error)
    else:
        future.set_result(buffer)


def exchange(replica: Any, args: Options, world: World) -> "Exchange | None":
    """``--comm``: the gradient exchange; None: DistributedDataParallel's own all-reduce."""
    if args.comm in (None, "fp32") or world.size == 1:
        return None
    return Exchange(replica, parse(args.comm), args.seed, world)


def _group_of(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Make a process group. All processes must call it; those outside the group get None."""
    group = dist.new_group([*ranks])
    return group if isinstance(group, dist.ProcessGroup) else None


class Exchange:
    """The exchange of gradients in one process.

    It counts steps by their last bucket: DistributedDataParallel passes each bucket once per step.
    """

    def __init__(self, replica: DistributedDataParallel, how: Method, seed: int, world: World):
        """Register with ``replica``, before its first step.

        On a node with several processes, the first one compresses for all.
        """
        self.world, self.seed, self.how = world, seed, how
        self.start_at(0, 0, 1)
        trained = (p for p in replica.module.parameters() if p.requires_grad)
        self.number = {parameter: i for i, parameter in enumerate(trained)}
        self.inside: dist.ProcessGroup | None = None
        self.first, ranks = world.rank - world.local_rank, range(world.size)
        if how.bits and 1 < world.nodes < world.size:
            for first in (firsts := ranks[:: world.local_size]):  # all processes make all groups
                group = _group_of(ranks[first : first + world.local_size])
                self.inside = group if first == self.first else self.inside
            ranks = firsts
        # Use a separate group, because gloo distinguishes operations only by their order.
        group = _group_of(ranks)
        self.codec: Quantised | None = None
        if group is not None and self.how.bits:
            self.codec = Quantised(self.how.bits, group)
        self.ordered = OrderedCollectives(world.device)
        replica.register_comm_hook(None, self._hook)

    def sent_bytes(self, values: int) -> float:
        """Return the bytes that this process sends per step for so many gradient values.

        If it compresses for its node: to other nodes.
        """
        among = self.world.size if self.inside is None else self.world.nodes
        return ring_bytes(wire_bytes(values, self.how), among)

    def start_at(self, epoch: int, step: int, steps: int) -> None:
        """Set the next step: ``step`` of ``steps`` in ``epoch``, both counted from 0."""
        self.next_step, self.steps = epoch * steps + step, steps

    def _hook(self, _: None, bucket: GradBucket) -> Future[Tensor]:
        """Exchange a bucket of gradients; DistributedDataParallel calls this when it is ready."""
        how, codec, buffer = self.how, self.codec, bucket.buffer()
        epoch, number = divmod(self.next_step, self.steps)
        self.next_step += bucket.is_last()
        if how.name in ("fp16", "bf16"):
            half = getattr(default_hooks, f"{how.name}_compress_hook")
            return half(dist.group.WORLD, bucket)
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        gradients = [(self.number[parameter], gradient) for parameter, gradient in pairs]

        def mean() -> None:
            """Average within each node in full precision, and between nodes with compression."""
            if self.inside is not None:
                dist.reduce(buffer, self.first, group=self.inside)
            if codec is not None:  # only the first process of each node has one
                if self.inside is not None:
                    buffer.div_(self.world.local_size)
                codec.mean(gradients, (self.seed, epoch, number))
            if self.inside is not None:
                dist.broadcast(buffer, self.first, group=self.inside)

        return self.ordered.submit(mean, buffer)

    def state_dict(self) -> dict[str, Any]:
        """Return the method's name, for a snapshot. The exchange has no other state."""
        return {"method": self.how.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a snapshot, which may have been made with another method."""
