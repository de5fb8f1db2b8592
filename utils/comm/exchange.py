"""``--comm``: how gradients are averaged over all processes, as a DDP communication hook."""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from utils.comm import auto, methods
from utils.comm.methods import PowerSGD, Quantised, Step
from utils.comm.ordered import OrderedCollectives, Peers
from utils.launch.world import World
from utils.option_types import amount

LATE = 0.25  # share of the steps before which powersgd does not begin


def add_options(parser: argparse.ArgumentParser) -> None:
    """How gradients are exchanged between the processes."""
    add = parser.add_argument_group("communication").add_argument
    text = (
        "format of the exchanged gradients: fp32, fp16, bf16, int8, int4 or powersgd[:RANK] (4); "
        "auto: fp32 on one node; on several, try each in a few steps and keep the mildest that is "
        "about as fast as the fastest"
    )
    add("--comm", type=_method, default="fp32", metavar="METHOD", help=text)
    text = "gradients are exchanged in buckets of this size; default: torch's, first 1, then 25"
    add("--bucket-mb", type=amount, metavar="MIB", help=text)


def _method(text: str) -> str:
    return text if text == "auto" else methods.parse(text).name


class Exchange:
    """The exchange of gradients in one process; it is saved in snapshots.

    ``method`` is that of ``--comm``, or auto's choice; None while auto searches.
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

        The gradients are scaled by the loss scale of ``scaler``, if it is enabled.
        """
        self.world, self.seed = world, args.seed
        self.step, self.progress = Step(args.seed), 0.0
        self.scale = scaler.scale if scaler is not None and scaler.is_enabled() else None
        trained = (p for p in replica.module.parameters() if p.requires_grad)
        self.number = {parameter: i for i, parameter in enumerate(trained)}
        form_buckets(replica, world, args)
        self.auto = args.comm == "auto" and world.nodes > 1
        self.search: auto.Search | None = None
        self.method: str | None = args.comm
        if self.auto:
            candidates = list(auto.METHODS)
            if self.scale is None:  # without a loss scale fp16 has no range
                candidates[candidates.index("fp16")] = "bf16"
            self.method, self.search = None, auto.Search(candidates, optimizer, world)
        elif world.size == 1 or args.comm == "auto":
            self.method = "fp32"
        if self.method != "fp32":  # else DistributedDataParallel's own exchange
            self._make_groups()
            replica.register_comm_hook(None, self._hook)
            self._use(self.method or self.search.method)

    def _make_groups(self) -> None:
        """Make the process groups. On a node, the first process compresses for all."""
        world = self.world
        self.inside, self.leads, ranks = None, True, list(range(world.size))
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
        self.ordered = OrderedCollectives(world.device)

    def _use(self, method: str) -> None:
        """Exchange by ``method`` from now on, from a fresh state."""
        self.how = methods.parse(method)
        self.codec: Quantised | PowerSGD | None = None
        self.early: Quantised | None = None  # before powersgd begins, where auto has chosen that
        if self.leads and self.how.bits:
            self.codec = Quantised(self.how.bits, self.peers)
        elif self.leads and self.how.rank:
            self.codec = PowerSGD(self.how.rank, self.peers, self.seed, self.scale)
            self.early = Quantised(4, self.peers)

    # ---- in training

    def begin_step(self, epoch: int, step: int, steps: int, epochs: int) -> str | None:
        """Begin step ``step`` of ``steps`` in ``epoch`` of ``epochs``, all from 0. Collective.

        Returns, once, when auto has chosen a method: which and why.
        """
        self.step = Step(self.seed, epoch, step)
        self.progress = (epoch + step / steps) / epochs
        search = self.search
        if search is None:
            return None
        search.begin_step()
        if search.reason:
            self.method, self.search = search.method, None
        if search.reason or search.method != self.how.name:
            self._use(search.method)
        return search.reason or None

    def _hook(self, _: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """Called by DistributedDataParallel for each bucket of gradients that is ready."""
        how, step, buffer = self.how, self.step, bucket.buffer()
        if how.name in ("fp16", "bf16"):
            half = getattr(default_hooks, f"{how.name}_compress_hook")
            return half(dist.group.WORLD, bucket)
        early = bool(how.rank) and self.progress < LATE and self.search is None
        if how.name == "fp32" or (early and not self.auto):
            return default_hooks.allreduce_hook(dist.group.WORLD, bucket)
        codec = self.early if early else self.codec
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        gradients = [(self.number[parameter], gradient) for parameter, gradient in pairs]

        def mean() -> None:
            """Average in full precision within a node, compressed between the nodes."""
            if self.inside is not None:
                dist.reduce(buffer, self.first, group=self.inside)
            if codec is not None:  # in the first process of each node
                if self.inside is not None:
                    buffer.div_(self.world.local_size)
                codec.mean(gradients, step)
            if self.inside is not None:
                dist.broadcast(buffer, self.first, group=self.inside)

        return self.ordered.submit(mean, buffer)

    # ---- in snapshots

    def collect(self) -> dict[str, Any]:
        """The state of all processes for a snapshot. Collective; only rank 0's result counts."""
        found: dict[str, Any] = {"method": self.method, "nodes": self.world.nodes}
        if self.world.size > 1 and methods.parse(self.method or "fp32").rank:
            mine = self.codec.state_dict() if self.codec is not None else {}
            states: list[Any] | None = [None] * self.world.size if self.world.is_main else None
            dist.gather_object(mine, states, group=self.world.control)
            found["states"] = states or []
        return found

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from a snapshot, in every process.

        auto keeps its choice if the number of nodes is the same. On another number of processes
        each gets the mean of all states, so that their sum stays the same.
        """
        if self.search is not None and saved["nodes"] == self.world.nodes and saved["method"]:
            self.search.hook.remove()
            self.method, self.search = saved["method"], None
            self._use(self.method)
        states = saved.get("states")
        if states and saved["method"] == self.method and self.codec is not None:
            state = states[self.world.rank] if len(states) == self.world.size else None
            state = state or methods.mean_of([state for state in states if state])
            self.codec.load_state_dict(state)


def form_buckets(replica: nn.Module, world: World, args: Any) -> None:
    """Have DistributedDataParallel form its final buckets before the first step.

    It begins with one bucket, and forms its final ones after the first backward pass. The rounding
    of a sum over three or more processes depends on the place in the bucket: without this, a
    resumed run would round its first step in another way than the run that it continues. The
    backward pass here is of an image of zeros, in evaluation mode, and changes nothing. (Apex's own
    class is left alone.)
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
