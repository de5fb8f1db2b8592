"""Why several processes are not as much faster: a line after the first epoch, from measured times.

Either one rank is late and all others wait for it, or the gradients take longer to travel than
backward can hide. If nothing is wrong, there is no line.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from utils.session import Training
from utils.start.world import World

LIMIT = 0.1  # fraction of a step that is worth a line
LATE = 1.25  # a rank that computes so many times as long as the median rank is a straggler
MOST = 64 * 2**20  # bytes of the exchange that measures the link
# Bytes that a method of --comm sends, as a fraction of float32's.
SENT = {"fp32": 1.0, "fp16": 0.5, "bf16": 0.5, "int8": 0.254, "int4": 0.133}


@dataclass(frozen=True)
class Exchange:
    """The gradients of a step, and the ``seconds`` that they travel."""

    mb: float  # before --comm; opt levels O2 and O3 have most of them in float16
    seconds: float  # alone, without computation beside it
    comm: str | None = "fp32"  # the method that the step uses; None: the script has no --comm

    @property
    def gbit(self) -> float:
        """Gradients per time, Gbit/s. A ring of N processes sends 2 (N - 1) / N times as much."""
        return 8 * self.mb * SENT[self.comm or "fp32"] / 1000 / self.seconds


def time_exchange(session: Training) -> Exchange:
    """Time an all-reduce of the gradients' size without computation. All processes must call it."""
    weights = [weight for weight in session.state.model.parameters() if weight.requires_grad]
    total = sum(weight.nbytes for weight in weights)
    buffer = torch.zeros(min(total, MOST) // 4 or 1, device=session.world.device)
    took = [_seconds(buffer, session.world) for _ in range(3)]
    comm = session.args.comm
    seconds = median(took) * total / buffer.nbytes * SENT[comm or "fp32"]
    return Exchange(total / 1e6, seconds, comm)


def _seconds(buffer: torch.Tensor, world: World) -> float:
    """Seconds of one all-reduce; the value is the same on all ranks up to their clocks."""
    dist.barrier(group=world.control)
    began = time.perf_counter()
    dist.all_reduce(buffer)
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return time.perf_counter() - began


def explain(times: Sequence[dict[str, float]], exchange: Exchange) -> str | None:
    """The reason for a slow step, with numbers, and what helps; None if nothing is wrong.

    ``times``: for each rank the mean seconds of the parts of its steps, see
    `utils.monitor.StepTimer`: "data", "compute", "communication", and "own", the part of compute
    until its own gradients are ready.
    """
    parts = ("data", "compute", "communication")
    step = median(sum(one[part] for part in parts) for one in times)
    for part, doing in (("data", "waits for its images"), ("own", "computes")):
        seconds = [one.get(part, 0.0) for one in times]
        usual, most = median(seconds), max(seconds)
        late = most - usual > LIMIT * step and (part == "data" or most > LATE * usual)
        if late:
            helps = "see its disk and --workers" if part == "data" else "see what else runs there"
            return (
                f"rank {seconds.index(most)} {doing} for {most:.3g} of the {step:.3g} s of a step, "
                f"the median rank {usual:.3g} s, and all ranks wait for it: {helps}"
            )
    exposed = median(one["communication"] for one in times)
    if exposed <= LIMIT * step:
        return None
    size = f"gradients of {exchange.mb:.3g} MB per step"
    how = "" if exchange.comm in ("fp32", None) else f", sent as {exchange.comm},"
    text = (
        f"{size}{how} take {exchange.seconds:.3g} s at {exchange.gbit:.3g} Gbit/s; computation "
        f"hides a part, but {exposed:.3g} of the {step:.3g} s of a step remain"
    )
    helps = ["more images per step (-b, --accum-steps or --global-batch): fewer exchanges"]
    if exchange.comm == "fp32":
        saved = min(exposed, exchange.seconds * (1 - SENT["fp16"]))
        helps.insert(0, f"--comm fp16, which saves about {saved:.2g} s per step")
    return f"{text}. What helps: {', '.join(helps)}"
