"""A forecast as a picture: throughput against GPUs, and the parts of a step."""

from pathlib import Path

from forecast.model import Forecast

PARTS = {  # of a step: attribute of `Forecast`, colour, hatch
    "compute": ("compute_s", "#2563a0", ""),
    "waiting for the slowest GPU": ("straggler_s", "#f8d060", "//"),
    "communication not hidden": ("exposed_s", "#8e1f24", ".."),
}
CROSS = {"color": "#f28a50", "markersize": 13, "markeredgecolor": "black"}


def draw(rows: list[Forecast], measured: dict[int, float], title: str, out: Path) -> None:
    """Draw ``rows`` and ``measured`` (seconds per step by number of GPUs) into the file ``out``.

    Raises: OSError or ValueError for a file that cannot be written, or of an unknown kind.
    """
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    with matplotlib.style.context(["default", {"font.size": 13, "savefig.dpi": 150}]):
        figure = Figure(figsize=(8, 10), layout="constrained")
        rate, parts = figure.subplots(2, 1)
        gpus, batch = [row.gpus for row in rows], rows[0].batch
        perfect = [n * batch / rows[0].compute_s for n in gpus]
        rate.plot(gpus, perfect, "--", color="0.5", label="perfect scaling")
        rate.plot(gpus, [r.images_per_s for r in rows], "o-", color="#2563a0", label="forecast")
        if measured:
            found = [n * batch / step_s for n, step_s in measured.items()]
            rate.plot(list(measured), found, "X", label="measured", **CROSS)
        rate.set(xscale="log", yscale="log", ylabel="images/s, all GPUs", title=title)
        rate.legend(frameon=False)
        places, below = range(len(rows)), [0.0] * len(rows)
        for name, (key, colour, hatch) in PARTS.items():
            heights = [1000 * getattr(row, key) for row in rows]
            looks = {"color": colour, "hatch": hatch, "edgecolor": "white", "label": name}
            parts.bar(places, heights, 0.7, bottom=below, **looks)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        for place, row in zip(places, rows, strict=True):
            text = f"{100 * row.efficiency:.0f}"
            parts.text(place, 0, text, color="white", ha="center", va="bottom")
            if row.gpus in measured:
                parts.plot(place, 1000 * measured[row.gpus], "X", **CROSS)
        parts.set(ylabel="ms per step (in white: efficiency, %)", xlabel="GPUs")
        parts.set_ylim(top=1.25 * max(below + [1000 * step_s for step_s in measured.values()]))
        for axes in (rate, parts):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="0.9")
            axes.set_axisbelow(True)
        rate.set_xticks(gpus, map(str, gpus))
        rate.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        rate.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        rate.minorticks_off()
        parts.set_xticks(places, map(str, gpus))
        parts.legend(frameon=False, loc="upper left")
        figure.savefig(out, metadata={"Software": None} if out.suffix == ".png" else None)
