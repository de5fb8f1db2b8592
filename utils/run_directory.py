"""The directory of a run: its name, files, log lines and curves; rank 0 writes all files."""

import contextlib
import json
import logging
import math
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils import addons, errors, launch, tensorboard
from utils.atomic import remove_leftovers, save_atomically
from utils.errors import UserError, printable
from utils.option_types import is_url
from utils.snapshots import BEST, SNAPSHOT, latest, name_newer_snapshot, read_whole
from utils.world import World, broadcast_from_rank0

# ---- printed lines

OPTIONS, SUMMARY, LOG = "options.json", "summary.json", "train.log"

log = logging.getLogger(__name__)


def as_line(record: logging.LogRecord) -> str:
    """The line to print for a record. Warnings and errors begin with their level."""
    text = printable(record.getMessage())
    return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class Console(logging.Handler):
    """Prints the log of this package in the first process of each node.

    Rank 0 also appends it to ``folder``/train.log. On a terminal it shows progress bars.
    """

    def __init__(self, folder: Path | None, world: World):
        super().__init__(logging.INFO)
        self.path, self.world = folder and folder / LOG, world
        self.shows = world.local_rank == 0
        self.has_bar = world.is_main and sys.stderr.isatty()
        logger = logging.getLogger("utils")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Show one line. If the disk is full, training continues: the line has been printed."""
        text = as_line(record)
        if self.has_bar:
            tqdm.write(text)  # above the bar
        elif self.shows:
            print(text if self.world.is_main else f"[rank {self.world.rank}] {text}", flush=True)
        if self.world.is_main and self.path is not None:
            with contextlib.suppress(OSError), open(self.path, "a") as file:
                file.write(text + "\n")


# ---- the directory


def _directory(args: Any, world: World, mode: str) -> Path:
    """The run's directory, which may not exist yet. For rank 0. Raises: `UserError` if taken."""
    continues, name = args.resume and not args.evaluate, args.name
    if continues and not name:  # continue in the directory of that run
        if is_url(args.resume):
            name = addons.extra("store").run_name(args.resume, OPTIONS)
        elif (Path(args.resume).parent / OPTIONS).is_file():
            return Path(args.resume).parent
    if not name:
        now, host = time.strftime("%b%d_%H-%M-%S"), socket.gethostname().split(".")[0]
        sizes = f"gpux{world.size}_b{args.batch_size}_cpu{args.workers}"
        name = f"{now}_{host}_{args.arch}_{sizes}_{mode}"
    folder = Path(args.output_dir, name)
    if (folder / OPTIONS).exists() and not continues:
        advice = "choose another --name"
        if not (args.evaluate or addons.measures(args)):
            advice = f"continue it with --resume auto, or {advice}"
        raise UserError(f"{folder} contains a run already: {advice}")
    return folder


def checkpoint_file(args: Any) -> Path | None:
    """The local file that ``--resume`` names, or None.

    ``auto`` is the run's last snapshot; in an evaluation, its best model. Raises: `UserError` when
    there is nothing to evaluate.
    """
    if args.resume is None or is_url(args.resume):
        return None
    if args.resume != "auto":
        return Path(args.resume)
    folder = Path(args.output_dir, args.name)
    if not args.evaluate:
        return latest(folder)
    best = folder / BEST
    file = best if best.is_file() else latest(folder)
    if file is None:
        raise UserError(f"{folder} has no {BEST} and no {SNAPSHOT} to evaluate: check --name")
    return file


class Run:
    """A process's run directory, log and curves. ``mode``: nd, dp, ddp, ...

    Rank 0 calls the functions in ``curves`` with (tags, x), those in ``pictures`` with (tag, Pillow
    image, x), those in ``written`` with the path of each written file, and those in ``at_end`` when
    the run ends.
    """

    def __init__(self, args: Any, world: World, mode: str):
        """Choose and make the run directory. Raises: `UserError` when it is taken.

        A training always has one; an evaluation or a measurement has one if it has a --name.
        """
        self.args, self.world, self.mode = args, world, mode
        self.folder: Path | None = None
        self.source: Any = None  # the checkpoint that was read, as messages name it
        self.lock: Any = None  # only for training, see `addons.run_lock`
        self.is_writing = not (args.evaluate or addons.measures(args))  # it trains
        self.curves: list[Callable[[dict[str, float], int], None]] = []
        self.pictures: list[Callable[[str, Any, int], None]] = []
        self.written: list[Callable[[Path], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self.events: tensorboard.EventFile | None = None  # in rank 0 of a training
        plain = (int, float, str, type(None))
        self.options = {k: v for k, v in vars(args).items() if isinstance(v, plain)}
        self.options |= {"mode": mode, "command": " ".join(sys.argv)}
        # Facts at the start of the run and results at its end, for HParams and summary.json.
        self.record: dict[str, Any] = {}
        continues = args.name and args.resume == "auto" and args.start_epoch is None
        restarts = self.is_writing and launch.is_elastic()
        if restarts and not continues:
            raise UserError(
                "restarts (torchrun --max-restarts, --elastic) continue one run: add --name X "
                "--resume auto, without --start-epoch",
                on_every_rank=True,
            )
        # An evaluation of an existing run does not change the files of that run.
        has_own = args.name and not args.find_batch and not (args.evaluate and continues)
        if self.is_writing or has_own:
            self.folder = broadcast_from_rank0(lambda: _directory(args, world, mode), world)
            if self.is_writing:
                self.lock = addons.run_lock(self.folder, restarts)  # rank 0 acquires it
                option = f" with --resume {'auto' if args.name else self.folder / SNAPSHOT}"
                again = "run the same command"
                errors.how_to_continue = again + (" again" if args.resume == "auto" else option)
            # Poll the lock: in each broadcast, other ranks wait at most --dist-timeout.
            while not self._in_rank0(self._make):
                time.sleep(0.5)
            if self.lock and restarts:
                self.lock.check_shared(world)
        self.console = Console(self.folder, world)
        if world.is_main and (unused := addons.unused_gpus()):
            log.info(f"note: CUDA_VISIBLE_DEVICES hides {unused}: training uses the CPU")
        if self.lock and self.lock.note:
            log.info(self.lock.note)

    def _in_rank0(self, compute: Callable[[], Any]) -> Any:
        """`broadcast_from_rank0`. Raises: `UserError`, also for a failed write."""

        def guarded() -> Any:
            try:
                return compute()
            except OSError as error:
                raise UserError(
                    f"cannot write into the run directory {self.folder} ({error.strerror}): "
                    "existing files are intact; free disk space, or choose another --output-dir"
                ) from error

        return broadcast_from_rank0(guarded, self.world)

    def _make(self) -> bool:
        """Make the directory and, to train, try to acquire its lock. Returns: whether it is held.

        Raises: `UserError` while another run holds it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.lock is None or self.lock.poll()

    def read_checkpoint(self) -> dict[str, Any] | None:
        """The content of the checkpoint to resume from; None if there is none. Sets ``source``.

        Opens ``--store`` first. Raises: `UserError` for a file with only weights in the directory
        of a run: training would start over and overwrite that run.
        """
        self.source, content = self._in_rank0(self._read_checkpoint)
        return content

    def _read_checkpoint(self) -> tuple[Any, dict[str, Any] | None]:
        args, folder = self.args, self.folder
        if self.is_writing:
            addons.open_store(self)
        if is_url(args.resume):
            path = addons.extra("store").fetch(args.resume, folder)
        else:
            if self.is_writing and args.resume == "auto":
                name_newer_snapshot(folder)
            path = checkpoint_file(args)
        if path is None:
            return None, None
        is_own = self.is_writing and path.parent == folder and not is_url(args.resume)
        path, content = read_whole(path, set_aside=is_own)
        source = args.resume if is_url(args.resume) else path  # a URL's file is a temporary one
        holds_run = is_own or (self.is_writing and (folder / OPTIONS).is_file())
        if holds_run and args.start_epoch is None and "progress" not in content:
            raise UserError(
                f"{source} has weights, but no position in a training: starting over would "
                f"overwrite the run in {folder}. To train from these weights, use --pretrained "
                "FILE with another --name"
            )
        return source, content

    def tell_written(self, path: Path) -> None:
        """Call the functions in ``written`` with the path of a file."""
        for tell in self.written:
            tell(path)

    def close(self) -> None:
        """Call the functions in ``at_end``. All ranks wait for rank 0: when one rank exits, a
        launcher kills the others."""

        def end_all() -> None:
            for end in self.at_end:
                end()

        broadcast_from_rank0(end_all, self.world)

    def begin(self, epoch: int, position: float, facts: dict[str, Any] | None = None) -> None:
        """Open the files. Remove points after ``epoch`` (finished) and ``position`` (epochs,
        fractional) that a killed run left in the event files, so that curves never run backward.
        ``facts`` about a training (see `addons.facts`) are the first entries of the run's `record`.
        """

        def open_files() -> None:
            remove_leftovers(self.folder)
            _save_json(self.options, self.folder / OPTIONS)
            if facts is not None:
                self.record |= facts
                addons.open_tracker(self)  # first, as it reads the points that are cut off
            tensorboard.cut_off(self.folder, epoch, round(1000 * position))
            # The store may have older files, if the last process died while it sent these.
            for name in (OPTIONS, BEST, SNAPSHOT):
                self.tell_written(self.folder / name)
            if facts is not None:  # an event file without curves would count as a run to compare
                opening = addons.opening_summaries(self.options | self.record)
                self.events = tensorboard.EventFile(self.folder, opening)
                self.curves.append(self.events.write)

        if self.folder is not None:
            self._in_rank0(open_files)

    def progress_bar(self, title: str, steps: int, done: int = 0) -> tqdm:
        """A bar for ``steps`` steps, ``done`` of them finished. It is shown only on a terminal."""
        off = not self.console.has_bar
        return tqdm(desc=title, total=steps, initial=done, leave=False, unit="step", disable=off)

    def scalars(self, values: dict[str, float], x: int) -> None:
        """Draw points at ``x``, in rank 0; NaN (nothing measured) is left out."""
        measured = {tag: value for tag, value in values.items() if not math.isnan(value)}
        for draw in self.curves:
            draw(measured, x)

    def epoch(self, record: dict[str, float], left: str) -> None:
        """Write an epoch's record (TensorBoard tags to values, and "epoch") and its line.

        ``left``: the time until the training ends, or "".
        """
        tags = {tag: value for tag, value in record.items() if "/" in tag or tag == "Lr"}
        self.scalars(tags, int(record["epoch"]))
        train, val = (
            f"{part}: loss {record[f'Loss/{part}']:.4f} top-1 {record[f'Top1/{part}']:.2f} "
            f"top-5 {record[f'Top5/{part}']:.2f}"
            for part in ("train", "val")
        )
        if "Top1/ema" in record:
            val += f" ema {record['Top1/ema']:.2f}"
        line = [f"Epoch {record['epoch']:.0f}/{self.args.epochs}", train, val]
        line += [f"lr {record['Lr']:.3g}", f"{record['Throughput/train']:.1f} images/s"]
        log.info("  ".join(line + ([f"left {left}"] if left else [])))

    def finish(self, results: dict[str, Any]) -> None:
        """Complete the record, write summary.json, close the run. All ranks call it."""
        self.record |= results
        if self.world.is_main and self.folder is not None:
            path = self.folder / SUMMARY
            # JSON has no NaN, and other programs read this file: write null for missing values.
            clean = {key: None if value != value else value for key, value in self.record.items()}
            try:
                _save_json(clean, path)
            except OSError as error:
                log.warning(f"cannot write {path} ({error.strerror})")
            if self.events is not None:
                success = self.record["finished_because"] != "interrupted"
                self.events.add(addons.closing_summaries(success))
            self.tell_written(path)
        self.close()
        if self.lock is not None:
            self.lock.release()


def _save_json(content: dict[str, Any], path: Path) -> None:
    text = json.dumps(content, indent=1) + "\n"
    save_atomically(lambda file: file.write(text.encode()), path)
