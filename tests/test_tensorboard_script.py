"""scripts/tensorboard.sh: TensorBoard on this machine's runs and on those of other hosts."""

import json
import os
import shutil
import signal
import socket
import sys
import urllib.request
from pathlib import Path

from conftest import shell
from event_files import epochs_of, write
from running import Running, eventually, free_port

# Stands in for ssh: options, host, command; a host without a folder of programs cannot be reached.
# The login shell there is no POSIX shell: it knows programs and their words.
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -[ol] ]] && shift; shift; done
cd && host=${1#*@}; PATH=%s/${host//:/}; shift
if [[ $* == sh ]]; then set -- "$(</dev/stdin)"; else [[ $1 == rsync ]] || exit 1; fi
echo "$host $*" >>%s/log
[[ -d $PATH ]] || { echo "ssh: connect to host $host: timed out" >&2; exit 255; }
exec bash -c "$*"
"""
EXEC = "import os, sys; os.execvp('bash', ['bash', 'scripts/tensorboard.sh', *sys.argv[1:]])"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def shown(port: int) -> list[str]:
    """The runs that TensorBoard shows; [] while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs") as answer:
            return json.load(answer)
    except OSError:
        return []


def test_runs_of_other_hosts(tmp_path):
    """By rsync, here from an IPv6 address, and by tar from a host that lacks it."""
    bin_here = tmp_path / "bin"
    for host, tools in (("fe801", "bash find tar gzip rsync"), ("slim", "bash find tar gzip")):
        (bin_here / host).mkdir(parents=True)
        for tool in filter(shutil.which, tools.split()):
            (bin_here / host / tool).symlink_to(shutil.which(tool))
    (bin_here / "ssh").write_text(SSH % (bin_here, bin_here))
    (bin_here / "ssh").chmod(0o755)
    theirs, port = tmp_path / "theirs", free_port()
    write(theirs / "far" / "one", epochs_of(100, 64))
    (theirs / "far" / "one" / "snapshot.pt").write_bytes(b"large")
    write(theirs / "hosts" / "third", epochs_of(100, 64))  # that it has fetched itself
    hosts = tmp_path / "hosts"
    near = f"me@fe80::1  slots=4 ip=10.0.0.1 runs={theirs}  # fast"
    hosts.write_text(f"# nodes\n\n{near}\nslim runs=~/theirs\nme@away")
    write(tmp_path / "runs" / "mine", epochs_of(100, 64))
    own = {"PORT": str(port), "RUNS": f"{tmp_path}/runs", "EVERY": "1", "VIRTUAL_ENV": sys.prefix}
    own["HOME"] = str(tmp_path)
    with Running("-c", EXEC, hosts, PATH=f"{bin_here}:{PATH}", **own) as started:
        started.until(rf"ssh -N -L {port}:localhost:{port} \S+@\S+")
        theirs_here = [f"hosts/{host}/far/one" for host in ("fe80::1", "slim")]
        assert eventually(lambda: shown(port) == [*theirs_here, "mine"])
        # A run that begins later is fetched, too.
        write(theirs / "two", epochs_of(100, 64))
        assert eventually(lambda: len(shown(port)) == 5)
        fetched = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
        assert {"tfevents" in file.name for file in fetched} == {True}
        # The fetching ends with TensorBoard.
        assert started.meet_family()
        started.send(signal.SIGTERM)
        started.process.wait()
        said = "no event files from me@away this time"
        assert started.result().err.count(said) == 1, "and not each time"
        assert "away cd 'runs' && " in (bin_here / "log").read_text(), "the same path there"
        assert eventually(lambda: not any(member.lives() for member in started.family))


def test_wrong_input_is_one_error_message(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        usual = {"PORT": str(taken.getsockname()[1]), "RUNS": str(tmp_path)}
        for arguments, env, sentence in (
            ("nowhere", {}, "cannot read the hosts file nowhere (No such file or directory): give"),
            (str(tmp_path), {}, f"cannot read the hosts file {tmp_path} (Is a directory): give"),
            ("", {"EVERY": "0"}, "EVERY=0 is not a whole number of seconds"),
            ("", {"PORT": "0"}, "PORT=0 is not the number of a port"),
            ("", {"PORT": "65536"}, "PORT=65536 is not the number of a port"),
            ("", {}, "is taken: choose another"),
        ):
            (done,) = shell(f"bash scripts/tensorboard.sh {arguments}", **usual | env)
            done.fails_with(sentence)
