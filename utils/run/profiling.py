"""``--profile``: trace a few steps, for Chrome, Perfetto and TensorBoard.

Interface: a post-step hook of the optimiser.
"""

import logging
import multiprocessing.util
import os
from pathlib import Path

from torch.optim import Optimizer
from torch.profiler import profile, schedule, tensorboard_trace_handler

log = logging.getLogger(__name__)


def start(folder: Path, optimizer: Optimizer) -> None:
    """Trace steps 5 to 8 of this process and write the trace to ``folder``."""
    log.info(f"--profile: steps 5 to 8 will be traced into {folder}")
    # Silence Kineto: it logs its start, and an error on machines without a GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    steps = schedule(wait=3, warmup=1, active=4, repeat=1)
    write = tensorboard_trace_handler(str(folder), "rank0")
    profiler = profile(schedule=steps, on_trace_ready=write)
    profiler.start()
    optimizer.register_step_post_hook(lambda *_: profiler.step())
    # If training is shorter, write the trace when it ends: `launch.run_main` calls finalizers.
    multiprocessing.util.Finalize(None, profiler.stop, exitpriority=0)
