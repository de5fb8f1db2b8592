"""A run's best model for other programs: safetensors, timm's ``config.json``, ONNX."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from results.predictions import Best

from utils import models
from utils.errors import UserError

README = """# {arch}

`model.safetensors` holds the weights of a {arch} with {count} classes, `config.json` the names of
the classes (`label_names`) and the preprocessing, in the format of timm.

With torchvision{timm}:

```python
import json
import torchvision
from safetensors.torch import load_file
from torchvision import transforms as T

config = json.load(open("config.json"))
{build}
model.load_state_dict(load_file("model.safetensors"))
model.eval()
p = config["pretrained_cfg"]
preprocess = T.Compose([
    T.Resize({resize}, T.InterpolationMode(p["interpolation"])), T.CenterCrop(p["input_size"][1:]),
    T.ToTensor(), T.Normalize(p["mean"], p["std"]),
])
```
"""
TIMM = """ (which has this architecture through timm: `import timm`). With timm alone:

```python
import timm

model = timm.create_model("local-dir:.", pretrained=True).eval()
config = timm.data.resolve_model_data_config(model)
preprocess = timm.data.create_transform(**config, is_training=False)
```

With the weights file"""


def config(best: Best) -> dict[str, Any]:
    """What timm reads from ``config.json``, and what torchvision's constructor needs."""
    p, arch, count = best.preprocessing, best.content["arch"], len(best.classes)
    part = p.crop / p.val_resize_size
    while math.floor(p.crop / part) < p.val_resize_size:  # timm computes the size in this way
        part = math.nextafter(part, 0)
    weights = {"input_size": [3, p.crop, p.crop], "interpolation": p.interpolation}
    weights |= {"crop_pct": part, "crop_mode": "center", "num_classes": count}
    weights |= {"mean": list(p.mean), "std": list(p.std)}
    whole = {"architecture": arch, "num_classes": count, "pretrained_cfg": weights}
    whole |= {"model_args": args} if (args := best.content["model_args"]) else {}
    trained = {name: best.content.get(name) for name in ("epoch", "top1", "top5", "loss")}
    return whole | {"label_names": best.classes, "trained": trained}


def export(best: Best, folder: Path, onnx: bool = False) -> list[Path]:
    """Write the model into ``folder``. Returns: the files. Raises: `UserError`, OSError."""
    try:
        from safetensors.torch import save
    except ModuleNotFoundError:
        raise UserError("--export needs a package: pip install safetensors") from None
    facts = config(best)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("model.safetensors", "config.json", "README.md")]
    # Tensors of their own: a file of safetensors has none that share memory.
    weights = {name: x.clone().contiguous() for name, x in best.build().state_dict().items()}
    paths[0].write_bytes(save(weights, {"format": "pt"}))
    paths[1].write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    paths[2].write_text(readme(best), encoding="utf-8")
    if onnx:
        paths.append(folder / "model.onnx")
        to_onnx(best, paths[-1])
    return paths


def readme(best: Best) -> str:
    """How to load the exported files, in Markdown."""
    arch, own = best.content["arch"], models.is_own(best.content["arch"])
    package = "torchvision.models.get_model" if own else "timm.create_model"
    build = f'model = {package}(\n    "{arch}", num_classes=config["num_classes"], '
    build += '**config.get("model_args", {})\n)'
    facts = {"arch": arch, "count": len(best.classes), "build": build}
    facts["resize"] = best.preprocessing.val_resize_size
    return README.format(timm="" if own else TIMM, **facts)


def to_onnx(best: Best, path: Path) -> None:
    """Export by torch's own exporter, for any number of images. Raises: `UserError`."""
    side = best.preprocessing.crop
    images = torch.zeros(2, 3, side, side)
    names = {"input_names": ["images"], "output_names": ["logits"]}
    how = {"dynamic_shapes": ({0: torch.export.Dim("n")},), "external_data": False}
    try:
        torch.onnx.export(best.build(), (images,), path, verbose=False, **names, **how)
    except ImportError:
        raise UserError("--onnx needs packages: pip install onnx onnxscript") from None
