"""Models by name: heads, image sizes, pretrained weights (made up, nothing is downloaded)."""

from urllib.error import URLError

import pytest
import torch
from torch import nn
from torchvision.models import WeightsEnum, get_model

from utils.model import models
from utils.start.errors import UserError

AUXILIARY = ("googlenet", "inception_v3")
META = pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")


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
        given.update(get_model(arch, weights=None, **extra).state_dict())
        return dict(given)

    monkeypatch.setattr(WeightsEnum, "get_state_dict", state_dict)
    return given


# A model of each family. They are built on the meta device: shapes without numbers.
HEADS = [("googlenet", 224, False), ("vit_b_32", 64, False), ("maxvit_t", 448, False)]
HEADS += [("maxvit_t", 224, True), ("googlenet", 224, True), ("inception_v3", 299, True)]
HEADS += [("vit_b_32", 224, True), ("vit_b_32", 96, True)]


@META
@pytest.mark.parametrize(("arch", "size", "pretrained"), HEADS)
def test_a_model_gets_a_head_of_its_own(arch, size, pretrained, downloaded):
    """A pretrained one also position embeddings of another size, if the images have one."""
    with torch.device("meta"):
        model = models.create(arch, 7, size, pretrained)
    assert model.training
    logits = model(torch.empty(2, 3, size, size, device="meta"))
    assert isinstance(logits, torch.Tensor), "no auxiliary outputs in training"
    assert logits.shape == (2, 7)
    if pretrained:
        ours = model.state_dict()
        assert list(ours) == [name for name in downloaded if "aux" not in name.lower()]
        changed = {name for name in ours if ours[name].shape != downloaded[name].shape}
        assert ("encoder.pos_embedding" in changed) == (size == 96)
        layers = {name.rpartition(".")[0] for name in changed - {"encoder.pos_embedding"}}
        assert len(layers) == 1, "the last layer alone"


@pytest.mark.parametrize("classes", [7, 1000])
def test_pretrained_weights_are_taken_over(downloaded, classes):
    """All but the classifier, which stays if it has the published 1000 classes."""
    got = models.create("squeezenet1_1", classes, 64, pretrained=True)
    head = {"classifier.1.weight", "classifier.1.bias"} if classes == 7 else set()
    for name, value in got.state_dict().items():
        assert name in head or torch.equal(value, downloaded[name]), name
    assert got.num_classes == classes
    assert got(torch.zeros(2, 3, 64, 64)).shape == (2, classes)


@pytest.mark.parametrize("error", [URLError("no route"), PermissionError("read-only")])
def test_weights_that_cannot_be_downloaded_are_an_error_message(monkeypatch, error):
    """Without a network, or where the cache folder cannot be written."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(WeightsEnum, "get_state_dict", fail)
    with pytest.raises(UserError, match=r"weights of resnet18 could not be downloaded .*(no|only)"):
        models.create("resnet18", 7, 64, pretrained=True)


def test_an_unknown_name_is_answered_by_the_nearest_ones(monkeypatch):
    with pytest.raises(UserError, match=r"unknown arch 'vgg-16'.*nearest names:.* vgg16\b"):
        models.create("vgg-16", 10, 224)
    # Models for other tasks are not offered.
    assert not {"fcn_resnet50", "r3d_18", "maskrcnn_resnet50_fpn"} & set(models.names())
    monkeypatch.setattr(models, "has_timm", lambda: False)
    with pytest.raises(UserError, match="pip install timm"):
        models.check_name("tinynet_e")
    monkeypatch.setattr(models, "has_timm", lambda: True)
    monkeypatch.setattr("utils.model.timm_models.names", lambda: ["resnet18", "tin"])
    assert models.names().count("resnet18") == models.names().count("tin") == 1
    monkeypatch.setattr("utils.model.timm_models.tagged_names", lambda: ["tin.a1_in1k"])
    models.check_name("tin.a1_in1k")
    with pytest.raises(UserError, match=r"unknown arch 'tin\.a1'"):
        models.check_name("tin.a1")


def test_a_model_with_one_layer_in_two_places_keeps_its_weights(monkeypatch):
    """CoaT of timm has such layers."""
    layer = nn.Conv2d(3, 3, 1)
    monkeypatch.setattr(models, "get_model", lambda *_, **__: nn.Sequential(layer, layer))
    weights = [*models.create("alexnet", 3, 8).parameters()]
    assert [*map(id, weights)] == [*map(id, layer.parameters())]
    assert all(x.is_leaf and x.device.type == "cpu" for x in weights)


@META
@pytest.mark.parametrize(
    ("arch", "size", "pretrained"), [("alexnet", 32, False), ("vit_b_32", 450, True)]
)
def test_unfit_image_size_is_an_error_message(arch, size, pretrained, downloaded):
    message = f"{arch} does not take images of {size} pixels"
    with torch.device("meta"), pytest.raises(UserError, match=message):
        models.create(arch, 10, size, pretrained)
