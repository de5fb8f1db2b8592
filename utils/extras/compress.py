"""``--comm``: average gradients over processes and send fewer bytes.

    fp16, bf16     torch's communication hooks for DistributedDataParallel
    int8, int4     gradients are sent in blocks with one scale each, in 8 or 4 bits per value. Each
                   process sums one part in float32 and sends the mean back in 8 or 4 bits.
    powersgd:RANK  each matrix is sent as the product of two thin ones (Vogels et al. 2019,
                   arxiv.org/abs/1905.13727), with error feedback

All processes get bit-identical gradients. If one is infinite or NaN, it is so on all of them, and
all skip the step. Interface: `Exchange` is a communication hook for DistributedDataParallel and a
part of snapshots. Without this file, gradients are sent in float32.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from utils.errors import UserError
from utils.report import ring_bytes
from utils.world import World

# ---- methods

BLOCKS = {8: 256, 4: 128}  # values per scale; the scales add 1.6 and 6 % to the bytes sent
TILE = 2**17  # values that the CPU rounds in one call, so that they stay in its cache
SCALE = 4  # bytes of a block's scale, a float32


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients. ``bytes_per_value``: bytes sent per gradient value, including
    scales. ``bits``: bits per quantised value. ``rank``: PowerSGD's rank."""

    name: str
    bytes_per_value: float
    bits: int = 0
    rank: int = 0


METHODS = {  # from most to least exact
    "fp32": Method("fp32", 4),
    "fp16": Method("fp16", 2),
    "bf16": Method("bf16", 2),
    "int8": Method("int8", 1 + SCALE / BLOCKS[8], bits=8),
    "int4": Method("int4", 0.5 + SCALE / BLOCKS[4], bits=4),
    "powersgd": Method("powersgd:4", 4, rank=4),
}
NAMES = (*list(METHODS)[:-1], "powersgd[:RANK]")


def parse(name: str) -> Method:
    """Return the method called ``name``: one of `NAMES`, such as "int8" or "powersgd:4".

    Raises: `UserError` for any other name.
    """
    kind, colon, rank = name.partition(":")
    method = METHODS.get(kind)
    if not method or (colon and not (method.rank and rank.isdecimal() and int(rank) > 0)):
        raise UserError(f"unknown method {name}: choose one of {', '.join(NAMES)}")
    return replace(method, name=f"{kind}:{int(rank)}", rank=int(rank)) if colon else method


# Methods that a benchmark or forecast compares. It recommends the most exact one whose step is
# longer than the fastest by at most the fraction WITHIN.
CANDIDATES = ("fp32", "fp16", "int8", "int4", "powersgd:32")
WITHIN = 0.05


def exactness(name: str) -> tuple[int, int]:
    """Return a sort key: more exact methods are larger; PowerSGD variants are ordered by rank."""
    return -[*METHODS].index(name.partition(":")[0]), parse(name).rank


def most_exact(seconds: dict[str, float]) -> str:
    """Return the first method whose step is longer than the shortest by at most `WITHIN`.

    ``seconds``: the step time of each method, ordered from most to least exact.
    """
    limit = (1 + WITHIN) * min(seconds.values())
    return next(name for name, took in seconds.items() if took <= limit)


def wire_bytes(shapes: Iterable[Sequence[int]], how: Method) -> float:
    """Return the bytes that enter the collectives for gradients of these shapes."""
    return how.bytes_per_value * sum(factors(s, how.rank) or math.prod(s) for s in shapes)


def factors(shape: Sequence[int], rank: int) -> int:
    """Return how many values PowerSGD sends for a gradient of this shape.

    0 means that it sends the gradient uncompressed, because two factors would save less than half.
    """
    values = rank * (shape[0] + math.prod(shape[1:])) if len(shape) > 1 else 0
    return values if 2 * values <= math.prod(shape) else 0


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
    for one in work:
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
        torch._foreach_copy_(_views(blocks, rows, tensors), tensors)
        to_parts, to_sums = self._random(step, blocks.device)
        received = exchange_parts(self.encode(blocks, to_parts), self.group)
        total = None
        for part in received.chunk(size):  # in the order of ranks
            total = self.decode(part, total)
        part = self.encode(total.div_(size), to_sums)
        whole = part.new_empty((size * len(part), *part.shape[1:]))
        dist.all_gather(list(whole.chunk(size)), part, group=self.group)
        # Do not decode into the buffer: its padding must stay zero.
        torch._foreach_copy_(tensors, _views(self.decode(whole), rows, tensors))

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


class PowerSGD:
    """Send each matrix as a product [n, rank] x [rank, m]. Its error is added to the next gradient.
    The next step starts from the second factor. Small and 1-D tensors are sent uncompressed."""

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup,
        scale: Callable[[Tensor], Tensor] = lambda one: one,
    ):
        """``scale`` multiplies a tensor by the loss scale. Gradients are scaled; the stored errors
        are not."""
        self.rank, self.group, self.scale = rank, group, scale
        self.errors: dict[int, Tensor] = {}  # key: number of the parameter; [n, m]
        self.starts: dict[int, Tensor] = {}  # [m, rank]

    def mean(self, gradients: Gradients, step: Step) -> None:
        """Replace ``gradients`` (any float dtype and shape) by approximations of their means."""
        size, device = self.group.size(), gradients[0][1].device
        thin = [(number, g) for number, g in gradients if factors(g.shape, self.rank)]
        small = [g for _, g in gradients if not factors(g.shape, self.rank)]
        scale = self.scale(torch.ones((), device=device))
        matrices = []
        for number, gradient in thin:
            matrix = gradient.float().flatten(1)
            if number not in self.starts:
                draw = generator((step[0], 0, 0), number)
                self.starts[number] = torch.randn(matrix.shape[1], self.rank, generator=draw)
                self.errors[number] = torch.zeros_like(matrix)
            for tensors in (self.starts, self.errors):  # after a resume they are on the CPU
                tensors[number] = tensors[number].to(device)
            matrices.append(torch.addcmul(matrix, self.errors[number], scale))
        left = [m @ self.starts[number] for m, (number, _) in zip(matrices, thin, strict=True)]
        left = self._sum([*left, *(g.float() for g in small)])
        for gradient, total in zip(small, left[len(thin) :], strict=True):
            gradient.copy_(total / size)
        # QR needs float32.
        left = [torch.linalg.qr(factor).Q for factor in left[: len(thin)]]
        right = self._sum([m.T @ factor for m, factor in zip(matrices, left, strict=True)])
        for (number, gradient), matrix, one, total in zip(thin, matrices, left, right, strict=True):
            other = total / size
            product = one @ other.T
            gradient.copy_(product.view(gradient.shape))
            # A step that overflows is skipped, and its infinities must not enter the stored errors.
            # The second factor shows them reliably; QR may hide them in the first.
            fine = torch.isfinite(other).all()
            error = matrix.sub_(product).div_(scale)
            self.errors[number] = torch.where(fine, error, self.errors[number])
            self.starts[number] = torch.where(fine, other, self.starts[number])

    def _sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sum the tensors over the processes in one collective."""
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return this process's errors and the start factors shared by all, on the CPU."""
        state = {"errors": self.errors, "starts": self.starts}
        return {kind: {n: t.cpu() for n, t in tensors.items()} for kind, tensors in state.items()}

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Continue from the mean of the `state_dict` of one or more processes."""
        for kind, tensors in (("errors", self.errors), ("starts", self.starts)):
            mine = [state[kind] for state in states]
            tensors.update({n: torch.stack([one[n] for one in mine]).mean(0) for n in mine[0]})


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
        if self.thread:
            future: Future[Tensor] = Future()
            self.thread.submit(_run, job, buffer, future)
            return future
        # NCCL's collectives wait in the stream, not on the host, so this method returns at once.
        future = Future(devices=[self.device])
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            job()
            future.set_result(buffer)
        return future


@torch.no_grad()
def _run(job: Callable[[], None], buffer: Tensor, future: Future[Tensor]) -> None:
    try:
        job()
    except Exception as error:  # backward raises it again
        future.set_exception(error)
    else:
        future.set_result(buffer)


LATE = 0.25  # powersgd begins to compress after this share of all steps


class Exchange:
    """The exchange of gradients in one process. Snapshots save its state.

    It counts steps by their last bucket: DistributedDataParallel passes each bucket once per step.
    """

    def __init__(
        self,
        replica: DistributedDataParallel,
        args: Any,
        world: World,
        scaler: torch.amp.GradScaler | None = None,
    ):
        """Register with ``replica``, before its first backward pass.

        ``scaler``, if it is enabled, scales the loss and so the gradients. On a node with several
        processes, the first one compresses for all.
        """
        self.world, self.seed, self.how = world, args.seed, parse(args.comm)
        self.start_at(0, 0, 1, 1)
        trained = (p for p in replica.module.parameters() if p.requires_grad)
        self.number = {parameter: i for i, parameter in enumerate(trained)}
        self.inside, self.first, ranks = None, world.rank - world.local_rank, range(world.size)
        if 1 < world.nodes < world.size:
            for first in (firsts := ranks[:: world.local_size]):  # all processes make all groups
                group = dist.new_group([*ranks[first : first + world.local_size]])
                self.inside = group if first == self.first else self.inside
            ranks = firsts
        # Use a separate group, because gloo distinguishes operations only by their order.
        group = dist.new_group([*ranks])
        self.codec: Quantised | PowerSGD | None = None
        if world.rank in ranks and self.how.bits:
            self.codec = Quantised(self.how.bits, group)
        elif world.rank in ranks and self.how.rank:
            scaled = (scaler.scale,) if scaler is not None and scaler.is_enabled() else ()
            self.codec = PowerSGD(self.how.rank, group, *scaled)
        self.ordered = OrderedCollectives(world.device)
        replica.register_comm_hook(None, self._hook)

    def sent_bytes(self, shapes: Iterable[Sequence[int]]) -> float:
        """Return the bytes that this process sends per step for gradients of these shapes."""
        return ring_bytes(wire_bytes(shapes, self.how), self.world.size)

    def start_at(self, epoch: int, step: int, steps: int, epochs: int) -> None:
        """Set the next step: ``step`` of ``steps`` in ``epoch`` of ``epochs``, counted from 0."""
        self.next_step, self.steps, self.epochs = epoch * steps + step, steps, epochs

    def _hook(self, _: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """Exchange a bucket of gradients; DistributedDataParallel calls this when it is ready."""
        how, codec, buffer = self.how, self.codec, bucket.buffer()
        epoch, number = divmod(self.next_step, self.steps)
        self.next_step += bucket.is_last()
        if how.name in ("fp16", "bf16"):
            half = getattr(default_hooks, f"{how.name}_compress_hook")
            return half(dist.group.WORLD, bucket)
        if how.rank and (epoch + number / self.steps) / self.epochs < LATE:
            return default_hooks.allreduce_hook(dist.group.WORLD, bucket)
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
        """Return all processes' state for a snapshot. Collective; only rank 0's is complete."""
        state: dict[str, Any] = {"method": self.how.name}
        if self.how.rank:
            mine = self.codec.state_dict() if self.codec is not None else {}
            states: list[Any] | None = [None] * self.world.size if self.world.is_main else None
            dist.gather_object(mine, states, group=self.world.control)
            state["states"] = states or []
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a snapshot. All processes must call it.

        If their number has changed, each gets the mean of all states, which keeps the mean error.
        """
        states = saved.get("states")
        if states and saved["method"] == self.how.name and self.codec is not None:
            mine = states[self.world.rank] if len(states) == self.world.size else None
            self.codec.load_state_dict([mine] if mine else [state for state in states if state])
