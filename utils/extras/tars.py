"""Read images directly from tar files, without extracting them.

No option: used if DATA/train, val or test is a folder of tar files, such as the shards that
`scripts/prepare_data.py shards` writes, or if DATA contains train.tar, ILSVRC2012_img_train.tar or
WebDataset's NAME-train-0000.tar instead. Interface: `Tars` is a `utils.folder.Source`. Without this
file, tar files have to be extracted.

The class of an image is the first of these that exists:

- its label: KEY.cls, or "label" in KEY.json, beside the image KEY.jpg (WebDataset). If the label is
  a number, it selects a line of classes.txt (beside the tar files or in DATA), counted from 0.
  Without that file, the number is padded to five digits and becomes the name of the class;
- its folder in the tar file, below the folders that all images share;
- the name of its tar file, if that is in another tar file or in a folder of tar files;
- for ILSVRC2012_val_NNNNNNNN.JPEG, the entry in the devkit or in Kaggle's table in DATA.

The index is read from the tar headers and cached like the list of an image folder. Images have the
same order as in the extracted folder. Paths in tar files are safe, because nothing is written.
"""

import io
import json
import os
import posixpath
import re
import shlex
import struct
import sys
import tarfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote_to_bytes

import numpy as np
from tqdm import tqdm

from utils import addons
from utils.errors import UserError
from utils.folder import SUFFIXES, Archive, Index, Listing, open_regular, settled_mtime

BLOCK = 512  # bytes; headers and contents begin at multiples of it
PARTS = {"train": "train(?:ing)?", "val": "val(?:id|idation)?", "test": "test"}
CLASSES = "classes.txt"
THREADS = 8  # a network disk serves many requests at once
COMPRESSED = {".gz": "gunzip", ".tgz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd"}
MAGIC = {b"\x1f\x8b": ".gz", b"BZ": ".bz2", b"\xfd7": ".xz", b"(\xb5": ".zst"}
LARGEST_HEADER = 1 << 20  # limit for a long name or a label, bytes; a path has at most 4096
LINKS = 40  # links to follow, at most, as in Linux
HEADER = struct.Struct("100s24x12s12x8s1s188x155s12x")  # name, size, checksum, type, prefix
RECORD = np.dtype([("file", "<u2"), ("place", "<i8"), ("bytes", "<i8")])  # for each image
NOWHERE = -1  # the place of an image that is a link to somewhere outside its tar file
KEPT = "/"  # the index's name in the cache; no class can have this name
_SUFFIXES = tuple(suffix.encode() for suffix in SUFFIXES)

Record = tuple[int, int, int]  # see `RECORD`


def _error(text: str) -> UserError:
    return UserError(text, on_every_rank=True)


def tar_files(root: Path) -> list[Path]:
    """Return the tar files with the images of ``root`` (such as DATA/train), sorted; [] if none.

    Raises: `UserError` if they are compressed or a shard is missing.
    """
    if root.is_dir():
        with os.scandir(root) as entries:
            # If there are class folders, they were extracted from the tar files.
            if any(entry.name[0] != "." and entry.is_dir() for entry in entries):
                return []
        folder, patterns = root, [r"[^.].*\.tar"]
    else:
        folder, part = root.parent, re.escape(root.name)
        shards = rf"(?:[^.].*[-_.])?{PARTS.get(root.name, part)}[-_.]?\d+(?:-of-\d+)?\.tar"
        patterns = [rf"{part}\.tar", rf"ILSVRC2012_img_{part}\.tar", shards]
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for pattern in patterns:
        if tars := [name for name in names if re.fullmatch(pattern, name)]:
            _check_complete(folder, tars)
            return [folder / name for name in tars]
    for name in names:
        stem, suffix = os.path.splitext(re.sub(r"\.tgz$", ".tar.tgz", name))
        if suffix in COMPRESSED and any(re.fullmatch(pattern, stem) for pattern in patterns):
            raise _compressed(folder / name, suffix)
    return []


def _check_complete(folder: Path, names: list[str]) -> None:
    """Raise `UserError` if one of the shards NAME-00000-of-NNNNN.tar is missing."""
    shards = filter(None, (re.fullmatch(r"(.*-)(\d+)(-of-(\d+)\.tar)", name) for name in names))
    for prefix, digits, end, count in {(m[1], len(m[2]), m[3], int(m[4])) for m in shards}:
        if missing := {f"{prefix}{i:0{digits}}{end}" for i in range(count)} - set(names):
            text = f"{folder / min(missing)} is missing (one of {count} tar files): finish its"
            raise _error(f"{text} preparation, or copy it again")


def _compressed(path: Path, suffix: str) -> UserError:
    name, rename = shlex.quote(str(path)), ""
    if path.suffix == ".tar":  # compressed in spite of its name
        name, rename = f"{name}{suffix}", f"mv {name} {name}{suffix} && "
    text = f"{path} is compressed, but images are read from the middle of a tar file"
    return _error(f"{text}: run `{rename}{COMPRESSED[suffix]} {name}` first")


class Tars(Archive):
    """The images in tar files, in the order that the extracted folder would have."""

    def __init__(self, root: Path, classes: list[str], shows: bool = False):
        """Load the cached index, or read all headers. Opens all tar files.

        ``classes``: the classes to use, in this order. Raises: `UserError`.
        """
        super().__init__(root, classes, _index_of(root, shows))

    @staticmethod
    def class_names(root: Path) -> list[str]:
        """Return all classes, sorted. Raises: `UserError`."""
        return _index_of(root, os.environ.get("LOCAL_RANK", "0") == "0").classes

    def path(self, image: int) -> str:
        """Return the path of the tar file, joined with the path in it."""
        return os.path.join(self.stored(image)[0], self.name(image))

    def read(self, image: int) -> bytes:
        """Return the bytes of the image file. Raises: OSError."""
        if self.records[image]["place"] == NOWHERE:
            raise OSError("a link to an image that is not in this tar file")
        return super().read(image)


# ---- the index of a part


def _index_of(root: Path, shows: bool) -> Index:
    """Return the index of a part, from the cache if no file has changed. Raises: `UserError`."""
    files = tar_files(root)
    tables = [path for folder in (root, root.parent) if (path := folder / CLASSES).is_file()][:1]
    used = files + tables + addons.validation_label_files(root.parent)
    stamps, cache = _stamps(root.parent, used), addons.list_cache()
    kept = cache.read(root).get(KEPT) if cache else None
    if kept and kept.folders["files"] == stamps and all(time for time, _ in stamps.values()):
        counts, data = kept.folders["classes"], kept.paths
    else:
        table = _read_table(tables[0]) if tables else []
        counts, data = _make_index(root, files, table, shows)
        for name, (_, size) in _stamps(root.parent, used).items():
            if size != stamps[name][1]:
                text = f"{root.parent / name} grew while its headers were read"
                raise _error(f"{text}: wait until it is complete")
        if cache:
            listing = Listing(data, {"files": stamps, "classes": counts})
            cache.write(root, {KEPT: listing}, shows)
    end = RECORD.itemsize * sum(counts.values())
    records, names = np.frombuffer(data[:end], RECORD), [str(path) for path in files]
    return Index(names, list(counts), [*counts.values()], data[end:], records, records["file"])


def _stamps(data: Path, files: list[Path]) -> dict[str, list[int]]:
    """Return each file's last change (0: just now) and size. Raises: `UserError`."""
    try:
        return {
            str(path.relative_to(data)): [settled_mtime(str(path)), path.stat().st_size]
            for path in files
        }
    except OSError as error:
        raise _error(f"cannot read {error.filename} ({error.strerror})") from None


def _read_table(path: Path) -> list[str]:
    """Return the lines of a classes.txt. Raises: `UserError`."""
    names = os.fsdecode(path.read_bytes()).rstrip("\n").replace("\r", "").split("\n")
    for number, name in enumerate(names):
        if not name or name[0] == "." or "/" in name or "\0" in name:
            raise _error(f"line {number + 1} of {path} is not the name of a class")
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        raise _error(f"{path} has {double} twice: give each class a different name")
    return names


def _make_index(
    root: Path, files: list[Path], table: list[str], shows: bool
) -> tuple[dict[str, int], bytes]:
    """Read all headers of ``files`` with several threads. ``table``: the lines of classes.txt.

    Returns: the number of images by class, sorted by name; and as bytes, first the records of all
    images (by class, then by path), then their paths in the same order, each with a zero byte.
    """
    tars = [_Tar(path, number, 0, path.stat().st_size) for number, path in enumerate(files)]
    style = {"unit": "B", "unit_scale": True, "leave": False, "delay": 1}
    style["disable"] = not (shows and sys.stderr.isatty())
    bar = tqdm(desc=f"Indexing {root}", total=sum(tar.end for tar in tars), **style)
    with bar, ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda tar: tar.read(bar), tars))
        tars += [inner for tar in tars for inner in tar.inner]
        list(pool.map(lambda tar: tar.read(bar), tars[len(files) :]))
    by_class = _by_class(root, tars, table)
    if not by_class:
        text = f"{files[0]} has no images in class folders, none with a label beside it (KEY.cls, "
        raise _error(f"{text}KEY.json), and no tar file for each class")
    counts, records, paths = {}, [], []
    for name in sorted(map(os.fsdecode, by_class)):
        images = sorted(by_class.pop(os.fsencode(name)).items())
        counts[name] = len(images)
        records.append(np.array([record for _, record in images], RECORD).tobytes())
        paths += [path + b"\0" for path, _ in images]
    return counts, b"".join(records + paths)


def _by_class(root: Path, tars: list["_Tar"], table: list[str]) -> dict[bytes, dict[bytes, Record]]:
    """Return the path CLASS/NAME and the record of each image, by class.

    If images have the same path, the last one counts, as it does when tar files are extracted.
    """
    lines = [os.fsencode(name) for name in table]
    classes: dict[bytes, dict[bytes, Record]] = {name: {} for name in lines}
    known, val_labels = set(lines), {}
    plain: dict[bytes, Record] = {}  # images whose class is a folder
    labelled = []

    def add(path: bytes, record: Record) -> None:
        classes.setdefault(path.partition(b"/")[0], {})[path] = record

    for tar in tars:
        stem = os.fsencode(tar.path.stem)
        for name, (place, size) in tar.images.items():
            record = (tar.number, place, size)
            if known and (path := _unquoted(name)).partition(b"/")[0] in known:
                add(path, record)
            elif (label := tar.labels.get(_key(name))) is not None:
                labelled.append((_class_of(label, lines, tar.where(name)), stem, name, record))
            elif tar.labels:
                text = f"{tar.where(name)} has no label beside it (KEY.cls, or label in KEY.json)"
                raise _error(text)
            elif b"/" in name:
                plain[name] = record
            elif re.fullmatch(rb"ILSVRC2012_val_\d{8}\.JPEG", name):
                val_labels = val_labels or addons.extra("devkit").val_labels(tar.path.parent)
                if name.decode() not in val_labels:
                    raise _error(f"the class of {name.decode()} is not known")
                add(val_labels[name.decode()].encode() + b"/" + name, record)
            elif root.is_dir():
                plain[stem + b"/" + name] = record
            # Else the image is beside the class folders and not part of the data set.
    # Each shard may number its images from 0.
    unique = len({(label, name) for label, _, name, _ in labelled}) == len(labelled)
    for label, stem, name, record in labelled:
        add(b"/".join((label, name) if unique else (label, stem, name)), record)
    above = len(_above_classes(plain, [tar.prefix for tar in tars if tar.prefix]))
    top = next(iter(plain), b"")[:above]
    for name, record in plain.items():
        add(name[above:], record)
    if not labelled and not known:
        for folder in set().union(*(tar.folders for tar in tars)):
            if folder.startswith(top) and folder[above:]:
                classes.setdefault(folder[above:].partition(b"/")[0], {})
    return classes


def _above_classes(images: Iterable[bytes], inner_tars: list[bytes]) -> bytes:
    """Return the folders above the class folders that all ``images`` share: b"A/B/", or b""."""
    folders = {posixpath.dirname(name) for name in images}
    above = posixpath.commonpath({posixpath.dirname(name) for name in folders} or [b""])
    for tar in inner_tars:  # an inner tar file is a class itself, unless it is in a class folder
        if (above + b"/").startswith(tar + b"/"):
            above = posixpath.dirname(tar)
    return above and above + b"/"


def _unquoted(name: bytes) -> bytes:
    """Return the original path that `scripts/prepare_data.py shards` has encoded as ``name``."""
    path = unquote_to_bytes(name) if b"%" in name else name
    return name if b"\0" in path else path


def _key(name: bytes) -> bytes:
    """Return the part of the name that all files of a WebDataset sample share."""
    folder, slash, file = name.rpartition(b"/")
    return folder + slash + file.partition(b".")[0]


def _label_in(document: bytes) -> bytes | None:
    try:
        value = json.loads(document)["label"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return str(value).encode("utf-8", "replace") if isinstance(value, (int, str)) else None


def _class_of(label: bytes, lines: list[bytes], where: str) -> bytes:
    """Return the class of a label. ``lines``: the lines of classes.txt. Raises: `UserError`."""
    if label.isdigit() and len(label) < 10:
        number = int(label)
        if not lines:
            return b"%05d" % number
        if number < len(lines):
            return lines[number]
    elif label in lines or (not lines and not re.search(rb"^\.|[/\0\n]", label)):
        return label
    text = f"{where} has the label {os.fsdecode(label[:40])}"
    raise _error(f"{text}, which is neither a line number of {CLASSES} nor a class")


# ---- headers


class _File(io.FileIO):
    """A tar file from which tarfile reads headers."""

    def __init__(self, path: Path):
        super().__init__(path, opener=open_regular)

    def read(self, size: int) -> bytes:
        """Read ``size`` bytes. Raises: EOFError if fewer are left; ValueError for a bad size."""
        if not 0 <= size <= LARGEST_HEADER:
            raise ValueError
        if len(data := super().read(size)) < size:
            raise EOFError
        return data


@dataclass
class _Tar:
    """A tar file, or one inside it, from byte ``start`` to ``end``. All names are normalised."""

    path: Path
    number: int
    start: int
    end: int
    prefix: bytes = b""  # put before all names: an inner tar file's own name, without .tar
    images: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # name: place, bytes
    labels: dict[bytes, bytes] = field(default_factory=dict)  # key: text of the label
    folders: set[bytes] = field(default_factory=set)
    inner: list["_Tar"] = field(default_factory=list)

    def where(self, name: bytes) -> str:
        """Return the name of a file in it, or of the tar file itself (b""), for messages."""
        return os.path.join(self.path, os.fsdecode(name)) if name else str(self.path)

    def read(self, bar: tqdm) -> None:
        """Read all headers. Raises: `UserError`."""
        links: dict[bytes, bytes] = {}  # for images that are links: name, target
        self.folders |= {self.prefix} if self.prefix else set()
        try:
            file = _File(self.path)
        except OSError as error:
            raise _error(f"cannot open {self.path} ({error.strerror or error})") from None
        with file:
            for member in self._members(file):
                name, size = _bytes(member.name), member.size if member.isreg() else 0
                name = _normalised(self.prefix + b"/" + name if self.prefix else name)
                first, lower = member.offset_data, name.lower()
                is_tar = lower.endswith(b".tar") and not self.prefix
                bar.update(BLOCK if is_tar else BLOCK + size)
                if lower.endswith(_SUFFIXES):
                    self.images[name] = first, size
                    links.pop(name, None)
                    if member.islnk() or member.issym():
                        self.images[name] = NOWHERE, 0
                        folder = posixpath.dirname(name) if member.issym() else self.prefix
                        target = posixpath.join(folder, _bytes(member.linkname))
                        links[name] = posixpath.normpath(target)
                elif member.isdir() and name:
                    self.folders.add(name)
                elif is_tar:
                    inner = _Tar(self.path, self.number, first, first + size, name[:-4])
                    self.inner.append(inner)
                elif lower.endswith((b".cls", b".json")) and size <= LARGEST_HEADER:
                    data = os.pread(file.fileno(), size, first)
                    if label := data.strip() if lower.endswith(b".cls") else _label_in(data):
                        self.labels[_key(name)] = label
                elif lower.endswith((b".tar.gz", b".tgz")):
                    text = f"{self.where(name)} is a compressed tar file in another: extract"
                    raise _error(f"{text} {self.path} and run gunzip on these")
        for name in links:
            target = name
            for _ in range(LINKS):
                target = links.get(target, target)
            self.images[name] = self.images.get(target, self.images[name])

    def _members(self, file: _File) -> Iterator[tarfile.TarInfo]:
        """Yield the members in order.

        Iterating over a TarFile would keep all members in memory and treat a damaged header as the
        end. Raises: `UserError` if the tar file is damaged or incomplete, or contains sparse files.
        """
        place, where = self.start, self.where(self.prefix)
        try:
            file.seek(place)
            tar = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
            while True:
                if place + BLOCK > self.end:
                    raise EOFError
                file.seek(place)
                member = _plain_file(file.read(BLOCK))
                if member and not tar.pax_headers:  # these can override a header
                    member.offset_data = place + BLOCK
                    tar.offset = place + BLOCK - (-member.size // BLOCK) * BLOCK
                else:
                    file.seek(place)
                    try:
                        member = tarfile.TarInfo.fromtarfile(tar)
                    except tarfile.EOFHeaderError:
                        return
                if member.size < 0 or tar.offset <= place:
                    raise ValueError
                place = tar.offset
                if member.issparse():
                    text = f"{where} contains the sparse file {member.name}: pack it again without"
                    raise _error(f"{text} tar's option -S")
                yield member
        except EOFError:
            text = f"{where} ends before its last file does, after {self.end - self.start:,} bytes"
            raise _error(f"{text}: the copy is incomplete, copy it again") from None
        except (tarfile.TarError, ValueError, LookupError, RecursionError):
            if place > self.start:
                text = f"{where} is damaged at byte {place - self.start:,}: copy it again"
                raise _error(text) from None
            if not self.prefix and (suffix := MAGIC.get(os.pread(file.fileno(), 2, 0))):
                raise _compressed(self.path, suffix) from None
            raise _error(f"{where} is not a tar file") from None


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
    if name[:1] not in b"./" and b"/." not in name and b"//" not in name:
        return name.rstrip(b"/")
    parts = [part for part in name.split(b"/") if part not in (b"", b".", b"..")]
    return b"" if any(part.startswith(b".") for part in parts) else b"/".join(parts)


def _bytes(name: str) -> bytes:
    """Return a name as stored in the tar file, up to a zero byte."""
    return name.encode("utf-8", "surrogateescape").partition(b"\0")[0]
