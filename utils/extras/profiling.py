"""``--profile``: a trace of a few steps, for Chrome, Perfetto and TensorBoard.

Interface: the optimiser's post-step hook. Without this file, there is no trace.
"""

import logging
import multiprocessing.util
import os
from pathlib import Path

from torch.optim import Optimizer
from torch.profiler import profile, schedule, tensorboard_trace_handler

log = logging.getLogger(__name__)


def start(folder: Path, optimizer: Optimizer) -> None:
    """Begin a trace of steps 5 to 8 of this process, to be written to ``folder``."""
    log.info(f"--profile: steps 5 to 8 will be traced into {folder}")
    # The profiler's library reports its start, and an error on a machine without a GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    steps = schedule(wait=3, warmup=1, active=4, repeat=1)
    write = tensorboard_trace_handler(str(folder), "rank0")
    profiler = profile(schedule=steps, on_trace_ready=write)
    profiler.start()
    optimizer.register_step_post_hook(lambda *_: profiler.step())
    # A shorter training's trace is written at its end: `launch.run_main` ends a process this way.
    multiprocessing.util.Finalize(None, profiler.stop, exitpriority=0)
