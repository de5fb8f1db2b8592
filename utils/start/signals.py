"""The signals that stop a run: which they are, and what they do before training begins.

A signal that the parent process ignores stays ignored: SIGHUP after ``nohup``, SIGINT after
``command &`` in a script. Training itself handles the others in `utils.run.stopping`.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from utils.start import errors
from utils.start.errors import INTERRUPTED

# SIGHUP: the terminal was closed, or the connection to it was lost. Slurm sends SIGUSR1.
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
UNWIND_SECONDS = 2.0  # for the main thread to react, which may be waiting in C++

_starting = threading.Event()  # set between `stop_during_start` and `start_is_over`
_saying = threading.Lock()  # held for ever once the line is printed


class Stopped(KeyboardInterrupt):
    """A signal has stopped this process before training began."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


def handle(
    handler: Callable[[int, Any], Any] | signal.Handlers, signums: Iterable[int] = STOPS
) -> None:
    """Install ``handler`` for those of ``signums`` that this process does not ignore."""
    for signum in signums:
        if signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, handler)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Deliver `STOPS` after the block. Processes started in it begin with the signals blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_resource_tracker() -> None:
    """Start multiprocessing's process that removes semaphores, so that `STOPS` do not end it.

    It ignores SIGINT and SIGTERM, but would die with the terminal. Its start unblocks signals, so
    it must not happen inside `blocked`.
    """
    with blocked():
        resource_tracker.ensure_running()


def stop_during_start(is_child: bool = False) -> None:
    """From now on, a stop signal ends this process with one line and the code `INTERRUPTED`.

    It raises `Stopped` in the main thread. If that does not end the process within
    `UNWIND_SECONDS`, because the main thread waits in C++, another thread ends it. While a module
    is imported the process ends at once: torch's C++ code aborts if a signal raises an exception.
    ``is_child``: the parent process passes signals on, as SIGTERM.
    """
    if _starting.is_set():
        return
    if is_child:  # Ctrl-C reaches the whole process group: the parent decides what it means
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    _starting.set()
    handle(_raise)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end_stuck_process, args=(reader,), daemon=True).start()
    os.register_at_fork(after_in_child=_forget)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # see `blocked`


def start_is_over() -> None:
    """From now on, the caller handles the signals: undo `stop_during_start`."""
    if _starting.is_set():
        _starting.clear()
        # Another thread, which ends the process, may not change the descriptor, and need not.
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(BrokenPipeError):  # a signal has ended the thread already
                os.write(signal.set_wakeup_fd(-1), b"\0")  # ends the thread


def say(signum: int) -> int:
    """Print the line about a stop during the start. Returns: the exit code.

    One process of each node prints it, and none if an error has been printed before.
    """
    name = signal.Signals(signum).name
    if _saying.acquire(blocking=False):
        if errors.is_first_to_report():
            text = f"{name}: stopped; there is nothing to save\n"
            with contextlib.suppress(OSError):
                os.write(2, text.encode())  # print may be what the signal has interrupted
        else:
            errors.tell_torchrun(f"{name}: stopped, as another process has failed", is_cause=False)
    return INTERRUPTED


def has_launcher() -> bool:
    """Whether torchrun, or this suite's own launcher, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ or multiprocessing.parent_process() is not None


def kill_children() -> None:
    """Kill the child processes of multiprocessing that still run; workers ignore SIGTERM."""
    # DataLoader's handler of SIGCHLD would report their end as an error.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()


def process_state(pid: int) -> str:
    """The letter of proc(5) for the state of a process on this machine; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Whether a process on this machine is stopped, by SIGSTOP or a debugger."""
    return process_state(pid) in ("T", "t")


def _raise(signum: int, frame: FrameType | None) -> None:
    handle(lambda *_: None)  # one is enough
    if _is_importing(frame):
        say(signum)
        kill_children()
        os._exit(INTERRUPTED)
    raise Stopped(signum)


def _is_importing(frame: FrameType | None) -> bool:
    """Whether ``frame`` runs below an import statement."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _end_stuck_process(reader: int) -> None:
    """Wait for a stop signal; Python's own handler in C writes its number to the pipe."""
    while _starting.is_set() and (data := os.read(reader, 1)):
        if _starting.is_set() and data[0] in STOPS:
            time.sleep(UNWIND_SECONDS)
            if _starting.is_set():
                say(data[0])
                kill_children()
                os._exit(INTERRUPTED)
    os.close(reader)


def _forget() -> None:
    """In a forked child: signals end it as usual, and do not wake the parent's thread."""
    if _starting.is_set():
        _starting.clear()
        signal.set_wakeup_fd(-1)
        for signum in STOPS:
            if signal.getsignal(signum) == _raise:
                signal.signal(signum, signal.SIG_DFL)
