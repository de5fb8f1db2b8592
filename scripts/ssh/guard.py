"""Runs a script on a node for scripts/ssh/job.py, and leaves no process behind.

It is sent over ssh's standard input, so a node needs nothing but Python (3.7 or newer). Then a line
of JSON says what to start. TERM asks for a snapshot and the end, KILL ends at once. Before it exits
it ends everything that was started below it: as a child subreaper it adopts all orphans, and so
knows its own processes.

What runs here holds a lease on the run directory. The guard prints a heartbeat with the time of its
own clock, and the launcher sends it back: the lease counts from when an answered heartbeat was
printed. So an answer that was held up on its way extends nothing. Whatever fails, the lease ends at
the latest `LEASE_SECONDS` after the launcher's last answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

HELLO, HEARTBEAT = "@@guard ", "@@heartbeat "  # lines for the launcher, not to be shown
HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 15.0  # without an answer: the launcher or the link is gone, and the script ends
GRACE_WHEN_SILENT = 6.0  # for its snapshot; then it is killed
LEASE_SECONDS = 25.0  # the sum of both, and 4 s to kill everything on a busy machine
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def kill_all_below(root):
    """SIGKILL every living process below ``root``. Returns whether there was one."""
    children = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{entry}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(entry))
    below, new = [], [root]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        below += new
    for pid in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return bool(below)


def collect(pid):
    """Collect what has ended, orphans too. Returns the exit code of ``pid`` if it is among them."""
    with contextlib.suppress(ChildProcessError):
        ended = True
        while ended:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == pid:
                return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + (status & 127)
    return None


def listen(events):
    """Turn the launcher's lines into events, and the end of the input into "lost"."""
    with contextlib.suppress(OSError):
        for line in sys.stdin.buffer:
            events.put(line.decode().strip())
    events.put("lost")


def send_heartbeats():
    """For ever. In a thread: the launcher's output may be held up for a while."""
    with contextlib.suppress(OSError):
        while True:
            # One call, as the script writes to the same pipe.
            os.write(sys.stdout.fileno(), f"{HEARTBEAT}{time.monotonic():.2f}\n".encode())
            time.sleep(HEARTBEAT_SECONDS)


def follow(events):
    """Yield orders, each with the time when the last answered heartbeat was printed.

    Without an order yield "" five times a second, or "lost" while the launcher is silent.
    """
    heard = time.monotonic()
    while True:
        event = ""
        with contextlib.suppress(queue.Empty):
            event = events.get(timeout=0.2)
        if event.startswith(HEARTBEAT):
            heard = float(event[len(HEARTBEAT) :])
        is_silent = time.monotonic() > heard + SILENCE_SECONDS
        if is_silent and event != "KILL" and not event.startswith("{"):
            event = "lost"
        yield event, heard


def start(job):
    """Start the job's command in its own session, with this process's output. Returns its id."""
    libc, guard = ctypes.CDLL(None), os.getpid()

    def die_with_guard():
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it died before the call
            os._exit(1)

    return subprocess.Popen(
        job["command"],
        cwd=job["folder"],
        env=dict(os.environ, **job["environment"]),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_guard,  # noqa: PLW1509 (it calls nothing that may hold a lock)
    ).pid


def wait_for(pid, orders, grace):
    """Wait until ``pid`` ends, and end it on an order. Returns its exit code.

    ``grace`` is the time for a snapshot, in seconds.
    """
    asked, deadline, code = False, float("inf"), None
    while code is None:
        order, heard = next(orders)
        now = time.monotonic()
        if order in ("lost", "TERM") and not asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            asked, deadline = True, now + grace
        if order == "lost":
            deadline = min(deadline, heard + SILENCE_SECONDS + GRACE_WHEN_SILENT)
        if order == "KILL" or now > deadline:
            kill_all_below(os.getpid())
        code = collect(pid)
    return code


def hello():
    """What the launcher has to know: the address by which it has reached this node, as the node
    itself knows it, and a port that was free a moment ago."""
    reached = os.environ.get("SSH_CONNECTION", "").split()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return {"address": reached[2] if len(reached) == 4 else None, "port": port}


def main():
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    events = queue.SimpleQueue()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: events.put("TERM"))
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    print(HELLO + json.dumps(hello()), flush=True)
    threading.Thread(target=listen, args=(events,), daemon=True).start()
    threading.Thread(target=send_heartbeats, daemon=True).start()
    orders = follow(events)
    order = next(order for order, _ in orders if order and not order.startswith(HEARTBEAT))
    if not order.startswith("{"):  # the launcher has given up, or is gone
        return 1
    job = json.loads(order)
    folder = job["folder"] = os.path.join(os.path.expanduser("~"), job["folder"])
    own = os.path.join(folder, ".venv", "bin", "python")
    python = job["python"] or (own if os.path.exists(own) else "python3")
    job["command"].insert(0, python)
    try:
        child = start(job)
    except OSError as error:
        text = "error: cannot start {} in {}: {}; is the code there (see --sync, --dir, --python)?"
        print(text.format(python, folder, error.strerror), file=sys.stderr)
        return 2
    try:
        return wait_for(child, orders, job["grace"])
    finally:
        while kill_all_below(os.getpid()):
            collect(child)
            time.sleep(0.05)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # does not wait for the thread that still reads standard input
