"""What one run's curves say, in a number."""

from compare.runs import Run

from utils.run.figures import typical


def ranks_of(run: Run, family: str) -> list[str]:
    """The tags of ``family`` (GPU/utilisation, say), one per rank."""
    return sorted(tag for tag in run.scalars if tag.startswith(f"{family}_rank"))


def largest(run: Run, family: str) -> float | None:
    """The most that any rank has had."""
    values = [y for tag in ranks_of(run, family) for y in run.finite(tag).values()]
    return max(values, default=None)


def device(run: Run, family: str) -> float | None:
    """The mean over ranks of a device's median; for memory, the most that any rank has used."""
    if family.endswith("memory_gb"):
        return largest(run, family)
    tags = ranks_of(run, family)
    medians = [m for tag in tags if (m := run.median(tag)) is not None]
    return sum(medians) / len(medians) if medians else None


def part_of_step(run: Run, part: str) -> float | None:
    """Seconds of a step that were spent on data, compute or communication."""
    seconds = run.median(f"Time/{part}")
    if seconds is not None:
        return seconds
    points = run.finite(f"Step/{part}_s")
    return typical({x / 1000: y for x, y in points.items()}) if points else None


def highest(run: Run, tag: str) -> float | None:
    """The highest finite value of a curve."""
    return max(run.finite(tag).values(), default=None)


def done_within(run: Run, hours: float) -> int | None:
    """Epochs done in so many hours; None where that is not known, or not yet."""
    if not run.hours or (run.total_hours < hours and run.state == "running"):
        return None
    return max((x for x, h in run.hours.items() if h <= hours * (1 + 1e-9)), default=0)


def reached(run: Run, top1: float) -> tuple[int, float | None] | None:
    """The first epoch after which ``top1`` was reached, and the hours until then."""
    points = run.finite("Top1/val")
    for x, y in run.finite("Top1/ema").items():  # best.pt has the better one
        points[x] = max(y, points.get(x, y))
    epoch = next((x for x in sorted(points) if points[x] >= top1), None)
    return None if epoch is None else (epoch, run.hours.get(epoch))
