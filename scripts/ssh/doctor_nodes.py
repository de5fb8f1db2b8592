"""Runs scripts/doctor.py on every host of a file over ssh, each with its rank.

See scripts/doctor.sh for the command. The output of node 0, which tells all, comes as it is; that
of another node follows, behind its name, when it has something to say.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import hosts
from hosts import SSH_FAILED, Host

from utils import errors
from utils.errors import UserError
from utils.processes.supervise import MARKER

WAIT_SECONDS = 20  # for the other nodes: all are started at the same time
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own options, and those of scripts/doctor.py."""
    parser = argparse.ArgumentParser(
        prog="doctor.sh",
        usage="bash scripts/doctor.sh HOSTS_FILE [options] [OPTIONS of scripts/doctor.py]",
        epilog="scripts/doctor.py --help lists the rest",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("hosts", type=Path, metavar="HOSTS_FILE", help="one ssh host a line, node rank 0 first")
    add("--dir", default=hosts.default_directory(), help="of this code on the nodes")
    add("--python", help="on the nodes; default: DIR/.venv/bin/python if there, else python3")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="for the doctor")
    add("--ssh", default="ssh", help="ssh command with its options, such as 'ssh -F FILE'")
    options, rest = parser.parse_known_args(arguments)
    for one in options.env:
        if "=" not in one or not hosts.is_name(one.partition("=")[0]):
            raise UserError(f"--env {one} is not NAME=VALUE")
    return options, rest


def over_ssh(ssh: str, host: Host, line: str) -> list[str]:
    """The command that gives ``line`` to the shell of a host."""
    return [*shlex.split(ssh), *_SSH_OPTIONS, host.address, line]


def address_of(ssh: str, host: Host) -> str:
    """The address at which ssh arrives on ``host``, as that host sees it. Raises: `UserError`."""
    asked = subprocess.run(
        over_ssh(ssh, host, 'echo "$SSH_CONNECTION"'),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if asked.returncode:
        raise UserError(f"ssh to {host.name} failed: does `{ssh} {host.address} true` work here?")
    words = asked.stdout.split()  # the client's address and port, then the server's own
    if len(words) != 4:
        raise UserError(f"the address of {host.name} is unknown: write ip=ADDRESS behind it")
    return words[2]


def remote_line(options: argparse.Namespace, doctor: list[str]) -> str:
    """What a node's shell runs: scripts/doctor.py with the options ``doctor``."""
    variables = [f"{MARKER}=doctor", *options.env]
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
                print(
                    f"error: ssh to {host.name} failed: does `{options.ssh} {host.address} true` "
                    "work here?",
                    file=sys.stderr,
                )
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
