"""Ways to exchange gradients: against the exact mean, with real processes."""

import copy
import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from joined import in_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.model import compress
from utils.model.compress import OrderedCollectives, Quantised
from utils.report import ring_bytes, sent_mb
from utils.start.world import World, form_buckets

CPU = torch.device("cpu")
# Methods, and how far from the exact weights they end, as a share of the way from the start.
NEAR = {"fp32": 0, "fp16": 0.01, "bf16": 0.05, "int8": 0.05, "int4": 0.5}


# ---- names and bytes


def test_bytes_that_travel():
    for name, each in (("fp32", 4), ("bf16", 2), ("int8", 1 + 4 / 256), ("int4", 1 / 2 + 4 / 128)):
        size = compress.wire_bytes(100_136, compress.parse(name))
        assert size == pytest.approx(each * 100_136)
    # A ring: each process sends all but its own part, twice.
    assert [ring_bytes(120, n) for n in (1, 2, 3, 4, 8)] == [0, 120, 160, 180, 210]
    model = nn.Linear(1000, 250)
    model.bias.requires_grad_(False)  # frozen weights have no gradients
    state = SimpleNamespace(model=model, comm=None, sharded=False)
    assert sent_mb(SimpleNamespace(state=state, world=World(CPU, size=4))) == 1.5


# ---- which method is best


def test_the_most_exact_of_the_fast_methods():
    for bf16, chosen in ((0.104, "bf16"), (0.106, "int8")):
        seconds = {"fp32": 0.2, "bf16": bf16, "int8": 0.1, "int4": 0.101}
        assert compress.most_exact(seconds) == chosen


# ---- with processes


def test_a_collective_that_fails_ends_the_step():
    with pytest.raises(IndexError):
        OrderedCollectives(CPU).submit([].pop, torch.ones(1)).wait()


def gradients(rank: int) -> list[torch.Tensor]:
    """Of very different sizes, as those of layers are."""
    source, shapes = torch.Generator().manual_seed(rank), ((30, 41), (300,), (1,), (3, 3))
    return [torch.randn(s, generator=source) * (i < 3) * 10.0**-i for i, s in enumerate(shapes)]


def _means(rank: int, size: int) -> dict[str, list]:
    """How far the means by each method are from the exact ones, of each gradient in each round."""
    by_method = {}
    exact = [sum(same) / size for same in zip(*map(gradients, range(size)), strict=True)]
    for bits in (8, 4):
        method, errors = Quantised(bits, dist.group.WORLD), []
        for number in range(40):
            mine = gradients(rank)
            method.mean([*enumerate(mine)], (5, 1, number))
            errors.append([one - mean for one, mean in zip(mine, exact, strict=True)])
        by_method[f"int{bits}"] = [torch.stack(same).numpy() for same in zip(*errors, strict=True)]
    return by_method


def test_means_are_near_the_exact_ones_on_average_equal_and_the_same_everywhere():
    """Each process rounds up or down at random, and so does the one that has the sum."""
    by_method = in_processes(3, _means)
    for name, errors in by_method[0].items():
        for other in by_method[1:]:
            for one, two in zip(errors, other[name], strict=True):
                assert (one == two).all(), name
    all_of_it = zip(*map(gradients, range(3)), strict=True)
    units = [float(torch.stack(same).abs().max()) for same in all_of_it]
    for name, levels, deviation in (("int8", 127, 0.27), ("int4", 7, 0.25)):
        *errors, zeros = by_method[0][name]
        # In steps of the largest value.
        large, small, single = (levels * e / unit for e, unit in zip(errors, units, strict=False))
        assert abs(large).max() <= 2
        assert abs(small).max() <= 2, "blocks have a scale of their own"
        assert abs(large.mean(0)).max() < 0.25
        assert large.std() < deviation  # more if rounded by equal numbers
        assert abs(single).max() < 1e-3
        assert not zeros.any()


class Training:
    """A small network, trained with one method in one of several processes."""

    def __init__(self, comm: str, world: World, scaled: bool = True):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.ReLU(), nn.Flatten()
        network = nn.Sequential(*layers, nn.Linear(40 * 36, 50))
        self.replica = DistributedDataParallel(network, bucket_cap_mb=0.1)
        self.replica.broadcast_buffers = False
        self.optimizer = torch.optim.SGD(self.replica.parameters(), 0.05, momentum=0.9)
        self.rank = world.rank
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        args = SimpleNamespace(comm=comm, seed=3, image_size=8, evaluate=False)
        form_buckets(self.replica, world, args)
        plain = Mock(**{"state_dict.return_value": {}})
        self.exchange = compress.exchange(self.replica, args, world) or plain

    def step(self, number: int, factor: float = 1.0) -> None:
        """One step; its loss is multiplied by ``factor``."""
        source = torch.Generator().manual_seed(100 * number + self.rank)
        loss = self.replica(torch.randn(4, 3, 8, 8, generator=source)).square().mean()
        self.scaler.scale(loss * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.replica.parameters()])


def world_of(rank: int, size: int, local_size: int = 1) -> World:
    nodes = size // local_size
    return World(CPU, rank, size, rank % local_size, local_size, nodes, dist.group.WORLD)


STOP, BAD, STEPS = 5, 6, 8  # in two epochs


def _resumes(rank: int, size: int) -> dict[str, Any]:
    """By each method, weights at the start and after each step, and in the end when resumed.

    On two nodes. In step `BAD` the gradients of rank 1 overflow.
    """
    world, by_method = world_of(rank, size, size // 2), {}
    for comm in NEAR:
        first, second = Training(comm, world), Training(comm, world)
        if comm != "fp32":  # of int8 and int4, one process of each node exchanges
            wire, among = compress.METHODS[comm].bytes_per_value, 2 if "int" in comm else size
            assert first.exchange.sent_bytes(1000) == 2 * (among - 1) / among * wire * 1000
        first.exchange.start_at(0, 0, STEPS // 2)
        weights = [first.weights()]
        for number in range(STEPS):
            factor = torch.inf if number == BAD and rank == 1 else 1.0
            if number == STOP:
                all_of_it = first.exchange, first.replica, first.optimizer
                box = [(all_of_it[0].state_dict(), *(one.state_dict() for one in all_of_it[1:]))]
                dist.broadcast_object_list(box, 0)
                saved, model, momentum = copy.deepcopy(box[0])
                second.replica.load_state_dict(model)
                second.optimizer.load_state_dict(momentum)
                second.exchange.load_state_dict(saved)
                second.exchange.start_at(1, STOP - STEPS // 2, STEPS // 2)
            if number >= STOP:
                second.step(number, factor)
            first.step(number, factor)
            weights.append(first.weights())
        assert first.scaler.get_scale() == second.scaler.get_scale() == 512
        by_method[comm] = [one.numpy() for one in (*weights, second.weights())]
    again, rounded = Training("int8", world, scaled=False), []
    again.exchange.start_at(0, 0, STEPS)
    for _ in range(2):  # equal gradients are not rounded by equal numbers
        again.optimizer.zero_grad()
        again.replica(gradients(rank)[0][:24, :32].reshape(4, 3, 8, 8)).square().mean().backward()
        rounded.append(again.replica.module[0].weight.grad.clone())
    assert not torch.equal(*rounded)
    return by_method


def test_weights_stay_equal_in_all_processes_and_resume_exactly():
    """And an overflow in one process skips the step in all."""
    by_method = in_processes(4, _resumes)
    start, plain = (torch.from_numpy(by_method[0]["fp32"][step]) for step in (0, STEPS))
    for comm, share in NEAR.items():
        for other in by_method[1:]:
            for one, two in zip(by_method[0][comm], other[comm], strict=True):
                assert (one == two).all(), comm
        *steps, resumed = by_method[0][comm]
        assert (resumed == steps[-1]).all(), f"{comm} resumed"
        changes = [bool((a != b).any()) for a, b in itertools.pairwise(steps)]
        assert changes == [number != BAD for number in range(STEPS)], comm
        away = (plain - torch.from_numpy(steps[-1])).norm() / (plain - start).norm()
        assert 0 < away < share or comm == "fp32", comm
        same = [bool((a == b).all()) for a, b in zip(steps, by_method[0]["fp32"], strict=False)]
        equal = STEPS + 1 if comm == "fp32" else 1
        assert same == [step < equal for step in range(STEPS + 1)], comm
