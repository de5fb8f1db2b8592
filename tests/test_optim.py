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


@pytest.mark.parametrize(
    ("line", "original"),
    [
        ("--lr 0.2 --momentum 0 --wd 0", lambda p: torch.optim.SGD(p, 0.2)),
        ("--optimizer nesterov", lambda p: torch.optim.SGD(p, 0.1, 0.9, 0, 1e-4, True)),
        (
            "--optimizer adamw --betas 0.8,0.95",
            lambda p: torch.optim.AdamW(p, 1e-3, betas=(0.8, 0.95), weight_decay=0.05),
        ),
    ],
)
def test_by_name_they_are_those_of_torch_bit_for_bit(line, original):
    model, plain = network(), network()
    built = optim.build(options_of(*line.split()), model)
    assert len(built.param_groups) == 1
    assert same(steps(model, built), steps(plain, original(plain.parameters())))


# ---- groups


@pytest.mark.parametrize(
    ("arch", "matrices", "small"),
    [
        ("resnet18", "conv1.weight fc.weight", "bn1.weight layer1.0.bn2.bias fc.bias"),
        (
            "vit_b_32",
            "conv_proj.weight heads.head.weight",
            "class_token encoder.pos_embedding encoder.ln.weight conv_proj.bias",
        ),
        (
            "swin_t",
            "features.0.0.weight head.weight",
            "features.1.0.attn.relative_position_bias_table norm.bias",
        ),
        ("convnext_tiny", "classifier.2.weight", "features.1.0.layer_scale features.0.1.bias"),
        ("mobilenet_v2", "features.1.conv.0.0.weight", "classifier.1.bias"),
    ],
)
def test_norms_and_biases_have_a_decay_of_their_own(arch, matrices, small):
    with torch.device("meta"):
        model = get_model(arch)
        model.pos_embed = nn.Parameter(torch.empty(1, 3, 4))  # as timm's
    names = {weight: name for name, weight in model.named_parameters()}
    groups = optim.build(options_of("--wd-norm", "0"), model).param_groups
    assert [group["weight_decay"] for group in groups] == [1e-4, 0]
    large, vectors = [{names[p] for p in group["params"]} for group in groups]
    assert {"pos_embed", *small.split()} <= vectors
    assert set(matrices.split()) <= large
    assert large | vectors == set(names.values())
    tables = {name for name in names.values() if name.endswith("_table")}
    assert tables <= vectors


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_what_is_frozen_is_not_in_the_optimiser(name):
    model = network()
    model[:5].requires_grad_(False)
    (group,) = optim.build(options_of("--optimizer", name), model).param_groups
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


@pytest.mark.parametrize(
    "line", ["--optimizer adamw --wd-norm 0", "", "--optimizer nesterov --wd-norm 0.01"]
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, line):
    whole, first, second = (state_of(line) for _ in range(3))
    expected = steps(whole.model, whole.optimizer, 0, 5)
    steps(first.model, first.optimizer, 0, 2)
    assert resume(second, ARGS, saved(first, tmp_path / "snapshot.pt"))
    assert same(steps(second.model, second.optimizer, 2, 5), expected)
    # Laid out in memory as a fused optimiser wants it.
    for weight, entry in second.optimizer.state.items():
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
        ({"drop_path": None, "allreduce": "sum-divide", "repeated_aug": 1}, None),
        ({"zero_init_gamma": True, "bucket_mb": 3.0, "delay_allreduce": True}, None),
    ],
)
def test_a_snapshot_of_a_removed_feature_is_refused_in_one_line(tmp_path, options, gone):
    """But neither defaults of removed options, nor what concerned the first weights or speed."""
    path = saved(state_of(""), tmp_path / "snapshot.pt", **options)
    new, args = state_of(""), Options(**vars(ARGS), optimizer="sgd")
    if gone:
        with pytest.raises(
            UserError, match=f"made with {gone}, which was removed: .*--start-epoch"
        ):
            resume(new, args, path)
        args = args.replaced(start_epoch=0)
    assert resume(new, args, path)


# ---- learning rates

HALF = math.sqrt(0.5)
GOLDEN = [
    (  # x0.1 every 30 epochs and once more at 80
        {"lr": 0.1, "epochs": 90},
        [(0, 0.1), (29.99, 0.1), (30, 0.01), (60, 1e-3), (79.99, 1e-3), (80, 1e-4), (89, 1e-4)],
    ),
    ({"lr": 0.1, "epochs": 90, "warmup": 5}, [(0, 0), (1.25, 0.025), (5, 0.1), (30, 0.01)]),
    (  # past the end it does not rise again
        {"lr": 0.4, "epochs": 65, "warmup": 5, "schedule": "cosine"},
        [(0, 0), (2.5, 0.2), (5, 0.4), (20, 0.2 * (1 + HALF)), (35, 0.2), (65, 0), (70, 0)],
    ),
    ({"lr": 0.1, "epochs": 90, "warmup": 2, "schedule": "constant"}, [(1, 0.05), (89, 0.1)]),
    (  # the short recipes of ffcv-imagenet
        {"lr": 0.5, "epochs": 16, "warmup": 2, "schedule": "linear"},
        [(1, 0.25), (2, 0.5), (9, 0.25), (16, 0), (17, 0)],
    ),
    (  # as torch's: from 1/25 of the rate to it, and to 1/250,000
        {"lr": 0.4, "epochs": 100, "schedule": "onecycle"},
        [(0, 0.016), (15, 0.208), (30, 0.4), (65, 0.2 + 8e-7), (100, 1.6e-6), (101, 1.6e-6)],
    ),
    (
        {"lr": 0.4, "epochs": 100, "warmup": 50, "schedule": "onecycle"},
        [(0, 0.016), (25, 0.208), (50, 0.4), (100, 1.6e-6)],
    ),
]


@pytest.mark.parametrize(("options", "expected"), GOLDEN, ids=range(len(GOLDEN)))
def test_golden_values(options, expected):
    for position, rate in expected:
        assert learning_rate(position, **options) == pytest.approx(rate, rel=1e-12, abs=1e-12)


def test_scaling_with_the_global_batch():
    factors = {("none", 8192): 1, ("linear", 256): 1, ("linear", 8192): 32, ("sqrt", 4096): 4}
    for (rule, batch), factor in factors.items():
        assert scale_lr(0.1, batch, rule) == pytest.approx(0.1 * factor)
