"""Classification models by name, torchvision's and timm's, and their weights from files."""

import argparse
import difflib
import os
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import get_model, get_model_weights, list_models
from torchvision.models.vision_transformer import interpolate_embeddings

from utils.errors import UserError
from utils.extras import blocks
from utils.extras.foreign import plain_weights, read_weights
from utils.preprocessing import IMAGENET, INTERPOLATIONS, Preprocessing

try:
    import timm
except ImportError:
    timm = None

# They have heads in the middle of the model, which would change the output in training.
_WITH_AUXILIARY = ("googlenet", "inception_v3")


def resolve(args: argparse.Namespace, default_data: str, local: bool = True) -> None:
    """Check ``--arch`` and ``--pretrained``; set ``args.preprocessing``. Raises: `UserError`.

    Without ``local`` a file of weights is on another machine, and may be missing here.
    """
    check_name(args.arch)
    if isinstance(args.pretrained, str) and os.path.isdir(args.pretrained):
        if args.data != default_data:
            raise UserError(f"--pretrained {args.pretrained} is a folder, not a file", alike=True)
        args.data, args.pretrained = args.pretrained, True  # as typed: --pretrained DATA
    if args.pretrained and args.zero_init_gamma:
        raise UserError("--zero-init-gamma is for new weights: not with --pretrained", alike=True)
    published = preprocessing(args.arch) if args.pretrained else None
    if args.pretrained is True and published is None:
        raise UserError(f"timm has no pretrained weights of {args.arch}: leave --pretrained out")
    is_file = isinstance(args.pretrained, str) and (local or os.path.isfile(args.pretrained))
    own = saved_preprocessing(args.pretrained) if is_file else None
    args.preprocessing = own or published or IMAGENET


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


def preprocessing(arch: str) -> Preprocessing | None:
    """The preprocessing that the published weights of ``arch`` expect, if there are any.

    Downloads nothing.
    """
    if arch in list_models(module=torchvision.models):
        wanted = get_model_weights(arch).DEFAULT.transforms()
        (size,), (short,) = wanted.crop_size, wanted.resize_size
        interpolation = wanted.interpolation.value
    elif timm.is_model_pretrained(arch):
        wanted = timm.get_pretrained_cfg(arch)
        size = wanted.input_size[-1]
        short, interpolation = int(size / wanted.crop_pct), wanted.interpolation
    else:
        return None
    if interpolation not in INTERPOLATIONS:
        interpolation = "bicubic"  # the nearest to Lanczos', which a few models of timm name
    return Preprocessing(tuple(wanted.mean), tuple(wanted.std), interpolation, size, short)


def build(args: Any, classes: int) -> nn.Module:
    """The model that the options ask for, see `create`; notes for the log in `args.model_notes`."""
    model = create(args.arch, classes, args.image_size, args.pretrained is True, args.drop_path)
    notes = args.model_notes = []
    if isinstance(args.pretrained, str):
        notes += load_weights(model, args.pretrained, args.arch, blocks.head_of(model, classes))
    if args.zero_init_gamma:
        blocks.zero_init_gamma(model)
    if args.freeze:
        head = blocks.head_of(model, classes)
        blocks.freeze(model, head)
        notes.append(f"--freeze: only {head} is trained")
    if args.activation_checkpointing:
        notes.append(f"--activation-checkpointing: {blocks.checkpoint_blocks(model)}")
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

    ``pretrained`` takes the library's best ImageNet weights, with a new classifier unless
    ``classes`` is 1000; ``drop_path`` None leaves stochastic depth as the library has it.
    Raises: `UserError` for an unknown arch, missing weights, or an image size that does not fit.
    """
    check_name(arch)
    try:
        if arch in list_models(module=torchvision.models):
            model = _torchvision_model(arch, classes, image_size, pretrained)
            model.constructor_args = _constructor_args(model, arch, image_size)
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


def _constructor_args(model: nn.Module, arch: str, image_size: int) -> dict[str, Any]:
    """What torchvision's constructor needs to build ``model``, besides the number of classes."""
    if arch in _WITH_AUXILIARY:
        plain = dict.fromkeys(("aux_logits", "init_weights"), False)
        return plain | {"transform_input": model.transform_input}
    if arch.startswith("vit_"):
        return {"image_size": image_size}
    if arch.startswith("maxvit"):
        return {"input_size": (image_size, image_size)}
    return {}


def scale_input_as(content: dict[str, Any], model: nn.Module) -> None:
    """Let GoogLeNet and Inception rescale their input as the checkpoint's model did.

    They do so with published weights.
    """
    saved = content.get("model_args") or {}
    if "transform_input" in saved:
        model.transform_input = saved["transform_input"]
        model.constructor_args = saved


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
        model.constructor_args = {"img_size": image_size}
    return model


def _torchvision_model(arch: str, classes: int, image_size: int, pretrained: bool) -> nn.Module:
    options: dict[str, Any] = {}
    if arch.startswith("maxvit"):
        options["input_size"] = (image_size, image_size)
    if not pretrained:
        if arch in _WITH_AUXILIARY:
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
    if arch == "inception_v3":  # googlenet loses them by itself
        model.aux_logits, model.AuxLogits = False, None
    if classes != 1000:
        name = blocks.head_of(model, 1000)
        old = model.get_submodule(name)
        if isinstance(old, nn.Linear):
            new: nn.Module = nn.Linear(old.in_features, classes, bias=old.bias is not None)
        else:
            new = nn.Conv2d(old.in_channels, classes, old.kernel_size)
        model.set_submodule(name, new)
        model.num_classes = classes  # squeezenet and a few others keep a copy
    return model


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
    except (RuntimeError, AssertionError, ValueError) as fault:
        raise _unfit(arch, image_size, fault, option) from fault
    finally:
        model.train()


def _unfit(arch: str, image_size: int, fault: Exception, option: str = "--image-size") -> UserError:
    reason = " ".join(str(fault).split())[:160]
    return UserError(
        f"{arch} does not take images of {image_size} pixels: choose another {option} ({reason})",
        alike=True,
    )


# ---- --pretrained FILE

MOST_MISSING = 0.1  # share of the model's tensors; a file that lacks more is of another model
_SHOWN = 4  # names in a message


def saved_preprocessing(file: str) -> Preprocessing | None:
    """The preprocessing in a file of this suite; None for other files. Raises: `UserError`."""
    saved = read_weights(file).get("preprocessing")
    return None if saved is None else Preprocessing.from_dict(saved, file)


def load_weights(model: nn.Module, file: str, arch: str, head: str) -> list[str]:
    """Load the weights in ``file`` into ``model``, whose last layer is called ``head``.

    The last layer keeps its new weights if the file's has other classes; position embeddings are
    resized to the model's image size. Returns: notes for the log. Raises: `UserError` for a file of
    another model.
    """
    path, content = Path(file), read_weights(file)
    if isinstance(saved := content.get("arch"), str) and saved != arch:
        raise UserError(f"{path} is a {saved}: use -a {saved} to load it", alike=True)
    found, note = plain_weights(content, path)
    own, fitted, notes = model.state_dict(), {}, []
    for name, wanted in own.items():
        value = found.get(name)
        if not isinstance(value, Tensor):
            continue
        if value.shape != wanted.shape and name.endswith(("pos_embedding", "pos_embed")):
            before, value = _size(value), resized(value, wanted, model)
            notes.append(f"{name} resized from {before} to {_size(value)}")
        if value.shape == wanted.shape:
            fitted[name] = value
        elif not name.startswith(f"{head}."):
            why = f"{name} is {_size(value)}, not {_size(wanted)}"
            raise UserError(f"{path} does not fit {arch}: {why}", alike=True)
    # Old files lack the counters of batch norm.
    lacking = [n for n in own if n not in fitted and not n.endswith("num_batches_tracked")]
    new_head = [name for name in lacking if name.startswith(f"{head}.")]
    missing = [name for name in lacking if name not in new_head]
    if len(missing) > MOST_MISSING * len(own):
        why = f"{len(missing)} of {len(own)} weights are not in it: {_list(missing)}"
        raise UserError(f"{path} does not fit {arch}: {why}", alike=True)
    model.load_state_dict(own | fitted)
    scale_input_as(content, model)
    notes = [f"weights from {path}: {len(fitted)} of {len(own)} tensors", *notes]
    left = [name for name in found if name not in own]
    kinds = {"new": new_head, "not in the file, so new": missing}
    kinds["not in the model, so left out"] = left
    notes += [f"{kind}: {_list(names)}" for kind, names in kinds.items() if names]
    return [*([note] if note else []), "; ".join(notes)]


def resized(positions: Tensor, wanted: Tensor, model: nn.Module) -> Tensor:
    """Position embeddings [1, places, width] of a vision transformer for another image size.

    By torchvision or timm for their own models; returned as they are if that is impossible.
    """
    if positions.ndim != 3 or positions.shape[2:] != wanted.shape[2:]:
        return positions
    if hasattr(model, "num_prefix_tokens"):
        from timm.layers import resample_abs_pos_embed

        size, tokens = list(model.patch_embed.grid_size), model.num_prefix_tokens
        return resample_abs_pos_embed(positions, new_size=size, num_prefix_tokens=tokens)
    name = "encoder.pos_embedding"
    side = round((wanted.shape[1] - 1) ** 0.5)
    try:  # as if patches had one pixel
        return interpolate_embeddings(side, 1, {name: positions})[name]
    except ValueError:
        return positions


def _size(value: Tensor) -> str:
    return " x ".join(map(str, value.shape)) or "a number"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
