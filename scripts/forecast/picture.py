"""A forecast as a picture: throughput against GPUs, and the parts of a step."""

from pathlib import Path

from forecast.model import Forecast

from utils.errors import UserError

PARTS = {  # of a step: attribute of `Forecast`, colour, hatch
    "compute": ("compute_s", "#2563a0", ""),
    "waiting for the slowest GPU": ("straggler_s", "#f8d060", "//"),
    "communication not hidden": ("exposed_s", "#8e1f24", ".."),
}
STYLE = {
    "font.size": 13, "savefig.dpi": 150, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "legend.frameon": False,
}  # fmt: skip
CROSS = {"color": "#f28a50", "markersize": 13, "markeredgecolor": "black"}


def draw(rows: list[Forecast], measured: dict[int, float], title: str, out: Path) -> None:
    """Draw ``rows`` and ``measured`` (seconds per step by number of GPUs) into the file ``out``.

    Raises: `UserError` for a file that cannot be written, or of an unknown kind.
    """
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    with matplotlib.style.context(["default", STYLE]):
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
        rate.set_xticks(gpus, map(str, gpus))
        rate.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        rate.yaxis.set_major_formatter("{x:,.0f}")
        rate.minorticks_off()
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
            axes.grid(axis="y", color="0.9")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out, metadata={"Software": None} if out.suffix == ".png" else None)
        except (OSError, ValueError) as fault:
            raise UserError(f"cannot write {out}: {fault}") from None
