"""Models by name: heads, image sizes, pretrained weights (made up, nothing is downloaded)."""

from types import SimpleNamespace
from urllib.error import URLError

import pytest
import torch
from torchvision.models import WeightsEnum, get_model

from utils.errors import UserError
from utils.model import models

# A model of each family. They are built on the meta device: shapes without numbers.
FAMILIES = [
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mobilenet_v3_small",
    "resnet18",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "swin_t",
    "vgg11_bn",
    "vit_b_32",
]
AUXILIARY = ("googlenet", "inception_v3")
META = pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")


def logits(model, size):
    return model(torch.empty(2, 3, size, size, device="meta"))


@pytest.fixture
def downloaded(monkeypatch):
    """What would be downloaded comes from a fresh model instead, auxiliary heads included.

    Returns: a dictionary into which the state dict goes.
    """
    given = {}

    def state_dict(self, *_, **__):
        arch = type(self).__name__.removesuffix("_Weights").lower()
        extra = {"init_weights": False} if arch in AUXILIARY else {}
        torch.manual_seed(0)
        state = get_model(arch, weights=None, **extra).state_dict()
        given.update(state)
        return state

    monkeypatch.setattr(WeightsEnum, "get_state_dict", state_dict)
    return given


@pytest.mark.parametrize(
    ("arch", "size"),
    [("googlenet", 224), ("inception_v3", 299), ("resnet18", 32), ("squeezenet1_1", 224)]
    + [("vgg11_bn", 224), ("swin_t", 224), ("vit_b_32", 64), ("maxvit_t", 448)],
)
def test_new_model_has_the_asked_number_of_logits_at_any_fitting_size(arch, size):
    with torch.device("meta"):
        model = models.create(arch, 7, size)
    assert model.training
    got = logits(model, size)
    assert isinstance(got, torch.Tensor), "no auxiliary outputs in training"
    assert got.shape == (2, 7)


@META
@pytest.mark.parametrize(
    ("arch", "classes", "size"),
    [(arch, 7, 299 if arch == "inception_v3" else 224) for arch in FAMILIES]
    + [("resnet18", 1000, 224), ("vit_b_32", 7, 96)],
)
def test_pretrained_model_gets_a_head_of_its_own(arch, classes, size, downloaded):
    """And position embeddings of another size, if the images have one."""
    with torch.device("meta"):
        model = models.create(arch, classes, size, pretrained=True)
    assert logits(model, size).shape == (2, classes)
    ours = model.state_dict()
    assert list(ours) == [name for name in downloaded if "aux" not in name.lower()]
    changed = {name for name in ours if ours[name].shape != downloaded[name].shape}
    positions = {"encoder.pos_embedding"} if size == 96 else set()
    assert positions <= changed
    layers = {name.rpartition(".")[0] for name in changed - positions}
    assert len(layers) == (classes != 1000), "the last layer alone"
    assert all(ours[name].shape[0] == classes for name in changed - positions)


@pytest.mark.parametrize("classes", [7, 1000])
def test_pretrained_weights_are_taken_over(downloaded, classes):
    """All but the classifier, which stays if it has the published 1000 classes."""
    got = models.create("squeezenet1_1", classes, 64, pretrained=True)
    head = {"classifier.1.weight", "classifier.1.bias"} if classes == 7 else set()
    for name, value in got.state_dict().items():
        assert name in head or torch.equal(value, downloaded[name]), name
    assert got.num_classes == classes
    assert got(torch.zeros(2, 3, 64, 64)).shape == (2, classes)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("resnet5O", "resnet50"),
        ("ResNet50", "resnet50"),
        ("vgg-16", "vgg16"),
        ("mobilenetv2", "mobilenet_v2"),
        ("vit_b32", "vit_b_32"),
    ],
)
def test_unknown_name_is_answered_by_the_nearest_ones(name, nearest):
    with pytest.raises(UserError, match=rf"unknown arch '{name}'.*nearest names:.* {nearest}\b"):
        models.create(name, 10, 224)


def test_models_for_other_tasks_are_not_offered():
    with pytest.raises(UserError, match=r"^(?!.*nearest)unknown arch"):
        models.check_name("qqqqqqqq")
    known = models.names()
    assert len(known) == len(set(known)) >= 80
    assert "resnet50" in known
    assert not {"fcn_resnet50", "r3d_18", "maskrcnn_resnet50_fpn", "raft_small"} & set(known)


def test_names_of_timm_are_known_when_it_is_there(monkeypatch):
    monkeypatch.setattr(models, "timm", None)
    with pytest.raises(UserError, match="pip install timm"):
        models.check_name("tinynet_e")
    stand_in = SimpleNamespace(list_models=lambda: ["resnet18", "tinynet_e"])
    monkeypatch.setattr(models, "timm", stand_in)
    assert models.names().count("resnet18") == 1
    models.check_name("tinynet_e")
    with pytest.raises(UserError, match="nearest names: tinynet_e"):
        models.check_name("tinynet_f")


@META
@pytest.mark.parametrize(
    ("arch", "size", "pretrained"),
    [("squeezenet1_1", 8, False), ("alexnet", 32, False), ("vit_b_32", 100, False)]
    + [("maxvit_t", 64, False), ("vit_b_32", 450, True), ("maxvit_t", 448, True)],
)
def test_unfit_image_size_is_an_error_message(arch, size, pretrained, downloaded):
    """Pretrained, one needs multiples of its patches, one takes only the 224 of its weights."""
    with (
        torch.device("meta"),
        pytest.raises(UserError, match=f"{arch} does not take images of {size} pixels"),
    ):
        models.create(arch, 10, size, pretrained)


@pytest.mark.parametrize("fault", [URLError("no route"), OSError("disk full")])
def test_weights_that_cannot_be_downloaded_are_an_error_message(monkeypatch, fault):
    def offline(*_, **__):
        raise fault

    monkeypatch.setattr(WeightsEnum, "get_state_dict", offline)
    with pytest.raises(UserError, match="pretrained weights of resnet18 could not be downloaded"):
        models.create("resnet18", 10, 224, pretrained=True)
