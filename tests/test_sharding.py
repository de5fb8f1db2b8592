"""imagenet_fsdp.py beside imagenet_ddp.py: the same training, each process with a part of it."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import scalars, summary
from joined import Job, run_jobs
from running import assert_same_weights, snapshot

from utils.comm import fsdp
from utils.model import models

CURVES = ("Loss/train", "Top1/train", "Top5/train", "Loss/val", "Top1/val", "Top5/val", "Lr")
RECIPE = "--image-size 32 -j 0 -p 1 --lr 0.01 --label-smoothing 0.1 --warmup-epochs 1"
INTERRUPTED = 75
VIT = ("-a", "tiny_vit", "--amp", "off")
# With channels_last DDP's weights are laid out so, too, and convolutions round in another way.
RESNET = ("-a", "tiny_resnet", "--amp", "off", "--no-channels-last")
DDP, FSDP = "imagenet_ddp", "imagenet_fsdp"
ONE, TWO = ("--epochs", 1), ("--epochs", 2)


class Plan:
    """Jobs that train into ``root``/NAME."""

    def __init__(self, root: Path, data: Path):
        self.root, self.data = root, data
        self.jobs: list[Job] = []
        self.names: list[str] = []

    def add(self, script: str, name: str, *options: object, batch: int = 12, **where: int) -> None:
        """``batch`` images a step, on however many processes; a run that exists continues."""
        size = where.get("processes", 2) * where.get("nodes", 1)
        own = (*RECIPE.split(), "-b", batch // size, "--output-dir", self.root, "--name", name)
        self.jobs.append(Job(script, (*own, "--resume", "auto", *options, self.data), **where))
        self.names.append(name)

    def run(self) -> tuple[Path, dict[str, list]]:
        """The folder of the runs, and for each name what the processes of its jobs returned."""
        found: dict[str, list] = {}
        for name, ranks in zip(self.names, run_jobs(self.jobs, self.root), strict=True):
            found.setdefault(name, []).append(ranks)
        return self.root, found


@pytest.fixture(scope="module")
def data(folder, tmp_path_factory) -> Path:
    """60 training images; of 21 to evaluate, the last round does not reach all processes."""
    root = tmp_path_factory.mktemp("sharding") / "data"
    shutil.copytree(folder, root)
    shutil.copytree(root / "val", root / "test")
    return root


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Trainings on two to four processes, and what each of their processes held."""
    plan = Plan(tmp_path_factory.mktemp("runs"), data)
    plan.add(DDP, "ddp", *VIT, *TWO)
    plan.add(FSDP, "turns", *VIT, *TWO, stop_after=2)
    plan.add(DDP, "turns", *VIT, *TWO, stop_after=4)
    plan.add(FSDP, "turns", *VIT, *TWO)
    plan.add(FSDP, "chain", *VIT, *TWO, stop_after=2)
    plan.add(FSDP, "chain", *VIT, *TWO, stop_after=2, processes=4)
    plan.add(FSDP, "chain", *VIT, *TWO, processes=3)
    plan.add(DDP, "resnet_ddp", *RESNET, *ONE)
    plan.add(FSDP, "resnet", *RESNET, *ONE, "--reshard", "none")
    for script in (DDP, FSDP):
        plan.add(script, f"{script}_clip", *VIT, *ONE, "--clip-grad", 0.5)
    return plan.run()


def test_two_processes_train_a_resnet_as_ddp_bit_for_bit(trained):
    runs, _ = trained
    one, other = runs / "resnet", runs / "resnet_ddp"
    assert_same_weights(one, other)
    ours, theirs = scalars(one), scalars(other)
    for tag in (*CURVES, "Step/loss", "Loss/test", "Top1/test"):
        assert ours[tag] == theirs[tag], tag
    assert summary(one)["val_images"] == summary(one)["test_images"] == 21
    assert summary(one)["communication_s"] > 0
    best, same = (torch.load(run / "best.pt", weights_only=True) for run in (one, other))
    assert best["state_dict"].keys() == same["state_dict"].keys()
    assert all(torch.equal(best["state_dict"][n], w) for n, w in same["state_dict"].items())


def test_fsdp_ddp_and_fsdp_in_turns_are_ddp_bit_for_bit(trained):
    """Stopped in the middle of an epoch, twice: each continues the other's snapshot exactly."""
    runs, found = trained
    codes = [[one["code"] for one in ranks] for ranks in found["turns"]]
    assert codes == [[INTERRUPTED] * 2, [INTERRUPTED] * 2, [0, 0]]
    assert_same_weights(runs / "turns", runs / "ddp")
    records = [snapshot(runs / name)["progress"]["history"] for name in ("turns", "ddp")]
    for ours, theirs in zip(*records, strict=True):
        assert [ours[tag] for tag in CURVES] == [theirs[tag] for tag in CURVES]
    log = (runs / "turns" / "train.log").read_text()
    assert "--reshard full, 2 processes: 3 x EncoderBlock each by itself" in log


def test_gradients_are_clipped_by_their_norm_over_all_processes(trained):
    runs, _ = trained
    assert_same_weights(runs / f"{FSDP}_clip", runs / f"{DDP}_clip", 1e-6)


def test_a_run_goes_from_two_to_four_to_three_processes(trained):
    runs, found = trained
    codes = [[one["code"] for one in ranks] for ranks in found["chain"]]
    assert codes == [[INTERRUPTED] * 2, [INTERRUPTED] * 4, [0] * 3]
    assert_same_weights(runs / "chain", runs / "ddp", tolerance=1e-4)


def test_each_process_holds_its_part(trained):
    """Counted in tensors, in the last step of a training."""
    _, found = trained
    (whole,), (resnet,) = found["ddp"], found["resnet_ddp"]
    cases = [(ranks, whole[0]) for ranks in found["chain"]] + [(found["resnet"][0], resnet[0])]
    assert [len(ranks) for ranks, _ in cases] == [2, 4, 3, 2]
    for ranks, all_of_it in cases:
        # An evaluation lets go of what it has gathered, or training would go on with that.
        assert [mine["at_end"] for mine in ranks] == [mine["parameters"] for mine in ranks]
        for kind in ("parameters", "gradients", "optimizer"):
            assert sum(mine[kind] for mine in ranks) == all_of_it[kind]
            for mine in ranks:  # rows that cannot be divided are the first processes'
                assert mine[kind] == pytest.approx(all_of_it[kind] / len(ranks), rel=0.05)


@pytest.mark.long
def test_what_else_there_is(data, tmp_path):
    """Options against DDP's: how long weights stay, nodes, accumulation, precisions."""
    plan = Plan(tmp_path, data)
    cases = {
        "accumulate": ("--accum-steps", 2, "--amp", "off"),
        "fp16": ("--amp", "fp16"),
        "bf16": ("--amp", "bf16", "--lr", "0.005"),
    }
    for name, options in cases.items():
        for script in (DDP, FSDP):
            plan.add(script, f"{script}_{name}", "-a", "tiny_vit", *options, *ONE)
    plan.add(FSDP, "norms", "-a", "tiny_resnet", "--amp", "bf16", "--lr", 0.005, *ONE)
    plan.add(DDP, "four", *VIT, *ONE, processes=4)
    for way in ("none", "full"):
        plan.add(FSDP, way, *VIT, *ONE, "--reshard", way, processes=4)
    plan.add(FSDP, "node", *VIT, *ONE, "--reshard", "node", processes=2, nodes=2, stop_after=2)
    plan.add(FSDP, "node", *VIT, *ONE, "--reshard", "node", processes=2, nodes=2)
    plan.add(FSDP, "alone", *VIT, *ONE, processes=1)
    plan.add(DDP, "alone_ddp", *VIT, *ONE, processes=1)
    runs, found = plan.run()
    found = {name: jobs[-1] for name, jobs in found.items()}
    assert {one["code"] for ranks in found.values() for one in ranks} == {0}
    for name, tolerance in (("accumulate", 0), ("fp16", 1e-3), ("bf16", 1e-2)):
        assert_same_weights(runs / f"{FSDP}_{name}", runs / f"{DDP}_{name}", tolerance)
    for way in ("none", "full", "node"):
        assert_same_weights(runs / way, runs / "four", 1e-5)
    assert_same_weights(runs / "alone", runs / "alone_ddp")
    halves = [found["node"][rank]["optimizer"] for rank in range(4)]
    assert halves[:2] == halves[2:]
    assert halves[0] + halves[1] == found["four"][0]["optimizer"]
    assert "2 x 2 processes" in (runs / "node" / "train.log").read_text()
    assert "x BatchNorm2d" in (runs / "norms" / "train.log").read_text()
    assert summary(runs / f"{FSDP}_fp16")["finished_because"] == "epochs"
    # The first steps overflow at the scale that they begin with, in all processes.
    scale = [snapshot(runs / f"{script}_fp16")["scaler"] for script in (FSDP, DDP)]
    assert scale[0] == scale[1]
    assert scale[0]["scale"] < 2**16


@pytest.mark.parametrize(
    ("arch", "chosen", "rest"),
    [
        ("vit_b_32", {"EncoderBlock": 12, "Conv2d": 1}, 0.01),
        ("swin_t", {"SwinTransformerBlock": 12, "PatchMerging": 2}, 0.04),
        ("convnext_tiny", {"CNBlock": 15, "Conv2d": 1}, 0.05),
        ("resnet50", {"Bottleneck": 13, "Linear": 1}, 0.01),
        ("vgg19", {"Conv2d": 8, "Linear": 3}, 0.02),
        ("maxvit_t", {"MaxVitLayer": 11}, 0.03),
        ("tiny_plain", {}, 1),
    ],
)
def test_blocks_are_found_by_the_models_structure(arch, chosen, rest, monkeypatch):
    from fake_runs import stand_in

    monkeypatch.setattr(models, "timm", stand_in("timm"))
    monkeypatch.setattr(models, "_check_image_size", lambda *_: None)
    with torch.device("meta"):
        model = models.create(arch, 1000, 224)
    found = fsdp.units(model)
    assert Counter(type(block).__name__ for block in found) == chosen
    assert fsdp.size(model) - sum(map(fsdp.size, found)) <= rest * fsdp.size(model)
    inside = [set(block.modules()) for block in found]
    assert sum(map(len, inside)) == len(set().union(*inside))  # none in another
