"""Printed lines wait for no step: they are printed when their numbers have come."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from utils.launch.world import World
from utils.metrics import Sums
from utils.train import epoch
from utils.train.epoch import Lines

CPU = torch.device("cpu")


class Late:
    """A device's clock, and the event of a copy to the host that was asked for ``now``."""

    def __init__(self):
        self.now = self.done = 0

    def mark(self):
        return self.now

    def seconds(self, begin, end):
        return float(end - begin)

    def event(self):
        asked = self.now
        return SimpleNamespace(query=lambda: self.done >= asked, synchronize=lambda: None)


class LateSums(Sums):
    """On the CPU, but their totals come as late as those of a GPU."""

    clock: Late

    def begin_total(self, world):
        total = super().begin_total(world)
        total.event = self.clock.event()
        return total


@pytest.fixture(autouse=True)
def no_status_file(monkeypatch):
    monkeypatch.setattr(epoch, "show_status", lambda *_, **__: None)


def session(clock, printed, steps):
    noted = lambda place, step, values: printed.append((step, values))  # noqa: E731
    return SimpleNamespace(
        world=World(CPU),
        watch=SimpleNamespace(timer=SimpleNamespace(clock=clock, recent=Counter)),
        state=SimpleNamespace(step=0, epoch=0, printed=None),
        train=SimpleNamespace(sampler=SimpleNamespace(steps_per_epoch=steps), waited=0.0),
        run=SimpleNamespace(
            console=SimpleNamespace(shows=True), scalars=lambda *_: None, step=noted
        ),
        stop=SimpleNamespace(ask=lambda _: None),
        args=SimpleNamespace(epochs=1),
        print_freq=2,
        global_batch=4,
    )


def steps_of(lag, steps, loss=1.0):
    """What has been printed after each of ``steps``, on a device that is ``lag`` steps behind."""
    clock, printed, after = Late(), [], []
    run = session(clock, printed, steps)
    lines, sums = Lines(run), LateSums(CPU)
    sums.clock = clock
    for step in range(1, steps + 1):
        clock.now, clock.done, run.state.step = step, step - lag, step
        logits = torch.eye(4)
        sums.add(torch.tensor(4 * loss * step), logits, torch.arange(4))
        lines.after_step(sums)
        after.append([one for one, _ in printed])
    return after, printed


def test_a_line_is_printed_when_the_device_has_come_so_far():
    assert steps_of(lag=0, steps=5)[0] == [[], [2], [2], [2, 4], [2, 4, 5]]
    assert steps_of(lag=1, steps=5)[0] == [[], [], [2], [2], [2, 4, 5]]
    assert steps_of(lag=9, steps=5)[0] == [[], [], [], [2], [2, 4, 5]]


def test_a_late_line_shows_the_steps_up_to_its_own():
    at_once, late = steps_of(lag=0, steps=5)[1], steps_of(lag=1, steps=5)[1]
    assert late == at_once
    assert [values["loss"] for _, values in late] == [1.5, 3.5, 5.0]
    assert {values["images/s"] for _, values in late} == {4.0}
