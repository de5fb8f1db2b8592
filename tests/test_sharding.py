"""imagenet_fsdp.py beside imagenet_ddp.py: the same training, each process with a part of it."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import scalars, summary
from joined import Job, run_jobs
from running import assert_same_weights, snapshot

CURVES = ("Loss/train", "Top1/train", "Top5/train", "Loss/val", "Top1/val", "Top5/val", "Lr")
RECIPE = "--image-size 32 -j 0 --amp off -p 1 --lr 0.05 --label-smoothing 0.1 --warmup-epochs 1"
STEPS = 6  # of 10 images in an epoch
INTERRUPTED = 75
VIT = ("-a", "tiny_vit")
DDP, FSDP = "imagenet_ddp", "imagenet_fsdp"


def job(script: str, runs: Path, name: str, data: Path, *more: object, **where: int) -> Job:
    """10 images a step, on however many processes."""
    size = where.get("processes", 2) * where.get("nodes", 1)
    options = (*RECIPE.split(), "-b", 10 // size, "--output-dir", runs, "--name", name)
    return Job(script, (*options, "--resume", "auto", *more, data), **where)


@pytest.fixture(scope="module")
def data(folder, tmp_path_factory) -> Path:
    """60 training images; of 21 to evaluate, the last round reaches one process alone."""
    root = tmp_path_factory.mktemp("sharding") / "data"
    shutil.copytree(folder, root)
    shutil.copytree(root / "val", root / "test")
    return root


@pytest.fixture(scope="module")
def pair(data, tmp_path_factory):
    """Trainings on two processes, and what each of their processes held."""
    runs = tmp_path_factory.mktemp("runs")
    one, two = ("--epochs", 1), ("--epochs", 2)
    # With channels_last, DDP's weights are so, too, and convolutions round in another way.
    resnet = ("-a", "resnet18", "--no-channels-last", *one)
    jobs = {
        "ddp": job(DDP, runs, "ddp", data, *VIT, *two),
        "fsdp": job(FSDP, runs, "fsdp", data, *VIT, *two),
        "ddp_resnet": job(DDP, runs, "ddp_resnet", data, *resnet),
        "fsdp_resnet": job(FSDP, runs, "fsdp_resnet", data, *resnet, "--reshard", "none"),
        "stopped": job(FSDP, runs, "stopped", data, *VIT, *two, stop_after=STEPS + 8),
        "continued": job(FSDP, runs, "stopped", data, *VIT, *two),
        "from_ddp_1": job(DDP, runs, "from_ddp", data, *VIT, *one),
        "from_ddp_2": job(FSDP, runs, "from_ddp", data, *VIT, *two),
        "to_ddp_1": job(FSDP, runs, "to_ddp", data, *VIT, *one),
        "to_ddp_2": job(DDP, runs, "to_ddp", data, *VIT, *two),
    }
    found = dict(zip(jobs, run_jobs(jobs.values(), runs), strict=True))
    return runs, found


def test_two_processes_train_as_ddp_bit_for_bit(pair):
    runs, _ = pair
    for model in ("", "_resnet"):
        one, other = runs / f"fsdp{model}", runs / f"ddp{model}"
        assert_same_weights(one, other)
        ours, theirs = scalars(one), scalars(other)
        for tag in (*CURVES, "Step/loss", "Loss/test", "Top1/test"):
            assert ours[tag] == theirs[tag], tag
        assert summary(one)["val_images"] == summary(one)["test_images"] == 21
        best, same = (torch.load(run / "best.pt", weights_only=True) for run in (one, other))
        assert best["state_dict"].keys() == same["state_dict"].keys()
        assert all(torch.equal(best["state_dict"][n], w) for n, w in same["state_dict"].items())


def test_a_stopped_run_continues_exactly(pair):
    runs, found = pair
    assert [one["code"] for one in found["stopped"]] == [INTERRUPTED, INTERRUPTED]
    assert [one["code"] for one in found["continued"]] == [0, 0]
    assert_same_weights(runs / "stopped", runs / "fsdp")
    assert len(snapshot(runs / "stopped")["progress"]["history"]) == 2


@pytest.mark.parametrize("way", ["from_ddp", "to_ddp"])
def test_a_snapshot_of_one_is_continued_by_the_other(pair, way):
    runs, _ = pair
    assert_same_weights(runs / way, runs / "ddp")


def test_each_process_holds_a_half(pair):
    _, found = pair
    for model in ("", "_resnet"):
        for whole, mine in zip(found[f"ddp{model}"], found[f"fsdp{model}"], strict=True):
            for kind in ("parameters", "gradients", "optimizer"):
                # Rows that cannot be divided by two are the first process's.
                assert mine[kind] == pytest.approx(whole[kind] / 2, rel=0.02), kind
