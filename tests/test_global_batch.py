"""``--global-batch``: the same training on any number of processes, and on a changing one."""

from pathlib import Path
from shlex import split

import pytest
from conftest import scalars
from joined import Job, run_jobs
from running import assert_same_weights, snapshot

from utils.data.samplers import step_shape
from utils.start.errors import INTERRUPTED
from utils.start.option_types import Options

# 60 images in steps of 7, which neither 2, 3 nor 4 divide; without batch norm.
RECIPE = split("-a tiny_plain --image-size 32 -j 0 --epochs 2 -p 2 --lr 3 --lr-scaling linear")
RECIPE += split("--warmup-epochs 0.5 --label-smoothing 0.1 --global-batch 7")
O0 = " --opt-level O0"
# Name: script, options, and numbers of processes with the step at which they are stopped.
RUNS = {
    "alone": ("nd", "-b 7", [(1, 0)]),
    "parts": ("nd", "-b 3", [(1, 0)]),
    "dp": ("dp", "-b 4", [(1, 0)]),
    "ddp_2": ("ddp", "-b 4", [(2, 0)]),
    "ddp_3": ("ddp", "-b 128", [(3, 0)]),
    "ddp_3_parts": ("ddp", "-b 2", [(3, 0)]),
    "fsdp_2_parts": ("fsdp", "-b 2", [(2, 0)]),
    "apex_4": ("ddp_apex", f"-b 2{O0}", [(4, 0)]),
    "elastic": ("ddp", "-b 3", [(4, 3), (3, 2), (2, 5), (4, 0)]),  # the third in epoch 2
    "elastic_fsdp": ("fsdp", "-b 3", [(3, 3), (2, 0)]),
}


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory) -> Path:
    """A folder of runs named like `RUNS`."""
    root, jobs = tmp_path_factory.mktemp("global_batch"), []
    for name, (script, options, stages) in RUNS.items():
        place = ("--output-dir", root, "--name", name, "--resume", "auto", folder)
        line = (*RECIPE, *split(options), *place)
        jobs += [Job(f"imagenet_{script}", line, size, stop_after=stop) for size, stop in stages]
    for job, ranks in zip(jobs, run_jobs(jobs, root), strict=True):
        assert {rank["code"] for rank in ranks} == {INTERRUPTED if job.stop_after else 0}
    return root


@pytest.mark.parametrize("name", [name for name in RUNS if name != "alone"])
def test_the_training_is_that_of_one_process(runs, name):
    """Same steps, same rate, and weights that differ by rounding alone."""
    alone, other = snapshot(runs / "alone"), snapshot(runs / name)
    assert other["progress"]["global_batch"] == 7
    assert_same_weights(runs / name, runs / "alone", tolerance=1e-5)
    rates = [[group["lr"] for group in x["optimizer"]["param_groups"]] for x in (alone, other)]
    assert rates[0] == rates[1] == [pytest.approx(3 * 7 / 256)]
    one, two = (scalars(runs / x) for x in ("alone", name))
    for tag in ("Lr", "Loss/train", "Loss/val", "Top1/train"):
        assert [x for x, _ in two[tag]] == [x for x, _ in one[tag]] == [1, 2]
        values = [[value for _, value in x[tag]] for x in (one, two)]
        assert values[1] == pytest.approx(values[0], rel=1e-4)


def test_too_few_images_for_all_processes(folder, tmp_path):
    """With -b 1, five images on two processes would be three micro-batches of each."""
    for line, message in (("1 -b 9", "larger --global-batch"), ("5 -b 1", "larger -b")):
        words = (*RECIPE, "--global-batch", *line.split(), "--output-dir", tmp_path, folder)
        with pytest.raises(AssertionError, match=f"too few images .*: give a {message}"):
            run_jobs([Job("imagenet_ddp", words)], tmp_path)


def test_a_data_set_smaller_than_the_global_batch_is_one_step_of_its_images():
    """A micro-batch is no smaller than -b asks for, or there were too few images for all."""
    options = Options(batch_size=4, global_batch=256, accum_steps=1)
    shapes = [step_shape(options, size, images) for size, images in ((1, 60), (2, 60), (2, 999))]
    assert shapes == [(60, 15), (60, 8), (256, 32)]
