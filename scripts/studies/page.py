"""Write a study's page in the log book: a table with the rows of published scaling experiments,
pictures of all runs, and the output of nvidia-smi."""

import json
import math
import os
import shlex
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from compare import pictures, runs, table
from compare.comparison import Comparison
from compare.runs import Run
from studies import tiny
from studies.plan import Study
from studies.runs import StudyRun

from utils.start import errors

PICTURES = ("overlay", "training_throughput", "scaling", "loss_val_hours", "top1_val_hours", "gpu")
LEGEND = """\
- Learning rate: the highest of the run.
- Epoch time: evaluation included. The first epoch is left out if there are others.
- Epoch num: epochs finished in that time.
- Scaling efficiency: epoch time x processes on the fewest nodes, divided by this column's product
  of both. Evaluation counts. (Throughput efficiency, below, compares images/s of training alone.)
- Best validation loss: the lowest of all epochs. It may be another epoch than that of best.pt.
- Test loss and accuracy: those of best.pt, the model that --best-by chooses."""

Column = list[tuple[StudyRun, Run]]  # the runs on one number of nodes, one per seed


def rows(columns: dict[str, Column], hours: float | None) -> list[list[str]]:
    """Return the rows of the table, in the usual order. Repeats show mean and standard deviation.

    ``columns``: title: runs. ``hours``: training time of each run; None if --epochs limits it.
    """
    pairs = [pair for column in columns.values() for pair in column]
    rates = [rate for _, run in pairs if (rate := run.highest("Lr"))]
    # The factor: 1e-4, rounded to 32 bits, must not become 9.99e-5.
    power = math.floor(math.log10(min(rates) * 1.0001)) if rates else 0

    def process_seconds(one: StudyRun, run: Run) -> float:
        return (run.epoch_seconds or 0.0) * (run.facts.get("gpus") or one.nodes)

    bases: dict[str, list[float]] = {}  # of the first column with the same varied options
    for pairs_of_column in columns.values():
        if seconds := [x for pair in pairs_of_column if (x := process_seconds(*pair))]:
            bases.setdefault(pairs_of_column[0][0].group, seconds)

    def epochs(one: StudyRun, run: Run) -> int | None:
        if hours is None or not (one.is_finished or (run.total_hours or 0.0) >= hours):
            return run.epochs if hours is None else None
        return run.done_within(hours)

    def efficiency(one: StudyRun, run: Run) -> float | None:
        own = process_seconds(one, run)
        return statistics.fmean(bases[one.group]) / own if own else None

    def minutes(value: float) -> str:
        return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"

    time = "" if hours is None else f" @ {hours:g} hr"
    figures: dict[str, tuple[Callable[..., float | None], Callable[[float], str]]] = {
        f"Learning Rate (e{power})":
            (lambda _, run: run.highest("Lr"), lambda x: f"{x / 10.0**power:.2f}"),
        "Largest Batch Per GPU": (lambda one, _: one.batch, "{:.0f}".format),
        "Global Batch Size": (lambda _, run: run.facts.get("global_batch"), "{:.0f}".format),
        "Steps Per Epoch": (lambda _, run: run.facts.get("steps_per_epoch"), "{:.0f}".format),
        "Avg Epoch Time (min)": (lambda _, run: runs.ratio(run.epoch_seconds, 60), minutes),
        f"Epoch Num{time}": (epochs, lambda x: f"{x:.3g}" if x % 1 else f"{x:.0f}"),
        "Scaling Efficiency": (efficiency, "{:.2f}".format),
        "Best Validation Loss": (lambda _, run: run.lowest_loss(), "{:.4f}".format),
        "Test Loss": (lambda _, run: run.last("Loss/test"), "{:.4f}".format),
        "Top1 Test Accuracy": (lambda _, run: run.last("Top1/test"), "{:.2f}%".format),
    }  # fmt: skip
    if not any(one.batch for one, _ in pairs):
        del figures["Largest Batch Per GPU"]
    if len(columns) > 1 and len({one.nodes for one, _ in pairs}) == 1:
        del figures["Scaling Efficiency"]  # of a study that varies other options alone
    cells = []
    for title, (figure_of, show) in figures.items():
        cells.append([title])
        for column in columns.values():
            values = [x for pair in column if (x := figure_of(*pair)) is not None]
            text = show(statistics.fmean(values)) if values else table.NONE
            if len(set(values)) > 1:
                text += f" ± {show(statistics.stdev(values))}"
            cells[-1].append(text)
    return cells


def hand_over(trained: Column, folder: Path) -> None:
    """Copy all event files into ``folder``: who is handed the log book has no run directories."""
    for one, _ in trained:
        copies = folder / one.name
        if copies.resolve() == one.folder.resolve():  # --output-dir LOGBOOK/NAME
            continue
        shutil.rmtree(copies, ignore_errors=True)  # of a run that was begun anew
        copies.mkdir(parents=True)
        for file in one.folder.glob("*tfevents*"):
            shutil.copy2(file, copies / file.name)


def write(args: Study, planned: list[StudyRun], command: str) -> None:
    """Update LOGBOOK/NAME.md and the list of all studies."""
    page, folder = args.logbook / f"{args.name}.md", args.logbook / args.name
    finished = [one for one in planned if one.is_finished]
    titles = {n: f"{n} Node{'s' * (n > 1)}" for n in dict.fromkeys(one.nodes for one in planned)}
    trained: Column = []
    for one in planned:
        run = runs.read(one.folder) if list(one.folder.glob("*tfevents*")) else None
        if run and run.epochs is not None:
            seed = f"seed {one.seed}" if len(args.seeds or ()) > 1 else ""
            run.label = ", ".join(filter(None, [titles[one.nodes].lower(), one.group, seed]))
            run.facts["nodes"] = one.nodes  # simulated nodes share a machine, which counts as one
            trained.append((one, run))
    parts = [f"# {table.escape_markdown(args.name)}"]
    parts += [f"{len(finished)} of {len(planned)} runs finished."]
    if args.tiny:
        parts.append(f"**A try: {tiny.WHAT}. Its figures mean nothing.**")
    elif args.simulate:
        links = f", with links of {args.link}" if args.link else ""
        parts.append(
            f"**Simulated: the nodes are processes that share the {os.cpu_count()} cores of one "
            f"machine{links}; their speeds say nothing about a cluster.**"
        )
    metrics: list[str] = []
    if trained:
        options = [json.loads((one.folder / "options.json").read_text()) for one, _ in trained]
        target = next(
            (top1 for one in options if (top1 := one.get("target_top1") or one.get("desired_acc"))),
            None,
        )
        comparison = Comparison([run for _, run in trained], args.hours, target)
        parts += [] if args.tiny else [comparison.lead()]
        drawn = pictures.draw(comparison, folder, only=PICTURES)
        metrics = ["## Metrics", comparison.section(page, "", command, drawn.values())]
        hand_over(trained, folder)
        shown = shlex.join(["tensorboard", "--logdir", str(folder)]).replace("`", "")
        compare = errors.command("compare_runs.py", folder).replace("`", "")
        parts.append(f"Curves with a cursor: `{shown}`, or the page that `{compare}` writes.")
    columns: dict[str, Column] = {}
    for nodes, group in dict.fromkeys((one.nodes, one.group) for one in planned):
        # On one number of nodes, the varied options alone tell the columns apart.
        title = ", ".join(filter(None, [titles[nodes] if len(titles) > 1 else "", group]))
        columns[title or titles[nodes]] = [
            pair for pair in trained if (pair[0].nodes, pair[0].group) == (nodes, group)
        ]
    parts.append("## Scaling" if len(titles) > 1 else "## Results")
    parts.append(table.markdown_table(["", *columns], rows(columns, args.hours)))
    states = [[one.name, one.state] for one in planned]
    parts += [LEGEND, "## Runs", table.markdown_table(["run", "state"], states)]
    parts += metrics
    for file in sorted(file for one in planned for file in folder.glob(f"{one.name}.nvidia-smi*")):
        if text := file.is_file() and file.read_text().strip():
            parts += [f"## {file.name.removesuffix('.txt')}", table.fence(text)]
    table.put(page, "scaling_study", args.name, "\n\n".join(parts))
    names = sorted(file.stem for file in args.logbook.glob("*.md") if file.stem != "README")
    links = "\n".join(f"- [{table.escape_markdown(x)}]({quote(f'{x}.md')})" for x in names)
    table.put(args.logbook / "README.md", "scaling_study", "index", f"# Log book\n\n{links}")
    print(f"log book: {page} is up to date", flush=True)
