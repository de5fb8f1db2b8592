#!/usr/bin/env python3
"""Train on the nodes of a running Ray cluster, with the unchanged training scripts.

    python scripts/examples/ray_train.py --nodes 2 -- imagenet_ddp.py -a resnet50 --name my_run DATA
    python scripts/examples/ray_train.py --nodes 1:4 --gpus 1 -- imagenet_ddp.py --name my_run DATA

Ray finds the nodes (its autoscaler may start them: ray_g4dn.yaml), notices when one is lost, and
carries output and orders. The training processes do not use Ray. The job works in the same way as
train_on_nodes.sh --elastic (scripts/ssh/job.py). Instead of ssh, an actor on each node reserves the
GPUs and runs scripts/ssh/guard.py. When a node is lost or comes back, the job resumes from the
latest snapshot on the nodes that are available. Ctrl-C ends it with a snapshot.

Needs `pip install ray` in one version on all nodes, this code and the data at one path, and an
--output-dir that the nodes share. If the cluster's head node dies, the job ends.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts/ssh")]

import hosts
import launcher
from hosts import MARKER, SSH_FAILED, Host, note
from job import Job

from utils import errors
from utils.errors import UserError
from utils.option_types import Formatter, count

try:
    import ray
except ImportError:  # `main` reports it, after it has parsed the options
    ray = None


class Holder:
    """An actor that reserves a node's resources and runs the guard there. Ray sends the class by
    value, so nodes need no file of this repository. If the actor dies, its guard ends the job."""

    def __init__(self, bootstrap: str, program: bytes, mark: dict[str, str]):
        """Run the guard, ``program``, with this Python."""
        self.guard = subprocess.Popen(
            [sys.executable, "-u", "-c", bootstrap],
            env=dict(os.environ, **mark),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.say(program)

    def say(self, order: bytes) -> None:
        """Pass a heartbeat or an order on to the guard."""
        with contextlib.suppress(OSError):  # it has ended
            self.guard.stdin.write(order)
            self.guard.stdin.flush()

    def listen(self) -> bytes | int:
        """Wait for the guard's next line of output; at the end, return its exit code."""
        return self.guard.stdout.readline() or self.guard.wait()


class Pipe:
    """A `Holder` with those methods of `subprocess.Popen` that scripts/ssh/job.py uses for ssh."""

    stderr = ()

    def __init__(self, holder: Any):
        self.holder, self.code = holder, SSH_FAILED  # the code of a lost ssh connection
        self.stdin = self.stdout = self

    def write(self, order: bytes) -> None:
        with contextlib.suppress(Exception):  # the node may be lost
            self.holder.say.remote(order)

    def flush(self) -> None:
        """Do nothing: `write` does not buffer."""

    def __iter__(self) -> Iterator[bytes]:
        with contextlib.suppress(ray.exceptions.RayError):
            while isinstance(line := ray.get(self.holder.listen.remote()), bytes):
                yield line
            self.code = line

    def terminate(self) -> None:
        """Free the node's resources."""
        with contextlib.suppress(Exception):
            ray.kill(self.holder)

    def wait(self) -> int:
        self.terminate()
        return self.code


class RayJob(Job):
    """A job on those nodes of a Ray cluster that have enough GPUs and CPUs."""

    def __init__(self, options: argparse.Namespace, *more: Any):
        from ray.autoscaler.sdk import request_resources

        super().__init__(options, *more)
        self.bundle = {kind: n for kind, n in (("CPU", options.cpus), ("GPU", options.gpus)) if n}
        request_resources(bundles=[self.bundle] * self.most)  # no effect without an autoscaler

    def hosts(self) -> list[Host]:
        """At most MAX nodes: surviving ones first, then new ones."""
        alive = []
        for node in ray.nodes():
            has = node["Resources"] if node["Alive"] else {}
            if all(has.get(kind, 0) >= n for kind, n in self.bundle.items()):
                address = f"{node['NodeID']}@{node['NodeManagerHostname']}"
                alive.append(Host(address, ip=node["NodeManagerAddress"]))
        kept = [host for host in self.machines if host in alive]
        self.machines = (kept + [host for host in alive if host not in kept])[: self.most]
        return self.machines

    def open(self, host: Host, program: bytes) -> Pipe:
        """Start an actor, with the guard, on a node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = NodeAffinitySchedulingStrategy(host.address.partition("@")[0], soft=False)
        needs = {"num_cpus": self.options.cpus, "num_gpus": self.options.gpus}
        holder = ray.remote(Holder).options(**needs, max_concurrency=8, scheduling_strategy=place)
        return Pipe(holder.remote(hosts.BOOTSTRAP, program, {MARKER: self.mark}))

    def unreachable(self, host: Host) -> str:
        return f"no answer from {host.name}"


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own options, and SCRIPT with its options. Raises: `UserError`."""
    own, command = launcher.split(words)
    usage = "python scripts/examples/ray_train.py --nodes N [options] -- SCRIPT TRAINING OPTIONS"
    parser = argparse.ArgumentParser(
        usage=usage, description=__doc__, formatter_class=Formatter, allow_abbrev=False
    )
    add = parser.add_argument
    text = "Ray's head node; default: $RAY_ADDRESS, else this machine"
    add("--address", default="auto", help=text)
    text = "number of nodes"
    add("--nodes", dest="elastic", type=_nodes, required=True, metavar="N|MIN:MAX", help=text)
    add("--gpus", type=count, help="GPUs per node, one process each; default: all")
    add("--cpus", type=count, default=1, help="CPUs per node that Ray reserves")
    hosts.add_node_options(parser)
    parser.set_defaults(port=None)
    options = parser.parse_args(own)
    if not command:
        raise UserError("what to train is missing: ... --nodes 2 -- imagenet_ddp.py OPTIONS DATA")
    options.script = launcher.check(command, several=True, again=True)
    return options, command


def _nodes(text: str) -> tuple[int, int]:
    return launcher.limits(text if ":" in text else f"{text}:{text}")


def main() -> int:
    options, command = parse(sys.argv[1:])
    if ray is None:
        raise UserError(f"Ray is not installed for {sys.executable}: pip install ray")
    try:
        ray.init(options.address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"no Ray cluster at --address {options.address} ({reason}): start one with "
            "`ray start --head`, or give the address that it printed"
        ) from None
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    if options.gpus is None:
        options.gpus = int(max(n["Resources"].get("GPU", 0) for n in ray.nodes() if n["Alive"]))
        if not options.gpus:
            note("no node of the cluster has a GPU: training on CPUs (--gpus N waits for GPUs)")
    if not options.gpus:  # hide GPUs that Ray has not assigned
        options.env = [("CUDA_VISIBLE_DEVICES", ""), *(options.env or ())]
    if not (ROOT / ".venv").exists():
        options.python = options.python or sys.executable
    job = RayJob(options, command, [], f"guard:{options.script.name}")
    job.wait_seconds = options.script.dist_timeout or 1800.0  # new machines take minutes
    try:
        return job.run()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    errors.exit_with(main)
