"""``--tracker wandb``: also send a run's curves, options and first batch to Weights & Biases.

Interface: functions in `Run.curves`, `Run.pictures` and `Run.at_end`, in rank 0. Errors of the
tracker never end a training. Without this file, curves go only to TensorBoard.
"""

import logging
import multiprocessing.util
import os
import secrets
import sys
import threading
from importlib.util import find_spec
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from utils.errors import UserError
from utils.tensorboard import STEP_TAGS

log = logging.getLogger(__name__)

WAIT = 60.0  # seconds to wait for an answer at the start, and for the last uploads at the end
LAG = 30.0  # seconds after which wandb has saved or sent a point; measured: under 20
X = "epoch"  # x axis of all curves; wandb's own step numbers cannot go back after a resume


def check() -> None:
    """Raise `UserError` if the package is missing."""
    if find_spec("wandb") is None:
        raise UserError("--tracker wandb needs a package: pip install wandb", on_every_rank=True)


class Tracker:
    """A ``run`` in Weights & Biases. After the first error, it logs a warning and sends no more."""

    def __init__(self, run: Any):
        """Create it before a resumed run cuts points off its event files, which are read here."""
        self.wandb, self.sent, hook = None, {}, sys.excepthook
        self._try(self._open, run)
        sys.excepthook = hook  # undo wandb's hook: this suite prints errors as one line
        run.curves.append(lambda tags, x: self._try(self._draw, tags, x))
        run.pictures.append(lambda *picture: self._try(self._show, *picture))
        run.at_end.append(self.close)
        # Close it after errors as well: `launch.run_main` calls finalizers.
        multiprocessing.util.Finalize(None, self.close, exitpriority=0)

    def _try(self, call: Any, *values: Any) -> None:
        if self.wandb is None and call != self._open:
            return
        try:
            call(*values)
        except Exception as error:  # no network, no login, ...: training continues
            self.wandb = None
            text = " ".join(f"{error}".split())[:200] or type(error).__name__
            log.warning(f"wandb cannot be used ({text}): training continues without it")

    def _open(self, run: Any) -> None:
        import wandb

        file = run.folder / "wandb.id"  # a resumed run keeps its id
        for path in sorted(run.folder.glob("events.out.tfevents.*")) if file.exists() else ():
            events = list(LegacyEventFileLoader(str(path)).Load())
            # If training was killed, wandb's own process may have lost the last points. Send them
            # again.
            early = (one for one in events if one.wall_time < events[-1].wall_time - LAG)
            self.sent |= {value.tag: one.step for one in early for value in one.summary.value}
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        waits = {"login_timeout": WAIT, "init_timeout": WAIT}
        wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "imagenet",
            name=run.folder.name,
            id=file.read_text().strip(),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            config=run.options | run.record,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, **waits),
        )
        wandb.define_metric(X, hidden=True)
        wandb.define_metric("*", step_metric=X)
        self.wandb = wandb

    def _draw(self, tags: dict[str, float], x: int) -> None:
        if new := {tag: value for tag, value in tags.items() if x > self.sent.get(tag, -1)}:
            self.wandb.log(new | {X: x / 1000 if next(iter(new)).startswith(STEP_TAGS) else x})

    def _show(self, tag: str, image: Any, x: int) -> None:
        self.wandb.log({tag: self.wandb.Image(image), X: x / 1000})

    def close(self) -> None:
        """Wait at most `WAIT` seconds for the last uploads."""
        wandb, self.wandb = self.wandb, None
        if wandb is not None:
            ends = threading.Thread(target=wandb.finish, daemon=True)
            ends.start()
            ends.join(WAIT)
