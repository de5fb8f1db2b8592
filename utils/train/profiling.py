"""``--profile``: a trace of a few training steps, for chrome://tracing, Perfetto or TensorBoard."""

import logging
import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

log = logging.getLogger(__name__)

SKIPPED, WARM_UP, ACTIVE = 3, 1, 4  # steps
TRACE = "rank0.pt.trace.json"  # TensorBoard's profiler plugin looks for this ending


class Profiler:
    """Records steps 5 to 8 of this process into ``folder``; `step` is called after each."""

    def __init__(self, folder: Path):
        self.path, self.done = folder / TRACE, False
        # The profiler's library calls a machine without a GPU an error, and its start news.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(
            activities=activities,
            schedule=schedule(wait=SKIPPED, warmup=WARM_UP, active=ACTIVE, repeat=1),
            on_trace_ready=self._write,
        )
        self.steps = 0
        self.profile.start()

    def step(self) -> None:
        """A step has ended."""
        if not self.done:
            self.steps += 1
            self.profile.step()
            if self.done:
                self.profile.stop()

    def close(self) -> None:
        """The run has ended; a trace that has begun is written."""
        if self.done:
            return
        self.profile.stop()
        if not self.done:
            log.info(f"--profile: no trace, as it needs more than {SKIPPED + WARM_UP} steps")
            self.done = True

    def _write(self, done: profile) -> None:
        done.export_chrome_trace(str(self.path))
        self.done = True
        log.info(f"trace of {self.steps - SKIPPED - WARM_UP} steps: {self.path}")
