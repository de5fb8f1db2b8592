"""What runs are called."""

from collections import Counter
from collections.abc import Sequence

from compare.runs import Run


def short_labels(runs: Sequence[Run]) -> list[str]:
    """A label for each run: its folder's name; where a training script has generated that, what
    tells the runs apart (16 GPUs, O2, b208)."""
    generated = [run for run in runs if run.known("automatic") and run.known("gpus")]
    labels: dict[int, str] = {}
    for run in generated:
        gpus = run.known("gpus")
        labels[id(run)] = f"{gpus:g} GPU{'s' * (gpus != 1)}"
    for key, text in (("arch", "{}"), ("mode", "{}"), ("batch_per_gpu", "b{:g}")):
        clash = Counter(labels.values())
        several = len({run.known(key) for run in generated}) > 1
        for run in generated:
            value = run.known(key)
            if value is not None and (several and (key == "arch" or clash[labels[id(run)]] > 1)):
                labels[id(run)] += " " + text.format(value)
    clash = Counter(labels.values())
    chosen = []
    same_name = Counter(run.name for run in runs)
    for run in runs:
        label = labels.get(id(run), "")
        if not label or clash[label] > 1:
            label = run.name
            if same_name[label] > 1:
                label = f"{run.path.resolve().parent.name}/{run.path.resolve().name}"
                label = label if run.path.is_dir() else f"{run.name}/{run.path.name}"
        chosen.append(label)
    return chosen


def shorten(labels: Sequence[str], limit: int) -> list[str]:
    """The labels; those of more than ``limit`` characters are cut to the part that tells them apart
    and what fits beside it. Different ones stay different."""
    front = _alike(labels)
    back = _alike([label[front:][::-1] for label in labels])
    short = [label if len(label) <= limit else _cut(label, front, back, limit) for label in labels]
    if len(set(short)) < len(set(labels)):
        return [f"{i}: {label[: limit - 5]}…" for i, label in enumerate(labels, 1)]
    return short


def _alike(labels: Sequence[str]) -> int:
    """The number of characters that all labels have in common at their beginning."""
    return next(
        (i for i, signs in enumerate(zip(*labels, strict=False)) if len(set(signs)) > 1),
        min(map(len, labels)),
    )


def _cut(label: str, front: int, back: int, limit: int) -> str:
    end = len(label) - back
    if not 0 < end - front <= limit - 2:  # its two ends
        return f"{label[: limit // 2 - 1]}…{label[-(limit // 2) :]}"
    start = max(0, end - (limit - 2))
    end = min(len(label), start + limit - 2)
    return "…" * (start > 0) + label[start:end] + "…" * (end < len(label))
