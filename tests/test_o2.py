"""The opt levels of Apex: what becomes float16, masters, loss scale, and the whole O2 recipe."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from joined import in_processes
from o2_cases import CPU, batch, groups, network, prepare, train, usual
from running import same
from torch import nn

from utils.model import o2
from utils.model.o2 import ENDLESS, LEVELS, SMALLEST, Amp, DistributedDataParallel, LossScaler
from utils.model.optim import sgd
from utils.model.options import add_apex
from utils.start.errors import UserError
from utils.start.option_types import Parser
from utils.start.world import World

HALF, FULL = torch.float16, torch.float32
NORM = "1.weight 1.bias 1.running_mean 1.running_var"
# Batch norm without affine parameters has nothing to lose.
OTHERS = "0.weight 3.running_mean 3.running_var 4.weight 4.bias 6.weight 6.bias 7.weight 7.bias"


@pytest.mark.parametrize(
    ("level", "half", "computes", "masters", "scale"),
    [
        ("O0", "", FULL, 0, 1.0),
        ("O1", "", HALF, 0, 2.0**16),
        ("O2", OTHERS, HALF, 5, 2.0**16),
        ("O3", f"{OTHERS} {NORM}", HALF, 0, 1.0),
    ],
)
def test_a_level_says_what_is_half_precision_and_learns(level, half, computes, masters, scale):
    amp, model, optimizer = prepare(level)
    in_half = {name for name, value in model.state_dict().items() if value.dtype == HALF}
    assert in_half == set(half.split())
    assert len(amp.masters) == masters, "the frozen layer has none"
    for weight, state in optimizer.state.items():
        assert weight.dtype == state["momentum_buffer"].dtype
    assert float(amp.scaler.value) == scale
    seen = set()
    model[0].register_forward_hook(lambda _, inputs, out: seen.add(out.dtype))
    losses = [float(train(amp, model, optimizer, 0)) for _ in range(12)]
    assert losses[-1] < losses[0] / 2
    assert seen == {computes}


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


def torchs_sgd(groups):
    return torch.optim.SGD(groups, 0.05, 0.9, foreach=False)


@pytest.mark.parametrize(("fixed", "original"), [(None, torchs_sgd), (1024.0, usual)])
def test_o2_equals_the_recipe_bit_for_bit(fixed, original):
    """Twelve steps; the loss of some is made so large that the float16 gradients overflow."""
    weights = [1e8, 1, 1, 1e8, 1e8, 1, 1, 1, 1, 1e8, 1, 1]
    amp, model, optimizer = prepare(loss_scale=fixed)
    start = [weight.detach().clone() for weight in trained(optimizer)]
    for step, (loss, scale, *tensors) in enumerate(reference(weights, fixed, original)):
        assert torch.equal(train(amp, model, optimizer, step, weights[step]), loss), step
        assert float(amp.scaler.value) == scale, step
        for ours, theirs in zip((trained(optimizer), model.parameters()), tensors, strict=True):
            assert same(ours, theirs), step
    assert scale == (fixed or 2.0**12), "the overflows did happen"
    assert int(amp.scaler.skipped) == 4
    assert not any(torch.equal(a, b) for a, b in zip(start, trained(optimizer), strict=True))


# ---- the loss scale


def moves(scaler, *gradients):
    """Unscale these gradients, one after the other: the last one then, and the scale."""
    weight = nn.Parameter(torch.zeros(1))
    for gradient in gradients:
        weight.grad = torch.tensor([gradient])
        scaler.unscale(torch.optim.SGD([weight], 0.1))
    return weight.grad, float(scaler.value)


GOOD, BAD = 1.0, float("inf")


def test_one_bad_value_anywhere_is_an_overflow():
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3).half())]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    weights[1].grad[2] = BAD
    scaler = LossScaler(CPU)
    scaler.unscale(torch.optim.SGD(weights, 0.1))
    assert [weight.grad for weight in weights] == [None] * 2, "so that the optimiser does nothing"
    gradient, _ = moves(scaler, 65536.0)
    assert gradient == 2.0, "the scale was halved; the flag is of the last step alone"


SCALES = [
    (2.0**16, 0, [GOOD] * 2000, 2.0**17),
    (2.0**16, 1999, [GOOD], 2.0**17),  # the count is in the snapshot
    (2.0**16, 1999, [BAD] + [GOOD] * 1999, 2.0**15),  # an overflow restarts the count
    (2.0**24, 1999, [GOOD], 2.0**24),  # the cap
]


@pytest.mark.parametrize(("scale", "clean", "gradients", "expected"), SCALES, ids=range(4))
def test_it_doubles_after_2000_clean_steps_in_a_row_and_halves(scale, clean, gradients, expected):
    scaler = LossScaler(CPU)
    assert scaler.state_dict() == {"scale": 2.0**16, "clean_steps": 0, "skipped": 0}
    scaler.load_state_dict({"scale": scale, "clean_steps": clean, "skipped": 2})
    assert moves(scaler, *gradients)[1] == expected
    assert scaler.state_dict()["skipped"] == 2 + gradients.count(BAD)


def test_each_skipped_step_is_reported_once_until_the_scale_is_lost(logged):
    scaler, fixed = LossScaler(CPU), LossScaler(CPU, 8.0, reports=False)
    fixed.load_state_dict({"scale": 4.0, "clean_steps": 0, "skipped": 0})  # it stays 8
    moves(scaler, GOOD, BAD, GOOD, BAD)
    start = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to "
    assert logged == [start + value for value in ("32768.0", "16384.0")]
    while float(scaler.value) >= SMALLEST:
        assert scaler.failure is None
        moves(scaler, BAD)
    assert "overflow without end" in scaler.failure
    reports, most = len(logged), [BAD] * (ENDLESS - 1)
    assert moves(fixed, *most, GOOD, *most)[1] == 8.0
    assert fixed.failure is None
    moves(fixed, BAD)
    assert "overflow without end" in fixed.failure
    assert len(logged) == reports


def test_state_dict_is_float32_from_the_masters():
    amp, model, optimizer = prepare()
    for step in range(3):
        train(amp, model, optimizer, step)
    state = amp.weights.state_dict()
    assert list(state) == list(network().state_dict())
    assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}
    assert not torch.equal(state["0.weight"], model[0].weight.float()), "not rounded"
    assert torch.equal(state["0.weight"].half(), model[0].weight)
    other, *_ = prepare()
    other.weights.load_state_dict(state)
    assert same(other.weights.state_dict(), state)


def test_options_override_the_level():
    def level_of(line):
        parser = Parser()
        add_apex(parser)
        return o2.from_args(parser.parse_args(line.split()))

    assert level_of("") == LEVELS["O2"]
    assert not level_of("--keep-batchnorm-fp32 False").keep_batchnorm_fp32
    assert level_of("--loss-scale 128").loss_scale == 128
    with pytest.raises(UserError, match="--keep-batchnorm-fp32 has no meaning with O1"):
        level_of("--opt-level O1 --keep-batchnorm-fp32 True")
    with pytest.raises(SystemExit):
        level_of("--loss-scale 0")


# ---- two processes

USUAL, OVERFLOWS = [1] * 4, [1e8, 1, 1e8, 1]
CASES = [(2, USUAL), (1, OVERFLOWS)]  # micro-batches of a step, factors of rank 1's losses


def replicas(rank, size, cases=CASES):
    """For each case: masters, loss scales."""
    return [train_replica(rank, size, *case) for case in cases]


def train_replica(rank, size, micro, weights):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5)
    amp, model = Amp(World(CPU, rank, size)), nn.Sequential(*layers)  # the mean over images
    optimizer = sgd([{"params": [*model.parameters()]}], 0.05, 0.9, 1e-3)
    model, optimizer = amp.initialize(model, optimizer, "O2")
    replica, scales = DistributedDataParallel(model), []
    for step, weight in enumerate(weights):
        source = torch.Generator().manual_seed(step)
        images = torch.randn(8, 3, 8, 8, generator=source).chunk(size)[rank].chunk(micro)
        targets = torch.randint(5, (8,), generator=source).chunk(size)[rank].chunk(micro)
        for i in range(micro):
            last = i == micro - 1
            with nullcontext() if last else replica.no_sync():
                loss = F.cross_entropy(replica(images[i]), targets[i]) / micro
                loss = loss * (weight if rank else 1)
                with amp.scale_loss(loss, optimizer, delay_unscale=not last) as scaled_loss:
                    scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(float(amp.scaler.value))
    return [p.detach().tolist() for p in amp.master_params(optimizer)], scales


def test_two_processes_update_as_one_on_the_joined_batch():
    """And they skip a step together when one overflows."""
    ((alone, _),) = in_processes(1, functools.partial(replicas, cases=[(1, USUAL)]))[0]
    first, second = in_processes(2, replicas)
    assert first == second
    assert first[-1][1] == [2.0**15, 2.0**15, 2.0**14, 2.0**14]
    for masters, _ in first[:-1]:
        for ours, whole in zip(masters, map(torch.tensor, alone), strict=True):
            limit = 2e-3 * float(whole.abs().max())
            torch.testing.assert_close(torch.tensor(ours), whole, rtol=0, atol=limit)
