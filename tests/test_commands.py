"""Command lines as people type them; image size, epochs and model made small at their end."""

import json
import re
from pathlib import Path

import joined
import pytest
import torch
from conftest import ROOT, Result, python, shell, summary
from running import free_port

# The last of several equal options counts, so these shrink a line without changing its form.
TINY = "-a shufflenet_v2_x0_5 --image-size 32 -b 5 --workers 0 --epochs 1 --lr 0.01"


def ends_well(*lines: str, **env: str) -> list[Result]:
    """Type the lines into shells, all at once; every one must succeed without a complaint."""
    results = shell(*lines, **env)
    for result in results:
        assert result.code == 0, result.out + result.err
        assert not re.search("Traceback|error", result.err), result.err
    return results


def trained(output: Path, **expected: object) -> Path:
    """The one run in ``output``: an epoch, all 21 validation images, and ``expected``."""
    (run,) = output.iterdir()
    facts = {"epochs_done": 1, "finished_because": "epochs", "val_images": 21} | expected
    assert {key: summary(run)[key] for key in facts} == facts
    assert {path.name for path in run.iterdir()} >= {"snapshot.pt", "best.pt"}
    return run


# ---- one line


def test_one_line(folder, tmp_path):
    """DATA comes from $IMAGENET_DIR, and runs go into "runs"; in other tests both are typed."""
    line = f"cd {tmp_path} && python {ROOT}/imagenet_ddp.py {TINY} -n 1 -g 2 -nr 0"
    ends_well(line, IMAGENET_DIR=str(folder))
    run = trained(tmp_path / "runs", mode="ddp", world_size=2, nodes=1, global_batch=10)
    assert run.name.endswith("gpux2_b5_cpu0_ddp")
    weights = torch.load(run / "snapshot.pt", weights_only=True)["model"]
    assert not any(name.startswith("module.") for name in weights)


@pytest.mark.parametrize(("text", "value"), [("0.75", 75), ("75", 75), ("1", 100)])
def test_an_accuracy_is_a_share_or_per_cent(folder, parse, text, value):
    assert parse("imagenet_nd", "--desired-acc", text, folder)["desired_acc"] == value


def test_dummy_needs_no_data(tmp_path):
    options = ("--dummy", "--classes", 2, *TINY.split(), "-b", 2, "--output-dir", tmp_path)
    done = python("imagenet_nd.py", *options, "--name", "timed", IMAGENET_DIR="/nowhere")
    facts = summary(tmp_path / "timed")
    assert (done.code, facts["finished_because"]) == (0, "dummy")
    assert facts["images_per_s"] > 0
    assert f" {facts['images_per_s']:.1f} images/s" in done.out


@pytest.mark.parametrize("mode", ["nd", "dp", "ddp", "ddp_apex", "fsdp"])
def test_help_has_groups_defaults_and_examples(mode):
    done = joined.command(f"imagenet_{mode}", "--help", COLUMNS="200")
    assert (done.code, done.err) == (0, "")
    expected = ["data:", "model:", "training:", "run:", "(default: resnet18)"]
    expected += [f" imagenet_{mode}.py -a "]  # an example
    expected += ["processes and nodes:"] if mode not in ("nd", "dp") else []
    expected += ["Apex mixed precision:"] if mode == "ddp_apex" else ["mixed precision:"]
    assert not [words for words in expected if words not in done.out]


# ---- several processes


def test_two_nodes(folder, tmp_path):
    """Node 0 alone writes."""
    line = f"python imagenet_ddp.py {TINY} --dist-url tcp://127.0.0.1:{free_port()} {folder}"
    line += " --dist-backend nccl --desired-acc 0.75 --world-size 2 --output-dir "
    # Each node's own idea of when a line is due, 1 and 11 steps: that of node 0 counts.
    more = (f"{tmp_path}/{rank} --rank {rank} -p {rank}1" for rank in (0, 1))
    results = ends_well(*(line + words for words in more))
    assert not [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    run = trained(tmp_path / "0", world_size=2, nodes=2, global_batch=10, comm="fp32")
    assert run.name.endswith("gpux2_b5_cpu0_ddp")
    for result in results:  # nobody sits before a silent terminal
        assert result.out.count("Epoch 1/1 step ") == 12 // 2
    (note,) = [text for text in results[0].out.splitlines() if "gloo" in text]
    assert "nccl" in note
    assert "gloo" not in results[1].out


PLACE = "--node_rank={rank} --nproc_per_node=1 --nnodes=2 --master_addr=127.0.0.1 --master_port="


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("MASTER_PORT={port} MASTER_ADDR=127.0.0.1 WORLD_SIZE=2 NODE_RANK={rank}"
         " python imagenet_ddp.py", {"nodes": 2}),
        (f"torchrun {PLACE}{{port}} imagenet_ddp.py", {"nodes": 2}),
        (f"python -m torch.distributed.launch {PLACE}{{port}} imagenet_ddp_apex.py --opt-level O0",
         {"nodes": 2}),
        ("DATA={data} SCRIPT=imagenet_ddp.py NPROC=1 bash scripts/one_node_train.sh 1.5 mine 8 --",
         {"nodes": 1, "global_batch": 5}),
    ],
    ids=["environment", "torchrun", "launch", "one_node"],
)  # fmt: skip
def test_other_lines(folder, tmp_path, line, expected):
    port, ranks = free_port(), range(expected.get("nodes", 1))
    options = TINY if "{data}" in line else f"{TINY} {folder}"
    typed = (line.format(rank=rank, port=port, data=folder) for rank in ranks)
    ends_well(*(f"{one} {options} --output-dir {tmp_path}/{i}" for i, one in enumerate(typed)))
    trained(tmp_path / "0", **expected)


@pytest.mark.long
def test_launch_module_with_o2(folder, tmp_path):
    """One step in float16, which is slow on the CPU."""
    ends_well(
        f"python -m torch.distributed.launch --nproc_per_node=2 --master_port={free_port()}"
        " imagenet_ddp_apex.py -a resnet18 --b 208 --workers 20 --opt-level O2"
        f" {folder} {TINY} --b 20 --classes 2 --output-dir {tmp_path}"
    )
    run = trained(tmp_path, world_size=2, global_batch=40, mode="apex", val_images=14)
    options = json.loads((run / "options.json").read_text())
    assert options["opt_level"] == "O2"
    weights = torch.load(run / "snapshot.pt", weights_only=True)["model"]
    assert weights["conv1.weight"].dtype == torch.float32
