"""One line in place of a traceback where a package is missing, or memory, before training begins.

- Always on. Used by every script.
- Interface: `report`, which becomes ``sys.excepthook``.
- Without this file, such a start ends with Python's traceback.
"""

import sys
from pathlib import Path
from types import TracebackType

from utils import errors
from utils.errors import UserError

# The packages of requirements.txt, by the name under which they are imported.
REQUIRED = {name: name for name in ("torch", "torchvision", "tensorboard", "numpy", "tqdm")}
REQUIRED |= {"matplotlib": "matplotlib", "PIL": "pillow", "google": "protobuf"}


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End with an error message in place of a traceback, if the user can fix the ``error``."""
    if isinstance(error, ModuleNotFoundError) and error.name in REQUIRED:
        environment = Path(__file__).resolve().parents[2] / ".venv"
        how = "`bash scripts/quickstart.sh` makes an environment with all that is needed"
        if environment.exists():
            how = f"`source {environment}/bin/activate` first"
        text = f"{REQUIRED[error.name]} is not installed for {sys.executable}: {how}, or "
        text += "`pip install -r requirements.txt`"
    elif isinstance(error, FileNotFoundError) and "temporary directory" in str(error):
        text = "no folder for temporary files, such as /tmp, can be written to: free disk space, "
        text += "set TMPDIR, or raise `ulimit -f`"
    elif isinstance(error, MemoryError) or "failed to map segment" in str(error):
        text = f"too little memory to start ({error}): close other programs, or raise `ulimit -v`"
    elif isinstance(error, UserError):
        text = str(error)
    else:
        sys.__excepthook__(kind, error, trace)
        return
    sys.exit(errors.report(UserError(text, on_every_rank=True)))
