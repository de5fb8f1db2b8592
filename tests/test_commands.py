"""Command lines as people type them; image size, epochs and model made small at their end."""

import json
import re
import shutil
from pathlib import Path

import joined
import pytest
import torch
from conftest import ROOT, Result, python, shell, summary

from utils.launch.network import free_port

# The last of several equal options counts, so these shrink a line without changing its form.
TINY = "-a resnet18 --image-size 32 -b 5 --workers 0 --epochs 1 --lr 0.01"
LONG = pytest.mark.long


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


# ---- one line


@pytest.mark.parametrize(
    ("line", "name", "wanted"),
    [
        ("imagenet_dp.py -a resnet50", "gpux1_b5_cpu0_dp", {"mode": "dp", "arch": "resnet50"}),
        (
            "imagenet_ddp.py -n 1 -g 2 -nr 0",
            "gpux2_b5_cpu0_ddp",
            {"mode": "ddp", "world_size": 2, "nodes": 1, "global_batch": 10},
        ),
        pytest.param(
            # AlexNet needs larger images.
            "imagenet_nd.py -a alexnet --lr 0.01 --image-size 64",
            "gpux1_b5_cpu0_nd",
            {"mode": "nd", "arch": "alexnet"},
            marks=LONG,
        ),
    ],
    ids=["dp", "ddp", "alexnet"],
)
def test_one_line(folder, tmp_path, line, name, wanted):
    """DATA comes from $IMAGENET_DIR, and runs go into "runs"; in other tests both are typed."""
    script, _, options = line.partition(" ")
    ends_well(f"cd {tmp_path} && python {ROOT}/{script} {TINY} {options}", IMAGENET_DIR=str(folder))
    run = only_run(only_run(tmp_path))
    assert run.parent.name == "runs"
    assert run.name.endswith(name)
    assert_trained(run, **wanted)
    weights = torch.load(run / "snapshot.pt", weights_only=True)["model"]
    assert not any(name.startswith("module.") for name in weights)
    shutil.rmtree(tmp_path)  # AlexNet's snapshot takes 0.7 GB


@pytest.mark.parametrize(
    ("text", "value"), [("0.75", 75), ("75", 75), ("0.01", 1), ("1", 100), ("1.5", 1.5)]
)
def test_an_accuracy_is_a_share_or_per_cent(folder, parse, text, value):
    assert parse("imagenet_nd", "--desired-acc", text, folder)["desired_acc"] == value


def test_dummy_needs_no_data(tmp_path):
    options = ("--dummy", "--classes", 2, *TINY.split(), "-b", 2, "--output-dir", tmp_path)
    done = python("imagenet_nd.py", *options, IMAGENET_DIR="/nowhere")
    found = summary(only_run(tmp_path))
    assert (done.code, found["finished_because"]) == (0, "dummy")
    assert found["images_per_s"] > 0
    told = (
        r"(?s)timing 20 steps of 2 images, after 5 to warm up.*"
        r"first step took [\d.]+ s: done in \d+ s at most.*"
    )
    assert re.search(told + rf"{found['images_per_s']:.1f} images/s", done.out)


@pytest.mark.parametrize("mode", ["nd", "dp", "ddp", "ddp_apex", "fsdp"])
def test_help_has_groups_and_defaults(mode):
    done = joined.command(f"imagenet_{mode}", "--help", COLUMNS="200")
    assert (done.code, done.err) == (0, "")
    groups = {line for line in done.out.splitlines() if line.endswith(":") and line[0] != " "}
    wanted = {"data:", "model:", "training:", "run:"}
    wanted |= {"processes and nodes:"} if mode not in ("nd", "dp") else set()
    wanted |= {"Apex mixed precision:"} if mode == "ddp_apex" else {"mixed precision:"}
    assert wanted <= groups
    for default in ("128", "resnet18", "90", "0.1", "0.9", "0.0001", "runs"):
        assert f"(default: {default})" in done.out, default
    assert f"imagenet_{mode}.py" in done.out.partition("data:")[0].partition("\n\n")[2]  # examples


# ---- a line on each of two nodes

PLACE = "--master_addr=127.0.0.1 --master_port={port}"
WRAPPER = (
    "ARCH=resnet50 NPROC=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    " bash scripts/multi_node_train.sh 1.5 {rank} 2 mine 8 --"
)


@pytest.mark.parametrize(
    "line",
    [
        "python imagenet_ddp.py -a resnet50 --dist-url tcp://127.0.0.1:{port} --dist-backend nccl"
        # Each node's own idea of when a line is due, 01 and 11 steps: that of node 0 counts.
        " --world-size 2 --rank {rank} -p {rank}1 --desired-acc 0.75",
        WRAPPER,
        *(
            pytest.param(line, marks=LONG)
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
    ids=["dist_url", "wrapper", "environment", "torchrun", "launch"],
)
def test_two_nodes(folder, tmp_path, line):
    """Node 0 alone writes, but for the log of its wrapper."""
    port = free_port()
    results = ends_well(
        *(
            line.format(rank=rank, port=port) + f" {folder} {TINY} --output-dir {tmp_path}/{rank}"
            for rank in (0, 1)
        )
    )
    others = [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    assert [path.name for path in others] == (["node1.log"] if line == WRAPPER else [])
    run = only_run(tmp_path / "0")
    comm = None if "apex" in line else "fp32"  # an option of imagenet_ddp.py
    assert_trained(run, world_size=2, nodes=2, global_batch=10, comm=comm)
    for result in results:  # nobody sits before a silent terminal
        assert "Epoch 1/1" in result.out
    notes = [one for one in results[0].out.splitlines() if "gloo" in one]
    assert len(notes) == ("nccl" in line)
    assert all("nccl" in one for one in notes)
    if line == WRAPPER:
        assert run.name == "mine"
        for rank, log in enumerate((run / "node0.log", *others)):
            assert "Epoch 1/1" in log.read_text()
            assert f"imagenet_ddp.py -n 2 -nr {rank} -g 1 -b 8" in log.read_text()


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
    done.fails_with(named)
