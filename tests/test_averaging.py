"""Averaged weights: the arithmetic, precision, snapshots, and which of two models is the best."""

import copy
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from o2_cases import prepare, train
from running import same
from test_checkpoint import ARGS, CLASSES, OPTIONS, build, resume, save_best, save_snapshot

from utils import epoch, loop
from utils.model.ema import Average
from utils.start.atomic import read_checkpoint
from utils.start.errors import UserError
from utils.start.option_types import Options


@pytest.mark.parametrize(("level", "most"), [("O0", 0.9), ("O0", 0.3), ("O2", 0.9)])
def test_the_average_is_the_formula_and_the_model_gets_its_own_bits_back(level, most):
    """The first steps are below the decay that --ema asks for, with 0.3 some above.

    A float16 model is averaged by its masters.
    """
    amp, model, optimizer = prepare(level)
    start = amp.weights.state_dict()
    expected = {name: x.double() for name, x in start.items() if x.is_floating_point()}
    ema = Average(model, most, amp.weights.named_masters())
    for number in range(1, 8):
        train(amp, model, optimizer, number)
        ema.after_step()
        decay, state = min(most, (1 + number) / (10 + number)), amp.weights.state_dict()
        for name, average in expected.items():
            expected[name] = decay * average + (1 - decay) * state[name].double()
    assert {average.dtype for average in ema.averages.values()} == {torch.float32}
    limits = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}
    torch.testing.assert_close(ema.averages, expected, **limits)  # statistics of batch norm, too
    assert ema.steps == 7
    own = copy.deepcopy(model.state_dict())
    averaged = {n: ema.averages.get(n, value).to(value.dtype) for n, value in own.items()}
    with pytest.raises(KeyError), ema.in_model():
        assert same(model.state_dict(), averaged)
        raise KeyError
    assert same(model.state_dict(), own)


def test_an_evaluation_is_of_both_models_or_of_none(monkeypatch):
    """A signal may come while the second one is evaluated."""
    session = SimpleNamespace(state=averaged())
    plain = {"Top1/val": 1.0, "Top5/val": 2.0, "Loss/val": 3.0, "images": 4.0}
    of_average = {tag: 10 * value for tag, value in plain.items()}
    for second, expected in (
        (None, None),
        (of_average, plain | {"Top1/ema": 10.0, "Top5/ema": 20.0, "Loss/ema": 30.0}),
    ):
        monkeypatch.setattr(epoch, "evaluate_weights", mock.Mock(side_effect=[plain, second]))
        assert epoch.evaluate(session, None, None) == expected


# ---- in snapshots


def averaged(seed=0):
    """A state with averages after some steps."""
    state = build(seed)
    state.ema = Average(state.model, 0.9)
    state.global_batch = 32
    for _ in range(3):
        state.model(torch.randn(8, 4)).square().mean().backward()
        state.optimizer.step()
        state.ema.after_step()
    state.best = {"epoch": 1, "top1": 50.0, "top5": 90.0, "ema": 1}
    return state


def test_averages_of_a_snapshot_are_restored_if_they_fit(tmp_path):
    """Without any in it, they begin from its weights."""
    path, old, new = tmp_path / "snapshot.pt", averaged(), build(seed=2)
    new.global_batch = 32
    save_snapshot(build(seed=1), tmp_path, OPTIONS)
    resume(new, Options(**vars(ARGS) | {"ema": 0.9}), path)
    ema = new.ema
    assert ema.steps == 0
    assert same(ema.averages, {n: new.model.state_dict()[n] for n in ema.averages})
    save_snapshot(old, tmp_path, OPTIONS)
    resume(new, ARGS, path)
    assert ema.steps == 3
    assert same(ema.averages, old.ema.averages)
    content = read_checkpoint(path)
    short = {name: average[:1] for name, average in old.ema.averages.items()}
    cases = [([], "not fit this program"), ({}, "of another model"), (short, "of another model")]
    for averages, message in cases:
        content["ema"]["model"] = averages
        torch.save(content, path)
        with pytest.raises(UserError, match=message):
            resume(averaged(), ARGS, path)


def test_best_pt_has_the_averages_where_they_are_better(tmp_path):
    state = averaged()
    own = state.model.state_dict()
    for weights, expected in (("ema", own | state.ema.averages), ("model", own)):
        state.best["ema"] = int(weights == "ema")
        save_best(state, tmp_path, "tiny", CLASSES)
        best = read_checkpoint(tmp_path / "best.pt")
        assert best["weights"] == weights
        assert same(best["state_dict"], expected)


def test_the_better_one_counts():
    """By accuracy or by loss; of equal ones the first."""
    # Top-1 and loss of the model, and of the averaged weights.
    epochs = [(0, 2.0, 0, 1.5), (50, 0.9, 55, 0.8), (55, 0.8, 20, 1.0), (60, 1.0, 60, 0.5)]
    epochs.append((61, math.nan, 61, math.nan))
    bests = {  # is it the best so far? Which one is: its top-1, and whether it is averaged
        "top1": [(True, 0, 0), (True, 55, 1), (False, 55, 1), (True, 60, 0), (True, 61, 0)],
        "loss": [(True, 0, 1), (True, 55, 1), (False, 55, 1), (True, 60, 1), (False, 60, 1)],
    }
    for best_by, expected in bests.items():
        state = averaged()
        state.best, state.epoch = {}, 0
        for figures, (is_best, *best) in zip(epochs, expected, strict=True):
            record = dict(
                zip(("Top1/val", "Loss/val", "Top1/ema", "Loss/ema"), figures, strict=True)
            )
            record |= {"Top5/val": 90, "Top5/ema": 91}
            assert loop.add_to_history(state, record, best_by) == is_best
            assert [state.best["top1"], state.best["ema"]] == best
            assert state.best["top5"] == (91 if state.best["ema"] else 90)
