"""Loader workers that are known to have begun, and that signals to stop never reach.

Ctrl-C and a scheduler's SIGTERM go to the whole process group. Only the training process decides
what to do, and it needs its workers until the snapshot is written: they have these signals blocked
from the fork on. To ignore them would leave a gap after the fork, and DataLoader gives its workers
a handler of SIGTERM that ends them.

A worker whose fork got stuck is forked again. A thread of C++ code that enters Python, and torch
has such threads, holds a lock of the interpreter for an instant. When another thread forks then,
the child waits for that lock forever, before any code of its own, and DataLoader waits for the
child: https://github.com/python/cpython/issues/112275, fixed in Python 3.12 and in late releases of
3.9 to 3.11. tests/trials/kill_runs.py met it, as evaluation's workers were forked beside the
threads of gloo.
"""

import multiprocessing.connection
import os
import signal
from multiprocessing.context import ForkContext, ForkProcess

from utils.launch import supervise

BEGIN_SECONDS = 10.0  # a fork takes milliseconds; a slow one that is done again costs nothing else
TRIES = 5
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # Slurm sends the last one


class Worker(ForkProcess):
    """A forked process with `STOPS` blocked; `start` returns when it runs."""

    def start(self) -> None:
        """Fork until the child says that it runs. Raises: RuntimeError when none ever does."""
        task = self._target, self._args, self._kwargs  # start() forgets them
        for _ in range(TRIES):
            self._target, self._args, self._kwargs = task
            self._pipe = os.pipe()
            self._trainer = os.getpid()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
            try:
                super().start()  # the child keeps the mask
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(self._pipe[1])
            # The end of the pipe counts as well: who has died is DataLoader's to find.
            begun = multiprocessing.connection.wait([self._pipe[0]], BEGIN_SECONDS)
            os.close(self._pipe[0])
            if begun:
                # At its exit, multiprocessing ends the workers of an iterator that is still held
                # by a SIGTERM, which never reaches them, and would then wait for them forever.
                self._popen.terminate = self._popen.kill
                return
            self.kill()
            self.join()
            self._popen = None
        raise RuntimeError(f"none of {TRIES} forks of a data loading worker came to run")

    def run(self) -> None:
        """In the child: end with the training process, say that it runs, and do the task."""
        supervise.die_with_parent(self._trainer)
        os.write(self._pipe[1], b".")
        for end in self._pipe:
            os.close(end)
        super().run()


class WorkerContext(ForkContext):
    """For ``DataLoader(multiprocessing_context=...)``."""

    Process = Worker
