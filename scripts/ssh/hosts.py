"""The file that lists the nodes of a job, and programs sent to them over ssh.

    # one ssh host per line: a name from ~/.ssh/config or an address, with or without a user
    node0
    ubuntu@172.31.0.11  slots=4  ip=10.0.0.11     # 4 processes; its address for the others

The order of the lines is the order of node ranks. ``ip`` matters for the first node; with --elastic
any node may become the first. ``runs=PATH`` is for tensorboard.sh: the folder of that node's runs.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # what is imported from there needs nothing but Python

from utils.errors import UserError, exit_with
from utils.launch import MARKER
from utils.option_types import Formatter, non_negative

# Reads the program; what follows on the same standard input is the program's own.
BOOTSTRAP = (
    "import sys,json;p=json.loads(sys.stdin.buffer.readline());"
    "exec(compile(p['source'],p['name'],'exec'),{'__name__':'__main__','ARGUMENTS':p['arguments']})"
)
# A dead connection is noticed within 15 s; BatchMode: never ask for a password.
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=3", "-o", "ServerAliveCountMax=3")
SSH_FAILED = 255  # exit code of ssh itself
_FORM = "[USER@]HOST [slots=N] [ip=ADDRESS] [runs=PATH]"
_LINE = re.compile(
    r"(?P<address>[^-=/ ][^=/ ]*)"
    r"( slots=(?P<slots>[1-9]\d*)| ip=(?P<ip>\S+)| runs=(?P<runs>\S+))*"
)


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
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the hosts file {path}: {error}") from None
    texts = [" ".join(line.split("#")[0].split()) for line in lines]
    named = [(f"{path}, line {n}", text) for n, text in enumerate(texts, 1) if text]
    if not named:
        raise UserError(f"{path} names no host: write one ssh host per line")
    return _parse(named)


def from_list(text: str) -> list[Host]:
    """The hosts in a list as Horovod and MPI write it, such as a:2,b:2 (processes; without: 1).

    Raises: `UserError`.
    """
    full = [word if ":" in word else f"{word}:1" for word in text.split(",")]
    return _parse([(f"-H {text}", word.replace(":", " slots=", 1)) for word in full])


def _parse(named: list[tuple[str, str]]) -> list[Host]:
    """The hosts in pairs of a place and the text there."""
    hosts: dict[str, Host] = {}
    for place, text in named:
        match = _LINE.fullmatch(text)
        if not (match and text.isprintable()):  # ssh takes no NUL
            raise UserError(f"{place}: {text!r} is not of the form {_FORM}")
        host = Host(**match.groupdict() | {"slots": match["slots"] and int(match["slots"])})
        if host.name in hosts:
            raise UserError(f"{place}: {host.name} is listed twice")
        hosts[host.name] = host
    return list(hosts.values())


def remote_python(ssh: str, host: Host, mark: str = "") -> list[str]:
    """The command that runs a `program` on ``host``; ``ssh`` is ssh with the user's options.

    ``mark`` is the value of the environment variable by which clean-up recognises what is ours.
    Raises: `UserError` without an ssh here.
    """
    words = shlex.split(ssh)
    if not words or not shutil.which(words[0]):
        raise UserError(f"there is no program {ssh!r} here: install openssh-client, or see --ssh")
    marked = f"env {shlex.quote(f'{MARKER}={mark}')} " if mark else ""
    line = f"{marked}python3 -u -c {shlex.quote(BOOTSTRAP)}"
    return [*words, *_SSH_OPTIONS, host.address, line]


def program(file: str, arguments: dict) -> bytes:
    """A Python file and its arguments, as the first line of input for `BOOTSTRAP`."""
    whole = {"source": Path(file).read_text(), "name": Path(file).name, "arguments": arguments}
    return json.dumps(whole).encode() + b"\n"


def ask_all(file: Path, ssh: str, source: str, arguments: dict) -> list[tuple[Host, int, str]]:
    """Host, exit code and output of the program ``source`` on each host in ``file``, in order.

    A host that ssh cannot reach has the code `SSH_FAILED`, and this says so. Raises: `UserError`.
    """
    listed, text = read(file), program(source, arguments)

    def ask(host: Host) -> tuple[Host, int, str]:
        command = remote_python(ssh, host)
        done = subprocess.run(command, input=text, stdout=subprocess.PIPE, check=False)
        if done.returncode == SSH_FAILED:
            print(f"error: {ssh_failed(ssh, host)}", file=sys.stderr)
        return host, done.returncode, done.stdout.decode(errors="replace")

    with ThreadPoolExecutor(len(listed)) as pool:
        return list(pool.map(ask, listed))


def ssh_failed(ssh: str, host: Host) -> str:
    """The error message for a host that ssh cannot reach."""
    return f"ssh to {host.name} failed: does `{ssh} {host.address} python3 -V` work here?"


def make_parser(prog: str, text: str, usage: str | None = None) -> argparse.ArgumentParser:
    """A command line with a hosts file, and ssh."""
    parser = argparse.ArgumentParser(
        prog, usage, text, allow_abbrev=False, formatter_class=Formatter
    )
    add = parser.add_argument
    text = "one ssh host per line, node rank 0 first"
    add("hosts", type=Path, nargs="?", metavar="HOSTS_FILE", help=text)
    add("--ssh", default="ssh", metavar="COMMAND", help="ssh and its options, as 'ssh -F FILE'")
    return parser


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Options about the nodes: folder of the code, Python, environment, time to stop."""
    add, home = parser.add_argument, Path.home()
    # As here, relative to the home directory if it is in it.
    here = str(ROOT.relative_to(home) if ROOT.is_relative_to(home) else ROOT)
    add("--dir", default=here, help="folder of this code on the nodes")
    add("--python", help="on the nodes; default: DIR/.venv/bin/python if it exists, else python3")
    text = "environment variable for the nodes; NAME alone takes its value here"
    add("--env", type=_variable, action="append", metavar="NAME[=VALUE]", help=text)
    text = "time for a snapshot between the request to stop and the kill"
    add("--grace", type=non_negative, default=20.0, metavar="SECONDS", help=text)


def _variable(text: str) -> tuple[str, str]:
    """Name and value of a variable. A value may be a secret: no message has it, nor sys.argv."""
    name, equals, value = text.partition("=")
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise argparse.ArgumentTypeError(f"{name} is not the name of a variable")
    if not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} has no value here: write {name}=VALUE")
    shown = {text: name, f"--env={text}": f"--env={name}"}
    sys.argv = [shown.get(word, word) for word in sys.argv]
    return name, value if equals else os.environ[name]


def note(text: str) -> None:
    """Print a line of the launcher itself."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """For shell scripts: a line per host with its address, its name and its ``runs``."""
    for host in read(Path(sys.argv[1])):
        print(host.address, host.name, host.runs or "")
    return 0


if __name__ == "__main__":
    exit_with(main)
