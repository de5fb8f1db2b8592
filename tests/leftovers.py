"""Tests that are killed leave no process behind: another process waits for their end.

Each process that the tests start inherits an environment variable, by which it is found.
"""

import os
import subprocess
import sys
import uuid

MARK = "STARTED_BY_TESTS"

# Wait until the tests end, however they do; then kill, until nobody is there who could start more.
_REAPER = """
import os, signal, sys, time
mark, parent = sys.argv[1].encode(), int(sys.argv[2])
while os.getppid() == parent:
    time.sleep(1)
quiet = 0
while quiet < 3:
    quiet += 1
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read().split(b"\\0"):
                    os.kill(int(pid), signal.SIGKILL)
                    quiet = 0
        except OSError:
            pass
    time.sleep(0.1)
"""


def kill_when_this_process_ends() -> subprocess.Popen:
    """Mark what this process starts from now on, and start the process that kills it at the end."""
    plain = {name: value for name, value in os.environ.items() if name != MARK}
    mark = f"{MARK}={uuid.uuid4().hex}"
    os.environ[MARK] = mark.partition("=")[2]
    command = [sys.executable, "-S", "-c", _REAPER, mark, str(os.getpid())]
    none = subprocess.DEVNULL  # nobody who reads our output should wait for it
    return subprocess.Popen(
        command, stdin=none, stdout=none, stderr=none, env=plain, start_new_session=True
    )
