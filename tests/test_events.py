"""Points that a killed run wrote after its last snapshot are cut off."""

import pytest
from conftest import scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from utils.tensorboard import cut_off


def write(folder, first, last, offset=0.0):
    """A run's events of some epochs: one scalar an epoch, four points of a Step/ curve."""
    with SummaryWriter(str(folder), filename_suffix=f".{first}") as writer:
        for epoch in range(first, last + 1):
            for quarter in range(4):
                x = 1000 * (epoch - 1) + 250 * (quarter + 1)
                writer.add_scalar("Step/loss", x + offset, x)
            writer.add_scalar("Loss/train", epoch + offset, epoch)


@pytest.mark.parametrize(
    ("epoch", "step_x"), [(3, 3000), (3, 3500), (0, 0), (0, 250), (5, 5999), (1, 1750), (6, 6000)]
)
def test_only_later_points_are_removed(tmp_path, epoch, step_x):
    write(tmp_path, 1, 6)
    (path,) = tmp_path.iterdir()
    before = path.read_bytes(), path.stat().st_ino  # of a file that is rewritten, another one
    cut_off(tmp_path, epoch, step_x)
    assert ((path.read_bytes(), path.stat().st_ino) == before) == (epoch == 6)
    expected = {
        "Loss/train": [(e, float(e)) for e in range(1, 7) if e <= epoch],
        "Step/loss": [(x, float(x)) for x in range(250, 6001, 250) if x <= step_x],
    }
    assert scalars(tmp_path) == {tag: points for tag, points in expected.items() if points}


def test_figures_of_the_test_folder_are_written_once(tmp_path):
    """A finished run that is started again evaluates DATA/test again."""
    with SummaryWriter(str(tmp_path)) as writer:
        for tag in ("Top1/val", "Top1/test"):
            writer.add_scalar(tag, 60.0, 2)
            writer.add_scalar(tag, 70.0, 4)
    cut_off(tmp_path, 4, 4000)
    assert scalars(tmp_path) == {"Top1/val": [(2, 60.0), (4, 70.0)], "Top1/test": [(2, 60.0)]}


def test_curves_go_on_after_the_cut(tmp_path):
    write(tmp_path, 1, 5)
    cut_off(tmp_path, 2, 2500)
    write(tmp_path, 3, 4, offset=0.5)
    found = scalars(tmp_path)
    assert sorted(found["Loss/train"]) == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5)]
    steps = [x for x, _ in found["Step/loss"]]
    assert sorted(steps) == sorted([*range(250, 2501, 250), *range(2250, 4001, 250)])


def test_texts_and_times_are_kept(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("options", "lr 0.1", 0)
        for epoch in (1, 2):
            writer.add_scalar("Lr", 0.1, epoch, walltime=1000.0 + epoch)
    cut_off(tmp_path, 1, 1000)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [point.wall_time for point in events.Scalars("Lr")] == [1001.0]
    assert events.Tags()["tensors"] == ["options/text_summary"]
    assert events.file_version == 2.0, "the header is there"


def test_file_cut_short_by_a_crash_is_read_as_far_as_it_goes(tmp_path):
    write(tmp_path, 1, 4)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-10])
    cut_off(tmp_path, 2, 2000)
    assert scalars(tmp_path)["Loss/train"] == [(1, 1.0), (2, 2.0)]
