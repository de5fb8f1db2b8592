"""What a comparison shows, in sentences: speed, time and accuracy, and what cannot be compared."""

import math
import statistics
from collections.abc import Iterable, Sequence

from compare.runs import RATE, Run, ratio
from compare.table import duration, number, share

UNKNOWN = (None, "")
# Facts that must be equal, or the ratio of two runs' speeds means nothing.
MUST_AGREE = ("arch", "image_size", "data_id", "train_sizes")
# Facts that may differ, but explain part of the difference in speed.
SHOULD_AGREE = ("batch_per_gpu", "mode", "precision", "comm", "gpu", "cpu", "torch")
STEP_PARTS = ("data", "compute", "communication")
NAMES = {"arch": "model", "data_id": "data", "train_sizes": "training image sizes"}
SAME_SPEED = 0.02  # a smaller difference is no difference: the same machine varies as much
WAITING = 0.1  # a share of the time from which waiting for data is worth a sentence


def find_bases(runs: list[Run]) -> None:
    """Set the base of each run: the comparable run with the fewest GPUs."""
    groups: list[list[Run]] = []
    for run in runs:
        comparable = (g for g in groups if not any(differ(run, one, MUST_AGREE) for one in g))
        group = next(comparable, None)
        groups.append([run]) if group is None else group.append(run)
    for group in groups:
        fast = [run for run in group if run.usual(RATE)]
        if fast and (len(group) > 1 or len(runs) == 1):
            base = min(fast, key=lambda run: run.facts.get("gpus") or math.inf)
            for run in group:
                run.base = base


def differ(one: Run, other: Run, keys: Sequence[str]) -> str:
    """Those of the facts ``keys`` that both runs recorded and that differ, with their values."""
    pairs = [
        (NAMES.get(key, key.replace("_", " ")), one.facts.get(key), other.facts.get(key))
        for key in keys
    ]
    return " and ".join(
        f"{name} ({number(a)}, not {number(b)})"
        for name, a, b in pairs
        if a not in UNKNOWN and b not in UNKNOWN and a != b
    )


def step_share(run: Run, part: str) -> float | None:
    """The share of a step spent on one of `STEP_PARTS`.

    None for compute where communication is not measured (FSDP): it is in it.
    """
    if part != "data" and run.usual("Time/communication") is None:
        return None
    whole = sum(run.usual(f"Time/{one}") or 0.0 for one in STEP_PARTS)
    return ratio(run.usual(f"Time/{part}"), whole)


def notes(runs: list[Run]) -> list[str]:
    """Problems of single runs, runs that cannot be compared and why, and the kind of scaling that
    the efficiency measures."""
    found = [
        f"{_join(run.label for run in runs if text in run.notes)}: {text}"
        for text in dict.fromkeys(text for run in runs for text in run.notes)
    ]
    bases = list(dict.fromkeys(run.base for run in runs if run.base))
    reference = bases[0] if bases else runs[0]
    for run in runs:
        if difference := differ(run, reference, MUST_AGREE):
            fate = f"its base is {run.base.label}" if run.base else "it has no speed-up"
            text = f"{run.label} differs from {reference.label} in {difference}; {fate}"
            found.append(f"NOT COMPARABLE: {text}")
        elif run.base and (difference := differ(run, run.base, SHOULD_AGREE)):
            found.append(
                f"{run.label} differs from its base {run.base.label} in {difference}: the "
                "efficiency is not that of scaling alone"
            )
    for base in bases:
        group = [run for run in runs if run.base is base]
        gpus, per_gpu, whole = (
            {run.facts.get(key) for run in group}
            for key in ("gpus", "batch_per_gpu", "global_batch")
        )
        kind = "at different batches per GPU"
        if None in per_gpu:
            kind = "the batches per GPU are not recorded"
        elif len(per_gpu) == 1:
            kind = "at an equal batch per GPU (weak scaling)"
        elif len(whole) == 1:
            kind = "at an equal global batch (strong scaling)"
        if len(gpus - {None}) > 1:
            found.append(f"speed-up and efficiency: images/s relative to {base.label}, {kind}")
    return found


# ---- at most five sentences


def sentences(runs: list[Run], target: float | None) -> list[str]:
    """At most five: what cannot be compared, speed, accuracy, where the time goes, what to beware
    of. ``target``: per cent top-1.

    They are about the first run that is a base, and the runs that can be compared with it.
    """
    base = next((run.base for run in runs if run.base), runs[0])
    reasons = {run.label: differ(run, base, MUST_AGREE) for run in runs}
    group = [run for run in runs if not reasons[run.label]]
    first = []
    if others := [label for label, reason in reasons.items() if reason]:
        text = f"{others[0]} cannot be compared with {base.label}: it has another "
        text += reasons[others[0]] + (f"; nor can {_join(others[1:])}" if others[1:] else "")
        first.append(f"{text}.")
    first += _speed(group, base) + _accuracy(group, target)
    last = _caution(group)
    return [*first, *_parts(group)][: 5 - len(last)] + last


def _join(items: Iterable[object]) -> str:
    """a, b and c."""
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last


def _speed(group: list[Run], base: Run) -> list[str]:
    rate, gpus = base.usual(RATE), base.facts.get("gpus")
    if not rate:
        return []
    if len(group) == 1:
        on = f" on {gpus:g} GPU{'s' * (gpus != 1)} (processes)" if gpus else ""
        return [f"{base.label} trained {number(rate)} images per second{on}."]
    known = [run for run in group if run is not base and run.speed_up]
    if not known:
        return []
    apart = max(abs(run.speed_up - 1) for run in known)
    if apart < max(SAME_SPEED, *map(_spread, group)):
        labels = _join(run.label for run in (base, *known))
        return [f"{labels} trained equally fast: the speed of an epoch varies as much as theirs."]
    fastest = max(known, key=lambda run: run.speed_up)
    who = f"The fastest run, {fastest.label}," if len(known) > 3 else _join(r.label for r in known)
    known = known if len(known) <= 3 else [fastest]
    times = _join(f"{run.speed_up:.2f}" for run in known)
    scaling = ""
    if all(run.efficiency and run.facts["gpus"] != gpus for run in known):
        scaling = f" ({_join(share(run.efficiency) for run in known)} efficiency)"
    return [f"{who} trained {times} times as many images per second as {base.label}{scaling}."]


def _spread(run: Run) -> float:
    """The standard deviation of the speeds of epochs, as a share of their mean."""
    rates = [rate for x, rate in run.points(RATE).items() if x > 1]
    return statistics.stdev(rates) / statistics.fmean(rates) if len(rates) > 1 else 0.0


def _accuracy(group: list[Run], target: float | None) -> list[str]:
    """When the target was reached; the best accuracies or, of runs of different length, those at
    the end of the shortest."""
    known = [run for run in group if run.points("Top1/val")]
    if not known:
        return []
    if len(group) == 1:
        top1, epoch = group[0].best("Top1/val")
        after = f" ({duration(group[0].hours[epoch])})" if epoch in group[0].hours else ""
        return [f"It reached {top1:.2f} % top-1 in epoch {epoch}{after}."]
    found = []
    reached = {run: run.reached(target) for run in group} if target else {}
    times = {run: run.hours[x] for run, x in reached.items() if x in run.hours}
    if len(times) > 3:
        first = min(times, key=lambda run: times[run])
        after = duration(times[first])
        found.append(f"First to reach {target:g} % top-1: {first.label}, in {after}.")
    elif times and max(run.epochs for run in times) > 1:
        who = _join(run.label for run in times)
        who = ("Both" if len(group) == 2 else "All") if len(times) == len(group) else who
        after = _join(f"{duration(hours)} ({run.label})" for run, hours in times.items())
        found.append(f"{who} reached {target:g} % top-1: after {after}.")
    common = min(run.epochs for run in known)
    tops, what = {run: run.best("Top1/val")[0] for run in known}, "Best top-1"
    if any(run.epochs != common for run in known):
        what = f"Top-1 after epoch {common}, the last of the shortest run"
        tops = {run: run.points("Top1/val").get(common) for run in known}
        tops = {run: top for run, top in tops.items() if top is not None}
    if len(tops) < 2:
        return found
    listed = _join(f"{top:.2f} % ({run.label})" for run, top in tops.items())
    low, high = min(tops.values()), max(tops.values())
    if len(tops) > 3:
        listed = f"{low:.2f} %" + f" to {high:.2f} %" * (high > low)
    images = min(run.facts.get("val_images") or 0 for run in tops)
    noise = f", more than the noise of {images:g} images, but another seed may change it as well"
    if low == high:
        noise = ", no difference"
    elif not images:
        noise = " (how much is noise is unknown: the number of images is not recorded)"
    elif high - low <= _noise(high, images):
        noise = f", a difference within the noise of {images:g} validation images"
    return [*found, f"{what}: {listed}{noise}."]


def _noise(top1: float, images: float) -> float:
    """Points by which the accuracies of two equally good models differ in 1 of 20 cases: two
    independent samples of so many images. ``top1`` in per cent."""
    p = min(max(top1 / 100, 0.5 / images), 1 - 0.5 / images)
    return 100 * 1.96 * math.sqrt(2 * p * (1 - p) / images)


def _parts(group: list[Run]) -> list[str]:
    """Communication and waiting for data, of the run where they take most."""
    found = []
    for text, of, least in (
        ("communication took {} of a step", lambda run: step_share(run, "communication"), 0.005),
        ("waiting for data took {} of the time", lambda run: run.usual("IO/wait_share"), WAITING),
    ):
        most, run = max(((of(run) or 0.0, run) for run in group), key=lambda pair: pair[0])
        if most >= least:
            found.append(text.format(share(most)) + f" ({run.label})" * (len(group) > 1))
    text = _join(found) if found else ""
    return [f"{text[0].upper()}{text[1:]}."] if text else []


def _caution(group: list[Run]) -> list[str]:
    """What limits the conclusions."""
    found = []
    epochs = {run.epochs for run in group}
    if max(epochs) == 1:
        found.append("one epoch only, in which caches and compilers warm up")
    elif len(epochs) > 1:
        found.append(f"runs of different length ({min(epochs)} to {max(epochs)} epochs)")
    batches = {run.facts["global_batch"] for run in group if run.facts.get("global_batch")}
    if len(batches) > 1:
        sizes = f"{min(batches):g} to {max(batches):g}"
        found.append(f"global batches of {sizes}, which changes accuracy")
    names = [key for key in SHOULD_AGREE[1:] if any(differ(run, group[0], [key]) for run in group)]
    if names:
        found.append(f"runs that differ in {_join(names)}")
    if any(run.facts.get("device") == "cpu" for run in group):
        found.append("speeds of CPUs, which say nothing about GPUs")
    return [f"Beware: {'; '.join(found)}."] if found else []
