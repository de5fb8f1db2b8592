"""A forecast as a picture: throughput against GPUs, and the parts of a step."""

from pathlib import Path

from compare import pictures
from forecast.model import Forecast

from utils.errors import UserError

PARTS = {  # of a step: attribute of `Forecast`, colour, hatch
    "compute": ("compute_s", pictures.COLOURS[5], ""),
    "waiting for the slowest GPU": ("straggler_s", pictures.COLOURS[0], "//"),
    "communication not hidden": ("exposed_s", pictures.COLOURS[6], ".."),
}
CROSS = {"color": pictures.COLOURS[2], "markersize": 13, "markeredgecolor": "black"}


def draw(rows: list[Forecast], measured: dict[int, float], title: str, out: Path) -> None:
    """Draw ``rows`` and ``measured`` (seconds per step by number of GPUs) into the file ``out``.

    Raises: `UserError` for a file that cannot be written, or of an unknown kind.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(pictures.MATPLOTLIB):
        figure = Figure(figsize=(8, 10), layout="constrained")
        rate, parts = figure.subplots(2, 1)
        gpus, batch = [row.gpus for row in rows], rows[0].batch
        perfect = [n * batch / rows[0].compute_s for n in gpus]
        rate.loglog(gpus, perfect, "--", color=pictures.INK, label="perfect scaling")
        speeds = [row.images_per_s for row in rows]
        rate.loglog(gpus, speeds, "o-", color=pictures.COLOURS[5], label="forecast")
        if measured:
            measured_speeds = [n * batch / step_s for n, step_s in measured.items()]
            rate.loglog(list(measured), measured_speeds, "X", label="measured", **CROSS)
        rate.set(ylabel="images/s, all GPUs", title=title)
        pictures.round_ticks(rate.xaxis, gpus)
        pictures.round_ticks(rate.yaxis)
        places, below = range(len(rows)), [0.0] * len(rows)
        for name, (key, colour, hatch) in PARTS.items():
            heights = [1000 * getattr(row, key) for row in rows]
            looks = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": name}
            bars = parts.bar(places, heights, 0.7, bottom=below, **looks)
            below = [low + height for low, height in zip(below, heights, strict=True)]
            if key == "compute_s":
                shares = [f"{100 * row.efficiency:.0f}" for row in rows]
                parts.bar_label(bars, shares, label_type="center", color="white")
        crosses = {i: 1000 * measured[n] for i, n in enumerate(gpus) if n in measured}
        parts.plot(list(crosses), list(crosses.values()), "X", **CROSS)
        parts.set(ylabel="ms per step (in white: efficiency, %)", xlabel="GPUs")
        parts.set_xticks(places, map(str, gpus))
        parts.set_ylim(top=1.25 * max([*below, *crosses.values()]))
        for axes in (rate, parts):
            axes.legend(loc="upper left")
            axes.grid(axis="y")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            pictures.save(figure, out)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot write {out}: {error}") from None
