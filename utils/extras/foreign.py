"""Model weights in files of other programs, and in our own.

Other programs are pytorch/examples, the Apex example, torchvision's references and timm. Their
optimiser state, loss scale and epoch are ignored.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from utils.atomic import read_checkpoint
from utils.errors import UserError

_EMA = ("state_dict_ema", "model_ema")  # timm's name, and that of torchvision's references


def read_weights(file: str) -> dict[str, Any]:
    """The content of any program's checkpoint, or of a .safetensors file, on the CPU.

    No code in it is run. Raises: `UserError`.
    """
    path = Path(file)
    if path.suffix != ".safetensors":
        return read_checkpoint(path)
    try:
        from safetensors.torch import load_file

        return load_file(path)
    except ImportError:
        raise UserError(f"{path} needs a package: pip install safetensors", alike=True) from None
    except Exception as fault:  # the package's own kind, among others
        raise UserError(f"{path} cannot be read as weights ({str(fault)[:200]})") from fault


def plain_weights(
    content: dict[str, Any], path: Path | None
) -> tuple[dict[str, Tensor], str | None]:
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
