"""The scripts on a real GPU. Left out where there is none; `scripts/gpu_report.sh` runs them."""

import contextlib
import json
import math
import os
from pathlib import Path
from shlex import split

import pytest
import torch
from conftest import SMALL, TORCHVISION_MODEL, python, summary, train
from running import Running, free_port

from utils.model.compress import METHODS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ONE_GPU = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
IN_FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0"}
ND, DP, DDP = "imagenet_nd.py", "imagenet_dp.py", "imagenet_ddp.py"
FSDP, APEX = "imagenet_fsdp.py", "imagenet_ddp_apex.py"
FEW = split("-b 10 --epochs 2 --lr 0.02 --name run")


def finished(script, options, data, place, tiny_model=True, **env):
    """The summary of a run of a few steps; a ResNet-18 learns too little in them to compare."""
    model = ("-a", "tiny_plain") if tiny_model else TORCHVISION_MODEL
    train(script, *model, *FEW, *split(options), "--output-dir", place, data, **env)
    return summary(place / "run")


@pytest.fixture(scope="module")
def plain(folder, tmp_path_factory):
    """The loss after a training in float32 on the CPU."""
    return finished(ND, "", folder, tmp_path_factory.mktemp("plain"))["val_loss"]


@pytest.mark.parametrize(
    ("script", "options", "precision"),
    [
        *((script, "--amp off", None) for script in (ND, DP, DDP, FSDP)),
        (APEX, "--opt-level O0", None),
        (ND, "", "fp16"),
        (ND, "--amp bf16", "bf16"),
        (DDP, "--compile", "fp16"),
        (FSDP, "", "fp16"),
        (APEX, "--opt-level O1", "O1"),
        (APEX, "--opt-level O2 --compile", "O2"),
    ],
)
def test_the_gpu_learns_what_the_cpu_learns(folder, tmp_path, plain, script, options, precision):
    """In float32 (no precision is named) the same, else about the same."""
    env = ONE_GPU | ({} if precision else IN_FLOAT32)
    results = finished(script, options, folder, tmp_path, **env)
    assert results["device"] == "cuda"
    assert precision in (None, results["precision"])
    assert results["val_loss"] == pytest.approx(plain, rel=0.05 if precision else 1e-4)
    memory = [x for tag, x in results["hardware"].items() if tag.startswith("GPU/memory_gb")]
    assert min(memory) > 0.1


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (ND, "--amp bf16 --mixup 0.2 --ema 0.9 --auto-augment ta_wide --progressive 24:32"),
        (ND, "--compile reduce-overhead --optimizer adamw --lr 0.001"),
        (ND, "--optimizer adamw --lr 0.001 --clip-grad 1 --accum-steps 2"),
        (FSDP, "--reshard full --ema 0.9 --clip-grad 1 --activation-checkpointing"),
        (APEX, "--opt-level O2 --optimizer nesterov --clip-grad 1 --accum-steps 2"),
    ],
)
def test_options_go_together_on_a_gpu(folder, tmp_path, script, options):
    results = finished(script, options, folder, tmp_path, tiny_model=False, **ONE_GPU)
    assert math.isfinite(results["val_loss"])
    assert results["epochs_done"] == 2


@pytest.mark.parametrize(
    ("script", "options"),
    [(ND, "--amp off"), (DDP, "--sync-bn"), (APEX, "--opt-level O2"), (FSDP, "--amp bf16")],
)
def test_the_host_does_not_wait_for_the_gpu_in_a_step(script, options):
    words = (Path(script).stem, *SMALL, *TORCHVISION_MODEL, "-b", "8", *split(options))
    done = python("scripts/bench/time_step.py", *words, **ONE_GPU)
    assert json.loads(done.out.splitlines()[-1])["host_waits"] == []


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_share_a_gpu(folder, tmp_path, plain, method):
    """As two nodes over gloo: NCCL has no place for two processes on one GPU."""
    nodes = f"-n 2 -g 1 --dist-url tcp://127.0.0.1:{free_port()} --dist-backend gloo"
    options = (*SMALL, *FEW, *split(f"-a tiny_plain -b 5 {nodes} --comm {method} --amp off"))
    with contextlib.ExitStack() as running:
        for rank in (1, 0):
            place = ("-nr", rank, "--output-dir", tmp_path / str(rank), folder)
            last = running.enter_context(Running(DDP, *options, *place, **ONE_GPU))
        done = last.result()
    assert done.code == 0, done.out + done.err
    assert summary(tmp_path / "0/run")["val_loss"] == pytest.approx(plain, rel=0.05)


@pytest.mark.parametrize(("first", "then"), [(ND, DDP), (FSDP, ND), (APEX, APEX)])
def test_a_run_stopped_on_the_gpu_goes_on_on_the_cpu_and_back(folder, tmp_path, first, then):
    options = (*SMALL, *TORCHVISION_MODEL, *FEW, *split("-p 1 --epochs 3 --output-dir"), tmp_path)
    ways = ((first, ONE_GPU, "2/3"), (then, {}, "3/3"), (then, ONE_GPU, None))
    for script, env, until in ways:
        with Running(script, *options, "--resume", "auto", folder, **env) as run:
            if until:
                run.until(rf"Epoch {until} step 2/")
                run.process.terminate()
            done = run.result()
            assert done.code == (75 if until else 0), done.out + done.err
    assert summary(tmp_path / "run")["epochs_done"] == 3
