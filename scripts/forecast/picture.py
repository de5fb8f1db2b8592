"""A forecast as a picture: throughput against GPUs, and what a step consists of."""

from pathlib import Path

from forecast.scaling import Forecast, Measured

COLOURS = {"compute": "#2563a0", "slowest GPU": "#f8d060", "communication": "#8e1f24"}


def draw(rows: list[Forecast], measured: dict[int, Measured], title: str, out: Path) -> None:
    """Draw ``rows`` and the ``measured`` steps (by their number of GPUs) into the file ``out``.

    Raises: OSError or ValueError for a file that cannot be written, or of an unknown kind.
    """
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    with matplotlib.style.context(["default", {"font.size": 13, "savefig.dpi": 150}]):
        figure = Figure(figsize=(8, 10), layout="constrained")
        rate, parts = figure.subplots(2, 1)
        gpus = [row.gpus for row in rows]
        lone = rows[0].batch / rows[0].compute_s
        rate.plot(gpus, [lone * n for n in gpus], "--", color="0.5", label="perfect scaling")
        rate.plot(gpus, [r.images_per_s for r in rows], "o-", color="#2563a0", label="forecast")
        if measured:
            found = [n * rows[0].batch / point.step_s for n, point in measured.items()]
            rate.plot(list(measured), found, "X", color="#f28a50", markersize=13,
                      markeredgecolor="black", label="measured")  # fmt: skip
        rate.set(xscale="log", yscale="log", ylabel="images/s, all GPUs", title=title)
        rate.legend(frameon=False)
        places = list(range(len(rows)))
        below = [0.0] * len(rows)
        values = {
            "compute": [1000 * row.compute_s for row in rows],
            "slowest GPU": [1000 * row.straggler_s for row in rows],
            "communication": [1000 * row.exposed_s for row in rows],
        }
        names = {"slowest GPU": "waiting for the slowest GPU",
                 "communication": "communication not hidden"}  # fmt: skip
        for (name, value), hatch in zip(values.items(), ("", "//", ".."), strict=True):
            parts.bar(places, value, 0.7, bottom=below, color=COLOURS[name], hatch=hatch,
                      edgecolor="white", label=names.get(name, name))  # fmt: skip
            below = [a + b for a, b in zip(below, value, strict=True)]
        for place, row in zip(places, rows, strict=True):
            parts.text(place, 0, f"{100 * row.efficiency:.0f}", color="white", ha="center",
                       va="bottom")  # fmt: skip
            if row.gpus in measured:
                parts.plot(place, 1000 * measured[row.gpus].step_s, "X", color="#f28a50",
                           markersize=13, markeredgecolor="black")  # fmt: skip
        parts.set(ylabel="ms per step (in white: efficiency, %)", xlabel="GPUs")
        parts.set_ylim(top=1.25 * max(*below, *(1000 * p.step_s for p in measured.values())))
        for axes in (rate, parts):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="0.9")
            axes.set_axisbelow(True)
        rate.set_xticks(gpus, [str(n) for n in gpus])
        rate.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        rate.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        rate.minorticks_off()
        parts.set_xticks(places, [str(n) for n in gpus])
        parts.legend(frameon=False, loc="upper left", ncols=1)
        figure.savefig(out, metadata={"Software": None} if out.suffix == ".png" else None)
