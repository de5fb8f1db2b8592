"""Find and end this suite's processes of this user; see scripts/cleanup.sh for the command.

This suite's processes have IMAGENET_SUITE=KIND[:RUN] in their environment: launchers and scripts
set it for all processes that they start. The first process of a command typed by hand lacks it. The
command line then identifies it: a Python that runs imagenet_*.py, directly or through torchrun, in
a folder that holds this suite.

With HOSTS_FILE, this file is sent to each host, which needs only Python (3.7 or newer).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import time

# A command line, one word per line: Python and its options; optionally torchrun and its options;
# a training script.
_COMMAND = re.compile(
    r".*\n(?:-[WX]\n.*\n|-[^cm\n].*\n)*"
    r"(?P<torchrun>(?:-m\ntorch\.distributed\.(?:run|launch)|(?:.*/)?torchrun)\n(?:(?!.*\.py\n).*\n)*)?"
    r"(?P<script>(?:.*/)?imagenet_\w+\.py)\n"
)
_NAME = re.compile(r"^--name[=\n](.*)$", re.MULTILINE)
HELP = """End this user's processes of this suite; they first get time for a snapshot.

    bash scripts/cleanup.sh --dry-run              # list the runs here
    bash scripts/cleanup.sh HOSTS_FILE --name RUN  # end a run on all hosts

Without --name this ends all runs under this login, including a colleague's. On a terminal it lists
the runs and asks first. It does not touch any other program."""
ARGUMENTS = globals().get("ARGUMENTS")  # given when this file was sent over ssh


class Process:
    """A process, read from /proc. Raises: OSError if it has exited or is another user's."""

    def __init__(self, pid):
        folder = f"/proc/{pid}"
        if os.stat(folder).st_uid != os.getuid():
            raise PermissionError

        def content(name):
            with open(f"{folder}/{name}", "rb") as file:
                return file.read().decode(errors="replace")

        fields = content("stat").rpartition(")")[2].split()
        self.pid, self.state, self.parent = pid, fields[0], int(fields[1])
        words = content("cmdline").rstrip("\0").split("\0")
        pairs = [one.partition("=") for one in content("environ").split("\0")]
        environment = {name: value for name, _, value in pairs}
        lines = "".join(word.replace("\n", " ") + "\n" for word in words)
        self.text = f"{pid}{' (orphaned)' * (self.parent == 1)}: {' '.join(lines.split())[:120]}"
        self.folder = os.readlink(folder + "/cwd")
        self.python = os.path.basename(os.readlink(folder + "/exe")).startswith("python")
        command = _COMMAND.match(lines) if self.python else None
        # Whether it is torchrun itself, not one of its workers, which have a rank.
        self.agent = bool(command and command["torchrun"] and "LOCAL_RANK" not in environment)
        mark = environment.get("IMAGENET_SUITE")
        self.ours = mark is not None
        if command and not self.ours:
            script = os.path.join(os.readlink(folder + "/cwd"), command["script"])
            self.ours = os.path.exists(os.path.dirname(script) + "/utils/options.py")
        # The name of its run, if the mark or the command line has one.
        self.run = [(mark or "").partition(":")[2], *_NAME.findall(lines)][-1]

    def send(self, signum):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signum)


def find(run):
    """Return all living processes of this suite and user, except this one and its ancestors.

    With the name of a ``run``: only the processes of that run, and those that they have started.
    """
    everyone = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            everyone[int(entry)] = Process(int(entry))
    pid = os.getpid()
    while pid in everyone:
        pid = everyone.pop(pid).parent

    def belongs(one):
        while one is not None and not (one.ours and one.run == run):
            one = everyone.get(one.parent)
        return one is not None

    ours = [one for one in everyone.values() if one.ours and one.state not in "ZX"]
    return [one for one in ours if not run or belongs(one)]


def describe(processes):
    """Yield two lines for each run: its name, size and folder; its first process.

    Processes belong together if they have an ancestor in common, or the run's name and folder.
    """
    known, families, described = {one.pid: one for one in processes}, {}, {}
    for one in processes:
        first = one
        while first.parent in known:
            first = known[first.parent]
        families.setdefault(first.pid, []).append(one)
    for pid, members in families.items():
        names = ", ".join(sorted({one.run for one in members if one.run}))
        key = (names, known[pid].folder) if names else pid
        described.setdefault(key, (names, known[pid], []))[2].extend(members)
    for names, first, members in described.values():
        kind = f"the run {names}" if names else "a run without --name"
        number = f"{len(members)} process{'es' * (len(members) > 1)}"
        yield f"{kind}: {number} in {first.folder}\n    {first.text}"


def ask(processes):
    """Send SIGTERM to the processes that can write a snapshot, or pass the signal on.

    A torchrun with workers gets none: it would kill them 30 s later. ssh gets none either:
    launchers reach their nodes through it.
    """
    parents = {one.parent for one in processes}
    for one in processes:
        if one.python and not (one.agent and one.pid in parents):
            one.send(signal.SIGTERM)
    for one in processes:  # a suspended process must receive it, and notice that others end
        one.send(signal.SIGCONT)


def clean(grace, dry_run, run):
    """Find, list and end processes. Returns the exit code: 1 if one could not be ended."""
    left = find(run)
    if not left:
        print(f"nothing of {run or 'this suite'} is running")
    for lines in describe(left):
        print(f"{'would end' if dry_run else 'ending'} {lines}")
    if dry_run:
        return 0
    ask(left)
    for seconds in (grace, 2, 2, 2, 2, 2):  # ending processes may have started others
        deadline = time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            time.sleep(0.2)
            left = find(run)
        for one in left:
            print(f"killing {one.text}")
            one.send(signal.SIGKILL)
    for one in left:
        print(f"error: could not end {one.text}")
    return 1 if left else 0


def main():
    import hosts  # not at the top: this file is sent to nodes without that module

    parser = hosts.make_parser("cleanup.sh", HELP)
    add = parser.add_argument
    add("--name", metavar="RUN", help="end only this run (started with --name RUN)")
    add("--dry-run", action="store_true", help="only list the runs that would be ended")
    add("--yes", action="store_true", help="on a terminal, do not ask first")
    text = "time between SIGTERM and SIGKILL"
    add("--grace", type=hosts.non_negative, default=30.0, metavar="SECONDS", help=text)
    options = parser.parse_args()

    def act(dry_run):
        """Returns the exit code."""
        arguments = {"grace": options.grace, "dry_run": dry_run, "run": options.name}
        if not options.hosts:
            return clean(**arguments)
        answers = hosts.ask_all(options.hosts, options.ssh, __file__, arguments)
        for host, _, out in answers:
            for line in out.splitlines():
                print(f"[{host.name}] {line}")
        return max(2 if code == hosts.SSH_FAILED else code for _, code, _ in answers)

    if sys.stdin.isatty() and not (options.yes or options.dry_run):
        shown = next((one for one in (sys.stdout, sys.stderr) if one.isatty()), None)
        if shown is None:  # in pipes or files
            raise hosts.UserError("it cannot ask, as its output goes elsewhere: add --yes")
        with contextlib.redirect_stdout(io.StringIO()) as listed:
            code = act(True)
        print(listed.getvalue(), end="", file=shown)
        if "would end" not in listed.getvalue():
            return code
        print("End these runs? [y/N] ", end="", file=shown, flush=True)
        # Not input(): Ctrl-D would be a traceback.
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing was ended", file=shown)
            return 0
    return act(options.dry_run)


if __name__ == "__main__":
    if ARGUMENTS is not None:
        sys.exit(clean(**ARGUMENTS))
    import hosts

    hosts.exit_with(main)
