"""``--store URL``: upload copies of a run's files in the background; ``--resume URL``.

A store is a folder or a URL (s3://, gs://, az://); fsspec, which torch depends on, transfers the
files. Upload errors neither stop nor delay training. Interface: `Store` is a sink of a run.
"""

import json
import logging
import multiprocessing.util
import queue
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from utils.run.ledger import FILE as LEDGER
from utils.run.sinks import Sink
from utils.run.snapshots import BEST, SNAPSHOT
from utils.start import errors
from utils.start.atomic import FETCHED, link_atomically, save_atomically
from utils.start.errors import UserError
from utils.start.option_types import is_url

log = logging.getLogger(__name__)

END_WAIT = 100.0  # seconds for the last uploads; a spot instance ends 120 s after its notice
LAST_TRIES = (0.0, 1.0, 2.0)  # seconds to wait before each attempt at the end of a run


def check_options(store: str | None, resume: str | None) -> None:
    """Raise `UserError` for URLs of an unknown kind, or if the package for a URL is missing."""
    for url in filter(is_url, (store, resume)):
        protocol, path = fsspec.core.split_protocol(url)
        try:
            fsspec.get_filesystem_class(protocol)
            if not path.strip("/"):
                raise ValueError("it names no bucket")
        except (ImportError, ValueError) as error:
            raise UserError(
                f"{url} cannot be used ({error}): a store is a folder, s3://BUCKET/PREFIX, "
                "gs://BUCKET/PREFIX or az://CONTAINER/PREFIX; these need s3fs, gcsfs or adlfs",
                on_every_rank=True,
            ) from None


def _connect(url: str) -> tuple[Any, str]:
    """Return the file system of ``url`` and the path in it."""
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if url.startswith("s3://"):  # s3fs would wait minutes for an endpoint that does not answer
        retries = {"total_max_attempts": 2}
        options["config_kwargs"] = {"connect_timeout": 5, "read_timeout": 30, "retries": retries}
    system, path = fsspec.core.url_to_fs(url, **options)
    return system, path.rstrip("/")


def _names(system: Any, folder: str) -> set[str]:
    try:
        return {Path(entry).name for entry in system.ls(folder, detail=False)}
    except FileNotFoundError:
        return set()


def _download(system: Any, source: str, path: Path) -> None:
    with system.open(source, "rb") as remote:
        save_atomically(lambda file: shutil.copyfileobj(remote, file), path)


def _find(url: str) -> tuple[Any, str, str, set[str]]:
    """Return file system, folder and name of the file at ``url`` (if that is a folder, of its
    snapshot), and all names in the folder. Raises: `UserError`."""
    try:
        system, path = _connect(url)
        folder, _, name = path.rpartition("/")
        if not system.isfile(path):
            folder, name = path, SNAPSHOT
        names = _names(system, folder)
    except Exception as error:  # each package has its own types
        raise UserError(f"cannot read {url} ({error!r:.200})") from error
    if name not in names:
        raise UserError(f"{url} does not exist, or is a folder without {SNAPSHOT}")
    return system, folder, name, names


def run_name(url: str, mark: str) -> str | None:
    """Return the name of the file's folder, which is the run's name, if ``mark`` is there, too."""
    _, folder, _, names = _find(url)
    return folder.rpartition("/")[2] if mark in names else None


def is_copy(url: str, store: str | None, folder: Path) -> bool:
    """Whether ``url`` is the copy that --store makes of the run in ``folder``, or its snapshot."""
    copy = store and f"{store.rstrip('/')}/{folder.name}"
    return copy in (url.rstrip("/"), url.rpartition("/")[0])


def fetch(url: str, folder: Path | None, with_best: bool = False) -> Path:
    """Download ``url`` to a file in ``folder`` that is removed when this process ends.

    Without ``folder``, use a temporary one. ``with_best``: download the best model beside the file,
    too, unless ``folder`` already has one. Raises: `UserError`.
    """
    system, remote, name, names = _find(url)
    if folder is None:
        scratch = tempfile.TemporaryDirectory(prefix="imagenet-")
        _at_exit(scratch.cleanup)
        folder = Path(scratch.name)
    file = folder / f".{name}{FETCHED}"
    _at_exit(lambda: file.unlink(missing_ok=True))
    try:
        _download(system, f"{remote}/{name}", file)
        if with_best and BEST in names and name != BEST and not (folder / BEST).exists():
            _download(system, f"{remote}/{BEST}", folder / BEST)
    except Exception as error:
        raise UserError(f"cannot download {url} ({error!r:.200})") from error
    return file


def _at_exit(clean_up: Callable[[], None]) -> None:
    """Call ``clean_up`` when this process ends, even after an error (see `launch.run_main`)."""
    multiprocessing.util.Finalize(None, clean_up, exitpriority=0)


class Store(Sink):
    """The folder ``URL/NAME OF THE RUN/`` for copies of a run's files. Only rank 0 uses it."""

    def __init__(self, url: str, folder: Path):
        self.folder, self.url = folder, f"{url.rstrip('/')}/{folder.name}"
        self.system, self.path = None, ""
        self.fails = False  # whether the last upload failed
        self.waiting: set[Path] = set()  # files to upload
        self.sending: set[Path] = set()  # the file that is being uploaded
        self.due: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: the run ends
        self.thread = threading.Thread(target=self._work, name="store", daemon=True)

    def open(self, resume: str | None) -> None:
        """Check that the store can be used, and start the thread that uploads.

        If ``resume`` is "auto" and the run's folder has no snapshot, the store's files are fetched.
        A store that fails is reported. Raises: `UserError` if the bucket does not exist, or if
        continuing could overwrite a run, or a newer copy of this one.
        """
        needed = resume == "auto" and not (self.folder / SNAPSHOT).exists()
        names: set[str] = set()
        bucket, is_newer = "", False  # the name of a bucket that does not exist
        try:
            self.system, self.path = _connect(self.url)
            names, first = _names(self.system, self.path), self.path.partition("/")[0]
            # The path of a local folder begins with "/", so ``first`` is empty.
            bucket = first if first and not names and not self.system.exists(first) else ""
            for name in (LEDGER, BEST, SNAPSHOT) if needed and SNAPSHOT in names else ():
                if name in names:
                    _download(self.system, f"{self.path}/{name}", self.folder / name)
                    log.info(f"fetched {self.url}/{name}")
            if resume == "auto" and {LEDGER, SNAPSHOT} <= names and (self.folder / LEDGER).exists():
                here, there = (self.folder / LEDGER).read_text(), f"{self.path}/{LEDGER}"
                starts = len(json.loads(here)), len(json.loads(self.system.cat_file(there)))
                is_newer = starts[0] < starts[1]
        except Exception as error:
            if needed:
                raise UserError(
                    f"cannot tell whether {self.url} has a snapshot to continue from "
                    f"({error!r:.200}): leave out --resume to start a new run"
                ) from error
            self._warn(error)
        if bucket:
            raise UserError(f"the bucket {bucket} of --store {self.url} does not exist")
        if (names and not resume) or (SNAPSHOT in names and self._is_of_another_run(resume)):
            raise UserError(
                f"{self.url} contains a run already: continue it with --resume auto, or choose "
                "another --name"
            )
        if is_newer:
            remove = shlex.join(["rm", str(self.folder / SNAPSHOT)])
            raise UserError(
                f"{self.url} is newer than {self.folder}, as the run was continued on another "
                f"machine: to continue it here, type {remove}, then {errors.how_to_continue}"
            )
        self.thread.start()

    def _is_of_another_run(self, resume: str | None) -> bool:
        """Whether ``resume`` is a file that is neither here nor in this folder of the store."""
        if not resume or resume == "auto" or (self.folder / SNAPSHOT).exists():
            return False
        _, path = _connect(resume)
        return self.path not in (path, path.rpartition("/")[0])

    def file(self, path: Path) -> None:
        """Upload ``path`` soon, if it exists, and files whose upload has failed.

        The file may be replaced (by renaming) at any time: what is uploaded is always complete.
        """
        if path.is_file():
            self.waiting.add(path)
            self.due.put(True)

    def close(self) -> None:
        """Wait up to `END_WAIT` for the remaining uploads, and name those that failed."""
        self.due.put(False)
        self.thread.join(END_WAIT)
        if lost := ", ".join(sorted({path.name for path in self.waiting | self.sending})):
            log.info(f"note: {lost} could not be copied to {self.url}: see {self.folder}")

    def _work(self) -> None:
        while self.due.get():
            self._send_all()
        for seconds in LAST_TRIES:
            if self.waiting:
                time.sleep(seconds)
                self._send_all()

    def _send_all(self) -> None:
        """Upload all files in ``waiting``. If one fails, it stays there for the next call."""
        for path in sorted(self.waiting):
            self.sending = {path}
            self.waiting.discard(path)  # first, as a newer version may be added meanwhile
            try:
                if self.system is None:
                    self.system, self.path = _connect(self.url)
                # fsspec's own copies of local files are visible before they are complete.
                if isinstance(self.system, LocalFileSystem):
                    Path(self.path).mkdir(parents=True, exist_ok=True)
                    link_atomically(path, Path(self.path, path.name))
                else:
                    self.system.put_file(str(path), f"{self.path}/{path.name}")
            except Exception as error:  # whatever it is, training continues
                self._warn(error)
                self.waiting.add(path)
            else:
                if self.fails:
                    log.info(f"the store {self.url} works again")
                self.fails = False
            self.sending = set()

    def _warn(self, error: Exception) -> None:
        if not self.fails:
            log.warning(
                f"the store {self.url} cannot be used ({error!r:.200}): training continues, and "
                "the next snapshot tries again"
            )
        self.fails = True
