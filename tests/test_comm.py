"""Ways to exchange gradients: against the exact mean, with real processes."""

import multiprocessing
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import python
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.comm import auto, cost
from utils.comm.exchange import Exchange, mean_of
from utils.comm.lane import Alone, Peers
from utils.comm.methods import PowerSGD, Quantised, Step
from utils.errors import UserError
from utils.launch.world import World

CPU = torch.device("cpu")
SHAPES = ((64, 3, 7, 7), (64,), (128, 64, 3, 3), (300, 129), (1,))
METHODS = ("fp32", "fp16", "bf16", "int8", "int4", "powersgd:2", "localsgd:3")
WITH_ADAMW = "localsgd:2"  # which keeps more than momentum


def gradients(rank: int) -> list[torch.Tensor]:
    """Of very different sizes, as those of layers are."""
    source = torch.Generator().manual_seed(rank)
    return [torch.randn(s, generator=source) * 10.0**-i for i, s in enumerate(SHAPES)]


def exact(size: int) -> list[torch.Tensor]:
    """The mean over ``size`` ranks."""
    return [torch.stack(same).mean(0) for same in zip(*map(gradients, range(size)), strict=True)]


def _run(rank: int, size: int, port: int, work: Callable, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    results.put((rank, work(rank, size)))
    dist.barrier()
    dist.destroy_process_group()


def in_processes(size: int, work: Callable[[int, int], Any]) -> list[Any]:
    """What ``work(rank, size)`` returns (plain values) in each of ``size`` joined processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    started = [
        context.Process(target=_run, args=(rank, size, port, work, results)) for rank in range(size)
    ]
    for process in started:
        process.start()
    found = sorted((results.get(timeout=200) for _ in started), key=lambda one: one[0])
    for process in started:
        process.join(60)
        assert process.exitcode == 0
    return [value for _, value in found]


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
        assert sent.dtype == torch.uint8
        assert sent.numel() == 50 * (codec.block * bits // 8 + 4)
        error = codec.decode(sent) - blocks
        assert (error.abs() <= step * 1.0001).all()
        total += error
    # A rounding is off by half a step at most (standard deviation): 300 of them by 0.03.
    assert ((total / 300).abs() < 6 * 0.03 * step + 1e-12).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("method", [Quantised(8, Alone(2)), Quantised(4, Alone(2))])
def test_what_is_no_number_stays_none(method, bad):
    values = torch.ones(5, 300)
    values[2, 7] = bad
    method.mean([(0, values)], Step())
    assert not torch.isfinite(values).all()


def test_powersgd_gets_over_an_overflow():
    method = PowerSGD(2, Alone(2), seed=0)
    good = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    first = good.clone()
    method.mean([(0, first)], Step())
    errors = method.errors[0].clone()
    bad = good.clone()
    bad[3, 3] = torch.inf
    method.mean([(0, bad)], Step())
    assert not torch.isfinite(bad).all()  # so that the step is skipped
    assert torch.equal(method.errors[0], errors)
    again = good.clone()
    method.mean([(0, again)], Step())
    assert torch.isfinite(again).all()


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


def test_powersgd_keeps_its_errors_in_units_of_the_unscaled_gradient():
    scale = [1.0]
    method = PowerSGD(2, Alone(2), seed=0, scale=lambda one: one * scale[0])
    plain = PowerSGD(2, Alone(2), seed=0)
    gradient = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    for factor in (1024.0, 1024.0, 256.0):
        scale[0] = factor
        scaled, same = gradient * factor, gradient.clone()
        method.mean([(0, scaled)], Step())
        plain.mean([(0, same)], Step())
        torch.testing.assert_close(scaled / factor, same, rtol=1e-3, atol=1e-4)


def test_which_matrices_powersgd_sends_as_products():
    method = PowerSGD(4, Alone(2), seed=0)
    assert method.compresses(torch.Size((512, 512, 3, 3)))
    assert not method.compresses(torch.Size((512,)))
    assert not method.compresses(torch.Size((10, 12)))


def test_the_mean_of_states_keeps_their_form():
    states = [
        {"a": {3: torch.ones(2)}, "b": [torch.zeros(1)]},
        {"a": {3: 3 * torch.ones(2)}, "b": [torch.ones(1)]},
    ]
    mean = mean_of(states)
    assert mean["a"][3].tolist() == [2, 2]
    assert mean["b"][0].tolist() == [0.5]


def test_an_unknown_method_is_refused():
    for wrong in ("int7", "powersgd:0", "localsgd:", "fp32:2"):
        with pytest.raises(UserError, match=f"unknown method {wrong}"):
            cost.method(wrong)
    result = python("imagenet_ddp.py", "--comm", "int7")
    assert result.code == 2
    assert "unknown method int7" in result.err
    assert "Traceback" not in result.err


# ---- with processes


def _means(rank: int, size: int) -> dict[str, list]:
    """The means by each method."""
    peers, found = Peers(rank, size, None), {}
    for bits in (8, 4):
        parts = list(enumerate(gradients(rank)))
        Quantised(bits, peers).mean(parts, Step(5, 1, 2))
        found[f"int{bits}"] = [gradient.numpy() for _, gradient in parts]
    parts = list(enumerate(gradients(rank)))
    PowerSGD(400, peers, seed=1).mean(parts, Step())  # more than any matrix has: left alone
    found["all small"] = [gradient.numpy() for _, gradient in parts]
    low = gradients(rank)
    low[3] = low[3][:, :1] @ torch.ones(1, 129)  # of rank 1: a product says it all
    mean = [low[3].clone()]
    dist.all_reduce(mean[0])
    method = PowerSGD(4, peers, seed=1)
    method.mean([(0, low[3])], Step())
    found["rank 1"] = [low[3].numpy(), (mean[0] / size).numpy()]
    return found


def test_means_are_near_the_exact_ones_and_the_same_everywhere():
    size = 3
    found = in_processes(size, _means)
    for name in found[0]:
        for other in found[1:]:
            for one, two in zip(found[0][name], other[name], strict=True):
                assert (one == two).all(), name
    largest = [
        torch.stack(same).abs().max() for same in zip(*map(gradients, range(size)), strict=True)
    ]
    for bits in (8, 4):
        for mean, right, most in zip(found[0][f"int{bits}"], exact(size), largest, strict=True):
            limit = 2 / (2 ** (bits - 1) - 1) * most
            assert (torch.from_numpy(mean) - right).abs().max() <= limit
    for mean, right in zip(found[0]["all small"], exact(size), strict=True):
        torch.testing.assert_close(torch.from_numpy(mean), right)
    torch.testing.assert_close(*map(torch.from_numpy, found[0]["rank 1"]), rtol=1e-4, atol=1e-7)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.ReLU(), nn.Flatten(), nn.Linear(40 * 36, 50)
    )


def _train(rank: int, size: int, local_size: int = 1, steps: int = 8) -> dict[str, Any]:
    """Weights after some steps by each method; a part of them in two sessions, too."""
    world = World(
        CPU, rank, size, rank % local_size, local_size, size // local_size, dist.group.WORLD
    )
    found = {}
    for comm in (*METHODS, WITH_ADAMW):

        def session(comm=comm):
            args = SimpleNamespace(comm=comm, seed=3, image_size=8, evaluate=False)
            replica = DistributedDataParallel(network(), bucket_cap_mb=0.1)
            replica.broadcast_buffers = False
            optimizer = (
                torch.optim.AdamW(replica.parameters(), 0.01)
                if comm == WITH_ADAMW
                else torch.optim.SGD(replica.parameters(), 0.05, momentum=0.9)
            )
            return replica, optimizer, Exchange(replica, optimizer, args, world)

        def go(parts, first, last):
            replica, optimizer, exchange = parts
            for number in range(first, last):
                source = torch.Generator().manual_seed(100 * number + rank)
                exchange.begin_step(0, number, steps, 1)
                replica(torch.randn(4, 3, 8, 8, generator=source)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        whole = session()
        go(whole, 0, steps)
        weights = [p.detach().numpy() for p in whole[0].parameters()]
        first = session()
        go(first, 0, 5)
        saved = [first[2].collect()]
        dist.broadcast_object_list(saved, 0)
        states = (first[0].state_dict(), first[1].state_dict())
        box = [states]
        dist.broadcast_object_list(box, 0)
        second = session()
        second[0].load_state_dict(box[0][0])
        second[1].load_state_dict(box[0][1])
        second[2].restore(saved[0])
        go(second, 5, steps)
        found[comm] = weights, [p.detach().numpy() for p in second[0].parameters()]
    return found


def _nodes_of_two(rank: int, size: int) -> dict[str, Any]:
    return _train(rank, size, local_size=2)


@pytest.mark.parametrize(
    ("size", "work"), [(3, _train), pytest.param(4, _nodes_of_two, marks=pytest.mark.long)]
)
def test_weights_stay_equal_in_all_processes_and_resume_exactly(size, work):
    found = in_processes(size, work)
    for comm in (*METHODS, WITH_ADAMW):
        for rank in range(size):
            whole, resumed = found[rank][comm]
            for one, two, mine in zip(found[0][comm][0], whole, resumed, strict=True):
                assert (one == two).all(), comm
                assert (mine == two).all(), f"{comm} resumed"
    plain = [torch.from_numpy(weight) for weight in found[0]["fp32"][0]]
    start = list(network().parameters())
    for comm, near in (
        ("fp16", 0.01),
        ("bf16", 0.05),
        ("int8", 0.05),
        ("int4", 0.5),
        ("powersgd:2", 0.9),
        ("localsgd:3", 0.9),
    ):
        weights = [torch.from_numpy(weight) for weight in found[0][comm][0]]
        off = sum((a - b).norm() ** 2 for a, b in zip(plain, weights, strict=True)) ** 0.5
        way = sum((a - b.detach()).norm() ** 2 for a, b in zip(plain, start, strict=True)) ** 0.5
        assert 0 < off < near * way, comm


def _tries_all(rank: int, size: int) -> dict[str, Any]:
    """What auto takes after a trial of each method, with sums of the weights after each step."""
    world = World(CPU, rank, size, 0, 1, size, dist.group.WORLD)
    args = SimpleNamespace(comm="auto", seed=3, image_size=8, evaluate=False)
    replica = DistributedDataParallel(network(), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(replica.parameters(), 0.05)
    exchange = Exchange(replica, optimizer, args, world)
    order = iter(["bf16", "int8", "powersgd:2", "int4", "int8"])
    weights, errors, reasons = [], [], []
    with mock.patch.object(cost, "mildest", lambda *_: next(order)):
        for step in range(auto.MOST_STEPS + 2):
            why = exchange.begin_step(0, step, 100, 1)
            reasons += [(step, why)] if why else []
            kept = exchange.collect()
            source = torch.Generator().manual_seed(100 * step + rank)
            replica(torch.randn(4, 3, 8, 8, generator=source)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            weights.append(sum(float(p.detach().double().sum()) for p in replica.parameters()))
            errors.append(len(getattr(exchange.codec, "errors", ())))
    assert not optimizer._optimizer_step_pre_hooks
    return {"weights": weights, "reasons": reasons, "errors": errors, "kept": kept}


def test_auto_tries_methods_in_training_and_leaves_nothing_of_them():
    one, other = in_processes(2, _tries_all)
    assert one["weights"] == other["weights"]
    assert len(set(one["weights"])) == len(one["weights"])
    ((step, why),) = one["reasons"]
    assert step == auto.MOST_STEPS
    assert why.startswith("communication: int8.")
    assert one["kept"] == {"method": "int8", "nodes": 2}
    tried = auto.TRIAL_WARM_UP + auto.TRIAL_STEPS
    first = auto.WARM_UP + auto.STEPS + 2 * tried
    assert [step for step, number in enumerate(one["errors"]) if number] == list(
        range(first, first + tried)
    )


def _overflow(rank: int, size: int) -> dict[str, Any]:
    """By method: sums of the weights after each step (rank 1 overflows in one), and the scale."""
    world = World(CPU, rank, size, 0, 1, size, dist.group.WORLD)
    found = {}
    for comm in METHODS:
        args = SimpleNamespace(comm=comm, seed=3, image_size=8, evaluate=False)
        replica = DistributedDataParallel(network(), bucket_cap_mb=0.1)
        optimizer = torch.optim.SGD(replica.parameters(), 0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        exchange = Exchange(replica, optimizer, args, world, scaler)
        images, weights = torch.ones(4, 3, 8, 8), []
        for step, bad in enumerate((False, True, False)):
            exchange.begin_step(0, step + 5, 8, 1)
            loss = replica(images).square().mean()
            scaler.scale(loss * torch.inf if bad and rank == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            weights.append(sum(float(p.detach().sum()) for p in replica.parameters()))
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


def test_methods_of_the_forecast_are_those_of_the_exchange():
    for comm in METHODS:
        assert cost.method(comm).name == comm
