"""What compare_runs.py and TensorBoard find in the event files of this suite's own trainings."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
from conftest import summary, train
from event_files import epochs_of, note, table
from running import eventually
from tensorboard import program

STATUSES = ["STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING", "STATUS_UNKNOWN"]


@pytest.fixture(scope="module")
def ours(folder, tmp_path_factory) -> Path:
    """A run that was resumed on two processes after an epoch on one."""
    root = tmp_path_factory.mktemp("ours")
    options = ("-p", "2", "--lr", "0.01", "--output-dir", root, "--name", "one")
    train("imagenet_nd.py", "-b", "12", "--epochs", "1", *options, folder)
    more = ("-b", "6", "--epochs", "2", "--resume", "auto")
    train("imagenet_ddp.py", *more, *options, folder, processes=2)
    return root


def test_all_is_in_the_event_files(ours, tmp_path):
    for file in (ours / "one").glob("*tfevents*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    cells, notes, both = table(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2, "one per session"
    expected = {
        "nodes": "1", "gpus": "2", "arch": "resnet18", "mode": "ddp", "lr": "0.01",
        "batch_per_gpu": "6", "global_batch": "12", "steps_per_epoch": "5", "epochs": "2",
        "state": "finished",
        # 11,178,051 weights in float32, and 9,620 values of batch norm; the same again in 44.7 MB
        # of gradients, of which each of two processes sends a half twice.
        "parameters_mb": "42.68", "optimizer_mb": "42.64", "sent_mb_per_step": "44.71",
    }  # fmt: skip
    assert {key: cells[key] for key in expected} == {key: [s] for key, s in expected.items()}
    (run,) = both.runs
    facts = summary(ours / "one")
    assert run.best("Top1/val") == (pytest.approx(facts["best_top1"]), facts["best_epoch"])
    note(notes, "resumed on another number of GPUs \\(1, 2\\)")
    assert "60 images in 3 classes" in run.facts["data_id"]
    assert all(run.facts.get(key) for key in ("torch", "cpu", "date", "commit", "command"))


def test_tensorboard_shows_one_line_per_run_and_the_layout(ours):
    """Asked of a real TensorBoard on the runs."""
    server = program.TensorBoard()
    server.configure(logdir=str(ours), host="127.0.0.1", port=0)
    url = server.launch()

    def ask(path: str, body: dict | None = None) -> dict:
        data, headers = body and json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}data/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def is_ready() -> bool:
        try:
            return "one" in ask("runs") and bool(ask("plugin/custom_scalars/layout"))
        except OSError:
            return False

    assert eventually(is_ready, 120)
    body = {"allowedStatuses": STATUSES, "colParams": [], "startIndex": 0, "sliceSize": 9}
    (group,) = ask("plugin/hparams/session_groups", body)["sessionGroups"]
    (session,) = group["sessions"]
    found = group["name"], session["name"], session["status"], group["hparams"]["arch"]
    assert found == ("one", "one", "STATUS_SUCCESS", "resnet18")
    metrics = {metric["name"]["tag"]: metric["trainingStep"] for metric in group["metricValues"]}
    assert metrics["Top1/val"] == metrics["Throughput/train"] == 2

    layout = ask("plugin/custom_scalars/layout")
    charts = [chart for category in layout["category"] for chart in category["chart"]]
    titles = [chart["title"] for chart in charts]
    assert len(titles) == len(set(titles)), "the layout is there once, of two sessions"
    patterns = [pattern for chart in charts for pattern in chart["multiline"]["tag"]]
    tags = list(ask("plugin/scalars/tags")["one"])
    shown = {tag for pattern in patterns for tag in tags if re.search(pattern, tag)}
    assert {tag for tag in epochs_of(1, 1)[1] if tag.endswith("/train")} <= shown
    assert {"Top1/val", "Top5/val", "Loss/val", "Lr", "IO/wait_share"} <= shown
