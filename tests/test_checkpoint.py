"""Snapshots: atomic, complete, of several formats, and read without running their code."""

import contextlib
import io
import os
import pickle
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from running import no_longer_than
from torch import nn

from utils.amp.loss_scale import LossScaler
from utils.atomic import read_checkpoint
from utils.errors import UserError
from utils.launch.world import World
from utils.model.optim import sgd
from utils.run.checkpoint import TrainState, best_of, resume, snapshot_of
from utils.run.snapshots import write

CPU = torch.device("cpu")
CLASSES = ["a", "b", "c"]
WORLD = World(CPU)
ARGS = Namespace(arch="tiny", evaluate=False, start_epoch=None)
OPTIONS = {"arch": "tiny", "lr": 0.1}


def build(seed=0, classes=3, lr=0.1, model=None) -> TrainState:
    torch.manual_seed(seed)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))
    return TrainState(
        model, sgd([{"params": [*model.parameters()]}], lr, 0.9, 1e-4), LossScaler(CPU)
    )


def save_snapshot(state, folder, options):
    write(snapshot_of(state, options, CLASSES, state.full_weights()), folder / "snapshot.pt")


def save_best(state, folder, arch, classes):
    write(best_of(state, arch, classes, state.full_weights()), folder / "best.pt")


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


def same_tensors(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def momentum(state):
    return [entry["momentum_buffer"] for entry in state.optimizer.state.values()]


def same_weights(one, other):
    return same_tensors(one.model.state_dict().values(), other.model.state_dict().values())


def take_up(tmp_path, content, state=None, args=ARGS):
    """Save ``content`` as a file and resume a new state from it."""
    path = tmp_path / "checkpoint.pth.tar"
    torch.save(content, path)
    state = state or replace(build(seed=1), global_batch=32)
    return state, resume(state, args, WORLD, path)


@pytest.mark.parametrize(
    ("step", "batch", "expected"), [(6, 32, 6), (6, 64, 3), (6, 16, 12), (6, 192, 1), (0, 80, 0)]
)
def test_position_moves_to_another_global_batch(tmp_path, step, batch, expected):
    save_snapshot(replace(trained(), step=step), tmp_path, OPTIONS)
    state = replace(build(), global_batch=batch)
    assert resume(state, ARGS, WORLD, tmp_path / "snapshot.pt")
    assert (state.epoch, state.step, state.global_batch) == (2, expected, batch)


def test_position_that_does_not_fit_another_global_batch(tmp_path):
    save_snapshot(trained(), tmp_path, OPTIONS)
    with pytest.raises(UserError, match=r"after 192 images.*of 80: .*global batch 32"):
        resume(replace(build(), global_batch=80), ARGS, WORLD, tmp_path / "snapshot.pt")


def test_command_line_keeps_its_hyperparameters(tmp_path):
    save_snapshot(trained(lr=0.1), tmp_path, OPTIONS)
    state = replace(build(lr=0.025), global_batch=32)
    resume(state, ARGS, WORLD, tmp_path / "snapshot.pt")
    assert [group["lr"] for group in state.optimizer.param_groups] == [0.025]


def test_evaluation_loads_the_weights_alone(tmp_path):
    save_snapshot(trained(), tmp_path, OPTIONS)
    state = build(seed=1)
    assert not resume(
        state,
        Namespace(arch="tiny", evaluate=True, start_epoch=None),
        WORLD,
        tmp_path / "snapshot.pt",
    )
    assert same_weights(state, trained())
    assert (state.epoch, state.best) == (0, {})


# ---- formats of others


def prefixed(prefix):
    return {f"{prefix}{name}": value for name, value in trained().model.state_dict().items()}


def native(scale):
    return {"scale": scale, "growth_factor": 2.0, "_growth_tracker": 9}


EMA = {"state_dict_ema": trained(seed=5).model.state_dict()}
# What stands beside the optimiser -> finished epochs, loss scale, words of the only line logged.
FORMATS = {
    "pytorch/examples": (
        {"epoch": 5, "arch": "tiny", "state_dict": prefixed("module."), "scheduler": {"x": 30}}
        | {"best_acc1": torch.tensor(61.5)},
        (5, 2.0**16, "names a best top-1 of 61.50 %"),
    ),
    "Apex example": (
        {"epoch": 5, "arch": "tiny", "state_dict": prefixed(""), "best_prec1": 61.5},
        (5, 2.0**16, "names a best top-1 of 61.50 %"),
    ),
    "amp of Apex": (
        {"model": prefixed("module."), "amp": {"loss_scaler0": {"loss_scale": 4096.0}}},
        (0, 4096.0, None),
    ),
    "native amp": ({"model": prefixed(""), "scaler": native(512.0)}, (0, 512.0, None)),
    "torchvision": (  # its epoch is the number of the last one, counted from 0
        {"model": prefixed(""), "epoch": 4, "lr_scheduler": {}, "args": Namespace(lr=0.5)},
        (5, 2.0**16, None),
    ),
    "timm": (
        {"state_dict": prefixed(""), "arch": "tiny", "epoch": 4, "version": 2, **EMA}
        | {"amp_scaler": native(256.0), "metric": 61.5},
        (5, 256.0, "state_dict_ema: the plain weights in it are used"),
    ),
    "old timm": ({"state_dict": prefixed(""), "epoch": 4, "version": 1}, (4, 2.0**16, None)),
    "compiled": ({"state_dict": prefixed("module._orig_mod.")}, (0, 2.0**16, None)),
}


@pytest.mark.parametrize("program", FORMATS)
def test_files_of_other_programs_continue(tmp_path, logged, program):
    content, (epoch, scale, words) = FORMATS[program]
    old = trained()
    state, whole = take_up(tmp_path, content | {"optimizer": old.optimizer.state_dict()})
    assert not whole
    assert same_weights(state, old)
    assert same_tensors(momentum(old), momentum(state))
    # Their accuracy may be of other images: no epoch here would ever be the best one.
    assert (state.epoch, state.step, state.best) == (epoch, 0, {})
    assert state.scaler.state_dict()["scale"] == scale
    assert len(logged) == (words is not None)
    assert words is None or words in logged[0]


def test_averaged_weights_are_taken_where_there_are_no_others(tmp_path, logged):
    mean = trained(seed=5)
    averaged = torch.optim.swa_utils.AveragedModel(mean.model).state_dict()  # as torchvision's
    assert same_weights(take_up(tmp_path, {"model_ema": averaged})[0], mean)
    assert "model_ema: there are no others in it" in logged.pop()


@pytest.mark.parametrize("pack", [lambda w: w, lambda w: {"state_dict": w, "epoch": 7}])
def test_weights_alone_are_a_start(tmp_path, pack):
    state, whole = take_up(tmp_path, pack(trained().model.state_dict()))
    assert not whole
    assert same_weights(state, trained())
    assert state.epoch == 0


# ---- files that do not fit, are damaged, or are malicious


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"arch": "resnet18"}, "is a resnet18: use -a resnet18"),
        ({"state_dict": trained(classes=4).model.state_dict()}, "does not fit this model"),
        ({"state_dict": {}}, "does not fit this model"),
        ({"state_dict": [1, 2]}, "checkpoint"),
        ({"state_dict": {0: "cat", 1: "dog"}}, "checkpoint"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), 1).state_dict()},
            "optimiser state",
        ),
    ],
    ids=["arch", "classes", "empty", "list", "class names", "optimizer"],
)
def test_files_that_do_not_fit_are_a_sentence(tmp_path, change, sentence):
    content = {"arch": "tiny", "state_dict": trained().model.state_dict(), "epoch": 1}
    content["optimizer"] = trained().optimizer.state_dict()
    with pytest.raises(UserError, match=sentence):
        take_up(tmp_path, content | change)


WRONG = {
    "progress": [1, 2],
    "scaler": 1024.0,
    "scaler.scale": "large",
    "optimizer": [],
    "optimizer.state": [1, 2],
    "optimizer.state.0": 3,
    "optimizer.state.0.momentum_buffer": "fast",
    "optimizer.state.1.momentum_buffer": torch.zeros(2, 3),
    "optimizer.param_groups": 7,
    "optimizer.param_groups.0": "lr",
    "options": "none",
    "classes": 3,
    "classes.0": 3,
    "model": 3,
    "model.0.weight": "heavy",
    "model.0.bias": None,
}


@pytest.mark.parametrize("place", WRONG)
def test_a_snapshot_with_wrong_types_inside_is_a_sentence(tmp_path, place):
    """Its checksums are right: it was written like that."""
    content = snapshot_of(trained(), dict(OPTIONS), list(CLASSES), trained().full_weights())
    where, *path = content, *place.split(".")
    path = [*path[:1], ".".join(path[1:])] if path[0] == "model" and path[1:] else path
    for key in path[:-1]:
        where = where[int(key) if key.isdecimal() else key]
    where[int(path[-1]) if path[-1].isdecimal() else path[-1]] = WRONG[place]
    torch.save(content, tmp_path / "snapshot.pt")
    state = replace(build(seed=1), global_batch=32)
    with pytest.raises(UserError, match=r"snapshot\b") as error:
        resume(state, ARGS, WORLD, tmp_path / "snapshot.pt", CLASSES)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("epoch", ["two", -1, float("nan"), float("inf"), [1]], ids=str)
def test_an_epoch_that_is_no_number_is_one_message(tmp_path, epoch):
    old = trained()
    content = {"model": old.model.state_dict(), "optimizer": old.optimizer.state_dict()}
    with pytest.raises(UserError, match="does not fit this program"):
        take_up(tmp_path, content | {"epoch": epoch})


def test_weights_of_another_image_size_name_it(tmp_path):
    """Vision transformers have a weight for each place of the image."""
    old = replace(trained(classes=4), preprocessing={"image_size": 64})
    save_snapshot(old, tmp_path, OPTIONS)
    args = Namespace(**vars(ARGS), image_size=224)
    with pytest.raises(UserError, match=r"does not fit.*it was trained with --image-size 64"):
        resume(build(), args, WORLD, tmp_path / "snapshot.pt")


def saved_bytes(content=None):
    file = io.BytesIO()
    torch.save(content or {"state_dict": trained().model.state_dict()}, file)
    return file.getvalue()


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


UNREADABLE = {
    "empty": lambda: b"",
    "text": lambda: b"not a checkpoint\n" * 30,
    "one letter": lambda: b"x",
    "half": lambda: saved_bytes()[: len(saved_bytes()) // 2],
    "without its end": lambda: saved_bytes()[:-30],
    "zeros": lambda: bytes(4096),
    "pickle": lambda: pickle.dumps({"state_dict": {}}),
    "old pickle": lambda: pickle.dumps({"state_dict": {}}, protocol=0),
    "damaged pickle": lambda: pickle.dumps({"state_dict": {}}, protocol=0)[:-1],
    "picture": lambda: b"\x89PNG\r\n" * 100,
    "list": lambda: saved_bytes([1, 2]),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_file_that_is_no_checkpoint_is_one_clear_message(tmp_path, recwarn, kind):
    path = tmp_path / "snapshot.pt"
    path.write_bytes(UNREADABLE[kind]())
    with pytest.raises(UserError, match=r"snapshot\.pt is not a checkpoint: it is damaged, .*"):
        read_checkpoint(path)
    assert not recwarn.list


def test_what_is_missing_or_no_file_is_told(tmp_path):
    with pytest.raises(UserError, match=r"there is no file \S+snapshot.pt"):
        read_checkpoint(tmp_path / "snapshot.pt")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with no_longer_than(20), pytest.raises(UserError, match="is not a file: give the chec"):
            read_checkpoint(path)


@pytest.mark.parametrize(
    "write", [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x, 2))]
)
def test_code_in_a_file_is_refused_and_not_run(tmp_path, write):
    path, trace = tmp_path / "snapshot.pt", tmp_path / "executed"
    write({"state_dict": {}, "args": Malicious(trace)}, path)
    with pytest.raises(UserError, match=r"code in a checkpoint is never run"):
        read_checkpoint(path)
    assert not trace.exists()
    with contextlib.suppress(RuntimeError):
        torch.load(path, weights_only=False)
    assert trace.exists(), "it would have been run by a careless reader"


# ---- atomic
