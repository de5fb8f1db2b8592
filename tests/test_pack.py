"""`prepare_data.py pack`: what it writes, how training reads it, and what damages do."""

import argparse
import os
import shutil
from pathlib import Path
from unittest import mock

import doctor
import numpy as np
import pytest
import torch
from batches import batches_of, fetch, picture
from conftest import draw_folder
from PIL import Image
from preparing import fail, run, succeed, times, tree

from utils.errors import UserError
from utils.extras import pack
from utils.folder import check_same_classes, class_folders, open_source
from utils.images import ImageBatches
from utils.samplers import EvalSampler, TrainSampler

SIZE, ONE = 64, ("--workers", 1)


@pytest.fixture(scope="module", autouse=True)
def small_files():
    """Of 10 images: each part has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "IMAGES_PER_FILE", 10)
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Images of 48 x 40 pixels, smaller than the packs here, and others that nobody can read."""
    root = draw_folder(tmp_path_factory.mktemp("source") / "data", train=12, val=4)
    bad = root / "train" / "class_1"
    data = (bad / "003.JPEG").read_bytes()
    (bad / "003.JPEG").write_bytes(data[: len(data) // 2])
    (bad / "004.JPEG").write_bytes(b"")
    (bad / "011.JPEG").write_bytes(b"<html>404</html>")
    (bad / "deep").mkdir()
    Image.open(bad / "000.JPEG").convert("P").save(bad / "deep" / "palette.png")
    return root


@pytest.fixture(scope="module")
def packed(source, tmp_path_factory):
    """The pack of `source`, and what was printed."""
    out = tmp_path_factory.mktemp("packed") / "out"
    return out, run("pack", source, out, "--size", SIZE, "--workers", 2)


@pytest.fixture
def copy(packed, tmp_path):
    return Path(shutil.copytree(packed[0], tmp_path / "copy"))


def index_of(root, part="train"):
    return open_source(root / part, class_folders(root / part))


@pytest.mark.parametrize("train", [True, False])
def test_batches_are_those_of_the_folder_bit_for_bit(source, packed, train):
    """Where nothing is reduced; the order of samples and what replaces bad files, too."""
    seen, bad = [], []
    for root in (source, packed[0]):
        index = index_of(root)
        sampler = TrainSampler(37, 12, (0, 1), 1, 5) if train else EvalSampler(37, 10, (0, 1))
        batches = batches_of(index, sampler, 2, 24, bad_files=9)
        seen.append([torch.cat(values) for values in zip(*batches, strict=True)])
        bad.append(batches.bad.seen)
    assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))
    assert bad[0] == bad[1] and len(bad[0]) == 3, "the same files, for the same reasons"


def test_names_classes_and_reports(source, packed):
    out, done = packed
    assert (done.code, done.err.count("stored unchanged: ")) == (0, 3)
    assert f"done: {out}: train 37 images, val 12 images" in done.out
    assert "3 images cannot be decoded" in done.out
    assert class_folders(out / "train") == class_folders(source / "train")
    check_same_classes(out, "val", class_folders(out / "train"), subset=False)
    one, other = index_of(source), index_of(out)
    assert one.paths == other.paths and (one.targets == other.targets).all()
    assert one.fingerprint() != other.fingerprint(), "nodes with other pixels are rejected"
    some = open_source(out / "train", ["class_2", "class_1"])
    expected = open_source(source / "train", ["class_2", "class_1"])
    assert some.paths == expected.paths and some.targets.tolist() == [0] * 12 + [1] * 13
    evaluated = (ImageBatches(index, 24, 0, train=False) for index in (some, expected))
    assert torch.equal(*(fetch(dataset, [1, 14])[0] for dataset in evaluated))
    args, sources = argparse.Namespace(data=str(out), rank=0, image_size=32), {}
    levels = [finding[0] for finding in doctor.check_data(args, 0, sources)]
    assert levels == [doctor.OK] * 2, "it reads and decodes the pack"
    assert sources["train"].sample_sizes() == other.sample_sizes() != one.sample_sizes()


def test_pixels_are_those_of_a_careful_reduction(tmp_path, monkeypatch):
    folder = tmp_path / "large" / "train" / "a"
    folder.mkdir(parents=True)
    for number, shape in enumerate([(150, 97), (70, 200), (64, 90), (30, 300)]):
        picture(*shape).save(folder / f"{number}.JPEG", quality=95)
    succeed("pack", tmp_path / "large", tmp_path / "pack", "--size", SIZE, *ONE)
    index = index_of(tmp_path / "pack")
    real = os.preadv  # one read may give less than was asked for
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: real(file, [buffers[0][:999]], at))
    for image in range(4):
        rgb = Image.open(folder / f"{image}.JPEG").convert("RGB")
        if (factor := SIZE / min(rgb.size)) < 1:
            reduced = [round(side * factor) for side in rgb.size]
            rgb = rgb.resize(reduced, Image.Resampling.BICUBIC)
        assert index.shape(image) == rgb.size[::-1]
        assert index.read(image) == rgb.tobytes()
        assert np.array_equal(index.rows(image, 7, 11), np.asarray(rgb)[7:18])


# ---------------------------------------------------------------------------- damages


def test_an_incomplete_pack_is_an_error_line(copy):
    file, index = copy / "train" / "00001.pixels", copy / "train" / "pack.npz"
    for spoil in (lambda: os.truncate(file, 5000), file.unlink):
        spoil()
        with pytest.raises(UserError, match=r"00001\.pixels is missing, or its size is not [0-9]"):
            class_folders(copy / "train")
    data, middle = index.read_bytes(), index.stat().st_size // 2
    for damaged in (data[:middle], data[:middle] + b"\x5a\xa5" * 32 + data[middle + 64 :]):
        index.write_bytes(damaged)
        with pytest.raises(UserError, match=r"pack\.npz is damaged"):
            class_folders(copy / "train")


def test_a_file_cut_while_it_is_in_use_has_unreadable_images(copy):
    index = index_of(copy)
    dataset = ImageBatches(index, 24, seed=0, train=True)
    intact = fetch(dataset, [30, 34])[0]
    os.truncate(copy / "train" / "00003.pixels", int(index.records["place"][35]) + 9)
    images, targets, reading = fetch(dataset, [30, 34, 35])
    lost = dict.fromkeys((35, 36), "00003.pixels ends before the image does")
    assert (
        dict(reading.unreadable) == lost and targets.tolist() == index.targets[[30, 34, 0]].tolist()
    )
    assert torch.equal(images[:2], intact)


def test_damaged_pixels_are_found_by_verify(copy):
    assert "all 6 files match their checksums" in succeed("verify", copy, *ONE)
    damaged = copy / "train" / "00001.pixels"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    done = run("verify", copy, *ONE)
    assert done.code == 2 and f"damaged: {damaged}\n" in done.err
    assert "1 of 6 files are damaged" in done.sentence


def test_what_is_interrupted_or_removed_is_made_and_no_more(source, packed, tmp_path, monkeypatch):
    out = tmp_path / "out"
    command, train = ("pack", source, out, "--size", SIZE, *ONE), out / "train"
    with monkeypatch.context() as patch:
        patch.setattr("prepare.pack.save_atomically", mock.Mock(side_effect=KeyboardInterrupt))
        assert run(*command).code == 130
    with pytest.raises(UserError, match="packing was not finished"):
        class_folders(train)
    (train / "00000.pixels").unlink()
    os.truncate(train / "00002.pixels", 5000)
    (train / ".77.tmp").write_bytes(b"half")
    before = times(train)
    assert run(*command).code == 0
    made = [path.name for path, changed in times(train).items() if before.get(path) != changed]
    assert sorted(name for name in made if "pixels" in name) == ["00000.pixels", "00002.pixels"]
    (train / "pack.npz").unlink()  # it is written last
    assert "nothing to do" in succeed(*command)
    assert tree(out) == tree(packed[0])


def test_what_is_rejected(source, copy, tmp_path):
    new = tmp_path / "new"
    for command in ("shrink", "pack"):
        assert "holds decoded pixels" in fail(command, copy, new)
    assert not new.exists()
    assert f"not pack (source {source}, size 32," in fail("pack", source, copy, "--size", 32)
    marker = copy / ".prepared.json"  # as if an image had come since
    marker.write_text(marker.read_text().replace("train 37 images", "train 36 images"))
    assert "train 36 images in 3 classes" in fail("pack", source, copy, "--size", SIZE)
