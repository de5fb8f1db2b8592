"""Copies of a run in a store: uploaded in the background, fetched to an empty disk.

A store is a folder or a URL (s3://, gs://, az://); fsspec, which torch depends on, transfers the
files. No fault of the store stops or delays training.
"""

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from utils.atomic import link_atomically, save_atomically
from utils.errors import UserError
from utils.option_types import is_url

log = logging.getLogger(__name__)

END_WAIT = 100.0  # seconds for the last uploads; a spot instance has 120 from its notice on
LAST_TRIES = 3  # of a failing store, at the end of the run
_LONGEST_PAUSE = 60.0  # seconds between two tries


def check_options(store: str | None, resume: str | None) -> None:
    """Raise `UserError` for URLs of an unknown kind, or when a package for theirs is missing."""
    for url in filter(is_url, (store, resume)):
        protocol, path = fsspec.core.split_protocol(url)
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as fault:
            raise UserError(f"{url} needs one more package: {fault}", alike=True) from None
        except ValueError:
            raise UserError(
                f"{url}: {protocol}:// is not known; a store is a folder, s3://BUCKET/PREFIX, "
                "gs://BUCKET/PREFIX or az://CONTAINER/PREFIX",
                alike=True,
            ) from None
        if not path.strip("/"):
            raise UserError(f"{url} names no bucket: the form is {protocol}://BUCKET/PREFIX")


def _connect(url: str) -> tuple[Any, str]:
    """The file system of ``url`` and the path in it."""
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


def _reason(fault: Exception) -> str:
    return (str(fault).splitlines() or [type(fault).__name__])[0][:200]


def _find(url: str, default: str) -> tuple[Any, str, str, set[str]]:
    """File system, folder and name of the file that ``url`` means (``default`` if it is a folder),
    and all names in the folder. Raises: `UserError`."""
    try:
        system, path = _connect(url)
        folder, _, name = path.rpartition("/")
        if not system.isfile(path):
            folder, name = path, default
        names = _names(system, folder)
    except Exception as fault:  # each package has its own kinds
        raise UserError(f"cannot read {url} ({_reason(fault)})") from fault
    if name not in names:
        raise UserError(f"there is no {url}, nor {default} in a folder of this name")
    return system, folder, name, names


def run_name(url: str, default: str, mark: str) -> str | None:
    """Name of the run that the file at ``url`` belongs to: its folder, if ``mark`` is there too."""
    _, folder, _, names = _find(url, default)
    return folder.rpartition("/")[2] or None if mark in names else None


def fetch(url: str, default: str, folder: Path, also: str) -> Path:
    """Download ``url`` into ``folder`` as a temporary file, see `utils.atomic.remove_leftovers`.

    The file ``also`` beside it is brought under its name, unless ``folder`` has one.
    Raises: `UserError`.
    """
    system, place, name, names = _find(url, default)
    path = folder / f".{name}.from_store.tmp"
    try:
        _download(system, f"{place}/{name}", path)
        if also in names and also != name and not (folder / also).exists():
            _download(system, f"{place}/{also}", folder / also)
    except Exception as fault:
        path.unlink(missing_ok=True)
        raise UserError(f"cannot download {url} ({_reason(fault)})") from fault
    return path


class Store:
    """``URL/NAME OF THE RUN/``, where copies of a run's files go. For rank 0."""

    def __init__(self, url: str, folder: Path):
        self.folder = folder
        self.url = f"{url.rstrip('/')}/{folder.name}"
        self.system: Any = None
        self.place = ""
        self.failures = 0  # since the last success
        self.closing = False
        self.waiting: list[Path] = []  # files to send
        self.sending: Path | None = None  # the one that is on its way
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def open(self, goes_on: bool, wanted: tuple[str, ...]) -> None:
        """Check that the store can be used, and start the thread that uploads.

        ``wanted`` names files, the last one being the snapshot, that are brought from the store
        when the run's folder has no snapshot. ``goes_on``: the run may have files there already.
        A store that fails is reported. Raises: `UserError` when there is no such bucket, or when
        continuing could overwrite a run.
        """
        missing = bool(wanted) and not (self.folder / wanted[-1]).exists()
        names: set[str] = set()
        try:
            self.system, self.place = _connect(self.url)
            names = _names(self.system, self.place)
            bucket = self.place.partition("/")[0]
            if bucket and not names and not self.system.exists(bucket):  # a folder begins with "/"
                raise UserError(f"there is no bucket {bucket} for --store {self.url}")
            for name in wanted if missing and wanted[-1] in names else ():
                if name in names:
                    _download(self.system, f"{self.place}/{name}", self.folder / name)
                    log.info(f"fetched {self.url}/{name}")
        except UserError:
            raise
        except Exception as fault:
            if missing:
                raise UserError(
                    f"cannot tell whether {self.url} has a snapshot to continue from "
                    f"({_reason(fault)}): leave out --resume to begin anew"
                ) from fault
            self._count_failure(fault)
        if names and not goes_on:
            raise UserError(
                f"{self.url} holds a run already: continue it with --resume auto, or choose "
                "another --name"
            )
        self.thread = threading.Thread(target=self._work, name="store", daemon=True)
        self.thread.start()

    def upload(self, path: Path) -> None:
        """Send ``path``, soon; nothing if it does not exist.

        It may be replaced (by renaming) at any time: what is sent is one whole file.
        """
        if self.thread is not None and path.is_file():
            with self.changed:
                self._queue(path)
                self.changed.notify_all()

    def _queue(self, path: Path) -> None:
        if path not in self.waiting:
            self.waiting.append(path)

    def close(self) -> None:
        """Wait for the uploads that are left, up to `END_WAIT`, and name those that failed."""
        if self.thread is None:
            return
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self.thread.join(END_WAIT)
        self.thread = None
        with self.changed:
            lost = {path.name for path in (*self.waiting, self.sending) if path is not None}
        if lost:
            names = ", ".join(sorted(lost))
            log.info(f"note: {names} could not be copied to {self.url}: see {self.folder}")

    def _work(self) -> None:
        tries = LAST_TRIES
        while tries:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.closing)
                if not self.waiting:
                    return
                self.sending = path = self.waiting.pop(0)
            try:
                self._send(path)
            except Exception as fault:  # whatever it is: training goes on
                self._count_failure(fault)
                pause = min(2.0 ** (self.failures - 1), _LONGEST_PAUSE)
                with self.changed:
                    self._queue(path)
                    tries -= self.closing
                    if self.closing and tries:
                        self.changed.wait(1.0)
                    self.changed.wait_for(lambda: self.closing, pause)
            self.sending = None

    def _send(self, path: Path) -> None:
        if self.system is None:
            self.system, self.place = _connect(self.url)
        if isinstance(self.system, LocalFileSystem):  # its own copy is visible before it is whole
            Path(self.place).mkdir(parents=True, exist_ok=True)
            link_atomically(path, Path(self.place, path.name))
        else:
            self.system.put_file(str(path), f"{self.place}/{path.name}")
        if self.failures:
            log.info(f"the store {self.url} works again")
        self.failures = 0

    def _count_failure(self, fault: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            log.warning(
                f"the store {self.url} cannot be used ({_reason(fault)}): training continues, "
                "uploads will be retried"
            )
