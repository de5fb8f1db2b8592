"""``--tracker wandb``: also send a run's curves, options and first batch to Weights & Biases.

Interface: `Tracker`, a sink of a run, in rank 0. Its errors never end a training.
"""

import contextlib
import logging
import multiprocessing.util
import os
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL import Image
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from utils.run.sinks import Sink
from utils.run.tensorboard import STEP_TAGS
from utils.start.errors import UserError

log = logging.getLogger(__name__)

WAIT = 60.0  # seconds to wait for an answer at the start, and for the last uploads at the end
LAG = 30.0  # seconds after which wandb has saved or sent a point; measured: under 20
KILLED = 5.0  # seconds for wandb's threads to end after its own process was killed
X = "epoch"  # x axis of all curves; wandb's own step numbers cannot go back after a resume


def check() -> None:
    """Raise `UserError` if the package is missing."""
    if find_spec("wandb") is None:
        raise UserError("--tracker wandb needs a package: pip install wandb", on_every_rank=True)


class Tracker(Sink):
    """A run in Weights & Biases. After the first error, it logs a warning and sends no more."""

    def __init__(self, folder: Path, options: dict[str, Any], record: dict[str, Any]):
        """Create it before a resumed run cuts points off its event files, which are read here.

        ``folder`` is the run directory, ``record`` the facts and results of the run: `close` reads
        those that are there by then.
        """
        self.record, hook = record, sys.excepthook
        self.wandb: Any = None  # the package, while it is used
        self.opened: Any = None  # wandb's own object of the run
        self.sent: dict[str, int] = {}  # tag: the last x that wandb has, from earlier sessions
        self._try(lambda: self._open(folder, options))
        sys.excepthook = hook  # undo wandb's hook: this suite prints errors as one line
        # Close it after errors as well: `launch.run_main` calls finalizers.
        multiprocessing.util.Finalize(None, self.close, exitpriority=0)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # no network, no login, ...: training continues
            self.wandb = None
            text = " ".join(f"{error}".split())[:200] or type(error).__name__
            log.warning(f"wandb cannot be used ({text}): training continues without it")

    def _open(self, folder: Path, options: dict[str, Any]) -> None:
        import wandb

        file = folder / "wandb.id"  # a resumed run keeps its id
        for path in sorted(folder.glob("events.out.tfevents.*")) if file.exists() else ():
            events = list(LegacyEventFileLoader(str(path)).Load())
            # If training was killed, wandb's own process may have lost the last points. Send them
            # again.
            early = (one for one in events if one.wall_time < events[-1].wall_time - LAG)
            self.sent |= {value.tag: one.step for one in early for value in one.summary.value}
        reached = max((_epoch(tag, x) for tag, x in self.sent.items()), default=0.0)
        begins = options.get("start_epoch")
        if begins is not None and begins < reached:
            log.info(
                f"note: wandb keeps the points that it has of this run, up to epoch {reached:g}: "
                "those that --start-epoch trains anew are not sent again. For a run of its own "
                f"there, use another --name, or remove {file} first"
            )
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        self.opened = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "imagenet",
            name=folder.name,
            id=file.read_text().strip(),
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(folder),
            config=options | self.record,
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                login_timeout=WAIT,
                init_timeout=WAIT,
            ),
        )
        wandb.define_metric(X, hidden=True)
        wandb.define_metric("*", step_metric=X)
        self.wandb = wandb
        if not self.opened.offline:
            log.info(f"curves at {self.opened.url}")

    def scalars(self, tags: Mapping[str, float], x: int) -> None:
        """Send the points that wandb does not have yet."""
        new = {tag: value for tag, value in tags.items() if x > self.sent.get(tag, -1)}
        at = {X: _epoch(next(iter(new), ""), x)}
        if self.wandb is not None and new:
            self._try(lambda: self.wandb.log(new | at))

    def image(self, tag: str, image: Image.Image, x: int) -> None:
        """Send a picture."""
        if self.wandb is not None:
            self._try(lambda: self.wandb.log({tag: self.wandb.Image(image), X: x / 1000}))

    def close(self) -> None:
        """Send the best figures as the run's summary, and say where the run is. Wait at most
        `WAIT` seconds for the last uploads."""
        opened, self.wandb, self.opened = self.opened, None, None
        if opened is None:
            return
        import wandb

        best = {key: x for key, x in self.record.items() if key.startswith("best_")}

        def end() -> None:
            with contextlib.suppress(Exception):  # it hung, or its process was killed
                opened.summary.update({key: x for key, x in best.items() if x is not None})
                wandb.finish()
            with contextlib.suppress(Exception):  # also takes back wandb's own exit handler
                wandb.teardown()

        ends = threading.Thread(target=end, daemon=True)
        ends.start()
        ends.join(WAIT)
        if ends.is_alive():
            # wandb waits for its process without limit, and again when this process exits.
            for process in _own_services():
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            ends.join(KILLED)
            log.warning(f"wandb did not answer within {WAIT:.0f} s: its last points may be missing")
        if opened.offline:
            folder = Path(opened.dir).parent
            own = sorted(folder.parent.glob(f"offline-run-*-{opened.id}"))  # not of other runs
            names = " ".join(shlex.quote(str(one)) for one in own if _unsent(one))
            log.info(f"to send this run to Weights & Biases: wandb sync {names}")
        else:
            log.info(f"curves at {opened.url}")


def _epoch(tag: str, x: int) -> float:
    """The place of a tag's point ``x`` on the axis of all curves."""
    return x / 1000 if tag.startswith(STEP_TAGS) else x


def _unsent(session: Path) -> bool:
    """Whether ``wandb sync`` has not marked this offline folder as sent."""
    return not any(session.glob("*.synced"))


def _own_services() -> list[int]:
    """The ids of the wandb processes that this process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text(errors="replace").partition("(")[2].rpartition(")")
            if name.startswith("wandb-") and int(rest.split()[1]) == os.getpid():
                found.append(int(stat.parent.name))
    return found
