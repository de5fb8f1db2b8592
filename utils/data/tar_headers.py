"""The headers of tar files, and of tar files inside them: where each image and each label is."""

import io
import os
import re
import shlex
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from utils.data.sources import SUFFIXES, SYSTEM_NAMES, is_hidden, open_regular
from utils.start.errors import UserError

BLOCK = 512  # bytes; headers and contents begin at multiples of it
COMPRESSED = {".gz": "gunzip", ".tgz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd"}
MAGIC = {b"\x1f\x8b": ".gz", b"BZ": ".bz2", b"\xfd7": ".xz", b"(\xb5": ".zst"}
LARGEST_HEADER = 1 << 20  # limit for a long name or a label, bytes; a path has at most 4096
HEADER = struct.Struct("100s24x12s12x8s1s188x155s12x")  # name, size, checksum, type, prefix
_SUFFIXES = tuple(suffix.encode() for suffix in SUFFIXES)
_SYSTEM = re.compile(
    b"(?i)(?:^|/)(?:" + b"|".join(re.escape(n.encode()) for n in SYSTEM_NAMES) + b")(?:/|$)"
)


def tar_error(text: str) -> UserError:
    """An error of the data set: all processes of the job see the same files."""
    return UserError(text, on_every_rank=True)


def unsupported_error(text: str) -> UserError:
    """The error for a tar file of a kind that is not read."""
    text += ", which training does not read: extract the images to DATA/train/CLASS/ and "
    text += "DATA/val/CLASS/, then train on DATA, or make shards of it (scripts/prepare_data.py "
    return tar_error(f"{text}shards DATA OUT)")


def compressed_error(path: Path, suffix: str) -> UserError:
    """The error for a compressed tar file, with the command that decompresses it."""
    name, rename = shlex.quote(str(path)), ""
    if path.suffix == ".tar":  # compressed in spite of its name
        name, rename = f"{name}{suffix}", f"mv {name} {name}{suffix} && "
    text = f"{path} is compressed, but images are read from the middle of a tar file"
    return tar_error(f"{text}: run `{rename}{COMPRESSED[suffix]} {name}` first")


class _File(io.FileIO):
    """A tar file from which tarfile reads headers."""

    def __init__(self, path: Path):
        super().__init__(path, opener=open_regular)

    def read(self, size: int | None = None, /) -> bytes:
        """Read ``size`` bytes. Raises: EOFError if fewer are left; ValueError for a bad size."""
        if size is None or not 0 <= size <= LARGEST_HEADER:
            raise ValueError
        if len(data := super().read(size)) < size:
            raise EOFError
        return data


@dataclass
class Tar:
    """A tar file, or one inside it, from byte ``start`` to ``end``. All names are normalised."""

    path: Path
    number: int
    start: int
    end: int
    prefix: bytes = b""  # put before all names: an inner tar file's own name, without .tar
    images: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # name: offset, bytes
    labels: dict[bytes, bytes] = field(default_factory=dict)  # key: text of the label
    documents: set[bytes] = field(default_factory=set)  # keys of JSON files
    folders: set[bytes] = field(default_factory=set)
    inner: list["Tar"] = field(default_factory=list)

    def where(self, name: bytes) -> str:
        """Return the name of a file in it, or of the tar file itself (b""), for messages."""
        return os.path.join(self.path, os.fsdecode(name)) if name else str(self.path)

    def read(self, bar: tqdm) -> None:
        """Read all headers. Raises: `UserError`."""
        self.folders |= {self.prefix} if self.prefix else set()
        try:
            with _File(self.path) as file:
                self._read(file, bar)
        except OSError as error:
            raise tar_error(f"cannot read {self.path} ({error.strerror or error})") from None

    def _read(self, file: _File, bar: tqdm) -> None:
        """Read all headers. Raises: OSError; `UserError`."""
        for member in self._members(file):
            name, size = _bytes(member.name), member.size if member.isreg() else 0
            name = _normalised(self.prefix + b"/" + name if self.prefix else name)
            first, lower = member.offset_data, name.lower()
            is_tar = lower.endswith(b".tar") and not self.prefix
            bar.update(BLOCK if is_tar else BLOCK + size)
            if lower.endswith(_SUFFIXES):
                if member.islnk() or member.issym():
                    raise unsupported_error(f"{self.where(name)} is a link")
                self.images[name] = first, size
            elif member.isdir() and name:
                self.folders.add(name)
            elif is_tar:
                inner = Tar(self.path, self.number, first, first + size, name[:-4])
                self.inner.append(inner)
            elif lower.endswith(b".cls") and size <= LARGEST_HEADER:
                if label := os.pread(file.fileno(), size, first).strip():
                    self.labels[sample_key(name)] = label
            elif lower.endswith(b".json"):
                self.documents.add(sample_key(name))
            elif lower.endswith((b".tar.gz", b".tgz")):
                text = f"{self.where(name)} is a compressed tar file in another: extract"
                raise tar_error(f"{text} {self.path} and run gunzip on these")

    def _members(self, file: _File) -> Iterator[tarfile.TarInfo]:
        """Yield the members in order.

        Iterating over a TarFile would keep all members in memory and treat a damaged header as the
        end. Raises: `UserError` if the tar file is damaged or incomplete, or contains sparse files.
        """
        offset, where = self.start, self.where(self.prefix)
        try:
            file.seek(offset)
            tar = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
            while True:
                if offset + BLOCK > self.end:
                    raise EOFError
                file.seek(offset)
                header = file.read(BLOCK)
                member = _plain_file(header)
                if member and not tar.pax_headers:  # these can override a header
                    member.offset_data = offset + BLOCK
                    tar.offset = offset + BLOCK - (-member.size // BLOCK) * BLOCK
                elif not header.strip(b"\0"):  # the end
                    return
                else:
                    file.seek(offset)
                    member = tarfile.TarInfo.fromtarfile(tar)
                if member.size < 0 or tar.offset <= offset:
                    raise ValueError
                offset = tar.offset
                if member.issparse():
                    raise unsupported_error(f"{where} contains the sparse file {member.name}")
                yield member
        except EOFError:
            text = f"{where} ends before its last file does, after {self.end - self.start:,} bytes"
            raise tar_error(f"{text}: the copy is incomplete, copy it again") from None
        except (tarfile.TarError, ValueError, LookupError, RecursionError):
            if offset > self.start:
                text = f"{where} is damaged at byte {offset - self.start:,}: copy it again"
                raise tar_error(text) from None
            if not self.prefix and (suffix := MAGIC.get(os.pread(file.fileno(), 2, 0))):
                raise compressed_error(self.path, suffix) from None
            raise tar_error(f"{where} is not a tar file") from None


def _plain_file(header: bytes) -> tarfile.TarInfo | None:
    """Parse the ``header`` of a regular file; None for others. tarfile is slower."""
    name, size, checksum, kind, prefix = HEADER.unpack(header)
    try:
        expected = int(checksum.rstrip(b"\0 "), 8)  # of the header with blanks in its place
        if kind != b"0" or prefix.strip(b"\0") or sum(header) - sum(checksum) + 256 != expected:
            return None
        member = tarfile.TarInfo(name.partition(b"\0")[0].decode("utf-8", "surrogateescape"))
        member.size = int(size.rstrip(b"\0 "), 8)
        return member
    except ValueError:
        return None


def _normalised(name: bytes) -> bytes:
    """Remove leading, empty, "." and ".." parts of a path in a tar file; b"" if it is hidden."""
    is_plain = name[:1] not in b"./" and b"/." not in name and b"//" not in name
    if is_plain and not _SYSTEM.search(name):
        return name.rstrip(b"/")
    parts = [part for part in name.split(b"/") if part not in (b"", b".", b"..")]
    return b"" if any(is_hidden(os.fsdecode(part)) for part in parts) else b"/".join(parts)


def _bytes(name: str) -> bytes:
    """Return a name as stored in the tar file, up to a zero byte."""
    return name.encode("utf-8", "surrogateescape").partition(b"\0")[0]


def sample_key(name: bytes) -> bytes:
    """Return the part of the name that all files of a WebDataset sample share."""
    folder, slash, file = name.rpartition(b"/")
    return folder + slash + file.partition(b".")[0]
