"""Copies the code to the nodes, and the run directory back, by rsync over ssh."""

import argparse
import shlex
import subprocess
from pathlib import Path

from hosts import ROOT, Host, note

from utils.errors import UserError

_NOT_COPIED = (".git", ".venv", "__pycache__", "/runs", "/data", ".*_cache")


def rsync(options: argparse.Namespace, *arguments: str) -> bool:
    """Copy by rsync over the same ssh. Returns whether it worked; rsync prints its own errors."""
    command = ["rsync", "-az", "-e", f"{options.ssh} -o BatchMode=yes", *arguments]
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == 0
    except FileNotFoundError:
        raise UserError("rsync is missing here: install it, or copy by hand") from None


def sync(options: argparse.Namespace, host: Host) -> None:
    """Copy this code to a host; extra files there stay. Raises: `UserError`."""
    without = [f"--exclude={pattern}" for pattern in _NOT_COPIED]
    # rsync creates only one level of folders.
    make = [*shlex.split(options.ssh), "-o", "BatchMode=yes", host.address]
    make.append(f"mkdir -p {shlex.quote(options.dir)}")
    made = subprocess.run(make, stdin=subprocess.DEVNULL, check=False).returncode == 0
    if not made or not rsync(options, *without, f"{ROOT}/", f"{host.address}:{options.dir}/"):
        raise UserError(f"could not copy the code to {host.name} (the reason is above)")
    note(f"copied the code to {host.name}:{options.dir}")


def fetch(options: argparse.Namespace, host: Host, script: argparse.Namespace) -> None:
    """Bring the run directory of the first node to the same place here. Raises: `UserError`."""
    run = f"{script.output_dir}/{script.name}"
    target = Path(script.output_dir) / script.name
    target.mkdir(parents=True, exist_ok=True)
    source = run if run.startswith("/") else f"{options.dir}/{run}"
    if rsync(options, f"{host.address}:{source}/", f"{target}/"):
        note(f"the run is in {target}")
    else:
        raise UserError(f"could not bring {host.name}:{source} back (rsync's message is above)")
