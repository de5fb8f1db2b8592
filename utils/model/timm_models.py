"""timm's models in addition to torchvision's: ``-a NAME``, if timm is installed.

Interface, for `utils.model.models` and `utils.model.pretrained_weights`: `names`, `tagged_names`,
`create`, `resized`, and `preprocessing`, which the published weights expect.
"""

# timm is an optional package:
# pyright: reportMissingImports=false

from typing import Any

import timm
from torch import Tensor, nn

from utils.data.preprocessing import Preprocessing, nearest_interpolation
from utils.model import blocks


def names() -> list[str]:
    """Return the names of all timm models."""
    return timm.list_models()


def tagged_names() -> list[str]:
    """Return the names with a tag, of the weights that ``--pretrained`` then loads."""
    return timm.list_pretrained()


def preprocessing(arch: str) -> Preprocessing | None:
    """Return the preprocessing that the published weights of ``arch`` expect; None without any."""
    if not timm.is_model_pretrained(arch):
        return None
    config = timm.get_pretrained_cfg(arch)
    size = config.input_size[-1]
    interpolation = nearest_interpolation(config.interpolation)
    short = int(size / config.crop_pct)
    return Preprocessing(tuple(config.mean), tuple(config.std), interpolation, size, short)


def create(arch: str, classes: int, image_size: int, pretrained: bool) -> nn.Module:
    """Create a timm model; see `utils.model.models.create`."""
    options: dict[str, Any] = {"pretrained": pretrained, "num_classes": classes}
    model = timm.create_model(arch, **options)
    positions = getattr(model, "pos_embed", None)
    own_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if isinstance(positions, nn.Parameter) and own_size not in (None, (image_size, image_size)):
        model = timm.create_model(arch, **options, img_size=image_size)
        blocks.annotate(model, constructor_args={"img_size": image_size})
    return model


def resized(positions: Tensor, model: Any) -> Tensor:
    """Resize position embeddings [1, places, width] to the image size of a timm model."""
    from timm.layers import resample_abs_pos_embed

    size, tokens = list(model.patch_embed.grid_size), model.num_prefix_tokens
    return resample_abs_pos_embed(positions, new_size=size, num_prefix_tokens=tokens)
