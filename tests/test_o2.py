"""The opt levels of Apex: what becomes float16, masters, loss scale, and the whole O2 recipe."""

import copy
from argparse import ArgumentParser

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from utils.errors import UserError
from utils.o2 import LEVELS, LossScaler, MixedPrecision, add_options, choose_level
from utils.optim import sgd

CPU = torch.device("cpu")
RECIPE = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.BatchNorm2d(8, affine=False),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    )


def batch(step):
    source = torch.Generator().manual_seed(step)
    images = torch.randn(6, 3, 8, 8, generator=source)
    return images, torch.randint(5, (6,), generator=source)


def prepare(level="O2", fixed=None):
    model = network()
    precision = MixedPrecision(model, LEVELS[level], CPU)
    scaler = LossScaler(CPU, fixed if fixed else LEVELS[level].loss_scale)
    return precision, scaler, sgd(precision.parameters(), **RECIPE)


def train(precision, scaler, optimizer, step, weight=1.0):
    """One step as imagenet_ddp_apex.py takes it. Returns the loss."""
    images, targets = batch(step)
    with precision.autocast():
        logits = precision.model(images)
        assert logits.dtype == torch.float32 or precision.level.autocast
        loss = F.cross_entropy(logits, targets)
    scaler.scale(loss * weight).backward()
    scaler.unscale(precision.gradients_to_masters())
    scaler.step(optimizer)
    scaler.update()
    precision.masters_to_weights()
    return loss.detach()


def contents(precision, optimizer):
    """Copies of weights, masters and momentum."""
    tensors = [*precision.model.parameters(), *precision.parameters()]
    tensors += [state["momentum_buffer"] for state in optimizer.state.values()]
    return [tensor.detach().clone() for tensor in tensors]


HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("level", "conv", "norm", "plain_norm", "masters"),
    [
        ("O0", FULL, FULL, FULL, 0),
        ("O1", FULL, FULL, FULL, 0),
        ("O2", HALF, FULL, HALF, 3),
        ("O3", HALF, HALF, HALF, 0),
    ],
)
def test_what_is_half_precision(level, conv, norm, plain_norm, masters):
    precision, _, _ = prepare(level)
    model = precision.model
    assert {model[i].weight.dtype for i in (0, 5)} == {model[5].bias.dtype} == {conv}
    assert {x.dtype for x in (model[1].weight, model[1].bias, model[1].running_var)} == {norm}
    assert model[3].running_mean.dtype == plain_norm, "nothing to lose without affine parameters"
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert sorted(precision.masters) == ["0.weight", "5.bias", "5.weight"][:masters]


def test_masters_are_the_rounded_weights_in_the_models_order():
    original, (precision, _, _) = network(), prepare()
    for (name, weight), ours in zip(
        original.named_parameters(), precision.parameters(), strict=True
    ):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, weight if name.startswith("1.") else weight.half().float())


def test_forward_takes_and_gives_float32():
    precision, _, _ = prepare()
    seen = []
    precision.model[0].register_forward_pre_hook(lambda _, x: seen.append(x[0].dtype))
    assert precision.model(batch(0)[0]).dtype == torch.float32
    assert seen == [torch.float16]


def reference(steps, weights):
    """O2 as Apex's tag 25.04 computes it, spelled out. Yields loss, scale, masters, weights."""
    model = network()
    for i in (0, 3, 5):
        model[i].half()
    weights16 = list(model.parameters())
    masters = [nn.Parameter(w.detach().float().clone()) for w in weights16]
    optimizer = torch.optim.SGD(masters, **RECIPE, fused=True)
    scale, clean = 65536.0, 0
    for step in range(steps):
        images, targets = batch(step)
        loss = F.cross_entropy(model(images.half()).float(), targets)
        (loss * weights[step] * scale).backward()
        for weight, master in zip(weights16, masters, strict=True):
            master.grad = weight.grad.float() / scale
            weight.grad = None
        if all(bool(master.grad.isfinite().all()) for master in masters):
            optimizer.step()
            with torch.no_grad():
                for weight, master in zip(weights16, masters, strict=True):
                    weight.copy_(master)
            clean += 1
        else:
            scale, clean = scale / 2, 0
        if clean == 2000:
            scale, clean = min(scale * 2, 2.0**24), 0
        yield loss.detach(), scale, masters, weights16


def test_o2_equals_the_recipe_bit_for_bit():
    """Twelve steps; the loss of some is made so large that the float16 gradients overflow."""
    weights = [1e6, 1, 1, 1e6, 1e6, 1, 1, 1, 1, 1e6, 1, 1]
    precision, scaler, optimizer = prepare()
    scales = []
    for step, expected in enumerate(reference(12, weights)):
        loss = train(precision, scaler, optimizer, step, weights[step])
        assert torch.equal(loss, expected[0]), step
        scales.append(float(scaler.value))
        assert scales[-1] == expected[1], step
        for got, want in zip(precision.parameters(), expected[2], strict=True):
            assert torch.equal(got, want), step
        for got, want in zip(precision.model.parameters(), expected[3], strict=True):
            assert torch.equal(got, want), step
    assert scales[-1] == 2.0**12, "the overflows did happen"


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("fixed", [None, 1024.0])
def test_overflow_changes_nothing_but_a_dynamic_scale(fixed, first):
    precision, scaler, optimizer = prepare(fixed=fixed)
    if not first:
        train(precision, scaler, optimizer, 0)
    before, scale = contents(precision, optimizer), float(scaler.value)
    train(precision, scaler, optimizer, 1, weight=1e8)
    after = contents(precision, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert float(scaler.value) == (fixed or scale / 2)
    assert all(w.grad is None for w in (*precision.model.parameters(), *precision.parameters()))
    train(precision, scaler, optimizer, 2)
    after = contents(precision, optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(tensor.isfinite().all() for tensor in after)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_value_anywhere_is_an_overflow(bad):
    scaler = LossScaler(CPU)
    gradients = [torch.full((3,), 65536.0), torch.tensor([1.0, bad]), torch.ones(2, 2)]
    scaler.unscale(gradients)
    assert float(scaler.overflow) == 1
    assert gradients[0].tolist() == [1.0] * 3
    scaler.unscale([torch.ones(2)])
    assert float(scaler.overflow) == 0, "the flag is of the last step alone"


def moves(scaler, *finite):
    for good in finite:
        scaler.unscale([torch.tensor([1.0 if good else float("inf")])])
        scaler.update()
    return float(scaler.value)


def test_scale_doubles_after_2000_clean_steps_in_a_row():
    scaler = LossScaler(CPU)
    assert moves(scaler, *[True] * 1999) == 2.0**16
    assert moves(scaler, True) == 2.0**17
    assert moves(scaler, *[True] * 1999) == 2.0**17
    assert moves(scaler, False) == 2.0**16
    assert moves(scaler, *[True] * 1999) == 2.0**16, "the overflow began the count anew"
    assert moves(scaler, True) == 2.0**17


def test_scale_stops_at_the_cap():
    scaler = LossScaler(CPU)
    scaler.load_state_dict({"scale": 2.0**23, "clean_steps": 1999})
    assert moves(scaler, True) == 2.0**24
    scaler.load_state_dict({"scale": 2.0**24, "clean_steps": 1999})
    assert moves(scaler, True) == 2.0**24
    assert moves(scaler, False) == 2.0**23


def test_fixed_scale_stays():
    scaler = LossScaler(CPU, 128.0)
    assert moves(scaler, *[True] * 2100, False, False) == 128.0


def test_scaler_state_is_taken_over():
    scaler, other = LossScaler(CPU), LossScaler(CPU)
    moves(scaler, False, False, True, True, True)
    assert scaler.state_dict() == {"scale": 2.0**14, "clean_steps": 3}
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()


def test_state_dict_is_float32_from_the_masters():
    precision, scaler, optimizer = prepare()
    for step in range(3):
        train(precision, scaler, optimizer, step)
    state = precision.state_dict()
    assert list(state) == list(network().state_dict())
    assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}
    assert torch.equal(state["0.weight"], precision.masters["0.weight"])
    assert not torch.equal(state["0.weight"], state["0.weight"].half().float()), "not rounded"
    network().load_state_dict(state)


def test_loading_continues_bit_for_bit():
    precision, scaler, optimizer = prepare()
    for step in range(3):
        train(precision, scaler, optimizer, step)
    saved = copy.deepcopy([thing.state_dict() for thing in (precision, scaler, optimizer)])
    other = prepare()
    for thing, state in zip(other, saved, strict=True):
        thing.load_state_dict(state)
    for step in range(3, 6):
        assert torch.equal(train(precision, scaler, optimizer, step), train(*other, step))
    ours, theirs = contents(precision, optimizer), contents(other[0], other[2])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_learns(level):
    precision, scaler, optimizer = prepare(level)
    losses = [float(train(precision, scaler, optimizer, 0)) for _ in range(12)]
    assert losses[-1] < losses[0] / 2


def level_of(*arguments):
    parser = ArgumentParser()
    add_options(parser)
    return choose_level(parser.parse_args(arguments))


def test_options_override_the_level():
    assert level_of() == LEVELS["O2"]
    assert level_of("--opt-level", "O1", "--loss-scale", "64").loss_scale == 64.0
    assert level_of("--opt-level", "O3", "--loss-scale", "dynamic").loss_scale is None
    assert level_of("--opt-level", "O3", "--keep-batchnorm-fp32", "True").keep_batchnorm_fp32
    assert not level_of("--keep-batchnorm-fp32", "False").keep_batchnorm_fp32


@pytest.mark.parametrize(
    "arguments",
    [("--opt-level", "O1", "--keep-batchnorm-fp32", "True"), ("--loss-scale", "large")],
)
def test_options_without_a_meaning_are_refused(arguments):
    with pytest.raises(UserError, match=arguments[-2]):
        level_of(*arguments)


@pytest.mark.parametrize("scale", ["0", "-1", "nan", "inf"])
def test_loss_scale_must_be_a_positive_number(scale):
    with pytest.raises(UserError, match="--loss-scale"):
        level_of("--loss-scale", scale)
