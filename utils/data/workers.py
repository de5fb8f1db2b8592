"""The processes of data loading: they end with the training, and never before it.

The signals that stop a run are blocked in workers. Ctrl-C and a scheduler's SIGTERM go to the whole
process group, but the training process needs its workers until the snapshot is written. If workers
ignored the signals instead, there would be a gap after the fork, and DataLoader installs a handler
of SIGTERM.

Before Python 3.12, `CheckedWorker` forks again if a fork hangs: if one of torch's C++ threads
enters Python during the fork, the child may wait forever for the interpreter's lock
(https://github.com/python/cpython/issues/112275).
"""

import multiprocessing.connection
import os
import sys
from multiprocessing.context import ForkContext, ForkProcess
from typing import ClassVar

from utils.start import signals
from utils.start.orphans import die_with_parent

BEGIN_SECONDS = 10.0  # a fork takes milliseconds; repeating a slow one does no harm
TRIES = 5


class Worker(ForkProcess):
    """A forked process with `signals.STOPS` blocked, which exits with the training process."""

    def start(self) -> None:
        """Fork with the signals blocked; the child inherits the mask."""
        self._trainer = os.getpid()
        with signals.blocked():
            super().start()
        # At exit, multiprocessing stops the workers of a live iterator by SIGTERM, which is
        # blocked, and would then wait for them forever. Nothing public changes how it stops them.
        self._popen.terminate = self._popen.kill  # pyright: ignore[reportAttributeAccessIssue]

    def run(self) -> None:
        """Runs in the child."""
        die_with_parent(self._trainer)
        super().run()


class CheckedWorker(Worker):
    """A worker whose `start` returns only when its process runs."""

    def start(self) -> None:
        """Fork until a child reports that it runs. Raises: RuntimeError if none does."""
        task = self._target, self._args, self._kwargs  # start() deletes these attributes
        for _ in range(TRIES):
            self._target, self._args, self._kwargs = task
            self._pipe = os.pipe()
            super().start()
            os.close(self._pipe[1])
            # The pipe also becomes readable if the child dies; DataLoader then reports that.
            begun = multiprocessing.connection.wait([self._pipe[0]], BEGIN_SECONDS)
            os.close(self._pipe[0])
            if begun:
                return
            self.kill()
            self.join()
            self._popen = None
        raise RuntimeError(f"{TRIES} forks of a data loading worker hung")

    def run(self) -> None:
        """In the child process: report that it runs, then do the work."""
        os.write(self._pipe[1], b".")
        for end in self._pipe:
            os.close(end)
        super().run()


class WorkerContext(ForkContext):
    """For ``DataLoader(multiprocessing_context=...)``."""

    # The name that DataLoader calls.
    Process: ClassVar[type[ForkProcess]] = Worker if sys.version_info >= (3, 12) else CheckedWorker
