"""Start the processes of a node, give each its rank, and end them together. Without torch.

Each process gets its place in the job from torchrun's environment variables: RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. `utils.start.world` joins the processes.

Why not torchrun's agent instead, by `torch.distributed.launcher.api.elastic_launch`? As tried with
torch 2.14, bad input and a killed process ended with exit code 1 and 34 to 36 lines. After SIGTERM,
processes that needed 40 s for a snapshot were gone after 2 s.
"""

import argparse
import contextlib
import io
import math
import multiprocessing
import multiprocessing.util
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, NoReturn, TextIO

from utils.start import errors, known_errors, preflight, signals, temporary
from utils.start.addresses import free_port, parse_tcp_url
from utils.start.errors import INTERRUPTED, LOST_PEER, UserError, printable
from utils.start.option_types import (
    Options,
    OptionsT,
    Parser,
    count,
    from_environment,
    port,
    positive,
    seconds,
)
from utils.start.orphans import LAUNCHER, die_with_launcher

MARKER = "IMAGENET_SUITE"  # environment variable by which scripts/cleanup.sh recognises us
GRACE_SECONDS = 15.0  # for the others to exit once one process has failed
REPORT_SECONDS = 30.0  # for other nodes to import torch and come to the pre-flight check
MOST_FILES = 2**20  # some programs go through all numbers up to the limit
# Options of ulimit, and the minimum below which torch aborts or hangs.
LIMITS = {"-n": (resource.RLIMIT_NOFILE, 64), "-v": (resource.RLIMIT_AS, 2**32)}


def run_main(main: Callable[[], int | None]) -> None:
    """Call ``main`` and end the process with its exit code, or with a `UserError`'s message."""
    os.environ.setdefault(MARKER, "training")
    with contextlib.suppress(OSError):  # a full disk is reported by the first write that matters
        temporary.make()
    _exit_with(main)


def _exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Call ``main`` and exit without leaving a child. Known errors become a one-line message."""
    errors.tolerate_broken_pipe()
    try:
        sys.exit(main())
    except signals.Stopped as stop:
        exit_now(signals.say(stop.signum))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as exception:
        error = exception if isinstance(exception, UserError) else known_errors.explain(exception)
        if error is None:
            raise
        code = errors.report(error)
        exit_now(code)
    finally:
        # The exit code is decided. A launcher that has noticed a failure on another node, but not
        # yet its cause here, may send SIGTERM while Python exits, which would replace the code.
        signals.start_is_over()
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        signals.kill_children()


def exit_now(code: int) -> NoReturn:
    """Exit after an error, without waiting for other threads.

    The process group still has threads: a normal exit can abort in C++, with another code.
    """
    signals.start_is_over()
    signals.kill_children()
    with contextlib.redirect_stderr(io.StringIO()):  # this may fail for the same reason
        # As at the end of any child, this frees semaphores. There is no public name for it.
        multiprocessing.util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]
    errors.exit_at_once(code)


def supervise(
    worker: Callable[[OptionsT], int], args: OptionsT, environments: list[dict[str, Any]]
) -> int:
    """Run ``worker(args)`` in a process for each of ``environments``; return the exit code.

    SIGTERM, SIGHUP and the first SIGINT are passed on as SIGTERM, so that training can write a
    snapshot; a second SIGINT kills. When one process fails, the others get `GRACE_SECONDS` to exit
    (they often wait for the dead one) and are then killed.
    """
    # torch.distributed.elastic's start_processes was tried and rejected. After a signal, its
    # close() does not return the exit codes (75: a snapshot was written), and kills at a time
    # limit. When one process fails, it sends SIGTERM to the others at once, so that they cannot
    # report the error that they share.
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=_child, args=(worker, args)) for _ in environments]
    signalled, interrupts = False, 0

    def pass_on(signum: int, frame: Any) -> None:
        nonlocal signalled, interrupts
        signalled = True
        interrupts += signum == signal.SIGINT
        if interrupts > 1:  # a third one, while Python ends, would replace the exit code
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        for child in children:
            # It may have exited since, or this may interrupt the call that notices its exit.
            if child.pid and child.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL if interrupts > 1 else signal.SIGTERM)

    # Slurm sends SIGUSR1 to every process, so scripts/train.sbatch starts this one with SIGUSR1
    # ignored. The children inherit that, and survive the signal until they have a handler of their
    # own. The handlers are never restored: a late signal changes nothing.
    signals.handle(pass_on)
    signals.start_is_over()
    before = dict(os.environ)
    os.environ[LAUNCHER] = str(os.getpid())  # the children inherit it
    with contextlib.suppress(OSError):
        os.environ[errors.REPORTED] = f"{multiprocessing.util.get_temp_dir()}/reported"
    try:
        signals.start_resource_tracker()
        # A child begins with the signals blocked, until it can answer them.
        with signals.blocked():
            for child, place in zip(children, environments, strict=True):
                os.environ.update({name: str(value) for name, value in place.items()})
                child.start()
        if signalled:  # perhaps before all of them were there
            pass_on(signal.SIGTERM, None)
        code = _wait_for(children)
    finally:
        for child in children:
            if child.pid and child.is_alive():
                child.kill()
        os.environ.clear()
        os.environ.update(before)
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
        frozen = [child for child in running if any(codes) and signals.is_stopped(child.pid)]
        for child in list(running) if is_late else frozen:
            child.kill()  # its exit code means nothing
            child.join()
            running.remove(child)
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


def _child(worker: Callable[[OptionsT], int], args: OptionsT) -> None:
    def main() -> int:
        signals.stop_during_start(is_child=True)  # here: a signal may already be waiting
        return worker(args)

    _exit_with(main)


# ---- before torch is imported


def prepare(training: str = "") -> None:
    """Set up this process: call it before any import that takes long, such as torch's.

    The process then ends with its launcher, which may be killed meanwhile; may open as many files
    as the hard limit allows; reports a failed import (torch, say) in one line; and ends without a
    traceback after Ctrl-C. ``training``: the ``__name__`` of a script that trains. If it is
    started, and not only imported, a signal ends it with one line until training handles signals.
    """

    def report(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, signals.Stopped):
            exit_now(signals.say(error.signum))
        if isinstance(error, KeyboardInterrupt):  # while a script that does not train imports torch
            sys.exit(128 + signal.SIGINT)
        known = error if isinstance(error, UserError) else known_errors.explain(error)
        if known is None:
            sys.__excepthook__(kind, error, trace)
        else:
            sys.exit(errors.report(known))

    sys.excepthook = report
    _replace_closed_streams()
    _raise_file_limit()
    for option, (kind, least) in LIMITS.items():
        if 0 <= resource.getrlimit(kind)[0] < least:  # -1: no limit
            text = f"`ulimit {option}` of this shell is too low to load torch: raise it"
            raise UserError(text, on_every_rank=True)
    # OpenMP threads that spin at barriers slow down loader workers, and all other programs, on the
    # same cores: steps took 2 to 5 times as long. OpenMP reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    _replace_missing_home()
    if training in ("__main__", "__mp_main__"):
        signals.stop_during_start(is_child=training == "__mp_main__")
    die_with_launcher()


def print_first_line(file: TextIO | None = None) -> None:
    """Print what is being started, in one process of the job, unless torch has been imported.

    ``file``: stdout by default; stderr, if the output is a page.
    """
    if "torch" in sys.modules:
        return
    place = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    under_launcher = "LOCAL_RANK" in os.environ
    if not under_launcher or place[0] == "0":
        what = f"starting {os.path.basename(sys.argv[0])}"
        if under_launcher and place[1] != "1":
            what += f" in {place[1]} processes"
        print(printable(f"{what}: loading PyTorch"), file=file, flush=True)


def _replace_closed_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed, as after ``>&- 2>&-``.

    Python has None for it; and the next file, a snapshot perhaps, would get its number, so that
    what a library prints would be written into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(handle, True)
            setattr(sys, name, open(handle, mode, closefd=False))


def _raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one: each loader worker needs several, and
    there may be thousands of tar files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _replace_missing_home() -> None:
    """Give a user without a home directory a temporary one, as in ``docker run --user 1234``.

    Packages would otherwise make a folder named ``~`` in the working directory for their caches.
    """
    if os.path.expanduser("~") == "~":
        folder = os.path.join(tempfile.gettempdir(), f"home_{os.getuid()}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if os.path.islink(folder) or os.stat(folder).st_uid != os.getuid():
            folder = tempfile.mkdtemp(prefix="home_")  # another user has taken the name
        os.environ["HOME"] = folder
        os.environ.setdefault("USER", f"uid{os.getuid()}")  # torch.compile asks for a name


# ---- how the processes of a job start


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which the processes of a distributed run find each other."""
    add: Callable[..., Any] = parser.add_argument_group(
        "processes and nodes",
        "torchrun and torch.distributed.launch set these values: the first four\n"
        "options are ignored. By hand, run the same command on each node with its\n"
        "own --node-rank.",
    ).add_argument
    text = "number of nodes; default: 1"
    add("-n", "--nodes", "--world-size", type=positive, metavar="N", help=text)
    text = "rank of this node, 0 to nodes - 1; default: 0"
    add("-nr", "--node-rank", "--rank", type=count, metavar="R", help=text)
    text = "processes on this node; default: one per GPU, or one without GPUs"
    add("-g", "--gpus", type=positive, metavar="N", help=text)
    add("--dist-url", metavar="tcp://IP:PORT", help="address of node 0")
    text = "default: nccl with GPUs, else gloo; without a GPU, nccl falls back to gloo"
    add("--dist-backend", choices=("nccl", "gloo"), help=text)
    text = "how long to wait for other nodes before giving up"
    add("--dist-timeout", type=seconds, default=300.0, metavar="SECONDS", help=text)
    add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    add("--sync-bn", action="store_true", help="batch-norm statistics over the batches of all GPUs")


def run(worker: Callable[[OptionsT], int], args: OptionsT) -> int:
    """Run ``worker(args)`` in each process of this node.

    Under torchrun or torch.distributed.launch this process is one of them. Otherwise it starts
    ``-g`` processes (default: one per GPU; one without GPUs) of node ``--node-rank`` of ``--nodes``
    nodes. WORLD_SIZE (nodes) and NODE_RANK in the environment (or RANK, as Kubernetes operators set
    it) are the defaults of ``--nodes`` and ``--node-rank``; with several nodes, MASTER_ADDR and
    MASTER_PORT are those of ``--dist-url``.

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
        error = UserError(f"-g {processes} is too large: GPUs of this node: {visible}")
        end_all_nodes(error)
        raise error
    if nodes > 1:
        preflight.meet(rank, nodes, processes, (host, number), args.dist_timeout)
    else:
        note_copies()
    job = {"WORLD_SIZE": nodes * processes, "LOCAL_WORLD_SIZE": processes}
    job |= {"MASTER_ADDR": host, "MASTER_PORT": number}
    ranks = [
        job | {"RANK": rank * processes + local, "LOCAL_RANK": local} for local in range(processes)
    ]
    if processes > 1:
        print(f"starting {processes} processes on this node", flush=True)
    return supervise(worker, args, ranks)


def end_all_nodes(error: UserError) -> None:
    """Before the pre-flight check: report ``error`` of this node alone, such as a missing file, to
    the nodes that wait for it, too, and exit. Return if there are no other nodes."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add_options(parser)
    args: Any = parser.parse_known_args()[0]
    try:
        rank, nodes, master = _node(args)
    except UserError:
        return
    if nodes > 1:
        code = errors.report(error)
        print(f"reporting this to the other nodes, for at most {REPORT_SECONDS:g} s", flush=True)
        with contextlib.suppress(UserError, OSError):
            preflight.meet(rank, nodes, 1, master, REPORT_SECONDS, error)
        exit_now(code)


def note_copies() -> None:
    """Say so if srun has started several trainings, each of which is on its own."""
    if os.environ.get("SLURM_TASK_PID") == str(os.getpid()):  # not a shell of `srun --pty`
        copies = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
        if copies > 1 and os.environ.get("SLURM_PROCID") == "0":
            text = f"note: srun has started {copies} copies of this, and each trains on its own; "
            print(text + "`sbatch scripts/train.sbatch` makes one training of them", flush=True)


def _node(args: Options) -> tuple[int, int, tuple[str, int]]:
    """This node's rank, the number of nodes, and node 0's host and port. Raises: `UserError`."""
    nodes, rank, given = args.nodes, args.node_rank, f"--node-rank {args.node_rank}"
    if nodes is None:
        nodes = from_environment("WORLD_SIZE", positive, 1)
    if rank is None:
        name = "NODE_RANK" if "NODE_RANK" in os.environ or nodes == 1 else "RANK"
        rank = from_environment(name, count, 0)
        given = f"{name}={rank} in the environment"
    if rank >= nodes:
        raise UserError(f"{given} is not one of the node ranks 0 to {nodes - 1} (--nodes {nodes})")
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
