"""Types of what utils uses; protobuf makes these classes at run time."""

from google.protobuf.message import Message
from tensorboard.compat.proto.summary_pb2 import Summary

class Event(Message):
    wall_time: float
    step: int
    summary: Summary
    def __init__(
        self,
        *,
        wall_time: float = ...,
        step: int = ...,
        summary: Summary = ...,
        file_version: str = ...,
    ) -> None: ...
