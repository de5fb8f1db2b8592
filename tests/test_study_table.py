"""The log book's table and what it says about the curve, from runs whose figures are known."""

import json
from pathlib import Path

import event_files
import pytest
from compare.runs import Run
from forecast import buckets, scaling
from forecast.scaling import Cluster, Workload
from study import curve, outcome, page, published
from study.outcome import Outcome, columns, spread
from study.page import Study
from study.state import State

# A published experiment: VGG19, 20 classes, 2 hours on 1, 2, 4 and 8 g4dn.2xlarge.
PUBLISHED = """
| Learning Rate (e-4) | 1.00 | 1.41 | 2.00 | 2.83 |
| Global Batch Size | 32 | 64 | 128 | 256 |
| Steps Per Epoch | 650 | 375 | 163 | 82 |
| Avg Epoch Time (min) | 8.76 | 5.40 | 3.35 | 2.37 |
| Epoch Num @ 2 hr | 14 | 23 | 36 | 54 |
| Scaling Efficiency | 1.00 | 0.81 | 0.65 | 0.46 |
| Best Validation Loss | 0.3795 | 0.3646 | 0.3558 | 0.3522 |
| Test Loss | 0.4485 | 0.4351 | 0.4286 | 0.4287 |
| Top1 Test Accuracy | 86.90% | 87.30% | 87.50% | 87.50% |
""".strip().splitlines()
NUMBERS = [[cell.strip(" %") for cell in row.split("|")[2:-1]] for row in PUBLISHED]


def published_run(place: int, seed: int | None = None, more_loss: float = 0.0) -> Outcome:
    """The run of a column, with what its cells say; the epochs after 2 hours were trained too."""
    lr, batch, steps, minutes, epochs, _, loss, test_loss, top1 = (
        float(row[place]) for row in NUMBERS
    )
    nodes, last = 2**place, int(epochs) + 2
    run = Run(Path(f"runs/{nodes}"), label=f"{nodes}", epoch_seconds=60 * minutes)
    run.facts = {"gpus": nodes, "global_batch": batch, "steps_per_epoch": int(steps)}
    run.hours = {x: 2.0 * x / epochs for x in range(1, last + 1)}
    run.scalars = {
        "Lr": {1: lr * 1e-4 * 0.999, 2: lr * 1e-4, last: 1e-6},
        "Loss/val": {1: 2.0, 5: loss + more_loss, last: 0.5},
        "Loss/test": {last: test_loss},
        "Top1/test": {last: top1},
    }
    return Outcome(f"{nodes}", run.path, nodes, "", seed, run, {"finished_because": "train_time"})


def test_the_published_table_column_for_column():
    (found,) = columns([published_run(place) for place in range(4)]).values()
    lines = published.as_markdown(found, 2.0).splitlines()
    assert lines[0] == "|  | 1 Node | 2 Nodes | 4 Nodes | 8 Nodes |"
    assert lines[2:] == PUBLISHED


def test_repeats_have_a_mean_and_a_spread():
    """What a run has not recorded is "-"; an arm that has not begun has a column."""
    ours = [published_run(0, seed, more) for seed, more in ((0, 0.0), (1, 0.02))]
    ours += [Outcome("2", Path("none"), 2, "", seed, None, {}) for seed in (0, 1)]
    for one in ours[:2]:
        one.run.scalars.pop("Loss/test")
    (found,) = columns(ours).values()
    rows = {title: cells for title, *cells in published.rows(found, 2.0)}
    assert rows[""] == ["1 Node", "2 Nodes"]
    assert rows["Best Validation Loss"] == ["0.3895 ± 0.0141", "-"]
    assert rows["Test Loss"] == ["-", "-"]
    assert rows["Global Batch Size"] == ["32", "-"]
    assert spread([], str) == "-"


BATCH, GBIT = 32, 5.0


def trained(folder: Path, nodes: int, parts: dict[str, float] | None = None) -> Outcome:
    """A ResNet-50 run on nodes of one T4-like GPU, as fast as the model says for 5 Gbit/s."""
    work = Workload(BATCH, 200.0, buckets.of("resnet50", 1000))
    cluster = Cluster(1, network_gbit=GBIT, protocol=1.0)
    step = scaling.forecast(work, cluster, nodes)
    place = folder / str(nodes)
    place.mkdir()
    summary = {
        "arch": "resnet50", "classes": 1000, "world_size": nodes, "nodes": nodes, "comm": "fp32",
        "global_batch": BATCH * nodes, "images_per_s": step.images_per_s, "data_s": 0.001,
        "compute_s": step.compute_s, "finished_because": "epochs",
        "communication_s": step.step_s - step.compute_s, **(parts or {}),
    }  # fmt: skip
    (place / "summary.json").write_text(json.dumps(summary))
    (place / "options.json").write_text(json.dumps({"comm": "fp32"}))
    return Outcome(str(nodes), place, nodes, "", None, None, summary)


def test_two_arms_forecast_the_others(tmp_path):
    arms = [trained(tmp_path, nodes) for nodes in (1, 2)]
    assert curve.fit(arms[:1], (1, 2, 4), weak=True) is None
    found = curve.fit(arms, (1, 2, 4, 8), weak=True)
    assert [point.nodes for point in found.points] == [1, 2, 4, 8]
    assert [point.measured is not None for point in found.points] == [True, True, False, False]
    assert found.network == "if the network alone is to blame, it gives 5 Gbit/s"
    later = curve.fit([*arms, trained(tmp_path, 4)], (1, 2, 4, 8), weak=True)
    assert later.points[2].measured == pytest.approx(found.points[2].forecast, rel=1e-3)
    assert not later.points[2].fitted


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "mostly network"),
        ({"data_s": 0.5}, "mostly input"),
        ({"compute_s": 0.9}, "mostly slower nodes"),
        ({"communication_s": 0.0}, "Nothing holds 2 nodes back"),
        ({"data_s": None}, "is not known"),
    ],
)
def test_the_sentence_about_what_holds_back(tmp_path, parts, words):
    found = curve.fit([trained(tmp_path, 1), trained(tmp_path, 2, parts)], (1, 2), weak=True)
    assert words in found.sentences[1]
    assert found.sentences[0].startswith("Node 3 would bring about ")
    if parts == {}:
        assert "most likely to help: --comm auto" in found.sentences[1]


def test_a_page_of_runs_from_elsewhere(tmp_path, monkeypatch):
    """Those of an older suite, known by their folders' names and event files alone."""
    for gpus, seconds in ((2, 120.0), (4, 72.0)):
        epochs = event_files.epochs_of(event_files.HAL[gpus], 208 * gpus)
        event_files.write(
            tmp_path / "runs" / event_files.folder_name(gpus), epochs, seconds=seconds
        )
    monkeypatch.setattr(page.pictures, "draw", lambda *_: ([], []))  # test_study.py draws
    kept = State(tmp_path / "b/old")
    kept.folder.mkdir(parents=True)
    page.write(tmp_path / "b", Study("old", "typed"), outcome.of_runs([tmp_path / "runs"]), kept)
    text = (tmp_path / "b/old.md").read_text()
    assert "2 runs; brought up to date" in text
    assert "|  | 2 GPUs | 4 GPUs |" in text
    assert "| Global Batch Size | 416 | 832 |" in text
    assert "| Scaling Efficiency | 1.00 | 0.83 |" in text
    assert "| Top1 Test Accuracy | - | - |" in text
    index = (tmp_path / "b/README.md").read_text()
    assert "| [old](old.md) | resnet50 | 2 GPUs, 4 GPUs | 2 runs | 75.00 % |" in index
