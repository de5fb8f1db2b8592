"""scripts/prepare_data.py, called in this process, and what it has written."""

import base64
import contextlib
import io
import multiprocessing
import re
import tarfile
from unittest import mock
from urllib.parse import unquote

import prepare_data
from conftest import Result

SCRIPT = "scripts/prepare_data.py"
called = set()


def run(*arguments):
    """The result of a command, as `conftest.python` gives it.

    Its workers are spawned at first, and forked when it is called again, in a tenth of the time.
    """
    out, err = io.StringIO(), io.StringIO()
    context = multiprocessing.get_context("fork" if arguments[0] in called else "spawn")
    called.add(arguments[0])
    workers = mock.patch.object(multiprocessing, "get_context", lambda _: context)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), workers:
        try:
            code = prepare_data.main([str(argument) for argument in arguments])
        except SystemExit as stopped:
            code = stopped.code
    return Result(code, out.getvalue(), err.getvalue())


def said(text):
    """The lines of the error output but a progress bar, which slow commands show."""
    lines = text.replace("\r", "\n").splitlines()
    return [line for line in lines if line.strip() and not re.search(r"%\|.*\|.*\[", line)]


def succeed(*arguments):
    """What a command prints that must succeed without a word on its error output."""
    done = run(*arguments)
    assert (done.code, said(done.err)) == (0, []), done
    return done.out


def fail(*arguments):
    """The error message of a command that must fail with exit code 2 and one line."""
    done = run(*arguments)
    (line,) = said(done.err)
    assert done.code == 2 and line.startswith("error: "), done
    return line


def put(folder, files):
    """Write ``files`` (path: bytes) into a folder, and return it."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def tree(folder):
    """All files below a folder but the index of a training: path -> bytes."""
    index = ".index.npz"
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != index)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def images(folder):
    """The same, images alone."""
    return {name: data for name, data in tree(folder).items() if not re.search(r"^\.|/\.", name)}


def times(folder):
    """When each file and folder below a folder changed."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def tar_bytes(members, mode="w"):
    """A tar of (name, bytes) pairs."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def members(shard):
    """Names and bytes in a tar file, in order."""
    with tarfile.open(shard) as tar:
        return [(one.name, tar.extractfile(one).read()) for one in tar]


def folder_of(out):
    """The image folder that shards hold: path -> bytes."""
    files = {}
    for shard in out.glob("*/*.tar"):
        for name, data in members(shard):
            if not name.endswith(".cls"):
                files[f"{shard.parent.name}/{unquote(name, errors='surrogateescape')}"] = data
    return files


# Three synsets with the ILSVRC2012_ID 2, 1001 and 1: n01440764, n00001740 (no class) and n01443537,
# as scipy.io.savemat(file, {"synsets": array of structs}, do_compression=True) writes them.
META = """TUFUTEFCIDUuMCBNQVQtZmlsZSBQbGF0Zm9ybTogcG9zaXgsIENyZWF0ZWQgb246IFdlZCBOb3YgMjUgMDI6MzM6
NTEgMjAyNgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABSU0PAAAAJAEAAHic
42NgYIhgZWBgA9IcQMzEAAGsUD4zEDNCMTsQF1fmFaeWFAPlWRj4oOIhQOzpExwW5GxkYGgU7+nCEO4HJOCgPL8opRjOS8/JL0bw
8kpz45MzMnNSilLzGBgQLBgA2WHAgHAfJ5r7GJEwA9j9jGA/gPQ5IOljwaKPE0mfAJSfZ2BoYmJgbmaCZL8FAXNY0cwB8UtS85Iz
iNTPhqYfxE9USMsszsDUz0bA/5xQceTwcyCgnwlNvwBc9wd7KMMBPR64CbiDBWjqS2ZK4gEIDM1NDJD8QU44puaVZJZUQvRnENBv
hKYfxK8gGWB3L4nx5kCreCMm/zAyUJh/jE2NzRmwhwM2czjQzAHx0/NzUkA5AN396PphAFk/NnsHKt8AAIPlTBU="""


def devkit_bytes(truth):
    """ILSVRC2012_devkit_t12.tar.gz with this ILSVRC2012_ID for each validation image."""
    folder, lines = "ILSVRC2012_devkit_t12/data", "".join(f"{number}\n" for number in truth)
    members = [("meta.mat", base64.b64decode(META))]
    members += [("ILSVRC2012_validation_ground_truth.txt", lines.encode())]
    return tar_bytes([(f"{folder}/{name}", data) for name, data in members], "w:gz")
