#!/usr/bin/env python3
"""Train on the nodes of a Ray cluster that exists already; the training scripts stay as they are.

    python scripts/examples/ray_train.py --nodes 2 -- imagenet_ddp.py -a resnet50 --name my_run DATA
    python scripts/examples/ray_train.py --nodes 1:4 --gpus 1 -- imagenet_ddp.py --name my_run DATA

Ray finds the nodes (its autoscaler may start them: ray_g4dn.yaml), notices when one is lost, and
carries output and orders; nothing of it is in the training. On each node an actor holds the GPUs of
one bundle of a placement group, and scripts/ssh/guard.py below it runs the script, one process per
GPU, which meets the others as if started by hand. When a node is lost, or comes back, training goes
on from the latest snapshot on the nodes that are there. Ctrl-C ends it with a snapshot.

Needs `pip install ray` in one version on all nodes, this code and the data at one path, and an
--output-dir that the nodes share. The cluster's head must live: without it, all ends.
"""

import argparse
import contextlib
import queue
import secrets
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts/ssh")]

import guard  # noqa: E402
import hosts  # noqa: E402
import launcher  # noqa: E402
from connection import Screen  # noqa: E402
from hosts import note  # noqa: E402

from utils import errors  # noqa: E402
from utils.errors import BAD_INPUT, INTERRUPTED, UserError  # noqa: E402
from utils.launch.supervise import MARKER  # noqa: E402
from utils.option_types import Formatter, amount, count  # noqa: E402

try:
    import ray
    import ray_nodes
except ImportError:  # `main` says so, once the options are understood
    ray = None

WAIT_SECONDS = 1800.0  # for as many nodes as training needs at least; new machines take minutes
START_SECONDS = 120.0  # for the actors
SETTLE_SECONDS, LOOK_SECONDS = 30.0, 5.0  # an attempt lasts so long before it makes room for a node
LOST_SECONDS = 6.0  # for the other nodes to end once one has failed
QUICK_SECONDS, QUICK_FAILURES = 120.0, 5  # so many such short attempts in a row are no accident
PAUSE_SECONDS = 5.0  # before the second attempt; then twice as long, and so on
LOST = None  # in place of the exit code of a node that is gone


class Job:
    """A training, attempt after attempt, until it ends."""

    def __init__(self, options: argparse.Namespace, command: list[str]):
        self.options, self.command = options, command
        self.bundle = {"CPU": options.cpus, "GPU": options.gpus}  # of each node
        self.name, self.number = secrets.token_hex(4), 0
        self.events: queue.SimpleQueue = queue.SimpleQueue()
        self.interrupts = 0
        self.quick = 0  # attempts in a row that failed soon
        self.seats: list[Any] = []
        self.codes: dict[int, int | None] = {}  # of the nodes that have ended, by rank, in order

    def run(self) -> int:
        """Train until the end, whoever takes part. Returns the exit code. Raises: `UserError`."""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._interrupt)
        threading.Thread(target=self._beat, daemon=True).start()
        code = None
        while code is None:
            groups, nodes = self._nodes()
            self.codes, began, joining = {}, time.monotonic(), False
            try:
                joining = self._attempt(groups, nodes)
            except ray.exceptions.RayError as fault:
                note(f"training could not begin: {_line(fault)}")
                self.codes = {0: 1}
            finally:
                for seat in self.seats:
                    ray.kill(seat)
                self.seats = []
                for group in groups:
                    ray.util.remove_placement_group(group)
            code = self._judge(joining, time.monotonic() - began)
        return code

    def _interrupt(self, signum: int, frame: Any) -> None:
        self.interrupts += 1
        self.events.put(("signal", signum, None))

    def _nodes(self) -> tuple[list[Any], int]:
        """Wait for nodes. Returns: a placement group, if necessary a second one that waits for the
        nodes that are missing, and of how many the first is. Raises: `UserError`."""
        began, next_line = time.monotonic(), 2.0
        wish = " and ".join(f"{n} {kind}" for kind, n in self.bundle.items() if n)
        for group, nodes, ready in ray_nodes.reserve(self.bundle, self.options.nodes):
            waited, why = time.monotonic() - began, ""
            if self.interrupts:
                why, code = "interrupted while waiting for nodes", INTERRUPTED
            elif ready:
                break
            elif waited > WAIT_SECONDS:
                why = f"there were not {nodes} nodes with {wish} free within {WAIT_SECONDS:g} s"
                code = 1 if self.number else BAD_INPUT
            elif waited > next_line:
                next_line = waited + (5 if waited < 60 else 15)
                note(
                    f"waiting for {nodes} nodes with {wish} free on each: the cluster has "
                    f"{ray_nodes.fitting(self.bundle)} of this size ({waited:.0f} s, at most "
                    f"{WAIT_SECONDS:g})"
                )
            if why:
                ray.util.remove_placement_group(group)
                raise UserError(why, code=code)
        missing = self.options.nodes[1] - nodes
        return [group, *([ray_nodes.ask_for(missing, self.bundle)] if missing else [])], nodes

    def _attempt(self, groups: list[Any], nodes: int) -> bool:
        """One start of the training. Returns: whether it has ended to make room for more nodes."""
        self.seats = ray_nodes.seats(groups[0], nodes, self.bundle)
        hellos = ray.get([seat.hello.remote() for seat in self.seats], timeout=START_SECONDS)
        names = [hello["name"] for hello in hellos]
        if len(set(names)) < nodes:  # a machine may be several of Ray's nodes
            names = [f"{name}:{rank}" for rank, name in enumerate(names)]
        again = "again " if self.number else ""
        note(f"training begins {again}on {', '.join(names)}")
        self.number += 1
        screen, starts = Screen(names), []
        for rank, seat in enumerate(self.seats):
            job = self._job(rank, nodes, hellos[0])
            line = f"+ cd {job['folder']}; NODE_RANK={rank} python {shlex.join(self.command)}"
            screen.line(names[rank], line.encode())
            program = hosts.program(Path(guard.__file__), {})
            starts.append(seat.start.remote(hosts.bootstrap(), program, job, {MARKER: "guard"}))
        ray.get(starts, timeout=START_SECONDS)
        for place in enumerate(self.seats):
            more = (screen, names)
            threading.Thread(target=self._follow, args=(*place, *more), daemon=True).start()
        return self._wait(names, groups[1:])

    def _job(self, rank: int, nodes: int, first: dict[str, Any]) -> dict[str, Any]:
        """What the guard on a node is to run; its script takes all GPUs that Ray shows it."""
        environment = {
            "MASTER_ADDR": first["address"],
            "MASTER_PORT": str(first["port"]),
            "WORLD_SIZE": str(nodes),
            "NODE_RANK": str(rank),
            "IMAGENET_ELASTIC": f"{self.name}:{self.number}",
        }
        if not self.options.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""  # none that Ray has not given
        return {
            "command": list(self.command),
            "folder": self.options.dir,
            "environment": environment | dict(self.options.env or ()),
            "python": self.options.python,
            "grace": self.options.grace,
        }

    def _follow(self, rank: int, seat: Any, screen: Screen, names: list[str]) -> None:
        """Show what a node prints, until it ends."""
        code = None
        try:
            while code is None:
                lines, code = ray.get(seat.follow.remote())
                for stream, line in lines:
                    text = line.replace(guard.ALIVE, b"")
                    if text and not text.startswith(guard.HELLO.encode()):
                        screen.line(names[rank], text, sys.stdout if stream == 1 else sys.stderr)
        except ray.exceptions.RayError:
            code = LOST
        self.events.put(("ended", rank, code))

    def _beat(self) -> None:
        """Send heartbeats, for ever: a guard that misses them ends its training."""
        while True:
            time.sleep(guard.HEARTBEAT_SECONDS)
            self._say(b"\n")

    def _say(self, order: bytes) -> None:
        for seat in self.seats:
            with contextlib.suppress(Exception):  # of a node that is gone
                seat.say.remote(order)

    def _wait(self, names: list[str], more: list[Any]) -> bool:
        """Wait until all nodes have ended. Returns: whether that was to make room for ``more``."""
        began = looked = time.monotonic()
        ending = joining = False
        while len(self.codes) < len(names):
            what, which, code = "", 0, None
            with contextlib.suppress(queue.Empty):
                what, which, code = self.events.get(timeout=1)
            now = time.monotonic()
            if what == "signal" and self.interrupts > 1:
                note("ending all nodes at once")
                self._say(b"KILL\n")
            elif what == "signal":
                note(f"asking all nodes to stop with a snapshot within {self.options.grace:g} s")
                self._say(b"TERM\n")
                ending = True
            elif what == "ended":
                self.codes[which] = code
                if code != 0 and not ending:
                    how = "is lost" if code is LOST else f"ended with exit code {code}"
                    note(f"{names[which]} {how}; stopping the rest")
                    ending = True
                    self._end()
            elif not ending and now - began > SETTLE_SECONDS and now - looked > LOOK_SECONDS:
                looked = now
                here = len(names) < ray_nodes.fitting(self.bundle)
                if here and any(group.wait(timeout_seconds=0) for group in more):
                    note("stopping with a snapshot, to go on with more nodes")
                    ending = joining = True
                    self._say(b"TERM\n")
        return joining

    def _end(self) -> None:
        """Without one node the others cannot agree on a snapshot, and may hang."""
        self._say(b"TERM\n")
        timer = threading.Timer(LOST_SECONDS, self._say, (b"KILL\n",))
        timer.daemon = True
        timer.start()

    def _judge(self, joining: bool, seconds: float) -> int | None:
        """The job's exit code after an attempt of so many seconds, or None to go on."""
        codes = list(self.codes.values())
        failed = [code for code in codes if code]
        if self.interrupts:
            return INTERRUPTED if INTERRUPTED in codes else (failed or [0])[0]
        if self.codes.get(0) == 0:
            return 0
        if LOST in codes or joining:
            self.quick = 0
            return None
        if failed[0] == BAD_INPUT:
            return BAD_INPUT
        self.quick = self.quick + 1 if seconds < QUICK_SECONDS else 1
        if self.quick >= QUICK_FAILURES:
            note(f"training has failed {self.quick} times in a row soon after its start")
            return failed[0]
        until = time.monotonic() + PAUSE_SECONDS * 2 ** (self.quick - 1)
        while time.monotonic() < until and not self.interrupts:
            time.sleep(0.5)
        return None


def _line(fault: Exception) -> str:
    return (str(fault).strip() or type(fault).__name__).splitlines()[0]


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's own options, and SCRIPT with its options. Raises: `UserError`."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    own, command = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(
        usage="python scripts/examples/ray_train.py --nodes N [options] -- SCRIPT TRAINING OPTIONS",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--address", default="auto", help="of Ray's head; default: $RAY_ADDRESS, else this machine")
    add("--nodes", type=_nodes, required=True, metavar="N|MIN:MAX", help="how many to train on")
    add("--gpus", type=count, help="per node, with a process each; default: all that a node has")
    add("--cpus", type=count, default=1, help="per node, that Ray sets aside for the training")
    hosts.add_node_options(parser)
    text = "time for a snapshot before a training that was asked to stop is killed"
    add("--grace", type=amount, default=20.0, metavar="SECONDS", help=text)
    options = parser.parse_args(own)
    if not command:
        raise UserError("what to train is missing: ... --nodes 2 -- imagenet_ddp.py OPTIONS DATA")
    known = launcher.check(command, several=True)
    if not known.name:
        raise UserError("--name, the run to continue when a node fails, is missing after --")
    resume = [] if known.resume else ["--resume", "auto"]
    return options, [command[0], *resume, *command[1:]]


def _nodes(text: str) -> tuple[int, int]:
    return launcher.limits(text if ":" in text else f"{text}:{text}")


def main() -> int:
    hosts.go_on_without_reader()
    hosts.hide_values()
    options, command = parse(sys.argv[1:])
    if ray is None:
        raise UserError(f"Ray is not installed for {sys.executable}: pip install ray")
    try:
        ray.init(options.address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError) as fault:
        raise UserError(
            f"no Ray cluster at --address {options.address} ({_line(fault)}): begin one with "
            "`ray start --head`, or give the address that it has printed"
        ) from None
    if options.gpus is None:
        options.gpus = ray_nodes.most_gpus()
        if not options.gpus:
            note("no node of the cluster has a GPU: training on CPUs (--gpus N waits for GPUs)")
    try:
        return Job(options, command).run()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    errors.end_with(main)
