"""scripts/tensorboard.sh: TensorBoard on this machine's runs and on those of other hosts."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from conftest import ROOT, environment
from event_files import epochs_of, write
from running import descendants, eventually

# Stands in for ssh: options, host, command; a host called "away" cannot be reached.
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -[ol] ]] && shift; shift; done
host=$1; shift
[[ $host == *away ]] && { echo "ssh: connect to host $host: timed out" >&2; exit 255; }
PATH=%s exec bash -c "$*"
"""


class Started:
    """The script in the background, its output in a file."""

    def __init__(self, folder: Path, *arguments: object, **env: str):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = folder / "log"
        self.process = subprocess.Popen(
            ["bash", "scripts/tensorboard.sh", *map(str, arguments)],
            cwd=ROOT,
            env=environment(PORT=str(self.port), VIRTUAL_ENV=sys.prefix, EVERY="1", **env),
            stdout=open(self.log, "w"),
            stderr=subprocess.STDOUT,
        )

    def runs(self) -> list[str]:
        """The runs that TensorBoard shows; [] while it does not answer."""
        assert self.process.poll() is None, self.log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/data/runs") as answer:
                return json.load(answer)
        except OSError:
            return []


@pytest.fixture
def start(tmp_path):
    """Start the script; it is killed, with all that it has started, at the end of the test."""
    started = []

    def begin(*arguments, **env):
        started.append(Started(tmp_path, *arguments, **env))
        return started[-1]

    yield begin
    for one in started:
        family = descendants(one.process.pid)
        one.process.kill()
        one.process.wait()
        for member in family:
            if member.lives():
                os.kill(member.pid, signal.SIGKILL)


def test_runs_of_this_machine(start, tmp_path):
    write(tmp_path / "runs" / "mine", epochs_of(100, 64))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = start(RUNS=str(tmp_path / "runs"), PATH=path)
    assert eventually(lambda: shown.runs() == ["mine"], 120)
    tunnel = rf"ssh -N -L {shown.port}:localhost:{shown.port} \S+@\S+"
    assert re.search(tunnel, shown.log.read_text())


@pytest.mark.parametrize("by", ["rsync", "tar"])
def test_runs_of_other_hosts(start, tmp_path, by):
    if by == "rsync" and not shutil.which("rsync"):
        pytest.skip("no rsync here")
    bin_here, bin_there = tmp_path / "bin", tmp_path / "bin_there"
    bin_here.mkdir()
    bin_there.mkdir()
    tools = ["bash", "find", "tar", "gzip"] + (["rsync"] if by == "rsync" else [])
    for tool in tools:
        (bin_there / tool).symlink_to(shutil.which(tool))
    (bin_here / "ssh").write_text(SSH % bin_there)
    (bin_here / "ssh").chmod(0o755)
    theirs = tmp_path / "theirs"
    write(theirs / "far" / "one", epochs_of(100, 64))
    (theirs / "far" / "one" / "snapshot.pt").write_bytes(b"large")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    hosts = tmp_path / "hosts"
    hosts.write_text(f"# nodes\n\nme@near  slots=4 ip=10.0.0.1 runs={theirs}  # fast\nme@away")
    shown = start(hosts, RUNS=str(tmp_path / "runs"), PATH=f"{bin_here}:{path}")
    assert eventually(lambda: shown.runs() == ["hosts/near/far/one"], 120), shown.log.read_text()
    assert "no event files from me@away this time" in shown.log.read_text()
    # A run that begins later is fetched, too.
    write(theirs / "two", epochs_of(100, 64))
    assert eventually(lambda: len(shown.runs()) == 2, 120), shown.log.read_text()
    fetched = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert {"tfevents" in file.name for file in fetched} == {True}
    # The fetching ends with TensorBoard.
    family = descendants(shown.process.pid)
    assert family
    shown.process.terminate()
    shown.process.wait()
    assert eventually(lambda: not any(member.lives() for member in family))


@pytest.mark.parametrize(
    ("arguments", "env", "sentence"),
    [
        (["nowhere"], {}, "cannot read the hosts file nowhere"),
        (["a", "b"], {}, "at most one HOSTS_FILE"),
        (["pytest.ini"], {}, "pytest.ini, line 2: 'testpaths = tests' is not"),
        ([], {"PORT": "x"}, "PORT=x is not a number"),
        ([], {"EVERY": "0"}, "EVERY=0 is not a whole number of seconds"),
        ([], {}, "is taken: choose another"),
    ],
)
def test_wrong_input_is_one_sentence(tmp_path, arguments, env, sentence):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        usual = {"PORT": str(taken.getsockname()[1]), "RUNS": str(tmp_path), "PATH": path}
        done = subprocess.run(
            ["bash", "scripts/tensorboard.sh", *arguments],
            cwd=ROOT,
            env=environment(**{**usual, "VIRTUAL_ENV": sys.prefix, **env}),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert sentence in done.stderr
