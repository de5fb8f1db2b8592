"""Points that a killed run wrote after its last snapshot are cut off."""

import pytest
from conftest import scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from utils.tensorboard import cut_off


@pytest.fixture
def written(tmp_path):
    """The event file of six epochs: a text, a scalar an epoch, four points of a Step/ curve, the
    figures of DATA/test, once in the middle."""
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("options", "lr 0.1", 0)
        writer.add_scalar("Top1/test", 60.0, 2)
        for x in range(250, 6001, 250):
            writer.add_scalar("Step/loss", x, x)
        for epoch in range(1, 7):
            writer.add_scalar("Loss/train", epoch, epoch, walltime=1000.0 + epoch)
    (path,) = tmp_path.iterdir()
    return path


@pytest.mark.parametrize(("epoch", "step_x"), [(3, 3500), (2, 2000), (6, 6000)])
def test_only_later_points_are_removed(written, epoch, step_x):
    """The figures of DATA/test are written again by a finished run that is started again."""
    before = written.read_bytes(), written.stat().st_ino  # of a file that is rewritten, another one
    cut_off(written.parent, epoch, step_x)
    assert ((written.read_bytes(), written.stat().st_ino) == before) == (epoch == 6)
    expected = {
        "Loss/train": [(e, float(e)) for e in range(1, 7) if e <= epoch],
        "Step/loss": [(x, float(x)) for x in range(250, 6001, 250) if x <= step_x],
        "Top1/test": [(2, 60.0)] if epoch > 2 else [],
    }
    found = scalars(written.parent)
    assert {tag: found.get(tag, []) for tag in expected} == expected
    events = EventAccumulator(str(written.parent)).Reload()
    assert events.Tags()["tensors"] == ["options/text_summary"]
    assert events.file_version == 2.0, "the header is there"
    times = [point.wall_time for point in events.Scalars("Loss/train")]
    assert times == [1000.0 + e for e in range(1, epoch + 1)]


def test_file_cut_short_by_a_crash_is_read_as_far_as_it_goes(written):
    written.write_bytes(written.read_bytes()[:-10])
    cut_off(written.parent, 3, 3000)
    assert scalars(written.parent)["Loss/train"] == [(1, 1.0), (2, 2.0), (3, 3.0)]
