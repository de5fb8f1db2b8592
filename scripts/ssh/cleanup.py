"""Find and end this suite's processes of this user; see scripts/cleanup.sh for the command.

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

# A command line, a word per line: Python and its options; perhaps torchrun and its options; a
# training script.
_TYPED = re.compile(
    r".*\n(?:-[WX]\n.*\n|-[^cm\n].*\n)*"
    r"(?P<torchrun>(?:-m\ntorch\.distributed\.(?:run|launch)|(?:.*/)?torchrun)\n(?:(?!.*\.py\n).*\n)*)?"
    r"(?P<script>(?:.*/)?imagenet_\w+\.py)\n"
)
_NAME = re.compile(r"^--name[=\n](.*)$", re.MULTILINE)
DEFAULT_PORT = 8888
HELP = """End this user's processes of this suite; they first get time for a snapshot.

    bash scripts/cleanup.sh --dry-run                # list what runs on this machine
    bash scripts/cleanup.sh HOSTS_FILE --name RUN    # end one run on all hosts of a file
"""
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
        lines = "".join(word.replace("\n", " ") + "\n" for word in self.words)
        self.python = os.path.basename(os.readlink(folder + "/exe")).startswith("python")
        typed = _TYPED.match(lines) if self.python else None
        # torchrun itself; its workers have a rank.
        self.agent = bool(typed and typed["torchrun"] and "LOCAL_RANK" not in environment)
        mark = environment.get("IMAGENET_SUITE")
        self.ours = mark is not None
        if typed and not self.ours:
            script = os.path.join(os.readlink(folder + "/cwd"), typed["script"])
            self.ours = os.path.exists(os.path.dirname(script) + "/utils/options.py")
        names = [(mark or "").partition(":")[2], *_NAME.findall(lines)]
        self.run = names[-1]  # the name of its run, where the mark or the command line has it

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
    sockets, ports = set(), set()
    for one in processes:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{one.pid}/fd"):
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(f"/proc/{one.pid}/fd/{fd}"))
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
        say(f"nothing of {run or 'this suite'} is running")
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
    parser = argparse.ArgumentParser(
        "cleanup.sh",
        None,
        HELP,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
