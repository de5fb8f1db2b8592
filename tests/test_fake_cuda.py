"""All scripts, from command line to summary, on a GPU that is played: tests/fake_cuda.py."""

from shlex import split
from unittest import mock

import pytest
import torch
from conftest import draw_folder, summary
from fake_cuda import playable
from fake_runs import EVERYTHING, MIXED, Runs
from running import snapshot
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models import vision_transformer

from utils.comm import auto

pytestmark = pytest.mark.skipif(not playable(), reason="needs Linux on x86-64 or aarch64")


def long(*values):
    """A case that differs little from others."""
    return pytest.param(*values, marks=pytest.mark.long)


ND, DP, DDP, APEX = "imagenet_nd", "imagenet_dp", "imagenet_ddp", "imagenet_ddp_apex"
FSDP = "imagenet_fsdp"
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_folder(tmp_path_factory.mktemp("images") / "data", train=8, val=4)


@pytest.fixture
def train(data, tmp_path):
    return Runs(data, tmp_path)


@pytest.mark.parametrize(
    ("script", "options", "dtype"),
    [
        (ND, "", HALF),
        (ND, f"--amp bf16 --no-channels-last {MIXED}", BRAIN),
        (ND, "--amp off --clip-grad 1 --epochs 2 --progressive 24,40", FLOAT),
        (ND, f"--print-freq 1 {EVERYTHING}", HALF),
        (ND, "--optimizer muon --wd-norm 0", HALF),
        long(ND, "--optimizer nesterov --clip-grad 1", HALF),
        (DP, f"--optimizer adamw {MIXED}", HALF),
        (DP, f"--amp bf16 --freeze {EVERYTHING}", BRAIN),
        long(DP, "--amp off", FLOAT),
    ],
)
def test_one_process(train, script, options, dtype):
    done = train(script, *options.split())
    assert done.dtypes == {dtype}
    assert not done.gpu.unrecorded()
    assert summary(done.folder)["hardware"]["GPU/utilisation_rank0"] == 87


@pytest.mark.parametrize(
    ("options", "dtype", "travels"),
    [
        ("--comm fp32", HALF, FLOAT),
        long(f"--comm fp32 --amp bf16 {EVERYTHING}", BRAIN, FLOAT),
        long("--comm fp32 --amp off --sync-bn", FLOAT, FLOAT),
        (f"--comm fp32 --sync-bn {EVERYTHING}", HALF, FLOAT),
        (f"--comm fp16 {MIXED}", HALF, HALF),
        ("--comm bf16 --amp off", FLOAT, BRAIN),
        long("--comm int8", HALF, torch.uint8),
        (f"--comm int4 {EVERYTHING}", HALF, torch.uint8),
        ("--comm powersgd:2", HALF, FLOAT),
        long("--comm powersgd:2 --amp bf16", BRAIN, FLOAT),
    ],
)
def test_several_processes(train, options, dtype, travels):
    # A method makes its buffers for a bucket, and says once on the device what is where.
    done = train(DDP, *options.split(), excused=("_prepare",))
    assert done.dtypes - ({FLOAT} if "powersgd" in options else set()) == {dtype}
    assert travels in {sort for _, sort in done.gpu.collectives}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        long("-a tiny_vit", HALF),
        (f"--sync-bn --reshard node {EVERYTHING}", HALF),
        long(f"-a tiny_vit --amp bf16 --reshard none {EVERYTHING}", BRAIN),
        long("--amp off --clip-grad 1", FLOAT),
    ],
)
def test_a_model_in_parts(train, options, dtype):
    done = train(FSDP, *options.split())
    assert done.dtypes == {dtype}
    gathered, scattered = (
        {sort for name, sort in done.gpu.collectives if name.startswith(kind)}
        for kind in ("all_gather", "reduce_scatter")
    )
    assert gathered == ({dtype} if "tiny_vit" in options else {dtype, FLOAT})  # batch norms
    assert scattered == {FLOAT}
    assert done.gpu.optimised == {FLOAT}


def test_comm_auto_measures_and_chooses(train):
    few = {"FIRST_WARM_UP": 0, "WARM_UP": 0, "STEPS": 1, "METHODS": ("fp32", "fp16")}
    with mock.patch.multiple(auto, **few):
        done = train(DDP, "--comm", "auto", excused=("begin_step",))
    assert summary(done.folder)["comm"] in ("fp32", "fp16")


def test_one_node_of_four(train):
    assert train(DDP, "--comm", "int8", job=(1, 4)).dtypes == {HALF}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ("--opt-level O0", FLOAT),
        ("--opt-level O1", HALF),
        long("--opt-level O2", HALF),
        (f"--opt-level O3 {MIXED}", HALF),
        long(f"--opt-level O1 --delay-allreduce {EVERYTHING}", HALF),
        (f"--opt-level O2 --sync-bn {EVERYTHING}", HALF),
        ("--opt-level O2 --allreduce fp32 --loss-scale 128 --optimizer muon", HALF),
        long("--opt-level O2 --allreduce divide-sum --keep-batchnorm-fp32 False", HALF),
        ("--opt-level O3 --keep-batchnorm-fp32 True", HALF),
    ],
)
def test_opt_levels(train, options, dtype):
    done = train(APEX, "--amp-impl", "torch", *options.split())
    assert done.dtypes == {dtype}
    level = options.split()[1]
    kept = (level == "O2") ^ ("--keep-batchnorm-fp32" in options)
    for module in done.session.state.model.modules():
        norm = isinstance(module, _BatchNorm)
        wanted = HALF if level in ("O2", "O3") and not (norm and kept) else FLOAT
        assert {weight.dtype for weight in module.parameters(recurse=False)} <= {wanted}
    assert done.gpu.optimised == (
        {HALF, FLOAT} if level == "O3" and kept else {HALF} if level == "O3" else {FLOAT}
    )


@pytest.mark.parametrize(
    "options",
    [long("O0"), long("O1"), "O2 --optimizer adamw", long("O3"), f"O2 --sync-bn {EVERYTHING}"],
)
def test_apex_itself_is_called_as_on_a_gpu(train, options):
    train(APEX, "--amp-impl", "apex", "--opt-level", *options.split())


@pytest.mark.parametrize(
    ("script", "options"),
    [
        long(ND, ""),
        (DDP, "--comm powersgd:2 --optimizer adamw"),
        (APEX, "--opt-level O2"),
        long(FSDP, ""),
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
    assert {tensor.dtype for tensor in saved["model"].values()} <= {FLOAT, torch.int64}


@pytest.mark.parametrize(
    ("script", "options", "size"),
    [
        long(ND, "--amp fp16", 24),
        long(DP, EVERYTHING, 16),
        (DDP, "--comm int8", 8),
        long(FSDP, "-a tiny_vit", 8),
        long(APEX, "--opt-level O2", 8),
        long(DDP, EVERYTHING, 8),
        long(APEX, "--amp-impl apex --opt-level O2", 8),
    ],
)
def test_the_largest_batch_is_sought(train, script, options, size):
    """The data set has no more."""
    done = train(script, "-b", "auto", *options.split(), excused=("_prepare",))
    assert summary(done.folder)["largest_batch"] == size


@pytest.mark.parametrize(
    ("script", "arch", "more"),
    [
        (DP, "resnet18", "--activation-checkpointing"),
        (DDP, "vgg11", ""),
        (APEX, "vit_b_32", "--activation-checkpointing --optimizer adamw"),
        long(FSDP, "vit_b_32", ""),
    ],
)
def test_architectures(train, script, arch, more, monkeypatch):
    whole = vision_transformer.Encoder
    two = lambda length, layers, *others: whole(length, 2, *others)  # noqa: E731, they are alike
    monkeypatch.setattr(vision_transformer, "Encoder", two)
    done = train.dummy(script, arch, 64, *more.split())
    assert done.dtypes == {HALF}, done.gpu.heavy


@pytest.mark.long
@pytest.mark.parametrize("script", [ND, DP, DDP, APEX, FSDP])
@pytest.mark.parametrize(
    "arch",
    split(
        "alexnet convnext_tiny densenet121 efficientnet_b0 googlenet inception_v3 maxvit_t "
        "mnasnet1_0 mobilenet_v3_large regnet_y_400mf resnet50 shufflenet_v2_x1_0 squeezenet1_0 "
        "swin_t swin_v2_t vgg16_bn vit_b_16"
    ),
)
def test_more_architectures(train, script, arch):
    size = {"inception_v3": 96, "maxvit_t": 224}.get(arch, 64)
    assert train.dummy(script, arch, size).dtypes == {HALF}
