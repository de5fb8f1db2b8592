"""Classification models by name: torchvision's, and timm's where it is installed."""

import difflib
from typing import Any
from urllib.error import URLError

import torch
import torchvision
from torch import nn
from torchvision.models import get_model, list_models

from utils import addons
from utils.errors import UserError

# Models with auxiliary heads, which would change the output in training mode.
WITH_AUXILIARY = ("googlenet", "inception_v3")


def is_own(arch: str) -> bool:
    """Whether torchvision has ``arch``; else it is timm's."""
    return arch in list_models(module=torchvision.models)


def names() -> list[str]:
    """All model names that `create` accepts."""
    own, more = list_models(module=torchvision.models), addons.timm_models()
    return own + [name for name in (more.names() if more else []) if name not in set(own)]


def check_name(arch: str) -> None:
    """Raise `UserError` with the nearest names unless ``arch`` is a known model."""
    known = names()
    if arch not in known:
        near = difflib.get_close_matches(arch, known, n=4, cutoff=0.5)
        hint = f"; nearest names: {', '.join(near)}" if near else ""
        more = "" if addons.timm_models() else " (more architectures with: pip install timm)"
        raise UserError(f"unknown arch {arch!r}{hint}{more}", on_every_rank=True)


def build(args: Any, classes: int) -> nn.Module:
    """The model that the options ask for, see `create`. Its ``notes`` are lines for the log."""
    model = create(args.arch, classes, args.image_size, args.pretrained is True, args.drop_path)
    model.notes = addons.change_model(model, args, classes)
    options = dict.fromkeys(args.epoch_sizes, "--image-size or --progressive")
    options.setdefault(args.preprocessing.crop, "--val-image-size")
    for size in options.keys() - {args.image_size}:
        _check_image_size(model, args.arch, size, options[size])
    return model


def create(
    arch: str,
    classes: int,
    image_size: int,
    pretrained: bool = False,
    drop_path: float | None = None,
) -> nn.Module:
    """Build ``arch`` with ``classes`` logits, float32, on the CPU, for images of ``image_size``.

    ``pretrained`` loads the library's best ImageNet weights, with a new classifier unless
    ``classes`` is 1000. ``drop_path`` None keeps the library's stochastic depth. Raises:
    `UserError` for an unknown arch, missing weights, or an image size that does not fit.
    """
    check_name(arch)
    try:
        if not is_own(arch):
            model = addons.timm_models().create(arch, classes, image_size, pretrained, drop_path)
        else:
            options = _options(arch, image_size)
            if pretrained:
                model = addons.extra("foreign").with_published_weights(arch, classes, image_size)
            else:
                model = get_model(arch, weights=None, num_classes=classes, **options)
            if arch in WITH_AUXILIARY:  # to build it again without initialising weights
                options |= {"init_weights": False, "transform_input": model.transform_input}
            model.constructor_args = options
            if drop_path is not None:
                addons.extra("blocks").drop_path(model, drop_path)
    except (AssertionError, ValueError) as error:
        raise _unfit(arch, image_size, error) from error
    except (URLError, OSError) as error:
        raise UserError(
            f"the pretrained weights of {arch} could not be downloaded ({error}): "
            "put them in torch's cache folder (TORCH_HOME), use --pretrained FILE, or train "
            "without --pretrained"
        ) from error
    _check_image_size(model, arch, image_size)
    return model


def _options(arch: str, image_size: int) -> dict[str, Any]:
    """The arguments of torchvision's constructor of ``arch``, besides the number of classes."""
    if arch in WITH_AUXILIARY:
        return {"aux_logits": False, "init_weights": True}
    if arch.startswith("maxvit"):
        return {"input_size": (image_size, image_size)}
    return {"image_size": image_size} if arch.startswith("vit_") else {}


def scale_input_as(content: dict[str, Any], model: nn.Module) -> None:
    """Let GoogLeNet and Inception rescale their input as the checkpoint's model did.

    They rescale it only with published weights.
    """
    saved = content.get("model_args") or {}
    if "transform_input" in saved:
        model.transform_input = saved["transform_input"]
        model.constructor_args = saved


def _check_image_size(
    model: nn.Module, arch: str, image_size: int, option: str = "--image-size"
) -> None:
    """Try the forward pass on the meta device: shapes are checked, nothing is computed."""
    model.eval()
    try:
        # Not of the state dict, which lacks some buffers.
        tensors = (*model.named_parameters(), *model.named_buffers())
        on_meta = {name: tensor.to("meta") for name, tensor in tensors}
        images = torch.empty(2, 3, image_size, image_size, device="meta")
        with torch.no_grad():
            torch.func.functional_call(model, on_meta, (images,))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise _unfit(arch, image_size, error, option) from error
    finally:
        model.train()


def _unfit(arch: str, image_size: int, error: Exception, option: str = "--image-size") -> UserError:
    reason = " ".join(str(error).split())[:160]
    return UserError(
        f"{arch} does not take images of {image_size} pixels: choose another {option} ({reason})",
        on_every_rank=True,
    )
