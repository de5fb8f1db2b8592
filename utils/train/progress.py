"""The lines that are printed while an epoch trains, and the curves per step."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

from utils.metrics import Sums, Total, to_metrics
from utils.train.session import Session
from utils.train.step_time import StepTimes
from utils.train.stopping import Reason


@dataclass
class _Line:
    """A line that is due: what is known when its step has been started.

    ``at`` is a mark of the step timer's clock, ``step`` one of the epoch, ``waited`` the seconds
    spent waiting for data. ``total`` is kept until the ranks have surely added it up.
    """

    at: Any
    step: int
    waited: float = 0.0
    total: Total | None = None
    times: StepTimes = field(default_factory=StepTimes)  # of the steps since the last line


class Lines:
    """An epoch's printed lines; each shows what has come since the last one.

    On a GPU a line is printed some steps later than it is due, when its numbers have come to the
    host: no step waits for the device.
    """

    def __init__(self, session: Session):
        self.session, self.clock = session, session.watch.timer.clock
        self.last = _Line(self.clock.mark(), session.state.step)
        self.due: _Line | None = None
        self.shown = time.perf_counter(), session.state.step

    def after_step(self, sums: Sums) -> None:
        """To be called after every step, in all ranks: some of them add up what a line shows."""
        session = self.session
        step, steps = session.state.step, session.train.sampler.steps_per_epoch
        if step % session.print_freq == 0 or step == steps:
            self.flush()  # of an older line, if its numbers are that late
            times, now = session.watch.timer.recent(), time.perf_counter()
            rate = (step - self.shown[1]) * session.global_batch / (now - self.shown[0])
            status = {"steps": steps, "images_per_s": rate}
            if times.steps:  # in synchronous training, a process's own parts tell which is slow
                status["data_seconds"] = times.data / times.steps
                status["compute_seconds"] = times.own / times.steps
            session.status.show("training", **status)
            self.shown = now, step
            at = self.clock.mark()  # before the sums: the device has passed it when they have come
            total = sums.begin_total(session.world)
            self.due = _Line(at, step, session.train.waited, total, times)
        if self.due is not None and (step == steps or self.due.total.ready()):
            self.flush()

    def flush(self) -> None:
        """Print the line that is due, if there is one. Waits for its numbers."""
        if self.due is None:
            return
        line, last = self.due, self.last
        self.due, self.last = None, self.due
        if self.session.run.console.shows or self.session.world.is_main:
            self._show(line, last)

    def _show(self, line: _Line, last: _Line) -> None:
        """Print a line and draw the per-step curves, both of the steps since the ``last`` line.

        Loss and accuracy are those of all ranks (only processes that print wait for the total), and
        after a resume they include the steps before it; speed and waiting are this process's own,
        since the resume. A loss that is not finite ends the run.
        """
        session, state = self.session, self.session.state
        sums = line.total.read()
        if not math.isfinite(sums[0]):
            session.stop.ask(Reason.DIVERGED)
        before, state.printed = state.printed or [0.0] * len(sums), sums
        metrics = to_metrics([b - a for a, b in zip(before, sums, strict=True)])
        seconds, steps = self.clock.seconds(last.at, line.at), line.step - last.step
        of_epoch = session.train.sampler.steps_per_epoch
        rate = steps * session.global_batch / seconds
        curves = {"Step/loss": metrics.loss, "Step/throughput": rate}
        curves |= line.times.per_step("Step/", "_s")
        session.run.scalars(curves, round(1000 * (state.epoch + line.step / of_epoch)))
        place = f"Epoch {state.epoch + 1}/{session.args.epochs}"
        place += f" step {line.step:{len(str(of_epoch))}}/{of_epoch}"
        values = {
            "loss": metrics.loss,
            "top-1": metrics.top1,
            "top-5": metrics.top5,
            "images/s": rate,
            "s/step": seconds / steps,
            "waiting %": 100 * (line.waited - last.waited) / seconds,
        }
        session.run.step(place, line.step, values)
