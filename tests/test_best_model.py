"""best.pt without this code: README's own lines load it, for one model of each family."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, draw_folder, environment, python, summary
from joined import command
from torch.amp import GradScaler
from torch.optim import SGD
from torchvision.models import get_model

from utils.model import models, o2
from utils.model.ema import Average
from utils.model.pretrained_weights import load_weights
from utils.run.snapshots import BEST, SNAPSHOT, SnapshotWriter, TrainState, best_of, snapshot_of

EVALUATE = """
from torch.nn.functional import cross_entropy
for folder in sys.argv[1:]:
    data = torchvision.datasets.ImageFolder(folder, preprocess)
    assert data.classes == best["classes"]
    images, targets = zip(*data)
    with torch.no_grad():
        logits = model(torch.stack(images))
    targets = torch.tensor(targets)
    top1 = 100 * (logits.argmax(1) == targets).double().mean().item()
    loss = cross_entropy(logits, targets).item()
    print(json.dumps({"top1": top1, "loss": loss, "images": len(data)}))
"""
# One of each family, with a size that it takes and that is not its own.
FAMILIES = {
    **dict.fromkeys(("resnet18", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5"), 32),
    **dict.fromkeys(("resnext50_32x4d", "wide_resnet50_2", "regnet_y_400mf", "densenet121"), 32),
    **dict.fromkeys(("vgg11_bn", "efficientnet_b0", "googlenet"), 32),
    **dict.fromkeys(("squeezenet1_1", "alexnet", "convnext_tiny", "swin_t", "swin_v2_t"), 64),
    "efficientnet_v2_s": 64,
    "vit_b_32": 64,
    "inception_v3": 75,
    "maxvit_t": 224,
}
FAMILY_NAMES = [  # the others take minutes
    pytest.param(name, marks=() if name == "googlenet" else pytest.mark.long) for name in FAMILIES
]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("images") / "data", train=4, val=3)


def evaluated(best: Path, *folders: Path, alone: bool = True) -> list[dict[str, float]]:
    """Loss and top-1 on each folder by the lines of README.md that load a best model.

    In an interpreter of their own, which sees nothing of this code, if ``alone``."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "runs/NAME/best.pt" in code
    photo = next(folders[0].glob("*/*"))
    code = code.replace("runs/NAME/best.pt", str(best)).replace("photo.jpg", str(photo))
    code = f"import json, sys\n{code}{EVALUATE}"
    if alone:
        words = [sys.executable, "-I", "-c", code, *folders]
        how = {"env": environment(), "cwd": best.parent, "capture_output": True, "text": True}
        text = subprocess.run(words, check=True, **how).stdout
    else:
        text = command("imagenet_nd", *folders, BEFORE=f"{code}\nraise SystemExit").out
    prediction, *results = text.splitlines()
    assert re.fullmatch(r"class_[012] \d+%", prediction)
    return [json.loads(result) for result in results]


@pytest.mark.parametrize("arch", FAMILY_NAMES)
def test_the_lines_in_the_readme_give_the_accuracy_that_the_run_printed(data, tmp_path, arch):
    size = ("--image-size", FAMILIES[arch], "--val-resize-size", FAMILIES[arch] + 10)
    line = ("-a", arch, *size, "-b", 4, "-j", 0, "--epochs", 1, "--lr", 1e-3)
    done = python("imagenet_nd.py", *line, "--output-dir", tmp_path, "--name", "run", data)
    assert done.code == 0, done.err
    (plain,), run = evaluated(tmp_path / "run/best.pt", data / "val"), summary(tmp_path / "run")
    assert plain["top1"] == pytest.approx(run["best_top1"], abs=1e-6)
    assert plain["loss"] == pytest.approx(run["best_loss"], rel=0.02)


def test_the_versions_of_layers_are_kept_without_which_mnasnet_loads_nothing(tmp_path):
    """Also of the averages, and with float32 masters; files of other programs may lack them."""
    model, other = models.create("mnasnet0_5", 3, 32), get_model("mnasnet0_5", num_classes=3)
    state = TrainState(model, SGD(model.parameters()), GradScaler("cpu", enabled=False))
    state.ema, state.best = Average(model, 0.9), {"ema": 1}
    writer = SnapshotWriter(tmp_path)
    for state.apex_weights in (None, o2.Weights(model, dict)):
        content = snapshot_of(state, {}, [*"abc"])
        writer.save({BEST: best_of(state, "mnasnet0_5", content), SNAPSHOT: content})
        assert writer.wait() is None
        plain = torch.load(tmp_path / BEST)["state_dict"]
        for saved in (plain, torch.load(tmp_path / SNAPSHOT)["model"]):
            other.load_state_dict(saved)
        state.load_weights(plain := dict(plain))
    torch.save(plain, tmp_path / "plain.pt")
    load_weights(model, str(tmp_path / "plain.pt"), "mnasnet0_5", [*"abc"])


@pytest.mark.parametrize("arch", ["googlenet", "inception_v3", "maxvit_t", "vit_b_32"])
def test_the_constructor_gets_what_it_needs(arch):
    # The constructor of MaxViT computes with its tensors.
    with torch.device("cpu" if arch == "maxvit_t" else "meta"):
        ours = models.create(arch, 3, FAMILIES[arch])
        plain = get_model(arch, num_classes=3, **ours.constructor_args)
    shapes = [{name: x.shape for name, x in one.state_dict().items()} for one in (ours, plain)]
    assert shapes[0] == shapes[1]
