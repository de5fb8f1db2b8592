"""``--pretrained FILE``: a model's weights from a file on this machine."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torchvision.models.vision_transformer import interpolate_embeddings

from utils.atomic import read_checkpoint
from utils.data.preprocessing import Preprocessing
from utils.errors import UserError

_EMA = ("state_dict_ema", "model_ema")  # timm's name, and that of torchvision's references
MOST_MISSING = 0.1  # share of the model's tensors; a file that lacks more is of another model
_SHOWN = 4  # names in a message


def read(file: str) -> dict[str, Any]:
    """The content of any program's checkpoint, or of a .safetensors file, on the CPU.

    No code in it is run. Raises: `UserError`.
    """
    path = Path(file)
    if path.suffix != ".safetensors":
        return read_checkpoint(path)
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise UserError(f"{path} needs a package: pip install safetensors", alike=True) from None
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        return load_file(path)
    except Exception as fault:  # the package's own kind, among others
        raise UserError(f"{path} cannot be read as weights ({str(fault)[:200]})") from fault


def preprocessing(file: str) -> Preprocessing | None:
    """The preprocessing in a file of this suite; None for other files. Raises: `UserError`."""
    saved = read(file).get("preprocessing")
    return None if saved is None else Preprocessing.from_dict(saved, file)


def plain(content: dict[str, Any], path: Path | None) -> tuple[dict[str, Tensor], str | None]:
    """The model's weights in any program's checkpoint, under torchvision's names, and a note.

    Averaged weights (EMA) are taken only if there are no others, as the optimiser continues from
    the plain ones. Raises: `UserError`.
    """
    ema = next((name for name in _EMA if name in content), None)
    found, note = content.get("model", content.get("state_dict")), None
    if ema is not None:
        which = "the plain weights in it are used" if found else "there are no others in it"
        note = f"note: {path} holds averaged (EMA) weights, {ema}: {which}"
    if found is None:
        found = content.get(ema, content)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UserError(f"{path} holds no model weights", alike=True)
    # Without the prefixes of DistributedDataParallel and torch.compile.
    named = {n.replace("_orig_mod.", "").removeprefix("module."): x for n, x in found.items()}
    if ema is not None:
        named.pop("n_averaged", None)  # the counter of torch.optim.swa_utils.AveragedModel
    return named, note


def load(model: nn.Module, file: str, arch: str, head: str) -> list[str]:
    """Load the weights in ``file`` into ``model``, whose last layer is called ``head``.

    The last layer keeps its new weights if the file's has other classes; position embeddings are
    resized to the model's image size. Returns: notes for the log. Raises: `UserError` for a file of
    another model.
    """
    path, content = Path(file), read(file)
    if isinstance(saved := content.get("arch"), str) and saved != arch:
        raise UserError(f"{path} is a {saved}: use -a {saved} to load it", alike=True)
    found, note = plain(content, path)
    own, fitted, notes = model.state_dict(), {}, []
    for name, saved_value in found.items():
        value = saved_value
        if name not in own or not isinstance(value, Tensor):
            continue
        if value.shape != own[name].shape and name.endswith(("pos_embedding", "pos_embed")):
            value = resized(value, own[name], model)
            notes.append(f"{name} resized from {_size(saved_value)} to {_size(value)}")
        if value.shape == own[name].shape:
            fitted[name] = value
        elif not name.startswith(f"{head}."):
            raise _unfit(path, arch, f"{name} is {_size(value)}, not {_size(own[name])}")
    # Old files lack the counters of batch norm.
    lacking = [n for n in own if n not in fitted and not n.endswith("num_batches_tracked")]
    new_head = [name for name in lacking if name.startswith(f"{head}.")]
    missing = [name for name in lacking if name not in new_head]
    if len(missing) > MOST_MISSING * len(own):
        few = f"{len(missing)} of {len(own)} weights are not in it: {_list(missing)}"
        raise _unfit(path, arch, few)
    model.load_state_dict(own | fitted)
    left = [name for name in found if name not in own]
    notes = [f"weights from {path}: {len(fitted)} of {len(own)} tensors", *notes]
    notes += [f"new: {_list(new_head)}"] if new_head else []
    notes += [f"not in the file, so new: {_list(missing)}"] if missing else []
    notes += [f"not in the model, so left out: {_list(left)}"] if left else []
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


def _unfit(path: Path, arch: str, why: str) -> UserError:
    return UserError(f"{path} does not fit {arch}: {why}", alike=True)


def _size(value: Tensor) -> str:
    return " x ".join(map(str, value.shape)) or "a number"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
