"""The opt levels of Apex: what becomes float16, masters, loss scale, and the whole O2 recipe."""

import functools
from argparse import ArgumentParser

import pytest
import torch
import torch.nn.functional as F
from joined import in_processes
from o2_cases import CPU, RECIPE, batch, groups, level, network, prepare, train, usual
from torch import nn

from utils.amp import o2
from utils.amp.apex import add_options
from utils.amp.loss_scale import ENDLESS, SMALLEST, LossScaler
from utils.amp.o2 import LEVELS, Amp, DistributedDataParallel
from utils.errors import UserError
from utils.launch.world import World
from utils.model.muon import Muon
from utils.model.optim import sgd

HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("name", "conv", "norm", "plain_norm", "masters"),
    [
        ("O0", FULL, FULL, FULL, 0),
        ("O1", FULL, FULL, FULL, 0),
        ("O2", HALF, FULL, HALF, 5),
        ("O3", HALF, HALF, HALF, 0),
    ],
)
def test_what_is_half_precision(name, conv, norm, plain_norm, masters):
    amp, model, optimizer = prepare(level(name))
    assert {model[i].weight.dtype for i in (0, 4, 6, 7)} == {model[7].bias.dtype} == {conv}
    assert {x.dtype for x in (model[1].weight, model[1].bias, model[1].running_var)} == {norm}
    assert model[3].running_mean.dtype == plain_norm, "nothing to lose without affine parameters"
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert len(amp.masters) == masters, "the frozen layer has none"
    momentum = {p.dtype: state["momentum_buffer"].dtype for p, state in optimizer.state.items()}
    assert all(parameter == own for parameter, own in momentum.items())


def reference(weights, fixed, build):
    """O2 as Apex's tag 25.04 computes it, spelled out. Yields loss, scale, masters, weights."""
    model = network()
    for i in (0, 3, 4, 6, 7):
        model[i].half()
    pairs = []
    masters = groups(model)
    for group in masters:
        for i, weight in enumerate(group["params"]):
            if weight.requires_grad:
                group["params"][i] = nn.Parameter(weight.detach().float().clone())
                pairs.append((weight, group["params"][i]))
    optimizer = build(masters)
    scale, clean = fixed or 65536.0, 0
    for step, loss_weight in enumerate(weights):
        images, targets = batch(step)
        loss = F.cross_entropy(model(images.half()).float(), targets)
        (loss * loss_weight * scale).backward()
        for weight, master in pairs:
            master.grad = weight.grad.float() / scale
            weight.grad = None
        if all(bool(master.grad.isfinite().all()) for _, master in pairs):
            optimizer.step()
            with torch.no_grad():
                for weight, master in pairs:
                    weight.copy_(master)
            clean += 1
        elif not fixed:
            scale, clean = scale / 2, 0
        yield loss.detach(), scale, trained(optimizer), list(model.parameters())


def trained(optimizer):
    return [p for p in Amp.master_params(optimizer) if p.requires_grad]


def muon(groups):
    """Muon for what has two dimensions."""
    plain, matrices = groups
    return Muon([{**matrices, "muon": True}, plain], 0.01, 0.9, (0.9, 0.999))


@pytest.mark.parametrize(
    ("fixed", "build", "original"),
    [
        (None, usual, lambda groups: torch.optim.SGD(groups, **RECIPE, foreach=False)),
        (1024.0, usual, usual),
        (None, torch.optim.AdamW, torch.optim.AdamW),
        (None, muon, muon),
    ],
    ids=["sgd", "fixed", "adamw", "muon"],
)
def test_o2_equals_the_recipe_bit_for_bit(fixed, build, original):
    """Twelve steps; the loss of some is made so large that the float16 gradients overflow."""
    weights = [1e8, 1, 1, 1e8, 1e8, 1, 1, 1, 1, 1e8, 1, 1]
    amp, model, optimizer = prepare(level(loss_scale=fixed), build=build)
    start = [weight.detach().clone() for weight in trained(optimizer)]
    for step, (loss, scale, *tensors) in enumerate(reference(weights, fixed, original)):
        assert torch.equal(train(amp, model, optimizer, step, weights[step]), loss), step
        assert float(amp.scaler.value) == scale, step
        for ours, theirs in zip((trained(optimizer), model.parameters()), tensors, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), step
    assert scale == (fixed or 2.0**12), "the overflows did happen"
    assert int(amp.scaler.skipped) == 4
    assert not any(torch.equal(a, b) for a, b in zip(start, trained(optimizer), strict=True))


def test_gradients_of_micro_batches_add_up():
    """Two halves with delayed unscaling give the gradient of the whole."""
    amp, model, optimizer = prepare()
    images, targets = batch(0)
    for half, last in ((slice(0, 3), False), (slice(3, 6), True)):
        model.eval()  # batch norm would see other batches
        loss = F.cross_entropy(model(images[half]), targets[half]) / 2
        with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
            scaled_loss.backward()
    added = [p.grad for p in amp.master_params(optimizer) if p.requires_grad]
    other, model, optimizer = prepare()
    model.eval()
    with other.scale_loss(F.cross_entropy(model(images), targets), optimizer) as scaled_loss:
        scaled_loss.backward()
    expected = [p.grad for p in other.master_params(optimizer) if p.requires_grad]
    for one, both in zip(added, expected, strict=True):
        assert (one - both).norm() < 0.02 * both.norm()


def unscaled(scaler, *gradients):
    """The gradients after `LossScaler.unscale`."""
    weights = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    scaler.unscale(torch.optim.SGD(weights, 0.1))
    return [weight.grad for weight in weights]


def moves(scaler, *finite):
    for good in finite:
        unscaled(scaler, torch.tensor([1.0 if good else float("inf")]))
    return float(scaler.value)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_value_anywhere_is_an_overflow(bad):
    scaler = LossScaler(CPU)
    found = unscaled(scaler, torch.ones(3), torch.tensor([1.0, bad], dtype=HALF), torch.ones(2, 2))
    assert float(scaler.overflow) == 1
    assert found == [None] * 3, "so that the optimiser does nothing"
    (found,) = unscaled(scaler, torch.full((3,), 65536.0))
    assert found.tolist() == [2.0] * 3, "the scale was halved; the flag is of the last step alone"


@pytest.mark.parametrize(
    ("scale", "clean", "finite", "expected"),
    [
        (2.0**16, 0, [True] * 1999, 2.0**16),
        (2.0**16, 0, [True] * 2000, 2.0**17),
        (2.0**16, 1999, [False], 2.0**15),
        (2.0**16, 1999, [False] + [True] * 1999, 2.0**15),  # an overflow restarts the count
        (2.0**16, 1999, [False] + [True] * 2000, 2.0**16),
        (2.0**23, 1999, [True], 2.0**24),
        (2.0**24, 1999, [True], 2.0**24),  # the cap
        (2.0**24, 1999, [True, False], 2.0**23),
    ],
    ids=range(8),
)
def test_scale_doubles_after_2000_clean_steps_in_a_row_and_halves(scale, clean, finite, expected):
    scaler = LossScaler(CPU)
    assert scaler.state_dict() == {"scale": 2.0**16, "clean_steps": 0, "skipped": 0}
    scaler.load_state_dict({"scale": scale, "clean_steps": clean, "skipped": 2})
    assert moves(scaler, *finite) == expected
    other = LossScaler(CPU)
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert scaler.state_dict()["skipped"] == 2 + finite.count(False)


def test_each_skipped_step_is_reported_once_and_counted(logged):
    scaler = LossScaler(CPU)
    moves(LossScaler(CPU, reports=False), True, False)
    moves(scaler, True, False, True, False, False)
    start = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to "
    assert logged == [start + value for value in ("32768.0", "16384.0", "8192.0")]
    assert scaler.state_dict()["skipped"] == 3


def test_overflows_without_end_are_lost():
    scaler = LossScaler(CPU)
    while float(scaler.value) > SMALLEST:
        assert not scaler.lost
        moves(scaler, False)
    moves(scaler, False)
    assert scaler.lost
    fixed = LossScaler(CPU, 8.0)
    assert moves(fixed, *[False] * (ENDLESS - 1), True, *[False] * (ENDLESS - 1)) == 8.0
    assert not fixed.lost
    moves(fixed, False)
    assert fixed.lost


def test_scale_of_one_without_masters_touches_no_gradient():
    amp, model, optimizer = prepare(level("O3"))
    train(amp, model, optimizer, 0)
    loss = F.cross_entropy(model(batch(1)[0]), batch(1)[1])
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    assert int(amp.scaler.clean_steps) == 0


def test_state_dict_is_float32_from_the_masters():
    amp, model, optimizer = prepare()
    for step in range(3):
        train(amp, model, optimizer, step)
    state = amp.weights.state_dict()
    assert list(state) == list(network().state_dict())
    assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}
    assert not torch.equal(state["0.weight"], state["0.weight"].half().float()), "not rounded"
    assert torch.equal(state["0.weight"].half(), model[0].weight)
    assert torch.equal(state["4.weight"], network()[4].weight.half().float()), "frozen"
    network().load_state_dict(state)


def test_shared_weights_are_saved_under_both_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    amp = Amp(World(CPU))
    amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), "O2")
    master = next(iter(amp.masters.values()))
    with torch.no_grad():
        master.add_(1e-6)
    state = amp.weights.state_dict()
    assert all(torch.equal(state[name], master) for name in ("0.weight", "1.weight"))


@pytest.mark.parametrize("name", LEVELS)
def test_every_level_learns(name):
    one = prepare(level(name))
    losses = [float(train(*one, 0)) for _ in range(12)]
    assert losses[-1] < losses[0] / 2


def level_of(*arguments):
    parser = ArgumentParser()
    add_options(parser)
    return o2.from_args(parser.parse_args(arguments))


def test_options_override_the_level():
    assert level_of() == LEVELS["O2"]
    assert level_of("--opt-level", "O1", "--loss-scale", "64").loss_scale == 64.0
    assert level_of("--opt-level", "O3", "--loss-scale", "dynamic").loss_scale == "dynamic"
    assert level_of("--opt-level", "O3", "--keep-batchnorm-fp32", "True").keep_batchnorm_fp32
    assert not level_of("--keep-batchnorm-fp32", "False").keep_batchnorm_fp32
    with pytest.raises(UserError, match="--keep-batchnorm-fp32 has no meaning with O1"):
        level_of("--opt-level", "O1", "--keep-batchnorm-fp32", "True")


@pytest.mark.parametrize("scale", ["large", "0", "-1", "nan", "inf"])
def test_a_loss_scale_that_is_none_is_refused(scale, capsys):
    with pytest.raises(SystemExit):
        level_of("--loss-scale", scale)
    assert "--loss-scale" in capsys.readouterr().err


# ---- two processes

STEPS = 4
OPTIONS = [
    {},
    {"delay_allreduce": True},
    {"gradient_predivide_factor": 2.0},  # torch's own order
    {"gradient_predivide_factor": 4.0},
    {"allreduce_always_fp32": True, "delay_allreduce": True},
]


def plain_network():
    """Without batch norm, so that the gradient of a batch is the mean over its images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5)
    )


def replicas(rank, size, cases):
    """For each case, (options, what multiplies rank 1's losses): masters and loss scales."""
    return [train_replica(rank, size, *case) for case in cases]


def train_replica(rank, size, options, weights):
    amp, model = Amp(World(CPU, rank, size)), plain_network()
    optimizer = sgd([{"params": [*model.parameters()]}], 0.05, 0.9, 1e-3)
    model, optimizer = amp.initialize(model, optimizer, "O2")
    model.register_buffer("own", torch.zeros(1))
    replica, scales = DistributedDataParallel(model, **options), []
    model.own.fill_(rank)
    for step in range(STEPS):
        source = torch.Generator().manual_seed(step)
        images = torch.randn(8, 3, 8, 8, generator=source).chunk(size)[rank]
        targets = torch.randint(5, (8,), generator=source).chunk(size)[rank]
        loss = F.cross_entropy(replica(images), targets) * (weights[step] if rank else 1)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(float(amp.scaler.value))
    assert model.own == rank, "buffers stay each process's own, as in Apex"
    return [p.detach().tolist() for p in amp.master_params(optimizer)], scales


def test_two_processes_update_as_one_on_the_joined_batch():
    """And they skip a step together when one overflows: rank 1 in steps 0 and 2, here."""
    cases = [(options, [1] * STEPS) for options in OPTIONS]
    ((alone, _),) = in_processes(1, functools.partial(replicas, cases=cases[:1]))[0]
    cases.append(({}, [1e8, 1, 1e8, 1]))
    first, second = in_processes(2, functools.partial(replicas, cases=cases))
    assert first == second
    assert first[-1][1] == [2.0**15, 2.0**15, 2.0**14, 2.0**14]
    start = plain_network()[0].weight.detach().half().float()
    for masters, _ in first[:-1]:
        assert not torch.equal(torch.tensor(masters[0]), start)
        for ours, whole in zip(masters, map(torch.tensor, alone), strict=True):
            limit = 2e-3 * float(whole.abs().max())
            torch.testing.assert_close(torch.tensor(ours), whole, rtol=0, atol=limit)
