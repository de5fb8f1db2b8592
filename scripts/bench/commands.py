"""Run commands with a time limit, at which their child processes are killed as well."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from typing import Any

from utils.errors import INTERRUPTED, UserError
from utils.launch import die_with_parent


def run(
    commands: list[list[str]], seconds: float, late: str, **options: Any
) -> list[subprocess.CompletedProcess]:
    """Run ``commands`` side by side, each in its own session, and collect what they print.

    Once one has failed, the others are killed. ``options`` are those of `subprocess.Popen`.
    Raises: `UserError` with the message ``late`` and the code `INTERRUPTED` after ``seconds``;
    `UserError` if one cannot be started.
    """
    started, end, parent = [], time.monotonic() + seconds, os.getpid()
    with contextlib.ExitStack() as stack:
        # Files: a process that the command has left behind would keep a pipe open.
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in 2 * commands]
        outs, errors = files[::2], files[1::2]
        options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
        options["preexec_fn"] = lambda: die_with_parent(parent)  # even if this process is killed
        try:
            for words, out, err in zip(commands, outs, errors, strict=True):
                started.append(subprocess.Popen(words, stdout=out, stderr=err, **options))
            for process in started:
                if process.wait(max(0.0, end - time.monotonic())):
                    break
        except subprocess.TimeoutExpired:
            raise UserError(late, code=INTERRUPTED) from None
        except OSError as error:
            raise UserError(f"cannot run {error.filename}: {error.strerror}") from None
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # the processes of torchrun, too
                process.wait()
        for file in files:
            file.seek(0)
        return [
            subprocess.CompletedProcess(one.args, one.returncode, out.read(), err.read())
            for one, out, err in zip(started, outs, errors, strict=True)
        ]


def last_lines(done: subprocess.CompletedProcess, count: int = 1) -> str:
    """The last lines that a failed command has printed, on one line; "" without output."""
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return " / ".join(lines[-count:])
