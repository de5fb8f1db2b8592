"""What a run continues from: our snapshots, files of other programs, and files that do not fit."""

import io
import logging
import os
import pickle
import re
import signal
import sys
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from running import same
from torch import nn

from utils.model.o2 import LossScaler
from utils.model.optim import sgd
from utils.model.options import SCHEDULES
from utils.run.resume import fingerprints, load
from utils.run.snapshots import TrainState, best_of, snapshot_of, write
from utils.start.atomic import read_checkpoint
from utils.start.errors import UserError
from utils.start.option_types import Options

CPU = torch.device("cpu")
CLASSES = ["a", "b", "c"]
ARGS = Options(arch="tiny", evaluate=False, start_epoch=None, ema=None)
OPTIONS = {"arch": "tiny", "lr": 0.1}


def build(seed=0, classes=3, lr=0.1) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))
    optimizer = sgd([{"params": [*model.parameters()]}], lr, 0.9, 1e-4)
    return TrainState(model, optimizer, LossScaler(CPU))


def save_snapshot(state, folder, options):
    write(snapshot_of(state, options, CLASSES), folder / "snapshot.pt")


def save_best(state, folder, arch, classes):
    write(best_of(state, arch, snapshot_of(state, {}, classes)), folder / "best.pt")


def trained(seed=0, **options) -> TrainState:
    state = build(seed, **options)
    for _ in range(3):
        state.model(torch.randn(6, 4)).square().mean().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
    state.epoch, state.step, state.global_batch = 2, 6, 32
    state.best, state.elapsed = {"epoch": 1, "top1": 40.0, "top5": 80.0}, 12.5
    state.history, state.sums = [{"Loss/val": 1.5}, {"Loss/val": 1.25}], [9.0, 8.0, 7.0, 192.0]
    state.scaler.load_state_dict({"scale": 1024.0, "clean_steps": 17, "skipped": 2})
    return state


def momentum(state):
    return [entry["momentum_buffer"] for entry in state.optimizer.state.values()]


def same_weights(one, other):
    return same(one.model.state_dict(), other.model.state_dict())


def resume(state, args, path, classes=None):
    """Load a file, as `utils.loop.resume` does. Returns: whether it was a snapshot of ours."""
    for note in load(state, args, read_checkpoint(path), path, classes):
        logging.getLogger("utils").info(note)
    return state.resumed


def resumed(tmp_path, content, args=ARGS, batch=32, classes=None):
    """A new state that has resumed from a file with ``content``, and whether it was a snapshot."""
    torch.save(content, tmp_path / "snapshot.pt")
    state = replace(build(seed=1, lr=0.025), global_batch=batch)
    return state, resume(state, args, tmp_path / "snapshot.pt", classes)


def ours(state=None, options=OPTIONS):
    state = state or trained()
    return snapshot_of(state, dict(options), list(CLASSES))


def test_position_moves_to_another_global_batch(tmp_path):
    old = trained()
    state, is_ours = resumed(tmp_path, ours(old), batch=64)
    assert is_ours
    for name in ("best", "elapsed", "history", "sums"):
        assert getattr(state, name) == getattr(old, name), name
    assert (state.epoch, state.step, state.global_batch) == (2, 3, 64)
    assert [group["lr"] for group in state.optimizer.param_groups] == [0.025]
    with pytest.raises(UserError, match=r"after 192 images.*of 80: .*global batch 32"):
        resumed(tmp_path, ours(), batch=80)
    from_an_epoch = Options(**vars(ARGS) | {"start_epoch": 0})
    state, is_ours = resumed(tmp_path, ours(old), from_an_epoch, batch=80)
    assert is_ours and same(momentum(state), momentum(old)), "only the position does not matter"


def test_a_restart_on_other_nodes_counts_each_image_once(tmp_path, monkeypatch, logged):
    """It continues at the step before; sums of the epoch and of the last line keep their means."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    before = replace(trained(), printed=[3.0, 2.0, 1.0, 96.0])
    state, _ = resumed(tmp_path, ours(before), batch=25)
    assert state.step == 7  # of 192 images 175
    assert "so 17 images of this epoch are repeated, from step 7 on" in logged[0]
    for now, then in ((state.sums, before.sums), (state.printed, before.printed)):
        assert now == pytest.approx([value * 175 / 192 for value in then])


def test_evaluation_loads_the_weights_alone(tmp_path):
    """Whatever the options, of which some could not be changed in training."""
    now = Options(**vars(ARGS) | {"evaluate": True, "seed": 1, "ema": 0.9})
    content = ours(options=SAVED) | {"model_args": {"transform_input": True}}
    state, is_ours = resumed(tmp_path, content, now)
    assert not is_ours
    assert state.model.transform_input  # of GoogLeNet; the next best.pt says so, too
    assert state.model.constructor_args == content["model_args"]
    assert same_weights(state, trained())
    assert (state.epoch, state.best) == (0, {})
    assert not any(moment.any() for moment in momentum(state))
    assert state.ema is None, "it would be evaluated as well"


def test_harmless_changes_are_logged(tmp_path, logged, monkeypatch):
    """Another last epoch is none where learning rate or image size depend on it."""
    saved = {"arch": "tiny", "epochs": 2, "lr": 0.1, "workers": 1, "name": "a"}
    saved |= {"val_image_size": 96}  # which the snapshot sets, where the command line omits it
    saved["command"] = "imagenet_ddp.py --lr 0.1 DATA"
    monkeypatch.setattr(sys, "argv", ["/code/imagenet_fsdp.py"])
    now = Options(**vars(ARGS) | {"epochs": 3, "lr": 0.01, "workers": 2, "name": "b"})
    now = now.replaced(val_image_size=None, defaulted_sizes=("val_image_size",))
    assert resumed(tmp_path, ours(options=saved), now, batch=16)[1]
    changes = "the script is imagenet_fsdp.py (was imagenet_ddp.py), "
    changes += "the global batch is 16 (was 32), --epochs 3 (was 2), --lr 0.01 (was 0.1), "
    changes += "--workers 2 (was 1)"
    assert logged == [f"changed since the snapshot: {changes}"]
    schedules = [{"lr_schedule": name} for name in SCHEDULES if name not in ("step", "constant")]
    for more in (*schedules, {"progressive": "96,128"}):
        with pytest.raises(UserError, match="was made with --epochs 2: do"):
            resumed(tmp_path, ours(options=saved | more), Options(**vars(now) | more))


def test_options_that_have_new_names_are_compared(tmp_path, logged):
    """A snapshot of an earlier version."""
    saved = {"arch": "tiny", "world_size": 2, "rank": 1, "desired_acc": 75.0}
    now = Options(**vars(ARGS) | {"nodes": 1, "node_rank": 0, "target_top1": 80.0})
    assert resumed(tmp_path, ours(options=saved), now)[1]
    changes = "--nodes 1 (was 2), --target-top1 80.0 (was 75.0)"
    assert logged == [f"changed since the snapshot: {changes}"]


# ---- formats of others


def prefixed(prefix):
    return {f"{prefix}{name}": value for name, value in trained().model.state_dict().items()}


MEAN = trained(seed=5)
EMA = {"state_dict_ema": MEAN.model.state_dict()}
# Of torchvision; averaged weights are taken where there are no others.
AVERAGED = {"model_ema": torch.optim.swa_utils.AveragedModel(MEAN.model).state_dict()}
OTHER = {"optimizer": trained().optimizer.state_dict()}
FORMATS = {
    "pytorch/examples": {"epoch": 5, "arch": "tiny", "state_dict": prefixed("module."), **OTHER}
    | {"scheduler": {"x": 30}, "best_acc1": torch.tensor(61.5)},
    "Apex": {"model": prefixed("module."), "amp": {"loss_scaler0": {"loss_scale": 9.0}}, **OTHER},
    "torchvision": {"model": prefixed(""), "epoch": 4, "lr_scheduler": {}, **OTHER}
    | {"args": Namespace(lr=0.5), "scaler": {"scale": 256.0, "_growth_tracker": 9}},
    "timm": {"state_dict": prefixed("module._orig_mod."), "arch": "tiny", "epoch": 4, "version": 2}
    | {"amp_scaler": {"scale": 256.0, "_growth_tracker": 9}, "metric": 61.5, **EMA, **OTHER},
    "plain weights": prefixed(""),
    "averaged weights": AVERAGED,
}
NOTES = {
    "timm": ["state_dict_ema: its plain weights are used"],
    "averaged weights": ["model_ema: it has no others"],
}


@pytest.mark.parametrize("program", FORMATS)
def test_of_files_of_other_programs_the_weights_are_loaded(tmp_path, logged, program):
    new = build(lr=0.025)
    state, is_ours = resumed(tmp_path, FORMATS[program])
    assert not is_ours
    assert same_weights(state, MEAN if program == "averaged weights" else trained())
    assert not any(moment.any() for moment in momentum(state))
    assert (state.epoch, state.step, state.best) == (0, 0, {})
    assert state.scaler.state_dict() == new.scaler.state_dict()
    notes = [*NOTES.get(program, []), "only its weights are loaded, and training begins at epoch 0"]
    assert all(words in line for words, line in zip(notes, logged, strict=True))


# ---- files that do not fit, are damaged, or are malicious

FIXED = {"seed": 5, "lr_schedule": "cosine", "warmup_epochs": 1, "progressive": "96,128"}
FIXED |= {"optimizer": "adamw", "wd_norm": 0.5, "freeze": True}
NOT_GIVEN = {"progressive": None, "wd_norm": None, "freeze": False}
SAVED = OPTIONS | dict.fromkeys(FIXED, -1) | {"epochs": 2}
SHORT = trained().optimizer.state_dict()
SHORT["state"][1]["momentum_buffer"] = torch.zeros(2)
USE = "--seed 5, --lr-schedule cosine, --warmup-epochs 1, --progressive 96,128, "
USE += "--optimizer adamw, --wd-norm 0.5, --freeze"
UNFIT = [  # part of a snapshot, what stands there, words of the message
    ("arch", "resnet18", "is a resnet18: use -a resnet18"),
    ("options", SAVED | FIXED, f"was made with {USE}: do the same"),
    ("options", SAVED | NOT_GIVEN, "with no --progressive, no --wd-norm, no --freeze: do the"),
    ("classes", ["a", "b"], "has other classes than the data .2: a,.*--classes"),
    ("classes", ["b", "a", "c"], "has other classes than the data .3: b, "),
    ("model", build(classes=4).model.state_dict(), "does not fit.* trained with --image-size 64$"),
    ("model", {0: "cat", 1: "dog"}, "does not fit this program"),
    ("optimizer", sgd([{"params": [nn.Parameter()]}], 1, 0, 0).state_dict(), "optimizer state"),
    ("optimizer", SHORT, "the optimizer state in .*of another model"),
    ("progress", {}, "does not fit this program"),
    ("options", None, "does not fit this program"),
    ("progress", {"step": 1.5}, r"does not fit this program .its step is 1.5"),
    ("progress", {"history": [{"Loss/val": "low"}]}, "does not fit this program .its history is"),
    ("classes", 3, r"does not fit this program .its classes is 3"),
    ("options", "missing", r"does not fit this program .KeyError.'options'"),
]


@pytest.mark.parametrize(("part", "value", "message"), UNFIT, ids=range(len(UNFIT)))
def test_a_file_that_does_not_fit_is_one_message(tmp_path, part, value, message):
    """Its checksums are right: it was written like that."""
    content = ours(replace(trained(), preprocessing={"image_size": 64}), SAVED) | {part: value}
    if value == "missing":
        del content[part]
    with pytest.raises(UserError, match=message) as error:
        resumed(tmp_path, content, Options(**vars(ARGS) | SAVED), classes=CLASSES)
    assert "\n" not in str(error.value) and len(str(error.value)) < 700


def bytes_of(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


WHOLE = bytes_of({"state_dict": trained().model.state_dict()})
UNREADABLE = {"text": b"not a checkpoint\n" * 30, "without its end": WHOLE[:-30]}
UNREADABLE |= {"pickle": pickle.dumps({"state_dict": {}}), "list": bytes_of([1, 2])}


class Malicious:
    """Its unpickling makes a folder."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


MALICIOUS = {"state_dict": {}, "args": Malicious()}
UNREADABLE |= {"code": bytes_of(MALICIOUS), "code in a pickle": pickle.dumps(MALICIOUS, 2)}
UNREADABLE |= {"an array": bytes_of({"state_dict": {"w": np.zeros(3)}})}
NAMED = {"code": "posix.mkdir", "code in a pickle": "posix.mkdir", "an array": "numpy.*construct"}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_file_that_is_no_checkpoint_is_one_clear_message(tmp_path, monkeypatch, recwarn, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pt"
    path.write_bytes(UNREADABLE[kind])
    words = r"snapshot\.pt is not a checkpoint: it is damaged, .* \(code .* is never run\)"
    if kind in NAMED:
        words = rf"snapshot\.pt contains {NAMED[kind]}, which is not loaded, as it could run code"
    with pytest.raises(UserError, match=words):
        read_checkpoint(path)
    assert not recwarn.list
    assert [*tmp_path.iterdir()] == [path]


def test_numbers_of_numpy_are_loaded(tmp_path):
    """As in a file with the best accuracy that a program has computed by NumPy."""
    values = [np.float64(61.5), np.int64(3), np.float32(0.5), np.bool_(True), np.str_("a")]
    torch.save({"state_dict": {}, "best": values}, tmp_path / "file.pt")
    assert read_checkpoint(tmp_path / "file.pt")["best"] == values


FOLDER = ["60 images in 3 classes (0123abcd)", "1111"]
CHANGED_DATA = {  # in train, in val; words of the note
    "added": (["61 images (0)", "1111"], FOLDER, "DATA/train has 61 images .was 60"),
    "renamed": (["60 images in 3 classes (0)", "1111"], FOLDER, "60 .* but other names of files"),
    "replaced": ([FOLDER[0], "2222"], FOLDER, "DATA/train has files of other sizes under the same"),
    "validation": (FOLDER, ["9 images (0)", "1111"], r"DATA/val has 9 .* .was 60 images"),
}


@pytest.mark.parametrize("change", CHANGED_DATA)
def test_other_data_than_those_of_the_snapshot_are_named(tmp_path, logged, change):
    """In the middle of an epoch other training images are an error, as their order is another."""
    train, val, words = CHANGED_DATA[change]
    state = replace(trained(), data={"train": FOLDER, "val": FOLDER, "test": FOLDER})
    at_end, middle = (ours(replace(state, step=step)) for step in (0, 6))
    new = {"train": train, "val": val}

    def again(content, now, args=ARGS):
        torch.save(content, tmp_path / "snapshot.pt")
        state = replace(build(seed=1), global_batch=32, data=now)
        resume(state, args, tmp_path / "snapshot.pt")

    again(at_end, new)
    assert len(logged) == 1 and re.search(f"changed since the snapshot: .*{words}", logged[0])
    if change in ("added", "renamed"):
        with pytest.raises(UserError, match=f"{words}.* begin epoch 3 again with --start-epoch 2"):
            again(middle, new)
        again(middle, new, Options(**vars(ARGS) | {"start_epoch": 2}))  # as the message proposes
    else:
        again(middle, new)
    logged.clear()
    again(middle, state.data)
    again({name: x for name, x in middle.items() if name != "data"}, new)  # of an older version
    assert not logged


def test_each_part_that_there_is_has_a_fingerprint():
    source = mock.Mock()
    source.fingerprint.return_value, source.sample_sizes.return_value = FOLDER[0], (9.5, FOLDER[1])
    part = SimpleNamespace(bad=SimpleNamespace(source=source))
    for absent in ({"train": None}, {"val": None}, {"test": None}):
        parts = dict.fromkeys(("train", "val", "test"), part) | absent
        expected = dict.fromkeys(parts.keys() - absent.keys(), FOLDER)
        assert fingerprints(SimpleNamespace(**parts)) == expected


def test_a_missing_file_a_pipe_or_a_run_directory_is_one_message(tmp_path):
    with pytest.raises(UserError, match=f"is a folder: .* {tmp_path}/snapshot.pt"):
        read_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    signal.alarm(60)  # the end of pytest, if this waits for somebody to write into the pipe
    try:
        for path in (tmp_path / "missing", tmp_path / "pipe"):
            with pytest.raises(UserError, match=f"there is no file {path}$"):
                read_checkpoint(path)
    finally:
        signal.alarm(0)
