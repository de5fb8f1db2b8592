"""Starts a training on several nodes over ssh, shows what they print, and ends them together.

See scripts/train_on_nodes.sh for the command. On each node scripts/ssh/guard.py holds the training.
"""

import argparse
import signal
import sys

import copying
import hosts
from elastic import Elastic
from hosts import ROOT, Host
from job import Job

from utils import errors
from utils.errors import UserError
from utils.option_types import Formatter, amount, number


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own options, and SCRIPT with its options. Raises: `UserError`."""
    end = "--" if "--" in arguments else "python"  # horovodrun's lines have the second alone
    cut = arguments.index(end) if end in arguments else len(arguments)
    own, command = arguments[:cut], arguments[cut + 1 :]
    if command[:1] == ["python"]:
        del command[0]
    parser = argparse.ArgumentParser(
        prog="train_on_nodes.sh",
        usage="bash scripts/train_on_nodes.sh HOSTS_FILE [options] -- SCRIPT TRAINING OPTIONS",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    hosts.add_options(parser, needed=False)
    add = parser.add_argument
    add(
        "-H",
        dest="list",
        metavar="HOST:N,...",
        help="instead of HOSTS_FILE: hosts and their processes, as horovodrun and mpirun take them",
    )
    add(
        *("-np", "--num-proc"),
        type=number(int, 1),
        metavar="N",
        help="processes in all; so many of the hosts take part, the first ones",
    )
    add("--sync", action="store_true", help="copy this code to the nodes first")
    add("--fetch", action="store_true", help="bring the run directory back; needs --name")
    add("--port", type=number(int, 1, 65535), help="of the master; default: a free one there")
    add(
        *("--grace", "--grace-seconds"),
        type=amount,
        default=20.0,
        metavar="SECONDS",
        help="time for a snapshot before a training that was asked to stop is killed",
    )
    add(
        "--elastic",
        type=limits,
        metavar="MIN:MAX",
        help="any node may fail and come back: train on at least MIN and at most MAX of them, with "
        "a --name, and an --output-dir that all nodes share",
    )
    options = parser.parse_args(own)
    if not command:
        raise UserError("what to train is missing: ... HOSTS_FILE -- imagenet_ddp.py OPTIONS DATA")
    if bool(options.hosts) == bool(options.list):
        raise UserError("where to train: give either HOSTS_FILE or -H HOST:N,HOST:N")
    return options, command


def machines_of(options: argparse.Namespace) -> list[Host]:
    """The hosts that the options name. Raises: `UserError`."""
    found = hosts.of_list(options.list) if options.list else hosts.read(options.hosts)
    if len({host.slots for host in found}) > 1:
        raise UserError(f"{_source(options)}: give all nodes the same number of slots, or none")
    if options.num_proc is None:
        return found
    nodes, rest = divmod(options.num_proc, found[0].slots or 1)
    if found[0].slots is None or rest or nodes > len(found):
        slots = "unknown" if found[0].slots is None else found[0].slots
        raise UserError(
            f"-np {options.num_proc} does not fit {len(found)} hosts (slots of each: {slots}): all "
            "nodes that take part need the same number of processes"
        )
    return found[:nodes]


def _source(options: argparse.Namespace) -> str:
    return str(options.hosts or f"-H {options.list}")


def limits(text: str) -> tuple[int, int]:
    """MIN and MAX of --elastic."""
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise argparse.ArgumentTypeError(f"{text} is not of the form MIN:MAX, such as 1:4")
    return int(least), int(most)


def main() -> int:
    hosts.go_on_without_reader()
    hosts.hide_values()
    options, command = parse(sys.argv[1:])
    machines = machines_of(options)
    known = check(command, len(machines) > 1 or bool(machines[0].slots))
    if options.fetch and not known.name:
        raise UserError("--fetch needs --name, the run to bring back, among the training options")
    if options.elastic:
        job = _elastic(options, machines, command, known)
    else:
        if options.sync:
            copying.sync(options, machines)
        job = Job(options, machines, command)
    code = job.run()
    if options.fetch and (host := job.fetch_from):
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
            signal.signal(signum, signal.SIG_DFL)
        copying.fetch(options, host, known)
    return code


def check(command: list[str], several: bool) -> argparse.Namespace:
    """The name, resume and output_dir of a training; ``several``: on several nodes or processes.

    Raises: `UserError` if that script cannot be trained so.
    """
    script = command[0]
    if not (ROOT / script).is_file() or "/" in script or not script.startswith("imagenet_"):
        raise UserError(f"{script} is not a training script in {ROOT}")
    if script in ("imagenet_nd.py", "imagenet_dp.py") and several:
        raise UserError(f"{script} is one process on one node: use imagenet_ddp.py")
    training = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    training.add_argument("--name")
    training.add_argument("--resume")
    training.add_argument("--output-dir", default="runs")
    return training.parse_known_args(command[1:])[0]


def _elastic(
    options: argparse.Namespace,
    machines: list[Host],
    command: list[str],
    known: argparse.Namespace,
) -> Elastic:
    """The job whose nodes may come and go. Raises: `UserError`."""
    if command[0] in ("imagenet_nd.py", "imagenet_dp.py"):
        raise UserError(f"--elastic needs a script for several nodes, not {command[0]}")
    if not known.name:
        raise UserError("--elastic needs --name, the run to continue, among the training options")
    least, most = options.elastic
    if least > len(machines):
        raise UserError(f"--elastic {least}:{most}, but {_source(options)} names {len(machines)}")
    resume = [] if known.resume else ["--resume", "auto"]
    return Elastic(options, machines, [command[0], *resume, *command[1:]], options.elastic)


if __name__ == "__main__":
    errors.end_with(main)
