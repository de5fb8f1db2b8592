"""``--tracker wandb``: the curves, options and first batch of a run in Weights & Biases as well.

Interface: `Run.curves`, `Run.pictures` and `Run.at_end`, in rank 0. No error of the tracker ends a
training. Without this file: TensorBoard alone.
"""

import logging
import multiprocessing.util
import os
import secrets
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from utils.errors import UserError

log = logging.getLogger(__name__)

ID = "wandb.id"  # in the run directory: a resumed run continues under this id
WAIT = 60.0  # seconds, for an answer at the start and for the last uploads at the end
LAG = 30.0  # seconds after which wandb has written or sent what it got; measured: under 20
X = "epoch"  # of all curves; wandb's own steps cannot be repeated after a resume


def check() -> None:
    """Raise `UserError` if the package is missing."""
    if find_spec("wandb") is None:
        raise UserError("--tracker wandb needs a package: pip install wandb", on_every_rank=True)


class Tracker:
    """The run in Weights & Biases; None as ``remote`` after an error, which is reported once."""

    def __init__(self, run: Any):
        """Follow ``run``, a `utils.run_directory.Run`."""
        self.run, self.remote, self.has_facts = run, None, False
        self.sent: dict[str, int] = {}  # the last x of each tag that an earlier process has sent
        self._try(self._open)
        run.curves.append(lambda tags, x: self._try(self._write, tags, x))
        run.pictures.append(lambda tag, image, x: self._try(self._draw, tag, image, x))
        run.at_end.append(self.close)
        # Also after an error: `launch.run_main` ends a process this way.
        multiprocessing.util.Finalize(None, self.close, exitpriority=0)

    def _try(self, call: Any, *values: Any) -> None:
        if self.remote is None and call != self._open:
            return
        try:
            call(*values)
        except Exception as error:  # no network, no login, whatever it is: training continues
            self.remote = None
            text = " ".join(f"{error}".split())[:200] or type(error).__name__
            log.warning(f"wandb cannot be used ({text}): training continues without it")

    def _open(self) -> None:
        folder, hook = self.run.folder, sys.excepthook
        import wandb

        file = folder / ID
        if file.exists():
            self.sent = _last_points(folder)
        else:
            file.write_text(secrets.token_hex(4))
        settings = wandb.Settings(
            silent=True, console="off", login_timeout=WAIT, init_timeout=WAIT, disable_git=True
        )
        place = {"dir": os.environ.get("WANDB_DIR") or str(folder), "name": folder.name}
        place["project"] = os.environ.get("WANDB_PROJECT") or "imagenet"
        place |= {"id": file.read_text().strip(), "resume": "allow"}
        try:
            self.remote = wandb.init(**place, config=self.run.options, settings=settings)
        finally:
            sys.excepthook = hook  # errors are one line here
        self.remote.define_metric(X, hidden=True)
        self.remote.define_metric("*", step_metric=X)

    def _write(self, tags: dict[str, float], x: int) -> None:
        if not self.has_facts:  # they were not known when the tracker was opened
            self.remote.config.update(self.run.record, allow_val_change=True)
            self.has_facts = True
        new = {tag: value for tag, value in tags.items() if x > self.sent.get(tag, -1)}
        if new:
            self.remote.log(new | {X: _epochs(next(iter(new)), x)})

    def _draw(self, tag: str, image: Any, x: int) -> None:
        import wandb

        self.remote.log({tag: wandb.Image(image), X: _epochs(tag, x)})

    def close(self) -> None:
        """Wait at most `WAIT` seconds for the last uploads."""
        remote, self.remote = self.remote, None
        if remote is not None:
            ends = threading.Thread(target=remote.finish, daemon=True)
            ends.start()
            ends.join(WAIT)


def _epochs(tag: str, x: int) -> float:
    from utils.tensorboard import STEP_TAGS

    return x / 1000 if tag.startswith(STEP_TAGS) else x


def _last_points(folder: Path) -> dict[str, int]:
    """The last x of each tag in the event files: a run that was killed repeats some of them.

    wandb's own process may have lost the last ones when the training was killed: they are sent
    again, as two equal points are better than none.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    last: dict[str, int] = {}
    for path in folder.glob("events.out.tfevents.*"):
        events = list(LegacyEventFileLoader(str(path)).Load())
        for event in events:
            for value in (
                event.summary.value if event.wall_time < events[-1].wall_time - LAG else ()
            ):
                last[value.tag] = max(event.step, last.get(value.tag, -1))
    return last
