"""Printed lines wait for no step: they are printed when their numbers have come."""

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from utils.launch.world import World
from utils.metrics import Sums
from utils.train import epoch
from utils.train.epoch import Lines
from utils.train.stopping import Reason

CPU = torch.device("cpu")


class Late:
    """The clock of a device that is ``lag`` steps behind."""

    def __init__(self, lag):
        self.lag = lag
        self.now = 0

    def mark(self):
        return self.now

    def seconds(self, begin, end):
        return float(end - begin)

    def event(self):
        """Of a copy to the host that was asked for now."""
        asked = self.now + self.lag
        return SimpleNamespace(query=lambda: self.now >= asked, synchronize=lambda: None)


def steps_of(monkeypatch, lag, steps=5, loss=1.0):
    """Which lines have been printed after each step, what they show, and reasons to stop.

    The loss of a step is ``loss`` times its number, and a quarter of a step is spent waiting.
    """
    clock, printed, after, asked, places = Late(lag), [], [], [], []
    monkeypatch.setattr(epoch, "show_status", lambda *_, **__: None)

    def total(sums, world):
        found = begin_total(sums, world)
        found.event = clock.event()
        return found

    begin_total = Sums.begin_total
    monkeypatch.setattr(Sums, "begin_total", total)
    session = mock.Mock(world=World(CPU), print_freq=2, global_batch=4)
    session.watch.timer = SimpleNamespace(clock=clock, recent=Counter)
    session.state = SimpleNamespace(step=0, epoch=1, printed=None)
    session.train.sampler.steps_per_epoch, session.train.waited = steps, 0.0
    session.args.epochs, session.stop.ask = 3, asked.append
    session.run.scalars = lambda tags, x: places.append(x)
    session.run.step = lambda place, step, values: printed.append((place, values))
    lines, sums = Lines(session), Sums(CPU)
    for step in range(1, steps + 1):
        clock.now = session.state.step = step
        session.train.waited += 0.25
        sums.add(torch.tensor(4 * loss * step), torch.eye(4), torch.arange(4))
        lines.after_step(sums)
        after.append(len(printed))
    monkeypatch.undo()
    assert places == [1400, 1800, 2000]
    return after, printed, asked


def test_a_line_is_printed_when_the_device_has_come_so_far(monkeypatch):
    """And shows the steps up to its own, however late it is."""
    at_once, lines, asked = steps_of(monkeypatch, lag=0)
    assert at_once == [0, 1, 1, 2, 3]
    common = {"top-1": 100.0, "top-5": 100.0, "images/s": 4.0, "s/step": 1.0, "waiting %": 25.0}
    assert lines == [
        (f"Epoch 2/3 step {step}/5", {"loss": loss} | common)
        for step, loss in ((2, 1.5), (4, 3.5), (5, 5.0))
    ]
    assert steps_of(monkeypatch, lag=1) == ([0, 0, 1, 1, 3], lines, asked)
    assert steps_of(monkeypatch, lag=9) == ([0, 0, 0, 1, 3], lines, asked)
    assert asked == []


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run(monkeypatch, loss):
    assert set(steps_of(monkeypatch, lag=1, loss=loss)[2]) == {Reason.DIVERGED}
