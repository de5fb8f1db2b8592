"""The file that lists the nodes of a job, and programs sent to them over ssh.

    # one ssh host per line: a name from ~/.ssh/config or an address, with or without a user
    node0
    ubuntu@172.31.0.11  slots=4  ip=10.0.0.11     # 4 processes; its address for the others

The order of the lines is the order of node ranks. ``ip`` matters only for the first, or, with
--elastic, for all: any may become the first. ``runs=PATH`` is for tensorboard.sh: where the runs
of that node are.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # what is imported from there needs nothing but Python

from utils.errors import UserError, end_with, go_on_without_reader  # noqa: E402, F401
from utils.launch.supervise import MARKER  # noqa: E402

# Reads the program; what follows on the same standard input is the program's own.
_BOOTSTRAP = (
    "import sys,json;p=json.loads(sys.stdin.buffer.readline());"
    "exec(compile(p['source'],p['name'],'exec'),{'__name__':'__main__','ARGUMENTS':p['arguments']})"
)
# A dead connection is noticed within 15 s; BatchMode: never ask for a password.
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3")
SSH_FAILED = 255  # exit code of ssh itself
_LINE = re.compile(
    r"(?P<address>[^-=/ ][^=/ ]*)"
    r"( slots=(?P<slots>[1-9]\d*)| ip=(?P<ip>\S+)| runs=(?P<runs>\S+))*"
)
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_HANDED_OVER = "IMAGENET_SUITE_VALUES"  # see `hide_values`
_values: dict[str, str] = {}


@dataclass(frozen=True)
class Host:
    """A line of the file: the name for ssh, processes to start (None: one per GPU), own address."""

    address: str
    slots: int | None = None
    ip: str | None = None
    runs: str | None = None

    @property
    def name(self) -> str:
        """The host without the user, for people to read."""
        return self.address.rpartition("@")[2]


def read(path: Path) -> list[Host]:
    """The hosts in a file. Raises: `UserError`, which names the line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"cannot read the hosts file {path}: {fault}") from None
    form, hosts = "[USER@]HOST [slots=N] [ip=ADDRESS] [runs=PATH]", []
    for number, line in enumerate(lines, 1):
        if words := line.split("#")[0].split():
            _add(hosts, f"{path}, line {number}", _LINE.fullmatch(" ".join(words)), line, form)
    if not hosts:
        raise UserError(f"{path} names no host: write one ssh host per line")
    return hosts


def from_list(text: str) -> list[Host]:
    """The hosts in a list as Horovod and MPI write it, such as a:2,b:2 (processes; without: 1).

    Raises: `UserError`.
    """
    hosts: list[Host] = []
    for word in text.split(","):
        slots = word.replace(":", " slots=", 1) if ":" in word else f"{word} slots=1"
        _add(hosts, f"-H {text}", _LINE.fullmatch(slots), word, "HOST or HOST:PROCESSES")
    return hosts


def _add(hosts: list[Host], where: str, found: re.Match | None, text: str, form: str) -> None:
    if not found:
        raise UserError(f"{where}: {text.strip()!r} is not of the form {form}")
    host = Host(**found.groupdict() | {"slots": found["slots"] and int(found["slots"])})
    if host.name in [other.name for other in hosts]:
        raise UserError(f"{where}: {host.name} is listed twice")
    hosts.append(host)


def remote_python(ssh: str, host: Host, mark: str = "") -> list[str]:
    """The command that runs a `program` on ``host``; ``ssh`` is ssh with the user's options.

    ``mark`` is the value of the environment variable by which clean-up recognises what is ours.
    """
    marked = f"env {shlex.quote(f'{MARKER}={mark}')} " if mark else ""
    line = f"{marked}python3 {shlex.join(bootstrap())}"
    return [*shlex.split(ssh), *_SSH_OPTIONS, host.address, line]


def bootstrap() -> list[str]:
    """The arguments with which Python reads a `program` and runs it."""
    return ["-u", "-c", _BOOTSTRAP]


def program(path: Path, arguments: dict) -> bytes:
    """A Python file and its arguments, as the first line of input for `remote_python`."""
    whole = {"source": path.read_text(), "name": path.name, "arguments": arguments}
    return json.dumps(whole).encode() + b"\n"


def ask_all(file: str, ssh: str, source: str, arguments: dict) -> list[tuple[Host, int, str]]:
    """Host, exit code and output of the program ``source`` on each host in ``file``, in order.

    A host that ssh cannot reach has the code `SSH_FAILED`, and this says so. Raises: `UserError`.
    """

    def one(host: Host) -> tuple[Host, int, str]:
        done = subprocess.run(
            remote_python(ssh, host),
            input=program(Path(source), arguments),
            stdout=subprocess.PIPE,
            check=False,
        )
        if done.returncode == SSH_FAILED:
            print(f"error: {ssh_failed(ssh, host)}", file=sys.stderr)
        return host, done.returncode, done.stdout.decode(errors="replace")

    listed = read(Path(file))
    with ThreadPoolExecutor(len(listed)) as pool:
        return list(pool.map(one, listed))


def default_directory() -> str:
    """Where this code is on the nodes: as here, relative to the home directory if it is in it."""
    home = Path(os.path.expanduser("~"))
    return str(ROOT.relative_to(home)) if ROOT.is_relative_to(home) else str(ROOT)


def add_options(parser: argparse.ArgumentParser, needed: bool = True) -> None:
    """The hosts file (which may be missing unless ``needed``), `add_node_options`, and ssh."""
    add = parser.add_argument
    text = "one ssh host per line, node rank 0 first"
    add("hosts", type=Path, nargs=None if needed else "?", metavar="HOSTS_FILE", help=text)
    add_node_options(parser)
    add("--ssh", default="ssh", metavar="COMMAND", help="ssh and its options, as 'ssh -F FILE'")


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Where the code is on the nodes, what it is run by there, and variables for it."""
    add = parser.add_argument
    add("--dir", default=default_directory(), help="where this code is on the nodes")
    add("--python", help="on the nodes; default: DIR/.venv/bin/python if it exists, else python3")
    text = "a variable for the environment on the nodes; NAME alone: with its value here"
    add("--env", type=_variable, action="append", metavar="NAME[=VALUE]", help=text)


def hide_values() -> None:
    """Take the values of --env off this program's command line, which `ps` shows to everybody.

    That needs a new start; they come along in the environment, which only this user can read.
    """
    values, shown = {}, []
    for word in sys.argv[1:]:
        given = word.startswith("--env=") or shown[-1:] == ["--env"]
        name, equals, value = word.removeprefix("--env=").partition("=")
        if given and equals and _NAME.fullmatch(name) and "--" not in shown:
            values[name] = value
            shown.append(word[: -len(value) - 1])
        else:
            shown.append(word)
    if values:
        program = [sys.executable, *sys.orig_argv[1 : -len(shown)], *shown]
        sys.stdout.flush()
        os.execve(sys.executable, program, os.environ | {_HANDED_OVER: json.dumps(values)})
    _values.update(json.loads(os.environ.pop(_HANDED_OVER, "{}")))


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not _NAME.fullmatch(name):  # the message must not show what may be a secret
        raise argparse.ArgumentTypeError(f"{name} is not the name of a variable")
    if not equals:
        value = _values.get(name, os.environ.get(name))
    if value is None:
        raise argparse.ArgumentTypeError(f"{name} has no value here: write {name}=VALUE")
    return name, value


def ssh_failed(ssh: str, host: Host) -> str:
    """The error message for a host that ssh cannot reach."""
    return f"ssh to {host.name} failed: does `{ssh} {host.address} true` work here?"


def note(text: str) -> None:
    """Print a line of the launcher itself."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """For shell scripts: a line per host with its address, its name and its ``runs``."""
    for host in read(Path(sys.argv[1])):
        print(host.address, host.name, host.runs or "")
    return 0


if __name__ == "__main__":
    end_with(main)
