"""Runs scripts/doctor.py on every host of a file over ssh, each with its rank.

See scripts/doctor.sh for the command. The output of node 0, which reports everything, is shown as
it is; that of another node follows, behind its name, if it has found something.
"""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hosts
from hosts import SSH_FAILED, Host

from utils import errors
from utils.errors import UserError
from utils.option_types import Formatter

WAIT_SECONDS = 20  # for the other nodes; all are started at the same time
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this program, and those for scripts/doctor.py."""
    parser = argparse.ArgumentParser(
        prog="doctor.sh",
        usage="bash scripts/doctor.sh HOSTS_FILE [options] [OPTIONS of scripts/doctor.py]",
        epilog="python scripts/doctor.py --help lists the other options",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    hosts.add_options(parser)
    return parser.parse_known_args(arguments)


def over_ssh(ssh: str, host: Host, line: str) -> list[str]:
    """The command that passes ``line`` to the shell of a host."""
    return [*shlex.split(ssh), *_SSH_OPTIONS, host.address, line]


def address_of(ssh: str, host: Host) -> str:
    """The address at which ssh reaches ``host``, as that host sees it. Raises: `UserError`."""
    asked = subprocess.run(
        over_ssh(ssh, host, 'echo "$SSH_CONNECTION"'),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if asked.returncode:
        raise UserError(hosts.ssh_failed(ssh, host))
    words = asked.stdout.split()  # the client's address and port, then the server's own
    if len(words) != 4:
        raise UserError(f"the address of {host.name} is unknown: write ip=ADDRESS behind it")
    return words[2]


def start(options: argparse.Namespace, host: Host, doctor: list[str], said: Any) -> Any:
    """Start scripts/doctor.py with the options ``doctor`` on a host; ``said`` takes its output."""
    ssh = f"{options.ssh} -o ConnectTimeout=10"
    started = subprocess.Popen(
        hosts.remote_python(ssh, host, mark="doctor"),
        stdin=subprocess.PIPE,
        stdout=said,
        stderr=said and said.fileno(),
    )
    arguments = {
        "folder": options.dir,
        "python": options.python,
        "options": doctor,
        "environment": dict(options.env or ()),
    }
    with contextlib.suppress(OSError), started.stdin as there:
        there.write(hosts.program(Path(__file__).with_name("doctor_start.py"), arguments))
    return started


def main() -> int:
    hosts.hide_values()
    options, rest = parse(sys.argv[1:])
    machines = hosts.read(options.hosts)
    master = os.environ.get("MASTER_ADDR") or machines[0].ip
    master = master or address_of(options.ssh, machines[0])
    started, codes = [], []
    try:
        for rank, host in enumerate(machines):
            doctor = ["--rank", str(rank), "--nodes", str(len(machines)), "--master", master]
            doctor += ["--wait", str(WAIT_SECONDS), *rest]
            said = tempfile.TemporaryFile() if rank else None
            started.append((start(options, host, doctor, said), said))
        for host, (ssh, said) in zip(machines, started, strict=True):
            code = ssh.wait()
            if said and code:
                said.seek(0)
                for text in said.read().decode(errors="replace").splitlines():
                    print(f"[{host.name}] {text}", flush=True)
            if code == SSH_FAILED:
                print(f"error: {hosts.ssh_failed(options.ssh, host)}", file=sys.stderr)
            codes.append(code if code in (0, 1) else errors.BAD_INPUT)
    finally:
        for ssh, _ in started:
            if ssh.poll() is None:
                ssh.terminate()
    return max(codes)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(errors.report(error))
    except KeyboardInterrupt:
        sys.exit(130)
