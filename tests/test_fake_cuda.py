"""All scripts, from command line to summary, on a simulated GPU: tests/fake_cuda.py."""

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
    assert ("mfu" in facts) == (not line.startswith(FSDP)), "of a GPU whose peak is known"
    assert {tensor.dtype for tensor in saved["model"].values()} <= {torch.float32, torch.int64}


@pytest.mark.parametrize("line", LINES)
def test_a_loss_at_whose_value_the_host_looks_fails_a_training(train, line):
    """So that the test above cannot pass without having watched."""
    real = nn.CrossEntropyLoss.forward

    def looks(*arguments, **options):
        loss = real(*arguments, **options)
        loss.item()
        return loss

    with (
        mock.patch.object(nn.CrossEntropyLoss, "forward", looks),
        pytest.raises(AssertionError, match="train_step"),
    ):
        train(*line.split())
