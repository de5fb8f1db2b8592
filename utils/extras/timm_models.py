"""timm's models in addition to torchvision's: ``-a NAME``, if timm is installed.

Interface, for `utils.models`: `names`, `create`, and `preprocessing`, which the published weights
expect. Without this file, only torchvision's models are available.
"""

from typing import Any

import timm
from torch import nn

from utils.errors import UserError
from utils.preprocessing import Preprocessing, nearest_interpolation


def names() -> list[str]:
    """Return the names of all timm models."""
    return timm.list_models()


def preprocessing(arch: str) -> Preprocessing | None:
    """Return the preprocessing that the published weights of ``arch`` expect; None without any."""
    if not timm.is_model_pretrained(arch):
        return None
    config = timm.get_pretrained_cfg(arch)
    size = config.input_size[-1]
    interpolation = nearest_interpolation(config.interpolation)
    short = int(size / config.crop_pct)
    return Preprocessing(tuple(config.mean), tuple(config.std), interpolation, size, short)


def create(
    arch: str, classes: int, image_size: int, pretrained: bool, drop_path: float | None
) -> nn.Module:
    """Create a timm model; see `utils.models.create`."""
    options: dict[str, Any] = {"pretrained": pretrained, "num_classes": classes}
    if drop_path is not None:
        options["drop_path_rate"] = drop_path
    try:
        model = timm.create_model(arch, **options)
    except TypeError as error:
        if drop_path is None:
            raise
        text = f"--drop-path: {arch} does not support it ({error})"
        raise UserError(text, on_every_rank=True) from error
    positions = getattr(model, "pos_embed", None)
    own_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if isinstance(positions, nn.Parameter) and own_size not in (None, (image_size, image_size)):
        model = timm.create_model(arch, **options, img_size=image_size)
        model.constructor_args = {"img_size": image_size}
    return model
