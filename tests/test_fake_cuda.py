"""All scripts, from command line to summary, on a GPU that is played: tests/fake_cuda.py.

And faults that are put into the suite and must be found there.
"""

import functools
import math
from importlib import import_module
from shlex import split
from unittest import mock

import pytest
import torch
from conftest import draw_folder, scalars, summary
from fake_cuda import playable
from fake_runs import EVERYTHING, MIXED, changed, run
from running import snapshot

import imagenet_ddp_apex
import imagenet_nd
from utils.amp.loss_scale import LossScaler
from utils.comm.ordered import OrderedCollectives
from utils.data.loaders import Batches
from utils.model import optim
from utils.run import snapshots
from utils.train import dummy, evaluation, report, watch

pytestmark = pytest.mark.skipif(not playable(), reason="needs Linux on x86-64 or aarch64")

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
        (ND, f"--print-freq 1 {EVERYTHING}", "float16", ""),
        (ND, "--optimizer muon --wd-norm 0", "bfloat16 float16", ""),
        (DP, f"--optimizer adamw {MIXED}", "float16", ""),
        (DP, f"--amp bf16 --freeze {EVERYTHING}", "bfloat16", ""),
        (DDP, f"--comm fp32 --sync-bn {EVERYTHING}", "float16", "float32"),
        (DDP, f"--comm fp16 {MIXED}", "float16", "float16"),
        (DDP, "--comm bf16 --amp off", "float32", "bfloat16"),
        (DDP, f"--comm int4 {EVERYTHING}", "float16", "uint8"),
        (DDP, "--comm powersgd:2", "float16 float32", "float32"),
        (APEX, f"{OURS} O0", "float32", "float32"),
        (APEX, f"{OURS} O1", "float16", "float32"),
        (APEX, f"{OURS} O2 --sync-bn {EVERYTHING}", "float16", "float16"),
        (APEX, f"{OURS} O2 --allreduce fp32 --loss-scale 128", "float16", "float32"),
        (APEX, f"{OURS} O3 {MIXED}", "float16", "float16"),
        (APEX, f"--amp-impl apex --optimizer adamw {EVERYTHING}", "float32", ""),
    ],
)
def test_dtypes(train, script, options, computes, travels):
    """Of matrix products, of what the optimiser updates, and of a collective."""
    # A method makes its buffers for a bucket, and says once on the device what is where.
    done = train(script, *options.split(), excused=("_prepare",))
    assert names(done.gpu.heavy) == computes
    assert names(done.gpu.optimised) == ("float16" if "O3" in options else "float32")
    assert travels in names(sort for _, sort in done.gpu.collectives)
    assert done.gpu.collectives or not done.gpu.unrecorded()
    assert summary(done.folder)["hardware"]["GPU/utilisation_rank0"] == 87
    scaled = "float16" in computes.split() or script == APEX
    assert ("Amp/scale" in scalars(done.folder)) == scaled


def test_a_model_in_parts(train):
    done = train(FSDP, *split(f"--sync-bn --reshard node {EVERYTHING}"))
    assert (names(done.gpu.heavy), names(done.gpu.optimised)) == ("float16", "float32")
    travels = {"_allgather_base_": "float16 float32", "_reduce_scatter_base_": "float32"}
    for kind, dtypes in travels.items():
        found = {sort for name, sort in done.gpu.collectives if name.startswith(kind)}
        assert names(found) == dtypes


def test_one_node_of_four(train):
    """And the learning rate of the last step, 2/3 through the warm-up, is that of the curve."""
    done = train(DDP, "--comm", "int8", "--warmup-epochs", 1, job=(1, 4))
    (group,) = {group["lr"] for group in done.session.state.optimizer.param_groups}
    ((_, drawn),) = scalars(done.folder)["Lr"]
    assert (drawn, group) == (pytest.approx(group), pytest.approx(0.1 * 2 / 3))


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (DDP, "--comm powersgd:2 --optimizer adamw"),
        (APEX, "--opt-level O2"),
        (FSDP, ""),
    ],
)
def test_a_run_continues_and_is_tested(train, data, script, options):
    (data / "test").symlink_to("val")
    more = {"excused": ("_prepare", "save_snapshot", "total")}
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
    done = train(script, "--find-batch", *options.split(), excused=("_prepare",))
    size = 24 if script == ND else 8
    assert capsys.readouterr().out.splitlines()[-1] == f"largest batch per GPU: {size}"
    assert not done.folder.exists()


@pytest.mark.parametrize(
    ("limit", "told"),
    [(-math.inf, ("waiting for images", "communication takes")), (1.0, ("a GPU is 87 % busy",))],
)
def test_what_limits_a_run_is_told_once(train, monkeypatch, logged, limit, told):
    monkeypatch.setattr(report, "LIMIT", limit)
    monkeypatch.setattr(watch, "ENOUGH", 1)
    train(DDP, "--epochs", 3)
    notes = [line for line in logged if line.startswith("note: ")]
    assert len(notes) == len(told)
    for note, words in zip(notes, told, strict=True):
        assert words in note


def test_the_step_alone(train):
    few = {"WARMUP_STEPS": 1, "TIMED_STEPS": 1, "AHEAD": 1, "_host_waits": lambda step: []}
    with mock.patch.multiple(dummy, **few):
        done = train(DDP, "--dummy", "-a", "tiny_resnet", "--activation-checkpointing")
    assert torch.float16 in done.gpu.heavy


# ---- faults that must be found

LOSS, END = "criterion(logits, targets)", "return loss, logits"
PLACE = "    # ---- distributed data parallelism"
WEIGHT = f"    model[0].weight = nn.Parameter(model[0].weight.float())\n{PLACE}"
WAIT, RACE = "waits for the device", "nobody has waited"


@pytest.mark.parametrize(
    ("line", "function", "old", "new", "found"),
    [
        *((name, import_module(name).train, END, f"loss.item(); {END}", "waits .* in train_step")
          for name in (ND, DP, DDP, APEX, FSDP)),
        (ND, imagenet_nd.train, LOSS, "criterion(logits, torch.zeros_like(targets, device='cpu'))",
         "two (different )?devices"),
        (ND, imagenet_nd.train, END, f"logits[targets == 0]; {END}", WAIT),
        (APEX, imagenet_ddp_apex.train, PLACE, WEIGHT, "convolution of"),
        (ND, Batches.__init__, "page_locked=cuda", "page_locked=False", WAIT),
        (ND, Batches._upload, "images = images.to(self.device, non_blocking=True)",
         "images = images.to(self.device)", WAIT),
        (ND, Batches._upload, "current.wait_stream(self.stream)", "pass", RACE),
        (ND, optim.sgd, "fused = weights[0].is_cuda", "fused = False", WAIT),
        (ND, evaluation.measure, "sums.add(", "loss.item(); sums.add(", WAIT),
        (ND, snapshots.SnapshotWriter.save, "torch.cuda.synchronize()", "pass", RACE),
        (f"{DDP} --comm int8", OrderedCollectives.submit, "self.stream.wait_stream", "id", RACE),
        (APEX, LossScaler._watch, "not event.query()", "False", RACE),
    ],
)  # fmt: skip
def test_a_fault(train, line, function, old, new, found):
    with (
        changed(function, old, new),
        pytest.raises((AssertionError, RuntimeError), match=found),
    ):
        train(*line.split())


def test_memory_that_another_stream_still_uses(train):
    with changed(Batches._upload, "images.record_stream(current)", "pass"):
        assert train(ND).gpu.unrecorded()
