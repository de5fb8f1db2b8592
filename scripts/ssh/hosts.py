"""Read the file that lists the nodes of a job, and run programs on them over ssh.

    # one ssh host per line: a name from ~/.ssh/config or an address, with or without a user
    node0
    ubuntu@172.31.0.11  slots=4  ip=10.0.0.11     # 4 processes; others reach it at 10.0.0.11

The order of the lines is the order of node ranks. With --elastic torchrun assigns the ranks. ``ip``
matters for the first node; with --elastic any node may become the first. Several nodes reach each
other at IPv4 addresses. ``runs=PATH`` tells tensorboard.sh that node's folder of runs.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for modules that need only Python

from utils.start.errors import UserError, exit_with
from utils.start.launch import MARKER
from utils.start.option_types import Formatter, Parser, non_negative

# Reads a program from the first line of standard input; the program reads the rest.
BOOTSTRAP = (
    "import sys,json;p=json.loads(sys.stdin.buffer.readline());"
    "exec(compile(p['source'],p['name'],'exec'),{'__name__':'__main__','ARGUMENTS':p['arguments']})"
)
# ssh notices a dead connection within 15 s, and waits 20 s for a machine that is off or frozen.
# BatchMode: it never asks for a password.
_SET = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=3", "ServerAliveCountMax=3")
SSH_OPTIONS = tuple(f"-o{option}" for option in _SET)
SSH_FAILED = 255  # exit code of ssh itself
_FORM = "[USER@]HOST [slots=N] [ip=ADDRESS] [runs=PATH]"
_LINE = re.compile(
    r"(?P<address>[^-=/ ][^=/ ]*)"
    r"( slots=(?P<slots>[1-9]\d*)| ip=(?P<ip>\S+)| runs=(?P<runs>\S+))*"
)


@dataclass(frozen=True)
class Host:
    """A line of the file. ``address``: for ssh; ``slots``: processes (None: one per GPU)."""

    address: str
    slots: int | None = None
    ip: str | None = None
    runs: str | None = None

    @property
    def name(self) -> str:
        """The host without the user, for messages."""
        return self.address.rpartition("@")[2]

    @property
    def for_rsync(self) -> str:
        """The host as rsync takes it: an IPv6 address in brackets."""
        user = self.address[: -len(self.name)]
        return f"{user}[{self.name}]" if ":" in self.name else self.address


def read(path: Path) -> list[Host]:
    """Read the hosts in a file. Raises: `UserError`, which names the line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # some editors add a mark
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        text = f"cannot read the hosts file {path} ({why}): give a file with one ssh host per line"
        raise UserError(text) from None
    texts = [" ".join(line.split("#")[0].split()) for line in lines]
    named = [(f"{path}, line {n}", text) for n, text in enumerate(texts, 1) if text]
    if not named:
        raise UserError(f"{path} names no host: write one ssh host per line")
    return _parse(named)


def from_list(text: str) -> list[Host]:
    """Parse a list of hosts as Horovod and MPI write it: a:2,b:2 (:N processes, default 1).

    Raises: `UserError`.
    """
    full = [word if ":" in word else f"{word}:1" for word in text.split(",")]
    return _parse([(f"-H {text}", word.replace(":", " slots=", 1)) for word in full])


def _parse(named: list[tuple[str, str]]) -> list[Host]:
    """Parse pairs of a place, for messages, and the text of a host."""
    hosts: dict[str, Host] = {}
    for place, text in named:
        match = _LINE.fullmatch(text)
        if not (match and text.isprintable()):  # ssh takes no NUL
            raise UserError(f"{place}: {text!r} is not of the form {_FORM}")
        slots = int(match["slots"]) if match["slots"] else None
        host = Host(match["address"], slots, match["ip"], match["runs"])
        if host.name in hosts:
            raise UserError(f"{place}: {host.name} is listed twice")
        hosts[host.name] = host
    return list(hosts.values())


def remote_python(ssh: str, host: Host, mark: str = "", more: Sequence[str] = ()) -> list[str]:
    """Build the command that runs a `program` on ``host``; ``ssh`` is ssh with the user's options,
    ``more`` are further ones.

    ``mark``: value of the environment variable by which cleanup.sh recognises the process.
    Raises: `UserError` if this machine has no ssh.
    """
    words = shlex.split(ssh)
    if not words or not shutil.which(words[0]):
        raise UserError(f"there is no program {ssh!r} here: install openssh-client, or see --ssh")
    marked = f"env {shlex.quote(f'{MARKER}={mark}')} " if mark else ""
    line = f"{marked}python3 -u -c {shlex.quote(BOOTSTRAP)}"
    return [*words, *SSH_OPTIONS, *more, host.address, line]


def program(file: str, arguments: dict) -> bytes:
    """Encode a Python file and its arguments as the first input line of `BOOTSTRAP`."""
    whole = {"source": Path(file).read_text(), "name": Path(file).name, "arguments": arguments}
    return json.dumps(whole).encode() + b"\n"


def ask_all(file: Path, ssh: str, source: str, arguments: dict) -> list[tuple[Host, int, str]]:
    """Run the program ``source`` on each host in ``file``. Returns: host, exit code and output.

    If ssh cannot reach a host, it prints an error; the code is `SSH_FAILED`. Raises: `UserError`.
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
    """Return the error message for a host that ssh cannot reach, or only after a question."""
    command = f"{ssh} {host.address} python3 -V"
    how = "without asking anything (ssh-add unlocks a key)"
    return f"ssh to {host.name} failed: does `{command}` work here {how}?"


def make_parser(prog: str, text: str | None, usage: str | None = None) -> Parser:
    """Make a parser with the options HOSTS_FILE and --ssh."""
    parser = Parser(
        prog=prog, usage=usage, description=text, allow_abbrev=False, formatter_class=Formatter
    )
    add = parser.add_argument
    text = "one ssh host per line, node rank 0 first"
    add("hosts", type=Path, nargs="?", metavar="HOSTS_FILE", help=text)
    add("--ssh", default="ssh", metavar="COMMAND", help="ssh and its options, as 'ssh -F FILE'")
    return parser


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add options about the nodes: folder of the code, Python, environment, time to stop."""
    add, home = parser.add_argument, Path(os.path.expanduser("~"))  # "~" without a home
    # The default is the folder here; relative to the home directory if it is inside.
    here = str(ROOT.relative_to(home) if ROOT.is_relative_to(home) else ROOT)
    add("--dir", type=from_home, default=here, help="folder of this code on the nodes")
    add("--python", help="Python on the nodes; default: DIR/.venv/bin/python, else python3")
    text = "environment variable for the nodes; NAME alone copies its value from here"
    add("--env", type=_variable, action="append", metavar="NAME[=VALUE]", help=text)
    text = "time to write a snapshot; then processes are killed"
    add("--grace", type=non_negative, default=20.0, metavar="SECONDS", help=text)


def from_home(text: str) -> str:
    """A path on a node without ~/ before it: programs start in the home folder there."""
    return "." if text in ("~", "~/") else text.removeprefix("~/")


def _variable(text: str) -> tuple[str, str]:
    """Parse NAME[=VALUE]. The value may be a secret: keep it out of messages and sys.argv."""
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
    """Print a line per host, for shell scripts: address, the same for rsync, name and ``runs``."""
    for host in read(Path(sys.argv[1])):
        print(host.address, host.for_rsync, host.name, from_home(host.runs or ""))
    return 0


if __name__ == "__main__":
    exit_with(main)
