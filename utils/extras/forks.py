"""Data loading workers whose fork may be repeated, before Python 3.12: one of them may hang.

No option: every script with workers uses it, imagenet_nd.py for one. Interface: `CheckedWorker` is
a `utils.loaders.Worker`. Without this file, a fork that hangs makes the training wait forever.

When one of torch's C++ threads is about to enter Python, the child may wait for the interpreter's
lock forever (https://github.com/python/cpython/issues/112275).
"""

import multiprocessing.connection
import os

from utils.loaders import Worker

BEGIN_SECONDS = 10.0  # a fork takes milliseconds, and repeating a slow one does no harm
TRIES = 5


class CheckedWorker(Worker):
    """A worker whose `start` returns when it runs."""

    def start(self) -> None:
        """Fork until the child reports that it runs. Raises: RuntimeError when none does."""
        task = self._target, self._args, self._kwargs  # start() forgets them
        for _ in range(TRIES):
            self._target, self._args, self._kwargs = task
            self._pipe = os.pipe()
            super().start()
            os.close(self._pipe[1])
            # Also at the end of the pipe: DataLoader finds out that the child has died.
            begun = multiprocessing.connection.wait([self._pipe[0]], BEGIN_SECONDS)
            os.close(self._pipe[0])
            if begun:
                return
            self.kill()
            self.join()
            self._popen = None
        raise RuntimeError(f"{TRIES} forks of a data loading worker hung")

    def run(self) -> None:
        """In the child: report that it runs, and do the task."""
        os.write(self._pipe[1], b".")
        for end in self._pipe:
            os.close(end)
        super().run()
