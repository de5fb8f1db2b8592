"""Ways to exchange gradients: against the exact mean, with real processes."""

import copy
import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from joined import in_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.comm import auto, methods
from utils.comm.exchange import Exchange
from utils.comm.methods import PowerSGD, Quantised, Step
from utils.comm.ordered import Peers
from utils.errors import UserError
from utils.launch.world import World

CPU = torch.device("cpu")
SHAPES = ((64, 3, 7, 7), (64,), (128, 64, 3, 3), (300, 129), (1,))
METHODS = ("fp32", "fp16", "bf16", "int8", "int4", "powersgd:2")


class Alone(Peers):
    """In place of ``size`` processes with equal gradients, without any."""

    def __init__(self, size: int):
        super().__init__(0, size, None)

    def sum(self, values: torch.Tensor) -> None:
        """Nothing to add."""

    def exchange(self, parts: torch.Tensor) -> torch.Tensor:
        return parts

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return part.repeat(self.size, *[1] * (part.dim() - 1))


def gradients(rank: int) -> list[torch.Tensor]:
    """Of very different sizes, as those of layers are."""
    source = torch.Generator().manual_seed(rank)
    return [torch.randn(s, generator=source) * 10.0**-i for i, s in enumerate(SHAPES)]


# ---- names and bytes


@pytest.mark.parametrize(
    "name", ["", "fp8", "fp16:2", "powersgd:", "powersgd:0", "powersgd:x", "localsgd:8", "int7"]
)
def test_an_unknown_method_is_refused(name, parse, tmp_path):
    with pytest.raises(UserError, match=r"unknown method .*powersgd\[:RANK\]"):
        methods.parse(name)
    if name == "int7":
        with pytest.raises(UserError, match="unknown method int7"):
            parse("imagenet_ddp", "--comm", name, tmp_path)


def test_bytes_that_travel():
    shapes = [(1000, 10, 10), (100,), (6, 6)]
    assert methods.parse("powersgd").name == "powersgd:4"
    for name, values in (
        ("fp32", 4 * 100_136),
        ("bf16", 2 * 100_136),
        ("int8", (1 + 4 / 256) * 100_136),
        ("int4", (1 / 2 + 4 / 128) * 100_136),
        ("powersgd:2", 4 * (2 * 1100 + 136)),  # the small matrix would be no smaller as factors
    ):
        assert methods.parse(name).name == name
        assert methods.wire_bytes(shapes, methods.parse(name)) == pytest.approx(values)
    # A ring: each process sends all but its own part, twice.
    assert [methods.sent_bytes(120, n) for n in (1, 2, 3, 4, 8)] == [0, 120, 160, 180, 210]


# ---- the arithmetic alone, in one process


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_value_is_off_by_less_than_a_step_and_right_on_average(bits):
    codec = Quantised(bits, Alone(2))
    blocks = torch.randn(50, codec.block, generator=torch.Generator().manual_seed(1))
    blocks[3] = 0
    step = blocks.abs().amax(1, keepdim=True) / codec.levels
    total = torch.zeros_like(blocks)
    source = torch.Generator().manual_seed(2)
    for _ in range(300):
        sent = codec.encode(blocks, torch.rand(blocks.shape, generator=source))
        assert sent.numel() == methods.wire_bytes([blocks.shape], methods.parse(f"int{bits}"))
        error = codec.decode(sent) - blocks
        assert (error.abs() <= step * 1.0001).all()
        total += error
    # A rounding is off by half a step at most (standard deviation): 300 of them by 0.03.
    assert ((total / 300).abs() < 6 * 0.03 * step + 1e-12).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_no_number_stays_none(bits, bad):
    values = torch.ones(5, 300)
    values[2, 7] = bad
    Quantised(bits, Alone(2)).mean([(0, values)], Step())
    assert not torch.isfinite(values).all()


def test_powersgd_gets_over_an_overflow_and_a_changed_loss_scale():
    """Errors are kept in units of the unscaled gradient; a bad step leaves no trace in them."""
    scale = [1.0]
    scaled = PowerSGD(2, Alone(2), seed=0, scale=lambda one: one * scale[0])
    plain = PowerSGD(2, Alone(2), seed=0)
    gradient = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    for factor in (1024.0, torch.inf, 1024.0, 256.0):
        bad = factor == torch.inf
        scale[0] = 1024.0 if bad else factor
        one, other = gradient * scale[0], gradient.clone()
        one[3, 3] *= factor if bad else 1.0
        scaled.mean([(0, one)], Step())
        if bad:
            assert not torch.isfinite(one).all()  # so that the step is skipped
            continue
        plain.mean([(0, other)], Step())
        torch.testing.assert_close(one / factor, other, rtol=1e-3, atol=1e-4)


def test_powersgd_sends_in_the_end_what_it_left_out():
    """Error feedback: the sum of many means of one gradient is that gradient as often."""
    method, gradient = PowerSGD(2, Alone(1), seed=0), torch.randn(40, 60)
    total = torch.zeros_like(gradient)
    for _ in range(60):
        one = gradient.clone()
        method.mean([(0, one)], Step())
        total += one
    assert (total / 60 - gradient).norm() < 0.3 * gradient.norm()
    assert (one - gradient).norm() > 0.5 * gradient.norm()  # each alone is far off
    twice = [method.state_dict(), {k: {0: 3 * x[0]} for k, x in method.state_dict().items()}]
    for kind, mean in methods.mean_of(twice).items():
        torch.testing.assert_close(mean[0], 2 * method.state_dict()[kind][0])


# ---- auto's choice


def search(monkeypatch, seconds: dict[str, float]) -> tuple[auto.Search, list[str]]:
    """auto's search where steps take so long, and what it uses in its steps."""
    monkeypatch.setattr(auto.Search, "_slowest", lambda self: seconds[self.method])
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    found, used = auto.Search(list(seconds), optimizer, World(CPU)), []
    while not found.reason:
        found.begin_step()
        used += [] if found.reason else [found.method]
    assert not optimizer._optimizer_step_pre_hooks
    return found, used


@pytest.mark.parametrize(
    ("seconds", "chosen", "says"),
    [
        ((2.0, 1.04, 1.0, 1.01), "bf16", "2000 ms with fp32, 1040 ms with bf16, 1000 ms"),
        ((2.0, 1.06, 1.0, 1.01), "int8", "saves 50%"),
        ((1.0, 1.0, 1.0, 0.97), "fp32", "970 ms with int4"),
        ((torch.inf, 1.0, torch.inf, torch.inf), "bf16", "inf ms with fp32"),
        ((torch.inf,) * 4, "fp32", "inf ms"),  # a loss scaler skipped all steps
    ],
)
def test_auto_takes_the_mildest_of_the_fast(monkeypatch, seconds, chosen, says):
    names = ("fp32", "bf16", "int8", "int4")
    found, used = search(monkeypatch, dict(zip(names, seconds, strict=True)))
    assert found.method == chosen
    assert found.reason.startswith(f"communication: {chosen}; steps took ")
    assert says in found.reason
    assert ("saves" in found.reason) == (chosen != "fp32")
    each = auto.WARM_UP + auto.STEPS
    assert [used.count(name) for name in names] == [auto.FIRST_WARM_UP + auto.STEPS, *[each] * 3]


# ---- with processes


def _means(rank: int, size: int) -> dict[str, list]:
    """The means by each method, with the exact one of the low-rank matrix."""
    peers, found = Peers(rank, size, None), {}
    for bits in (8, 4):
        parts = list(enumerate(gradients(rank)))
        Quantised(bits, peers).mean(parts, Step(5, 1, 2))
        found[f"int{bits}"] = [gradient.numpy() for _, gradient in parts]
    parts = list(enumerate(gradients(rank)))
    PowerSGD(400, peers, seed=1).mean(parts, Step())  # more than any matrix has: left alone
    found["all small"] = [gradient.numpy() for _, gradient in parts]
    low = gradients(rank)[3][:, :1] @ torch.ones(1, 129)  # of rank 1: a product says it all
    mean = low.clone()
    dist.all_reduce(mean)
    PowerSGD(4, peers, seed=1).mean([(0, low)], Step())
    found["rank 1"] = [low.numpy(), (mean / size).numpy()]
    return found


def test_means_are_near_the_exact_ones_and_the_same_everywhere():
    size = 3
    found = in_processes(size, _means)
    for name in found[0]:
        for other in found[1:]:
            for one, two in zip(found[0][name], other[name], strict=True):
                assert (one == two).all(), name
    together = [torch.stack(same) for same in zip(*map(gradients, range(size)), strict=True)]
    for bits in (8, 4):
        for mean, all_of_it in zip(found[0][f"int{bits}"], together, strict=True):
            limit = 2 / (2 ** (bits - 1) - 1) * all_of_it.abs().max()
            assert (torch.from_numpy(mean) - all_of_it.mean(0)).abs().max() <= limit
    for mean, all_of_it in zip(found[0]["all small"], together, strict=True):
        torch.testing.assert_close(torch.from_numpy(mean), all_of_it.mean(0))
    torch.testing.assert_close(*map(torch.from_numpy, found[0]["rank 1"]), rtol=1e-4, atol=1e-7)


class Training:
    """A small network, trained with one method in one of several processes."""

    def __init__(self, comm: str, world: World, scaler: Any = None):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.ReLU(), nn.Flatten()
        network = nn.Sequential(*layers, nn.Linear(40 * 36, 50))
        self.replica = DistributedDataParallel(network, bucket_cap_mb=0.1)
        self.replica.broadcast_buffers = False
        self.start = [p.detach().clone() for p in network.parameters()]
        self.optimizer = torch.optim.SGD(self.replica.parameters(), 0.05, momentum=0.9)
        self.rank, self.scaler = world.rank, scaler or torch.amp.GradScaler("cpu", enabled=False)
        args = SimpleNamespace(comm=comm, seed=3, image_size=8, evaluate=False)
        self.exchange = Exchange(self.replica, self.optimizer, args, world, scaler)

    def step(self, number: int, steps: int, factor: float = 1.0) -> str | None:
        """One step of ``steps``; its loss is multiplied by ``factor``."""
        why = self.exchange.begin_step(0, number, steps, 1)
        source = torch.Generator().manual_seed(100 * number + self.rank)
        loss = self.replica(torch.randn(4, 3, 8, 8, generator=source)).square().mean()
        self.scaler.scale(loss * factor).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return why

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.replica.parameters()])


def world_of(rank: int, size: int, local_size: int = 1) -> World:
    nodes = size // local_size
    return World(CPU, rank, size, rank % local_size, local_size, nodes, dist.group.WORLD)


def _resumes(rank: int, size: int, local_size: int) -> dict[str, Any]:
    """Weights after 8 steps by each method, at once and in two parts, and those of the start."""
    world, found = world_of(rank, size, local_size), {}
    for comm in METHODS:
        first, second = Training(comm, world), Training(comm, world)
        for number in range(5):
            first.step(number, 8)
        box = [(first.exchange.collect(), first.replica.state_dict(), first.optimizer.state_dict())]
        dist.broadcast_object_list(box, 0)
        saved, model, momentum = copy.deepcopy(box[0])
        second.replica.load_state_dict(model)
        second.optimizer.load_state_dict(momentum)
        second.exchange.restore(saved)
        for number in range(5, 8):
            first.step(number, 8)
            second.step(number, 8)
        found[comm] = first.weights().numpy(), second.weights().numpy()
    found["start"] = torch.cat([one.flatten() for one in first.start]).numpy()
    return found


@pytest.mark.parametrize(
    ("size", "local_size"), [(4, 2), pytest.param(3, 1, marks=pytest.mark.long)]
)
def test_weights_stay_equal_in_all_processes_and_resume_exactly(size, local_size):
    found = in_processes(size, functools.partial(_resumes, local_size=local_size))
    for comm in METHODS:
        for rank in range(size):
            whole, resumed = found[rank][comm]
            assert (found[0][comm][0] == whole).all(), comm
            assert (resumed == whole).all(), f"{comm} resumed"
    plain = torch.from_numpy(found[0]["fp32"][0])
    way = (plain - torch.from_numpy(found[0]["start"])).norm()
    near = {"fp16": 0.01, "bf16": 0.05, "int8": 0.05, "int4": 0.5, "powersgd:2": 0.9}
    for comm, share in near.items():
        assert 0 < (plain - torch.from_numpy(found[0][comm][0])).norm() < share * way, comm


def _tries_all(rank: int, size: int) -> dict[str, Any]:
    """What auto does in a run, with sums of the weights after each step."""
    training = Training("auto", world_of(rank, size))
    weights, reasons, methods_used = [], [], []
    with mock.patch.object(auto, "mildest", lambda _: "int8"):
        for step in range(auto.MOST_STEPS + 2):
            why = training.step(step, 100)
            reasons += [(step, why)] if why else []
            methods_used.append(training.exchange.how.name)
            weights.append(float(training.weights().double().sum()))
    again = Training("auto", world_of(rank, size))
    again.exchange.restore({"method": "int8", "nodes": size})
    kept = training.exchange.collect(), again.exchange.method
    return {"weights": weights, "reasons": reasons, "methods": methods_used, "kept": kept}


def test_auto_tries_methods_in_training_and_keeps_one():
    one, other = in_processes(2, _tries_all)
    assert one["weights"] == other["weights"]
    assert len(set(one["weights"])) == len(one["weights"])
    ((step, why),) = one["reasons"]
    assert step == auto.MOST_STEPS
    assert why.startswith("communication: int8; steps took ")
    assert one["kept"] == ({"method": "int8", "nodes": 2}, "int8")
    wanted = ["bf16" if name == "fp16" else name for name in auto.METHODS]
    assert list(dict.fromkeys(one["methods"])) == wanted
    assert one["methods"][-2:] == ["int8"] * 2


def _overflow(rank: int, size: int) -> dict[str, Any]:
    """By method: sums of the weights after each step (rank 1 overflows in one), and the scale."""
    found = {}
    for comm in METHODS:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        training, weights = Training(comm, world_of(rank, size), scaler), []
        for number, bad in ((5, False), (6, True), (7, False)):
            training.step(number, 8, torch.inf if bad and rank == 1 else 1.0)
            weights.append(float(training.weights().sum()))
        found[comm] = weights, scaler.get_scale()
    return found


def test_an_overflow_in_one_process_skips_the_step_in_all():
    one, other = in_processes(2, _overflow)
    assert one == other
    for comm in METHODS:
        (first, second, third), scale = one[comm]
        assert first == second != third, comm
        assert torch.isfinite(torch.tensor(third)), comm
        assert scale == 512, comm
