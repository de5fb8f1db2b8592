"""Types of what utils uses; protobuf makes these classes at run time."""

from collections.abc import MutableMapping
from typing import Any

from google.protobuf.message import Message

class SessionStartInfo(Message):
    hparams: MutableMapping[str, Any]

class SessionEndInfo(Message):
    status: int

class HParamsPluginData(Message):
    session_start_info: SessionStartInfo
    session_end_info: SessionEndInfo
