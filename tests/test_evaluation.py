"""Evaluation counts every image once; odd images and other programs' checkpoints are taken."""

import random
from pathlib import Path

import pytest
import torch
from conftest import SMALL, draw_folder, python, scalars, summary, train
from PIL import Image
from running import tiny
from torchvision.models import get_model

MANY = 2003  # a prime: no number of processes or batch size divides it
PROCESSES = (1, 2, 3)


# ---- one result at any world size


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> dict[int, dict]:
    """summary.json of `MANY` images evaluated by 1, 2 and 3 processes, with random weights."""
    root, runs = tmp_path_factory.mktemp("many"), tmp_path_factory.mktemp("evaluated")
    source = random.Random(5)
    for number in range(7):  # more than 5 classes, or top-5 would be 100 %
        (root / "val" / f"class_{number}").mkdir(parents=True)
    for i in range(MANY):
        # 4 x 4 pixels of noise; a dozen of the files, far apart, are of other sizes.
        size = (4, 4) if i % 166 else (3 + i % 5, 4)
        image = Image.frombytes("RGB", size, source.randbytes(3 * size[0] * size[1]))
        image.save(root / "val" / f"class_{i % 7}" / f"{i}.png", compress_level=0)
    options = ("-e", "--image-size", "8", "-b", "64", "-j", "0", "--output-dir", runs, root)
    for count in PROCESSES:
        script, processes = ("imagenet_ddp.py", count) if count > 1 else ("imagenet_nd.py", 0)
        train(script, *options, "--name", str(count), processes=processes)
    return {count: summary(runs / str(count)) for count in PROCESSES}


@pytest.mark.parametrize("count", PROCESSES)
def test_every_image_counts_once_on_any_number_of_processes(evaluated, count):
    alone, together = evaluated[1], evaluated[count]
    assert (together["world_size"], together["val_images"]) == (count, MANY)
    assert 0 < alone["val_top1"] < alone["val_top5"] < 100
    for key in ("val_top1", "val_top5"):
        assert together[key] == alone[key], key
        hits = alone[key] / 100 * MANY
        assert hits == pytest.approx(round(hits), abs=1e-6), key  # a whole number of them
    assert together["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-6)


# ---- odd kinds of images


def odd_images(folder: Path, number: int) -> int:
    """Write one image of every odd kind, named as in ImageNet. Returns their number."""
    colour = [60, 60, 60]
    colour[number] = 200
    plain = Image.new("RGB", (48, 40), tuple(colour))
    rotated = Image.Exif()
    rotated[0x0112] = 6  # Orientation: turn by 90 degrees
    plain.convert("L").save(folder / "grey.JPEG", "JPEG")
    plain.convert("CMYK").save(folder / "cmyk.JPEG", "JPEG")
    plain.save(folder / "png.JPEG", "PNG")
    plain.convert("P").save(folder / "palette.PNG")
    plain.convert("RGBA").save(folder / "alpha.png")
    plain.convert("I;16").save(folder / "sixteen_bits.png")
    plain.save(folder / "progressive.jpg", "JPEG", progressive=True)
    plain.save(folder / "turned.JPEG", "JPEG", exif=rotated)
    plain.save(folder / "webp.webp")
    plain.save(folder / "bitmap.bmp")
    plain.resize((1, 1)).save(folder / "dot.JPEG", "JPEG")
    plain.resize((200, 3)).save(folder / "line.JPEG", "JPEG")
    plain.resize((4000, 3000)).save(folder / "huge.JPEG", "JPEG")
    return len(list(folder.iterdir()))


def test_odd_images_are_good_images(tmp_path):
    data = draw_folder(tmp_path / "data", train=2, val=1)
    for part in ("train", "val"):
        for number in range(3):
            odd = data / part / f"class_{number}" / "odd"  # sub-folders count, too
            odd.mkdir()
            kinds = odd_images(odd, number)
    options = ("-b", "5", "-j", "0", "--epochs", "2", "--max-bad-files", "0")
    done = train("imagenet_nd.py", *options, "--output-dir", tmp_path, "--name", "odd", data)
    found = summary(tmp_path / "odd")
    assert (found["epochs_done"], found["finished_because"]) == (2, "epochs")
    assert found["val_images"] == 3 * (1 + kinds)
    assert found["val_unreadable"] == 0
    assert [value for _, value in scalars(tmp_path / "odd")["IO/bad_files"]] == [0, 0]
    assert f"{3 * (2 + kinds)} images in 3 classes" in done.out


def test_unreadable_images_are_counted_and_named_in_the_log(tmp_path):
    data = draw_folder(tmp_path / "data", train=6, val=4)
    bad = [data / part / "class_1" / "001.JPEG" for part in ("train", "val")]
    bad[0].write_bytes(bad[0].read_bytes()[:300])
    bad[1].write_bytes(b"")
    options = ("-b", "6", "-j", "0", "--epochs", "2", "--max-bad-files", "1")
    done = train("imagenet_nd.py", *options, "--output-dir", tmp_path, "--name", "bad", data)
    found = summary(tmp_path / "bad")
    assert (found["epochs_done"], found["val_images"], found["val_unreadable"]) == (2, 11, 1)
    assert [value for _, value in scalars(tmp_path / "bad")["IO/bad_files"]] == [1, 1]
    for path in bad:
        assert done.out.count(f"unreadable image {path}") == 1, "once, not in every epoch"


@pytest.mark.long
def test_validation_without_a_readable_image_is_an_error(tmp_path):
    """In a training, whose snapshot is kept, and alone; there are fewer than --max-bad-files."""
    data = draw_folder(tmp_path / "data", train=6, val=2)
    for path in (data / "val").glob("*/*"):
        path.write_bytes(b"no image")
    model, env = tiny()
    line = ("imagenet_nd.py", *SMALL, *model, "-b", "5000", "--epochs", "2", "--output-dir")
    done = python(*line, tmp_path, "--name", "blind", data, **env)
    assert done.code == 2
    assert f"none of the 6 images in {data / 'val'} could be read" in done.sentence
    assert "global batch 18 (5000 per process x 1; the whole data set is one step)" in done.out
    progress = torch.load(tmp_path / "blind" / "snapshot.pt", weights_only=True)["progress"]
    assert (progress["epoch"], progress["step"]) == (0, 1)
    alone = python(
        "imagenet_ddp.py", *SMALL, *model, "-e", "-g", "2", "--output-dir", tmp_path, data, **env
    )
    assert alone.code == 2
    assert "none of the 6 images" in alone.sentence


# ---- a checkpoint of pytorch/examples


@pytest.fixture(scope="module")
def examples(folder, tmp_path_factory) -> Path:
    """checkpoint.pth.tar as pytorch/examples/imagenet/main.py saves it after 3 epochs."""
    torch.manual_seed(7)
    model = torch.nn.DataParallel(get_model("resnet18", num_classes=3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    model(torch.randn(8, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    path = tmp_path_factory.mktemp("examples") / "checkpoint.pth.tar"
    content = {
        "epoch": 3,
        "arch": "resnet18",
        "state_dict": model.state_dict(),
        "best_acc1": torch.tensor(99.5),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    assert all(name.startswith("module.") for name in content["state_dict"])
    torch.save(content, path)
    return path


def test_checkpoint_of_pytorch_examples_is_resumed(examples, folder, tmp_path):
    before = examples.read_bytes()
    options = ("-b", "10", "-j", "0", "--epochs", "4", "--lr", "0", "--wd", "0")
    options += ("--output-dir", tmp_path, "--name", "on", "--resume", examples)
    done = train("imagenet_nd.py", *options, folder)
    found = summary(tmp_path / "on")
    assert found["epochs_done"] == 4
    # Theirs may be of other images: it is printed, and keeps no best model from being saved.
    assert "99.5" in done.out
    assert found["best_top1"] == found["val_top1"] < 99.5
    assert (tmp_path / "on" / "best.pt").is_file()
    assert [x for x, _ in scalars(tmp_path / "on")["Loss/train"]] == [4]
    assert examples.read_bytes() == before
    saved = torch.load(tmp_path / "on" / "snapshot.pt", weights_only=True)
    theirs = torch.load(examples, weights_only=True)
    name = "layer1.0.conv1.weight"
    assert torch.equal(saved["model"][name], theirs["state_dict"][f"module.{name}"])  # --lr 0
