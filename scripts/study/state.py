"""What a study has done so far, on disk: LOGBOOK/NAME/study.json, whole at any instant."""

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from study.arms import Arm

from utils.atomic import save_atomically
from utils.errors import UserError

FILE, LOCK = "study.json", ".lock"
BEAT_SECONDS = 2.0
WAITING, RUNNING, FINISHED, FAILED, STOPPED = "waiting", "running", "finished", "failed", "stopped"


@dataclass
class Progress:
    """What has become of an arm. ``hosts``: names of its nodes; ``why``: of a failure."""

    command: list[str]
    status: str = WAITING
    attempts: int = 0
    why: str = ""
    code: int | None = None
    hosts: list[str] = field(default_factory=list)
    began: str = ""  # the first attempt, as 2026-11-22 05:00
    ended: str = ""


class State:
    """The progress of all arms of a study, by their names, in the folder ``folder``."""

    def __init__(self, folder: Path):
        """Read what is there. Raises: `UserError` if that is no study's."""
        self.folder, self.file = folder, folder / FILE
        self.arms: dict[str, Progress] = {}
        self.facts: dict[str, str] = {}  # for the index of the log book
        try:
            found = json.loads(self.file.read_text())
            known = {one.name for one in fields(Progress)}  # another release may have had others
            self.arms = {
                name: Progress(**{key: value for key, value in one.items() if key in known})
                for name, one in found["arms"].items()
            }
            self.facts = found["facts"]
        except FileNotFoundError:
            pass
        except (OSError, ValueError, LookupError, TypeError) as fault:
            raise UserError(
                f"cannot read {self.file} ({fault}): correct it, or choose another --name"
            ) from None

    def join(self, arms: list[Arm]) -> None:
        """Take over the plan: arms may be added, those that have begun must stay as they are.

        Raises: `UserError`.
        """
        plan = {arm.name: list(arm.command) for arm in arms}
        for name, old in self.arms.items():
            if old.status == WAITING:
                continue
            if name not in plan:
                raise UserError(
                    f"{self.file} has the arm {name} too, which is {old.status}: keep it in the "
                    "line, or choose another --name"
                )
            if plan[name] != old.command:
                changed = " ".join(w for w in plan[name] if w not in old.command) or "less options"
                raise UserError(
                    f"the arm {name} has begun with other options (now: {changed}): type the line "
                    f"as it was ({' '.join(old.command)}), or choose another --name"
                )
        self.arms = {
            name: self.arms.get(name) or Progress(command) for name, command in plan.items()
        }
        for name, command in plan.items():
            self.arms[name].command = command

    def save(self) -> None:
        """Write it. Raises: `UserError`."""
        arms = {name: asdict(one) for name, one in self.arms.items()}
        text = json.dumps({"facts": self.facts, "arms": arms}, indent=1) + "\n"
        try:
            save_atomically(lambda file: file.write(text.encode()), self.file)
        except OSError as fault:
            raise UserError(f"cannot write {self.file}: {fault.strerror}") from None

    @contextlib.contextmanager
    def held(self) -> Iterator[float]:
        """No second launcher works at this study meanwhile. Gives the seconds since the last one
        was alive (infinite if there was none). Raises: `UserError`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / LOCK, "a+")
        except OSError as fault:
            raise UserError(f"cannot write the log book {self.folder}: {fault.strerror}") from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.seek(0)
                raise UserError(
                    f"this study is running already (process {lock.read().strip() or '?'}): wait "
                    "for it, or choose another --name"
                ) from None
            lock.seek(0)
            silent = time.time() - os.path.getmtime(lock.name) if lock.read() else float("inf")
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            over = threading.Event()

            def beat() -> None:
                while not over.wait(BEAT_SECONDS):
                    with contextlib.suppress(OSError):
                        os.utime(lock.name)

            threading.Thread(target=beat, daemon=True).start()
            try:
                yield silent
            finally:
                over.set()


def now() -> str:
    """The time, as 2026-11-22 05:00."""
    return time.strftime("%Y-%m-%d %H:%M")
