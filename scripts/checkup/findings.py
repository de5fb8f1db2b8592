"""Findings: what was found, why it matters, what to do; and how they are printed."""

import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

OK, WARNING, FAULT = "ok", "warning", "fault"
EXIT = {OK: 0, WARNING: 1, FAULT: 2}
_MARK = {OK: "✓", WARNING: "!", FAULT: "✗"}
_COLOUR = {OK: "\033[32m", WARNING: "\033[33m", FAULT: "\033[31m"}


@dataclass(frozen=True)
class Finding:
    """One result of a check. ``nodes``: the ranks it is about (none: all)."""

    name: str
    level: str
    what: str
    why: str = ""
    remedy: str = ""
    nodes: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `Finding(**...)` restores it."""
        return asdict(self)


@dataclass
class Checkup:
    """Everything that was asked and measured. Dictionaries are by node rank."""

    nodes: int
    options: dict[str, Any]  # of scripts/doctor.py, as typed on node 0
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)  # why a node no longer answers
    clocks: dict[int, tuple[float, float]] = field(default_factory=dict)  # ahead, error; s
    ways: list[dict[str, Any]] = field(default_factory=list)  # from, to, address, port, reason ...
    ring: dict[int, dict[int, float]] = field(default_factory=dict)  # streams: node: bytes/s
    torch: dict[int, dict[str, Any]] = field(default_factory=dict)

    def node(self, rank: int) -> str:
        """A node as people know it: rank and host name."""
        host = self.facts.get(rank, {}).get("name", {}).get("host")
        return f"node {rank} ({host})" if host else f"node {rank}"

    def named(self, ranks: list[int]) -> str:
        """Several nodes, listed for a sentence; "all nodes" if it is all of them."""
        if len(ranks) == self.nodes > 1:
            return "all nodes"
        names = [self.node(rank) for rank in ranks]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def worst(found: list[Finding]) -> int:
    """The exit code: 0 all is well, 1 warnings, 2 faults."""
    return max((EXIT[finding.level] for finding in found), default=0)


def show(found: list[Finding]) -> None:
    """Print findings, the good ones first, one line each. Colour only on a terminal."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for finding in sorted(found, key=lambda one: EXIT[one.level]):
        mark = _MARK[finding.level]
        if coloured:
            mark = f"{_COLOUR[finding.level]}{mark}\033[0m"
        print(f"{mark} {clean(finding.what)}")
        if finding.why:
            print(f"    why it matters: {clean(finding.why)}")
        if finding.remedy:
            print(f"    what to do: {clean(finding.remedy)}")
    sys.stdout.flush()


def clean(text: str) -> str:
    """A text for a terminal: what another machine has sent must not control it."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def verdict(found: list[Finding]) -> str:
    """The last line: how many faults and warnings there are."""
    faults, warnings = (sum(one.level == level for one in found) for level in (FAULT, WARNING))
    if not faults and not warnings:
        return f"all is well ({len(found)} checks)"
    counts = [(faults, "fault"), (warnings, "warning")]
    return ", ".join(f"{n} {name}{'s' * (n > 1)}" for n, name in counts if n)
