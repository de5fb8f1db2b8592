"""Classification models by name: torchvision's, and timm's when it is installed."""

import difflib
import re
from typing import Any
from urllib.error import URLError

import torch
import torchvision
from torch import nn
from torchvision.models import get_model, get_model_weights, list_models

from utils.data import progressive
from utils.data.preprocessing import INTERPOLATIONS, Preprocessing
from utils.errors import UserError

try:
    import timm
except ImportError:
    timm = None


# Heads in the middle of the model, which would change what a training step returns.
_WITH_AUXILIARY_HEADS = {"googlenet": ("aux1", "aux2"), "inception_v3": ("AuxLogits",)}


def names() -> list[str]:
    """All model names that `create` accepts."""
    own = list_models(module=torchvision.models)
    return own + [name for name in (timm.list_models() if timm else []) if name not in set(own)]


def check_name(arch: str) -> None:
    """Raise `UserError` with the nearest names unless ``arch`` is a known model."""
    known = names()
    if arch in known:
        return
    near = difflib.get_close_matches(arch, known, n=4, cutoff=0.5)
    hint = f"; nearest names: {', '.join(near)}" if near else ""
    more = "" if timm else " (more architectures with: pip install timm)"
    raise UserError(f"unknown arch {arch!r}{hint}{more}", alike=True)


def preprocessing(arch: str) -> Preprocessing:
    """What the pretrained weights of ``arch`` want their images to be like; downloads nothing.

    Raises: `UserError` when there are no such weights.
    """
    if arch in list_models(module=torchvision.models):
        wanted = get_model_weights(arch).DEFAULT.transforms()
        (size,), (short,) = wanted.crop_size, wanted.resize_size
        interpolation = wanted.interpolation.value
    else:
        if not timm.is_model_pretrained(arch):
            raise UserError(f"timm has no pretrained weights of {arch}: leave --pretrained out")
        wanted = timm.get_pretrained_cfg(arch)
        size = wanted.input_size[-1]
        short, interpolation = int(size / wanted.crop_pct), wanted.interpolation
    if interpolation not in INTERPOLATIONS:
        interpolation = "bicubic"  # the nearest to Lanczos', which a few models of timm name
    return Preprocessing(tuple(wanted.mean), tuple(wanted.std), interpolation, size, short)


def build(args: Any, classes: int) -> nn.Module:
    """The model that the options ask for; see `create`."""
    model = create(args.arch, classes, args.image_size, args.pretrained)
    for size in {*progressive.of(args)} - {args.image_size}:
        _check_image_size(model, args.arch, size)
    return model


def create(arch: str, classes: int, image_size: int, pretrained: bool = False) -> nn.Module:
    """Build ``arch`` with an output of ``classes`` logits, float32, on the CPU.

    ``pretrained`` takes the library's best ImageNet weights, with a new last layer unless
    ``classes`` is 1000. The model takes float images [n, 3, image_size, image_size].
    Raises: `UserError` for an unknown arch, weights that cannot be had, or an unfit image size.
    """
    check_name(arch)
    try:
        if arch in list_models(module=torchvision.models):
            model = _torchvision_model(arch, classes, image_size, pretrained)
        else:
            model = timm.create_model(arch, pretrained=pretrained, num_classes=classes)
    except (AssertionError, ValueError) as fault:
        raise _unfit(arch, image_size, fault) from fault
    except (URLError, OSError) as fault:
        raise UserError(
            f"the pretrained weights of {arch} could not be downloaded ({fault}): "
            "put them in torch's cache folder (TORCH_HOME) or leave --pretrained out"
        ) from fault
    _check_image_size(model, arch, image_size)
    return model


def _torchvision_model(arch: str, classes: int, image_size: int, pretrained: bool) -> nn.Module:
    extra: dict[str, object] = {}
    if arch in _WITH_AUXILIARY_HEADS and not pretrained:
        extra |= {"aux_logits": False, "init_weights": True}
    if arch.startswith("maxvit"):
        extra["input_size"] = (image_size, image_size)
    elif arch.startswith("vit_") and not pretrained:
        extra["image_size"] = image_size
    if not pretrained:
        return get_model(arch, weights=None, num_classes=classes, **extra)
    model = get_model(arch, weights=get_model_weights(arch).DEFAULT, **extra)
    if arch in _WITH_AUXILIARY_HEADS:
        model.aux_logits = False
        for head in _WITH_AUXILIARY_HEADS[arch]:
            setattr(model, head, None)
    if classes != 1000:
        _replace_head(model, classes)
    return model


def _replace_head(model: nn.Module, classes: int) -> None:
    heads = [
        (name, layer)
        for name, layer in model.named_modules()
        if (isinstance(layer, nn.Linear) and layer.out_features == 1000)
        or (isinstance(layer, nn.Conv2d) and layer.out_channels == 1000)
    ]
    name, old = heads[-1]
    if isinstance(old, nn.Linear):
        new: nn.Module = nn.Linear(old.in_features, classes, bias=old.bias is not None)
    else:
        new = nn.Conv2d(old.in_channels, classes, old.kernel_size)
    model.set_submodule(name, new)
    if hasattr(model, "num_classes"):  # squeezenet and a few others keep a copy
        model.num_classes = classes


def _check_image_size(model: nn.Module, arch: str, image_size: int) -> None:
    """Try the forward pass on the meta device: shapes are checked, nothing is computed."""
    training = model.training
    model.eval()
    try:
        weights = {k: v.to("meta") for k, v in model.state_dict(keep_vars=True).items()}
        images = torch.empty(2, 3, image_size, image_size, device="meta")
        with torch.no_grad():
            torch.func.functional_call(model, weights, (images,))
    except (RuntimeError, AssertionError, ValueError) as fault:
        raise _unfit(arch, image_size, fault) from fault
    finally:
        model.train(training)


def _unfit(arch: str, image_size: int, fault: Exception) -> UserError:
    reason = re.sub(r"\s+", " ", str(fault)).strip()[:160]
    return UserError(
        f"{arch} does not take images of {image_size} pixels: choose another --image-size or "
        f"--progressive ({reason})",
        alike=True,
    )
