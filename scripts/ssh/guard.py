"""Runs on a node, for scripts/ssh/launcher.py, and leaves nothing behind.

It is sent over ssh's standard input, so a node needs nothing but Python (3.7 or newer). Then a line
of JSON says what to start, and more lines follow: an empty one as a heartbeat, TERM to ask for a
snapshot and the end, KILL to end at once. When they stop coming (the launcher or the link is gone)
it asks for the end itself. It ends everything that was started below it before it ends: as a child
subreaper it adopts all orphans, and so knows what is its own.

A guard that is stopped (SIGSTOP) cannot do that, and counts as gone as well: a process beside it
wakes it up to end. If that is stopped, too, the launcher misses the guard's signs of life, and
sends this file again with the guard's process id.
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

HELLO = "@@guard "
ALIVE = b"\0"  # this node's sign of life, anywhere in its output; text never contains it
HEARTBEAT_SECONDS = 3.0
# A node that cannot hear the launcher must be empty 25 s later; up to 15 s may be a mere hiccup.
SILENCE_SECONDS = 15.0
GRACE_WHEN_LOST = 6.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
ARGUMENTS = globals().get("ARGUMENTS")


def look(pid):
    """State, parent and start time of a process, as /proc/PID/stat has them.

    Raises: OSError if it is gone.
    """
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], int(fields[1]), fields[19]


def descendants(root):
    """Process ids of all living processes below ``root``."""
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, parent, _ = look(entry)
                if state not in "ZX":
                    children.setdefault(parent, []).append(int(entry))
    found, new = [], [root]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


def send(pid, signum):
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def wake_to_end(guard, started):
    """Let a guard that is stopped end its training with a snapshot; after a time, kill all of it.

    ``started`` is its start time, as another process may have its id by now.
    """

    def lives():
        with contextlib.suppress(OSError):
            state, _, now = look(guard)
            return now == started and state not in "ZX"
        return False

    def below():
        return [pid for pid in descendants(guard) if pid != os.getpid()]

    if not lives():
        return
    send(guard, signal.SIGTERM)
    for pid in [guard, *below()]:
        send(pid, signal.SIGCONT)
    deadline = time.monotonic() + GRACE_WHEN_LOST
    while lives() and time.monotonic() < deadline:
        time.sleep(0.1)
    while lives() and below():
        for pid in below():
            send(pid, signal.SIGKILL)
        time.sleep(0.05)
    if lives():
        send(guard, signal.SIGKILL)


def watch(guard):
    """Wake the guard to end when it has been stopped for as long as the launcher may be silent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    started = look(guard)[2]
    stopped = 0
    while os.getppid() == guard:
        time.sleep(1)  # counted, not timed: this process may have been stopped as well
        stopped = stopped + 1 if look(guard)[0] in "tT" else 0
        if stopped > SILENCE_SECONDS:
            text = "guard: stopped for {:g} s: ending the training with a snapshot\n"
            data = text.format(SILENCE_SECONDS).encode()
            # Nobody may be reading: a thread can wait for that.
            threading.Thread(target=os.write, args=(2, data), daemon=True).start()
            wake_to_end(guard, started)


def start_watch():
    """Start `watch` in a process of its own; before there are threads."""
    guard = os.getpid()
    if os.fork() == 0:
        try:
            os.setsid()  # what stops the guard's group must not stop this
            watch(guard)
        finally:
            os._exit(0)


def beat():
    """Give signs of life; waits, without harm, while nobody reads them."""
    with contextlib.suppress(OSError):
        while True:
            os.write(1, ALIVE)
            time.sleep(HEARTBEAT_SECONDS)


def kill_everything():
    """SIGKILL everything below this process, until nothing is left."""
    while True:
        for pid in descendants(os.getpid()):
            send(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.05)


def listen(events):
    """Turn the launcher's lines into events, and the end of the input into "lost"."""
    with contextlib.suppress(OSError):
        for line in sys.stdin.buffer:
            events.put(line.decode().strip())
    events.put("lost")


def relay(source, target):
    """Pass output on; once nobody reads it any more, drop it, so that the writer lives on."""
    broken = False
    while True:
        data = os.read(source, 65536)
        if not data:
            return
        while data and not broken:
            try:
                data = data[os.write(target, data) :]
            except OSError:
                broken = True


def start(job):
    """Start the job's command in its own session; its output goes through this process."""
    libc, guard = ctypes.CDLL(None), os.getpid()

    def die_with_guard():
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it was killed before the call
            os._exit(1)

    child = subprocess.Popen(
        job["command"],
        cwd=job["folder"],
        env=dict(os.environ, **job["environment"]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=die_with_guard,  # noqa: PLW1509 (the threads come later)
    )
    pipes = ((child.stdout, 1), (child.stderr, 2))
    threads = [
        threading.Thread(target=relay, args=(p.fileno(), fd), daemon=True) for p, fd in pipes
    ]
    for thread in threads:
        thread.start()
    return child, threads


def wait_for(pid, events, grace):
    """Wait until ``pid`` ends, and end it if there is a reason to. Returns its exit code."""
    heard = time.monotonic()
    deadline = None
    while True:
        with contextlib.suppress(ChildProcessError):
            while True:  # orphans too
                ended, status = os.waitpid(-1, os.WNOHANG)
                if ended == pid:
                    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + (status & 127)
                if not ended:
                    break
        try:
            event = events.get(timeout=0.2)
        except queue.Empty:
            event = None
        now = time.monotonic()
        if event is not None:
            heard = now
        elif now - heard > SILENCE_SECONDS:
            event = "silence"
        if event in ("TERM", "lost", "silence") and deadline is None:
            send(pid, signal.SIGTERM)
            deadline = now + (GRACE_WHEN_LOST if event == "silence" else grace)
        if event == "KILL" or (deadline is not None and now > deadline):
            for below in descendants(os.getpid()):
                send(below, signal.SIGKILL)


def free_port():
    """A TCP port that was free a moment ago.

    As utils.launch.network has it, which this file cannot import on a node.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def receive(events):
    """The job; None if the launcher has given up or is gone."""
    while True:
        try:
            event = events.get(timeout=SILENCE_SECONDS)
        except queue.Empty:
            return None
        if event.startswith("{"):
            return json.loads(event)
        if event:
            return None


def main():
    if ARGUMENTS:
        wake_to_end(*ARGUMENTS["end"])
        return 0
    start_watch()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    events = queue.SimpleQueue()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: events.put("TERM"))
    # The address by which the launcher has reached this node, as the node itself knows it.
    reached = os.environ.get("SSH_CONNECTION", "").split()
    hello = {"address": reached[2] if len(reached) == 4 else None, "port": free_port()}
    hello["process"] = [os.getpid(), look(os.getpid())[2]]
    print(HELLO + json.dumps(hello), flush=True)
    threading.Thread(target=listen, args=(events,), daemon=True).start()
    threading.Thread(target=beat, daemon=True).start()
    job = receive(events)
    if job is None:
        return 1
    folder = job["folder"] = os.path.join(os.path.expanduser("~"), job["folder"])
    own = os.path.join(folder, ".venv", "bin", "python")
    python = job["python"] or (own if os.path.exists(own) else "python3")
    job["command"].insert(0, python)
    try:
        child, threads = start(job)
    except OSError as fault:
        text = "error: cannot start {} in {}: {}; is the code there (see --sync, --dir, --python)?"
        print(text.format(python, folder, fault.strerror), file=sys.stderr)
        return 2
    try:
        code = wait_for(child.pid, events, job["grace"])
    finally:
        kill_everything()
    for thread in threads:
        thread.join(2)
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # does not wait for the thread that still reads standard input
