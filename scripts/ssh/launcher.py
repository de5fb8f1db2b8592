"""Start torchrun on several nodes over ssh, show their output, and stop them together.

See scripts/train_on_nodes.sh for the command. On each node scripts/ssh/guard.py runs
scripts/torchrun.py.
"""

import argparse
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import forget
import hosts
from hosts import ROOT, Host, note
from job import STOPS, TORCHRUN, Job

from utils.start import agreement, errors, signals
from utils.start.errors import UserError
from utils.start.option_types import Parser, non_negative, place, port, positive, run_name

HELP = """Train on several nodes from one machine, over ssh.

    bash scripts/train_on_nodes.sh HOSTS_FILE --sync --fetch -- \\
        imagenet_ddp.py --name my_run DATA
    bash scripts/train_on_nodes.sh HOSTS_FILE --elastic 1:4 -- \\
        imagenet_ddp.py --name my_run DATA
"""
WAIT_SECONDS = 600.0  # for MIN nodes; --dist-timeout of the script replaces it
ONE_PROCESS = ("imagenet_nd.py", "imagenet_dp.py")
_NOT_COPIED = (".git", ".venv", "__pycache__", "/runs", "/data", ".*_cache", f"/{forget.LISTED}")
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")  # these mark the folder of a Python environment


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the launcher's own options. Returns: they, and SCRIPT with its options."""
    # A command written for horovodrun has "python" instead of "--".
    own, command = split(words, "--" if "--" in words else "python")
    if command[:1] == ["python"]:
        del command[0]
    usage = "bash scripts/train_on_nodes.sh HOSTS_FILE [options] -- SCRIPT OPTIONS"
    parser = hosts.make_parser("train_on_nodes.sh", HELP, usage)
    hosts.add_node_options(parser)
    add = parser.add_argument
    text = "instead of HOSTS_FILE: hosts and their processes, as for horovodrun and mpirun"
    add("-H", dest="list", metavar="HOST:N,...", help=text)
    text = "total number of processes; uses as many of the first hosts as needed"
    add("-np", "--num-proc", type=positive, metavar="N", help=text)
    add("--sync", action="store_true", help="copy this code to the nodes first")
    add("--fetch", action="store_true", help="copy the run directory back here; needs --name")
    add("--port", type=port, help="port of node 0; default: a free one")
    text = "train on MIN to MAX nodes, any of which may fail and come back; needs --name, and an "
    text += "--output-dir that all nodes share"
    add("--elastic", type=limits, metavar="MIN:MAX", help=text)
    options = parser.parse_args(own)
    if not command:
        raise UserError("the script is missing: ... HOSTS_FILE -- imagenet_ddp.py OPTIONS DATA")
    if bool(options.hosts) == bool(options.list):
        raise UserError("the hosts are missing: give either HOSTS_FILE or -H HOST:N,HOST:N")
    return options, command


def split(words: list[str], end: str = "--") -> tuple[list[str], list[str]]:
    """Return the words before ``end`` and the words after it."""
    cut = words.index(end) if end in words else len(words)
    return words[:cut], words[cut + 1 :]


def limits(text: str) -> tuple[int, int]:
    """Parse MIN:MAX of --elastic."""
    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"{text} is not of the form MIN:MAX, such as 1:4")
    return int(least), int(most)


def machines_of(options: argparse.Namespace) -> list[Host]:
    """Return the hosts that the options name. Raises: `UserError`."""
    machines = hosts.from_list(options.list) if options.list else hosts.read(options.hosts)
    source, slots = options.hosts or f"-H {options.list}", machines[0].slots
    if len({host.slots for host in machines}) > 1:
        raise UserError(f"{source}: give all nodes the same number of slots, or none")
    if options.num_proc is not None:
        nodes, rest = divmod(options.num_proc, slots or 1)
        if slots is None or rest or nodes > len(machines):
            raise UserError(
                f"-np {options.num_proc} does not fit {len(machines)} hosts (slots of each: "
                f"{slots or 'unknown'}): all nodes need the same number of processes"
            )
        machines = machines[:nodes]
    if options.elastic and options.elastic[0] > len(machines):
        text = f"--elastic needs {options.elastic[0]} nodes; {source} names {len(machines)}"
        raise UserError(text)
    return machines


def check(command: list[str], several: bool, again: bool) -> argparse.Namespace:
    """Parse those options of the script that the launcher needs.

    ``several``: there are several nodes or processes. ``again``: the script resumes when a node
    fails; this adds --resume to ``command``. Raises: `UserError` if the script cannot do that.
    """
    script = command[0]
    if not (ROOT / script).is_file() or "/" in script or not script.startswith("imagenet_"):
        raise UserError(f"{script} is not a training script in {ROOT}")
    if script in ONE_PROCESS and (several or again):
        raise UserError(f"{script} is one process on one node: use imagenet_ddp.py")
    parser = Parser(prog=script, add_help=False, allow_abbrev=False)
    parser.add_argument("--name", type=run_name)
    parser.add_argument("--resume")
    parser.add_argument("--output-dir", default="runs")
    parser.add_argument("--dist-timeout", type=non_negative)
    given = parser.parse_known_args(command[1:])[0]
    if again and not given.name:
        raise UserError("--elastic needs --name RUN after --, to resume when a node is lost")
    if again and not given.resume:
        command[1:1] = ["--resume", "auto"]
    return given


def rsync(options: argparse.Namespace, action: str, *arguments: str) -> None:
    """Copy by rsync over the same ssh. Raises: `UserError` if the ``action`` failed."""
    command = ["rsync", "-az", "-e", " ".join([options.ssh, *hosts.SSH_OPTIONS]), *arguments]
    if " " in "".join(arguments[-2:]):  # before 3.2.4 the node's shell would split such a path
        command.insert(1, "-s")  # only then: macOS has an rsync without it
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    except FileNotFoundError:
        raise UserError("rsync is missing here: install it, or copy by hand") from None
    if code:
        raise UserError(f"could not {action} (rsync's message is above)")


def sync(options: argparse.Namespace, host: Host) -> None:
    """Copy this code to a host; keep other files there, but not code that an earlier call brought.

    Python environments in the top folder are left out. They take gigabytes, and may not fit the
    host's Python or GPU. Raises: `UserError`.
    """
    marks = [path for name in _ENVIRONMENTS for path in ROOT.glob(f"*/{name}")]
    without = [f"--exclude={pattern}" for pattern in _NOT_COPIED]
    without += [f"--exclude=/{mark.parent.name}" for mark in marks]
    # rsync creates only one level of folders.
    make = ["--rsync-path", f"mkdir -p {shlex.quote(options.dir)} && rsync"]
    target = f"{host.for_rsync}:{options.dir}/"
    rsync(options, f"copy the code to {host.name}", *make, *without, f"{ROOT}/", target)
    program = hosts.program(forget.__file__, {"folder": options.dir, "names": [*agreement.code()]})
    command = hosts.remote_python(options.ssh, host)
    done = subprocess.run(command, input=program, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise UserError(f"could not remove old code from {host.name} (the reason is above)")
    removed = ", ".join(done.stdout.decode().splitlines())
    more = f", and removed what is gone here: {removed}" if removed else ""
    note(f"copied the code to {host.name}:{options.dir}{more}")


def fetch(options: argparse.Namespace, host: Host, script: argparse.Namespace) -> None:
    """Copy the run directory from a host to the same path here, if it is there.

    Raises: `UserError`.
    """
    target = place(script.output_dir) / script.name
    output_dir = hosts.from_home(script.output_dir)
    source = Path(output_dir, script.name)
    if output_dir == script.output_dir:
        source = Path(options.dir) / source  # an absolute source is the same there
    ask = [*shlex.split(options.ssh), *hosts.SSH_OPTIONS, host.address]
    ask.append(f"test -d {shlex.quote(str(source))}")
    code = subprocess.run(ask, stdin=subprocess.DEVNULL, check=False).returncode
    if code == hosts.SSH_FAILED:
        raise UserError(hosts.ssh_failed(options.ssh, host))
    if code:
        note(f"nothing to copy back: there is no {host.name}:{source}")
        return
    target.mkdir(parents=True, exist_ok=True)
    action = f"copy {host.name}:{source} back"
    rsync(options, action, f"{host.for_rsync}:{source}/", f"{target}/")
    note(f"the run is in {target}")


def main() -> int:
    options, command = parse(sys.argv[1:])
    machines = machines_of(options)
    script = check(command, len(machines) > 1 or bool(machines[0].slots), bool(options.elastic))
    if options.fetch and not script.name:
        raise UserError("--fetch needs --name RUN after --: it copies that run's directory back")
    for host in machines if options.sync else ():
        try:
            sync(options, host)
        except UserError as error:
            if not options.elastic:
                raise
            errors.show(error)
    if command[0] not in ONE_PROCESS:
        command.insert(0, TORCHRUN)
    kind = Job
    if options.elastic:
        from elastic import Elastic  # loads torch

        kind = Elastic
    options.wait = script.dist_timeout or WAIT_SECONDS
    job = kind(options, command, machines, f"guard:{script.name or ''}")
    code = job.run()
    if options.fetch and job.run_host:
        signals.handle(signal.SIG_DFL, STOPS)
        try:
            fetch(options, job.run_host, script)
        except UserError as error:
            if not code:
                raise
            note(str(error))  # the job's own error counts
    return code


if __name__ == "__main__":
    errors.exit_with(main)
