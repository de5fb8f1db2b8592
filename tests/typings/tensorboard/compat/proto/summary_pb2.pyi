"""Types of what utils uses; protobuf makes these classes at run time."""

from collections.abc import Iterable, MutableSequence

from google.protobuf.message import Message

class SummaryMetadata(Message):
    class PluginData(Message):
        content: bytes

    plugin_data: PluginData

class Summary(Message):
    class Image(Message):
        def __init__(
            self, *, width: int, height: int, colorspace: int, encoded_image_string: bytes
        ) -> None: ...

    class Value(Message):
        tag: str
        metadata: SummaryMetadata
        def __init__(
            self, *, tag: str, simple_value: float = ..., image: Summary.Image = ...
        ) -> None: ...

    value: MutableSequence[Value]
    def __init__(self, *, value: Iterable[Value] = ...) -> None: ...
