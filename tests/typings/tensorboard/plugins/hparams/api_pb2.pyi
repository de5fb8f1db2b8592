"""Types of what utils uses; protobuf makes them at run time."""

STATUS_FAILURE: int
