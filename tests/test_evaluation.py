"""Evaluation counts every image once; odd images and other programs' checkpoints are taken."""

import random
from pathlib import Path

import joined
import pytest
import torch
from conftest import SMALL, draw_folder, python, scalars, summary, train
from PIL import Image
from running import tiny
from torchvision.models import get_model

MANY = 503  # a prime: no number of processes or batch size divides it


# ---- one result at any world size


def test_every_image_counts_once_on_any_number_of_processes(tmp_path):
    """By random weights. There are more than 5 classes, or top-5 would be 100 %."""
    source = random.Random(5)
    for number in range(7):
        (tmp_path / "data/val" / f"class_{number}").mkdir(parents=True)
    for i in range(MANY):
        # 4 x 4 pixels of noise; a dozen of the files, far apart, are of other sizes.
        size = (4, 4) if i % 41 else (3 + i % 5, 4)
        image = Image.frombytes("RGB", size, source.randbytes(3 * size[0] * size[1]))
        image.save(tmp_path / "data/val" / f"class_{i % 7}" / f"{i}.png", compress_level=0)
    options = ("-e", "-a", "resnet18", "--image-size", 8, "-b", 64, "-j", 0)
    options += ("--output-dir", tmp_path, tmp_path / "data", "--name")
    counts = (1, 2, 3)
    ways = ("imagenet_nd", "imagenet_ddp", "imagenet_ddp")
    jobs = [joined.Job(way, (*options, n), n) for way, n in zip(ways, counts, strict=True)]
    joined.run_jobs(jobs, tmp_path)
    alone, *others = (summary(tmp_path / str(count)) for count in counts)
    assert 0 < alone["val_top1"] < alone["val_top5"] < 100
    for key in ("val_top1", "val_top5"):
        hits = alone[key] / 100 * MANY
        assert hits == pytest.approx(round(hits), abs=1e-6), key  # a whole number of them
    for count, found in zip(counts, (alone, *others), strict=True):
        assert (found["world_size"], found["val_images"]) == (count, MANY)
        for key in ("val_top1", "val_top5"):
            assert found[key] == alone[key], key
        assert found["val_loss"] == pytest.approx(alone["val_loss"], rel=1e-6)


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


def test_odd_images_are_good_images_and_unreadable_ones_are_named(tmp_path):
    data = draw_folder(tmp_path / "data", train=6, val=4)
    for part in ("train", "val"):
        for number in range(3):
            odd = data / part / f"class_{number}" / "odd"  # sub-folders count, too
            odd.mkdir()
            kinds = odd_images(odd, number)
    bad = [data / part / "class_1" / "001.JPEG" for part in ("train", "val")]
    bad[0].write_bytes(bad[0].read_bytes()[:300])
    bad[1].write_bytes(b"")
    model, env = tiny()
    options = (*model, "-b", "19", "-j", "0", "--epochs", "2", "--max-bad-files", "1")
    options += ("--ema", "0.9", "--output-dir", tmp_path, "--name", "odd")
    done = train("imagenet_nd.py", *options, data, **env)
    assert f"{3 * (6 + kinds)} images in 3 classes" in done.out
    found = summary(tmp_path / "odd")
    assert (found["epochs_done"], found["finished_because"]) == (2, "epochs")
    assert (found["val_images"], found["val_unreadable"]) == (3 * (4 + kinds) - 1, 1)
    assert found["val_ema_loss"] != found["val_loss"]  # of other weights
    assert scalars(tmp_path / "odd")["IO/bad_files"] == [(1, 1), (2, 1)]
    assert done.out.count("unreadable image ") == 2
    for path in bad:
        assert done.out.count(f"unreadable image {path}") == 1, "once, not in every epoch"


def test_validation_without_a_readable_image_is_an_error(tmp_path):
    """In a training, whose snapshot is kept; there are fewer than --max-bad-files."""
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


# ---- a checkpoint of pytorch/examples


def test_checkpoint_of_pytorch_examples_is_resumed(folder, tmp_path):
    """checkpoint.pth.tar as pytorch/examples/imagenet/main.py saves it after 3 epochs."""
    torch.manual_seed(7)
    model = torch.nn.DataParallel(get_model("resnet18", num_classes=3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    model(torch.randn(8, 3, 32, 32)).square().mean().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    examples = tmp_path / "checkpoint.pth.tar"
    content = {
        "epoch": 3,
        "arch": "resnet18",
        "state_dict": model.state_dict(),
        "best_acc1": torch.tensor(99.5),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
    }
    torch.save(content, examples)
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
    name = "layer1.0.conv1.weight"
    assert torch.equal(saved["model"][name], content["state_dict"][f"module.{name}"])  # --lr 0
