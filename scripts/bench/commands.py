"""Run commands with a time limit. At the limit their child processes are killed, too."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from typing import Any

from utils.start.errors import BAD_INPUT, INTERRUPTED, UserError
from utils.start.orphans import die_with_parent


def run(commands: list[list[str]], seconds: float, advice: str = "", **options: Any) -> list[str]:
    """Run ``commands`` side by side, each in its own session. Returns: the output of each.

    When one fails, the others are killed. ``options`` are those of `subprocess.Popen`. Raises:
    `UserError` with the last lines of a command that fails, or with ``advice`` after ``seconds``.
    Its code is `INTERRUPTED` after the time limit, or if the command exits with that code.
    """
    parent, end, started = os.getpid(), time.monotonic() + seconds, []
    options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
    options["preexec_fn"] = lambda: die_with_parent(parent)  # even if this process is killed
    with contextlib.ExitStack() as stack:
        # Files, not pipes: a process that the command leaves behind would keep a pipe open.
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in 2 * commands]
        outputs, errors = files[::2], files[1::2]
        try:
            for words, out, error in zip(commands, outputs, errors, strict=True):
                started.append(subprocess.Popen(words, stdout=out, stderr=error, **options))
            while True:
                codes = [process.poll() for process in started]
                failed = next((i for i, code in enumerate(codes) if code), None)
                if failed is not None or None not in codes:
                    break
                if time.monotonic() > end:
                    text = f"{shlex.join(commands[0])} takes longer than {seconds:.0f} s{advice}"
                    raise UserError(text, code=INTERRUPTED)
                time.sleep(0.01)
        except OSError as error:
            raise UserError(f"cannot run {error.filename}: {error.strerror}") from None
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # the processes of torchrun, too
                process.wait()
        for file in files:
            file.seek(0)
        if failed is None:
            return [file.read() for file in outputs]
        lines = (errors[failed].read().strip() or outputs[failed].read()).splitlines()
        lines = [line.strip() for line in lines if re.search(r"\w", line)] or ["no output"]
        code = INTERRUPTED if codes[failed] == INTERRUPTED else BAD_INPUT
        text = f"{shlex.join(commands[failed])} failed with exit code {codes[failed]}: "
        raise UserError(text + " / ".join(lines[-3:]), code=code)
