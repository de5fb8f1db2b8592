"""Data loading workers that are forked again if a fork hangs; needed before Python 3.12.

No option: all scripts with workers (such as imagenet_nd.py) use it. Interface: `CheckedWorker` is a
`utils.loaders.Worker`. Without this file, training waits forever if a fork hangs.

If one of torch's C++ threads enters Python during the fork, the child may wait forever for the
interpreter's lock (https://github.com/python/cpython/issues/112275).
"""

import multiprocessing.connection
import os

from utils.loaders import Worker

BEGIN_SECONDS = 10.0  # a fork takes milliseconds; repeating a slow one does no harm
TRIES = 5


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
