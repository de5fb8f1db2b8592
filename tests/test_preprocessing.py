"""How images become a model's input: sizes of the command line, of a checkpoint, of each epoch."""

import json
from argparse import Namespace

import pytest
import torch
from batches import SEED, batches_of, fetch, noise_index, picture
from conftest import python, summary
from PIL import Image
from torchvision.models import VisionTransformer, get_model_weights

from utils import loop
from utils.data import progressive
from utils.data.folder import open_folder
from utils.data.images import ImageBatches
from utils.data.preprocessing import IMAGENET, SIZES, Preprocessing
from utils.data.samplers import EvalSampler, TrainSampler
from utils.data.sources import Source
from utils.model import amp, models, pretrained_weights
from utils.start.errors import UserError
from utils.start.option_types import Options
from utils.start.world import World


@pytest.fixture
def index(tmp_path) -> Source:
    """JPEG files like photographs: upright, lying on its side, and a small long one."""
    (tmp_path / "c").mkdir()
    for number, shape in enumerate([(645, 480), (500, 700), (61, 600)]):
        picture(*shape, seed=number).save(tmp_path / "c" / f"{number}.jpg", quality=95)
    return open_folder(tmp_path, ["c"])


def evaluated(index, preprocessing) -> torch.Tensor:
    """All images as evaluation sees them."""
    batches = batches_of(index, EvalSampler(len(index), len(index), (0, 1)), size=224)
    batches.use(preprocessing)
    ((images, _),) = batches
    return images


@pytest.mark.parametrize("arch", ["inception_v3", "swin_t", "efficientnet_v2_l"])
def test_pixels_are_those_of_torchvisions_own_transforms(index, arch):
    images = evaluated(index, pretrained_weights.published_preprocessing(arch))
    transform = get_model_weights(arch).DEFAULT.transforms()
    for number in range(len(index)):
        expected = transform(Image.open(index.path(number)).convert("RGB"))
        std = torch.tensor(transform.std)[:, None, None]
        levels = (images[number] - expected).abs() * 255 * std
        assert levels.mean() < 0.3
        assert levels.max() < 1.01, "no more than another rounding"


def test_training_and_evaluation_have_sizes_of_their_own(index):
    batches = batches_of(index, TrainSampler(2, 2, (0, 1), 1, 0), size=224)
    batches.use(Preprocessing(interpolation="bicubic", image_size=64, val_image_size=96))
    plain = ImageBatches(index, 64, SEED, train=True, interpolation="bicubic")
    assert torch.equal(fetch(batches.dataset, [0, 1])[0], fetch(plain, [0, 1])[0])
    both = IMAGENET.resized(64, None, 96)
    assert str(both).startswith("64 pixels (evaluation: 96 from the centre of 110), bilinear")
    assert torch.equal(evaluated(index, both), evaluated(index, IMAGENET.resized(96, 110)))


# ---- sizes on the command line and in a file


@pytest.mark.parametrize(
    ("line", "size", "short", "crop", "defaulted"),
    [
        ("", 224, 256, 224, SIZES),
        ("--val-resize-size 224", 224, 224, 224, SIZES[::2]),
        ("--pretrained --image-size 224", 224, 256, 224, SIZES[1:]),
        ("--image-size 160 --val-image-size 192", 160, 219, 192, SIZES[1:2]),
        ("--pretrained --val-image-size 320", 299, 366, 320, SIZES[:2]),
    ],
)
def test_sizes_on_the_command_line(parse, folder, line, size, short, crop, defaulted):
    args = Namespace(**parse("imagenet_nd", "-a", "inception_v3", *line.split(), folder))
    how = args.preprocessing
    assert (how.image_size, how.val_resize_size, how.crop) == (size, short, crop)
    assert (args.image_size, args.defaulted_sizes) == (size, defaulted)
    assert Preprocessing.from_dict(how.as_dict(), "") == how
    # What a checkpoint says stays in proportion to a size on the command line.
    larger = how.resized(2 * size, None)
    assert (larger.crop, larger.val_resize_size) == (2 * crop, 2 * short)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--val-image-size 256", r"vit_b_32 does not take .* 256 .* --val-image-size"),
        ("--progressive 32:224 --epochs 4", r"images of 32 pixels.*--progressive"),
        ("--val-resize-size 223", "size 223 is smaller than the crop, --image-size 224"),
    ],
)
def test_sizes_that_do_not_fit_are_rejected(monkeypatch, parse, folder, line, message):
    small = VisionTransformer(224, 32, num_layers=1, num_heads=1, hidden_dim=8, mlp_dim=8)
    monkeypatch.setattr(models, "create", lambda *_: small)
    with pytest.raises(UserError, match=message):
        parsed = parse("imagenet_nd", "-a", "vit_b_32", *line.split(), folder)
        models.build(Namespace(**parsed), [*"abc"])


def test_omitted_sizes_come_from_the_checkpoint_before_the_precision_is_chosen(
    monkeypatch, parse, folder, tmp_path
):
    """bf16 pays off on a CPU from 224 pixels on. A damaged snapshot has the one before it."""
    monkeypatch.setattr(amp, "has_amx", lambda: True)
    saved = IMAGENET.resized(64, None).as_dict()
    for name in ("best.pt", "snapshot_previous.pt"):
        torch.save({"preprocessing": saved}, tmp_path / name)
    (tmp_path / "snapshot.pt").write_bytes(b"damaged")
    for file, words, size, crop, dtype in (
        ("best.pt", "", 64, 64, None),
        ("best.pt", "--image-size 224", 224, 224, torch.bfloat16),
        ("best.pt", "--val-image-size 96", 64, 96, None),
        ("snapshot.pt", "", 64, 64, None),
    ):
        line = ("-e", "--resume", tmp_path / file, *words.split(), folder)
        options, world = Options(**parse("imagenet_nd", *line)), World(torch.device("cpu"))
        args = loop.with_checkpoint_sizes(options, world)
        how = args.preprocessing
        assert (args.image_size, how.image_size, how.crop) == (size, size, crop)
        assert amp.autocast_dtype(args, world) is dtype


def test_evaluation_uses_the_preprocessing_of_training(folder, tmp_path):
    """The checkpoint says how, except for sizes on the command line."""
    command = ("imagenet_nd.py", "-a", "tiny_plain", "-j", 0, "--output-dir", tmp_path, folder)
    text = "40 pixels (evaluation: the centre of 43), bicubic, mean 0.5 0.5 0.5, std 0.5 0.5 0.5\n"
    done = python(*command, "--pretrained", "--epochs", 1, "--name", "a")
    assert f"preprocessing as in the pretrained weights: {text}" in done.out, done.err
    evaluate = (*command, "-e", "--resume", tmp_path / "a" / "best.pt", "--name")
    done = python(*evaluate, "e")
    assert f"preprocessing as in {tmp_path}/a/best.pt: {text}" in done.out, done.err
    assert "changed since" not in done.out
    assert summary(tmp_path / "e")["val_loss"] == summary(tmp_path / "a")["val_loss"]
    done = python(*evaluate, "larger", "--image-size", 80)
    assert ": 80 pixels (evaluation: the centre of 86), bicubic, mean" in done.out, done.err
    options = [(tmp_path / name / "options.json").read_text() for name in ("e", "larger")]
    assert [json.loads(text)["image_size"] for text in options] == [40, 80]


# ---- --progressive: a size for each epoch


@pytest.mark.parametrize(
    ("text", "epochs", "sizes"),
    [
        # As get_resolution of ffcv-imagenet's train_imagenet.py with its ramp, epochs 23 to 27.
        ("160:192", 32, (160,) * 25 + (192,) * 7),
        ("96:224", 40, (96,) * 29 + (128, 160, 160, 192) + (224,) * 7),
        ("24:40", 10, (24,) * 7 + (32,) + (40,) * 2),  # in steps of their greatest common divisor
        ("160:192", 2, (160, 192)),  # few epochs end at the larger size, too
        ("64:224", 3, (64, 64, 224)),
        ("160:192", 1, (192,)),
        ("160:192", 0, ()),
        ("160,96,128", 7, (160, 160, 160, 96, 96, 128, 128)),
    ],
)
def test_sizes(text, epochs, sizes):
    assert progressive.check(text) == text
    assert progressive.sizes(text, epochs) == sizes


def test_an_epochs_batches_are_those_of_a_data_set_of_its_size(tmp_path):
    """The same slots for all sizes; resumed in the middle of the larger one, too."""
    index, sizes = noise_index(tmp_path, 18, "jpg", 50, 60), (16, 24, 20)
    sampler, plain = (TrainSampler(len(index), 4, (0, 1), 1, SEED) for _ in range(2))
    sampler.sizes = sizes
    batches = batches_of(index, sampler)
    batches.use(Preprocessing(image_size=20, val_resize_size=20))
    for epoch, step in ((0, 0), (1, 2), (2, 0), (3, 1)):
        sampler.start_at(epoch, step)
        plain.start_at(epoch, step)
        alone = batches_of(index, plain, size=sizes[min(epoch, 2)])
        for (images, targets), (others, labels) in zip(batches, alone, strict=True):
            assert torch.equal(images, others) and torch.equal(targets, labels)
