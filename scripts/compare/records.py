"""What a comparison needs from TensorBoard's event files, by TensorBoard's own reader.

A long run holds a hundred times as many points per step as per epoch, and most of the time goes
into its checksums, which are computed in Python. The loaders above this one (`EventAccumulator`)
take longer still, and keep silent about where a file is cut off or damaged.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EPOCH_TAGS = (
    *("Loss/train", "Loss/val", "Top1/train", "Top1/val", "Top5/train", "Top5/val"),
    *("Throughput/train", "Throughput/val", "Time/train", "Time/val", "Lr"),
)
EMA_TAGS = ("Loss/ema", "Top1/ema", "Top5/ema")  # of the averaged weights, in validation
TEST_TAGS = ("Loss/test", "Top1/test", "Top5/test")  # of the best model, when a run ends
PART_TAGS = ("Time/data", "Time/compute", "Time/communication")  # seconds per step, x = epochs
STEP_TAGS = ("Step/data_s", "Step/compute_s", "Step/communication_s")  # x = 1000 x epoch
FAMILIES = ("IO/", "GPU/", "CPU/", "Memory/")  # and all tags that begin like this
TAGS = frozenset((*EPOCH_TAGS, *EMA_TAGS, *TEST_TAGS, *PART_TAGS, *STEP_TAGS, "Size/train"))
HPARAMS = "_hparams_/"  # the summaries of a run's HParams entry begin like this
FRAME = 16  # bytes around an event in a file: its length (8) and two checksums (4 each)


@dataclass
class Session:
    """One event file: what a training process wrote between its start and its end.

    ``points[tag][x]`` is (wall time, value), the last one written; wall times are seconds since
    1970. ``options`` is the HParams entry. ``fault`` says why the file was not read to its end.
    """

    path: Path
    points: dict[str, dict[int, tuple[float, float]]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    began: float = 0.0
    ended: float = 0.0
    status: str = ""  # "success" or "failure" where the HParams entry was closed
    fault: str = ""

    @property
    def epochs(self) -> list[int]:
        """The x of its epochs' points, sorted."""
        return sorted({x for tag in EPOCH_TAGS for x in self.points.get(tag, ())})


def is_event_file(path: Path) -> bool:
    """Whether ``path`` is named like an event file, or begins with an event."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

    if not path.is_file() or path.suffix == ".tmp":
        return False
    if "tfevents" in path.name:
        return True
    try:
        return next(RawEventFileLoader(str(path)).Load(), None) is not None
    except OSError:
        return False


def read_session(path: Path) -> Session:
    """Read an event file up to its end, or to where it is cut off or damaged."""
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    session, place = Session(path), 0
    try:
        size = path.stat().st_size  # before reading, for the file may be growing
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            place += FRAME + len(record)
            session.began = session.began or event.wall_time
            session.ended = max(session.ended, event.wall_time)
            for value in event.summary.value:
                _take(value, event, session)
    except OSError as fault:
        session.fault = f"cannot be read ({fault.strerror})"
        return session
    except DecodeError:
        pass  # what is not an event is damage, too: the place stays before it
    # The loader ends in silence, whether at the end of the file or where a checksum is wrong.
    if not size:
        session.fault = "is empty"
    elif place < size:
        session.fault = f"is cut off or damaged at byte {place} of {size}; used up to there"
    return session


def _take(value: Any, event: Any, session: Session) -> None:
    tag = value.tag
    if tag in TAGS or tag.startswith(FAMILIES):
        number = _number(value)
        if number is not None:
            session.points.setdefault(tag, {})[event.step] = (event.wall_time, number)
    elif tag.startswith(HPARAMS):
        _take_options(value, session)


def _number(value: Any) -> float | None:
    """A scalar as either generation of writers stores it; None for anything else."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor":
        return None
    from tensorboard.util.tensor_util import make_ndarray  # TensorFlow 2 writes scalars so

    try:
        array = make_ndarray(value.tensor)
        return float(array.item()) if array.dtype.kind in "fiu" else None
    except (TypeError, ValueError):
        return None


def _take_options(value: Any, session: Session) -> None:
    from google.protobuf.message import DecodeError
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    try:
        content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
    except DecodeError:
        return
    if value.tag == metadata.SESSION_END_INFO_TAG:
        session.status = {1: "success", 2: "failure"}.get(content.session_end_info.status, "")
    elif value.tag == metadata.SESSION_START_INFO_TAG:
        for name, item in content.session_start_info.hparams.items():
            kind = item.WhichOneof("kind")
            session.options[name] = getattr(item, kind) if kind else None
