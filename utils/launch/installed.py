"""Imported before all packages: end with the launcher, and name a package that is missing."""

import importlib.abc
import sys
from pathlib import Path
from typing import Any

from utils.errors import UserError, report
from utils.launch import launch, supervise

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTED = ("imagenet_ddp.py", "imagenet_ddp_apex.py", "imagenet_fsdp.py")
# The packages of requirements.txt, by the name under which they are imported.
REQUIRED = {name: name for name in ("torch", "torchvision", "tensorboard", "numpy", "tqdm")}
REQUIRED |= {"matplotlib": "matplotlib", "PIL": "pillow", "google": "protobuf"}


class _Missing(importlib.abc.MetaPathFinder):
    """Asked for a module that no other finder has found."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name not in REQUIRED or not _is_ours(sys._getframe(1)):
            return
        how = "`bash scripts/quickstart.sh` makes an environment with all that is needed"
        if (ROOT / ".venv").exists():
            how = f"`source {ROOT}/.venv/bin/activate` first"
        text = f"{REQUIRED[name]} is not installed for {sys.executable}: {how}, or "
        error = UserError(text + "`pip install -r requirements.txt`", alike=True)
        raise SystemExit(report(error))


def _is_ours(frame: Any) -> bool:
    """Whether the import is in this repository; other packages may treat theirs as optional."""
    while frame and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    file = Path(frame.f_code.co_filename).resolve() if frame else Path("/")
    return file.is_relative_to(ROOT) and "site-packages" not in file.parts


sys.meta_path.append(_Missing())
if not supervise.die_with_launcher() and Path(sys.argv[0]).name in DISTRIBUTED:
    try:
        launch.begin_preflight()
    except UserError as error:
        raise SystemExit(report(error)) from None
