"""All four scripts on a GPU that is played: see tests/fake_cuda.py."""

import inspect

import pytest
import torch
from conftest import draw_folder
from fake_cuda import playable
from fake_runs import run

pytestmark = pytest.mark.skipif(not playable(), reason="needs Linux on x86-64 or aarch64")

ND, DP, DDP, APEX = "imagenet_nd", "imagenet_dp", "imagenet_ddp", "imagenet_ddp_apex"
JOBS = {ND: (1, 1), DP: (1, 2), DDP: (2, 2), APEX: (2, 2)}  # nodes, GPUs of each
HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return draw_folder(tmp_path_factory.mktemp("images") / "data", train=32, val=16)


@pytest.fixture
def train(images, tmp_path):
    def start(script, *options, job=None, **more):
        nodes, gpus = job or JOBS[script if isinstance(script, str) else script.__name__]
        # Four steps: the host may wait in the first and the last one.
        batch = 24 // (nodes * gpus if nodes > 1 else 1) // (2 if EVERYTHING in " ".join(map(str, options)) else 1)
        fixed = ("-a", "tiny_full", "--image-size", 32, "-b", batch, "-j", 0, "--epochs", 1)
        place = ("--output-dir", tmp_path, "--name", "run")
        done = run(script, *fixed, *place, *options, images, job=(nodes, gpus), **more)
        assert done.code == 0
        return done

    return start


def used(done):
    """The dtypes of the convolutions and matrix products."""
    return {dtype for _, dtype in done.gpu.heavy}


EVERYTHING = "--accum-steps 2 --clip-grad 1 --label-smoothing 0.1 --no-channels-last"


@pytest.mark.parametrize(
    ("script", "options", "dtype"),
    [
        (ND, "", HALF),
        (ND, "--amp bf16 --no-channels-last", BRAIN),
        (ND, "--amp off --clip-grad 1", FLOAT),
        (ND, EVERYTHING, HALF),
        (DP, "", HALF),
        (DP, f"--amp bf16 {EVERYTHING}", BRAIN),
        (DP, "--amp off", FLOAT),
    ],
)
def test_one_process(train, script, options, dtype):
    done = train(script, *options.split())
    assert used(done) == {dtype}
    assert not done.gpu.unrecorded()


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ("--comm fp32", HALF),
        (f"--comm fp32 --amp bf16 {EVERYTHING}", BRAIN),
        ("--comm fp32 --amp off --sync-bn", FLOAT),
        (f"--comm fp32 --sync-bn {EVERYTHING}", HALF),
        ("--comm fp16", HALF),
        ("--comm bf16 --amp off", FLOAT),
        ("--comm int8", HALF),
        (f"--comm int4 {EVERYTHING}", HALF),
        ("--comm powersgd:2", HALF),
        ("--comm powersgd:2 --amp bf16", BRAIN),
        ("--comm localsgd:2", HALF),
        ("--comm localsgd:2 --amp off", FLOAT),
        ("--comm auto", HALF),
    ],
)
def test_several_processes(train, options, dtype):
    excused = ("_report_step", "_prepare", "_layout")
    done = train(DDP, *options.split(), excused=excused)
    assert used(done) - {FLOAT} == {dtype} - {FLOAT}


@pytest.mark.parametrize("impl", ["torch", "apex"])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ("--opt-level O0", FLOAT),
        ("--opt-level O1", HALF),
        ("--opt-level O2", HALF),
        ("--opt-level O3", HALF),
        (f"--opt-level O2 {EVERYTHING}", HALF),
    ],
)
def test_opt_levels(train, impl, options, dtype):
    train(APEX, "--amp-impl", impl, *options.split())
