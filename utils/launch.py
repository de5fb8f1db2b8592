"""Start the processes of a node, give each its rank, and end them together. Without torch.

Each process gets its place in the job from torchrun's environment variables: RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. `utils.world` joins the processes.
"""

import argparse
import contextlib
import ctypes
import io
import math
import multiprocessing
import multiprocessing.util
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, NoReturn
from urllib.parse import urlsplit

from utils import addons, errors
from utils.errors import BAD_INPUT, INTERRUPTED, LOST_PEER, UserError
from utils.option_types import count, from_environment, port, positive, seconds

MARKER = "IMAGENET_SUITE"  # environment variable by which scripts/cleanup.sh recognises us
LAUNCHER = "IMAGENET_LAUNCHER"  # environment variable: process id of the launcher
GRACE_SECONDS = 15.0  # for the others to exit once one process has failed
REPORT_SECONDS = 60.0  # for a node's first process to report an error that all have
PLACEHOLDERS = ("MASTER_IP", "MASTER_ADDR", "MASTER_PORT", "HOST", "IP", "PORT")  # in documents
# Options of ulimit, and the minimum below which torch aborts or hangs.
LIMITS = {"-n": (resource.RLIMIT_NOFILE, 64), "-v": (resource.RLIMIT_AS, 2**32)}
_PR_SET_PDEATHSIG = 1


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies (Linux: prctl(2)).

    Give the process id ``parent`` if the parent may have died before this is called.
    """
    parent = parent or os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def die_with_launcher() -> None:
    """Let this process end with its launcher, if it has one: `supervise`, a script or torchrun.

    Call it before torch is imported: that takes seconds in which the launcher may be killed.
    """
    if launcher := os.environ.pop(LAUNCHER, None):
        if not launcher.isdecimal():
            text = f"{LAUNCHER}={launcher} in the environment is not a process id: unset it"
            raise UserError(text, on_every_rank=True)
        die_with_parent(int(launcher))
    elif "LOCAL_RANK" in os.environ:
        die_with_parent()
        # torchrun does not pass on its process id. If it has already died, the parent is init,
        # which, unlike torchrun, has not loaded torch.
        if "TORCHELASTIC_RUN_ID" in os.environ and not _has_torch(os.getppid()):
            os._exit(1)


def _has_torch(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps") as file:
            return any("libtorch" in line for line in file)
    except OSError:  # it has exited, or belongs to another user
        return False


def run_main(main: Callable[[], int | None]) -> None:
    """Call ``main`` and end the process with its exit code, or with a `UserError`'s message."""
    os.environ.setdefault(MARKER, "training")
    addons.make_temporary_folder()
    _exit_with(main, spawned=False)


def _exit_with(main: Callable[[], int | None], spawned: bool) -> NoReturn:
    """Call ``main`` and exit without leaving a child. Known errors become a one-line message.

    Unlike `supervise`, torchrun does not wait for the process that reports the error.
    """
    errors.tolerate_broken_pipe()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted before training began; nothing was lost", file=sys.stderr)
        sys.exit(130)
    except Exception as exception:
        error = exception if isinstance(exception, UserError) else addons.known_error(exception)
        if error is None:
            raise
        if not spawned and errors.is_reported_by_another(error):
            _wait_for_the_end(error)
        code = errors.report(error)
        if error.on_every_rank:
            _end_torchrun()
        _kill_children()
        with contextlib.redirect_stderr(io.StringIO()):  # this may fail for the same reason
            multiprocessing.util._exit_function()  # frees semaphores, as at the end of any child
        sys.stdout.flush()
        sys.stderr.flush()
        # The process group still has threads: a normal exit can abort in C++, with another code.
        os._exit(code)
    except SystemExit as end:
        if end.code == errors.BAD_INPUT:  # from argparse
            _end_torchrun()
        raise
    finally:
        # The exit code is decided. A launcher that has noticed a failure on another node, but not
        # yet its cause here, may send SIGTERM while Python exits, which would replace the code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_children()


def _wait_for_the_end(error: UserError) -> None:
    """Let the node's first process, which reports ``error``, exit before this one.

    torchrun kills all processes of a node as soon as one of them has exited: the message would be
    lost whenever another process was faster. If the first process does not raise the same error
    after all, this one is not killed, and reports the error itself.
    """
    _kill_children()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    time.sleep(REPORT_SECONDS)
    errors.show(error)


def _end_torchrun() -> None:
    """Keep scripts/elastic_train.sh from restarting a job that would fail again in the same way."""
    if "IMAGENET_ELASTIC" in os.environ and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # scripts/torchrun.py sends it back
        os.kill(os.getppid(), signal.SIGTERM)


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
    # torch.distributed.elastic's start_processes was tried and rejected. After a signal, its
    # close() does not return the exit codes (75: a snapshot was written), and kills at a time
    # limit. When one process fails, it sends SIGTERM to the others at once, so that they cannot
    # report the error that they share.
    # OpenMP threads that spin at barriers slow down loader workers on the same cores: steps took
    # twice as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_child, args=(worker, args, one)) for one in environments]
    interrupts = 0

    def pass_on(signum: int, frame: Any) -> None:
        nonlocal interrupts
        interrupts += signum == signal.SIGINT
        if interrupts > 1:  # a third one, while Python ends, would replace the exit code
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        for child in children:
            # It may have exited since, or this may interrupt the call that notices its exit.
            if child.pid and child.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL if interrupts > 1 else signal.SIGTERM)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # Slurm sends SIGUSR1 to every process, so scripts/train.sbatch starts this one with SIGUSR1
        # ignored. The children inherit that, and survive the signal until they have a handler of
        # their own.
        if signum != signal.SIGUSR1 or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, pass_on)  # never restored: a late signal changes nothing
    os.environ[LAUNCHER] = str(os.getpid())  # the children inherit it
    try:
        for child in children:
            child.start()
        code = _wait_for(children)
    finally:
        for child in children:
            if child.pid and child.is_alive():
                child.kill()
        del os.environ[LAUNCHER]
    return 128 + signal.SIGINT if interrupts > 1 else shell_exit_code(code)


def _wait_for(children: list[Any]) -> int:
    """Wait until all have exited. Returns: the `job_exit_code`."""
    codes: list[int] = []
    deadline, running = math.inf, list(children)
    while running:
        # Also look every second: the sentinel of a dead process does not fire while a process that
        # it has forked is alive.
        left = max(0.05, min(1.0, deadline - time.monotonic()))
        wait([child.sentinel for child in running], left)
        is_late = time.monotonic() >= deadline
        for child in [child for child in running if child.exitcode is not None]:
            running.remove(child)
            codes.append(child.exitcode)
        for child in running if is_late else ():
            child.kill()
            child.join()
        if is_late:
            break  # the exit codes of processes killed here mean nothing
        if any(codes) and deadline == math.inf:
            deadline = time.monotonic() + GRACE_SECONDS
    return job_exit_code(codes)


def job_exit_code(codes: list[int]) -> int:
    """The exit code that says why a job failed, from those of its processes; 0 if none failed.

    -N stands for death by signal N. A process that fails because it lost another may be noticed
    first, so codes that follow from another process's failure count only if there is no other code.
    """
    failed = [code for code in codes if code]
    followed = (LOST_PEER, INTERRUPTED, -signal.SIGTERM)
    return next((code for code in failed if code not in followed), failed[0] if failed else 0)


def shell_exit_code(code: int) -> int:
    """The exit code for a shell. A negative code, a signal, is also printed as an error."""
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    print(f"error: a training process was killed by {name}", file=sys.stderr, flush=True)
    return 128 - code


def _child(worker: Callable[[Any], int], args: Any, variables: dict[str, Any]) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    # Only the parent decides about Ctrl-C until training has put its own handlers in place.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _exit_with(lambda: worker(args), spawned=True)


# ---- before torch is imported


def prepare() -> None:
    """Make this process die with its launcher, and report a failed import (torch, say) in one line.

    Call it before any import that takes long: the launcher may be killed meanwhile.
    """

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        known = error if isinstance(error, UserError) else addons.known_error(error)
        if known is None:
            sys.__excepthook__(kind, error, trace)
        else:
            sys.exit(errors.report(known))

    sys.excepthook = report
    for option, (kind, least) in LIMITS.items():
        if 0 <= resource.getrlimit(kind)[0] < least:  # -1: no limit
            text = f"`ulimit {option}` of this shell is too low to load torch: raise it"
            raise UserError(text, on_every_rank=True)
    die_with_launcher()


# ---- how the processes of a job start


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which the processes of a distributed run find each other."""
    add: Callable[..., Any] = parser.add_argument_group(
        "processes and nodes",
        "torchrun and torch.distributed.launch set these values: the first four options are\n"
        "ignored. By hand, run the same command on each node with its own --rank.",
    ).add_argument
    add("-n", "--world-size", type=positive, metavar="NODES", help="number of nodes; default 1")
    add("-nr", "--rank", type=count, metavar="R", help="rank of this node, 0 to NODES - 1")
    text = "processes on this node; default: one per GPU, or one without GPUs"
    add("-g", "--gpus", type=positive, metavar="N", help=text)
    add("--dist-url", metavar="tcp://IP:PORT", help="address of node 0")
    text = "default: nccl with GPUs, else gloo; without a GPU, nccl falls back to gloo"
    add("--dist-backend", choices=("nccl", "gloo"), help=text)
    text = "how long to wait for other nodes before giving up"
    add("--dist-timeout", type=seconds, default=300.0, metavar="SECONDS", help=text)
    add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    add("--sync-bn", action="store_true", help="batch-norm statistics over the batches of all GPUs")


def run(worker: Callable[[Any], int], args: Any) -> int:
    """Run ``worker(args)`` in each process of this node.

    Under torchrun or torch.distributed.launch this process is one of them. Otherwise it starts
    ``-g`` processes (default: one per GPU; one without GPUs) of node ``--rank`` of ``--world-size``
    nodes. WORLD_SIZE (nodes) and NODE_RANK in the environment are the defaults of ``--world-size``
    and ``--rank``; with several nodes, MASTER_ADDR and MASTER_PORT are those of ``--dist-url``.

    Returns: the exit code for this process. Raises: `UserError`.
    """
    if "LOCAL_RANK" in os.environ:
        _check_environment()
        return worker(args)
    import torch

    rank, nodes, (host, number) = _node(args)
    visible = torch.cuda.device_count()
    processes = args.gpus or max(visible, 1)
    if visible and processes > visible:
        raise UserError(f"-g {processes} is too large: GPUs of this node: {visible}")
    if nodes > 1 and (check := addons.preflight()):
        check.meet(rank, nodes, processes, (host, number), args.dist_timeout)
    job = {"WORLD_SIZE": nodes * processes, "LOCAL_WORLD_SIZE": processes}
    job |= {"MASTER_ADDR": host, "MASTER_PORT": number}
    ranks = [
        job | {"RANK": rank * processes + local, "LOCAL_RANK": local} for local in range(processes)
    ]
    return supervise(worker, args, ranks)


def _node(args: Any) -> tuple[int, int, tuple[str, int]]:
    """This node's rank, the number of nodes, and node 0's host and port. Raises: `UserError`."""
    nodes, rank = args.world_size, args.rank
    if nodes is None:
        nodes = from_environment("WORLD_SIZE", positive, 1)
    if rank is None:
        rank = from_environment("NODE_RANK", count, 0)
    if rank >= nodes:
        raise UserError(f"--rank {rank} is not one of the node ranks 0 to {nodes - 1}")
    if args.dist_url:
        return rank, nodes, parse_tcp_url(args.dist_url)
    if nodes == 1:  # MASTER_ADDR in the environment would be that of another job
        return rank, nodes, ("127.0.0.1", free_port())
    if master := os.environ.get("MASTER_ADDR"):
        return rank, nodes, (master, from_environment("MASTER_PORT", port, 29500))
    raise UserError(
        f"{nodes} nodes need the address of node 0: --dist-url tcp://IP:PORT, "
        "or MASTER_ADDR and MASTER_PORT in the environment"
    )


def parse_tcp_url(url: str, name: str = "--dist-url") -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``, the value of ``name``. Raises: `UserError`."""
    if words := [word for word in re.split("[/:]", url) if word in PLACEHOLDERS]:
        numbers = f"put numbers in place of {' and '.join(words)}, such as tcp://172.31.0.10:8888"
        raise UserError(f"{name} {url}: {numbers}")
    with contextlib.suppress(ValueError):  # of .port, if that is not a valid number
        parts = urlsplit(url)
        if parts.scheme == "tcp" and parts.hostname and parts.port and parts.path in ("", "/"):
            return parts.hostname, parts.port
    raise UserError(f"{name} {url} is not of the form tcp://HOST:PORT")


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_in_use(host: str, port: int, name: str = "port") -> UserError:
    """The error for a port in use; ``name`` is what the user can change.

    An elastic launcher chooses another port in its next attempt, so the exit code then allows a
    restart.
    """
    text = f"port {port} of {host} is taken by another program: choose another {name} on every node"
    return UserError(text, code=LOST_PEER if is_elastic() else BAD_INPUT)


def is_elastic() -> bool:
    """Whether a launcher restarts this job's processes when one of them fails."""
    by_torchrun = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
    return by_torchrun or "IMAGENET_ELASTIC" in os.environ  # set by elastic scripts


def _check_environment() -> None:
    """Raise `UserError` unless the environment has a valid place in a job for this process."""
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    values = {name: os.environ.get(name, "") for name in names}
    *numbers, address = values.values()
    if address and all(number.isdecimal() for number in numbers):
        rank, size, local, local_size, number = map(int, numbers)
        if local <= rank < size and local < local_size <= size and 0 < number < 65536:
            return
    raise UserError(
        f"{' '.join(f'{name}={value}' for name, value in values.items())} in the environment "
        "do not describe a process of a job: start with torchrun, or unset LOCAL_RANK",
        on_every_rank=True,
    )
