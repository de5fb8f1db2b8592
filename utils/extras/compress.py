"""``--comm``: averaging gradients over processes with fewer bytes on the wire.

    fp16, bf16     torch's own communication hooks of DistributedDataParallel
    int8, int4     the gradients in blocks, each with its own scale, in 8 or 4 bits; the bits are
                   summed in float32, each part by one process, and travel back in 8 or 4 bits
    powersgd:RANK  each matrix as the product of two thin ones (Vogels et al. 2019,
                   arxiv.org/abs/1905.13727), with error feedback

All processes get the same bits. A gradient that is infinite or not a number is so for all of them,
so that all skip the step. Interface: `Exchange` is a communication hook of DistributedDataParallel,
and a Part of a snapshot. Without this file, gradients travel in float32.
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

BLOCKS = {8: 256, 4: 128}  # values that share a scale: 1.6 and 6 % more bytes than the bits alone
TILE = 2**17  # values that are rounded at once on the CPU, where they stay in its cache
SCALE = 4  # bytes of a block's scale, a float32


@dataclass(frozen=True)
class Method:
    """A way to exchange gradients. ``bytes_per_value``: sent for a value of a gradient, scales
    included; ``bits`` of a quantised value; ``rank`` is PowerSGD's."""

    name: str
    bytes_per_value: float
    bits: int = 0
    rank: int = 0


METHODS = {  # the most exact first
    "fp32": Method("fp32", 4),
    "fp16": Method("fp16", 2),
    "bf16": Method("bf16", 2),
    "int8": Method("int8", 1 + SCALE / BLOCKS[8], bits=8),
    "int4": Method("int4", 0.5 + SCALE / BLOCKS[4], bits=4),
    "powersgd": Method("powersgd:4", 4, rank=4),
}
NAMES = (*list(METHODS)[:-1], "powersgd[:RANK]")


def parse(name: str) -> Method:
    """The method called ``name``: one of `NAMES`, such as "int8" or "powersgd:4".

    Raises: `UserError` for any other name.
    """
    kind, colon, rank = name.partition(":")
    method = METHODS.get(kind)
    if not method or (colon and not (method.rank and rank.isdecimal() and int(rank) > 0)):
        raise UserError(f"unknown method {name}: choose one of {', '.join(NAMES)}")
    return replace(method, name=f"{kind}:{int(rank)}", rank=int(rank)) if colon else method


# What a measurement or a forecast tries. What is a little slower than the fastest, but more exact,
# is better.
CANDIDATES = ("fp32", "fp16", "int8", "int4", "powersgd:32")
WITHIN = 0.05  # how much slower


def exactness(name: str) -> tuple[int, int]:
    """A key that sorts methods by how exact they are; of PowerSGD, by its rank."""
    return -[*METHODS].index(name.partition(":")[0]), parse(name).rank


def most_exact(seconds: dict[str, float]) -> str:
    """The first method whose step is at most `WITHIN` longer than the shortest.

    ``seconds`` of a step by method, the most exact method first.
    """
    limit = (1 + WITHIN) * min(seconds.values())
    return next(name for name, took in seconds.items() if took <= limit)


def wire_bytes(shapes: Iterable[Sequence[int]], how: Method) -> float:
    """Bytes that enter the collectives for gradients of these shapes."""
    return how.bytes_per_value * sum(factors(s, how.rank) or math.prod(s) for s in shapes)


def factors(shape: Sequence[int], rank: int) -> int:
    """How many values PowerSGD sends of a gradient as a product of two matrices.

    0 for one that it sends as it is, as that would not halve it.
    """
    values = rank * (shape[0] + math.prod(shape[1:])) if len(shape) > 1 else 0
    return values if 2 * values <= math.prod(shape) else 0


Gradients = Sequence[tuple[int, Tensor]]  # number of the parameter in the model, its gradient
Step = tuple[int, int, int]  # seed, epoch, step: random numbers are a function of it


def generator(step: Step, rank: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Random numbers of a rank in a step. As they are a function of it, no state needs saving."""
    key, *position = step
    for number in (*position, rank):
        key = (key * 1_000_003 + number + 1) % 2**63
    return torch.Generator(device).manual_seed(key)


def exchange_parts(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``parts`` [processes * n, ...]: part r goes to rank r. Returns what the others sent."""
    received, rank, size = torch.empty_like(parts), group.rank(), group.size()
    if parts.is_cuda:
        dist.all_to_all_single(received, parts, group=group)
        return received
    # Not gloo's all-to-all: measured, parts of some MB often travelled at half the link's rate.
    # Receives come before sends.
    theirs, mine = received.chunk(size), parts.chunk(size)
    theirs[rank].copy_(mine[rank])
    others = [(rank + i) % size for i in range(1, size)]
    work = [dist.irecv(theirs[peer], group=group, group_src=peer) for peer in others]
    work += [dist.isend(mine[peer], group=group, group_dst=peer) for peer in others]
    for one in work:
        one.wait()
    return received


class Quantised:
    """``bits`` (8 or 4) per value, rounded up or down at random so that the mean is exact.

    The result is off the exact mean by less than 2 / (2**(bits - 1) - 1) of the largest absolute
    value of its block in any process: one rounding by each process, and one of the sum. Expected
    value: the exact mean (Alistarh et al. 2017, arxiv.org/abs/1610.02132).
    """

    def __init__(self, bits: int, group: dist.ProcessGroup):
        self.bits, self.group = bits, group
        self.block, self.levels = BLOCKS[bits], 2 ** (bits - 1) - 1
        self.width = self.block * bits // 8
        self.tile = TILE // self.block
        self.buffers: dict[tuple[int, ...], Tensor] = {}  # by the numbers of the gradients in it
        self.noise: tuple[Step, Tensor] | None = None

    def mean(self, gradients: Gradients, step: Step) -> None:
        """Replace ``gradients`` (any float dtype and shape) by their means over the processes."""
        size, tensors = self.group.size(), [gradient for _, gradient in gradients]
        # A block belongs to one parameter: gradients of layers differ by orders of magnitude.
        rows = [-(-tensor.numel() // self.block) for tensor in tensors]
        key = tuple(number for number, _ in gradients)
        if key not in self.buffers:  # zero between the gradients; the processes divide its rows
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
        # Not through the buffer: what is between the gradients there has to stay zero.
        torch._foreach_copy_(tensors, _views(self.decode(whole), rows, tensors))

    def encode(self, blocks: Tensor, noise: Tensor) -> Tensor:
        """``blocks`` float32 [n, block], ``noise`` in [0, 1) [tile, block], which serves one tile
        of blocks after the other -> uint8 [n, w + 4]: values, then the block's scale as float32."""
        sent = torch.empty(len(blocks), self.width + SCALE, dtype=torch.uint8, device=blocks.device)
        for part, out in self._pieces(blocks, sent):
            scale = _largest(part).div_(self.levels)
            # A little less, as the largest value would round up to one level too many.
            inverse = torch.where(scale > 0, (1 - 1e-6) / scale, scale)  # an infinity becomes NaN
            values = torch.addcmul(noise[: part.shape[-2]], part, inverse).floor_()
            if self.bits == 4:
                values = values[..., : self.width].add(values[..., self.width :], alpha=16)
            out[..., : self.width].view(torch.int8).copy_(values)
            out[..., self.width :].view(torch.float32).copy_(scale)
        return sent

    def decode(self, sent: Tensor, total: Tensor | None = None) -> Tensor:
        """What `encode` gave, in float32 [n, block], added to ``total`` if there is one; a block of
        an infinity is not finite."""
        out = total if total is not None else torch.empty(len(sent), self.block, device=sent.device)
        for part, sums in self._pieces(sent, out):
            scale = part[..., self.width :].view(torch.float32)
            values = part[..., : self.width].view(torch.int8)
            if self.bits == 4:  # low + 16 * high, both from -7 to 7
                values = torch.cat((values << 4 >> 4, values + 8 >> 4), -1)
            if values.device.type == "cpu":
                values = values.float()  # a GPU does that on the way
            if total is None:
                torch.mul(values, scale, out=sums)
            else:
                sums.addcmul_(values, scale)
        return out

    def _pieces(self, one: Tensor, two: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of both, in pieces of a tile; on a GPU, where each costs a launch, all at once."""
        whole = len(one) - len(one) % self.tile if one.device.type != "cpu" else 0
        if whole:
            shape = whole // self.tile, self.tile, -1
            yield one[:whole].view(shape), two[:whole].view(shape)
        for first in range(whole, len(one), self.tile):
            yield one[first : first + self.tile], two[first : first + self.tile]

    def _random(self, step: Step, device: torch.device) -> Tensor:
        """This process's noise of a step, in [0, 1): [2, tile, block], for the parts and the sums.

        Two, as a value and the sum that it is part of must not be rounded by the same number.
        """
        if self.noise is None or self.noise[0] != step:
            source, shape = generator(step, self.group.rank(), device), (2, self.tile, self.block)
            self.noise = step, torch.rand(shape, generator=source, device=device)
        return self.noise[1]


def _views(blocks: Tensor, rows: list[int], gradients: list[Tensor]) -> list[Tensor]:
    """The places of ``gradients``, which take so many ``rows`` each, in their shapes."""
    pairs = zip(gradients, blocks[: sum(rows)].split(rows), strict=True)
    return [part.view(-1)[: gradient.numel()].view(gradient.shape) for gradient, part in pairs]


def _largest(blocks: Tensor) -> Tensor:
    """The largest absolute value of each row, [..., 1]; NaN if there is one."""
    if blocks.device.type == "cpu":  # there the norm is three times slower
        return blocks.abs().amax(-1, keepdim=True)
    return torch.linalg.vector_norm(blocks, torch.inf, dim=-1, keepdim=True)


class PowerSGD:
    """Matrices as products of [n, rank] and [rank, m]; what that leaves out comes with the next
    step. The second factor is the next step's start. Small and 1-D tensors travel as they are."""

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup,
        scale: Callable[[Tensor], Tensor] = lambda one: one,
    ):
        """``scale`` multiplies by the current loss scale; gradients come with it, errors are kept
        without it."""
        self.rank, self.group, self.scale = rank, group, scale
        self.errors: dict[int, Tensor] = {}  # by number of the parameter, [n, m]
        self.starts: dict[int, Tensor] = {}  # [m, rank]

    def mean(self, gradients: Gradients, step: Step) -> None:
        """Replace ``gradients`` (any float dtype and shape) by about their means."""
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
            for tensors in (self.starts, self.errors):  # those of a snapshot come on the CPU
                tensors[number] = tensors[number].to(device)
            matrices.append(torch.addcmul(matrix, self.errors[number], scale))
        left = [m @ self.starts[number] for m, (number, _) in zip(matrices, thin, strict=True)]
        left = self._sum([*left, *(g.float() for g in small)])
        for gradient, total in zip(small, left[len(thin) :], strict=True):
            gradient.copy_(total / size)
        # In float32, as float16 has too few digits for it.
        left = [torch.linalg.qr(factor).Q for factor in left[: len(thin)]]
        right = self._sum([m.T @ factor for m, factor in zip(matrices, left, strict=True)])
        for (number, gradient), matrix, one, total in zip(thin, matrices, left, right, strict=True):
            other = total / size
            product = one @ other.T
            gradient.copy_(product.view(gradient.shape))
            # After an overflow the step is skipped; its infinities must not come back for ever.
            # The second factor has them, whatever QR has made of them in the first.
            fine = torch.isfinite(other).all()
            error = matrix.sub_(product).div_(scale)
            self.errors[number] = torch.where(fine, error, self.errors[number])
            self.starts[number] = torch.where(fine, other, self.starts[number])

    def _sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """Sums over the processes, by one collective."""
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """This process's errors, and the common starts, on the CPU."""
        state = {"errors": self.errors, "starts": self.starts}
        return {kind: {n: t.cpu() for n, t in tensors.items()} for kind, tensors in state.items()}

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Continue from the mean of what `state_dict` gave in one or more processes."""
        for kind, tensors in (("errors", self.errors), ("starts", self.starts)):
            mine = [state[kind] for state in states]
            tensors.update({n: torch.stack([one[n] for one in mine]).mean(0) for n in mine[0]})


# ---- the hook of DistributedDataParallel


class OrderedCollectives:
    """Runs jobs one after the other, in the order in which they were submitted.

    A compressed mean takes two collectives, while backward makes further gradients ready. If the
    second began in a callback of the first, it would begin at another moment in each process: gloo
    then pairs collectives of different buckets, and hangs or aborts. Here buckets stay in the order
    of DistributedDataParallel, the same in all processes, in one thread (CPU) or stream (GPU).
    """

    def __init__(self, device: torch.device):
        self.device, on_gpu = device, device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.thread = None if on_gpu else ThreadPoolExecutor(1)

    def submit(self, job: Callable[[], None], buffer: Tensor) -> Future[Tensor]:
        """Run ``job`` after those before it; it changes ``buffer``, the future's value."""
        if self.thread:
            future: Future[Tensor] = Future()
            self.thread.submit(_run, job, buffer, future)
            return future
        # NCCL's collectives wait in the stream, not on the host: so this returns at once.
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
    except Exception as error:  # backward raises it
        future.set_exception(error)
    else:
        future.set_result(buffer)


LATE = 0.25  # share of the steps before which powersgd does not begin


class Exchange:
    """The exchange of gradients in one process; it is saved in snapshots.

    It counts the steps itself: DistributedDataParallel hands over each bucket once a step.
    """

    def __init__(
        self,
        replica: DistributedDataParallel,
        args: Any,
        world: World,
        scaler: torch.amp.GradScaler | None = None,
    ):
        """Register with ``replica``, before its first backward pass.

        The gradients are scaled by the loss scale of ``scaler``, if it is enabled. On a node with
        several processes, the first compresses for all.
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
        # A group of its own: gloo distinguishes operations by their order alone.
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
        """Bytes that this process sends per step for gradients of these shapes."""
        return ring_bytes(wire_bytes(shapes, self.how), self.world.size)

    def start_at(self, epoch: int, step: int, steps: int, epochs: int) -> None:
        """The next step is ``step`` of ``steps`` in ``epoch`` of ``epochs``, all from 0."""
        self.next_step, self.steps, self.epochs = epoch * steps + step, steps, epochs

    def _hook(self, _: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """Called by DistributedDataParallel for each bucket of gradients that is ready."""
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
            """Average in full precision within a node, compressed between the nodes."""
            if self.inside is not None:
                dist.reduce(buffer, self.first, group=self.inside)
            if codec is not None:  # in the first process of each node
                if self.inside is not None:
                    buffer.div_(self.world.local_size)
                codec.mean(gradients, (self.seed, epoch, number))
            if self.inside is not None:
                dist.broadcast(buffer, self.first, group=self.inside)

        return self.ordered.submit(mean, buffer)

    def state_dict(self) -> dict[str, Any]:
        """The state of all processes for a snapshot. Collective; only rank 0's result counts."""
        state: dict[str, Any] = {"method": self.how.name}
        if self.how.rank:
            mine = self.codec.state_dict() if self.codec is not None else {}
            states: list[Any] | None = [None] * self.world.size if self.world.is_main else None
            dist.gather_object(mine, states, group=self.world.control)
            state["states"] = states or []
        return state

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a snapshot, in every process.

        On another number of processes each gets the mean of all states, so that their sum stays the
        same.
        """
        states = saved.get("states")
        if states and saved["method"] == self.how.name and self.codec is not None:
            mine = states[self.world.rank] if len(states) == self.world.size else None
            self.codec.load_state_dict([mine] if mine else [state for state in states if state])
