"""The scripts train the same thing, interrupted or not, and differ in their mode alone."""

import ast
import difflib
import re
from pathlib import Path
from shlex import split

import pytest
from conftest import ROOT, scalars, summary, train
from joined import Job, run_jobs
from running import assert_same_weights

from utils.start.errors import INTERRUPTED

SCRIPTS = ("imagenet_nd.py", "imagenet_dp.py", "imagenet_ddp.py", "imagenet_ddp_apex.py")
SCRIPTS += ("imagenet_fsdp.py",)
CURVES = ("Loss/", "Top1/", "Top5/", "Lr", "Step/loss")  # also of averaged weights

RECIPE = split("--image-size 32 -j 0 --epochs 2 -p 2 --lr 0.05 --label-smoothing 0.1 --seed 5")
RECIPE += split("--warmup-epochs 0.5")
# On one process, with all that changes a step: batch norm, dropout, clipping, averages.
WHOLE = split("-a tiny_full -b 10 --clip-grad 0.1 --ema 0.9 --lr-schedule cosine")
# A gradient that is a mean over images. No clipping, which would hide a factor of the gradient.
PLAIN = ["-a", "tiny_plain"]
FEW = split("-a tiny_plain -b 64 --classes 2 --lr-scaling linear")  # all 40 images in a step
O0 = ("--opt-level", "O0")
# Name: script, processes, options, and step of epoch 1 at which it is interrupted, and resumed.
WAYS = {
    "nd": ("nd", 1, WHOLE, 0),
    "nd_resumed": ("nd", 1, WHOLE, 3),
    "dp": ("dp", 1, WHOLE, 3),
    "ddp": ("ddp", 1, WHOLE, 3),
    "apex": ("ddp_apex", 1, [*WHOLE, *O0], 3),
    "fsdp": ("fsdp", 1, WHOLE, 3),
    "plain": ("nd", 1, [*PLAIN, "-b", 10], 0),
    "nd_parts": ("nd", 1, [*PLAIN, *split("-b 5 --accum-steps 2")], 2),
    "ddp_parts": ("ddp", 2, [*PLAIN, *split("-b 1 --accum-steps 5")], 2),
    "apex_parts": ("ddp_apex", 2, [*PLAIN, *split("-b 1 --accum-steps 5"), *O0], 2),
    "fsdp_parts": ("fsdp", 2, [*PLAIN, *split("-b 1 --accum-steps 5")], 2),
    "few": ("nd", 1, FEW, 0),
    "few_three": ("ddp", 3, FEW, 0),
}
HALF = {f"{script}_fp16": script for script in ("nd", "dp", "ddp", "fsdp")}
WAYS |= {name: (script, 1, [*WHOLE, "--amp", "fp16"], 0) for name, script in HALF.items()}


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory) -> Path:
    """A folder of runs named like `WAYS`."""
    root, jobs = tmp_path_factory.mktemp("modes"), []
    for name, (script, processes, options, stop) in WAYS.items():
        place = ("--output-dir", root, "--name", name, "--resume", "auto", folder)
        line = (*RECIPE, *options, *place)
        jobs += [
            Job(f"imagenet_{script}", line, processes, stop_after=steps)
            for steps in {stop: None, 0: None}
        ]
    for job, ranks in zip(jobs, run_jobs(jobs, root), strict=True):
        if "--accum-steps" in job.options and job.processes > 1:
            synced = ranks[1]["synced"]
            assert synced and synced == [False, False, False, False, True] * (len(synced) // 5)
        assert {rank["code"] for rank in ranks} == {INTERRUPTED if job.stop_after else 0}
    return root


@pytest.mark.parametrize(
    "way", [name for name in WAYS if name not in ("nd", "plain", "few", *HALF)]
)
def test_a_step_is_the_same_in_all_modes_and_however_its_batch_is_divided(runs, way):
    """Bit for bit on one process; on several, and with FSDP, but for the order of additions."""
    _, processes, options, stop = WAYS[way]
    whole = "few" if options is FEW else "nd" if options[:2] == WHOLE[:2] else "plain"
    tolerance = 0 if whole == "nd" and way != "fsdp" else 1e-5
    ours, theirs = scalars(runs / way), scalars(runs / whole)
    assert theirs.keys() >= {"Top1/train", "Top1/val", "Lr"}
    for tag in [tag for tag in theirs if tag.startswith(CURVES)]:
        near = [(x, pytest.approx(y, rel=tolerance, abs=0)) for x, y in theirs[tag]]
        assert sorted(ours[tag]) == near, tag  # two files of one second may be read in any order
    assert_same_weights(runs / way, runs / whole, tolerance)
    facts, images = summary(runs / way), 40 if whole == "few" else 10
    for (_, rate), (_, step) in zip(ours["Throughput/train"], ours["Time/train"], strict=True):
        assert rate * step == pytest.approx(images, rel=1e-4)  # of all processes, resumed or not
    assert (facts["global_batch"], facts["world_size"], facts["nodes"]) == (images, processes, 1)
    log = (runs / way / "train.log").read_text()
    if whole == "few":  # all images are one step, also for the learning rate
        assert theirs["Lr"][-1][1] == pytest.approx(0.05 * 40 / 256)
        assert "lr 0.007812: --lr 0.05 scaled by the linear rule from batch 256 to 40\n" in log
    assert f"global batch {images} " in log
    assert ("the whole data set is one step" in log) == (whole == "few")
    assert re.findall(r"epoch (\d), step \d+", log) == ["1"] * (stop > 0)


@pytest.mark.parametrize("way", HALF)
def test_a_loss_scale_changes_no_clipped_gradient(runs, way):
    ours, theirs = (scalars(runs / name) for name in (way, "nd"))
    assert ours["Loss/train"] == [(x, pytest.approx(y, rel=1e-2)) for x, y in theirs["Loss/train"]]
    assert ours["Amp/scale"][-1][1] > 1
    # Evaluated in float16, too: rounded alike in all modes.
    assert ours["Loss/val"] == scalars(runs / "nd_fp16")["Loss/val"] != theirs["Loss/val"]


def test_training_learns_the_classes(folder, tmp_path):
    recipe = split("-a tiny_full -b 10 --epochs 12 --lr 0.05 --crop-scale 0.5 --lr-schedule cosine")
    train("imagenet_nd.py", *recipe, "--output-dir", tmp_path, "--name", "run", folder)
    assert summary(tmp_path / "run")["best_top1"] > 60


# ---- the scripts as texts


def loop_of(script: str) -> list[str]:
    """The loop over the epochs."""
    tree = ast.parse((ROOT / script).read_text())
    (train,) = (node for node in tree.body if getattr(node, "name", "") == "train")
    *_, loop = (node for node in train.body if isinstance(node, (ast.While, ast.For)))
    return ast.unparse(loop).splitlines()


def code(path: Path) -> list[str]:
    """Lines of a script below its docstring, whatever their indentation."""
    text = path.read_text()
    lines = text.splitlines()[ast.parse(text).body[0].end_lineno :]
    return [line.strip() for line in lines if line.strip()]


@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_a_script_differs_from_nd_by_its_mode_alone(script):
    difference = difflib.unified_diff(code(ROOT / SCRIPTS[0]), code(ROOT / script), n=0)
    signs = [line[0] for line in list(difference)[2:]]
    assert 0 < signs.count("-") <= 24
    assert 0 < signs.count("+") <= 45
    assert loop_of(script) == loop_of(SCRIPTS[0])
