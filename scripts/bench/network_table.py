"""The table of `bench_network.py`: what was measured, in the units of the real thing."""

from dataclasses import dataclass
from datetime import date
from statistics import median
from typing import Any

from compare.results import fence
from compare.table import markdown_table

Found = list[tuple["Case", dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """A model on so many nodes: ``compute_s`` and ``gbit`` are those of the real thing."""

    arch: str
    classes: int
    precision: str
    compute_s: float
    gbit: float
    nodes: int
    methods: tuple[str, ...]
    slow_down: int
    shrink: int

    def __str__(self) -> str:
        return f"{self.arch}, {self.precision}, {self.gbit:g} Gbit/s, {self.nodes} nodes"

    @property
    def link_bits_per_s(self) -> float:
        """What the kernel is to let through."""
        return self.gbit * 1e9 / self.slow_down / self.shrink


@dataclass(frozen=True)
class Row:
    """One method in one case; seconds, bytes and shares of the real thing."""

    sent: float
    compute_s: float
    step_s: float
    hidden: float
    speed_up: float


def row_of(case: Case, name: str, found: dict[str, Any]) -> Row:
    """What was found for a method, beside the first method."""

    def steps(of: str) -> list[float]:
        return [one["step_s"] / case.slow_down for one in found[of]["rounds"]]

    sent = median(one["bytes"] for one in found[name]["rounds"]) * case.shrink
    step, compute = median(steps(name)), median(steps("compute"))
    return Row(
        sent,
        compute,
        step,
        min(1.0, max(0.0, 1 - (step - compute) / (8 * sent / (case.gbit * 1e9)))),
        median(a / b for a, b in zip(steps(case.methods[0]), steps(name), strict=True)),
    )


def table(found: Found) -> tuple[list[str], list[list[str]]]:
    """Head and rows."""
    head = ["model", "compute, ms", "Gbit/s", "nodes", "method", "MB sent", "step, ms"]
    head += ["efficiency", "hidden", f"to {found[0][0].methods[0]}"]
    rows = []
    for case, one in found:
        for name in case.methods:
            row = row_of(case, name, one)
            line = [f"{case.arch} {case.precision}", f"{1000 * row.compute_s:.0f}"]
            shown = f"auto: {one[name]['method']}" if name == "auto" else name
            line += [f"{case.gbit:g}", str(case.nodes), shown, f"{row.sent / 1e6:.1f}"]
            line += [
                f"{1000 * row.step_s:.0f}",
                f"{row.compute_s / row.step_s:.0%}",
                f"{row.hidden:.0%}",
            ]
            rows.append([*line, f"{row.speed_up:.2f}"])
    return head, rows


def as_text(head: list[str], rows: list[list[str]]) -> str:
    """The table in columns."""
    lines = [head, *rows]
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, wide)) for line in lines)


def remarks(found: Found) -> list[str]:
    """What one has to know to read the table."""
    case = found[0][0]
    behind = []
    for one, measured in found:
        rows = {name: row_of(one, name, measured) for name in one.methods}
        chosen = rows.pop("auto", None)
        if chosen and rows:
            behind.append(chosen.step_s / min(row.step_s for row in rows.values()) - 1)
    said = [
        "MB are per step and node, headers included; hidden is the share of the time to send them "
        "that the step does not become longer by; compute is what a step takes without any "
        "exchange."
    ]
    if case.slow_down > 1 or case.shrink > 1:
        said.append(
            f"Compute was {case.slow_down} times longer and links {case.slow_down} times slower; "
            f"tensors and links {case.shrink} times smaller."
        )
    if behind:
        near = sum(one <= 0.05 for one in behind)
        said.append(
            "auto's step is at most 5 % longer than that of the best method beside it in "
            f"{near} of {len(behind)} cases; at worst {max(behind):.0%}."
        )
    if case.shrink > 1 and any(name.startswith("powersgd") for name in case.methods):
        said.append(
            f"PowerSGD sends relatively more here, {case.shrink**0.5:.0f} times, as a smaller "
            "matrix has larger factors."
        )
    return said


def section(
    title: str, command: str, rows: tuple[list[str], list[list[str]]], said: list[str]
) -> str:
    """A section of Markdown."""
    parts = [f"## {title}", fence(command), markdown_table(*rows), "\n".join(said)]
    return "\n\n".join([*parts, f"{date.today():%d %B %Y}."])
