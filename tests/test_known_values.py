"""What all modes share, against values that are known, as no comparison of modes would show."""

import shutil
from pathlib import Path
from shlex import split

import pytest
import torch
from conftest import draw_folder, scalars, summary
from joined import Job, run_jobs
from PIL import Image
from running import snapshot

TINY = "-a tiny_plain --image-size 32 -j 0 -p 1 --wd 0"
# 60 images on two nodes: 3 steps of 20 images in an epoch.
SHARED = f"{TINY} -b 5 --accum-steps 2 --epochs 2 --lr 0.05 --lr-scaling linear --warmup-epochs 2"
SHARED += " --wd-norm 0 --ema 1e-9 --label-smoothing 0.9 --train-time 0.5"
# On one process.
ONE = f"{TINY} -b 20 --epochs 1"
O2 = f"{ONE} --opt-level O2 --lr"
# 6 images that are all the same, in one step; the weights keep their values.
SAME = f"{TINY} --lr 1e-12 --resume auto"
ND, DDP, APEX = "imagenet_nd", "imagenet_ddp", "imagenet_ddp_apex"


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory) -> Path:
    """A folder of runs."""
    root = tmp_path_factory.mktemp("known")
    same, seeds = draw_folder(root / "same", train=3, val=1), root / "seeds"
    seeds.mkdir()
    for i, path in enumerate(sorted(same.glob("train/*/*"))):
        # Of the other classes no image is readable: the next one that is takes its place.
        Image.new("RGB", (48, 40), (90, 60, 30)).save(path) if i < 3 else path.write_bytes(b"")

    def job(script: str, name: str, options: str, data: Path = folder, *more, **how) -> Job:
        place = ("--output-dir", root, "--name", name, *more, data)
        return Job(script, (*split(options), *place), **{"processes": 1, **how})

    env, int8 = {"SEEN_SEEDS": str(seeds), "CLOCK_JUMPS_IN": "1"}, f"{SAME} --comm int8 -b 4"
    first = [
        job(APEX, "clipped", f"{O2} 0.1 --clip-grad 1e-9"),
        job(APEX, "kept", f"{O2} 1e-12 --loss-scale 512"),
        *(job(DDP, "int8", f"{int8} --epochs {n}", same, processes=2) for n in (1, 2)),
        job(DDP, "shared", SHARED, nodes=2, env=env),
    ]
    run_jobs(first, root)
    shutil.copytree(root / "kept", root / "scaled")
    content = snapshot(root / "scaled")
    content["scaler"] |= {"scale": 1024.0, "clean_steps": 9}
    torch.save(content, root / "scaled" / "snapshot.pt")
    again = [
        job(ND, "scaled", f"{ONE} --amp fp16 --lr 1e-12 --epochs 2 --resume auto"),
        job(ND, "evaluated", f"{TINY} -b 20 -e --resume {root}/shared/snapshot.pt"),
    ]
    run_jobs(again, root)
    return root


def momentum(run: Path, name: str = "snapshot.pt") -> list[torch.Tensor]:
    states = snapshot(run, name)["optimizer"]["state"].values()
    return [entry["momentum_buffer"] for entry in states]


def near(one, other, tolerance: float) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in pairs)


def test_the_learning_rate_of_the_last_step_is_that_of_every_group(runs):
    """5 / 3 epochs into a warm-up of 2, scaled by all images of a step, accumulated or not."""
    curves, content = scalars(runs / "shared"), snapshot(runs / "shared")
    rate = pytest.approx(0.05 * 20 / 256 * (5 / 3) / 2, rel=1e-5)
    assert [group["lr"] for group in content["optimizer"]["param_groups"]] == [rate] * 2
    assert curves["Lr"][-1] == (2, rate)


def test_an_average_that_forgets_at_once_is_the_weights_after_the_step(runs):
    content = snapshot(runs / "shared")
    averages = content["ema"]["model"]
    weights = [content["model"][name] for name in averages]
    assert near(averages.values(), weights, 1e-7)


def test_the_validation_loss_knows_no_label_smoothing(runs):
    in_training = scalars(runs / "shared")["Loss/val"][-1][1]
    assert summary(runs / "evaluated")["val_loss"] == pytest.approx(in_training, rel=1e-5)


def test_random_numbers_differ_between_processes_micro_batches_steps_and_epochs(runs):
    seeds = [path.read_text().split() for path in (runs / "seeds").iterdir()]
    assert [len(one) for one in seeds] == [2 * 3 * 2] * 2
    assert len({*seeds[0], *seeds[1]}) == 24


def test_the_clock_that_counts_is_of_rank_0(runs):
    """That of rank 1 is an hour ahead, and half an hour may be trained."""
    results = summary(runs / "shared")
    assert (results["finished_because"], results["nodes"]) == ("epochs", 2)


def test_the_best_model_is_on_disk_before_a_snapshot_speaks_of_it(runs):
    best, run = snapshot(runs / "shared", "best.pt")["epoch"], runs / "shared"
    named = run / {1: "snapshot_previous.pt", 2: "snapshot.pt"}[best]
    assert (run / "best.pt").stat().st_mtime_ns < named.stat().st_mtime_ns


def test_o2_clips_the_gradients_that_its_optimiser_takes(runs):
    clipped, kept = (snapshot(runs / name)["model"] for name in ("clipped", "kept"))
    assert near(clipped.values(), kept.values(), 1e-7)
    scales = [snapshot(runs / name)["scaler"]["scale"] for name in ("clipped", "kept")]
    assert scales == [2.0**16, 512.0], "that of the level, and that of the command line"
    assert [summary(runs / name)["precision"] for name in ("kept", "scaled")] == ["O2", "fp16"]


def test_the_steps_since_an_overflow_count_on_with_another_scaler(runs):
    assert snapshot(runs / "scaled")["scaler"]["_growth_tracker"] == 9 + 3


def test_int8_rounds_by_other_random_numbers_in_each_epoch(runs):
    """Also after a resume. By equal numbers the momentum would become 1.9 of the gradient, which is
    the same in both."""
    first, second = (momentum(runs / "int8", f"snapshot{x}.pt") for x in ("_previous", ""))
    step = max(float(one.abs().max()) for one in first) / 127
    assert near([1.9 * one for one in first], second, 4 * step)
    assert not near([1.9 * one for one in first], second, step / 1000)
