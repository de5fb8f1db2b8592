"""Where arms are trained: on hosts over ssh, or on this machine as if it were several nodes."""

import argparse
import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import copying
import hosts
from bench import namespaces
from bench.namespaces import Namespaces
from study import gpus
from study.arms import ONE_NODE, Arm, data_of, is_given, option
from study.running import Command, Runner

from utils.errors import INTERRUPTED, UserError
from utils.launch import network, supervise
from utils.option_types import AUTO

ROOT = hosts.ROOT
EMPTY_SECONDS = 30.0  # after a launcher's death; its nodes are empty 25 s later
# What only the launcher of the study may set.
_FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def script(name: str) -> str:
    """The path of a file in scripts/, as one would type it here."""
    path = ROOT / "scripts" / name
    return f"scripts/{name}" if Path.cwd() == ROOT else str(path)


class Simulated:
    """So many nodes that are processes of this machine, with equal shares of its cores.

    With ``link`` (a rate such as 300mbit) they are in network namespaces that it connects.
    """

    def __init__(self, nodes: int, link: str | None = None):
        """Raises: `UserError` for a rate that is none."""
        if link and not re.fullmatch(r"\d+(\.\d+)?[kmg]bit", link):
            raise UserError(f"--link {link} is not a rate such as 300mbit or 1gbit")
        self.link = link
        self.what = "nodes that are processes of this machine and share its cores"
        self.what += f", with links of {link}" if link else ""
        self.nodes, self.processes = nodes, 1
        self.cores = max(1, supervise.usable_cores() // nodes)
        self.has_gpus = gpu_count() >= nodes

    def names(self, arm: Arm) -> list[str]:
        """The nodes of an arm."""
        return [f"node{rank}" for rank in range(arm.nodes)]

    def commands(
        self, arm: Arm, port: int | None = None, spaces: Sequence[Namespaces] = ()
    ) -> list[Command]:
        """What is run, one command per node; in network namespaces, if there are any."""
        found = []
        master = namespaces.address(0) if self.link else "127.0.0.1"
        port = port or network.free_port()
        own = [] if arm.command[0] in ONE_NODE or is_given(arm.command, "-g") else ["-g", "1"]
        own += [] if is_given(arm.command, "-j") else ["-j", str(self.cores)]
        for rank, name in enumerate(self.names(arm)):
            meeting = (master, str(port), str(arm.nodes), str(rank))
            places = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK")
            environment = dict(zip(places, meeting, strict=True)) if arm.nodes > 1 else {}
            environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(self.cores))
            environment["CUDA_VISIBLE_DEVICES"] = str(rank) if self.has_gpus else ""
            words = [sys.executable, str(ROOT / arm.command[0]), *own, *arm.command[1:]]
            inside = spaces[rank].enter if spaces else ()
            found.append(Command([*inside, *words], name, environment))
        return found

    def lines(self, arm: Arm) -> list[str]:
        """The commands of an arm, to be read and typed."""
        return [
            shlex.join([*(f"{k}={v}" for k, v in one.environment.items() if v), *one.words])
            for one in self.commands(arm, 8888)
        ]

    def check(self, runner: Runner, arms: list[Arm], folder: Path) -> None:
        """Nothing to check: the training itself does."""

    def train(self, runner: Runner, arm: Arm, folder: Path) -> int:
        """Train an arm. Returns: the exit code."""
        for name in _FOREIGN:
            os.environ.pop(name, None)

        def dump() -> None:
            keep_dump(folder / f"{arm.name}.nvidia-smi.txt", [("this machine", gpus.dump())])

        with contextlib.ExitStack() as stack:
            spaces = stack.enter_context(namespaces.network(arm.nodes)) if self.link else ()
            for space in spaces:
                namespaces.limit(space, self.link)
            return runner.run(self.commands(arm, spaces=spaces), arm.run / "study.log", dump)

    def wait_until_empty(self, silent: float) -> None:
        """The processes of a launcher that was killed have died with it."""


class Hosts:
    """The first hosts of a file, by train_on_nodes.sh."""

    what = "hosts"

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.machines = hosts.read(options.hosts)
        self.lines_of_file = [
            line for line in options.hosts.read_text().splitlines() if line.split("#")[0].split()
        ]
        self.nodes = len(self.machines)
        slots = {host.slots for host in self.machines}
        if len(slots) > 1:
            raise UserError(f"{options.hosts}: give all nodes the same number of slots, or none")
        self.processes = slots.pop()  # of each node; None: one per GPU

    def names(self, arm: Arm) -> list[str]:
        """The nodes of an arm."""
        return [host.name for host in self.machines[: arm.nodes]]

    def file(self, folder: Path, nodes: int) -> Path:
        """The hosts file of the arms with so many nodes."""
        return folder / f"hosts_{nodes}"

    def _ours(self) -> list[str]:
        """The options that say how to reach the hosts. No values of --env: they may be secrets."""
        options, words = self.options, []
        for name in ("dir", "python", "ssh"):
            value = getattr(options, name)
            if value and value != {"dir": hosts.default_directory(), "ssh": "ssh"}.get(name):
                words += [f"--{name}", value]
        for name, _ in options.env or ():
            words += ["--env", name]
        return words

    def words(self, arm: Arm, folder: Path) -> list[str]:
        """The command of an arm."""
        start = ["bash", script("train_on_nodes.sh"), str(self.file(folder, arm.nodes))]
        return [*start, "--fetch", *self._ours(), "--", *arm.command]

    def lines(self, arm: Arm) -> list[str]:
        """The command of an arm, to be read and typed."""
        return [shlex.join(self.words(arm, self.options.logbook / self.options.name))]

    def _write(self, folder: Path, nodes: int) -> None:
        self.file(folder, nodes).write_text("\n".join(self.lines_of_file[:nodes]) + "\n")

    def check(self, runner: Runner, arms: list[Arm], folder: Path) -> None:
        """Copy the code to all hosts that the arms need, if that was asked for, and ask the doctor
        about them. Raises: `UserError`."""
        arm = max(arms, key=lambda arm: arm.nodes)
        if self.options.sync:
            for host in self.machines[: arm.nodes]:
                copying.sync(self.options, host)
        if self.options.no_doctor:
            return
        self._write(folder, arm.nodes)
        words = ["bash", script("doctor.sh"), str(self.file(folder, arm.nodes)), *self._ours()]
        for name, ours in (("--data", data_of(arm.command)), ("-a", None), ("-b", None)):
            value = ours or (option(arm.command, name) if name != "--data" else None)
            words += [name, value] if value and value != AUTO else []
        print(f"+ {shlex.join(words)}", flush=True)
        code = runner.run([Command(words, environment=self._values())], None)
        if runner.stops:
            raise UserError("stopped before the first arm", code=INTERRUPTED)
        if code not in (0, 1):
            raise UserError(
                "the nodes are not ready, see above: correct that and type the same line again "
                "(--no-doctor trains all the same)"
            )

    def _values(self) -> dict[str, str]:
        return dict(self.options.env or ())

    def train(self, runner: Runner, arm: Arm, folder: Path) -> int:
        """Train an arm, and bring its run here. Returns: the exit code."""
        self._write(folder, arm.nodes)

        def dump() -> None:
            answers = hosts.ask_all(
                str(self.file(folder, arm.nodes)), self.options.ssh, gpus.__file__, {}
            )
            found = [(host.name, text) for host, code, text in answers if code == 0]
            keep_dump(folder / f"{arm.name}.nvidia-smi.txt", found)

        command = Command(
            self.words(arm, folder),
            environment=self._values(),
            signals=(signal.SIGINT, signal.SIGINT),
        )
        return runner.run([command], arm.run / "study.log", dump)

    def wait_until_empty(self, silent: float) -> None:
        """Give the nodes of a launcher that was killed the time to end what it had started."""
        left = math.ceil(EMPTY_SECONDS - silent)
        if left > 0:
            print(
                f"the last launcher died a moment ago: its nodes need {left} s to notice",
                flush=True,
            )
            time.sleep(left)


def keep_dump(path: Path, found: list[tuple[str, str]]) -> None:
    """Write what nvidia-smi has said on each node, if it has said anything."""
    if any(text.strip() for _, text in found):
        path.write_text("".join(f"# {name}\n{text.rstrip()}\n\n" for name, text in found))


def gpu_count() -> int:
    """GPUs of this machine, by nvidia-smi: torch would take seconds to ask."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(done.stdout.splitlines()) if done.returncode == 0 else 0
