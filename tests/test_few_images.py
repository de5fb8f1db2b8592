"""Sets of one, two and three images: ranks without a batch take part in everything."""

import shutil

import pytest
from compare import runs
from conftest import SMALL, draw_folder, scalars, summary
from joined import Job, run_jobs

# Script, processes, images in val and in test, and more options.
CASES = {
    "nd_1": ("nd", 1, 1),
    "dp_2": ("dp", 1, 2),
    "ddp_1_of_2": ("ddp", 2, 1),
    "ddp_2_of_4": ("ddp", 4, 2),
    "fsdp_1_of_2": ("fsdp", 2, 1),
    "apex_1_of_2": ("ddp_apex", 2, 1, "--opt-level", "O0"),
}


@pytest.mark.parametrize("case", CASES)
def test_sets_smaller_than_a_batch_of_all_ranks_are_trained_resumed_and_evaluated(tmp_path, case):
    """A class for each image."""
    script, processes, images, *more = CASES[case]
    data = draw_folder(tmp_path / "data", train=8, val=1)
    for number in range(images, 3):
        for part in ("train", "val"):
            shutil.rmtree(data / part / f"class_{number}")
    shutil.copytree(data / "val", data / "test")
    line = (*SMALL, "-a", "tiny_vit" if script == "fsdp" else "tiny_full", "-b", "2", *more)
    line += ("--epochs", "2", "--ema", "0.9", "--output-dir", tmp_path, data)
    train = (*line, "--name", "run", "--resume", "auto")
    evaluate = (*line, "-e", "--part", "test", "--name", "evaluated")
    evaluate += ("--resume", tmp_path / "run/best.pt")
    script = f"imagenet_{script}"
    run_jobs([Job(script, train, processes, stop_after=1)], tmp_path)
    assert summary(tmp_path / "run").get("test_top1") is None, "an interrupted run ends at once"
    assert [run.state for run in runs.find(tmp_path / "run")] == ["stopped"]
    run_jobs([Job(script, line, processes) for line in (train, evaluate)], tmp_path)
    assert [run.state for run in runs.find(tmp_path / "run")] == ["finished"]
    trained, evaluated = summary(tmp_path / "run"), summary(tmp_path / "evaluated")
    assert (trained["epochs_done"], trained["finished_because"]) == (2, "epochs")
    curves = scalars(tmp_path / "run")
    losses = [loss for tag in ("Loss/val", "Loss/ema") for _, loss in curves[tag]]
    assert trained["lowest_val_loss"] == pytest.approx(min(losses))
    assert trained["val_images"] == trained["test_images"] == evaluated["test_images"] == images
    assert evaluated["test_loss"] == pytest.approx(trained["test_loss"], rel=1e-5)
