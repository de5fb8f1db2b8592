"""All scripts, from command line to summary, on a simulated GPU: tests/fake_cuda.py.

And errors that are put into the suite, each of which must fail a training.
"""

import functools
from unittest import mock

import pytest
import torch
from conftest import draw_folder, summary
from fake_cuda import can_simulate
from fake_runs import run
from running import snapshot
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

pytestmark = pytest.mark.skipif(not can_simulate(), reason="needs Linux on x86-64 or aarch64")

ND, DP, DDP, FSDP = "imagenet_nd", "imagenet_dp", "imagenet_ddp", "imagenet_fsdp"
O2 = "imagenet_ddp_apex --amp-impl torch --opt-level O2"
EVERYTHING = "--accum-steps 2 --clip-grad 1 --label-smoothing 0.1 --no-channels-last --ema 0.9"
LINES = (
    f"{ND} {EVERYTHING}",
    f"{DP} --optimizer adamw --mixup 0.2 --cutmix 1 --ema 0.9",
    f"{DDP} --sync-bn {EVERYTHING}",
    f"{O2} --sync-bn --clip-grad 1 --mixup 0.2",
    f"{FSDP} --sync-bn --reshard node {EVERYTHING}",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    data = draw_folder(tmp_path_factory.mktemp("images") / "data", train=8, val=4)
    (data / "test").symlink_to("val")
    return data


@pytest.fixture
def train(data, tmp_path):
    return functools.partial(run, data, tmp_path)


@pytest.mark.parametrize("line", LINES)
def test_the_host_waits_for_no_step_and_a_run_continues(train, line):
    seen, watched = set(), (nn.SyncBatchNorm, nn.DataParallel)  # in training, and in evaluation

    def see(module, *_):
        seen.update((kind, torch.is_grad_enabled()) for kind in watched if isinstance(module, kind))

    hook = register_module_forward_pre_hook(see)
    train(*line.split())
    hook.remove()
    kinds = [nn.SyncBatchNorm] * ("--sync-bn" in line) + [nn.DataParallel] * line.startswith(DP)
    assert seen == {(kind, trains) for kind in kinds for trains in (True, False)}
    folder = train(*line.split(), "--epochs", 2, "--resume", "auto")
    facts, saved = summary(folder), snapshot(folder)
    assert (facts["device"], saved["progress"]["epoch"], facts["epochs_done"]) == ("cuda", 2, 2)
    assert "test_top1" in facts
    assert {tensor.dtype for tensor in saved["model"].values()} <= {torch.float32, torch.int64}


# ---- errors that must fail a training

WAIT = "waits for the device"


def looks(real):
    """A loss at whose value the host looks."""

    def forward(*arguments, **options):
        loss = real(*arguments, **options)
        loss.item()
        return loss

    return forward


def looks_in_evaluation(real):
    seen = looks(real)
    return lambda *a, **more: real(*a, **more) if torch.is_grad_enabled() else seen(*a, **more)


def selects(real):
    return lambda self, logits, targets: real(self, logits[targets == 0], targets[targets == 0])


def on_the_host(real):
    return lambda self, logits, targets: real(self, logits, torch.zeros(len(targets), dtype=int))


def without(name):
    return lambda real: lambda *a, **more: real(*a, **{**more, name: False} if name in more else {})


LOSS = nn.CrossEntropyLoss, "forward"


@pytest.mark.parametrize(
    ("line", "place", "change", "message"),
    [
        *((line, LOSS, looks, "waits .* in train_step") for line in LINES),
        (ND, LOSS, on_the_host, "two (different )?devices"),
        (ND, LOSS, selects, WAIT),
        (ND, (nn.functional, "cross_entropy"), looks_in_evaluation, WAIT),
        (ND, (torch.Tensor, "to"), without("non_blocking"), WAIT),
        (ND, (torch.optim.SGD, "__init__"), without("fused"), WAIT),
    ],
)
def test_an_error_fails_a_training(train, line, place, change, message):
    with (
        mock.patch.object(*place, change(getattr(*place))),
        pytest.raises((AssertionError, RuntimeError), match=message),
    ):
        train(*line.split())
