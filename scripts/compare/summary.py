"""Write a comparison's sentences: speed, time, accuracy, and runs that cannot be compared."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence

from compare.runs import RATE, Run, ratio, worker
from compare.table import duration, number, share

UNKNOWN = (None, "")
# Facts that must be equal: otherwise the ratio of two runs' speeds means nothing.
MUST_AGREE = ("arch", "image_size", "data_id", "train_sizes")
# Facts that may differ, but explain part of the difference in speed.
SHOULD_AGREE = ("batch_per_gpu", "mode", "precision", "comm", "gpu", "cpu", "torch")
STEP_PARTS = ("data", "compute", "communication")
NAMES = {
    "arch": "model", "data_id": "data", "train_sizes": "training image sizes", "gpu": "GPU",
    "batch_per_gpu": "batch per GPU", "cpu": "CPU", "comm": "--comm",
}  # fmt: skip
SAME_SPEED = 0.02  # a smaller difference does not count: speeds of one machine vary as much
FASTER = 1.1  # runs that differ less in speed, such as those of a sweep, lost nothing for it
IMPOSSIBLE = 1.1  # an efficiency above this comes from something else than more GPUs
SEEDS = 0.5  # points of top-1 by which two seeds of one training may differ
CHANCE = 1.2  # accuracies up to so many times that of guessing count as guessing
WAITING = 0.1  # mention waiting for data from this share of the time on


def find_bases(runs: list[Run]) -> None:
    """Set the base of each run: the run with the fewest GPUs among those that can be compared
    with it."""
    for run in runs:
        group = [one for one in runs if not differ(run, one, MUST_AGREE)]
        fast = [one for one in group if one.usual(RATE)]
        if fast and (len(group) > 1 or len(runs) == 1):
            run.base = min(fast, key=lambda one: one.facts.get("gpus") or math.inf)


def differ(one: Run, other: Run, keys: Sequence[str]) -> str:
    """Describe those facts of ``keys`` that both runs recorded and that differ."""
    pairs = {key: (one.facts.get(key), other.facts.get(key)) for key in keys}
    return _join(
        f"{_name(key, one)} ({number(a)}, not {number(b)})"
        for key, (a, b) in pairs.items()
        if a not in UNKNOWN and b not in UNKNOWN and a != b
    )


def _name(key: str, run: Run) -> str:
    """Return the name of a fact: one of `NAMES`, or its key in words."""
    name = NAMES.get(key, key.replace("_", " "))
    return name.replace("GPU", worker([run])) if key == "batch_per_gpu" else name


def _relevant(one: Run, other: Run) -> list[str]:
    """Return the keys of `SHOULD_AGREE` that matter: of two runs with equal global batches, the
    batches per GPU rightly differ."""
    whole = one.facts.get("global_batch"), other.facts.get("global_batch")
    skipped = "batch_per_gpu" if whole[0] and whole[0] == whole[1] else ""
    return [key for key in SHOULD_AGREE if key != skipped]


def step_share(run: Run, part: str) -> float | None:
    """Return the share of a step spent on one of `STEP_PARTS`.

    None for compute if communication is not measured (FSDP): compute then includes it. On one GPU,
    there is none.
    """
    is_alone = run.facts.get("gpus") == 1
    if part != "data" and run.usual("Time/communication") is None and not is_alone:
        return None
    whole = sum(run.usual(f"Time/{one}") or 0.0 for one in STEP_PARTS)
    return ratio(run.usual(f"Time/{part}"), whole)


def notes(runs: list[Run]) -> list[str]:
    """List problems of single runs, runs that cannot be compared and the reasons, and the kind of
    scaling that the efficiency measures."""
    texts = [
        f"{_join(run.label for run in runs if text in run.notes)}: {text}"
        for text in dict.fromkeys(text for run in runs for text in run.notes)
    ]
    each = worker(runs)
    bases = list(dict.fromkeys(run.base for run in runs if run.base))
    first = (bases or runs)[0]
    for run in runs:
        if difference := differ(run, first, MUST_AGREE):
            base = f"its base is {run.base.label}" if run.base else "it has no speed-up"
            difference = f"{run.label} differs from {first.label} in {difference}; {base}"
            texts.append(f"NOT COMPARABLE: {difference}")
        elif run.base and (difference := differ(run, run.base, _relevant(run, run.base))):
            texts.append(
                f"{run.label} differs from its base {run.base.label} in {difference}: the "
                "efficiency is not that of scaling alone"
            )
    for base in bases:
        gpus, per_gpu, whole = (
            {run.facts.get(key) for run in runs if run.base is base}
            for key in ("gpus", "batch_per_gpu", "global_batch")
        )
        kind = f"at different batches per {each}"
        if None in per_gpu:
            kind = f"the batches per {each} are not recorded"
        elif len(per_gpu) == 1:
            kind = f"at an equal batch per {each} (weak scaling)"
        elif len(whole) == 1:
            kind = "at an equal global batch (strong scaling)"
        if len(gpus - {None}) > 1:
            texts.append(
                f"speed-up and throughput efficiency: images/s relative to {base.label}, {kind}"
            )
    return texts


# ---- at most five sentences


def sentences(runs: list[Run], target: float | None) -> list[str]:
    """Write at most five sentences: incomparable runs, speed, accuracy, where the time goes,
    cautions. ``target``: top-1 in per cent.

    They compare the first base with the runs that can be compared with it.
    """
    base = next((run.base for run in runs if run.base), runs[0])
    reasons = {run: differ(run, base, MUST_AGREE) for run in runs}
    group = [run for run in runs if not reasons[run]]
    texts = []
    if others := [run for run in runs if reasons[run]]:
        text = f"{others[0].label} cannot be compared with {base.label}: it has another "
        more = f"; nor can {_join(run.label for run in others[1:])}" if others[1:] else ""
        texts.append(text + reasons[others[0]] + more)
    if len(group) == 1:
        texts += _single(base)
    else:
        texts += _unfinished(group) + _impossible(group)
        lost = _lost_accuracy(group, base)
        texts += lost + _speeds(group, base) + _times(group, target)
        texts += [] if lost else _accuracies(group)
    last = _cautions(group)
    texts = [*texts, *_parts(group)][: 5 - len(last)] + last
    return [f"{text}." for text in texts]


def _join(items: Iterable[object]) -> str:
    """Join items as in: a, b and c; or, if items have commas themselves: a, 1; b; and c."""
    words = list(map(str, items))
    has_commas = any("," in re.sub(r"\(.*?\)", "", word) for word in words)
    comma, last = ("; ", "; and ") if has_commas and words[2:] else (", ", " and ")
    return last.join([comma.join(words[:-1]), words[-1]] if words[1:] else words)


def _single(run: Run) -> list[str]:
    """Describe speed and accuracy of a single run."""
    texts = []
    if rate := run.usual(RATE):
        on = f" on {run.size}" if run.facts.get("gpus") else ""
        texts.append(f"{run.label} trained {number(rate)} images per second{on}")
    top1, epoch = run.highest_top1()
    if not run.epochs:
        texts.append(f"It has not finished an epoch: {run.position:.2f} epochs are done")
    if epoch is not None and epoch in run.hours:
        after = duration(run.hours[epoch])
        texts.append(f"It reached {top1:.2f} % top-1 in epoch {epoch} ({after})")
    return texts


def _unfinished(group: list[Run]) -> list[str]:
    """Name the runs that have not finished an epoch, and how they are compared."""
    if not (runs := [run for run in group if not run.epochs]):
        return []
    have, their = ("has", "its") if len(runs) == 1 else ("have", "their")
    who = _join(f"{run.label} ({run.position:.2f} epochs)" for run in runs)
    return [f"{who} {have} not finished an epoch: speed and loss are those of {their} steps so far"]


def _impossible(group: list[Run]) -> list[str]:
    """Name an efficiency that more GPUs or processes alone cannot give."""
    for run in group:
        base = run.base
        efficiency = run.efficiency or 0.0
        if base is None or efficiency <= IMPOSSIBLE:
            continue
        if run.facts.get("gpus") == base.facts.get("gpus"):
            continue  # a faster program, not a larger machine
        text = f"The throughput efficiency of {share(efficiency)} ({run.label}) cannot be that of "
        text += "scaling: "
        if difference := differ(run, base, _relevant(run, base)):
            return [f"{text}the runs also differ in {difference}"]
        text += f"something else slowed down {base.label}, such as other work on its machine; "
        return [f"{text}run it again"]
    return []


def _noise(top1: float, images: float) -> float:
    """The accuracies of two equally good models, on two independent samples of so many images,
    differ by more in 1 of 20 cases (in points)."""
    p = min(max(top1 / 100, 0.5 / images), 1 - 0.5 / images)
    return 100 * 1.96 * math.sqrt(2 * p * (1 - p) / images)


def _lost_accuracy(group: list[Run], base: Run) -> list[str]:
    """Say that a faster run is less accurate after equal epochs, by more than seeds explain."""
    known = [run for run in group if run.epochs and run.points("Top1/val")]
    if base not in known or (common := min(run.epochs or 0 for run in known)) < 2:
        return []
    tops = {run: top for run in known if (top := run.points("Top1/val").get(common)) is not None}
    images = min(run.facts.get("val_images") or 0 for run in known)
    if base not in tops or _same_speed(group, base):
        return []
    noise = max(SEEDS, _noise(tops[base], images) if images else SEEDS)
    worse = [run for run in tops if (run.speed_up or 0) > FASTER and tops[base] - tops[run] > noise]
    if not worse:
        return []
    run = min(worse, key=lambda one: tops[one])
    text = f"Accuracy fell with speed: after epoch {common}, top-1 is {tops[base]:.2f} % "
    text += f"({base.label}) and {tops[run]:.2f} % ({run.label}), more than seeds explain"
    return [f"{text}, so compare the times to the same accuracy"]


def _is_chance(target: float, group: list[Run]) -> bool:
    """Whether guessing reaches this top-1, too. Unknown numbers of classes count as ImageNet's."""
    classes = min(run.facts.get("class_count") or 1000 for run in group)
    return target <= CHANCE * 100 / classes


def _same_speed(group: list[Run], base: Run) -> bool:
    """Whether the speeds of the runs differ no more than those of their epochs."""

    def spread(run: Run) -> float:
        """Return the standard deviation of an epoch's speed, as a share of the mean."""
        rates = [rate for x, rate in run.points(RATE).items() if x > 1]
        return statistics.stdev(rates) / statistics.fmean(rates) if len(rates) > 1 else 0.0

    most = max(abs((run.speed_up or 1.0) - 1) for run in group if run is not base)
    return most < max(SAME_SPEED, *map(spread, group))


def _speeds(group: list[Run], base: Run) -> list[str]:
    """Say how much faster than ``base`` the others trained; with more than three, the fastest."""
    ratios = {run: ratio for run in group if run is not base and (ratio := run.speed_up)}
    if not ratios:
        return []
    if _same_speed(group, base):
        who = _join(run.label for run in (base, *ratios))
        return [f"{who} trained equally fast: their speeds differ no more than those of epochs"]
    who = _join(run.label for run in ratios)
    if len(ratios) > 3:
        fastest = max(ratios, key=lambda run: ratios[run])
        ratios = {fastest: ratios[fastest]}
        who = f"The fastest run, {fastest.label},"
        if ratios[fastest] < 1:
            who = f"No run was faster than {base.label}; the next, {fastest.label},"
    times, scaling = _join(f"{one:.2f}" for one in ratios.values()), ""
    more_gpus = [run for run in ratios if run.facts.get("gpus") != base.facts.get("gpus")]
    shares = [share(efficiency) for run in more_gpus if (efficiency := run.efficiency)]
    if len(shares) == len(ratios):
        scaling = f" ({_join(shares)} throughput efficiency)"
    return [f"{who} trained {times} times as many images per second as {base.label}{scaling}"]


def _times(group: list[Run], target: float | None) -> list[str]:
    """Say when the runs reached the ``target``; with more than three, which was the first."""
    if not target or _is_chance(target, group):
        return []
    reached = {run: run.reached(target) for run in group}
    times = {run: run.hours[x] for run, x in reached.items() if x is not None}
    if len(times) > 3:
        first = min(times, key=lambda run: times[run])
        after = duration(times[first])
        return [f"First to reach {target:g} % top-1: {first.label}, in {after}"]
    if all(run.epochs == 1 for run in times):  # also if there are none
        return []
    who = _join(run.label for run in times)
    if len(times) == len(group):
        who = "Both" if len(group) == 2 else "All"
    after = _join(f"{duration(hours)} ({run.label})" for run, hours in times.items())
    return [f"{who} reached {target:g} % top-1: after {after}"]


def _accuracies(group: list[Run]) -> list[str]:
    """Compare best accuracies, or if the lengths differ, those at the end of the shortest run. Say
    whether they differ by more than noise."""
    known = [run for run in group if run.points("Top1/val")]
    if len(known) < 2:
        return []
    common = min(run.epochs or 0 for run in known)
    what, tops = "Best top-1", {run: run.highest_top1()[0] or 0.0 for run in known}
    if any(run.epochs != common for run in known):
        what = f"Top-1 after epoch {common}, the last of the shortest run"
        ends = {run: run.points("Top1/val").get(common) for run in known}
        tops = {run: top for run, top in ends.items() if top is not None}
    if len(tops) < 2:
        return []
    low, high = min(tops.values()), max(tops.values())
    listed = _join(f"{top:.2f} % ({run.label})" for run, top in tops.items())
    if len(tops) > 3:
        listed = f"{low:.2f} %" + f" to {high:.2f} %" * (high > low)
    images = min(run.facts.get("val_images") or 0 for run in tops)
    noise = _noise(high, images) if images else 0.0
    text = f", more than the noise of {images:.0f} images, but another seed may change it as well"
    if low == high:
        text = ", no difference"
    elif not images:
        text = " (the noise is unknown, because the number of images is not recorded)"
    elif high - low <= noise:
        text = f", a difference within the noise of {images:g} validation images"
    return [f"{what}: {listed}{text}"]


def _parts(group: list[Run]) -> list[str]:
    """Name communication and waiting for data, each for the run in which it takes most."""
    texts = []
    for text, part, least in (
        ("communication took {} of a step", lambda run: step_share(run, "communication"), 0.005),
        ("waiting for data took {} of the time", lambda run: run.usual("IO/wait_share"), WAITING),
    ):
        shares = {run: part(run) or 0.0 for run in group}
        run = max(shares, key=lambda one: shares[one])
        if shares[run] >= least:
            texts.append(text.format(share(shares[run])) + f" ({run.label})" * (len(group) > 1))
    text = _join(texts) if texts else ""
    return [f"{text[0].upper()}{text[1:]}"] if texts else []


def _cautions(group: list[Run]) -> list[str]:
    """Name the limits of the conclusions."""
    texts = []
    epochs = {run.epochs for run in group if run.epochs}
    if not epochs:
        return []
    if max(epochs) == 1:
        texts.append("there is only one epoch, in which caches and compilers warm up")
    elif len(epochs) > 1:
        texts.append(f"the runs differ in length ({min(epochs)} to {max(epochs)} epochs)")
    batches = {run.facts["global_batch"] for run in group if run.facts.get("global_batch")}
    if len(batches) > 1:
        sizes = f"{min(batches):g} to {max(batches):g}"
        texts.append(f"the global batches differ ({sizes}), which changes accuracy")
    names = [key for key in SHOULD_AGREE[1:] if any(differ(run, group[0], [key]) for run in group)]
    if names:
        texts.append(f"the runs differ in {_join(_name(name, group[0]) for name in names)}")
    if any(run.facts.get("device") == "cpu" for run in group):
        texts.append("these are CPU speeds, which say nothing about GPUs")
    return [f"Beware: {'; '.join(texts)}"] if texts else []
