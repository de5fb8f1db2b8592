"""Sentences below the table: what is odd, what cannot be compared, what was not found."""

from collections.abc import Sequence

from compare.comparison import MUST_AGREE, Comparison, differ
from compare.runs import Run

# What may differ, but explains part of the difference in speed.
SHOULD_AGREE = {
    "batch_per_gpu": "batch per GPU",
    "mode": "mode",
    "precision": "precision",
    "comm": "gradients on the wire",
    "gpu": "GPU",
    "cpu": "CPU",
    "torch": "torch",
}


def add_to(both: Comparison) -> None:
    """Add sentences to the notes: what is odd about single runs, which are not comparable and why,
    what kind of scaling the efficiency measures, and what was not recorded."""
    notes = both.notes
    said: dict[str, list[str]] = {}
    for run in both.runs:
        for note in run.notes:
            said.setdefault(note, []).append(run.label)
    notes += [f"{_names(labels, both)}: {note}" for note, labels in said.items()]
    bases = {id(base): base for base in both.bases if base}
    reference = next(iter(bases.values()), both.runs[0])
    for run, base in zip(both.runs, both.bases, strict=True):
        strange = differ(run, reference, MUST_AGREE)
        if strange and run is not reference:
            what = " and ".join(_versus(run, reference, name) for name in strange)
            fate = (
                "it has no speed-up"
                if base is None
                else "it is a base itself"
                if base is run
                else f"its base is {base.label}"
            )
            notes.append(
                f"NOT COMPARABLE: {run.label} differs from {reference.label} in {what}; {fate}"
            )
        elif base is not None and base is not run:
            what = [_versus(run, base, name) for name in differ(run, base, SHOULD_AGREE)]
            if what:
                notes.append(
                    f"{run.label} differs from its base {base.label} in {' and '.join(what)}: the "
                    "efficiency shows that too, not only the scaling"
                )
    notes += _lengths(both)
    notes += _kind_of_scaling(both)
    notes += _missing(both)


def _versus(run: Run, other: Run, name: str) -> str:
    key = next(k for k, n in {**MUST_AGREE, **SHOULD_AGREE}.items() if n == name)
    return f"{name} ({run.known(key)}, not {other.known(key)})".replace(".0", "")


def _lengths(both: Comparison) -> list[str]:
    """Say when the runs have not trained for the same number of epochs, or were not meant to."""
    lengths: dict[str, list[str]] = {}
    for run in both.runs:
        planned = run.known("epochs")
        text = f"{run.epochs}"
        if planned is not None and planned != run.epochs:
            text += f" of {planned:g}"
        lengths.setdefault(text, []).append(run.label)
    if len(lengths) < 2:
        return []
    each = "; ".join(f"{', '.join(labels)}: {text}" for text, labels in lengths.items())
    return [
        f"the numbers of epochs differ ({each}): total times, best values and test figures are of "
        "trainings of different lengths"
    ]


def _kind_of_scaling(both: Comparison) -> list[str]:
    """Say which scaling the efficiency measures, weak or strong."""
    found = []
    for base in {id(b): b for b in both.bases if b}.values():
        group = [r for r, b in zip(both.runs, both.bases, strict=True) if b is base]
        if len({run.known("gpus") for run in group} - {None}) < 2:
            continue
        per_gpu = {run.known("batch_per_gpu") for run in group}
        whole = {run.known("global_batch") for run in group}
        of = f"speed-up and efficiency: images/s relative to {base.label}"
        if None in per_gpu:
            found.append(f"{of}; whether the batch per GPU is equal is not recorded")
        elif len(per_gpu) == 1:
            found.append(f"{of}, at an equal batch per GPU (weak scaling)")
        elif len(whole) == 1:
            found.append(f"{of}, at an equal global batch (strong scaling)")
        else:
            found.append(f"{of}; neither the batch per GPU nor the global batch is equal")
    return found


HINTS = {
    "gpus": " (give --gpus N N ...)",
    "steps_per_epoch": " (give --train-images N; ImageNet: 1281167)",
}


def _names(labels: Sequence[str], both: Comparison) -> str:
    return "all runs" if 1 < len(labels) == len(both.runs) else ", ".join(labels)


def _missing(both: Comparison) -> list[str]:
    """Sentences about what was not found, one per group of runs."""
    by_runs: dict[str, list[str]] = {}
    for row in both.rows:
        if not row.title or row.title.startswith(" ") or row.key in ("state", "target_h"):
            continue
        lacking = [
            run.label
            for run, value in zip(both.runs, row.values, strict=True)
            if value in (None, "")
        ]
        if row.key in ("speed_up", "scaling_efficiency") and any(both.bases):
            continue  # said above
        if lacking:
            whose = _names(lacking, both)
            title = row.title.partition(" to ")[0].partition(", ")[0] + HINTS.get(row.key, "")
            by_runs.setdefault(whose, []).append(title)
    if all(run.known("image_size") is None for run in both.runs) and len(both.runs) > 1:
        by_runs.setdefault("all runs", []).append("image size and data (taken to be equal)")
    return [f"not recorded by {whose}: {', '.join(what)}" for whose, what in by_runs.items()]
