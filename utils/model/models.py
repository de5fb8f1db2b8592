"""Classification models by name: torchvision's, and timm's where it is installed."""

import copy
import difflib
from importlib.util import find_spec
from typing import Any
from urllib.error import URLError

import torch
import torchvision
from torch import nn
from torchvision.models import get_model, list_models

from utils.model import blocks, pretrained_weights
from utils.model.blocks import is_own
from utils.start.errors import UserError
from utils.start.option_types import Options

# Models with auxiliary heads, which would change the output in training mode.
WITH_AUXILIARY = ("googlenet", "inception_v3")


def names() -> list[str]:
    """All model names that `create` accepts."""
    own = list_models(module=torchvision.models)
    if not has_timm():
        return own
    from utils.model import timm_models

    return own + [name for name in timm_models.names() if name not in set(own)]


def has_timm() -> bool:
    return find_spec("timm") is not None


def check_name(arch: str) -> None:
    """Raise `UserError` with the nearest names unless ``arch`` is a known model."""
    # timm takes seconds to import: not for torchvision's models.
    if not is_own(arch) and arch not in (known := names()) and not _is_tagged(arch):
        near = difflib.get_close_matches(arch, known, n=4, cutoff=0.5)
        hint = f"; nearest names: {', '.join(near)}" if near else ""
        more = "" if has_timm() else " (more architectures with: pip install timm)"
        raise UserError(f"unknown arch {arch!r}{hint}{more}", on_every_rank=True)


def _is_tagged(arch: str) -> bool:
    """Whether this is a model of timm with the tag of its weights, as resnet18.a1_in1k."""
    if "." not in arch or not has_timm():
        return False
    from utils.model import timm_models

    return arch in timm_models.tagged_names()


def build(args: Options, classes: list[str]) -> nn.Module:
    """The model that the options ask for, with a logit for each of ``classes``, see `create`. Its
    ``notes`` are lines for the log."""
    model = create(args.arch, len(classes), args.image_size, args.pretrained is True)
    published = getattr(model, "pretrained_cfg", {})  # of timm
    is_new, notes = len(classes) != published.get("num_classes", 1000), list[str]()
    if isinstance(args.pretrained, str):
        file = pretrained_weights.load_weights(model, args.pretrained, args.arch, classes)
        is_new, notes = file.has_new_head, file.notes
    if args.evaluate and not args.resume and is_new:
        text = f"the classifier of --pretrained is not for the {len(classes)} classes of the data"
        raise UserError(f"{text}: train on them, or evaluate with --resume", on_every_rank=True)
    notes += blocks.change(model, args, len(classes))
    blocks.annotate(model, notes=notes)
    options = dict.fromkeys(args.epoch_sizes, "--image-size or --progressive")
    options.setdefault(args.preprocessing.crop, "--val-image-size")
    for size in options.keys() - {args.image_size}:
        _check_image_size(model, args.arch, size, options[size])
    return model


def create(arch: str, classes: int, image_size: int, pretrained: bool = False) -> nn.Module:
    """Build ``arch`` with ``classes`` logits, float32, on the CPU, for images of ``image_size``.

    ``pretrained`` loads the library's best ImageNet weights, with a new classifier unless
    ``classes`` is 1000. Raises: `UserError` for an unknown arch, missing weights, or an image size
    that does not fit.
    """
    check_name(arch)
    try:
        if not is_own(arch):
            from utils.model import timm_models

            model = timm_models.create(arch, classes, image_size, pretrained)
        else:
            options = _options(arch, image_size)
            if pretrained:
                model = pretrained_weights.with_published_weights(arch, classes, image_size)
            else:
                model = get_model(arch, weights=None, num_classes=classes, **options)
            if arch in WITH_AUXILIARY:  # to build it again without initialising weights
                options |= {"init_weights": False, "transform_input": model.transform_input}
            blocks.annotate(model, constructor_args=options)
    except (AssertionError, ValueError) as error:
        raise _unfit(arch, image_size, error) from error
    except (URLError, OSError) as error:
        raise UserError(
            f"the pretrained weights of {arch} could not be downloaded ({error}): "
            "put them in torch's cache folder (TORCH_HOME), use --pretrained FILE, or train "
            "without --pretrained and --freeze"
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


def _check_image_size(
    model: nn.Module, arch: str, image_size: int, option: str = "--image-size"
) -> None:
    """Try the forward pass on the meta device: shapes are checked, nothing is computed."""
    # Not torch.func.functional_call, which leaves its tensors in a model that has one module in
    # two places, such as CoaT.
    on_meta = {id(x): x.detach().to("meta") for x in (*model.parameters(), *model.buffers())}
    try:
        images = torch.empty(2, 3, image_size, image_size, device="meta")
        with torch.no_grad():
            copy.deepcopy(model, on_meta).eval()(images)  # ``on_meta`` instead of copies
    except (RuntimeError, AssertionError, ValueError) as error:
        raise _unfit(arch, image_size, error, option) from error


def _unfit(arch: str, image_size: int, error: Exception, option: str = "--image-size") -> UserError:
    reason = " ".join(str(error).split())[:160]
    return UserError(
        f"{arch} does not take images of {image_size} pixels: choose another {option} ({reason})",
        on_every_rank=True,
    )
