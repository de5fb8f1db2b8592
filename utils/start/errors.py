"""Errors that the user can fix: a one-line message, a non-zero exit code, no traceback."""

import contextlib
import errno
import io
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BAD_INPUT = 2  # exit code of argparse for wrong options; ours for all bad input
LOST_PEER = 69  # EX_UNAVAILABLE of sysexits.h: another process of the job is gone or stuck
# EX_TEMPFAIL: stopped by a signal, with a snapshot or before the first step; run again to continue
INTERRUPTED = 75
ROOT = Path(__file__).resolve().parents[2]
REPORTED = "IMAGENET_REPORTED"  # environment variable: the file of `is_first_to_report`


class UserError(Exception):
    """An error that the user can fix. The one-line message says how.

    ``on_every_rank`` marks an error that every process of the job raises (a missing option, say):
    the first process of each node reports it. ``code`` is the exit code.
    """

    def __init__(self, message: str, on_every_rank: bool = False, code: int = BAD_INPUT):
        super().__init__(message)
        self.on_every_rank, self.code = on_every_rank, code


def printable(text: str) -> str:
    """``text`` made safe for a terminal or a log: names of files and hosts may hold anything.

    Line breaks, control characters and invalid Unicode are written as escapes.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def path_of(name: str) -> str:
    """The path of a file of this repository, short in its root."""
    with contextlib.suppress(OSError):  # the folder was deleted
        if Path.cwd() == ROOT:
            return name
    return str(ROOT / name)


def typed(name: str) -> str:
    """`path_of`, as it is to be typed in the current folder."""
    return shlex.quote(path_of(name))


def command(script: str, *words: str | Path) -> str:
    """The command line that runs a script of scripts/, to be typed in the current folder."""
    return " ".join(["python", typed(f"scripts/{script}"), shlex.join(map(str, words))]).rstrip()


@contextlib.contextmanager
def writing(place: Path, option: str) -> Iterator[None]:
    """If ``place`` cannot be written, name the ``option`` for another one. Raises: `UserError`."""
    try:
        yield
    except OSError as error:
        text = f"cannot write {place} ({error.strerror or error}): choose another place with"
        raise UserError(f"{text} {option}", on_every_rank=True) from None


ending = threading.RLock()  # never released

# Advice at the end of messages: how to continue. A training with a run directory has another one,
# see `utils.run.run_directory`; before that, and in an evaluation, there is nothing to resume.
how_to_continue = "run the same command again"
BY_ITSELF = ", unless it restarts by itself"  # follows, if torchrun starts the processes again


def is_first_to_report() -> bool:
    """Whether no other process of this node and job has reported an error before. Asks once.

    Under torchrun, and below `utils.start.launch.supervise`, the first process that asks creates a
    file in a temporary folder of the job. Without such a folder the answer is True.
    """
    file = os.environ.get(REPORTED, "")
    if not file and (one := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        file = os.path.join(os.path.dirname(os.path.dirname(one)), "reported")  # attempt_N/RANK/
    if not file:
        return True
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:  # no files or no disk space left: better twice than not at all
        return True
    return True


def report(error: UserError | OSError) -> int:
    """Print ``error`` as one line on stderr and return the exit code for it.

    Of an error that every process has, the first one of each node prints it. If two threads report
    an error, the process ends with the first one: the other thread stays here.
    """
    ending.acquire()
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        text = f"{place}{error.strerror or error}: correct that, then {how_to_continue}"
        error = UserError(text)
    if is_first_to_report() or not error.on_every_rank:
        show(error)
    else:
        tell_torchrun(f"error: {printable(str(error))}")
    return error.code


def show(error: UserError) -> None:
    """Print ``error`` as one line on stderr."""
    rank = os.environ.get("RANK")
    where = f" (rank {rank})" if rank and not error.on_every_rank else ""
    text = printable(f"error{where}: {error}")
    print(text, file=sys.stderr, flush=True)
    tell_torchrun(text)


def tell_torchrun(text: str, is_cause: bool = True) -> None:
    """Make torchrun end its report, a long traceback, with ``text``.

    torch.distributed.elastic.multiprocessing.errors defines the file and its format. The report
    ends with the process whose time is the earliest; times are whole seconds. ``is_cause``: it is
    no consequence of another process's error, and comes first.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"py_callstack": text, "timestamp": str(int(time.time()) + (not is_cause))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": more}}, file)


def tolerate_broken_pipe() -> None:
    """Drop output that cannot be written, instead of failing: `| head -3`, a full disk, a terminal
    that was closed. Characters that the terminal's encoding does not have become escapes.

    Call it at the start of a program, which then still writes its files and keeps its exit code.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            number = stream.fileno()
        except (AttributeError, OSError):  # closed, or not a file
            continue
        if not isinstance(getattr(stream.buffer, "raw", None), _Droppable):
            with contextlib.suppress(OSError):
                stream.flush()
            raw = io.BufferedWriter(_Droppable(number, "w", closefd=False))
            how = {"errors": "backslashreplace", "line_buffering": True}
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, **how))


class _Droppable(io.FileIO):
    """A file descriptor whose reader may exit, or whose disk may be full."""

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # also for C++ and child processes
            os.close(nowhere)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            # Only this text is lost: the disk may have space again later.
        return memoryview(data).nbytes


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and exit with its exit code, or with that of a reported error.

    Does not wait for other threads.
    """
    tolerate_broken_pipe()
    try:
        code = main()
    except (UserError, OSError) as error:
        code = report(error)
    except KeyboardInterrupt:
        code = 130
    exit_at_once(code)


def exit_at_once(code: int) -> NoReturn:
    """Exit without waiting for other threads; under a notebook's ``%run``, end the script alone."""
    sys.stdout.flush()
    sys.stderr.flush()
    if hasattr(sys, "ps1"):  # os._exit would end the notebook's kernel
        sys.exit(code)
    os._exit(code)
