"""Imported before all packages: end with the launcher, and name a package that is missing."""

import sys
from pathlib import Path
from types import TracebackType

from utils.errors import UserError, report
from utils.launch import supervise

# The packages of requirements.txt, by the name under which they are imported.
REQUIRED = {name: name for name in ("torch", "torchvision", "tensorboard", "numpy", "tqdm")}
REQUIRED |= {"matplotlib": "matplotlib", "PIL": "pillow", "google": "protobuf"}


def _report_missing(
    kind: type[BaseException], fault: BaseException, trace: TracebackType | None
) -> None:
    """End with an error message in place of the traceback of a missing package."""
    if not isinstance(fault, ModuleNotFoundError) or fault.name not in REQUIRED:
        sys.__excepthook__(kind, fault, trace)
        return
    environment = Path(__file__).resolve().parents[2] / ".venv"
    how = "`bash scripts/quickstart.sh` makes an environment with all that is needed"
    if environment.exists():
        how = f"`source {environment}/bin/activate` first"
    text = f"{REQUIRED[fault.name]} is not installed for {sys.executable}: {how}, or "
    sys.exit(report(UserError(text + "`pip install -r requirements.txt`", alike=True)))


sys.excepthook = _report_missing
supervise.die_with_launcher()
