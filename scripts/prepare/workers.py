"""Work spread over processes, which end when the one that started them does, however it ends."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from utils.errors import UserError
from utils.launch.supervise import die_with_parent

Job = TypeVar("Job")
Answer = TypeVar("Answer")

JOBS_AT_ONCE = 8  # sent together, so that the parent can keep up with many processes


def _serve(parent: int, jobs: Connection, function: Callable[[Job], Answer]) -> None:
    """A worker process: answers lists of jobs until the parent closes the pipe."""
    die_with_parent(parent)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            try:
                answers, error = [function(job) for job in jobs.recv()], None
            except UserError as refusal:
                answers, error = [], str(refusal)
            jobs.send((answers, error))


@contextmanager
def _children_without_ctrl_c() -> Iterator[None]:
    """Processes started here never get SIGINT: a terminal sends it to all, one has to decide."""
    resource_tracker.ensure_running()  # now: its start, else along with a child's, unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spread(
    function: Callable[[Job], Answer], jobs: Iterator[Job], workers: int
) -> Iterator[Answer]:
    """Calls `function` for each job in one of several processes.

    Jobs are taken only as processes are free for them. Closing this iterator, or an exception
    such as Ctrl-C in it, lets the processes finish what they have in hand, and waits for them.

    Args:
        function: what to call; it must be picklable.
        jobs: its arguments.
        workers: the number of processes.

    Yields:
        what `function` returned, in no particular order.

    Raises:
        UserError: `function` raised it, or a process died.
    """
    # Spawned, not forked: numpy has started threads already. The new processes need none.
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        with _children_without_ctrl_c():
            for _ in range(workers):
                ours, theirs = context.Pipe()
                pipes.append(ours)
                arguments = (os.getpid(), theirs, function)
                processes.append(context.Process(target=_serve, args=arguments, daemon=True))
                processes[-1].start()
                theirs.close()
        yield from _answers(pipes, jobs)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            if process.pid:
                process.join()


def _answers(pipes: list[Connection], jobs: Iterator[Any]) -> Iterator[Any]:
    idle, busy = list(pipes), []
    while True:
        while idle and (some := list(islice(jobs, JOBS_AT_ONCE))):
            busy.append(idle.pop())
            with suppress(OSError):  # a process that died is found below
                busy[-1].send(some)
        if not busy:
            return
        for pipe in wait(busy):
            try:
                answers, error = pipe.recv()
            except (EOFError, OSError) as end:
                raise UserError(
                    "a worker process died, perhaps for lack of memory; run the same command "
                    "again, with fewer --workers, to finish the work"
                ) from end
            busy.remove(pipe)
            idle.append(pipe)
            if error:
                raise UserError(error)
            yield from answers
