"""Finds and ends this suite's processes of this user; see scripts/cleanup.sh for the command.

What is ours carries IMAGENET_SUITE=KIND[:RUN] in its environment: launchers and scripts set it for
everything that they start. The first process of a command typed by hand has not inherited it (and
/proc shows the environment that a process started with); it is recognised by its command line: a
Python that runs, directly or through torchrun, imagenet_*.py of a folder that holds this suite.

With a file of hosts, this file is sent to each of them; it needs nothing but Python (3.7 or newer).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
import time

_SCRIPT = re.compile(r"imagenet_\w+\.py")
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "torchrun")
DEFAULT_PORT = 8888
ARGUMENTS = globals().get("ARGUMENTS")  # given when this file was sent over ssh


class Process:
    """A process of this user as /proc shows it. Raises: OSError if it is gone or another user's."""

    def __init__(self, pid):
        self.pid = pid
        folder = f"/proc/{pid}"
        if os.stat(folder).st_uid != os.getuid():
            raise PermissionError
        with open(folder + "/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        self.state, self.parent, self.started = fields[0], int(fields[1]), fields[19]
        with open(folder + "/cmdline", "rb") as file:
            self.words = file.read().decode(errors="replace").rstrip("\0").split("\0")
        with open(folder + "/environ", "rb") as file:
            variables = file.read().decode(errors="replace").split("\0")
        environment = dict(one.partition("=")[::2] for one in variables)
        self.mark, self.ranked = environment.get("IMAGENET_SUITE"), "LOCAL_RANK" in environment
        self.python = os.path.basename(os.readlink(folder + "/exe")).startswith("python")
        self.folder = os.readlink(folder + "/cwd")

    @property
    def ours(self):
        return self.mark is not None or self.script is not None

    @property
    def run(self):
        """The name of its run, where the mark or the command line has it."""
        name = (self.mark or "").partition(":")[2]
        for number, word in enumerate(self.words):
            if word == "--name":
                name = "".join(self.words[number + 1 : number + 2])
            elif word.startswith("--name="):
                name = word[len("--name=") :]
        return name

    @property
    def agent(self):
        """Whether it is torchrun itself."""
        return self.python and not self.ranked and _launcher_at(self.words) > 0

    @property
    def script(self):
        """The script of this suite that a Python command line runs, or None."""
        if not self.python:
            return None
        first = _launcher_at(self.words)
        if first:
            words = [word for word in self.words[first + 1 :] if word.endswith(".py")][:1]
        else:
            words = _program(self.words)
        for word in words:
            path = os.path.join(self.folder, word)
            beside = os.path.join(os.path.dirname(path), "utils", "options.py")
            if _SCRIPT.fullmatch(os.path.basename(word)) and os.path.exists(beside):
                return word
        return None

    def lives(self):
        with contextlib.suppress(OSError):
            now = Process(self.pid)
            return now.started == self.started and now.state not in "ZX"
        return False

    def send(self, signum):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signum)

    def __str__(self):
        orphan = " (orphaned)" if self.parent == 1 else ""
        line = " ".join(" ".join(self.words).split())
        return f"{self.pid}{orphan}: {line[:120]}{'...' if len(line) > 120 else ''}"


def _program(words):
    """The file that a Python command line runs, as a list; empty for -m, -c and no file."""
    for number, word in enumerate(words[1:], 1):
        if word in ("-W", "-X") or words[number - 1] in ("-W", "-X"):
            continue
        if not word.startswith("-"):
            return [word]
        if word.startswith(("-m", "-c")):
            break
    return []


def _launcher_at(words):
    """Where torchrun, or the module behind it, is on a Python command line; 0: nowhere."""
    for number, word in enumerate(words[1:4], 1):
        if word in _LAUNCHERS and words[number - 1] == "-m":
            return number
    program = _program(words)
    return words.index(program[0]) if program and os.path.basename(program[0]) == "torchrun" else 0


def find(run):
    """All living processes of this suite and user, apart from this one and those above it.

    With the name of a ``run``, only those of that run, and what they have started.
    """
    everyone = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                everyone[int(entry)] = Process(int(entry))
    pid = os.getpid()
    while pid in everyone:
        pid = everyone.pop(pid).parent

    def belongs(one):
        while one is not None and not (one.ours and one.run == run):
            one = everyone.get(one.parent)
        return one is not None

    found = [one for one in everyone.values() if one.ours and one.state not in "ZX"]
    return [one for one in found if not run or belongs(one)]


def listening(processes):
    """TCP ports on which these processes listen."""
    sockets = set()
    for one in processes:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{one.pid}/fd"):
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(f"/proc/{one.pid}/fd/{fd}"))
    ports = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{table}") as file:
            for line in file.readlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def is_free(port):
    """Whether a server could listen on ``port`` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen()
        except OSError:
            return False
    return True


def wait(processes, seconds):
    """Wait at most ``seconds`` for the processes to end. Returns those that still live."""
    deadline = time.monotonic() + seconds
    while True:
        left = [one for one in processes if one.lives()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def ask(processes):
    """Send SIGTERM to those that can write a snapshot, or pass the request on.

    Not to torchrun, which would kill its workers 30 s later, unless it has none; nor to ssh and
    the like, through which a launcher talks to its nodes.
    """
    parents = {one.parent for one in processes}
    for one in processes:
        if one.python and not (one.agent and one.pid in parents):
            one.send(signal.SIGTERM)
    for one in processes:  # what is stopped must receive it, and see the others end
        one.send(signal.SIGCONT)


def clean(grace, dry_run, run, say=print):
    """Find, list and end. Returns the exit code: 1 if something could not be ended."""
    found = find(run)
    ports = listening(found)
    if not found:
        say("nothing of this suite is running" if not run else f"nothing of {run} is running")
    for one in found:
        say(f"{'would end' if dry_run else 'ending'} {one}")
    if dry_run:
        return 0
    ask(found)
    stubborn = wait(found, grace)
    if found:
        say(f"{len(found) - len(stubborn)} of {len(found)} ended after SIGTERM")
    left = find(run)  # including what they have started since
    killed = set()
    deadline = time.monotonic() + 10
    while left and time.monotonic() < deadline:
        for one in left:
            one.send(signal.SIGKILL)
            killed.add(one.pid)
        wait(left, 2)
        left = find(run)
    if killed:
        say(f"{len(killed) - len(left)} more ended after SIGKILL")
    for one in left:
        say(f"error: could not end {one}")
    if not run:
        ports.add(int(os.environ.get("MASTER_PORT") or DEFAULT_PORT))
    for port in sorted(ports):
        say(f"port {port} is {'free' if is_free(port) else 'in use by another program'}")
    return 1 if left else 0


def main():
    import hosts  # only here, as this file is sent to nodes without it

    hosts.go_on_without_reader()
    parser = argparse.ArgumentParser(prog="cleanup.sh", allow_abbrev=False)
    add = parser.add_argument
    add("hosts", nargs="?", metavar="HOSTS_FILE", help="one ssh host per line")
    add("--name", default="", metavar="RUN", help="end only this run (started with --name RUN)")
    add("--dry-run", action="store_true", help="only list what would be ended")
    add("--yes", action="store_true", help="do not ask, on a terminal")
    text = "between SIGTERM and SIGKILL (30)"
    add("--grace", type=float, default=30.0, metavar="SECONDS", help=text)
    add("--ssh", default="ssh", metavar="COMMAND", help="ssh and its options (ssh)")
    options = parser.parse_args()

    def act(dry_run, say=print):
        """Returns the exit code."""
        arguments = {"grace": options.grace, "dry_run": dry_run, "run": options.name}
        if not options.hosts:
            return clean(say=say, **arguments)
        worst = 0
        for host, code, out in hosts.ask_all(options.hosts, options.ssh, __file__, arguments):
            for line in out.splitlines():
                say(f"[{host.name}] {line}")
            worst = max(worst, 2 if code == hosts.SSH_FAILED else code)
        return worst

    if sys.stdin.isatty() and sys.stdout.isatty() and not (options.yes or options.dry_run):
        listed = []
        code = act(True, listed.append)
        print("\n".join(listed))
        if not any("would end" in line for line in listed):
            return code
        if input("End these processes? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was ended")
            return 0
    return act(options.dry_run)


if __name__ == "__main__":
    if ARGUMENTS is not None:
        sys.exit(clean(**ARGUMENTS))
    import hosts

    hosts.end_with(main)
