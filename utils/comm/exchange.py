"""``--comm``: how gradients are averaged over all processes, as a DDP communication hook."""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from utils.comm import methods
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
        "scripts/bench_network.py measures which is fast on your network"
    )
    add("--comm", type=_method, default="fp32", metavar="METHOD", help=text)
    text = "gradients are exchanged in buckets of this size; default: torch's, first 1, then 25"
    add("--bucket-mb", type=amount, metavar="MIB", help=text)


def _method(text: str) -> str:
    return methods.parse(text).name


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

        The gradients are scaled by the loss scale of ``scaler``, if it is enabled.
        """
        self.world, self.seed = world, args.seed
        self.start_at(0, 0, 1, 1)
        self.scale = scaler.scale if scaler is not None and scaler.is_enabled() else None
        trained = (p for p in replica.module.parameters() if p.requires_grad)
        self.number = {parameter: i for i, parameter in enumerate(trained)}
        form_buckets(replica, world, args)
        self.method = args.comm if world.size > 1 else "fp32"
        self.how = methods.parse(self.method)
        self.codec: Quantised | PowerSGD | None = None
        if self.method != "fp32":  # else DistributedDataParallel's own exchange
            self._make_groups()
            if self.leads and self.how.bits:
                self.codec = Quantised(self.how.bits, self.peers)
            elif self.leads and self.how.rank:
                self.codec = PowerSGD(self.how.rank, self.peers, self.seed, self.scale)
            replica.register_comm_hook(None, self._hook)

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

    # ---- in training

    def start_at(self, epoch: int, step: int, steps: int, epochs: int) -> None:
        """The next step is ``step`` of ``steps`` in ``epoch`` of ``epochs``, all from 0."""
        self.next_step, self.steps, self.epochs = epoch * steps + step, steps, epochs

    def _hook(self, _: None, bucket: dist.GradBucket) -> Future[Tensor]:
        """Called by DistributedDataParallel for each bucket of gradients that is ready."""
        how, buffer = self.how, bucket.buffer()
        epoch, number = divmod(self.next_step, self.steps)
        self.next_step += bucket.is_last()
        if how.name in ("fp16", "bf16"):
            half = getattr(default_hooks, f"{how.name}_compress_hook")
            return half(dist.group.WORLD, bucket)
        if how.rank and (epoch + number / self.steps) / self.epochs < LATE:
            return default_hooks.allreduce_hook(dist.group.WORLD, bucket)
        codec, step = self.codec, Step(self.seed, epoch, number)
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

    def state_dict(self) -> dict[str, Any]:
        """The state of all processes for a snapshot. Collective; only rank 0's result counts."""
        found: dict[str, Any] = {"method": self.method}
        if self.how.rank:
            mine = self.codec.state_dict() if self.codec is not None else {}
            states: list[Any] | None = [None] * self.world.size if self.world.is_main else None
            dist.gather_object(mine, states, group=self.world.control)
            found["states"] = states or []
        return found

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from a snapshot, in every process.

        On another number of processes each gets the mean of all states, so that their sum stays the
        same.
        """
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
