"""Processes of one node: start them, end them together, leave none behind."""

import contextlib
import ctypes
import math
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, NoReturn

from utils import errors
from utils.errors import UserError

MARKER = "IMAGENET_SUITE"  # a variable in the environment by which scripts/cleanup.sh finds us
LAUNCHER = "IMAGENET_LAUNCHER"  # another: the process id of the launcher
GRACE_SECONDS = 15.0  # for the others to exit once one process has failed
REPORT_SECONDS = 60.0  # for a node's first process to find the error that others have found
_PR_SET_PDEATHSIG = 1


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies (Linux: prctl(2)).

    Give the process id ``parent`` where the parent may have died before this is called.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def die_with_launcher() -> bool:
    """Let this process end with its launcher, if it has one: `supervise`, a script or torchrun.

    Call it before torch is imported: that takes seconds in which the launcher may be killed.
    Returns: whether there is a launcher.
    """
    if launcher := os.environ.pop(LAUNCHER, None):
        die_with_parent(int(launcher))
        return True
    if "LOCAL_RANK" in os.environ:
        die_with_parent()
        # torchrun does not pass on its process id. It has torch loaded; init, which would be the
        # parent if torchrun had died already, has not.
        if "TORCHELASTIC_RUN_ID" in os.environ and not _has_torch(os.getppid()):
            os._exit(1)
    return "LOCAL_RANK" in os.environ


def _has_torch(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps") as file:
            return any("libtorch" in line for line in file)
    except OSError:  # gone, or of another user
        return False


def run_main(main: Callable[[], int | None]) -> None:
    """Call ``main`` and end the process with its exit code, or with a `UserError`'s message."""
    os.environ.setdefault(MARKER, "training")
    _make_folder_for_sockets()
    _exit_with(main, spawned=False)


def _make_folder_for_sockets() -> None:
    """Make one temporary folder for the sockets of this process's loader workers.

    Each worker would make its own and, as it is killed in the end, leave it behind. A socket's path
    has at most 107 bytes (unix(7)): with a longer TMPDIR, workers fail and training hangs.
    """
    with contextlib.suppress(OSError):  # a full disk is reported where it matters
        if len(os.fsencode(tempfile.gettempdir())) > 107 - len("/pymp-01234567/listener-01234567"):
            tempfile.tempdir = "/tmp"
        multiprocessing.util.get_temp_dir()


def _exit_with(main: Callable[[], int | None], spawned: bool) -> NoReturn:
    """Call ``main`` and exit; with a one-line message where its error has one, and no child left.

    Unlike `supervise`, torchrun does not wait for the process that reports the error.
    """
    errors.go_on_without_reader()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted before training began; nothing was lost", file=sys.stderr)
        sys.exit(130)
    except (UserError, RuntimeError) as fault:
        error = errors.of_shortage(fault) if isinstance(fault, RuntimeError) else fault
        if error is None:
            raise
        if not spawned and errors.is_reported_by_another(error):
            _wait_for_the_end(error)
        code = errors.report(error)
        if error.alike:
            _end_torchrun()
        _kill_children()
        multiprocessing.util._exit_function()  # frees semaphores, as at the end of any child
        sys.stdout.flush()
        sys.stderr.flush()
        # The process group still has threads: a normal exit can abort in C++, with another code.
        os._exit(code)
    except SystemExit as end:
        if end.code == errors.BAD_INPUT:  # argparse's
            _end_torchrun()
        raise
    finally:
        # The exit code is decided. A launcher that has heard of a loss from another node, but not
        # yet of its cause here, sends SIGTERM while Python ends, which would replace the code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_children()


def _wait_for_the_end(error: UserError) -> None:
    """Let the node's first process, which reports ``error``, exit before this one.

    torchrun kills all processes of a node as soon as one of them has exited: the message would be
    lost whenever another process was faster. If the first process does not find the same error
    after all, nobody kills this one, and it reports the error itself.
    """
    _kill_children()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    time.sleep(REPORT_SECONDS)
    errors.show(error)


def _end_torchrun() -> None:
    """Keep scripts/elastic_train.sh from restarting what fails each time with the same error."""
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    if first and os.environ.get(MARKER, "").startswith("launcher"):
        os.kill(os.getppid(), signal.SIGKILL)  # at any other signal it prints a stack trace


def _kill_children() -> None:
    """Kill the loader workers that an exception has left behind; they ignore SIGTERM."""
    # DataLoader's handler of SIGCHLD would report their end as an error.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()


def supervise(worker: Callable[[Any], int], args: Any, environments: list[dict[str, Any]]) -> int:
    """Run ``worker(args)`` in a process for each of ``environments``; return the exit code.

    SIGTERM and the first SIGINT are passed on, so that training can write a snapshot; a second
    SIGINT kills. When one process fails, the others get `GRACE_SECONDS` to exit (they often wait
    for the dead one) and are then killed.
    """
    # OpenMP threads that spin at barriers slow down loader workers on the same cores: measured,
    # steps took twice as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_child, args=(worker, args)) for _ in environments]
    interrupts = 0

    def pass_on(signum: int, frame: Any) -> None:
        nonlocal interrupts
        interrupts += signum == signal.SIGINT
        if interrupts > 1:  # a third one, while Python ends, would replace the exit code
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        for child in children:
            # It may be gone since; and this may interrupt the very call that notices its end.
            if child.pid and child.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL if interrupts > 1 else signal.SIGTERM)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # scripts/train.sbatch starts this with SIGUSR1 ignored, as Slurm sends it to every process:
        # the children inherit that, and so survive it before they have a handler of their own.
        if signum != signal.SIGUSR1 or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, pass_on)  # for good: later, a signal changes nothing
    before = dict(os.environ)
    try:
        for child, variables in zip(children, environments, strict=True):
            os.environ[LAUNCHER] = str(os.getpid())
            os.environ.update({name: str(value) for name, value in variables.items()})
            child.start()  # it inherits the environment
        code = _wait_for(children)
    finally:
        for child in children:
            if child.pid and child.is_alive():
                child.kill()
        os.environ.clear()
        os.environ.update(before)
    if interrupts > 1:
        return 128 + signal.SIGINT
    if code < 0:
        name = signal.Signals(-code).name
        print(f"error: a training process was killed by {name}", file=sys.stderr, flush=True)
        return 128 - code
    return code


def _wait_for(children: list[Any]) -> int:
    """The first exit code that is not 0, once all have exited; -N if signal N has killed it."""
    first_code, deadline, running = 0, math.inf, list(children)
    while running:
        # Look each second as well: the sentinel of a dead process stays silent as long as a process
        # that it has forked is alive.
        left = max(0.05, min(1.0, deadline - time.monotonic()))
        wait([child.sentinel for child in running], left)
        if time.monotonic() >= deadline:
            for child in running:
                child.kill()
        for child in [child for child in running if child.exitcode is not None]:
            running.remove(child)
            first_code = first_code or child.exitcode
        if first_code and deadline == math.inf:
            deadline = time.monotonic() + GRACE_SECONDS
    return first_code


def _child(worker: Callable[[Any], int], args: Any) -> None:
    # Only the parent decides about Ctrl-C until training has put its own handlers in place.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _exit_with(lambda: worker(args), spawned=True)
