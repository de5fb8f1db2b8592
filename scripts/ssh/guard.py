"""Runs a script on a node for scripts/ssh/job.py, and leaves no process behind.

The launcher sends it over ssh's standard input, so a node needs only Python (3.7 or newer). Then a
line of JSON names the command to start. TERM asks the script to write a snapshot and exit. KILL
kills it at once. Before the guard exits, it kills all processes below it. It is a child subreaper,
so it adopts all orphans, and none escapes.

The guard prints heartbeats with the time of its own clock, and the launcher sends them back. The
launcher's silence counts from the time in the last heartbeat that came back, so a delayed answer
does not shorten it. Whatever fails, nothing runs here 25 s after the launcher's last answer:
`SILENCE_SECONDS`, `GRACE_WHEN_SILENT`, and 4 s to kill all processes on a busy machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time

HELLO, HEARTBEAT = "@@guard ", "@@heartbeat "  # begin lines that the launcher does not show
HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 15.0  # without an answer, the launcher counts as lost, and the script must stop
GRACE_WHEN_SILENT = 6.0  # time for its snapshot; then it is killed
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def kill_all_below(root):
    """Kill every living process below ``root``. Returns whether there was one."""
    children = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        stat = f"/proc/{entry}/stat"  # has a name that may be no text
        with contextlib.suppress(OSError, IndexError), open(stat, errors="replace") as file:
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
    """Reap all child processes that have exited. Returns the exit code of ``pid`` if it has."""
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
    """Print heartbeats for ever. It runs in a thread, because printing may block for a while."""
    with contextlib.suppress(OSError):
        while True:
            # A single write call, because the script writes to the same pipe.
            os.write(sys.stdout.fileno(), f"{HEARTBEAT}{time.monotonic():.2f}\n".encode())
            time.sleep(HEARTBEAT_SECONDS)


def follow(events):
    """Yield orders, each with the time in the last heartbeat that the launcher answered.

    Without an order, yield "" five times a second, or "lost" while the launcher is silent.
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
    """Start the job's command in its own session, with this process's output.

    Keep the result: when a Popen is deleted, it may reap its process, and the exit code is lost.
    """
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
    )


def wait_for(pid, orders, grace):
    """Wait until ``pid`` ends, or end it when an order says so. Returns its exit code.

    ``grace``: time for a snapshot, in seconds.
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
    """Return the facts for the launcher: this node's own address on the connection that the
    launcher opened, a port that was free a moment ago, and the time."""
    reached = os.environ.get("SSH_CONNECTION", "").split()
    address = reached[2] if len(reached) == 4 else None
    return {"address": address, "port": free_port(), "time": time.time()}


def free_port():
    """Return a port that is free, as utils/start/addresses.py does, which is not here."""
    first = 0
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    tries = [random.randrange(10000, first) for _ in range(100)] if first > 20000 else []
    for port in [*tries, 0]:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return probe.getsockname()[1]
    return 0


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
    if not order.startswith("{"):  # the launcher has given up or exited
        return 1
    job = json.loads(order)
    folder = job["folder"] = os.path.join(os.path.expanduser("~"), job["folder"])
    own = os.path.join(folder, ".venv", "bin", "python")
    python = os.path.expanduser(job["python"] or "") or (own if os.path.exists(own) else "python3")
    job["command"].insert(0, python)
    try:
        child = start(job)
    except OSError as error:
        text = "error: cannot start {} in {}: {}; is the code there (see --sync, --dir, --python)?"
        print(text.format(python, folder, error.strerror), file=sys.stderr)
        return 2
    try:
        return wait_for(child.pid, orders, job["grace"])
    finally:
        while kill_all_below(os.getpid()):
            collect(child.pid)
            time.sleep(0.05)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for the thread that still reads standard input
