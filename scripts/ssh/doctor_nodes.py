"""Runs scripts/doctor.py on every host of a file over ssh, each with its rank.

See scripts/doctor.sh for the command. The output of node 0, which reports everything, is shown as
it is; that of another node follows, behind its name, if it has found something.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile

import hosts
from hosts import SSH_FAILED, Host

from utils import errors
from utils.errors import UserError
from utils.option_types import Formatter
from utils.processes.supervise import MARKER

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


def remote_line(options: argparse.Namespace, doctor: list[str]) -> str:
    """What a node's shell runs: scripts/doctor.py with the options ``doctor``."""
    variables = [f"{name}={value}" for name, value in [(MARKER, "doctor"), *(options.env or ())]]
    python = shlex.quote(options.python) if options.python else '"$python"'
    return (
        f"cd {shlex.quote(options.dir)} && "
        "{ python=.venv/bin/python; [ -x $python ] || python=python3; } && "
        f"exec env {shlex.join(variables)} {python} scripts/doctor.py {shlex.join(doctor)}"
    )


def main() -> int:
    options, rest = parse(sys.argv[1:])
    machines = hosts.read(options.hosts)
    master = os.environ.get("MASTER_ADDR") or machines[0].ip
    master = master or address_of(options.ssh, machines[0])
    started, codes = [], []
    try:
        for rank, host in enumerate(machines):
            doctor = ["--rank", str(rank), "--nodes", str(len(machines)), "--master", master]
            doctor += ["--wait", str(WAIT_SECONDS), *rest]
            line = over_ssh(options.ssh, host, remote_line(options, doctor))
            said = tempfile.TemporaryFile() if rank else None
            how = {"stdin": subprocess.DEVNULL, "stdout": said, "stderr": said and said.fileno()}
            started.append((subprocess.Popen(line, **how), said))
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
