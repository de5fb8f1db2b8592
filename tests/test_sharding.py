"""imagenet_fsdp.py beside imagenet_ddp.py: the same training, each process with a part of it."""

import shutil
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from conftest import scalars, summary
from joined import Job, in_processes, run_jobs
from running import assert_same_weights, same, snapshot
from torch import nn
from torchvision.models import get_model

from utils import find_batch
from utils.model import blocks, fsdp
from utils.start.world import World, local

CURVES = ("Loss/train", "Top1/train", "Top5/train", "Loss/val", "Top1/val", "Top5/val", "Lr")
RECIPE = "--image-size 32 -j 0 -p 1 --lr 0.01 --label-smoothing 0.1 --warmup-epochs 1 --ema 0.9"
INTERRUPTED = 75
VIT = ("-a", "tiny_vit", "--amp", "off")
# With channels_last DDP's weights are laid out so, too, and convolutions round in another way.
RESNET = ("-a", "tiny_resnet", "--amp", "off", "--no-channels-last")
DDP, FSDP = "imagenet_ddp", "imagenet_fsdp"
ONE, TWO = ("--epochs", 1), ("--epochs", 2)


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """The folder of some trainings, and for each name what the processes of its jobs held.

    60 training images; of 21 to evaluate, the last round does not reach all processes.
    """
    data, root = tmp_path_factory.mktemp("sharding") / "data", tmp_path_factory.mktemp("runs")
    shutil.copytree(folder, data)
    shutil.copytree(data / "val", data / "test")
    seen: dict[str, list] = {}

    def run(script: str, name: str, *options: object, **where: int) -> None:
        """12 images a step, on however many processes; a run that exists continues."""
        batch = 12 // (where.get("processes", 2) * where.get("nodes", 1))
        place = ("-b", batch, "--output-dir", root, "--name", name, "--resume", "auto")
        job = Job(script, (*RECIPE.split(), *place, *options, data), **where)
        seen.setdefault(name, []).extend(run_jobs([job], tmp_path_factory.mktemp("job")))

    run(DDP, "ddp", *VIT, *TWO)
    run(FSDP, "turns", *VIT, *TWO, stop_after=2)
    shutil.copytree(root / "turns", root / "chain")
    run(DDP, "turns", *VIT, *TWO, stop_after=4)
    run(FSDP, "turns", *VIT, *TWO)
    run(FSDP, "chain", *VIT, *TWO, "--reshard", "node", stop_after=2, nodes=2)
    run(FSDP, "chain", *VIT, *TWO, processes=3)
    seen["chain"].insert(0, seen["turns"][0])
    # All shards differ, which is nothing that --audit should report.
    for script, *options in ((DDP,), (FSDP, "--reshard", "none")):
        run(script, f"{script}_resnet", *RESNET, *ONE, "--audit", *options)
    for script in (DDP, FSDP):
        run(script, f"{script}_clip", *VIT, *ONE, "--clip-grad", 0.5, "--accum-steps", 2)
        run(script, f"{script}_fp16", "-a", "tiny_vit", "--amp", "fp16", *ONE)
    return root, seen


def test_two_processes_train_a_resnet_as_ddp_bit_for_bit(trained):
    runs, _ = trained
    one, other = runs / f"{FSDP}_resnet", runs / f"{DDP}_resnet"
    assert_same_weights(one, other)
    ours, theirs = scalars(one), scalars(other)
    for tag in (*CURVES, "Loss/ema", "Step/loss", "Loss/test", "Top1/test"):
        assert ours[tag] == theirs[tag], tag
    assert summary(one)["val_images"] == summary(one)["test_images"] == 21
    assert "Time/communication" in theirs and "Time/communication" not in ours
    assert summary(one)["communication_s"] is None
    for part in ("parameters", "gradients", "optimizer"):
        tag = f"Memory/{part}_mb_max"
        assert ours[tag][-1][1] < 0.6 * theirs[tag][-1][1], "a half of it"
    assert same(*(snapshot(run, "best.pt")["state_dict"] for run in (one, other)))


def test_fsdp_ddp_and_fsdp_in_turns_are_ddp_bit_for_bit(trained):
    """Stopped in the middle of an epoch, twice: each continues the other's snapshot exactly."""
    runs, seen = trained
    codes = [[one["code"] for one in ranks] for ranks in seen["turns"]]
    assert codes == [[INTERRUPTED] * 2, [INTERRUPTED] * 2, [0, 0]]
    assert_same_weights(runs / "turns", runs / "ddp")
    records = [snapshot(runs / name)["progress"]["history"] for name in ("turns", "ddp")]
    for ours, theirs in zip(*records, strict=True):
        assert [ours[tag] for tag in CURVES] == [theirs[tag] for tag in CURVES]


@pytest.mark.parametrize(("case", "tolerance", "more"), [("clip", 1e-6, 2.5), ("fp16", 1e-3, 1)])
def test_clipping_and_the_loss_scale_are_of_all_processes(trained, case, tolerance, more):
    """Gradients are clipped by their norm over all processes; the first steps overflow. Each of two
    micro-batches gathers the weights, twice: ``more`` is sent than by DDP."""
    ours, theirs = (trained[0] / f"{script}_{case}" for script in (FSDP, DDP))
    assert_same_weights(ours, theirs, tolerance)
    sent, by_ddp = (summary(run)["sent_mb_per_step"] for run in (ours, theirs))
    assert sent == pytest.approx(more * by_ddp)
    assert snapshot(ours)["scaler"] == snapshot(theirs)["scaler"]
    assert (snapshot(ours)["scaler"].get("scale", 2**16) < 2**16) == (case == "fp16")


def test_a_run_goes_from_two_to_two_by_two_to_three_processes(trained):
    runs, seen = trained
    codes = [[one["code"] for one in ranks] for ranks in seen["chain"]]
    assert codes == [[INTERRUPTED] * 2, [INTERRUPTED] * 4, [0] * 3]
    assert_same_weights(runs / "chain", runs / "ddp", tolerance=1e-4)
    log = (runs / "chain" / "train.log").read_text()
    assert "--reshard node, 2 x 2 processes: 3 x EncoderBlock sharded separately" in log


def test_each_process_holds_its_part(trained):
    """Counted in tensors, in the last step of a training."""
    _, seen = trained
    (vit,), (resnet,) = seen["ddp"], seen[f"{DDP}_resnet"]
    cases = [(ranks, vit[0], parts) for ranks, parts in zip(seen["chain"], (2, 2, 3), strict=True)]
    for ranks, whole, parts in (*cases, (seen[f"{FSDP}_resnet"][0], resnet[0], 2)):
        # An evaluation lets go of what it has gathered, or training would go on with that.
        assert [mine["at_end"] for mine in ranks] == [mine["parameters"] for mine in ranks]
        is_kept = whole is resnet[0]  # --reshard none keeps what was gathered until backward
        assert {mine["after_forward"] == whole["parameters"] for mine in ranks} == {is_kept}
        for kind in ("parameters", "gradients", "optimizer"):
            assert sum(mine[kind] for mine in ranks) == whole[kind] * len(ranks) // parts
            for mine in ranks:  # rows that cannot be divided are the first processes'
                assert mine[kind] == pytest.approx(whole[kind] / parts, rel=0.05)


@pytest.mark.parametrize(
    ("reshard", "dtype", "frozen", "accum", "sent"),
    [
        ("full", "float32", 0, 1, 10_500),
        ("none", "bfloat16", 0, 1, 5_250),
        ("node", "float32", 0, 1, 10_000),
        ("full", "float32", 9000, 1, 42_000),  # gathered once, and no gradients
        ("full", "float32", 0, 3, 24_500),  # weights by each micro-batch, gradients once
    ],
)
def test_bytes_that_travel(reshard, dtype, frozen, accum, sent):
    """Of a thousand weights that are trained, on two nodes of four processes."""
    args = SimpleNamespace(reshard=reshard)
    world = World(torch.device("cpu"), 0, 8, 0, 4, 2)
    weights = [torch.empty(10, 100, requires_grad=True), torch.empty(frozen)]
    assert fsdp.sent_bytes(weights, args, world, getattr(torch, dtype), accum) == sent


@pytest.mark.parametrize(
    ("arch", "repeated", "chosen", "rest"),
    [
        ("vit_b_32", 12, {"EncoderBlock": 12, "Conv2d": 1}, 0.01),
        ("swin_t", 15, {"SwinTransformerBlock": 12, "PatchMerging": 2}, 0.04),
        ("resnet50", 16, {"Bottleneck": 13, "Linear": 1}, 0.01),
        ("vgg19", 0, {"Conv2d": 8, "Linear": 3}, 0.02),
        ("densenet121", 58, {"_DenseLayer": 32, "Linear": 1}, 0.4),
    ],
)
def test_blocks_are_found_by_the_models_structure(arch, repeated, chosen, rest):
    with torch.device("meta"):
        model = get_model(arch)
    assert len(blocks.repeated(model)) == repeated
    units = fsdp.units(model)
    assert Counter(type(unit).__name__ for unit in units) == chosen
    assert fsdp.size(model) - sum(map(fsdp.size, units)) <= rest * fsdp.size(model)
    inside = [set(unit.modules()) for unit in units]
    assert sum(map(len, inside)) == len(set().union(*inside))  # none in another


def test_blocks_that_share_a_layer_stay_with_the_rest():
    """As in timm's CoaT; FSDP rejects a weight that it has sharded before."""
    with torch.device("meta"):
        model = get_model("resnet50")
    model.layer4[1].conv1 = model.layer4[2].conv1
    assert not {model.layer4[1], model.layer4[2]} & {*(units := fsdp.units(model))}
    assert len(units) == 12


def _gradient(rank, size):
    """Of one step after a trial of --find-batch, which ends without an update."""
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(3, 1, bias=False))
    for update in (False, True):
        find_batch.forget_gradients(model)
        model.set_requires_gradient_sync(update)
        model(torch.ones(1, 3)).sum().backward()
    find_batch.forget_gradients(model)
    return local(model.weight.grad).tolist()


def test_the_gradients_of_a_trial_do_not_stay():
    assert in_processes(1, _gradient) == [[[1.0] * 3]]
