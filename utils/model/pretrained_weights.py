"""``--pretrained``, and ``--resume`` with checkpoints of other programs.

Interface: functions that `utils.model.models` and `utils.run.resume` call. They load published
weights of torchvision and timm, and the weights (not optimiser state, loss scale or epoch) in
checkpoints of pytorch/examples, the Apex example, torchvision's references and timm.
"""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torchvision.models import Inception3, VisionTransformer, get_model, get_model_weights
from torchvision.models.vision_transformer import interpolate_embeddings

from utils.data.preprocessing import Preprocessing, nearest_interpolation
from utils.model import blocks
from utils.model.blocks import is_own, scale_input_as
from utils.start.atomic import read_checkpoint
from utils.start.errors import UserError
from utils.start.option_types import Options
from utils.start.world import as_state_dict

_EMA = ("state_dict_ema", "model_ema")  # key in timm's files; in those of torchvision's references
MOST_MISSING = 0.1  # share of the model's tensors; a file that lacks more is for another model
_SHOWN = 4  # names listed in a message


# ---- published weights


def expected_preprocessing(args: Options, local: bool) -> Preprocessing | None:
    """Return the preprocessing for the ``--pretrained`` weights, or None. Raises: `UserError`.

    ``local``: the file must exist on this machine.
    """
    published, file = published_preprocessing(args.arch), args.pretrained
    if file is True and published is None:
        raise UserError(f"timm has no pretrained weights for {args.arch}: leave --pretrained out")
    if not isinstance(file, str) or not (local or os.path.isfile(file)):
        return published
    saved = read_weights(file).get("preprocessing")  # in a file of this suite
    return published if saved is None else Preprocessing.from_dict(saved, file)


def published_preprocessing(arch: str) -> Preprocessing | None:
    """Return the preprocessing that the published weights of ``arch`` expect; None without weights.

    Downloads nothing.
    """
    if not is_own(arch):
        from utils.model import timm_models

        return timm_models.preprocessing(arch)
    transforms = get_model_weights(arch)["DEFAULT"].transforms()
    (size,), (short,) = transforms.crop_size, transforms.resize_size
    interpolation = nearest_interpolation(transforms.interpolation.value)
    return Preprocessing(tuple(transforms.mean), tuple(transforms.std), interpolation, size, short)


def with_published_weights(arch: str, classes: int, image_size: int) -> nn.Module:
    """Return a torchvision model with its best ImageNet weights. Its last layer is new unless
    ``classes`` is 1000."""
    published = get_model_weights(arch)["DEFAULT"]
    options = {"input_size": (image_size, image_size)} if arch.startswith("maxvit") else {}
    if arch.startswith("vit_") and published.meta["min_size"] != (image_size, image_size):
        model = get_model(arch, weights=None, image_size=image_size)
        assert isinstance(model, VisionTransformer)
        state = published.get_state_dict(progress=True, check_hash=True)
        model.load_state_dict(
            interpolate_embeddings(image_size, model.patch_size, OrderedDict(state))
        )
    else:
        model = get_model(arch, weights=published, **options)
    if isinstance(model, Inception3):  # for googlenet, torchvision does this itself
        model.aux_logits, model.AuxLogits = False, None
    if classes != 1000:
        (name,) = blocks.heads_of(model, 1000)
        old = model.get_submodule(name)
        if isinstance(old, nn.Linear):
            new: nn.Module = nn.Linear(old.in_features, classes, bias=old.bias is not None)
        else:
            assert isinstance(old, nn.Conv2d)
            height, width = old.kernel_size
            new = nn.Conv2d(old.in_channels, classes, (height, width))
        model.set_submodule(name, new)
        blocks.annotate(model, num_classes=classes)  # squeezenet and a few others keep a copy
    return model


# ---- files


def read_weights(file: str) -> dict[str, Any]:
    """Load any program's checkpoint, or a .safetensors file, to the CPU.

    Code in the file is not executed. Raises: `UserError`.
    """
    path = Path(file)
    if path.suffix != ".safetensors":
        return read_checkpoint(path)
    try:
        from safetensors.torch import load_file

        return load_file(path)
    except ImportError:
        raise UserError(
            f"{path} needs a package: pip install safetensors", on_every_rank=True
        ) from None
    except Exception as error:  # the package has its own types
        raise UserError(f"{path} cannot be read as weights ({str(error)[:200]})") from error


def plain_weights(
    content: dict[str, Any], path: Path | None
) -> tuple[dict[str, Tensor], str | None]:
    """Return the model's weights in any program's checkpoint, by torchvision's names, and a note.

    Averaged weights (EMA) are used only if there are no others, because training continues from
    the plain weights. Raises: `UserError`.
    """
    ema = next((name for name in _EMA if name in content), None)
    weights, note = content.get("model", content.get("state_dict")), None
    if ema is not None:
        which = "its plain weights are used" if weights else "it has no others"
        note = f"note: {path} contains averaged (EMA) weights, {ema}: {which}"
    if weights is None:
        weights = content if ema is None else content[ema]
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise UserError(f"{path} contains no model weights", on_every_rank=True)
    # Remove the prefixes of DistributedDataParallel and torch.compile.
    named = {n.replace("_orig_mod.", "").removeprefix("module."): x for n, x in weights.items()}
    if ema is not None:
        named.pop("n_averaged", None)  # the counter of torch.optim.swa_utils.AveragedModel
    return named, note


# ---- --pretrained FILE


class Loaded(NamedTuple):
    """What `load_weights` has done."""

    notes: list[str]  # for the log
    has_new_head: bool


def load_weights(model: nn.Module, file: str, arch: str, classes: list[str]) -> Loaded:
    """Load the weights in ``file`` into ``model``, whose last layer has an output for each class.

    The last layer keeps its initial weights if the file has other classes, or another number of
    them. Position embeddings are resized to the model's image size. Raises: `UserError` if the file
    is for another model.
    """
    path, content = Path(file), read_weights(file)
    heads = tuple(f"{name}." for name in blocks.heads_of(model, len(classes)))
    theirs = content.get("classes")  # in a file of this suite
    keeps_head = not isinstance(theirs, list) or theirs == classes
    if isinstance(saved := content.get("arch"), str) and saved != arch:
        raise UserError(f"{path} is a {saved}: use -a {saved} to load it", on_every_rank=True)
    saved_weights, note = plain_weights(content, path)
    own, fitted, notes = model.state_dict(), {}, []
    for name, tensor in own.items():
        value = saved_weights.get(name)
        if not isinstance(value, Tensor) or (name.startswith(heads) and not keeps_head):
            continue
        if value.shape != tensor.shape and name.endswith(("pos_embedding", "pos_embed")):
            before, value = _size(value), resized(value, tensor, model)
            notes.append(f"{name} resized from {before} to {_size(value)}")
        if value.shape == tensor.shape:
            fitted[name] = value
        elif not name.startswith(heads):
            why = f"{name} is {_size(value)}, not {_size(tensor)}"
            raise UserError(f"{path} does not fit {arch}: {why}", on_every_rank=True)
    # Old files lack the counters of batch norm.
    lacking = [n for n in own if n not in fitted and not n.endswith("num_batches_tracked")]
    new_head = [name for name in lacking if name.startswith(heads)]
    missing = [name for name in lacking if name not in new_head]
    if len(missing) > MOST_MISSING * len(own):
        why = f"{len(missing)} of {len(own)} weights are not in it: {_list(missing)}"
        raise UserError(f"{path} does not fit {arch}: {why}", on_every_rank=True)
    model.load_state_dict(as_state_dict(own | fitted, own))
    scale_input_as(content, model)
    kinds = {
        "new": new_head,
        "not in the file, so new": missing,
        "not in the model, so left out": [name for name in saved_weights if name not in own],
    }
    notes += [f"{kind}: {_list(names)}" for kind, names in kinds.items() if names]
    text = "; ".join([f"weights from {path}: {len(fitted)} of {len(own)} tensors", *notes])
    return Loaded([note, text] if note else [text], bool(new_head))


def resized(positions: Tensor, own: Tensor, model: nn.Module) -> Tensor:
    """Resize position embeddings [1, places, width] of a vision transformer to another image size.

    torchvision or timm does this for its own models. If it cannot, they are returned unchanged.
    """
    if positions.ndim != 3 or positions.shape[2:] != own.shape[2:]:
        return positions
    if hasattr(model, "num_prefix_tokens"):
        from utils.model import timm_models

        return timm_models.resized(positions, model)
    name = "encoder.pos_embedding"
    side = round((own.shape[1] - 1) ** 0.5)
    try:  # only the number of patches matters, so use patches of one pixel
        return interpolate_embeddings(side, 1, OrderedDict({name: positions}))[name]
    except ValueError:
        return positions


def _size(value: Tensor) -> str:
    return " x ".join(map(str, value.shape)) or "a number"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
