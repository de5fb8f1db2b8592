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
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any, NoReturn

from utils.errors import (
    UserError,
    go_on_without_reader,
    is_reported_by_another,
    of_shortage,
    report,
    show,
)

# In the environment of all that the suite starts; scripts/cleanup.sh looks for it.
MARKER = "IMAGENET_SUITE"
LAUNCHER = "IMAGENET_LAUNCHER"  # there as well: the process id of what has to outlive it
GRACE_SECONDS = 15.0  # how long the others may take to end once one process has failed
REPORT_SECONDS = 60.0  # how long a node's first process may take to find what others found
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies, however it dies (Linux: prctl(2)).

    Give the process number ``parent`` where it may have died before this is called.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def die_with_launcher() -> bool:
    """Let this process end with its launcher, if it has one: `supervise`, a script or torchrun.

    Call it before torch is imported, which takes seconds: a launcher may be killed meanwhile.
    Returns: whether it has one.
    """
    if launcher := os.environ.pop(LAUNCHER, None):
        die_with_parent(int(launcher))
        return True
    if "LOCAL_RANK" in os.environ:
        die_with_parent()
        # torchrun does not tell its process id. It has torch loaded; what adopts orphans has not.
        if "TORCHELASTIC_RUN_ID" in os.environ and not _has_torch(os.getppid()):
            os._exit(1)
    return "LOCAL_RANK" in os.environ


def _has_torch(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps") as file:
            return any("libtorch" in line for line in file)
    except OSError:  # gone, or of another user
        return False


def adopt_orphans() -> set[int]:
    """Become the parent of whatever below this process loses its own (Linux: prctl(2)).

    Returns: the ids of the processes that are below it already (those that keep a log, say).
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return set(_below(os.getpid()))


def end_all_below(but: set[int]) -> None:
    """Kill everything below this process, except ``but``, until nothing is left.

    Neither a process group nor a session holds it together, as torchrun gives each worker its own:
    call `adopt_orphans` before anything is started.
    """
    while left := set(_below(os.getpid())) - but:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _below(root: int) -> list[int]:
    """Process ids of all living processes below ``root``."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    children.setdefault(int(parent), []).append(int(entry))
    found, new = [], [root]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


def run_main(main: Callable[[], int | None]) -> None:
    """Call ``main`` and end the process with its exit code, or with a `UserError`'s sentence."""
    os.environ.setdefault(MARKER, "training")
    _make_folder_for_sockets()
    with _errors_reported(by_torchrun=True):
        try:
            code = main()
        except KeyboardInterrupt:
            print("interrupted before training began; nothing was lost", file=sys.stderr)
            code = 130
    sys.exit(code)


def _make_folder_for_sockets() -> None:
    """Make one for all processes below this one, by which loader workers hand batches over.

    Each worker would make its own, and, as it is killed in the end, leave it behind. The path of a
    socket has 107 bytes at most (unix(7)); workers fail, and training waits, where TMPDIR is too
    long for that.
    """
    with contextlib.suppress(OSError):  # what needs the disk reports that it is full
        if len(os.fsencode(tempfile.gettempdir())) > 107 - len("/pymp-01234567/listener-01234567"):
            tempfile.tempdir = "/tmp"
        multiprocessing.util.get_temp_dir()


@contextlib.contextmanager
def _errors_reported(by_torchrun: bool) -> Iterator[None]:
    """End this process with one sentence if its fault has one; leave no child behind.

    Unlike `supervise`, torchrun does not wait for the process that reports a fault.
    """
    go_on_without_reader()
    try:
        yield
    except (UserError, RuntimeError) as fault:
        error = of_shortage(fault) if isinstance(fault, RuntimeError) else fault
        if error is None:
            raise
        if by_torchrun and is_reported_by_another(error):
            _wait_for_the_end(error)
        _leave(report(error))
    finally:
        # The exit code is decided. A launcher that has heard of a loss from another node, but not
        # yet of its cause here, sends SIGTERM while Python ends, which would replace the code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_children()


def _wait_for_the_end(error: UserError) -> None:
    """Let the node's first process, which reports ``error``, be the first to end.

    torchrun ends all processes of a node as soon as one of them has ended: the sentence would be
    lost whenever another process was the faster one. Nobody ends this one if the first does not
    find the same fault after all; then it reports it itself.
    """
    _kill_children()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    time.sleep(REPORT_SECONDS)
    show(error)


def _leave(code: int) -> NoReturn:
    """End this process at once, after an error.

    The process group is still there; Python's own way out can meet its threads at work, and C++
    then aborts the process (SIGABRT), whatever its exit code was to be.
    """
    _kill_children()
    multiprocessing.util._exit_function()  # frees semaphores, as at the end of any child process
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _kill_children() -> None:
    """Kill the loader workers that an exception has left behind.

    They ignore the SIGTERM by which multiprocessing would end them before it waits for them.
    """
    # DataLoader's handler of SIGCHLD would take their end for a fault.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()


def supervise(calls: list[tuple[Callable[..., int], tuple[Any, ...], dict[str, str]]]) -> int:
    """Run each ``function(*arguments)`` in its own process; return the job's exit code.

    The third part of a call are variables for the environment of its process.

    SIGTERM and the first SIGINT are passed on and waited for, so that training can write a
    snapshot; a second SIGINT kills. When one process fails, the others get `GRACE_SECONDS` to end
    by themselves (they often wait for the dead one) and are then killed.
    """
    # On a CPU that is shared with loader workers, OpenMP threads that spin at barriers keep away
    # the very thread they wait for: measured, steps took twice as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    context = multiprocessing.get_context("spawn")
    me = os.getpid()
    children = [context.Process(target=_child, args=(me, run, *args)) for run, args, _ in calls]
    interrupts = 0

    def pass_on(signum: int, frame: Any) -> None:
        nonlocal interrupts
        interrupts += signum == signal.SIGINT
        for child in children:
            if child.pid and child.is_alive():
                os.kill(child.pid, signal.SIGKILL if interrupts > 1 else signal.SIGTERM)

    handled = [signal.SIGINT, signal.SIGTERM]
    # scripts/train.sbatch starts this with SIGUSR1 ignored, as Slurm sends it to every process: the
    # children inherit that, and so survive it before they have a handler of their own.
    if signal.getsignal(signal.SIGUSR1) != signal.SIG_IGN:
        handled.append(signal.SIGUSR1)
    for signum in handled:  # for good: once the children have ended, a signal changes nothing
        signal.signal(signum, pass_on)
    try:
        for child, (_, _, variables) in zip(children, calls, strict=True):
            with _environment({LAUNCHER: str(me)} | variables):
                child.start()
        return _wait_for(children)
    finally:
        for child in children:
            if child.pid and child.is_alive():
                child.kill()


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    """Variables that processes started meanwhile inherit."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more:
            os.environ.pop(name)
        os.environ.update({name: before[name] for name in more if name in before})


def _wait_for(children: list[Any]) -> int:
    first_code = 0
    deadline = math.inf
    running = list(children)
    while running:
        # A look each second, too: the sentinel of a dead process comes late where a process that
        # it has forked lives on.
        left = max(0.05, min(1.0, deadline - time.monotonic()))
        wait([child.sentinel for child in running], left)
        if time.monotonic() >= deadline:
            for child in running:
                child.kill()
        ended = [child for child in running if child.exitcode is not None]
        for child in ended:
            first_code = first_code or child.exitcode
        running = [child for child in running if child not in ended]
        if first_code and deadline == math.inf:
            deadline = time.monotonic() + GRACE_SECONDS
    if first_code < 0:
        name = signal.Signals(-first_code).name
        print(f"error: a training process was killed by {name}", file=sys.stderr, flush=True)
        return 128 - first_code
    return first_code


def _child(parent: int, function: Callable[..., int], *arguments: Any) -> None:
    # Only the parent decides about Ctrl-C until training has put its own handlers in place.
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _errors_reported(by_torchrun=False):
        code = function(*arguments)
    sys.exit(code)
