"""scripts/show_images.py and TensorBoard show the pixels that the first train_step gets."""

import io
import json
import shutil
import sys
from collections import Counter

import numpy as np
import pytest
import show_images
import torch
from conftest import python
from joined import Job, run_jobs
from PIL import Image
from results import class_sizes
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from utils import grid
from utils.data import wordnet
from utils.data.preprocessing import MEAN, STD
from utils.start.errors import UserError

SIZE, GAP, LINE, ZOOM = 32, 8, 15, 3  # small images are drawn three times as large
MIXED = ("--mixup", "0.4", "--cutmix", "1", "--auto-augment", "ra", "--random-erasing", "0.5")
MIXED += ("--progressive", "32:40", "--seed", "3")
CASES = {"nd": ("-b", "12", *MIXED), "ddp": ("-b", "3", "--accum-steps", "2")}


def show(*words, **env):
    return python("scripts/show_images.py", *words, **env)


def tiles(picture, number, columns, lines):
    """The images in a grid, uint8 [number, SIZE, SIZE, 3]."""
    pixels, side = np.asarray(picture), ZOOM * SIZE
    cut = []
    for i in range(number):
        y, x = GAP + i // columns * (side + lines * LINE + GAP), GAP + i % columns * (side + GAP)
        cut.append(pixels[y : y + side : ZOOM, x : x + side : ZOOM])
    return np.stack(cut)


@pytest.mark.parametrize("mode", CASES)
def test_the_picture_shows_what_train_step_gets(mode, folder, tmp_path):
    """Of a training that begins, or continues in the middle of an epoch.

    Classes that are WordNet ids have their words on both pictures.
    """
    if mode == "nd":
        folder = shutil.copytree(folder, tmp_path / "data")
        names = {f"n{number:08}": f"words {number}" for number in range(3)}
        (folder / "Labels.json").write_text(json.dumps(names))
        for place in (folder / "train", folder / "val"):
            for number, name in enumerate(names):
                (place / f"class_{number}").rename(place / name)
        (folder / "train/n00000001/003.JPEG").unlink()
    words = ("-a", "tiny_plain", "--image-size", SIZE, "-j", 1, "--epochs", 2, *CASES[mode])
    where = ("--output-dir", tmp_path, "--name", "run")
    file, processes, more = tmp_path / "shown.png", 1, ()
    if mode == "ddp":
        processes, more = 2, ("-g", 2, *where, "--resume", "auto")
        first = tuple(map(str, (*words, "--accum-steps", 4, *where, folder)))  # longer steps
        run_jobs([Job("imagenet_ddp", first, stop_after=2)], tmp_path)
    done = show("--mode", mode, *words, *more, "--out", file, folder)
    assert done.code == 0, done.err
    line = tuple(map(str, (*words, *where, *more[-2:], folder)))
    env = {"FIRST_BATCH": str(tmp_path / "batch.pt")}
    run_jobs([Job(f"imagenet_{mode}", line, processes, env=env)], tmp_path)
    batch = torch.load(tmp_path / "batch.pt").permute(0, 2, 3, 1)
    trained = ((batch * torch.tensor(STD) + torch.tensor(MEAN)) * 255).round()

    sizes = "in train/, words 0 has 20 images, and words 1 has 19"
    if mode == "ddp":
        sizes = "each class has 20 images in train/"
    assert f"wrote {tmp_path / 'shown_classes.png'}: {sizes}" in done.out
    columns, lines = {12: (5, 2), 3: (2, 1)}[len(trained)]
    shown = tiles(Image.open(file), len(trained), columns, lines)
    assert shown.tolist() == trained.int().tolist()

    events = EventAccumulator(str(tmp_path / "run"), size_guidance={"images": 0}).Reload()
    *_, image = events.Images("Images/train")
    assert image.step == {"nd": 1, "ddp": 801}[mode], "after four of five steps"
    drawn = Image.open(io.BytesIO(image.encoded_image_string))
    assert np.array_equal(np.asarray(drawn), np.asarray(Image.open(file)))


def test_the_same_images_in_several_epochs_beside_their_originals(folder, tmp_path):
    words = ("--image-size", SIZE, "-b", 10, folder)
    plain, epochs, val = (tmp_path / f"{name}.png" for name in ("plain", "epochs", "val"))
    assert show("--out", plain, *words).code == 0
    assert show("--epochs", "1,0", "--original", "--show", 3, "--out", epochs, *words).code == 0
    picture = np.asarray(Image.open(epochs))
    several = tiles(picture, 12, 8, 1)
    # Three images: original and crop in epoch 0, then in epoch 1; the rows have two images.
    crops = several.reshape(3, 2, 2, SIZE, SIZE, 3)[:, :, 1]
    for i in range(0, 12, 2):  # what is in the box is the crop, perhaps mirrored
        y, x = (GAP + place * (ZOOM * SIZE + GAP) for place in divmod(i, 8))
        whole = picture[y + i // 8 * LINE :, x:][: ZOOM * SIZE, : ZOOM * SIZE]
        rows, columns = np.nonzero((whole == [255, 32, 32]).all(2))
        box = (columns.min() + 2, rows.min() + 2, columns.max() - 1, rows.max() - 1)
        cut = np.asarray(Image.fromarray(whole).crop(box).resize((SIZE, SIZE)), float)
        apart = [np.abs(one - several[i + 1]).mean() for one in (cut, cut[:, ::-1])]
        assert min(apart) < 15
    assert np.array_equal(crops[:, 0], tiles(Image.open(plain), 3, 4, 1))
    assert not np.array_equal(crops[:, 0], crops[:, 1])
    assert show("--val", "--out", val, *words).code == 0
    shown, trained = (Image.open(file) for file in (val, plain))
    assert shown.size == trained.size and shown.tobytes() != trained.tobytes()


@pytest.mark.parametrize(("processes", "images"), [("-g 2", 6), ("-g 2 --nodes 2", 3)])
def test_the_batch_is_a_part_of_that_of_all_nodes(folder, processes, images):
    words = f"--mode ddp --image-size {SIZE} -b 6 --global-batch 12 {processes}".split()
    line = show_images.draw(show_images.parse([*words, str(folder)]))[1]
    assert line == f"{images} of the {images} images of epoch 0, step 0"


def test_the_original_of_an_unreadable_image_is_the_one_in_its_place(folder, tmp_path, monkeypatch):
    """In training the next one, after the last the first; evaluation has none."""
    monkeypatch.setattr(grid, "sheet", lambda *tiles: tiles)
    data = shutil.copytree(folder, tmp_path / "data")
    for name in ("train/class_1/002", "train/class_2/019", "val/class_1/002"):
        (data / f"{name}.JPEG").write_bytes(b"no image")
    words = ["--original", "--show", "60", "-b", "60", "--image-size", str(SIZE), str(data)]
    _, texts, _ = show_images.draw(show_images.parse(words))[0]
    names = Counter(zip(texts[::2], texts[1::2], strict=True))  # and classes
    assert names["003.JPEG", "class_1"] == names["000.JPEG", "class_0"] == 2
    assert names.total() == 60 and not names["002.JPEG", "class_1"] + names["019.JPEG", "class_2"]
    pictures, texts, _ = show_images.draw(show_images.parse(["--val", *words]))[0]
    at = texts.index("unreadable")
    assert texts[at - 1] == "002.JPEG" and np.median(pictures[at - 1]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--epochs=0,90", "epoch 90 is not one of the 90 epochs"),
        ("--out picture.doc", "ends in .png"),
        ("--out .", "ends in .png"),
        ("--out /dev/null/x.png", "cannot write .* another place with --out"),
        ("--dummy", "--dummy has no images"),
        ("--val --epochs 0,1", "leave out --val"),
    ],
)
def test_bad_input_is_an_error(monkeypatch, words, message, folder):
    line = f"show_images.py --image-size 32 -b 4 {words} {folder}"
    monkeypatch.setattr(sys, "argv", line.split())
    with pytest.raises(UserError, match=message):
        show_images.main()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--mode ddp -g 2 --nodes 2 --global-batch 12", "3 of the 3 images"),
        ("-b 40", "32 of the 40 images"),  # as many tiles as fit
        ("-b 40 --original", "16 of the 40 images"),
        ("-b 40 --original --epochs 0,2", "8 of the 40 images"),
        ("-b 40 --show 33", "33 of the 40 images"),
        ("-b 4 --image-size 100", "4 of the 4 images"),  # large enough without magnifying
    ],
)
def test_how_many_images_are_drawn(monkeypatch, capsys, tmp_path, folder, words, shown):
    line = f"show_images.py --image-size {SIZE} {words} --out {tmp_path}/shown.png {folder}"
    monkeypatch.setattr(sys, "argv", line.split())
    assert show_images.main() == 0
    assert f": {shown} of epoch 0, step 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step", "url", "more", "begins"),
    [
        (6, "", (), "epoch 1, step 0"),
        (5, "", (), "epoch 0, step 5"),
        (5, "file://", (), "epoch 0, step 5"),
        (5, "", ("--start-epoch", 2), "epoch 2, step 0"),
    ],
)
def test_after_the_last_step_comes_the_next_epoch(
    monkeypatch, capsys, tmp_path, folder, step, url, more, begins
):
    """Of a training that was stopped in the evaluation, and of one that was stopped before."""
    progress = {"epoch": 0, "step": step, "global_batch": 10}
    torch.save({"progress": progress}, tmp_path / "snapshot.pt")
    words = ("--resume", f"{url}{tmp_path / 'snapshot.pt'}", "-b", 10, "--image-size", SIZE)
    words += (*more, "--out", tmp_path / "shown.png", folder)
    monkeypatch.setattr(sys, "argv", ["show_images.py", *map(str, words)])
    assert show_images.main() == 0
    assert f"10 of the 10 images of {begins}" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "first"), [(999, None), (1000, "tench"), (1001, None)])
def test_only_as_many_classes_as_imagenets_have_its_words(tmp_path, number, first):
    """ImageNet-21k has WordNet ids, too."""
    ids = ["n01440764", *(f"n{2_000_000 + i:08}" for i in range(number - 2)), "n15075141"]
    assert wordnet.words(ids, tmp_path / "data")[0] == (first or ids[0])


def test_captions_name_the_classes_and_the_shares_of_mixed_images():
    names = ["cat", "dog", "emu"]
    assert grid.captions(torch.tensor([2, -1, 0]), names) == ["emu", "unreadable", "cat"]
    mixed = torch.tensor([[0.02, 0.0, 0.98], [0.0, 1.0, 0.0]])
    assert grid.captions(mixed, names) == ["98% emu\n2% cat", "100% dog"]


@pytest.mark.parametrize("classes", [3, 100])
def test_unequal_classes_are_seen_and_said(tmp_path, monkeypatch, classes):
    # With a byte of Latin-1; the longest names of three classes that are written in full.
    names = [f"class {i} *$_x dogs.\udce4" for i in range(classes)]
    targets = {"train": [0] * 7 + [1] * 9 + list(range(2, classes)), "val": [0, 0, 1]}
    file, figures, save = tmp_path / "sizes.png", [], class_sizes.pictures.save
    monkeypatch.setattr(
        class_sizes.pictures, "save", lambda *both: figures.append(both[0]) or save(*both)
    )
    said = class_sizes.draw(names, targets, file)
    assert said == f"in train/, {names[1]} has 9 images, and {names[-1]} has 1"
    assert file.is_file()
    bars = [[bar.get_width() for bar in axis.patches[:3]] for axis in figures[0].axes]
    assert bars == [[9, 7, 1], [1, 2, 0]], "the largest class of training first, in both"
    labels = [label.get_text() for label in figures[0].axes[0].get_yticklabels()]
    assert classes == 100 or labels == [f"class {i} *$_x dogs.\\udce4" for i in (1, 0, 2)]
    equal = class_sizes.draw(names, {"train": [*range(classes), *range(classes)]}, file)
    assert equal == "each class has 2 images in train/"
