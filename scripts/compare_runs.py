"""Compare training runs: print a table, draw curves and speeds, and write an HTML page.

    python scripts/compare_runs.py runs/one_node runs/two_nodes \\
        --labels "1 node" "2 nodes"
    python scripts/compare_runs.py runs --out figures --target-top1 75 --results

Reads the TensorBoard event files of each run: of this suite, or of older suites with the same tags.
Options that an event file does not record are taken from the folder's name, and what all starts of
a run have used (GPU-hours, energy) from its summary.json. Unknown values are shown as `-`.
Speed-ups are relative to the run with the fewest GPUs. All files go into DIR: the table as Markdown
and CSV, the pictures, and compare.html. By default DIR is the folder `compare` beside the first
RUN, or inside RUN if that is a folder of runs.
"""

import argparse
import os
import shutil
import sys
import textwrap
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils.start import launch

launch.prepare()  # before torch is imported, which takes seconds

from compare import page, pictures, runs, table
from compare.comparison import MANY, Comparison, origin

from utils.start import errors
from utils.start.errors import UserError, exit_with
from utils.start.option_types import DocstringFormatter, Parser, accuracy, number, place, positive


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=DocstringFormatter)
    add, above_0 = parser.add_argument, number(float, 0, exclusive=True)
    text = "a run directory, a folder of run directories, or an event file"
    add("runs", nargs="+", type=Path, metavar="RUN", help=text)
    text = "one per run, in the order of the table (default: folder names, or facts that differ)"
    add("--labels", nargs="+", metavar="LABEL", help=text)
    text = "numbers of GPUs, one per run, if neither event files nor folder names have them"
    add("--gpus", nargs="+", type=positive, metavar="N", help=text)
    text = "training images per epoch, if the event files lack them (ImageNet: 1281167)"
    add("--train-images", type=positive, metavar="N", help=text)
    text = "show the epochs finished within this time (default: the time of the shortest run)"
    add("--within", type=above_0, metavar="HOURS", help=text)
    text = "show the time to this validation top-1 (0.75 or 75; default: the best that all reach)"
    add("--target-top1", type=accuracy, metavar="A", help=text)
    text = "price of a node per hour, in any currency (g4dn.xlarge: 0.526 $): adds the cost of runs"
    add("--price", type=above_0, metavar="P", help=text)
    text = "folder for table, pictures and page (default: compare, beside the first RUN)"
    add("--out", type=place, metavar="DIR", help=text)
    text = "formats of the pictures beside PNG, such as svg,pdf"
    add("--formats", type=_formats, default=[], metavar="LIST", help=text)
    add("--prefix", default="", metavar="NAME_", help="prefix of the file names")
    add("--title", help="title of the page and of the section in RESULTS.md")
    text = "also write the comparison's section into this file (default: %(const)s)"
    results_file = Path("RESULTS.md")
    add("--results", nargs="?", type=place, const=results_file, metavar="FILE", help=text)
    return parser.parse_intermixed_args(argv)


def _formats(text: str) -> list[str]:
    formats = text.split(",")
    if not set(formats) <= set(pictures.NO_DATE):
        raise argparse.ArgumentTypeError(f"{text} is not a list of png, svg and pdf")
    return formats


def compare(args: argparse.Namespace) -> Comparison:
    """Compare the runs that the command line names, with a note about each run without curves.

    Runs in a folder are sorted by their number of GPUs; others keep the order given.
    Raises: `UserError`.
    """
    named = {run.path.resolve(): run for path in args.runs for run in runs.find(path)}
    with_epochs = [run for run in named.values() if run.epochs is not None]
    left_out = [
        "; ".join([f"{run.path} is left out: it has no finished epoch, or other tags", *run.notes])
        for run in named.values()
        if run.epochs is None
    ]
    if not with_epochs:
        raise UserError("; ".join(left_out))
    if "/" in args.prefix:
        raise UserError(f"--prefix {args.prefix} is a part of file names: the folder is --out")
    for option, values in (("labels", args.labels), ("numbers of GPUs", args.gpus)):
        if values and len(values) != len(with_epochs):
            names = ", ".join(run.folder.name for run in with_epochs)
            raise UserError(
                f"{len(values)} {option} for {len(with_epochs)} runs ({names}); give one per run"
            )
    for run, gpus in zip(with_epochs, args.gpus or (), strict=False):
        run.facts["gpus"] = gpus
    for run in with_epochs:
        if args.train_images and (batch := run.facts.get("global_batch")):
            run.facts.setdefault("steps_per_epoch", -(-args.train_images // int(batch)))
    runs.name_runs(with_epochs)
    for run, label in zip(with_epochs, args.labels or (), strict=False):
        run.label = label
    if len({run.label.strip() for run in with_epochs} - {""}) < len(with_epochs):
        raise UserError("each run needs a label of its own: change --labels")
    comparison = Comparison(with_epochs, args.within, args.target_top1, args.price)
    comparison.notes += left_out
    return comparison


def beside(path: Path) -> Path:
    """Return the default folder of a comparison whose first RUN is ``path``."""
    path = Path(os.path.abspath(path))
    folder = path if path.is_dir() else path.parent
    is_run = any(folder.glob("*tfevents*"))
    return (folder.parent if is_run else folder) / "compare"


def main(argv: list[str] | None = None) -> int:
    """Compare the runs that ``argv`` names. Raises: `UserError`, OSError."""
    argv = sys.argv[1:] if argv is None else argv
    args, command = parse(argv), errors.command("compare_runs.py", *argv)
    comparison, out = compare(args), args.out or beside(args.runs[0])
    notes = [f"- {note}" for note in comparison.notes]
    width = shutil.get_terminal_size().columns  # 80 in a pipe, as for --help
    how = {"break_long_words": False, "break_on_hyphens": False}
    fill = partial(textwrap.fill, width=min(width, 100), **how)
    wrapped = [fill(text) for text in comparison.sentences]
    notes = [fill(text, subsequent_indent="  ") for text in notes]
    print(*wrapped, "", comparison.as_text(width), *([""] if notes else []), *notes, sep="\n")
    page.library()  # fail now, not after the pictures
    labels = ", ".join(run.label for run in comparison.runs)
    number = len(comparison.runs)
    title = args.title or (
        f"Comparison of {number} runs"
        if number > MANY or len(labels) > 60
        else f"Comparison: {labels}"
    )
    looks = pictures.looks_of(comparison)
    html = page.render(
        Path(page.__file__).with_name("page.html"),
        title=title,
        command=command,
        comparison=comparison,
        drawings=pictures.drawings(comparison),
        looks={run.label: looks[run.label] for run in comparison.shown},
        is_long=number > MANY,
        origins={run.label: origin(run) for run in comparison.runs},
    )
    texts = {"md": comparison.as_markdown() + "\n", "csv": comparison.as_csv(), "html": html}
    with errors.writing(out, "--out"):
        drawn = pictures.draw(comparison, out, args.prefix, formats=args.formats)
        for kind, text in texts.items():
            (out / f"{args.prefix}compare.{kind}").write_text(text, encoding="utf-8")
    print(f"\nin {out}: {args.prefix}compare.md, .csv, .html, and {len(drawn)} pictures")
    if "overlay" in drawn:
        print(f"one picture of all: {drawn['overlay']}")
    if args.results:
        chosen = [drawn[name] for name in ("top1_val", "training_throughput") if name in drawn]
        section = comparison.section(args.results, title, command, chosen)
        table.put(args.results, "compare_runs", title, section)
        print(f"section '{title}' in {args.results}")
    return 0


if __name__ == "__main__":
    exit_with(main)
