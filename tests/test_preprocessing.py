"""Images as pretrained weights want them, from the weights' own description to a run and back."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from batches import batches_of, fetch, picture
from conftest import python, summary
from PIL import Image
from running import snapshot, tiny
from torchvision.models import VisionTransformer, get_model_weights

from utils import options
from utils.data import images as im
from utils.data.dataset import ImageBatches
from utils.data.index import ImageIndex
from utils.data.preprocessing import IMAGENET, Preprocessing
from utils.errors import UserError
from utils.model import models
from utils.samplers import EvalSampler, TrainSampler
from utils.train import loop

HALVES = (0.5, 0.5, 0.5)
SIZES = ("image_size", "val_resize_size", "val_image_size")


def test_every_model_of_torchvision_says_what_it_wants():
    assert models.preprocessing("alexnet") == IMAGENET
    for arch in models.names():
        wanted = models.preprocessing(arch)
        assert wanted.resized(None, None) == wanted == Preprocessing.from_dict(wanted.as_dict(), "")


@pytest.mark.parametrize(
    ("share", "short", "named", "taken"),
    [
        (0.9, 248, "bilinear", "bilinear"),  # timm rounds down
        (1.0, 224, "lanczos", "bicubic"),
    ],
)
def test_what_weights_of_timm_want(monkeypatch, share, short, named, taken):
    config = SimpleNamespace(
        input_size=(3, 224, 224), crop_pct=share, interpolation=named, mean=HALVES, std=HALVES
    )
    timm = SimpleNamespace(
        get_pretrained_cfg=lambda name: config, is_model_pretrained=lambda name: name == "tinynet_e"
    )
    monkeypatch.setattr(models, "timm", timm)
    assert models.preprocessing("tinynet_e") == Preprocessing(HALVES, HALVES, taken, 224, short)
    assert models.preprocessing("tinynet_f") is None


# ---- pixels


@pytest.fixture
def index(tmp_path) -> ImageIndex:
    """A photograph-like JPEG, upright, and one lying on its side."""
    (tmp_path / "c").mkdir()
    for number, shape in enumerate([(640, 480), (500, 700)]):
        picture(*shape, seed=number).save(tmp_path / "c" / f"{number}.jpg", quality=95)
    return ImageIndex(tmp_path, ["c"])


def evaluated(index, wanted) -> torch.Tensor:
    """All images as evaluation sees them."""
    batches = batches_of(index, EvalSampler(len(index), len(index), (0, 1)), 1, size=224)
    batches.use(wanted)
    ((found, _),) = batches
    return found


@pytest.mark.parametrize("arch", ["inception_v3", "resnet50", "swin_t", "efficientnet_v2_l"])
def test_pixels_are_those_of_torchvisions_own_transforms(index, arch):
    found = evaluated(index, models.preprocessing(arch))
    transform = get_model_weights(arch).DEFAULT.transforms()
    for number in range(2):
        expected = transform(Image.open(index.path(number)).convert("RGB"))
        levels = (found[number] - expected).abs() * 255 * torch.tensor(transform.std)[:, None, None]
        assert levels.mean() < 0.3
        assert levels.max() < 1.01, "no more than another rounding"


@pytest.mark.parametrize("partly", [True, False])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_training_crops_are_resized_as_asked(index, interpolation, partly):
    dataset = ImageBatches(index, 224, 0, train=True)
    dataset.partly, dataset.interpolation = partly, interpolation
    for number, found in enumerate(fetch(dataset, range(2))[0]):
        image = im.decode(Path(index.path(number)).read_bytes())
        cut = dataset._cut(tuple(image.shape[1:]), number, 224)
        assert torch.equal(found, im.view(image, cut, interpolation))


# ---- sizes that somebody types, and what a file says


def parse(monkeypatch, folder, *line):
    monkeypatch.setattr(sys, "argv", ["imagenet_nd.py", *map(str, line), str(folder)])
    return options.parse(options.build_parser("", "images"))


TWO = ("val_resize_size", "val_image_size")


@pytest.mark.parametrize(
    ("line", "size", "short", "crop", "untyped"),
    [
        ((), 224, 256, 224, SIZES),
        (("--image-size", 112), 112, 128, 112, TWO),
        (("--val-resize-size", 224), 224, 224, 224, ("image_size", "val_image_size")),
        (("--pretrained",), 299, 342, 299, SIZES),
        (("--pretrained", "--image-size", 224), 224, 256, 224, TWO),
        (("--val-image-size", 256), 224, 293, 256, SIZES[:2]),
        (("--image-size", 160, "--val-image-size", 192), 160, 219, 192, SIZES[1:2]),
        (("--val-image-size", 256, "--val-resize-size", 256), 224, 256, 256, SIZES[:1]),
        (("--pretrained", "--val-image-size", 320), 299, 366, 320, SIZES[:2]),
    ],
)
def test_typed_sizes_win(monkeypatch, folder, line, size, short, crop, untyped):
    args = parse(monkeypatch, folder, "-a", "inception_v3", *line)
    found = args.preprocessing
    assert (found.image_size, found.val_resize_size, found.crop) == (size, short, crop)
    assert (args.image_size, args.untyped) == (size, untyped)
    assert Preprocessing.from_dict(found.as_dict(), "") == found
    if crop != size:
        assert f"(evaluation: {crop} from the centre of {short})" in str(found)
    # What a checkpoint says stays in proportion to a size that is typed.
    assert found.resized(2 * size, None).crop == 2 * crop


def test_a_size_of_evaluation_is_seen_in_evaluation_alone(index):
    wanted = IMAGENET.resized(64, None, 96)
    batches = batches_of(index, TrainSampler(2, 2, (0, 1), 1, 0), size=224)
    batches.use(wanted)
    assert next(iter(batches))[0].shape == (2, 3, 64, 64)
    assert torch.equal(evaluated(index, wanted), evaluated(index, IMAGENET.resized(96, 110)))


def test_a_size_of_evaluation_that_the_model_does_not_take_is_refused(monkeypatch, folder):
    args = parse(monkeypatch, folder, "-a", "vit_b_32", "--val-image-size", 256)
    small = VisionTransformer(224, 32, num_layers=1, num_heads=1, hidden_dim=8, mlp_dim=8)
    monkeypatch.setattr(models, "create", lambda *_: small)
    with pytest.raises(UserError, match=r"vit_b_32 does not take .* 256 .* --val-image-size"):
        models.build(args, 3)


def test_a_crop_larger_than_its_image_is_refused(monkeypatch, folder):
    with pytest.raises(UserError, match=r"size 280 is smaller than the crop, --image-size 299"):
        parse(monkeypatch, folder, "-a", "inception_v3", "--pretrained", "--val-resize-size", 280)


def settle(args, saved):
    """What `loop.resume` makes of a checkpoint's preprocessing: the loaders', the run's options."""
    used, state = [], SimpleNamespace(preprocessing=saved)
    run = SimpleNamespace(snapshot="best.pt", options={"image_size": args.image_size})
    session = SimpleNamespace(
        args=args, state=state, run=run, loaders=SimpleNamespace(use=used.append)
    )
    loop._resolve_preprocessing(session)
    assert Preprocessing.from_dict(state.preprocessing, "") == args.preprocessing == used[0]
    assert run.options == {"image_size": args.image_size}
    assert args.image_size == used[0].image_size
    return used[0]


OF_FILE = Preprocessing(HALVES, HALVES, "bicubic", 100, 110)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ((), OF_FILE),
        (("--pretrained",), OF_FILE),
        (("--image-size", 224), Preprocessing(HALVES, HALVES, "bicubic", 224, 246)),
        (("--val-resize-size", 240), Preprocessing(HALVES, HALVES, "bicubic", 100, 240)),
    ],
)
def test_a_checkpoint_decides_but_for_typed_sizes(monkeypatch, folder, logged, line, expected):
    args = parse(monkeypatch, folder, "-a", "inception_v3", *line)
    assert settle(args, OF_FILE.as_dict()) == expected
    assert logged == [f"preprocessing as in best.pt: {expected}"]


@pytest.mark.parametrize("saved", [[1, 2], {"colour": "blue"}], ids=str)
def test_a_checkpoint_with_unknown_preprocessing_is_refused(monkeypatch, folder, saved):
    args = parse(monkeypatch, folder)
    with pytest.raises(UserError, match=r"best\.pt has unknown preprocessing"):
        settle(args, saved)


@pytest.mark.long  # the functions are tested above
def test_a_run_evaluates_its_model_with_the_images_that_it_was_trained_on(folder, tmp_path):
    model, env = tiny()
    line = (*model, "-j", 1, "--output-dir", tmp_path, folder)
    done = python("imagenet_nd.py", *line, "--pretrained", "--epochs", 1, "--name", "a", **env)
    assert done.code == 0, done.err
    told = "40 pixels (evaluation: the centre of 44), bicubic, mean 0.5 0.5 0.5, std 0.5 0.5 0.5"
    assert f"preprocessing as in the pretrained weights: {told}\n" in done.out
    run = tmp_path / "a"
    wanted = Preprocessing(HALVES, HALVES, "bicubic", 40, 44)
    for name in ("snapshot.pt", "best.pt"):
        assert Preprocessing.from_dict(snapshot(run, name)["preprocessing"], name) == wanted
    assert snapshot(run)["options"]["image_size"] == 40
    best = ("-e", "--resume", run / "best.pt")
    done = python("imagenet_nd.py", *line, *best, "--name", "e", **env)
    assert done.code == 0, done.err
    assert f"preprocessing as in {run / 'best.pt'}: {told}\n" in done.out
    assert "changed since" not in done.out
    assert summary(tmp_path / "e")["val_loss"] == summary(run)["val_loss"]
