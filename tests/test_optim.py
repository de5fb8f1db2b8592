"""Optimisers by name: against torch's own, in snapshots, with O2's masters; learning rates."""

import math
from pathlib import Path

import pytest
import torch
from running import same
from test_checkpoint import resume
from torch import nn
from torchvision.models import get_model

from utils import options
from utils.model import optim
from utils.model.o2 import LossScaler
from utils.model.optim import learning_rate, scale_lr
from utils.model.options import set_defaults
from utils.run.snapshots import TrainState, snapshot_of, write
from utils.start.errors import UserError
from utils.start.option_types import Options
from utils.start.world import World

CPU = torch.device("cpu")
WORLD = World(CPU)


def options_of(*line: str, **more) -> Options:
    """The options of an optimiser, settled."""
    args = options.build_parser("", "").parse_args(line)
    vars(args).update(more)
    set_defaults(args)
    return Options(**vars(args))


def network() -> nn.Module:
    """Two convolutions, batch norm, two linear layers; channels last."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 12, 3, bias=False),
        nn.Flatten(),
        nn.Linear(12 * 16, 20),
        nn.Linear(20, 5),
    ).to(memory_format=torch.channels_last)


def steps(model, optimizer, first=0, last=3):
    for number in range(first, last):
        images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().clone() for weight in model.parameters()]


ORIGINALS = {
    "--lr 0.2 --momentum 0 --wd 0": (torch.optim.SGD, {"lr": 0.2}),
    "--optimizer nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "nesterov": True},
    ),
    "--optimizer adamw --betas 0.8,0.95": (
        torch.optim.AdamW,
        {"lr": 1e-3, "betas": (0.8, 0.95), "weight_decay": 0.05},
    ),
}


@pytest.mark.parametrize("line", ORIGINALS)
def test_by_name_they_are_those_of_torch_bit_for_bit(line):
    model, plain = network(), network()
    kind, options = ORIGINALS[line]
    built = optim.build(options_of(*line.split()), model)
    assert len(built.param_groups) == 1
    assert same(steps(model, built), steps(plain, kind(plain.parameters(), **options)))


# ---- groups

GROUPS = [  # some of the weights with the usual decay, and some of the others
    ("resnet18", "conv1.weight fc.weight", "bn1.weight layer1.0.bn2.bias fc.bias"),
    ("vit_b_32", "heads.head.weight", "class_token encoder.pos_embedding conv_proj.bias"),
    ("swin_t", "head.weight", "features.1.0.attn.relative_position_bias_table norm.bias"),
    ("convnext_tiny", "classifier.2.weight", "features.1.0.layer_scale features.0.1.bias"),
]


@pytest.mark.parametrize(("arch", "large", "small"), GROUPS)
def test_norms_and_biases_have_a_decay_of_their_own(arch, large, small):
    with torch.device("meta"):
        model = get_model(arch, num_classes=2)  # a matrix of two rows
        model.pos_embed = nn.Parameter(torch.empty(1, 3, 4))  # as timm's
    names = {weight: name for name, weight in model.named_parameters()}
    groups = optim.build(options_of("--wd-norm", "0"), model).param_groups
    assert [group["weight_decay"] for group in groups] == [1e-4, 0]
    matrices, vectors = [{names[p] for p in group["params"]} for group in groups]
    assert set(large.split()) <= matrices and {"pos_embed", *small.split()} <= vectors
    assert matrices | vectors == set(names.values())


def test_what_is_frozen_is_not_in_the_optimiser():
    model = network()
    model[:5].requires_grad_(False)
    (group,) = optim.build(options_of(), model).param_groups
    assert group["params"] == [*model[5].parameters()]


# ---- snapshots

ARGS = Options(arch="tiny", evaluate=False, start_epoch=None, ema=None)


def state_of(line: str) -> TrainState:
    model = network()
    built = optim.build(options_of(*line.split()), model)
    return TrainState(model, built, LossScaler(CPU), global_batch=4)


def saved(state: TrainState, path: Path, **options: str) -> Path:
    write(snapshot_of(state, {"arch": "tiny", **options}, ["a"]), path)
    return path


@pytest.mark.parametrize("line", ["", "--optimizer adamw --wd-norm 0"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, line):
    whole, first, second = (state_of(line) for _ in range(3))
    expected = steps(whole.model, whole.optimizer, 0, 5)
    steps(first.model, first.optimizer, 0, 2)
    assert resume(second, ARGS, saved(first, tmp_path / "snapshot.pt"))
    assert same(steps(second.model, second.optimizer, 2, 5), expected)
    # Laid out in memory as a fused optimiser wants it.
    for optimizer in (whole.optimizer, second.optimizer):
        for weight, entry in optimizer.state.items():
            moments = [t for t in entry.values() if t.shape == weight.shape]
            assert all(moment.stride() == weight.stride() for moment in moments)


def test_the_state_of_another_optimiser_is_refused(tmp_path):
    path, adamw = tmp_path / "snapshot.pt", "--optimizer adamw"
    state, message = state_of("--wd-norm 0"), "of another model, --optimizer, --wd-norm or --freeze"
    steps(state.model, state.optimizer)
    with pytest.raises(UserError, match=message + ".*--pretrained"):
        resume(state_of(""), ARGS, saved(state, path))
    state = state_of("")
    steps(state.model, state.optimizer)
    saved(state, path, optimizer="sgd")
    new, args = state_of(adamw), Options(**vars(ARGS), optimizer="adamw")
    with pytest.raises(UserError, match="was made with --optimizer sgd"):
        resume(new, args, path)
    args = args.replaced(start_epoch=0)  # from its weights alone
    assert resume(new, args, path)
    assert same(new.model.state_dict(), state.model.state_dict())
    assert not new.optimizer.state


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ({"optimizer": "muon"}, "--optimizer muon"),
        ({"drop_path": 0.1}, "--drop-path 0.1"),
        ({"allreduce": "fp32"}, "--allreduce fp32"),
        ({"repeated_aug": 3}, "--repeated-aug 3"),
    ],
)
def test_a_snapshot_of_a_removed_feature_is_refused_in_one_line(tmp_path, options, gone):
    path = saved(state_of(""), tmp_path / "snapshot.pt", **options)
    new, args = state_of(""), Options(**vars(ARGS), optimizer="sgd")
    with pytest.raises(UserError, match=f"made with {gone}, which was removed: .*--start-epoch"):
        resume(new, args, path)
    assert resume(new, args.replaced(start_epoch=0), path)


def test_removed_options_without_effect_are_no_obstacle(tmp_path):
    """Their defaults, and what concerned the first weights or speed."""
    defaults = {"drop_path": None, "allreduce": "sum-divide", "repeated_aug": 1}
    others = {"zero_init_gamma": True, "bucket_mb": 3.0, "delay_allreduce": True}
    path = saved(state_of(""), tmp_path / "snapshot.pt", **defaults, **others)
    assert resume(state_of(""), Options(**vars(ARGS), optimizer="sgd"), path)


# ---- learning rates

HALF = math.sqrt(0.5)
STEP_RATES = [(0, 0.1), (29.99, 0.1), (30, 0.01), (60, 1e-3), (79.99, 1e-3), (80, 1e-4), (89, 1e-4)]
COSINE = [(0, 0), (2.5, 0.2), (5, 0.4), (20, 0.2 * (1 + HALF)), (35, 0.2), (65, 0), (70, 0)]
ONE_CYCLE = [(0, 0.016), (15, 0.208), (30, 0.4), (65, 0.2 + 8e-7), (100, 1.6e-6), (101, 1.6e-6)]
GOLDEN = [
    (0.1, 90, 0, "step", STEP_RATES),  # x0.1 every 30 epochs and once more at 80
    (0.1, 90, 5, "step", [(0, 0), (1.25, 0.025), (5, 0.1), (30, 0.01)]),
    (0.4, 65, 5, "cosine", COSINE),  # past the end it does not rise again
    (0.1, 90, 0.5, "constant", [(0.25, 0.05), (89, 0.1)]),
    (0.5, 16, 2, "linear", [(1, 0.25), (2, 0.5), (9, 0.25), (16, 0), (17, 0)]),  # ffcv-imagenet's
    (0.4, 100, 0, "onecycle", ONE_CYCLE),  # as torch's: from 1/25 of the rate, to 1/250,000
    (0.4, 100, 50, "onecycle", [(0, 0.016), (25, 0.208), (50, 0.4), (100, 1.6e-6)]),
]


@pytest.mark.parametrize(("lr", "epochs", "warmup", "schedule", "expected"), GOLDEN)
def test_golden_values(lr, epochs, warmup, schedule, expected):
    for position, rate in expected:
        got = learning_rate(position, lr=lr, epochs=epochs, warmup=warmup, schedule=schedule)
        assert got == pytest.approx(rate, rel=1e-12, abs=1e-12)


def test_scaling_with_the_global_batch():
    factors = {("none", 8192): 1, ("linear", 256): 1, ("linear", 8192): 32, ("sqrt", 4096): 4}
    for (rule, batch), factor in factors.items():
        assert scale_lr(0.1, batch, rule) == pytest.approx(0.1 * factor)
