"""Weights from files, frozen models, and what is done to blocks: by equality."""

import copy
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from running import same
from torch import nn
from torchvision.models import DenseNet, get_model, resnet
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

from utils.data.preprocessing import Preprocessing
from utils.model import blocks, models, pretrained_weights
from utils.start.errors import UserError
from utils.start.option_types import Options

FIVE = [*"abcde"]


def small_resnet(classes=5, seed=0):
    torch.manual_seed(seed)
    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=classes)


def small_vit(classes=5, size=16, seed=0):
    torch.manual_seed(seed)
    model = VisionTransformer(size, 4, 2, 2, 8, 16, dropout=0.2, num_classes=classes)
    nn.init.normal_(model.heads.head.weight)  # torchvision's begins with zeros
    return model


def small_densenet():
    """Its blocks take a list, which grows by one tensor after each of them."""
    torch.manual_seed(0)
    return DenseNet(16, (3, 3), 32, num_classes=5)


class ChangesItsList(nn.Module):
    """As a block of timm's HRNet."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))

    def forward(self, images):
        images[0] = self.layers(images[0]).relu()
        return images


class SmallHRNet(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(ChangesItsList() for _ in range(3))

    def forward(self, images):
        images = [images]
        for block in self.blocks:
            images = block(images)
        return images[0]


@pytest.fixture
def options_of(parse, folder):
    """A function that gives the options of words in front of the data."""
    return lambda *words: Namespace(**parse("imagenet_nd", *words, folder))


# ---- --pretrained FILE


def saved(tmp_path, content):
    torch.save(content, tmp_path / "weights.pth")
    return str(tmp_path / "weights.pth")


def test_weights_for_other_classes_leave_the_head_new(tmp_path, monkeypatch):
    """A checkpoint as of DistributedDataParallel, and bare weights as in .safetensors."""
    state = small_resnet(classes=9, seed=1).state_dict()
    state["aux.fc.weight"] = torch.zeros(2)
    del state["bn1.num_batches_tracked"], state["bn1.bias"]
    named = {f"module.{name}": value for name, value in state.items()}
    content = {"state_dict": named, "arch": "resnet18", "model_args": {"transform_input": True}}
    file = saved(tmp_path, content)
    stand_in = SimpleNamespace(load_file=lambda path: state)
    monkeypatch.setitem(sys.modules, "safetensors", SimpleNamespace(torch=stand_in))
    monkeypatch.setitem(sys.modules, "safetensors.torch", stand_in)
    new = small_resnet().state_dict()
    for path in (file, "model.safetensors"):
        model = small_resnet()
        ((note,), _) = pretrained_weights.load_weights(model, path, "resnet18", FIVE)
        assert hasattr(model, "transform_input") == (path == file)  # as GoogLeNet's has it
        for name, value in model.state_dict().items():
            kept = name.startswith("fc.") or name not in state
            assert torch.equal(value, (new if kept else state)[name]), name
        assert note == (
            f"weights from {path}: 70 of 74 tensors; new: fc.weight, fc.bias; "
            "not in the file, so new: bn1.bias; not in the model, so left out: aux.fc.weight"
        )


def test_a_classifier_is_kept_and_evaluated_only_for_the_same_classes(options_of, tmp_path):
    state = get_model("resnet18", num_classes=5).state_dict()
    for classes, is_same in ((FIVE, True), ([*"abcdf"], False), (None, True), (5, True)):
        file = saved(tmp_path, {"state_dict": state, "classes": classes})
        line = ("--image-size", 32, "--pretrained", file)
        model = models.build(options_of(*line), FIVE)
        assert torch.equal(model.fc.weight, state["fc.weight"]) == is_same
        if is_same:
            models.build(options_of(*line, "-e"), FIVE)
        else:
            with pytest.raises(UserError, match=r"classifier .* is not for the 5 classes"):
                models.build(options_of(*line, "-e"), FIVE)
    models.build(options_of(*line, "-e", "--resume", file), FIVE)


def test_position_embeddings_are_resized_to_the_images(tmp_path):
    state = small_vit(size=16, seed=1).state_dict()
    file, model = saved(tmp_path, state), small_vit(size=24)
    ((note,), _) = pretrained_weights.load_weights(model, file, "vit", FIVE)
    expected = interpolate_embeddings(24, 4, dict(state))
    assert same(model.state_dict(), expected)
    assert "encoder.pos_embedding resized from 1 x 17 x 8 to 1 x 37 x 8" in note


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"state_dict": {}, "arch": "vgg16"}, "is a vgg16: use -a vgg16"),
        ({"conv1.weight": torch.zeros(3)}, r"conv1\.weight is 3, not 64 x 3 x 7 x 7"),
        ({"fc.weight": torch.zeros(5, 512)}, r"60 of 74 .*: conv1\.weight, .*_mean and 56 more"),
        ({"preprocessing": {"colour": 1}, "model": {}}, "has unknown preprocessing"),
        ({"preprocessing": {"std": [1, 0, 1]}, "model": {}}, "std must not be 0"),
    ],
)
def test_a_file_that_does_not_fit_is_a_sentence(tmp_path, content, sentence):
    file = saved(tmp_path, content)
    args = Namespace(arch="resnet18", pretrained=file)
    with pytest.raises(UserError, match=sentence):
        pretrained_weights.expected_preprocessing(args, local=True)
        pretrained_weights.load_weights(small_resnet(), file, "resnet18", FIVE)


def test_what_follows_the_option_may_be_the_data(options_of, folder, tmp_path):
    line = ("-a", "inception_v3", "--pretrained")
    file = saved(tmp_path, {"model": {}})
    for words, pretrained in ((line, True), ((*line, file), file)):
        args = options_of(*words)
        assert (args.pretrained, args.data, args.image_size) == (pretrained, str(folder), 299)
        assert args.preprocessing == pretrained_weights.published_preprocessing("inception_v3")
    with pytest.raises(UserError, match="is a folder, not a file"):
        options_of(*line, tmp_path)


def test_images_as_the_file_says(options_of, folder, tmp_path):
    own = Preprocessing((0.5,) * 3, (0.5,) * 3, "bicubic", 100, 110)
    file = saved(tmp_path, {"model": {}, "preprocessing": own.as_dict()})
    assert options_of("--pretrained", file).preprocessing == own
    args = options_of("--pretrained", file, "--image-size", 50)
    assert (args.preprocessing.val_resize_size, args.preprocessing.mean) == (55, own.mean)


# ---- --freeze


def test_a_frozen_model_trains_its_head_alone():
    model, images = small_resnet(), torch.randn(4, 3, 32, 32)
    before = copy.deepcopy(model.state_dict())
    blocks.freeze(model, blocks.heads_of(model, 5))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for wrapper in (model, nn.DataParallel(model), copy.deepcopy(model)):
        wrapper.train()
        wrapper(images).sum().backward()
    trained = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert trained == {"fc.weight", "fc.bias"}
    assert same(model.state_dict(), before), "statistics, too"


def test_both_classifiers_of_a_distilled_model_are_trained_and_new(tmp_path):
    """As in timm's DeiT, whose logits are the mean of both."""
    model = nn.ModuleDict({x: nn.Linear(4, 5) for x in ("body", "head", "head_dist")})
    model.get_classifier = lambda: (model["head"], model["head_dist"])
    expected = {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}
    (note,) = blocks.change(
        model, Options(freeze=True, pretrained=True, activation_checkpointing=0), 5
    )
    assert note == "--freeze: only head and head_dist are trained"
    assert {name for name, p in model.named_parameters() if p.requires_grad} == expected
    content = {name: torch.ones(7, *x.shape[1:]) for name, x in model.state_dict().items()}
    content |= {
        name: torch.ones_like(x) for name, x in model["body"].state_dict(prefix="body.").items()
    }
    ((note,), _) = pretrained_weights.load_weights(model, saved(tmp_path, content), "deit", FIVE)
    assert "2 of 6 tensors; new: head.weight, head.bias, head_dist.weight, head_dist.bias" in note


# ---- --sync-bn


class NormAndActivation(nn.BatchNorm2d):
    """As BatchNormAct2d of timm."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Hardtanh(-0.5, 0.5), nn.Tanh()

    def forward(self, images):
        return self.act(self.drop(super().forward(images)))


@pytest.mark.parametrize("trains", [True, False])
def test_batch_norm_with_an_activation_keeps_it_when_it_is_synchronised(trains):
    """In torch's conversion it got lost, without a word."""
    model = nn.Sequential(NormAndActivation(3), nn.BatchNorm2d(3)).train(trains)
    images = torch.randn(4, 3, 8, 8)
    expected = copy.deepcopy(model)(images)
    model = blocks.with_activations(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    assert all(isinstance(norm, nn.SyncBatchNorm) for norm in model)
    assert torch.equal(copy.deepcopy(model)(images), expected)


# ---- --activation-checkpointing


def train(model, size):
    """Three steps. Returns: weights and buffers; and bytes that backward kept in the last one."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(3):
        torch.manual_seed(step)  # dropout and stochastic depth
        images = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(step))
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(images).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return copy.deepcopy(model.state_dict()), sum(kept.values())


@pytest.mark.parametrize(
    ("build", "size"), [(small_resnet, 32), (small_vit, 16), (small_densenet, 32), (SmallHRNet, 32)]
)
def test_activations_computed_twice_give_the_same_bits(build, size):
    """Weights, and statistics of batch norm, which sees each batch once."""
    expected, much = train(build(), size)
    model = build()
    blocks.checkpoint_blocks(model)
    weights, less = train(model, size)
    assert same(weights, expected)
    assert less < 0.8 * much


# ---- the options together


def test_build_does_what_the_options_say(options_of, folder, tmp_path):
    file = saved(tmp_path, get_model("resnet18").state_dict())
    line = ("--pretrained", file, "--image-size", 32, "--freeze", "--activation-checkpointing")
    args = options_of(*line)
    model = models.build(args, FIVE)
    assert [p.shape[0] for p in model.parameters() if p.requires_grad] == [5, 5]
    assert model.notes[0].endswith("120 of 122 tensors; new: fc.weight, fc.bias")
    assert model.notes[1:] == [
        "--freeze: only fc is trained",
        "--activation-checkpointing: 8 BasicBlock",
    ]
    for words, stays in (((), True), (("--resume", file), False)):
        (note,) = models.build(options_of("--freeze", "--image-size", 32, *words), FIVE).notes
        assert ("the other weights stay random" in note) == stays
    torch.manual_seed(0)
    plain = models.build(options_of(), FIVE)
    torch.manual_seed(0)
    assert same(plain.state_dict(), get_model("resnet18", num_classes=5).state_dict())
