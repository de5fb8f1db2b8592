"""TensorBoard event files, read record by record: no more of them than a comparison needs.

A long run holds a hundred times as many points per step as per epoch, and TensorBoard's own loader
takes seconds for them. Here a record is decoded only if a wanted tag is in it.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEAD = 12  # bytes before an event: its length (8) and a checksum of that (4); 4 more follow it
EPOCH_TAGS = (
    *("Loss/train", "Loss/val", "Top1/train", "Top1/val", "Top5/train", "Top5/val"),
    *("Throughput/train", "Throughput/val", "Time/train", "Time/val", "Lr"),
)
PART_TAGS = ("Time/data", "Time/compute", "Time/communication")  # seconds of a step, an epoch each
STEP_TAGS = ("Step/data_s", "Step/compute_s", "Step/communication_s")  # x = 1000 x epoch
FAMILIES = ("IO/", "GPU/", "CPU/")  # and all tags that begin like this
HPARAMS_START = "_hparams_/session_start_info"
HPARAMS_END = "_hparams_/session_end_info"


@dataclass
class Session:
    """One event file: what a process that trained has written between its start and its end.

    ``points[tag][x]`` is (wall time, value), the last one written; wall times are seconds since
    1970. ``options`` is the HParams entry. ``fault`` says why the file is not read to its end.
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
    """Whether ``path`` is named like an event file, or begins with a record's checksum."""
    if not path.is_file() or path.suffix == ".tmp":
        return False
    return "tfevents" in path.name or _begins_like_one(path)


def _begins_like_one(path: Path) -> bool:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
    except OSError:
        return False
    return len(head) == HEAD and masked_crc32c(head[:8]) == struct.unpack("<I", head[8:])[0]


def _wanted() -> re.Pattern[bytes]:
    def field_of(tag: str) -> bytes:  # as protocol buffers write a string: 10, length, characters
        return b"\n" + bytes([len(tag)]) + tag.encode()

    whole = (*EPOCH_TAGS, *PART_TAGS, *STEP_TAGS, HPARAMS_START, HPARAMS_END)
    patterns = [re.escape(field_of(tag)) for tag in whole]
    patterns += [rb"\n[\x00-\xff]" + re.escape(family.encode()) for family in FAMILIES]
    return re.compile(b"|".join(patterns), re.DOTALL)


WANTED = _wanted()


def read_session(path: Path) -> Session:
    """Read an event file up to its end, or to where it is cut off or damaged."""
    session = Session(path)
    try:
        data = path.read_bytes()
    except OSError as fault:
        session.fault = f"cannot be read ({fault.strerror})"
        return session
    if not data:
        session.fault = "is empty"
    for wall_time, event in _records(data, session):
        session.began = session.began or wall_time
        session.ended = max(session.ended, wall_time)
        if event is not None:
            for value in event.summary.value:
                _take(value, event, session)
    return session


def _records(data: bytes, session: Session) -> Iterator[tuple[float, Any]]:
    """Yield each record's wall time, and its event if a wanted tag may be in it."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    start = 0
    while start < len(data):
        length = struct.unpack_from("<Q", data, start)[0] if start + 8 <= len(data) else 0
        end = start + HEAD + length
        sound, event = length > 0 and end + 4 <= len(data), None
        if sound and WANTED.search(data, start + HEAD, end):
            record = data[start + HEAD : end]
            sound = masked_crc32c(record) == struct.unpack_from("<I", data, end)[0]
            try:
                event = Event.FromString(record) if sound else None
            except DecodeError:
                sound = False
        if not sound:
            session.fault = (
                f"is cut off or damaged at byte {start} of {len(data)}; used up to there"
            )
            return
        if event is not None:
            yield event.wall_time, event
        elif length > 9 and data[start + HEAD] == 9:  # an event begins with its wall time
            yield struct.unpack_from("<d", data, start + HEAD + 1)[0], None
        start = end + 4


def _take(value: Any, event: Any, session: Session) -> None:
    tag = value.tag
    if tag in (HPARAMS_START, HPARAMS_END):
        _take_options(value, session)
    elif tag in (*EPOCH_TAGS, *PART_TAGS, *STEP_TAGS) or tag.startswith(FAMILIES):
        number = _number(value)
        if number is not None:
            session.points.setdefault(tag, {})[event.step] = (event.wall_time, number)


def _number(value: Any) -> float | None:
    """A scalar as either generation of writers puts it down; None for anything else."""
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
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    try:
        content = HParamsPluginData.FromString(value.metadata.plugin_data.content)
    except DecodeError:
        return
    if value.tag == HPARAMS_END:
        session.status = {1: "success", 2: "failure"}.get(content.session_end_info.status, "")
        return
    for name, item in content.session_start_info.hparams.items():
        kind = item.WhichOneof("kind")
        session.options[name] = getattr(item, kind) if kind else None
