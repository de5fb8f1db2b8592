"""Errors that the user can fix: a one-line message, a non-zero exit code, no traceback."""

import contextlib
import errno
import io
import json
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

BAD_INPUT = 2  # exit code of argparse for wrong options; ours for all bad input
LOST_PEER = 69  # EX_UNAVAILABLE of sysexits.h: another process of the job is gone or stuck
INTERRUPTED = 75  # EX_TEMPFAIL: stopped by a signal, with a snapshot; run again to continue


class UserError(Exception):
    """An error that the user can fix. The one-line message says how.

    ``on_every_rank`` marks an error that every process of the job raises (a missing option, say):
    one process per node reports it. ``code`` is the exit code.
    """

    def __init__(self, message: str, on_every_rank: bool = False, code: int = BAD_INPUT):
        super().__init__(message)
        self.on_every_rank, self.code = on_every_rank, code


def printable(text: str) -> str:
    """``text`` made safe for a terminal or a log: names of files and hosts may hold anything.

    Line breaks, control characters and invalid Unicode are written as escapes.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# Advice at the end of messages: how to continue this run. `utils.run_directory` changes it.
how_to_continue = "run the same command with --resume auto"


def is_reported_by_another(error: UserError) -> bool:
    """Whether another process of this node raises the same ``error`` and prints it."""
    return error.on_every_rank and os.environ.get("LOCAL_RANK", "0") != "0"


def report(error: UserError | OSError) -> int:
    """Print ``error`` as one line on stderr and return the exit code for it."""
    if isinstance(error, OSError):
        error = UserError(str(error))
    if not is_reported_by_another(error):
        show(error)
    return error.code


def show(error: UserError) -> None:
    """Print ``error`` as one line on stderr."""
    rank = os.environ.get("RANK")
    where = f" (rank {rank})" if rank and not error.on_every_rank else ""
    text = printable(f"error{where}: {error}")
    print(text, file=sys.stderr, flush=True)
    tell_torchrun(text)


def tell_torchrun(text: str) -> None:
    """Make torchrun end its report, a long traceback, with ``text``.

    torch.distributed.elastic.multiprocessing.errors defines the file and its format.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": more}}, file)


def tolerate_broken_pipe() -> None:
    """Drop output that cannot be written (`| head -3`, a full disk), instead of failing.

    Call it at the start of a program, which then still writes its files and keeps its exit code.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            terminal = os.isatty(stream.fileno())
        except (AttributeError, OSError):  # closed, or not a file
            continue
        if not terminal:
            stream.flush()
            raw = io.BufferedWriter(_Droppable(stream.fileno(), "w", closefd=False))
            new = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, new)


class _Droppable(io.FileIO):
    """A file descriptor whose reader may exit, or whose disk may be full."""

    def write(self, data: bytes) -> int | None:
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
    sys.stdout.flush()
    os._exit(code)
