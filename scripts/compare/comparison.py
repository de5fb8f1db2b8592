"""Several runs side by side: one row per quantity, one column per run."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compare import measures
from compare.runs import RATE, STEP_TIME, Run

# What must be equal for a ratio of two runs' speeds to mean anything.
MUST_AGREE = {
    "arch": "arch",
    "image_size": "image size",
    "data_id": "data",
    "train_sizes": "training image sizes",
}
NONE = "-"


@dataclass
class Row:
    """One quantity of all runs: ``cells`` as people read them, ``values`` for programs (CSV)."""

    title: str
    key: str
    cells: list[str]
    values: list[Any]


@dataclass
class Comparison:
    """Runs and their table.

    ``bases[i]`` is the run whose speed that of run i is divided by; None where no run can be
    compared with it.
    """

    runs: list[Run]
    bases: list[Run | None] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # see remarks.py
    within: float | None = None  # hours
    target: float | None = None  # per cent

    def speed_up(self, i: int) -> float | None:
        """Images/s of run i relative to its base."""
        return _ratio(self.runs[i].median(RATE), self._of_base(i, RATE))

    def efficiency(self, i: int) -> float | None:
        """Images/s per GPU of run i relative to its base: 1 is perfect scaling."""
        base = self.bases[i]
        more = _ratio(self.runs[i].known("gpus"), base.known("gpus") if base else None)
        return _ratio(self.speed_up(i), more)

    def _of_base(self, i: int, tag: str) -> float | None:
        base = self.bases[i]
        return base.median(tag) if base else None


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def compare(
    runs: list[Run],
    within: float | None = None,
    target: float | None = None,
    price: float | None = None,
) -> Comparison:
    """Compare ``runs``: ``within`` hours for "epochs done", ``target`` top-1 (%) for "time to";
    where None, chosen so that all runs have reached them. ``price``: of a node for an hour; None:
    no costs."""
    for run in runs:
        run.price = price
    both = Comparison(runs, within=within, target=target)
    _find_bases(both)
    if within is None:
        lasted = [run.total_hours for run in runs if run.hours]
        both.within = min(lasted) if len(lasted) == len(runs) else None
    if target is None:
        tops = [best[0] for run in runs if (best := run.best("Top1/val"))]
        both.target = float(math.floor(min(tops))) if tops else None
    _fill(both)
    return both


def _find_bases(both: Comparison) -> None:
    """In each group of comparable runs the base is the one with the fewest GPUs, or, where that is
    not known, the first."""
    groups: list[list[Run]] = []
    for run in both.runs:
        for group in groups:
            if not any(differ(run, other, MUST_AGREE) for other in group):
                group.append(run)
                break
        else:
            groups.append([run])
    base_of: dict[int, Run] = {}
    for group in groups:
        if len(group) == 1 < len(both.runs):
            continue
        fast = [run for run in group if run.median(RATE)]
        if fast:
            base = min(fast, key=lambda run: run.known("gpus") or math.inf)
            base_of |= {id(run): base for run in group}
    both.bases = [base_of.get(id(run)) for run in both.runs]


def differ(one: Run, other: Run, keys: dict[str, str]) -> list[str]:
    """The names of the facts in ``keys`` (fact: its name) that both runs know and that differ."""
    found = []
    for key, name in keys.items():
        a, b = one.known(key), other.known(key)
        if a not in (None, "") and b not in (None, "") and a != b:
            found.append(name)
    return found


def number(value: float | None) -> str:
    """A figure with four significant digits; from 1000 on without decimals."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(hours: float | None) -> str:
    """Hours as 35 s, 12.3 min or 5.21 h."""
    if hours is None or not math.isfinite(hours):
        return NONE
    if hours < 1 / 60:
        return f"{3600 * hours:.3g} s"
    return f"{60 * hours:.3g} min" if hours < 1 else f"{number(round(hours, 2))} h"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f} %"


# Metric: what it is called, and how a value is shown. Test figures are those of the best model.
METRICS: dict[str, tuple[str, Callable[[float], str]]] = {
    "Top1": ("top-1, %", "{:.2f}".format),
    "Top5": ("top-5, %", "{:.2f}".format),
    "Loss": ("loss", "{:.4f}".format),
}


def _fill(both: Comparison) -> None:
    runs = both.runs

    def add(
        title: str, key: str, values: Sequence[Any], show: Callable[[Any], str] = number
    ) -> None:
        cells = [NONE if value in (None, "") else show(value) for value in values]
        both.rows.append(Row(title, key, cells, list(values)))

    def fact(title: str, key: str) -> None:
        values = [run.known(key) for run in runs]
        add(title, key, values, lambda x: x if isinstance(x, str) else number(x))

    fact("nodes", "nodes")
    fact("GPUs (processes)", "gpus")
    fact("arch", "arch")
    fact("mode", "mode")
    for title, key in (("recipe", "recipe"), ("training image sizes", "progressive")):
        if any(run.known(key) for run in runs):
            fact(title, key)
    add("learning rate (highest)", "lr", [measures.highest(run, "Lr") for run in runs])
    fact("batch per GPU", "batch_per_gpu")
    fact("global batch", "global_batch")
    fact("steps per epoch", "steps_per_epoch")
    rates = [run.median(RATE) for run in runs]
    add("images/s", "images_per_s", rates)
    per_gpu = [_ratio(rate, run.known("gpus")) for rate, run in zip(rates, runs, strict=True)]
    add("images/s per GPU", "images_per_s_per_gpu", per_gpu)
    places = range(len(runs))
    add(
        f"speed-up{_base_title(both)}",
        "speed_up",
        [both.speed_up(i) for i in places],
        lambda x: f"{x:.2f}",
    )
    add("scaling efficiency", "scaling_efficiency", [both.efficiency(i) for i in places], _share)
    add("time per step, ms", "step_ms", [_times(run.median(STEP_TIME), 1000) for run in runs])
    epoch_hours = [_ratio(run.epoch_seconds, 3600) for run in runs]
    add("time per epoch", "epoch_h", epoch_hours, duration)
    add("epochs finished", "epochs", [run.epochs for run in runs])
    if both.within is not None:
        done = [measures.done_within(run, both.within) for run in runs]
        add(f"epochs in {duration(both.within)}", "epochs_within", done)
    add("total time", "hours", [run.total_hours for run in runs], duration)
    for tag, (name, show) in METRICS.items():
        best = [run.best(f"{tag}/val") for run in runs]
        key = tag.lower()
        add(f"best val {name}", f"best_{key}", [b and b[0] for b in best], show)
        epochs = [b and b[1] for b in best]
        hours = [
            run.hours.get(epoch) if epoch else None for run, epoch in zip(runs, epochs, strict=True)
        ]
        pairs = zip(epochs, hours, strict=True)
        when = [
            NONE if e is None else f"{e} ({duration(h)})" if h is not None else str(e)
            for e, h in pairs
        ]
        both.rows.append(Row("  in epoch (after)", f"best_{key}_epoch", when, epochs))
        both.rows.append(Row("", f"best_{key}_h", [], hours))
        averaged = [run.best(f"{tag}/ema") for run in runs]
        if any(averaged):
            add("  of averaged weights", f"best_ema_{key}", [b and b[0] for b in averaged], show)
    for tag, (name, show) in METRICS.items():
        tested = [run.last(f"{tag}/test") for run in runs]
        if any(value is not None for value in tested):
            add(f"test {name}", f"test_{tag.lower()}", tested, show)
    if both.target is not None:
        found = [measures.reached(run, both.target) for run in runs]
        title = f"time to top-1 of {both.target:g} %"
        add(title, "target_h", [r if r is None else r[1] for r in found], duration)
        add("  epochs needed", "target_epochs", [r if r is None else r[0] for r in found])
        if any(run.price is not None for run in runs):
            costs = [r and run.costs.get(r[0]) for run, r in zip(runs, found, strict=True)]
            add(f"cost to top-1 of {both.target:g} %", "target_cost", costs)
    if any(run.price is not None for run in runs):
        add(
            "cost of the whole run", "cost", [max(run.costs.values(), default=None) for run in runs]
        )
    add(
        "waiting for data", "data_wait_share", [run.median("IO/wait_share") for run in runs], _share
    )
    _fill_steps_and_devices(both, add)


def _fill_memory(both: Comparison, add: Callable[..., None]) -> None:
    """What a process's tensors take, where that was recorded."""
    parts = {
        part: [measures.largest(run, f"Memory/{part}_mb") for run in both.runs] for part in MEMORY
    }
    for part, values in parts.items():
        if any(value is not None for value in values):
            add(f"{part}, MiB per process", f"{part}_mb", values)
    sent = [run.known("sent_mb_per_step") for run in both.runs]
    if any(sent):
        add("sent per step, MB per process", "sent_mb_per_step", sent)


def _fill_steps_and_devices(both: Comparison, add: Callable[..., None]) -> None:
    runs = both.runs
    for part in ("data", "compute", "communication"):
        shares = []
        for run in runs:
            parts = {p: measures.part_of_step(run, p) for p in STEP_PARTS}
            whole = sum(value for value in parts.values() if value is not None)
            shares.append(_ratio(parts[part], whole))
        if any(share is not None for share in shares):
            add(f"  share of step: {part}", f"step_{part}_share", shares, _share)
    _fill_memory(both, add)
    for title, tag, key in DEVICES:
        values = [measures.device(run, tag) for run in runs]
        if (tag.startswith("GPU/") and key != "gpu_w") or any(v is not None for v in values):
            add(title, key, values)
    if any(run.state for run in runs):
        add("state", "state", [run.state for run in runs], str)


MEMORY = ("parameters", "gradients", "optimizer", "activations")
STEP_PARTS = ("data", "compute", "communication")
DEVICES = (
    ("GPU utilisation, %", "GPU/utilisation", "gpu_utilisation"),
    ("GPU memory, GiB", "GPU/memory_gb", "gpu_memory_gb"),
    ("GPU power, W", "GPU/power_w", "gpu_w"),
    ("CPU utilisation, %", "CPU/utilisation", "cpu_utilisation"),
)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _base_title(both: Comparison) -> str:
    bases = {id(base): base for base in both.bases if base}
    if len(bases) != 1:
        return ""
    (base,) = bases.values()
    gpus = base.known("gpus")
    return f" to {base.label}" if gpus is None else f" to {gpus:g} GPU{'s' * (gpus != 1)}"


def date_of(run: Run) -> str:
    """The day when a run began, as 2020-08-09."""
    began = run.known("began")
    return time.strftime("%Y-%m-%d", time.gmtime(began)) if began else "not recorded"
