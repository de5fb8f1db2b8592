"""Faults that are put into the suite and must be found on the GPU of tests/fake_cuda.py."""

import inspect

import pytest
import torch
from conftest import draw_folder
from fake_cuda import Event, Race, Stream, Wait, fake_gpus, playable
from fake_nccl import DISTRIBUTED, PARTS, Bucket, Future, Work
from fake_runs import Runs, changed, load
from fake_torch import CUDA, DATA_PARALLEL, check, fake_cuda
from torch import distributed as dist

import utils.metrics
from utils.amp.loss_scale import LossScaler
from utils.comm.ordered import OrderedCollectives
from utils.data.loaders import Batches
from utils.model import optim
from utils.run import snapshots
from utils.train import evaluation

pytestmark = pytest.mark.skipif(not playable(), reason="needs Linux on x86-64 or aarch64")

ND, DP, DDP, APEX = "imagenet_nd", "imagenet_dp", "imagenet_ddp", "imagenet_ddp_apex"
FSDP = "imagenet_fsdp"
LOSS, END = "criterion(logits, targets)", "return loss, logits"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_folder(tmp_path_factory.mktemp("images") / "data", train=8, val=4)


@pytest.fixture
def train(data, tmp_path):
    return Runs(data, tmp_path)


# ---- in the scripts


@pytest.mark.parametrize("script", [ND, DP, DDP, APEX])
def test_a_misplaced_tensor(train, script):
    fault = LOSS, "criterion(logits, torch.zeros_like(targets, device='cpu'))"
    with pytest.raises(RuntimeError, match="device"):
        train(load(script, fault))


@pytest.mark.parametrize("script", [ND, DP, DDP, APEX, FSDP])
def test_item_in_the_step(train, script):
    with pytest.raises(Wait, match=r"reading a value waits for the device in .*train_step"):
        train(load(script, (END, f"loss.item(); {END}")))


def test_a_float32_weight_in_an_o2_model(train):
    place = "    # ---- distributed data parallelism"
    fault = "    model[0].weight = nn.Parameter(model[0].weight.float())\n"
    with pytest.raises(AssertionError, match="convolution of"):
        train(load(APEX, (place, fault + place)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (END, f"torch.cuda.synchronize(); {END}"),
        (END, f"loss.cpu(); {END}"),
        (END, f"targets.new_tensor([1.0]); {END}"),
        (END, f"logits[targets == 0]; {END}"),
        ("if update:", "if update and loss > 0:"),
    ],
)
def test_other_waits_in_the_step(train, old, new):
    with pytest.raises(Wait):
        train(load(ND, (old, new)))


def test_a_precision_that_is_not_there(train):
    with pytest.raises(RuntimeError, match="Input type"):
        train(load(ND, ("enabled=amp_dtype is not None", "enabled=False")))


# ---- in the rooms


@pytest.mark.parametrize(
    ("function", "old", "new", "found"),
    [
        (Batches.__init__, "page_locked=cuda", "page_locked=False", Wait),
        (Batches._upload, "images = images.to(self.device, non_blocking=True)",
         "images = images.to(self.device)", Wait),
        (Batches._upload, "current.wait_stream(self.stream)", "pass", Race),
        (utils.metrics.Sums.add, "hits = ", "hits = loss_sum.item(); hits = ", Wait),
        (optim.sgd, "fused = weights[0].is_cuda", "fused = False", Wait),
        (evaluation.measure, "sums.add(", "loss.item(); sums.add(", Wait),
        (snapshots.SnapshotWriter.save, "torch.cuda.synchronize()", "pass", Race),
    ],
)  # fmt: skip
def test_faults_around_the_step(train, function, old, new, found):
    with changed(function, old, new), pytest.raises(found):
        train(ND)


def test_memory_that_another_stream_still_uses(train):
    with changed(Batches._upload, "images.record_stream(current)", "pass"):
        assert train(ND).gpu.unrecorded()


@pytest.mark.parametrize(
    ("script", "options", "function", "old", "new", "found"),
    [
        (DDP, "--comm int8", OrderedCollectives.submit, "self.stream.wait_stream", "id", Race),
        (APEX, "", LossScaler._watch, "not event.query()", "False", Race),
        (APEX, "", LossScaler.unscale, '"_step_supports_amp_scaling"', '"not_there"', Wait),
    ],
)  # fmt: skip
def test_faults_between_processes(train, script, options, function, old, new, found):
    with changed(function, old, new), pytest.raises(found):
        train(script, *options.split())


# ---- the stand-ins


def test_stand_ins_take_what_the_originals_take():
    for name, stand_in in CUDA.items():
        check(getattr(torch.cuda, name), stand_in)
    for name, stand_in in DISTRIBUTED.items():
        check(getattr(dist, name), stand_in)
    for name, stand_in in DATA_PARALLEL.items():
        check(getattr(torch.nn.parallel.comm, name), stand_in)
    pairs = [(torch.cuda.Stream, Stream), (torch.cuda.Event, Event), (torch.futures.Future, Future)]
    for original, stand_in in pairs:
        for name, method in inspect.getmembers(stand_in, inspect.isfunction):
            if hasattr(original, name) and not name.startswith("_"):
                check(getattr(original, name), method)
    check(torch.cuda.Event.__new__, Event.__init__)
    check(torch.futures.Future.__init__, Future.__init__)
    for original, stand_in in PARTS:
        missing = {name for name in vars(stand_in) if name[0] != "_"} - set(dir(original))
        assert not missing, f"{original} has no {missing}"
    assert Bucket in dict(PARTS).values()
    assert Work in dict(PARTS).values()


def test_what_is_found_and_what_is_not():
    """The rules of tests/fake_cuda.py on a few lines."""
    with fake_cuda() as gpu:
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        with torch.cuda.stream(side):
            made = torch.zeros(4, device="cuda")
        with pytest.raises(Race):
            made + 1
        main.wait_stream(side)
        total = (made + 1).sum()
        with torch.cuda.stream(side), pytest.raises(Race):
            made.zero_()  # the other stream may still read it
        sent = total.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        with pytest.raises(Race):
            float(sent)
        assert [event.query(), event.query()] == [False, True]
        assert float(sent) == 1
        gpu.quiet = lambda: True
        for wait in (total.item, total.cpu, made.nonzero, torch.cuda.synchronize, main.synchronize):
            with pytest.raises(Wait):
                wait()
        with pytest.raises(Wait, match="pageable"):
            torch.zeros(4).to("cuda", non_blocking=True)
        torch.zeros(4).pin_memory().to("cuda", non_blocking=True)
    with fake_gpus():  # and torch is as it was
        pass
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    assert weight.grad.tolist() == [1, 1]
