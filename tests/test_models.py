"""Models by name: heads, image sizes, pretrained weights (made up, nothing is downloaded)."""

from types import SimpleNamespace
from urllib.error import URLError

import pytest
import torch
from torch import nn
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


def size_of(arch):
    return 299 if arch == "inception_v3" else 224


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


@pytest.mark.parametrize("arch", [*AUXILIARY, "resnet18", "squeezenet1_1", "vgg11_bn", "swin_t"])
def test_new_model_has_the_asked_number_of_logits(arch):
    with torch.device("meta"):
        model = models.create(arch, 7, size_of(arch))
    assert model.training
    got = logits(model, size_of(arch))
    assert isinstance(got, torch.Tensor), "no auxiliary outputs in training"
    assert got.shape == (2, 7)


@META
@pytest.mark.parametrize(
    ("arch", "classes"), [*((arch, 7) for arch in FAMILIES), ("resnet18", 1000)]
)
def test_pretrained_model_gets_a_head_of_its_own(arch, classes, downloaded):
    with torch.device("meta"):
        model = models.create(arch, classes, size_of(arch), pretrained=True)
    assert logits(model, size_of(arch)).shape == (2, classes)
    ours = model.state_dict()
    assert list(ours) == [name for name in downloaded if "aux" not in name.lower()]
    changed = {name for name in ours if ours[name].shape != downloaded[name].shape}
    layers = {name.rpartition(".")[0] for name in changed}
    assert len(layers) == (classes != 1000), "the last layer alone"
    assert all(ours[name].shape[0] == classes for name in changed)


def test_pretrained_weights_are_taken_over(downloaded):
    got = models.create("squeezenet1_1", 7, 64, pretrained=True)
    head = {"classifier.1.weight", "classifier.1.bias"}
    for name, value in got.state_dict().items():
        assert name in head or torch.equal(value, downloaded[name]), name
    assert got.num_classes == 7
    assert got(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


def test_pretrained_weights_of_1000_classes_keep_their_head(downloaded):
    got = models.create("squeezenet1_1", 1000, 64, pretrained=True).state_dict()
    assert all(torch.equal(got[name], downloaded[name]) for name in downloaded)


def test_head_without_bias_and_of_other_layers():
    model = nn.Sequential(nn.Linear(4, 1000), nn.ReLU(), nn.Linear(1000, 1000, bias=False))
    models._replace_head(model, 3)
    assert model[0].out_features == 1000, "only the last one"
    assert model[2].weight.shape == (3, 1000)
    assert model[2].bias is None


def test_new_models_depend_on_the_seed_alone():
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(models.create("shufflenet_v2_x0_5", 3, 64).state_dict()["fc.weight"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert {found[0].dtype, found[0].device} == {torch.float32, torch.device("cpu")}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("resnet5O", "resnet50"),
        ("ResNet50", "resnet50"),
        ("vgg-16", "vgg16"),
        ("mobilenetv2", "mobilenet_v2"),
        ("efficientnet-b0", "efficientnet_b0"),
        ("vit_b32", "vit_b_32"),
        ("densenet_121", "densenet121"),
    ],
)
def test_unknown_name_is_answered_by_the_nearest_ones(name, nearest):
    with pytest.raises(UserError, match=rf"unknown arch '{name}'.*nearest names:.* {nearest}\b"):
        models.create(name, 10, 224)


def test_name_like_no_other_is_refused_without_a_proposal():
    with pytest.raises(UserError) as error:
        models.check_name("qqqqqqqq")
    assert "nearest" not in str(error.value)


def test_models_for_other_tasks_are_not_offered():
    known = models.names()
    assert len(known) == len(set(known)) >= 80
    assert "resnet50" in known
    assert not {"fcn_resnet50", "r3d_18", "maskrcnn_resnet50_fpn", "raft_small"} & set(known)


def test_names_of_timm_are_known_when_it_is_there(monkeypatch):
    monkeypatch.setattr(models, "timm", None)
    with pytest.raises(UserError, match="pip install timm"):
        models.check_name("tinynet_e")
    made = SimpleNamespace(
        list_models=lambda: ["resnet18", "tinynet_e"],
        create_model=lambda arch, pretrained, num_classes: nn.Sequential(
            nn.Flatten(), nn.LazyLinear(num_classes)
        ),
    )
    monkeypatch.setattr(models, "timm", made)
    assert models.names().count("resnet18") == 1
    models.check_name("tinynet_e")
    with pytest.raises(UserError, match="nearest names: tinynet_e"):
        models.check_name("tinynet_f")


@pytest.mark.parametrize(
    ("arch", "size"), [("squeezenet1_1", 8), ("alexnet", 32), ("vit_b_32", 100), ("maxvit_t", 64)]
)
def test_unfit_image_size_is_a_sentence(arch, size):
    with (
        torch.device("meta"),
        pytest.raises(UserError, match=f"{arch} does not take images of {size} pixels"),
    ):
        models.create(arch, 10, size)


@META
@pytest.mark.parametrize(("arch", "size"), [("vit_b_32", 450), ("maxvit_t", 448)])
def test_unfit_image_size_of_a_pretrained_model_is_a_sentence(arch, size, downloaded):
    """One needs multiples of its patches, one cannot take others than the 224 of its weights."""
    with (
        torch.device("meta"),
        pytest.raises(UserError, match=f"{arch} does not take images of {size} pixels"),
    ):
        models.create(arch, 10, size, pretrained=True)


@META
def test_published_weights_of_a_vit_take_other_image_sizes(downloaded):
    with torch.device("meta"):
        model = models.create("vit_b_32", 7, 96, pretrained=True)
    assert model.state_dict()["encoder.pos_embedding"].shape == (1, 1 + 3 * 3, 768)
    assert logits(model, 96).shape == (2, 7)


@pytest.mark.parametrize(("arch", "size"), [("vit_b_32", 64), ("maxvit_t", 448), ("resnet18", 32)])
def test_new_models_of_other_image_sizes(arch, size):
    with torch.device("meta"):
        model = models.create(arch, 10, size)
    assert logits(model, size).shape == (2, 10)


def test_image_size_check_leaves_the_model_alone():
    torch.manual_seed(0)
    got = models.create("shufflenet_v2_x0_5", 3, 64)
    torch.manual_seed(0)
    expected = get_model("shufflenet_v2_x0_5", num_classes=3)
    for name, value in expected.state_dict().items():
        assert torch.equal(got.state_dict()[name], value), name
    assert got.training
    assert all(weight.requires_grad for weight in got.parameters())


@pytest.mark.parametrize("fault", [URLError("no route"), OSError("disk full")])
def test_weights_that_cannot_be_had_are_a_sentence(monkeypatch, fault):
    def offline(*_, **__):
        raise fault

    monkeypatch.setattr(WeightsEnum, "get_state_dict", offline)
    with pytest.raises(UserError, match="pretrained weights of resnet18 could not be downloaded"):
        models.create("resnet18", 10, 224, pretrained=True)
