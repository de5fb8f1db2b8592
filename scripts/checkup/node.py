"""What every node finds out about itself and its links, when node 0 asks."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from checkup import facts, links
from checkup.meeting import Handlers
from checkup.messages import Message, plain

TORCH_LIMIT = 300.0  # seconds for the part that imports torch, all-reduces included


class Node:
    """Answers node 0's requests; `handlers` has the functions by name."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.seen_from = args.master  # own address on the connection to node 0
        self.endpoint: links.Endpoint | None = None
        self.handlers: Handlers = {
            "clock": lambda _: {"time": time.time()},
            "facts": self.facts,
            "open": self.open,
            "probe": links.probe,
            "transfer": links.transfer,
            "torch": self.torch,
        }

    def card(self) -> Message:
        """How this node introduces itself to node 0."""
        return {"rank": self.args.rank, "nodes": self.args.nodes, "host": os.uname().nodename}

    def facts(self, _: Message) -> Message:
        """Versions, GPUs, names, addresses, limits and data set of this node."""
        args = self.args
        found = {
            "versions": facts.versions(),
            "gpus": facts.gpus(),
            "name": facts.own_name(),
            "ways": facts.ways(args.master),
            "limits": facts.limits(args.output_dir),
            "data": facts.data_set(args.data),
            "seen_from": plain(self.seen_from),
        }
        if args.rank == 0:
            found |= facts.of_master(args.master)
        return found

    def open(self, request: Message) -> Message:
        """Open ports for the others to connect to; which ones."""
        self.endpoint = links.Endpoint(self.args.rank, request["token"])
        return {"ports": self.endpoint.ports}

    def torch(self, request: Message) -> Message:
        """Run torch_part.py; what it has found, and an "error" if it did not finish."""
        args = self.args
        order = {"arch": args.arch, "image_size": args.image_size, "ring": request["ring"]}
        if request["data"]:
            order["data"] = args.data
        line = [sys.executable, str(Path(__file__).with_name("torch_part.py")), json.dumps(order)]
        error = None
        try:
            done = subprocess.run(
                line, capture_output=True, text=True, timeout=TORCH_LIMIT, check=False
            )
            out, code = done.stdout, done.returncode
            if code:
                error = (done.stderr.strip().splitlines() or [f"exit code {code}"])[-1]
        except subprocess.TimeoutExpired as late:
            out = (late.stdout or b"").decode()
            error = f"not finished after {TORCH_LIMIT:g} s"
        found: Message = {}
        for answer in out.splitlines():
            if answer.startswith("{"):
                found |= json.loads(answer)
        return found | ({"error": error} if error else {})

    def close(self) -> None:
        """Close the ports."""
        if self.endpoint:
            self.endpoint.close()
