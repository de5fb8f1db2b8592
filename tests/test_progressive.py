"""--progressive: which size comes when, and that nothing else changes with it."""

import argparse
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import PLACE, SEED, batches_of, noise_index

from utils import options
from utils.data import preprocessing
from utils.data.index import ImageIndex
from utils.data.preprocessing import Preprocessing
from utils.errors import UserError
from utils.model import models
from utils.run import checkpoint
from utils.samplers import TrainSampler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def ffcv(epoch, start, end, low, high):
    """`get_resolution` of ffcv-imagenet's train_imagenet.py, in its words."""
    if epoch <= start:
        return low
    if epoch >= end:
        return high
    return int(np.round(np.interp([epoch], [start, end], [low, high])[0] / 32)) * 32


@pytest.mark.parametrize(("epochs", "start", "end"), [(16, 11, 13), (32, 23, 27)])
def test_a_ramp_is_that_of_ffcv_imagenet(epochs, start, end):
    theirs = tuple(ffcv(epoch, start, end, 160, 192) for epoch in range(epochs))
    assert preprocessing.progressive_sizes("160:192", epochs) == theirs


@pytest.mark.parametrize(
    ("text", "epochs", "sizes"),
    [
        ("24:40", 10, (24,) * 7 + (32,) + (40,) * 2),  # in steps of their greatest common divisor
        ("128:192", 10, (128,) * 7 + (160,) + (192,) * 2),
        ("96,128,160", 7, (96, 96, 96, 128, 128, 160, 160)),
        ("192,128", 2, (192, 128)),
        ("176", 3, (176,) * 3),
        ("32:64", 1, (32,)),
        ("32:64", 0, ()),
    ],
)
def test_sizes(text, epochs, sizes):
    assert preprocessing.progressive_sizes(text, epochs) == sizes


@pytest.mark.parametrize("text", ["", "a", "0:32", "64:32", "32:32", "32:48:64", "32,,64", "32:x"])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"160:192.*128,160,192"):
        preprocessing.progressive(text)


def test_the_plan_in_words():
    text = preprocessing.sizes_text((160, 160, 192, 192, 160))
    assert text == "160 pixels from epoch 1, 192 from epoch 3, 160 from epoch 5"
    args = Namespace(progressive="24:40", epochs=10, image_size=48)
    assert preprocessing.largest_size(args) == 40
    assert preprocessing.largest_size(Namespace(progressive=None, epochs=10, image_size=48)) == 48


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ImageIndex:
    return noise_index(tmp_path_factory.mktemp("progressive"), 18, "jpg", 50, 60)


SIZES = (16, 24, 16)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_an_epochs_batches_are_those_of_a_data_set_of_its_size(index, layout):
    """The same workers and slots for all sizes; resumed in the middle of the larger one, too."""
    sampler = TrainSampler(len(index), 4, (0, 1), 1, SEED)
    sampler.sizes = SIZES
    place = (PLACE[0], layout, torch.float32)
    batches = batches_of(index, sampler, 1, place=place)
    batches.use(Preprocessing(image_size=20, val_resize_size=20))
    seen = set()
    for epoch, step in ((0, 0), (1, 2), (1, 0), (2, 0), (3, 1)):
        sampler.start_at(epoch, step)
        got = list(batches)
        seen.add(batches.loader.ring.images.data_ptr())
        plain = TrainSampler(len(index), 4, (0, 1), 1, SEED)
        plain.start_at(epoch, step)
        alone = batches_of(index, plain, size=(*SIZES, SIZES[-1])[epoch], place=place)
        for (images, targets), (others, labels) in zip(got, alone, strict=True):
            assert torch.equal(images, others) and torch.equal(targets, labels)
            assert images.is_contiguous(memory_format=layout)
    assert len(seen) == 1, "one ring for the whole run"
    assert batches.loader.ring.images.shape[2:4] == (24, 24)


def test_a_size_that_the_model_does_not_take_is_refused_at_the_start(monkeypatch, tmp_path):
    line = f"x -a alexnet --image-size 64 --epochs 4 --progressive 32:64 {tmp_path}"
    monkeypatch.setattr(sys, "argv", line.split())
    args = options.parse(options.build_parser("", batch=""))
    with (
        torch.device("meta"),
        pytest.raises(UserError, match=r"images of 32 pixels.*--progressive"),
    ):
        models.build(args, 10)


@pytest.mark.parametrize("change", [{"progressive": "96,160"}, {"epochs": 9}, {"epochs": 2}])
def test_a_run_goes_on_with_its_own_sizes(change):
    """The sizes depend on both, as the steps so far were trained with them."""
    saved = {"progressive": "96,128", "epochs": 3, "lr_schedule": "step", "seed": 0}
    now = saved | change
    (name,) = change
    with pytest.raises(UserError, match=f"--{name} {saved[name]}: use these options"):
        checkpoint.changed_options(saved, Namespace(**now), Path("snapshot.pt"))
    without = saved | {"progressive": None}
    more = Namespace(**without | {"epochs": 9})
    assert checkpoint.changed_options(without, more, Path("snapshot.pt")) == ["epochs"]
