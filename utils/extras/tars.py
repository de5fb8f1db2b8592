"""Images in tar files, read where they lie: nothing is extracted.

No option: used where DATA/train, val or test is a folder of tar files, such as the shards that
`scripts/prepare_data.py shards` writes, or where DATA holds train.tar, ILSVRC2012_img_train.tar or
WebDataset's NAME-train-0000.tar instead. Interface: `Tars` is a `utils.folder.Source`. Without this
file, tar files have to be extracted.

The class of an image is

- its label: KEY.cls, or "label" in KEY.json, beside the image KEY.jpg (WebDataset). A number is the
  number of a line of classes.txt, beside the tar files or in DATA, counted from 0; without that
  file it becomes a name of five digits;
- else its folder in the tar file, below folders that all images have in common;
- else the name of its tar file, if that is in another tar file or in a folder of tar files;
- else, of ILSVRC2012_val_NNNNNNNN.JPEG, what the devkit or Kaggle's table in DATA says.

The index is made of the headers alone, and kept like the list of an image folder. The order of
images is that of the extracted folder. A name in a tar file is only a name: nothing is written.
"""

import io
import json
import os
import posixpath
import re
import shlex
import sys
import tarfile
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import numpy as np
from tqdm import tqdm

from utils import addons
from utils.errors import UserError
from utils.folder import SUFFIXES, THREADS, Listing, Source, open_regular, settled_mtime

BLOCK = 512  # bytes; headers and contents begin at multiples of it
PARTS = {"train": "train(?:ing)?", "val": "val(?:id|idation)?", "test": "test"}
CLASSES = "classes.txt"
COMPRESSED = {".gz": "gunzip", ".tgz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd"}
LARGEST_HEADER = 1 << 20  # bytes of a long name or of a label; a path has at most 4096
NOWHERE = 2**32 - 1  # the block of a link that leads out of its tar file
LINKS = 40  # from link to link, at most, as in Linux
# Of each image: its place in blocks, its length in bytes, the number of its tar file.
RECORD = np.dtype([("block", "<u4"), ("bytes", "<u4"), ("file", "<u2")])
_SUFFIXES = tuple(suffix.encode() for suffix in SUFFIXES)


def tar_files(root: Path) -> list[Path]:
    """The tar files that hold the part ``root`` (DATA/train, say), sorted; [] if none do.

    Raises: `UserError` for compressed ones.
    """
    if root.is_dir():
        with os.scandir(root) as entries:
            # Tar files beside class folders: the folders were extracted from them.
            if any(entry.name[0] != "." and entry.is_dir() for entry in entries):
                return []
        names, known = os.listdir(root), r"[^.].*\.tar"
        folder, patterns = root, [known]
    else:
        folder, part = root.parent, re.escape(root.name)
        names = os.listdir(folder) if folder.is_dir() else []
        shards = rf"(?:[^.].*[-_.])?{PARTS.get(root.name, part)}[-_.]?\d+(?:-of-\d+)?\.tar"
        patterns = [rf"{part}\.tar", rf"ILSVRC2012_img_{part}\.tar", shards]
    for pattern in patterns:
        if tars := sorted(name for name in names if re.fullmatch(pattern, name)):
            _check_complete(folder, tars)
            return [folder / name for name in tars]
    endings = r"(?:\.gz|\.bz2|\.xz|\.zst)"
    for name in sorted(names):
        if any(re.fullmatch(rf"{p}{endings}|{p[:-5]}\.tgz", name) for p in patterns):
            raise _compressed(folder / name)
    return []


def _check_complete(folder: Path, names: list[str]) -> None:
    """Raise `UserError` if one of the shards NAME-00000-of-NNNNN.tar is missing."""
    for name in names:
        if shard := re.fullmatch(r"(.*-)(\d+)(-of-(\d+)\.tar)", name):
            prefix, number, end, count = shard.groups()
            expected = (f"{prefix}{i:0{len(number)}}{end}" for i in range(int(count)))
            if missing := next((one for one in expected if one not in names), None):
                text = f"{folder / missing} is missing, of {int(count)} tar files: finish its"
                raise UserError(f"{text} preparation, or copy it again", on_every_rank=True)


def _compressed(path: Path, suffix: str = "") -> UserError:
    name = shlex.quote(str(path))
    command = f"{COMPRESSED[suffix or path.suffix]} {name}"
    if suffix:
        command = f"mv {name} {name}{suffix} && {command}{suffix}"
    text = f"{path} is compressed, but images are read from the middle of a tar file"
    return UserError(f"{text}: run `{command}` first", on_every_rank=True)


class Tars(Source):
    """The images in tar files, in the order in which the extracted folder would have them."""

    def __init__(self, root: Path, classes: list[str], shows: bool = False):
        """Read the index that an earlier run has kept, or make it. Opens all tar files.

        ``classes``: those to take, in this order. Raises: `UserError`.
        """
        index = _index_of(root, shows)
        numbers = {name: number for number, name in enumerate(index.classes)}
        if unknown := [name for name in classes if name not in numbers]:
            raise UserError(f"{root} has no class {unknown[0]}", on_every_rank=True)
        chosen = [numbers[name] for name in classes]
        ends, bytes_end = np.cumsum(index.counts), np.cumsum(index.path_bytes)
        rows = [slice(ends[n] - index.counts[n], ends[n]) for n in chosen]
        parts = [slice(bytes_end[n] - index.path_bytes[n], bytes_end[n]) for n in chosen]
        self.records = np.concatenate([index.records[row] for row in rows])
        paths = b"".join(index.paths[part] for part in parts)
        super().__init__(root, classes, paths, index.counts[chosen].tolist())
        self.tars = [str(path) for path in index.files]
        # Opened once, before the workers are forked: pread has no position that they would share.
        self._handles = _open_all(index.files)
        weakref.finalize(self, lambda handles: [*map(os.close, handles)], self._handles)

    @staticmethod
    def class_names(root: Path) -> list[str]:
        """All classes, sorted. Raises: `UserError`."""
        return _index_of(root, os.environ.get("LOCAL_RANK", "0") == "0").classes

    def path(self, image: int) -> str:
        """The tar file, and the path in it."""
        name = self.paths[self.starts[image] : self.starts[image + 1] - 1]
        return os.path.join(self.stored(image)[0], os.fsdecode(name))

    def stored(self, image: int) -> tuple[str, int, int]:
        """The tar file that holds ``image``, its place there in bytes, and its length."""
        record = self.records[image]
        return self.tars[record["file"]], int(record["block"]) * BLOCK, int(record["bytes"])

    def read(self, image: int) -> bytes:
        """The image file. Raises: OSError."""
        path, place, size = self.stored(image)
        if place == NOWHERE * BLOCK:
            raise OSError("a link to an image that is not in this tar file")
        file = self._handles[self.records[image]["file"]]
        data = os.pread(file, size, place)
        while len(data) < size:  # a network disk may return fewer bytes than requested
            if not (more := os.pread(file, size - len(data), place + len(data))):
                raise OSError(f"{os.path.basename(path)} ends before the image does")
            data += more
        return data


def _open_all(paths: list[Path]) -> list[int]:
    """Raises: `UserError`."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + len(paths) + 256  # for the rest of the run
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    handles: list[int] = []
    for path in paths:
        try:
            handles.append(open_regular(str(path), os.O_RDONLY | os.O_CLOEXEC))
            # Images are read in random order: do not read ahead.
            os.posix_fadvise(handles[-1], 0, 0, os.POSIX_FADV_RANDOM)
        except OSError as error:
            for handle in handles:
                os.close(handle)
            advice = f": {len(paths)} tar files are open at once, raise `ulimit -n`"
            text = f"cannot open {path} ({error.strerror or error})"
            raise UserError(text + advice * (error.errno == 24), on_every_rank=True) from None
    return handles


# ---- the index of a part


class _Index(NamedTuple):
    """Where the images of a part are, class by class, in each sorted by path."""

    files: list[Path]
    classes: list[str]
    counts: np.ndarray  # int64 [classes]: images of each
    path_bytes: np.ndarray  # int64 [classes]: bytes of the paths of each
    paths: bytes  # CLASS/NAME, each followed by a zero byte
    records: np.ndarray  # `RECORD` [n]


def _index_of(root: Path, shows: bool) -> _Index:
    """The index of a part, from the cache if no file has changed since. Raises: `UserError`."""
    files = tar_files(root)
    tables = [path for folder in (root, root.parent) if (path := folder / CLASSES).is_file()][:1]
    used = files + tables + addons.validation_label_files(root.parent)
    stamps = _stamps(root.parent, used)
    cache = addons.list_cache()
    kept = cache.read(root).get("") if cache else None
    if kept and kept.folders == stamps[0] and all(kept.folders.values()):
        with np.load(io.BytesIO(kept.paths)) as content:
            if json.loads(content["sizes"].tobytes()) == stamps[1]:
                classes = [os.fsdecode(x) for x in content["classes"].tobytes().split(b"\0")]
                arrays = content["counts"], content["path_bytes"], content["paths"].tobytes()
                return _Index(files, classes, *arrays, content["records"])
    index = _make_index(root, files, _read_table(tables[0]) if tables else None, shows)
    if (now := _stamps(root.parent, used))[1] != stamps[1]:
        name = next(name for name in now[1] if now[1][name] != stamps[1][name])
        text = f"{root.parent / name} grew while its headers were read: wait until it is complete"
        raise UserError(text, on_every_rank=True)
    if cache:
        content = {
            "sizes": np.frombuffer(json.dumps(stamps[1]).encode(), np.uint8),
            "classes": np.frombuffer(b"\0".join(map(os.fsencode, index.classes)), np.uint8),
            "paths": np.frombuffer(index.paths, np.uint8),
        }
        arrays = {"counts": index.counts, "path_bytes": index.path_bytes, "records": index.records}
        np.savez(data := io.BytesIO(), **content, **arrays)
        cache.write(root, {"": Listing(data.getvalue(), stamps[0])}, shows)
    return index


def _stamps(data: Path, files: list[Path]) -> tuple[dict[str, int], dict[str, int]]:
    """The time of the last change (0: just now) and the size of each file. Raises: `UserError`."""
    try:
        names = [str(path.relative_to(data)) for path in files]
        mtimes = {name: settled_mtime(str(data / name)) for name in names}
        return mtimes, {name: os.stat(data / name).st_size for name in names}
    except OSError as error:
        text = f"cannot read {error.filename} ({error.strerror})"
        raise UserError(text, on_every_rank=True) from None


def _read_table(path: Path) -> list[str]:
    """The lines of a classes.txt. Raises: `UserError`."""
    names = os.fsdecode(path.read_bytes()).rstrip("\n").replace("\r", "").split("\n")
    for number, name in enumerate(names):
        if not name or name[0] == "." or "/" in name or "\0" in name:
            raise UserError(f"line {number + 1} of {path} is not the name of a class", True)
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        text = f"{path} has {double} twice: give each class a name of its own"
        raise UserError(text, on_every_rank=True)
    return names


@dataclass
class _Content:
    """The content of a tar file, or of one inside another. All names are normalised."""

    file: int
    prefix: bytes  # before all names: for a tar file in another one, its name without .tar
    images: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # name: place, bytes
    links: dict[bytes, bytes] = field(default_factory=dict)  # images that are links: target
    labels: dict[bytes, bytes] = field(default_factory=dict)  # by key: text of the label
    folders: set[bytes] = field(default_factory=set)
    tars: list[tuple[bytes, int, int]] = field(default_factory=list)  # prefix, start and end


def _make_index(root: Path, files: list[Path], table: list[str] | None, shows: bool) -> _Index:
    """Read all headers of ``files``, with several threads. ``table``: the lines of classes.txt."""
    handles = _open_all(files)
    sizes = [os.fstat(handle).st_size for handle in handles]
    style = {"unit": "B", "unit_scale": True, "leave": False, "delay": 1}
    style["disable"] = not (shows and sys.stderr.isatty())
    try:
        bar = tqdm(desc=f"Indexing {root}", total=sum(sizes), **style)
        with bar, ThreadPoolExecutor(THREADS) as pool:

            def read(job: tuple[int, bytes, int, int]) -> _Content:
                return _read_tar(handles[job[0]], files[job[0]], job, bar)

            contents = list(pool.map(read, [(i, b"", 0, size) for i, size in enumerate(sizes)]))
            contents += pool.map(read, [(one.file, *tar) for one in contents for tar in one.tars])
    finally:
        for handle in handles:
            os.close(handle)
    by_class: dict[bytes, list[tuple[bytes, tuple[int, int, int]]]] = {}
    for path, record in _paths(root, files, contents, table).items():
        images = by_class.setdefault(path.partition(b"/")[0], [])
        if path[-1:] != b"/":  # a folder, perhaps without images
            images.append((path, record))
    if not by_class:
        text = f"{files[0]} has no images in class folders, none with a label beside it (KEY.cls, "
        raise UserError(f"{text}KEY.json), and no tar file for each class", on_every_rank=True)
    classes = sorted(map(os.fsdecode, by_class))
    sorted_images = [sorted(by_class[os.fsencode(name)]) for name in classes]
    paths = [b"".join(path + b"\0" for path, _ in images) for images in sorted_images]
    records = [record for images in sorted_images for _, record in images]
    counts, path_bytes = (np.array([*map(len, x)], np.int64) for x in (sorted_images, paths))
    return _Index(files, classes, counts, path_bytes, b"".join(paths), np.array(records, RECORD))


def _read_tar(handle: int, path: Path, job: tuple[int, bytes, int, int], bar: tqdm) -> _Content:
    """Read the headers of a tar file, or of a part of it that is one. Raises: `UserError`."""
    file, prefix, start, end = job
    content, seen = _Content(file, prefix), 0
    if prefix:
        content.folders.add(prefix)
    for member in _members(handle, start, end, str(path / os.fsdecode(prefix))):
        name, size = _bytes(member.name), member.size if member.isreg() else 0
        name = _normalised(prefix + b"/" + name if prefix else name)
        first = start + member.offset_data
        lower = name.lower()
        is_tar = lower.endswith(b".tar") and not prefix
        seen += BLOCK if is_tar else BLOCK + size
        if seen > 1 << 24:
            bar.update(seen)
            seen = 0
        if lower.endswith(_SUFFIXES):
            content.images[name] = first, size
            content.links.pop(name, None)
            if member.islnk() or member.issym():
                content.images[name] = NOWHERE * BLOCK, 0
                folder = posixpath.dirname(name) if member.issym() else prefix
                target = posixpath.join(folder, _bytes(member.linkname))
                content.links[name] = posixpath.normpath(target)
        elif member.isdir() and name:
            content.folders.add(name)
        elif is_tar:
            content.tars.append((name[:-4], first, first + size))
        elif lower.endswith((b".cls", b".json")) and size <= LARGEST_HEADER:
            data = os.pread(handle, size, first)
            if label := data.strip() if lower.endswith(b".cls") else _label_in(data):
                content.labels[_key(name)] = label
        elif lower.endswith((b".tar.gz", b".tgz")):
            text = f"{os.path.join(path, os.fsdecode(name))} is a compressed tar file in another"
            raise UserError(f"{text}: extract {path} and run gunzip on these", on_every_rank=True)
    for name in content.links:
        target = name
        for _ in range(LINKS):
            target = content.links.get(target, target)
        content.images[name] = content.images.get(target, content.images[name])
    bar.update(seen)
    return content


def _paths(
    root: Path, files: list[Path], contents: list[_Content], table: list[str] | None
) -> dict[bytes, tuple[int, int, int]]:
    """The path CLASS/NAME of each image, and its record; of a class folder, CLASS/.

    Of images with the same path the last one counts, as when the tar files are extracted.
    """
    names = [] if table is None else list(map(os.fsencode, table))
    known, labels = set(names), None
    paths: dict[bytes, tuple[int, int, int]] = {name + b"/": (0, 0, 0) for name in names}
    plain: dict[bytes, tuple[int, int, int]] = {}  # whose class is a folder
    labelled = []
    for content in contents:
        stem = os.fsencode(files[content.file].stem)
        for name, (place, size) in content.images.items():
            record = (place // BLOCK, min(size, 2**32 - 1), content.file)
            if names and (path := _unquoted(name)).partition(b"/")[0] in known:
                paths[path] = record
            elif (label := content.labels.get(_key(name))) is not None:
                where = os.path.join(files[content.file], os.fsdecode(name))
                labelled.append((_class_of(label, names, where), stem, name, record))
            elif content.labels:
                text = f"{os.path.join(files[content.file], os.fsdecode(name))} has no label beside"
                raise UserError(f"{text} it (KEY.cls, or label in KEY.json)", on_every_rank=True)
            elif b"/" in name:
                plain[name] = record
            elif re.fullmatch(rb"ILSVRC2012_val_\d{8}\.JPEG", name):
                labels = labels or addons.extra("devkit").val_labels(files[content.file].parent)
                if name.decode() not in labels:
                    raise UserError(f"the class of {name.decode()} is not known", True)
                paths[labels[name.decode()].encode() + b"/" + name] = record
            elif root.is_dir():
                plain[stem + b"/" + name] = record
            # Else it lies beside the class folders and does not belong to the data set.
    # Tar files of a stream may number their images from 0 each.
    unique = len({(label, name) for label, _, name, _ in labelled}) == len(labelled)
    for label, stem, name, record in labelled:
        paths[b"/".join((label, name) if unique else (label, stem, name))] = record
    if not labelled and not names:
        plain |= {name + b"/": (0, 0, 0) for one in contents for name in one.folders}
    top = b""  # folders above those of the classes
    of_tars = {one.prefix for one in contents}
    images = [name for name in plain if name[-1:] != b"/"]
    while images and len({name[len(top) :].partition(b"/")[0] for name in images}) == 1:
        deeper = images[0][: images[0].index(b"/", len(top)) + 1]
        if deeper[:-1] in of_tars or any(n.count(b"/") <= deeper.count(b"/") for n in images):
            break
        top = deeper
    paths |= {n[len(top) :]: plain[n] for n in plain if n.startswith(top) and n != top}
    return paths


def _unquoted(name: bytes) -> bytes:
    """The name that `scripts/prepare_data.py shards` made ``name`` of."""
    path = unquote_to_bytes(name) if b"%" in name else name
    return name if b"\0" in path else path


def _key(name: bytes) -> bytes:
    """What all files of a sample have in common (WebDataset)."""
    folder, slash, file = name.rpartition(b"/")
    return folder + slash + file.partition(b".")[0]


def _label_in(document: bytes) -> bytes | None:
    try:
        value = json.loads(document)["label"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return str(value).encode("utf-8", "replace") if isinstance(value, (int, str)) else None


def _class_of(label: bytes, names: list[bytes], where: str) -> bytes:
    """The class that a label means; ``names``: the lines of classes.txt. Raises: `UserError`."""
    if label.isdigit() and len(label) < 10:
        number = int(label)
        if not names:
            return b"%05d" % number
        if number < len(names):
            return names[number]
    elif label in names or (not names and not re.search(rb"^\.|[/\0\n]", label)):
        return label
    text = f"{where} has the label {os.fsdecode(label[:40])}"
    raise UserError(f"{text}, which is no line of {CLASSES}, nor a class", on_every_rank=True)


def _normalised(name: bytes) -> bytes:
    """A name in a tar file, without what a path may have besides names; b"" if it is hidden."""
    if name[:1] not in b"./" and b"/." not in name and b"//" not in name:
        return name.rstrip(b"/")
    parts = [part for part in name.split(b"/") if part not in (b"", b".", b"..")]
    return b"" if any(part.startswith(b".") for part in parts) else b"/".join(parts)


# ---- headers


class _Part:
    """A part of an open file, as tarfile reads it; threads share the handle, not the position."""

    def __init__(self, handle: int, start: int, end: int):
        self.handle, self.start, self.end, self.place = handle, start, end, 0

    def tell(self) -> int:
        return self.place

    def seek(self, place: int) -> None:
        self.place = place

    def read(self, size: int) -> bytes:
        """Raises: EOFError for less than ``size`` bytes, ValueError for more than a header has."""
        if not 0 <= size <= LARGEST_HEADER:
            raise ValueError
        place = self.start + self.place
        data = os.pread(self.handle, size, place) if place + size <= self.end else b""
        if len(data) < size:
            raise EOFError
        self.place += size
        return data


def _members(handle: int, start: int, end: int, where: str) -> Iterator[tarfile.TarInfo]:
    """The members of the tar file ``where``, which lies between two places of an open file.

    Not by iterating over a TarFile: that keeps all members in memory, and takes a damaged header
    for the end. Raises: `UserError` for a file that is damaged, incomplete, or holds sparse files.
    """
    part, place = _Part(handle, start, end), 0
    try:
        tar = tarfile.TarFile(fileobj=part, encoding="utf-8", errors="surrogateescape")
        while True:
            part.seek(place)
            try:
                member = tarfile.TarInfo.fromtarfile(tar)
            except tarfile.EOFHeaderError:
                return
            if member.size < 0 or tar.offset <= place:
                raise ValueError
            place = tar.offset
            if member.issparse():
                text = f"{where} holds the sparse file {member.name}: make it again without"
                raise UserError(f"{text} tar's option -S", on_every_rank=True)
            yield member
    except EOFError:
        text = f"{where} ends before its last file does, after {end - start:,} bytes: the copy is"
        raise UserError(f"{text} incomplete, copy it again", on_every_rank=True) from None
    except (tarfile.TarError, ValueError, LookupError, RecursionError):
        if place > 0:
            text = f"{where} is damaged at byte {place:,}: copy it again"
            raise UserError(text, on_every_rank=True) from None
        magic = {b"\x1f\x8b": ".gz", b"BZ": ".bz2", b"\xfd7": ".xz", b"(\xb5": ".zst"}
        if start == 0 and (suffix := magic.get(os.pread(handle, 2, 0))):
            raise _compressed(Path(where), suffix) from None
        raise UserError(f"{where} is not a tar file", on_every_rank=True) from None


def _bytes(name: str) -> bytes:
    """A name as it is in the tar file, up to a zero byte."""
    return name.encode("utf-8", "surrogateescape").partition(b"\0")[0]
