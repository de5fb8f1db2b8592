"""Command lines as people type them; image size, epochs and model made small at their end."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from compare import runs
from conftest import ROOT, Result, shell, summary

from utils.errors import UserError
from utils.launch.network import free_port

# The last of several equal options counts, so these shrink a line without changing its form.
TINY = "-a resnet18 --image-size 32 -b 5 --workers 0 --epochs 1 --lr 0.01"


def ends_well(*lines: str, **env: str) -> list[Result]:
    """Type the lines into shells, all at once; every one must succeed without a complaint."""
    results = shell(*lines, **env)
    for result in results:
        assert result.code == 0, result.out + result.err
        # When all is done, the torchrun with the store may be gone before the other one has its
        # answer; torch logs that with a traceback, and counts the run as a success.
        said = re.sub(r"(?m)^E\d{4} .*agent/server/api\.py.*\n", "", result.err)
        assert "Traceback" not in said, result.err
        assert "error" not in said, result.err
    return results


def only_run(output: Path) -> Path:
    """The one run directory in ``output``."""
    (run,) = output.iterdir()
    return run


def assert_trained(run: Path, **wanted: object) -> None:
    """The run has one epoch behind it, over all 21 validation images; and ``wanted`` holds."""
    found = summary(run)
    wanted = {"epochs_done": 1, "finished_because": "epochs", "val_images": 21} | wanted
    assert {key: found[key] for key in wanted} == wanted
    assert (run / "snapshot.pt").is_file()
    assert (run / "best.pt").is_file()


# ---- one process


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory) -> Path:
    """Run directory of: python imagenet_nd.py -a resnet50 DATA."""
    output = tmp_path_factory.mktemp("nd")
    ends_well(f"python imagenet_nd.py -a resnet50 {folder} {TINY} --output-dir {output}")
    return only_run(output)


def test_nd(trained):
    assert_trained(trained, world_size=1, nodes=1, global_batch=5, mode="nd")
    assert trained.name.endswith("_resnet18_gpux1_b5_cpu0_nd")


@pytest.mark.long
def test_nd_alexnet(folder, tmp_path):
    small = TINY.replace("-a resnet18 --image-size 32", "--image-size 64 --classes 2")
    ends_well(
        f"python imagenet_nd.py -a alexnet --lr 0.01 {folder} {small} --output-dir {tmp_path}"
    )
    assert_trained(only_run(tmp_path), arch="alexnet", val_images=14)
    shutil.rmtree(tmp_path)  # AlexNet's snapshot takes 0.7 GB


def test_dp(folder, tmp_path):
    ends_well(f"python imagenet_dp.py -a resnet50 {folder} {TINY} --output-dir {tmp_path}")
    assert_trained(only_run(tmp_path), world_size=1, global_batch=5, mode="dp")
    names = torch.load(only_run(tmp_path) / "snapshot.pt", weights_only=True)["model"]
    assert not any(name.startswith("module.") for name in names)


def test_evaluate_a_best_model(trained, folder, tmp_path):
    (done,) = ends_well(
        f"python imagenet_nd.py -a resnet18 --resume {trained}/best.pt --evaluate {folder}"
        f" --image-size 32 -b 5 -j 0 --output-dir {tmp_path}"
    )
    before, found = summary(trained), summary(only_run(tmp_path))
    with pytest.raises(UserError, match="no event file"):  # nothing that compare_runs.py lists
        runs.find(tmp_path)
    assert found["finished_because"] == "evaluated"
    for key in ("val_images", "val_top1", "val_top5", "val_loss"):
        assert found[key] == before[key], key
    assert f"top-1 {before['best_top1']:.3f} %" in done.out


@pytest.mark.parametrize("target", ["0.01", pytest.param("1.5", marks=pytest.mark.long)])
def test_desired_accuracy_ends_a_run_early(folder, tmp_path, target):
    line = f"python imagenet_nd.py --desired-acc {target} {folder} {TINY} --epochs 3"
    ends_well(f"{line} --output-dir {tmp_path}")
    found = summary(only_run(tmp_path))
    assert 1 <= found["best_top1"] < 100
    assert (found["finished_because"], found["epochs_done"]) == ("desired_acc", 1)


def test_data_from_the_environment_and_a_share_is_no_per_cent(folder, tmp_path):
    """An accuracy of 0.99 is 99 %, and not reached; DATA comes from $IMAGENET_DIR."""
    line = f"python imagenet_nd.py {TINY} --desired-acc 0.99 --epochs 2 --output-dir {tmp_path}"
    ends_well(line, IMAGENET_DIR=str(folder))
    run = only_run(tmp_path)
    assert 0.99 < max(summary(run)["best_top1"], summary(run)["val_top1"]) < 99
    assert_trained(run, epochs_done=2)


def test_time_limit_ends_with_a_snapshot_in_runs(folder, tmp_path):
    line = f"cd {tmp_path} && python {ROOT}/imagenet_nd.py --train-time 0 --name timed {folder}"
    ends_well(f"{line} {TINY}")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    run = tmp_path / "runs" / "timed"
    assert summary(run)["finished_because"] == "train_time"
    assert summary(run)["epochs_done"] == 0
    snapshot = torch.load(run / "snapshot.pt", weights_only=True)
    assert snapshot["progress"]["step"] >= 1


def test_dummy_needs_no_data(tmp_path):
    (done,) = ends_well(
        f"python imagenet_nd.py --dummy --classes 2 {TINY} -b 2 --output-dir {tmp_path}",
        IMAGENET_DIR="/nowhere",
    )
    found = summary(only_run(tmp_path))
    assert found["finished_because"] == "dummy"
    assert found["images_per_s"] > 0
    told = (
        r"(?s)timing 20 steps of 2 images, after 5 to warm up.*"
        r"first step took [\d.]+ s: done in \d+ s at most.*"
    )
    assert re.search(told + rf"{found['images_per_s']:.1f} images/s", done.out)


@pytest.mark.parametrize(
    "mode",
    ["nd", "ddp_apex", *(pytest.param(m, marks=pytest.mark.long) for m in ("dp", "ddp", "fsdp"))],
)
def test_help_has_groups_and_defaults(mode):
    (done,) = ends_well(f"python imagenet_{mode}.py --help", COLUMNS="200")
    groups = {line for line in done.out.splitlines() if line.endswith(":") and line[0] != " "}
    wanted = {"data:", "model:", "training:", "run:"}
    wanted |= {"processes and nodes:"} if mode not in ("nd", "dp") else set()
    wanted |= {"Apex mixed precision:"} if mode == "ddp_apex" else {"mixed precision:"}
    assert wanted <= groups
    for default in ("128", "resnet18", "90", "0.1", "0.9", "0.0001", "runs"):
        assert f"(default: {default})" in done.out, default
    assert f"imagenet_{mode}.py" in done.out.partition("data:")[0].partition("\n\n")[2]  # examples


# ---- several processes, started by hand


def test_spawn_on_one_node(folder, tmp_path):
    line = f"python imagenet_ddp.py -n 1 -g 2 -nr 0 --epochs 2 {folder}"
    ends_well(f"{line} {TINY} --output-dir {tmp_path}")
    run = only_run(tmp_path)
    assert run.name.endswith("_resnet18_gpux2_b5_cpu0_ddp")
    assert_trained(run, world_size=2, nodes=1, global_batch=10)


def two_nodes(line: str, tmp_path: Path, **env: str) -> list[Result]:
    """Type ``line`` on two "nodes", with {rank} and {port} filled in; node 0 alone writes."""
    port = free_port()
    lines = [
        line.format(rank=rank, port=port) + f" {TINY} --output-dir {tmp_path}/{rank}"
        for rank in (0, 1)
    ]
    results = ends_well(*lines, **env)
    others = [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    assert [path.name for path in others] == (["node1.log"] if "multi_node_train" in line else [])
    assert_trained(only_run(tmp_path / "0"), world_size=2, nodes=2, global_batch=10)
    for result in results:  # nobody sits before a silent terminal
        assert "Epoch 1/1" in result.out
    return results


PLACE = "--master_addr=127.0.0.1 --master_port={port}"


@pytest.mark.parametrize(
    "line",
    [
        "python imagenet_ddp.py -a resnet50 --dist-url tcp://127.0.0.1:{port} --dist-backend nccl"
        # Each node's own idea of when a line is due, 01 and 11 steps: that of node 0 counts.
        " --world-size 2 --rank {rank} -p {rank}1 --desired-acc 0.75",
        *(
            pytest.param(line, marks=pytest.mark.long)
            for line in (
                "MASTER_PORT={port} MASTER_ADDR=127.0.0.1 WORLD_SIZE=2 NODE_RANK={rank} python"
                " imagenet_ddp.py",
                "torchrun --nnodes=2 --node_rank={rank} --nproc_per_node=1 "
                f"{PLACE} imagenet_ddp.py",
                "python -m torch.distributed.launch --nproc_per_node=1 --nnodes=2"
                f" --node_rank={{rank}} {PLACE} imagenet_ddp_apex.py --opt-level O0",
            )
        ),
    ],
    ids=["dist_url", "environment", "torchrun", "launch"],
)
def test_two_nodes(folder, tmp_path, line):
    results = two_nodes(f"{line} {folder}", tmp_path)
    assert summary(only_run(tmp_path / "0"))["comm"] == "fp32", "what nobody asked for"
    notes = [one for one in results[0].out.splitlines() if "gloo" in one]
    assert len(notes) == ("nccl" in line)
    assert all("nccl" in one for one in notes)


def test_launch_module_with_o2(folder, tmp_path):
    """One step in float16, which is slow on the CPU."""
    ends_well(
        f"python -m torch.distributed.launch --nproc_per_node=2 --master_port={free_port()}"
        " imagenet_ddp_apex.py -a resnet50 --b 208 --workers 20 --opt-level O2"
        f" {folder} {TINY} --b 20 --classes 2 --image-size 16 --output-dir {tmp_path}"
    )
    run = only_run(tmp_path)
    assert_trained(run, world_size=2, global_batch=40, mode="apex", val_images=14)
    options = json.loads((run / "options.json").read_text())
    assert options["opt_level"] == "O2"
    weights = torch.load(run / "snapshot.pt", weights_only=True)["model"]
    assert weights["conv1.weight"].dtype == torch.float32


# ---- wrappers for the shell


def test_one_node_wrapper_stops_in_time_and_goes_on(folder, tmp_path):
    environment = f"DATA={folder} SCRIPT=imagenet_ddp.py ARCH=resnet18 NPROC=1"
    rest = f"mine 5 -- --image-size 32 -j 0 --epochs 1 --output-dir {tmp_path}"
    run = tmp_path / "mine"
    ends_well(f"{environment} bash scripts/one_node_train.sh 0 {rest}")
    assert summary(run)["finished_because"] == "train_time"
    (done,) = ends_well(f"{environment} bash scripts/one_node_train.sh 1.5 {rest}")
    assert "resumed from" in done.out
    assert_trained(run, world_size=1, global_batch=5, arch="resnet18", mode="ddp")


def test_multi_node_wrapper(folder, tmp_path):
    two_nodes(
        f"DATA={folder} ARCH=resnet50 NPROC=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={{port}}"
        " bash scripts/multi_node_train.sh 1.5 {rank} 2 mine 8 --",
        tmp_path,
    )
    for rank in "01":
        log = (only_run(tmp_path / rank) / f"node{rank}.log").read_text()
        assert only_run(tmp_path / rank).name == "mine"
        assert "Epoch 1/1" in log
        assert f"imagenet_ddp.py -n 2 -nr {rank} -g 1 -b 8" in log


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("one_node_train.sh", "TRAIN_HOURS SAVE_NAME BATCH_SIZE"),
        ("one_node_train.sh soon mine 5", "soon"),
        ("one_node_train.sh 1 mine many", "many"),
        ("one_node_train.sh 1 mine 5 --epochs 1", "--epochs"),
        ("multi_node_train.sh 1 0 2 mine", "NODE_RANK"),
        ("multi_node_train.sh 1 2 2 mine 5", "2"),
        ("multi_node_train.sh 1 0 2 mine 5", "MASTER_ADDR"),
        ("elastic_train.sh 1 1:2 mine", "MIN:MAX"),
        ("elastic_train.sh 1 2 mine 5", "MIN:MAX is 2"),
        ("elastic_train.sh 1 3:2 mine 5", "3:2"),
        ("elastic_train.sh 1 1:2 mine 5", "MASTER_ADDR"),
    ],
)
def test_wrappers_name_a_wrong_argument(line, named):
    (done,) = shell(f"bash scripts/{line}")
    assert done.code == 2
    assert named in done.sentence
    assert len(done.err.splitlines()) == 1
