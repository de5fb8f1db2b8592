"""Runs one of our self-contained programs on every host in a file, and shows what it prints."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hosts
from hosts import SSH_FAILED, Host

from utils import errors
from utils.errors import UserError


def ask_all(file: str, ssh: str, source: str, arguments: dict) -> list[tuple[Host, int, str]]:
    """Host, exit code and output of the program ``source`` on each host in ``file``, in order.

    Raises: `UserError` if the file cannot be read. A host that ssh cannot reach has the code
    `SSH_FAILED`, and ssh's own message is on stderr.
    """

    def one(host: Host) -> tuple[Host, int, str]:
        done = subprocess.run(
            hosts.remote_python(ssh, host),
            input=hosts.program(Path(source), arguments),
            stdout=subprocess.PIPE,
            check=False,
        )
        return host, done.returncode, done.stdout.decode(errors="replace")

    listed = hosts.read(Path(file))
    with ThreadPoolExecutor(len(listed)) as pool:
        return list(pool.map(one, listed))


def everywhere(file: str, ssh: str, source: str, arguments: dict) -> int:
    """Run ``source`` on each host and print its lines behind its name. Returns the exit code."""
    worst = 0
    try:
        answers = ask_all(file, ssh, source, arguments)
    except UserError as error:
        return errors.report(error)
    for host, code, out in answers:
        for line in out.splitlines():
            print(f"[{host.name}] {line}")
        if code == SSH_FAILED:
            print(f"error: {hosts.ssh_failed(ssh, host)}", file=sys.stderr)
        worst = max(worst, errors.BAD_INPUT if code == SSH_FAILED else code)
    return worst


def show_status(file: str, ssh: str, source: str, describe: Callable) -> int:
    """Run ``source`` on each host and print what ``describe`` makes of the answers.

    Returns the exit code.
    """
    try:
        answers = ask_all(file, ssh, source, {})
    except UserError as error:
        return errors.report(error)
    found = []
    for host, code, out in answers:
        last = out.strip().rpartition("\n")[2]  # a login shell may print something first
        found.append((host.name, json.loads(last) if code == 0 else None))
    for line in describe(found):
        print(line)
    return errors.BAD_INPUT if any(answer is None for _, answer in found) else 0
