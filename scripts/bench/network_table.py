"""The table of `bench_network.py`: what was measured, in the units of the real thing, and the
forecast beside it. Standard library only."""

from dataclasses import dataclass
from datetime import date
from statistics import median
from typing import Any

from compare.table import fence, markdown_table, text_table
from forecast import buckets
from forecast.scaling import Cluster

from utils.comm import cost

SHARE = Cluster().protocol  # of the link, which an all-reduce gets
LATENCY_S = 1e-4  # of a hop between namespaces; steps here take seconds

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

    def forecast(self, name: str, compute_s: float, codec_s_per_value: float) -> float:
        """Seconds per step of the real thing, from what it computes.

        ``codec_s_per_value`` is that of the cores here.
        """
        layers = buckets.shrink(buckets.layers(self.arch, self.classes), self.shrink)
        packed, how = buckets.fill(layers, self.shrink), cost.method(name)
        link = cost.Link(self.nodes, SHARE * self.link_bits_per_s / 8, LATENCY_S)
        slow = compute_s * self.slow_down
        return cost.step_seconds(slow, packed, link, how, codec_s_per_value) / self.slow_down


@dataclass(frozen=True)
class Row:
    """One method in one case; seconds, bytes and shares of the real thing."""

    sent: float
    compute_s: float
    step_s: float
    hidden: float
    speed_up: float
    forecast_s: float


def row_of(case: Case, name: str, found: dict[str, Any]) -> Row:
    """What was found for a method, beside the first method and the forecast."""

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
        case.forecast(found[name].get("method", name), compute, found[name]["codec_s_per_value"]),
    )


def table(found: Found) -> tuple[list[str], list[list[str]]]:
    """Head and rows."""
    head = ["model", "compute, ms", "Gbit/s", "nodes", "method", "MB sent", "step, ms"]
    head += ["efficiency", "hidden", f"to {found[0][0].methods[0]}", "forecast, ms", "error, %"]
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
            line += [f"{row.speed_up:.2f}", f"{1000 * row.forecast_s:.0f}"]
            line.append(f"{100 * (row.forecast_s / row.step_s - 1):+.0f}")
            rows.append(line)
    return head, rows


def as_text(head: list[str], rows: list[list[str]]) -> str:
    """The table in columns."""
    return text_table(head, rows)


def remarks(found: Found) -> list[str]:
    """What one has to know to read the table."""
    case = found[0][0]
    errors, behind = [], []
    for one, measured in found:
        rows = {name: row_of(one, name, measured) for name in one.methods}
        errors += [abs(row.forecast_s / row.step_s - 1) for row in rows.values()]
        chosen = rows.pop("auto", None)
        if chosen and rows:
            behind.append(chosen.step_s / min(row.step_s for row in rows.values()) - 1)
    within = sum(error <= 0.15 for error in errors)
    said = [
        f"The forecast is within 15 % in {within} of {len(errors)} cases (median error "
        f"{median(errors):.0%}). MB are per step and node, headers included; hidden is the share "
        "of the time to send them that the step does not become longer by; compute is what a step "
        "takes without any exchange, and what the forecast begins with."
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
