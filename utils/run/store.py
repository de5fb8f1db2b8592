"""Copies of a run in an S3 bucket: sent in the background, taken back where the disk is empty.

boto3, an optional package, does the talking; credentials and AWS_ENDPOINT_URL are read by it. No
fault of the store stops or delays training.
"""

import importlib.util
import logging
import os
import re
import threading
from pathlib import Path
from typing import Any, BinaryIO

from utils.atomic import save_atomically
from utils.errors import UserError

log = logging.getLogger(__name__)

SCHEME = "s3://"
END_WAIT = 100.0  # seconds for the last uploads; a spot instance has 120 from its notice on
LAST_TRIES = 3  # of a failing store, at the end of the run
_LONGEST_PAUSE = 60.0  # seconds between two tries
_FORM = re.compile(SCHEME + r"([^/]+)/*(.*?)/*")


def is_url(text: str | None) -> bool:
    """Whether an option's value names something in a store."""
    return text is not None and text.startswith(SCHEME)


def check_options(store: str | None, resume: str | None) -> None:
    """Raise `UserError` for URLs that are none, or when boto3 is missing and needed."""
    if store is not None and not is_url(store):
        raise UserError(f"--store {store} is not of the form s3://BUCKET/PREFIX", alike=True)
    urls = [url for url in (store, resume) if url is not None and is_url(url)]
    for url in urls:
        _split(url)
    if urls and importlib.util.find_spec("boto3") is None:
        raise UserError(f"{urls[0]} needs the package boto3: pip install boto3", alike=True)


def _split(url: str) -> tuple[str, str]:
    """Bucket and key of an URL, the key without slashes at its ends."""
    match = _FORM.fullmatch(url)
    if match is None:
        raise UserError(f"{url} names no bucket: the form is s3://BUCKET/PREFIX", alike=True)
    return match[1], match[2]


def _client() -> Any:
    import boto3
    from botocore.config import Config

    retries = {"total_max_attempts": 2, "mode": "standard"}  # the further ones are `Store`'s
    return boto3.client("s3", config=Config(connect_timeout=5, read_timeout=30, retries=retries))


def _join(*parts: str) -> str:
    return "/".join(filter(None, parts))


def _names(client: Any, bucket: str, folder: str) -> set[str]:
    """Names of the objects in ``folder`` (the first 1000). Raises what boto3 raises."""
    prefix = folder + "/" if folder else ""
    found = client.list_objects_v2(Bucket=bucket, Prefix=prefix, Delimiter="/")
    return {item["Key"].removeprefix(prefix) for item in found.get("Contents", ())}


def _download(client: Any, bucket: str, key: str, path: Path) -> None:
    save_atomically(lambda file: client.download_fileobj(bucket, key, file), path)


def _code(fault: Exception) -> str:
    """The store's own word for a fault ("NoSuchBucket"), else its type's name."""
    response = getattr(fault, "response", None) or {}
    return str(response.get("Error", {}).get("Code", type(fault).__name__))


def _reason(fault: Exception, bucket: str) -> str:
    code = _code(fault)
    if code == "NoSuchBucket":
        return f"there is no bucket {bucket}"
    if code in ("NoCredentialsError", "PartialCredentialsError"):
        return (
            "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the machine "
            "a role"
        )
    if code in ("AccessDenied", "AllAccessDisabled", "403"):
        return f"these credentials may not list, read and write in bucket {bucket}"
    return (str(fault).splitlines() or [code])[0][:200]


def _look(url: str, default: str) -> tuple[Any, str, str, str, set[str]]:
    """Client, bucket, folder and name of the file that ``url`` means; names in the folder.

    ``default`` is the name when ``url`` is a folder.
    """
    bucket, key = _split(url)
    folder, _, name = key.rpartition("/")
    try:
        client = _client()
        names = _names(client, bucket, folder)
        if name not in names:
            folder, name = key, default
            names = _names(client, bucket, folder)
    except Exception as fault:  # boto3's have no common base; its set-up raises ValueError
        raise UserError(f"cannot read {url} ({_reason(fault, bucket)})") from fault
    if name not in names:
        raise UserError(f"there is no {url}, nor {default} in a folder of this name")
    return client, bucket, folder, name, names


def run_name(url: str, default: str, mark: str) -> str | None:
    """Name of the run to which the file at ``url`` belongs: its folder, if ``mark`` is there too.

    ``default`` is the file's name when ``url`` is a folder. Raises: `UserError`.
    """
    _, _, folder, _, names = _look(url, default)
    return folder.rpartition("/")[2] or None if mark in names else None


def fetch(url: str, default: str, folder: Path, also: str) -> Path:
    """Download ``url`` into ``folder`` as a temporary file, see `utils.atomic.remove_leftovers`.

    The file ``also`` beside it is brought under its name, unless ``folder`` has one.
    Raises: `UserError`.
    """
    client, bucket, place, name, names = _look(url, default)
    path = folder / f".{name}.from_store.tmp"
    try:
        _download(client, bucket, _join(place, name), path)
        if also in names and also != name and not (folder / also).exists():
            _download(client, bucket, _join(place, also), folder / also)
    except Exception as fault:
        path.unlink(missing_ok=True)
        raise UserError(f"cannot download {url} ({_reason(fault, bucket)})") from fault
    return path


class Store:
    """``URL/NAME OF THE RUN/``, where copies of a run's files go. For rank 0.

    Without ``url`` all methods do nothing. ``end_wait`` is the limit in seconds for the uploads
    that are left at the end.
    """

    def __init__(self, url: str | None, folder: Path, end_wait: float = END_WAIT):
        self.folder, self.end_wait = folder, end_wait
        self.url = f"{url.rstrip('/')}/{folder.name}" if url else None
        self.bucket, self.prefix = _split(self.url) if self.url else ("", "")
        self.client: Any = None
        self.failures = 0  # since the last success
        self.closing = False
        self.waiting: dict[str, BinaryIO] = {}  # newest file of each name, not yet sent
        self.sending: str | None = None
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None

    def open(self, goes_on: bool, wanted: tuple[str, ...]) -> None:
        """Look whether the store can be used, and start the thread that uploads.

        ``wanted`` names files, the last one being the snapshot, that are brought from the store
        when the run's folder has no snapshot. ``goes_on``: the run may have files there already.
        A store that fails is reported. Raises: `UserError` when there is no such bucket, or when
        continuing could overwrite a run.
        """
        if self.url is None:
            return
        snapshot = wanted[-1] if wanted else None
        missing = snapshot is not None and not (self.folder / snapshot).exists()
        names: set[str] = set()
        try:
            self.client = _client()
            names = _names(self.client, self.bucket, self.prefix)
            for name in wanted if missing and snapshot in names else ():
                if name in names:
                    _download(
                        self.client, self.bucket, _join(self.prefix, name), self.folder / name
                    )
                    log.info(f"took {self.url}/{name}")
        except Exception as fault:
            if _code(fault) == "NoSuchBucket":  # and it will not come by itself
                raise UserError(
                    f"there is no bucket {self.bucket}, where --store {self.url} would be: make "
                    "it, or correct the name"
                ) from None
            if missing:
                raise UserError(
                    f"cannot tell whether {self.url} has a snapshot to continue from "
                    f"({_reason(fault, self.bucket)}): leave out --resume to begin anew"
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
        """Send ``path`` as it is now, soon. One of the same name that still waits is dropped.

        The file is opened here, so that it may be replaced (by renaming) at any time. One that is
        not there is left out.
        """
        if self.thread is None:
            return
        try:
            file = open(path, "rb")
        except FileNotFoundError:
            return
        except OSError as fault:
            log.warning(f"cannot read {path} to upload it ({fault.strerror})")
            return
        with self.changed:
            older = self.waiting.pop(path.name, None)
            if older is not None:
                older.close()
            self.waiting[path.name] = file
            self.changed.notify_all()

    def close(self) -> None:
        """Wait for the uploads that are left, up to the limit, and name those that failed."""
        if self.thread is None:
            return
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        self.thread.join(self.end_wait)
        self.thread = None
        with self.changed:
            lost = {*self.waiting, *([self.sending] if self.sending else [])}
        if lost:
            log.info(
                f"note: {', '.join(sorted(lost))} did not get to {self.url}: see {self.folder}"
            )

    def _work(self) -> None:
        tries = LAST_TRIES
        while tries:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.closing)
                if not self.waiting:
                    return
                name = next(iter(self.waiting))
                file = self.waiting.pop(name)
                self.sending = name
            try:
                self._send(name, file)
                failed = False
            except Exception as fault:  # whatever it is: training goes on
                self._count_failure(fault)
                failed = True
            with self.changed:
                self.sending = None
                if not failed or name in self.waiting:
                    file.close()
                else:
                    self.waiting = {name: file, **self.waiting}
                if failed:
                    tries -= self.closing
                    pause = min(2.0 ** (self.failures - 1), _LONGEST_PAUSE)
                    if self.closing:
                        self.changed.wait(1.0 if tries else 0.0)
                    else:
                        self.changed.wait_for(lambda: self.closing, pause)

    def _send(self, name: str, file: BinaryIO) -> None:
        from boto3.s3.transfer import TransferConfig

        if self.client is None:
            self.client = _client()
        # In this thread alone: further ones would take cores from training, and Python waits for
        # them before it exits. boto3 closes what it is given, and this file may be needed again.
        config = TransferConfig(use_threads=False, multipart_chunksize=16 * 2**20)
        with os.fdopen(os.dup(file.fileno()), "rb") as copy:
            copy.seek(0)
            self.client.upload_fileobj(copy, self.bucket, _join(self.prefix, name), Config=config)
        if self.failures:
            log.info(f"the store {self.url} works again")
        self.failures = 0

    def _count_failure(self, fault: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            log.warning(
                f"the store {self.url} cannot be used "
                f"({_reason(fault, self.bucket)}): training goes on, uploads will be retried"
            )
