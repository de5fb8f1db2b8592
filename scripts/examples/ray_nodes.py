"""The nodes of a Ray cluster, for ray_train.py: waiting for them, and the actor on each."""

import contextlib
import json
import math
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group

MOST_SECONDS, FEWER_SECONDS = 10.0, 3.0  # to ask for all nodes, and for each number below


class Seat:
    """An actor, which holds one node's part in a training; Ray sends it there, so it needs nothing
    of this repository."""

    def hello(self) -> dict[str, Any]:
        """Name and address of this node, and a port that was free on it a moment ago."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        address = ray.util.get_node_ip_address()
        return {"name": socket.gethostname(), "address": address, "port": port}

    def start(self, words: list[str], program: bytes, job: dict, mark: dict[str, str]) -> None:
        """Run a guard, ``program``, by this Python, and ``job`` below it.

        When this process dies, nobody holds the guard's input any more, and it ends the job.
        """
        venv = os.path.join(os.path.expanduser("~"), job["folder"], ".venv")
        if not os.path.exists(venv):
            job["python"] = job["python"] or sys.executable
        self.guard = subprocess.Popen(
            [sys.executable, *words],
            env=dict(os.environ, **mark),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.lines: queue.SimpleQueue = queue.SimpleQueue()

        def read(number: int, stream: Any) -> None:
            for line in stream:
                self.lines.put((number, line))

        streams = ((1, self.guard.stdout), (2, self.guard.stderr))
        self.readers = [threading.Thread(target=read, args=one, daemon=True) for one in streams]
        for reader in self.readers:
            reader.start()
        self.say(program + json.dumps(job).encode() + b"\n")

    def say(self, order: bytes) -> None:
        """Pass a heartbeat or an order on to the guard."""
        with contextlib.suppress(OSError, AttributeError):  # it has ended, or not begun
            self.guard.stdin.write(order)
            self.guard.stdin.flush()

    def follow(self) -> tuple[list[tuple[int, bytes]], int | None]:
        """What was printed since the last call, within a second; at the end the exit code."""
        over = not any(reader.is_alive() for reader in self.readers)
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self.lines.get(timeout=0 if over else 1))
            while len(found) < 1000:
                found.append(self.lines.get_nowait())
        return found, self.guard.wait() if over and not found else None


def seats(group: Any, nodes: int, bundle: dict[str, int]) -> list[Any]:
    """A `Seat` on each node of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    kind = ray.remote(num_cpus=bundle["CPU"], num_gpus=bundle["GPU"], max_concurrency=8)(Seat)
    places = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(nodes)]
    return [kind.options(scheduling_strategy=place).remote() for place in places]


def most_gpus() -> int:
    """GPUs of the node that has the most."""
    return int(max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]))


def fitting(bundle: dict[str, int]) -> int:
    """How many nodes of the cluster have what is in ``bundle`` ("CPU", "GPU"), free or not."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(all(node.get(kind, 0) >= n for kind, n in bundle.items()) for node in nodes)


def ask_for(nodes: int, bundle: dict[str, int]) -> Any:
    """A placement group of a ``bundle`` on each of so many nodes, ready or not; Ray's autoscaler
    tries to start nodes for one that is not."""
    wish = {kind: n for kind, n in bundle.items() if n}
    return placement_group([wish] * nodes, strategy="STRICT_SPREAD")


def reserve(bundle: dict[str, int], limits: tuple[int, int]) -> Iterator[tuple[Any, int, bool]]:
    """Ask for MAX nodes, then for fewer of them down to MIN, round and round until they are free.

    Yields once a second: a placement group, of how many nodes, and whether it is ready, which ends
    this.
    """
    least, most = limits
    while True:
        for nodes in range(most, least - 1, -1):
            group = ask_for(nodes, bundle)
            seconds = MOST_SECONDS if nodes == most else FEWER_SECONDS
            until = time.monotonic() + seconds if least < most else math.inf
            while time.monotonic() < until:
                ready = group.wait(timeout_seconds=1)
                yield group, nodes, ready
                if ready:
                    return
            remove_placement_group(group)
