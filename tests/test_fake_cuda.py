"""All scripts, from command line to summary, on a simulated GPU: tests/fake_cuda.py.

And errors that are put into the suite, each of which must fail a training.
"""

import functools
import math
import re
from shlex import split
from unittest import mock

import fake_cuda
import fake_torch
import pytest
import torch
from bench import steps, time_step
from conftest import draw_folder, scalars, summary
from fake_cuda import can_simulate, gpu
from fake_runs import EVERYTHING, MIXED, run
from fake_torch import CUDART
from running import snapshot
from torch import nn

from utils import advice, loop, monitor, slowdown

pytestmark = pytest.mark.skipif(not can_simulate(), reason="needs Linux on x86-64 or aarch64")

ND, DP, DDP, APEX = "imagenet_nd", "imagenet_dp", "imagenet_ddp", "imagenet_ddp_apex"
FSDP = "imagenet_fsdp"
OURS = "--amp-impl torch --opt-level"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_folder(tmp_path_factory.mktemp("images") / "data", train=8, val=4)


@pytest.fixture
def train(data, tmp_path):
    return functools.partial(run, data, tmp_path)


def names(dtypes):
    return " ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


@pytest.mark.parametrize(
    ("script", "options", "computes", "travels"),
    [
        (ND, "--amp off --clip-grad 1 --epochs 2 --progressive 24,40", "float32", ""),
        (ND, f"--amp bf16 --no-channels-last {MIXED}", "bfloat16", ""),
        (ND, EVERYTHING, "float16", ""),
        (DP, f"--optimizer adamw {MIXED}", "float16", ""),
        (DP, f"--amp bf16 --freeze {EVERYTHING}", "bfloat16", ""),
        (DDP, f"--comm fp32 --sync-bn {EVERYTHING}", "float16", "float32"),
        (DDP, f"--comm fp16 {MIXED}", "float16", "float16"),
        (DDP, "--comm bf16 --amp off", "float32", "bfloat16"),
        (DDP, f"--comm int4 {EVERYTHING}", "float16", "uint8"),
        (APEX, f"{OURS} O0", "float32", "float32"),
        (APEX, f"{OURS} O1", "float16", "float32"),
        (APEX, f"{OURS} O2 --sync-bn {EVERYTHING}", "float16", "float16"),
        (APEX, f"{OURS} O2 --loss-scale 128", "float16", "float16"),
        (APEX, f"{OURS} O3 {MIXED}", "float16", "float16"),
        (APEX, f"--amp-impl apex --optimizer adamw {EVERYTHING}", "float32", ""),
    ],
)
def test_dtypes(train, script, options, computes, travels):
    """Of matrix products, of what the optimiser updates, and of a collective."""
    done = train(script, *options.split())
    assert names(done.gpu.heavy) == computes
    assert names(done.gpu.optimised) == ("float16" if "O3" in options else "float32")
    assert travels in names(sort for _, sort in done.gpu.collectives)
    assert ("--sync-bn" in options) == any(name == "batch_norm" for name, _ in done.gpu.collectives)
    assert done.gpu.collectives or not done.gpu.lost
    hardware = summary(done.folder)["hardware"]
    assert hardware.get("GPU/utilisation", hardware.get("GPU/utilisation_max")) == 87
    scaled = "float16" in computes.split() or script == APEX
    assert ("Amp/scale" in scalars(done.folder)) == scaled


def test_a_model_in_parts(train):
    done = train(FSDP, *split(f"--sync-bn --reshard node {EVERYTHING}"))
    assert ("batch_norm", torch.float32) in done.gpu.collectives
    assert (names(done.gpu.heavy), names(done.gpu.optimised)) == ("float16", "float32")
    travels = {"_allgather_base_": "float16 float32", "_reduce_scatter_base_": "float32"}
    for kind, dtypes in travels.items():
        of_kind = {sort for name, sort in done.gpu.collectives if name.startswith(kind)}
        assert names(of_kind) == dtypes


def test_weights_that_stay_gathered_travel_once_a_step(train):
    counts = []
    for reshard in ("none", "full"):
        done = train(FSDP, "--reshard", reshard, "--name", reshard)
        calls = done.gpu.collectives.items()
        counts.append(sum(n for (name, _), n in calls if name.startswith("_allgather_base_")))
    assert counts[0] < counts[1]


def test_one_node_of_four(train):
    """And the learning rate of the last step, 2/3 through the warm-up, is that of the curve."""
    done = train(DDP, "--comm", "int8", "--warmup-epochs", 1, job=(1, 4))
    (group,) = {group["lr"] for group in snapshot(done.folder)["optimizer"]["param_groups"]}
    ((_, drawn),) = scalars(done.folder)["Lr"]
    assert (drawn, group) == (pytest.approx(group), pytest.approx(0.1 * 2 / 3))


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (DDP, "--comm int8 --optimizer adamw"),
        (APEX, "--opt-level O2"),
        (FSDP, ""),
    ],
)
def test_a_run_continues_and_is_tested(train, data, script, options):
    (data / "test").symlink_to("val")
    more = {"quiet_from": math.inf}
    try:
        layout = "--no-channels-last"  # another one than the second time
        train(script, "--snapshot-minutes", 0, *options.split(), layout, **more)
        done = train(script, "--epochs", 2, "--resume", "auto", *options.split(), **more)
        assert summary(done.folder)["test_top1"] == 100
        train(script, "-e", "--resume", done.folder / "best.pt", "--name", "again")
    finally:
        (data / "test").unlink()
    saved = snapshot(done.folder)
    assert saved["progress"]["epoch"] == 2
    assert {tensor.dtype for tensor in saved["model"].values()} <= {torch.float32, torch.int64}


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (ND, "--compile default"),
        (DDP, "--comm int8"),
        (DP, EVERYTHING),
        (APEX, f"{OURS} O2"),
        (FSDP, ""),
    ],
)
def test_the_largest_batch_is_printed_and_nothing_is_left(train, capsys, script, options):
    """The data set has no more."""
    done = train(script, "--find-batch", *options.split(), quiet_from=math.inf)
    size = 24 if script == ND else 8
    assert capsys.readouterr().out.splitlines()[-1] == f"largest batch per GPU: {size}"
    assert not done.folder.exists()


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (-math.inf, ("waiting for images", "gradients of|all ranks wait")),
        (1.0, ("a GPU is 87 % busy",)),
    ],
)
def test_what_limits_a_run_is_reported_once(train, monkeypatch, logged, limit, expected):
    monkeypatch.setattr(advice, "LIMIT", limit)
    monkeypatch.setattr(slowdown, "LIMIT", limit)
    monkeypatch.setattr(monitor, "ENOUGH", 1)
    monkeypatch.setattr(advice, "MIN_STEPS", 0)
    monkeypatch.setattr(advice, "MIN_SECONDS", 0.0)
    train(DDP, "--epochs", 3)
    notes = [line for line in logged if line.startswith("note: ")]
    assert len(notes) == len(expected)
    for note, words in zip(notes, expected, strict=True):
        assert re.search(words, note)


def test_the_step_alone(train):
    few = {"WARMUP_STEPS": 1, "TIMED_STEPS": 1, "AHEAD": 1}
    with (
        mock.patch.multiple(steps, **few),
        mock.patch.object(loop, "find_batch", time_step.time_step),
    ):
        line = (DDP, "-a", "tiny_resnet", "--activation-checkpointing")
        done = train(*line, quiet_from=math.inf)
    assert torch.float16 in done.gpu.heavy


# ---- errors that must fail a training

WAIT, RACE = "waits for the device", "nobody has waited"


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


def unless(waits):
    """A stream that does not wait where ``waits`` says so."""
    return lambda real: lambda self, other: None if waits(self) else real(self, other)


def of_float32(real):
    return lambda self, x: self._conv_forward(x, self.weight.float(), self.bias)


def nothing(real):
    return lambda *_: 0


LOSS = nn.CrossEntropyLoss, "forward"
STREAM = fake_cuda.Stream, "wait_stream"


@pytest.mark.parametrize(
    ("line", "place", "change", "message"),
    [
        *((name, LOSS, looks, "waits .* in train_step") for name in (ND, DP, DDP, APEX, FSDP)),
        (ND, LOSS, on_the_host, "two (different )?devices"),
        (ND, LOSS, selects, WAIT),
        (ND, (nn.functional, "cross_entropy"), looks_in_evaluation, WAIT),
        (f"{APEX} {OURS} O2", (nn.Conv2d, "forward"), of_float32, "convolution of"),
        (ND, (CUDART, "cudaHostRegister"), nothing, WAIT),
        (ND, (torch.Tensor, "to"), without("non_blocking"), WAIT),
        (ND, (torch.optim.SGD, "__init__"), without("fused"), WAIT),
        (ND, STREAM, unless(lambda one: one is gpu().main), RACE),
        (f"{DDP} --comm int8", STREAM, unless(lambda s: s not in (gpu().main, gpu().nccl)), RACE),
        (ND, (fake_cuda.Gpu, "synchronize"), nothing, f"{RACE}|device not ready"),
        (f"{APEX} {OURS} O2", (fake_cuda.Event, "query"), lambda real: lambda self: True, RACE),
    ],
)  # fmt: skip
def test_an_error_fails_a_training(train, line, place, change, message):
    with (
        mock.patch.object(*place, change(getattr(*place))),
        pytest.raises((AssertionError, RuntimeError), match=message),
    ):
        train(*line.split())


def test_memory_that_another_stream_still_uses(train):
    with mock.patch.object(fake_torch, "record_stream", nothing(None)):
        assert train(ND).gpu.lost
