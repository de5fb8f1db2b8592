"""Classification models by name: torchvision's, and timm's when it is installed."""

import argparse
import difflib
import os
import re
from typing import Any
from urllib.error import URLError

import torch
import torchvision
from torch import nn
from torchvision.models import get_model, get_model_weights, list_models
from torchvision.models.vision_transformer import interpolate_embeddings

from utils.data.preprocessing import IMAGENET, INTERPOLATIONS, Preprocessing, training_sizes
from utils.errors import UserError
from utils.model import blocks, weights

try:
    import timm
except ImportError:
    timm = None

# Heads in the middle of the model, which would change the output in training.
_AUXILIARY_HEADS = {"googlenet": ("aux1", "aux2"), "inception_v3": ("AuxLogits",)}


def resolve(args: argparse.Namespace, default_data: str) -> None:
    """Check ``--arch`` and ``--pretrained``; set ``args.preprocessing``. Raises: `UserError`."""
    check_name(args.arch)
    if isinstance(args.pretrained, str) and os.path.isdir(args.pretrained):
        if args.data != default_data:
            raise UserError(f"--pretrained {args.pretrained} is a folder, not a file", alike=True)
        args.data, args.pretrained = args.pretrained, True  # as typed: --pretrained DATA
    if args.pretrained and args.zero_init_gamma:
        raise UserError("--zero-init-gamma is for new weights: not with --pretrained", alike=True)
    args.preprocessing = IMAGENET
    if args.pretrained is True:
        args.preprocessing = preprocessing(args.arch)
    elif args.pretrained:
        args.preprocessing = weights.preprocessing(args.pretrained) or _usual(args.arch)


def _usual(arch: str) -> Preprocessing:
    try:
        return preprocessing(arch)
    except UserError:  # no published weights
        return IMAGENET


def names() -> list[str]:
    """All model names that `create` accepts."""
    own = list_models(module=torchvision.models)
    return own + [name for name in (timm.list_models() if timm else []) if name not in set(own)]


def check_name(arch: str) -> None:
    """Raise `UserError` with the nearest names unless ``arch`` is a known model."""
    known = names()
    if arch not in known:
        near = difflib.get_close_matches(arch, known, n=4, cutoff=0.5)
        hint = f"; nearest names: {', '.join(near)}" if near else ""
        more = "" if timm else " (more architectures with: pip install timm)"
        raise UserError(f"unknown arch {arch!r}{hint}{more}", alike=True)


def preprocessing(arch: str) -> Preprocessing:
    """The preprocessing that the pretrained weights of ``arch`` expect; downloads nothing.

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
    """The model that the options ask for, see `create`; notes for the log in `args.model_notes`."""
    file = args.pretrained if isinstance(args.pretrained, str) else None
    model = create(args.arch, classes, args.image_size, args.pretrained is True, args.drop_path)
    notes = args.model_notes = []
    if file:
        notes += weights.load(model, file, args.arch, blocks.head_of(model, classes))
    if args.zero_init_gamma:
        blocks.zero_init_gamma(model)
    if args.freeze:
        head = blocks.head_of(model, classes)
        blocks.freeze(model, head)
        notes.append(f"--freeze: only {head} is trained")
    if args.activation_checkpointing:
        notes.append(f"--activation-checkpointing: {blocks.checkpoint_blocks(model)}")
    if args.preprocessing.crop != args.image_size:
        _check_image_size(model, args.arch, args.preprocessing.crop, "--val-image-size")
    for size in {*training_sizes(args)} - {args.image_size}:
        _check_image_size(model, args.arch, size, "--image-size or --progressive")
    return model


def create(
    arch: str,
    classes: int,
    image_size: int,
    pretrained: bool = False,
    drop_path: float | None = None,
) -> nn.Module:
    """Build ``arch`` with ``classes`` logits, float32, on the CPU, for images of ``image_size``.

    ``pretrained`` takes the library's best ImageNet weights, with a new classifier unless
    ``classes`` is 1000; ``drop_path`` None leaves stochastic depth as the library has it.
    Raises: `UserError` for an unknown arch, missing weights, or an image size that does not fit.
    """
    check_name(arch)
    try:
        if arch in list_models(module=torchvision.models):
            model = _torchvision_model(arch, classes, image_size, pretrained)
            if drop_path is not None:
                blocks.drop_path(model, drop_path)
        else:
            model = _timm_model(arch, classes, image_size, pretrained, drop_path)
    except (AssertionError, ValueError) as fault:
        raise _unfit(arch, image_size, fault) from fault
    except (URLError, OSError) as fault:
        raise UserError(
            f"the pretrained weights of {arch} could not be downloaded ({fault}): "
            "put them in torch's cache folder (TORCH_HOME), give a file, --pretrained FILE, or "
            "leave it out"
        ) from fault
    _check_image_size(model, arch, image_size)
    return model


def _timm_model(
    arch: str, classes: int, image_size: int, pretrained: bool, drop_path: float | None
) -> nn.Module:
    options: dict[str, Any] = {"pretrained": pretrained, "num_classes": classes}
    if drop_path is not None:
        options["drop_path_rate"] = drop_path
    try:
        model = timm.create_model(arch, **options)
    except TypeError as fault:
        if drop_path is None:
            raise
        raise UserError(f"--drop-path: {arch} takes none ({fault})", alike=True) from fault
    positions = getattr(model, "pos_embed", None)
    own_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if isinstance(positions, nn.Parameter) and own_size not in (None, (image_size, image_size)):
        model = timm.create_model(arch, **options, img_size=image_size)
    return model


def _torchvision_model(arch: str, classes: int, image_size: int, pretrained: bool) -> nn.Module:
    options: dict[str, Any] = {}
    if arch.startswith("maxvit"):
        options["input_size"] = (image_size, image_size)
    if not pretrained:
        if arch in _AUXILIARY_HEADS:
            options |= {"aux_logits": False, "init_weights": True}
        elif arch.startswith("vit_"):
            options["image_size"] = image_size
        return get_model(arch, weights=None, num_classes=classes, **options)
    published = get_model_weights(arch).DEFAULT
    if arch.startswith("vit_") and published.meta["min_size"] != (image_size, image_size):
        model = get_model(arch, weights=None, image_size=image_size)
        state = published.get_state_dict(progress=True, check_hash=True)
        model.load_state_dict(interpolate_embeddings(image_size, model.patch_size, state))
    else:
        model = get_model(arch, weights=published, **options)
    for head in _AUXILIARY_HEADS.get(arch, ()):
        model.aux_logits = False
        setattr(model, head, None)
    if classes != 1000:
        _replace_head(model, classes)
    return model


def _replace_head(model: nn.Module, classes: int) -> None:
    name = blocks.head_of(model, 1000)
    old = model.get_submodule(name)
    if isinstance(old, nn.Linear):
        new: nn.Module = nn.Linear(old.in_features, classes, bias=old.bias is not None)
    else:
        new = nn.Conv2d(old.in_channels, classes, old.kernel_size)
    model.set_submodule(name, new)
    if hasattr(model, "num_classes"):  # squeezenet and a few others keep a copy
        model.num_classes = classes


def _check_image_size(
    model: nn.Module, arch: str, image_size: int, option: str = "--image-size"
) -> None:
    """Try the forward pass on the meta device: shapes are checked, nothing is computed."""
    training = model.training
    model.eval()
    try:
        # Not of the state dict, which lacks some buffers.
        tensors = (*model.named_parameters(), *model.named_buffers())
        on_meta = {name: tensor.to("meta") for name, tensor in tensors}
        images = torch.empty(2, 3, image_size, image_size, device="meta")
        with torch.no_grad():
            torch.func.functional_call(model, on_meta, (images,))
    except (RuntimeError, AssertionError, ValueError) as fault:
        raise _unfit(arch, image_size, fault, option) from fault
    finally:
        model.train(training)


def _unfit(arch: str, image_size: int, fault: Exception, option: str = "--image-size") -> UserError:
    reason = re.sub(r"\s+", " ", str(fault)).strip()[:160]
    return UserError(
        f"{arch} does not take images of {image_size} pixels: choose another {option} ({reason})",
        alike=True,
    )
