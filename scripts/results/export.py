"""Export a run's best model for other programs: safetensors, timm's ``config.json``, ONNX."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from results.predictions import Best

from utils.model import blocks
from utils.start.errors import UserError

README = Path(__file__).with_suffix(".md")


def export(best: Best, folder: Path, onnx: bool = False) -> list[Path]:
    """Write the model into ``folder``, with a README.md that says how to load it. With ``onnx``,
    write it as ONNX, too, for any number of images.

    Returns: the files. Raises: `UserError`, OSError.
    """
    import jinja2

    try:
        from safetensors.torch import save
    except ModuleNotFoundError:
        raise UserError("--export needs a package: pip install safetensors") from None
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("model.safetensors", "config.json", "README.md")]
    model = best.build()
    # Copy the tensors: a safetensors file cannot hold tensors that share memory.
    weights = {name: x.clone().contiguous() for name, x in model.state_dict().items()}
    paths[0].write_bytes(save(weights, {"format": "pt"}))
    paths[1].write_text(json.dumps(config(best), indent=1) + "\n", encoding="utf-8")
    facts = {"arch": best.arch, "count": len(best.classes), "is_timm": not blocks.is_own(best.arch)}
    facts |= {"resize": best.preprocessing.val_resize_size, "crop": best.preprocessing.crop}
    facts["onnx"] = onnx
    readme = jinja2.Template(README.read_text(), trim_blocks=True, keep_trailing_newline=True)
    paths[2].write_text(readme.render(facts), encoding="utf-8")
    if onnx:
        paths.append(folder / "model.onnx")
        images = (torch.zeros(2, 3, *[best.preprocessing.crop] * 2),)
        names = {"input_names": ["images"], "output_names": ["logits"]}
        how = {"dynamic_shapes": ({0: torch.export.Dim("n")},), "external_data": False}
        try:
            torch.onnx.export(model, images, paths[-1], verbose=False, **names, **how)
        except ImportError:
            raise UserError("--onnx needs packages: pip install onnx onnxscript") from None
    return paths


def config(best: Best) -> dict[str, Any]:
    """Return the ``config.json`` of timm, with the arguments of torchvision's constructor."""
    p, count, args = best.preprocessing, len(best.classes), best.content["model_args"]
    part = p.crop / p.val_resize_size
    while math.floor(p.crop / part) < p.val_resize_size:  # timm's formula of the resize size
        part = math.nextafter(part, 0)
    weights = {"input_size": [3, p.crop, p.crop], "interpolation": p.interpolation}
    weights |= {"crop_pct": part, "crop_mode": "center", "num_classes": count}
    weights |= {"mean": p.mean, "std": p.std}
    whole = {"architecture": best.arch, "num_classes": count, "pretrained_cfg": weights}
    whole |= {"model_args": args} if args else {}
    trained = {name: best.content.get(name) for name in ("epoch", "top1", "top5", "loss")}
    return whole | {"label_names": best.classes, "trained": trained}
