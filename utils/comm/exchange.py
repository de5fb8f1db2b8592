"""Gradients become means over all processes, by the method that ``--comm`` names."""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from utils.comm import cost
from utils.comm.auto import Search
from utils.comm.lane import Lane, Peers
from utils.comm.local_sgd import LocalSGD
from utils.comm.methods import PowerSGD, Quantised, Step
from utils.errors import UserError
from utils.launch.world import World
from utils.option_types import amount

LATE = 0.25  # share of a training before which powersgd and localsgd exchange float32


def add_options(parser: argparse.ArgumentParser) -> None:
    """How gradients are exchanged between the processes."""
    group = parser.add_argument_group("communication")
    group.add_argument(
        "--comm",
        type=_method,
        default="fp32",
        metavar="METHOD",
        help="what gradients are on their way: fp32, fp16, bf16, int8, int4, powersgd[:RANK] (4), "
        "or localsgd[:PERIOD] (8: nothing, but weights are averaged every 8 steps); auto: on "
        "several nodes the mildest that is about as fast as the best, by trials in the first "
        "steps",
    )
    group.add_argument(
        "--bucket-mb",
        type=amount,
        metavar="MIB",
        help="gradients are exchanged in buckets of this size; default: torch's, first 1, then 25",
    )


def _method(text: str) -> str:
    if text == "auto":
        return text
    try:
        return cost.method(text).name
    except UserError as fault:
        raise argparse.ArgumentTypeError(f"{fault}, or auto") from None


class Exchange:
    """The exchange of one process; it is saved in snapshots.

    ``method`` is the method in use: that of ``--comm``, or auto's choice, None while it searches.
    """

    def __init__(
        self,
        replica: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        args: Any,
        world: World,
        scaler: torch.amp.GradScaler | None = None,
    ):
        """Register with ``replica``, before its first backward pass.

        ``scaler``: whose loss scale the gradients carry, if it is enabled.
        """
        self.world, self.seed = world, args.seed
        self.auto = args.comm == "auto"
        self.method: str | None = args.comm
        if world.size == 1 or (self.auto and world.nodes == 1):
            self.method = "fp32"
        elif self.auto:
            self.method = None
        self.step, self.progress = Step(args.seed), 0.0
        self.search: Search | None = None
        trained = (p for p in replica.module.parameters() if p.requires_grad)
        self.number = {parameter: i for i, parameter in enumerate(trained)}
        self.optimizer = optimizer
        self.scale = scaler.scale if scaler is not None and scaler.is_enabled() else None
        self.codec: Quantised | PowerSGD | None = None
        self.early: Quantised | None = None  # in place of powersgd, where auto has chosen that
        self.local: LocalSGD | None = None
        self.ready = False  # for real gradients
        if self.method != "fp32":  # else DistributedDataParallel's own
            self._make_groups()
            replica.register_comm_hook(None, self._hook)
        settle_buckets(replica, world, args)
        self.ready = True
        if self.method:
            self._use(self.method)
        else:
            candidates = list(cost.AUTO)
            if self.scale is None:  # without a loss scale fp16 has no range
                candidates[candidates.index("fp16")] = "bf16"
            self.search = Search(candidates, optimizer, world)

    def _make_groups(self) -> None:
        """Who exchanges with whom. Of a node with several processes the first one compresses."""
        world = self.world
        self.inside = None
        ranks = list(range(world.size))
        self.leads = True
        if 1 < world.nodes < world.size:
            firsts = ranks[:: world.local_size]
            for first in firsts:  # all processes make all groups
                group = dist.new_group(ranks[first : first + world.local_size])
                if first == world.rank - world.local_rank:
                    self.inside, self.first = group, first
            self.leads, ranks = world.local_rank == 0, firsts
        # A group of its own: gloo's operations are told apart by their order alone.
        group = dist.new_group(ranks)
        if self.leads:
            self.peers = Peers(ranks.index(world.rank), len(ranks), group)
        self.lane = Lane(world.device)

    def _use(self, method: str) -> None:
        """Make what ``method`` needs, in place of what another one on trial has left."""
        self.codec = self.early = None
        how = cost.method(method)
        peers = self.peers if method != "fp32" and self.leads else None
        if method in ("int8", "int4") and peers:
            self.codec = Quantised(int(method[3:]), peers)
        elif how.rank and peers:
            self.codec = PowerSGD(how.rank, peers, self.seed, self.scale)
            self.early = Quantised(4, peers)
        elif how.period > 1 and self.world.size > 1:
            self.local = LocalSGD(how.period, self.optimizer, self.world, self.scale is not None)

    # ---- in training

    def begin_step(self, epoch: int, step: int, steps: int, epochs: int) -> str | None:
        """The training stands at ``step`` of ``steps`` in ``epoch`` of ``epochs``, all from 0.

        Collective. Returns, once, when auto has chosen a method: which and why.
        """
        self.step = Step(self.seed, epoch, step)
        self.progress = (epoch + step / steps) / epochs
        if self.local is not None:
            done = epoch * steps + step + 1
            # The last step of an epoch, too: what is evaluated are the averages.
            self.local.due = done % self.local.period == 0 or step + 1 == steps
            self.local.active = self.progress >= LATE
        search = self.search
        if search is None:
            return None
        before = search.method
        search.begin_step()
        if search.sentence:
            self.method, self.search = search.method, None
        if search.sentence or search.method != before:
            self._use(search.method)
        return search.sentence or None

    def _hook(self, _: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """What DistributedDataParallel calls for each bucket of gradients that is ready."""
        if not self.ready:
            return _done(bucket.buffer())
        if self.search is not None:
            self.search.timing.bucket_is_ready(bucket)
        method = self.search.method if self.search is not None else self.method
        if method in ("fp16", "bf16"):
            half = getattr(default_hooks, f"{method}_compress_hook")
            return half(dist.group.WORLD, bucket)
        if self.local is not None and self.local.active:
            return self.local.hook(bucket)
        how, early = cost.method(method), self.progress < LATE and self.search is None
        if method == "fp32" or how.period > 1 or (how.rank and early and not self.auto):
            return default_hooks.allreduce_hook(dist.group.WORLD, bucket)
        codec = self.early if how.rank and early else self.codec
        buffer = bucket.buffer()
        gradients = [
            (self.number[parameter], gradient)
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        ]
        step = self.step
        return self.lane.submit(lambda: self._mean(codec, buffer, gradients, step), buffer)

    def _mean(
        self,
        codec: Quantised | PowerSGD | None,
        buffer: Tensor,
        gradients: list[tuple[int, Tensor]],
        step: Step,
    ) -> None:
        """In full precision within a node, compressed between the nodes."""
        if self.inside is not None:
            dist.reduce(buffer, self.first, group=self.inside)
        if self.leads:
            if self.inside is not None:
                buffer.div_(self.world.local_size)
            codec.mean(gradients, step)
        if self.inside is not None:
            dist.broadcast(buffer, self.first, group=self.inside)

    # ---- in snapshots

    def collect(self) -> dict[str, Any]:
        """What a snapshot keeps of all processes. Collective; only rank 0's return value counts."""
        found: dict[str, Any] = {"method": self.method, "nodes": self.world.nodes}
        if self.has_states:
            part = self.local or self.codec
            found["states"] = _to_main(part.state_dict() if part else {}, self.world)
        return found

    @property
    def has_states(self) -> bool:
        """Whether there is more to keep than the method's name; the same in all processes."""
        how = cost.method(self.method or "fp32")
        return self.world.size > 1 and bool(how.rank or how.period > 1)

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue as a snapshot says, in every process. Raises: `UserError`.

        What auto has chosen stays, unless the number of nodes is another. On another number of
        processes each gets the mean of what all had, so that nothing of it is lost.
        """
        alike = saved["nodes"] == self.world.nodes and saved["method"] is not None
        if self.search is not None and alike:
            self.method, self.search = saved["method"], None
            self._use(self.method)
        states = saved.get("states")
        if not states or saved["method"] != self.method:
            return
        part = self.local or self.codec
        if part is None:
            return
        state = states[self.world.rank] if len(states) == self.world.size else None
        state = state or mean_of([state for state in states if state])
        try:
            part.load_state_dict(state)
        except (RuntimeError, KeyError, TypeError, AttributeError) as fault:
            raise UserError(
                f"the snapshot's state of --comm {self.method} does not fit this model", alike=True
            ) from fault


def _done(buffer: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
    future.set_result(buffer)
    return future


def settle_buckets(replica: nn.Module, world: World, args: Any) -> None:
    """Have DistributedDataParallel form its final buckets before the first step.

    It begins with one bucket, and forms those that it keeps after a first backward pass. A sum over
    three or more processes is rounded by the place in the bucket: a resumed run would begin with
    another rounding than the run that it continues. So a first backward pass of an image of zeros,
    in evaluation mode, comes here, and leaves nothing behind. (Apex's own class is left alone.)
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


def mean_of(states: list[Any]) -> Any:
    """The mean of tensors in dictionaries and lists of one form."""
    first = states[0]
    if isinstance(first, dict):
        return {key: mean_of([state[key] for state in states]) for key in first}
    if isinstance(first, list):
        return [mean_of(list(parts)) for parts in zip(*states, strict=True)]
    return torch.stack(states).mean(0)


def _to_main(state: dict[str, Any], world: World) -> list[dict[str, Any]]:
    """The state of each process, on the CPU, in rank 0; elsewhere an empty list."""
    found: list[Any] | None = [None] * world.size if world.is_main else None
    dist.gather_object(_on_cpu(state), found, group=world.control)
    return found or []


def _on_cpu(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_on_cpu(value) for value in state]
    return state.cpu() if isinstance(state, Tensor) else state
