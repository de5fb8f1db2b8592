"""The directory of a run: its owner, name, files, log lines and curves; rank 0 writes all files."""

import contextlib
import json
import logging
import math
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from utils import addons, errors, launch, tensorboard
from utils.atomic import remove_leftovers, save_atomically
from utils.errors import UserError, printable
from utils.option_types import is_url
from utils.snapshots import BEST, SNAPSHOT, latest, name_newer_snapshot, read_whole
from utils.world import World, broadcast_from_rank0

# ---- what is printed

OPTIONS, SUMMARY, LOG = "options.json", "summary.json", "train.log"

log = logging.getLogger(__name__)


def as_line(record: logging.LogRecord) -> str:
    """What is printed of a record: its message; of a warning, behind that word."""
    text = printable(record.getMessage())
    return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


class Console(logging.Handler):
    """Prints a line in the first process of each node; rank 0 adds it to ``folder``/train.log."""

    def __init__(self, folder: Path | None, world: World):
        """From now on, what any module of this package logs is shown."""
        super().__init__(logging.INFO)
        self.path, self.world = folder and folder / LOG, world
        self.shows = world.local_rank == 0
        self.bar = addons.progress_bar(world)
        logger = logging.getLogger("utils")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Show one line. A full disk must not end a training: the line has been printed."""
        text = as_line(record)
        if self.bar is not None:
            self.bar.write(text)
        elif self.shows:
            print(text if self.world.is_main else f"[rank {self.world.rank}] {text}", flush=True)
        if self.world.is_main and self.path is not None:
            with contextlib.suppress(OSError), open(self.path, "a") as file:
                file.write(text + "\n")


# ---- the directory


def _directory(args: Any, world: World, mode: str) -> Path:
    """The run's directory, which may not exist yet. For rank 0. Raises: `UserError` if taken."""
    continues, name = args.resume and not args.evaluate, args.name
    if continues and not name and (Path(args.resume).parent / OPTIONS).is_file():
        return Path(args.resume).parent  # a run continues where it was
    if continues and not name and is_url(args.resume):
        name = addons.extra("store").run_name(args.resume, OPTIONS)
    if not name:
        now, host = time.strftime("%b%d_%H-%M-%S"), socket.gethostname().split(".")[0]
        sizes = f"gpux{world.size}_b{args.batch_size}_cpu{args.workers}"
        name = f"{now}_{host}_{args.arch}_{sizes}_{mode}"
    folder = Path(args.output_dir, name)
    if (folder / OPTIONS).exists() and not continues:
        advice = "choose another --name"
        if not (args.evaluate or addons.measures(args)):
            advice = f"continue it with --resume auto, or {advice}"
        raise UserError(f"{folder} holds a run already: {advice}")
    return folder


def checkpoint_file(args: Any) -> Path | None:
    """The local file that ``--resume`` names; of ``auto``, the run's last snapshot, to evaluate its
    best model. None if there is none. Raises: `UserError` when there is nothing to evaluate."""
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

    In rank 0, the functions in ``curves`` get (tags, x) to draw, those in ``pictures`` (tag, image
    of Pillow, x), those in ``written`` the path of each file that was written, and those in
    ``at_end`` are called when nothing more comes.
    """

    def __init__(self, args: Any, world: World, mode: str):
        """Choose and make the run directory. Raises `UserError` when it is taken.

        Only a training needs one: an evaluation or a measurement has one if it has a --name.
        """
        self.args, self.world, self.mode = args, world, mode
        self.folder: Path | None = None  # None: nothing is kept
        self.lock: Any = None  # of a training, see `addons.run_lock`
        self.is_writing = not (args.evaluate or addons.measures(args))  # a training
        self.curves: list[Callable[[dict[str, float], int], None]] = []
        self.pictures: list[Callable[[str, Any, int], None]] = []
        self.written: list[Callable[[Path], None]] = []
        self.at_end: list[Callable[[], None]] = []
        self.events: tensorboard.EventFile | None = None  # of a training, in rank 0
        plain = (int, float, str, type(None))
        self.options = {k: v for k, v in vars(args).items() if isinstance(v, plain)}
        self.options |= {"mode": mode, "command": " ".join(sys.argv)}
        # Facts at the start of the run and results at its end, for HParams and summary.json.
        self.record: dict[str, Any] = {}
        continues = args.name and args.resume == "auto" and args.start_epoch is None
        if launch.is_elastic() and self.is_writing and not continues:
            raise UserError(
                "restarts (torchrun --max-restarts, --elastic) continue one run: add --name X "
                "--resume auto, without --start-epoch",
                on_every_rank=True,
            )
        # An evaluation of the run --name leaves the files of that run alone.
        has_own = args.name and not args.find_batch and not (args.evaluate and continues)
        if self.is_writing or has_own:
            self.folder = broadcast_from_rank0(lambda: _directory(args, world, mode), world)
            if self.is_writing:
                self.lock = addons.run_lock(self.folder, launch.is_elastic())  # rank 0 acquires it
                errors.continue_by(self._how_to_continue())
            # In short rounds, as the other ranks wait no longer than --dist-timeout for one.
            while not broadcast_from_rank0(self._make, world):
                time.sleep(0.5)
            if self.lock and launch.is_elastic():
                self.lock.check_shared(world)
        self.console = Console(self.folder, world)
        if world.is_main and (unused := addons.unused_gpus()):
            log.info(f"note: CUDA_VISIBLE_DEVICES asks for the CPU; {unused} not used")
        if self.lock and self.lock.note:
            log.info(self.lock.note)
        if self.lock and self.lock.warning:
            log.warning(self.lock.warning)
        self.content: dict[str, Any] | None = None  # of the checkpoint to resume from, in rank 0
        path = broadcast_from_rank0(self._read_checkpoint, world)
        # Its name in messages: what a URL names is a temporary file here.
        self.source = args.resume if is_url(args.resume) else path

    def _how_to_continue(self) -> str:
        if self.args.resume == "auto":
            return "run the same command again"
        option = "auto" if self.args.name else self.folder / SNAPSHOT
        return f"run the same command with --resume {option}"

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn what the disk refuses into a `UserError`."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write into the run directory {self.folder} ({error.strerror}): existing "
                "files are intact; free disk space, or choose another --output-dir"
            ) from error

    def _make(self) -> bool:
        """Make the directory and, to train, acquire its lock. Returns: whether that is done.

        Raises: `UserError` while another run holds it.
        """
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            return self.lock is None or self.lock.poll()

    def _read_checkpoint(self) -> Path | None:
        """Read the file to resume from; with "auto" the run's own, if it has one. Opens the store.

        Returns: its path. Raises: `UserError` where there is none, or only weights, which would
        begin a training and overwrite the run in this directory.
        """
        args, folder = self.args, self.folder
        if self.is_writing:
            addons.follow(self)
        if is_url(args.resume):
            path = addons.extra("store").fetch(args.resume, folder)
        else:
            if self.is_writing and args.resume == "auto":
                with self._writing():
                    name_newer_snapshot(folder)
            path = checkpoint_file(args)
        if path is None:
            return None
        is_own = self.is_writing and path.parent == folder and not is_url(args.resume)
        with self._writing():
            path, self.content = read_whole(path, set_aside=is_own)
        holds_run = is_own or (self.is_writing and (folder / OPTIONS).is_file())
        if holds_run and args.start_epoch is None and "progress" not in self.content:
            file = args.resume if is_url(args.resume) else path
            raise UserError(
                f"{file} has weights, but no position in a training: beginning anew would "
                f"overwrite the run in {folder}. To train from these weights, use --pretrained "
                "FILE with another --name"
            )
        return path

    def take_checkpoint(self) -> dict[str, Any] | None:
        """The content of the file to resume from, which is not kept any longer. In rank 0."""
        content, self.content = self.content, None
        return content

    def tell_written(self, path: Path) -> None:
        """Call the functions in ``written`` with the path of a file."""
        for tell in self.written:
            tell(path)

    def close(self) -> None:
        """Call the functions in ``at_end``. All ranks: a launcher ends the others when one has
        ended."""

        def end_all() -> None:
            for end in self.at_end:
                end()

        broadcast_from_rank0(end_all, self.world)

    def begin(self, epoch: int, position: float, facts: dict[str, Any] | None = None) -> None:
        """Open the files. Points past ``epoch`` (finished) and ``position`` (epochs, fractional)
        that a killed run left in the event files are cut off, so that curves never run backward.
        ``facts`` about a training (see `addons.facts`) begin the run's `record`.
        """
        if self.folder is None:
            return
        broadcast_from_rank0(
            lambda: self._open_files(epoch, round(1000 * position), facts), self.world
        )

    def _open_files(self, epoch: int, step_x: int, facts: dict[str, Any] | None) -> None:
        with self._writing():
            remove_leftovers(self.folder)
            _save_json(self.options, self.folder / OPTIONS)
            tensorboard.cut_off(self.folder, epoch, step_x)
            # What is here may be newer than what the store has: the last process died sending.
            for name in (OPTIONS, BEST, SNAPSHOT):
                self.tell_written(self.folder / name)
            if facts is not None:  # without curves, an event file would make it a run to compare
                self.record |= facts
                opening = addons.opening_summaries(self.options | self.record)
                self.events = tensorboard.EventFile(self.folder, opening)
                self.curves.append(self.events.write)

    def start_steps(self, title: str, steps: int, done: int = 0) -> None:
        """The ``steps`` steps of an epoch or of an evaluation begin."""
        if self.console.bar is not None:
            self.console.bar.start(title, steps, done)

    def step(self, done: int, place: str = "", values: dict[str, float] | None = None) -> None:
        """So many steps are ``done``; print ``place`` and ``values``, if there are any."""
        text = "  ".join(f"{name} {value:.4g}" for name, value in (values or {}).items())
        if self.console.bar is not None:
            self.console.bar.move(done, text)
        elif text:
            log.info(f"{place}  {text}")

    def stop_steps(self) -> None:
        """The last step is done."""
        if self.console.bar is not None:
            self.console.bar.stop()

    def scalars(self, values: dict[str, float], x: int) -> None:
        """Draw points at ``x``, in rank 0; NaN (nothing measured) is left out."""
        measured = {tag: value for tag, value in values.items() if not math.isnan(value)}
        for draw in self.curves:
            draw(measured, x)

    def epoch(self, record: dict[str, float], left: str) -> None:
        """Write an epoch's record (TensorBoard tags to values, and "epoch") and its line.

        ``left``, for the end of the line, says how much time is left; "": no longer.
        """
        tags = {tag: value for tag, value in record.items() if "/" in tag or tag == "Lr"}
        self.scalars(tags, int(record["epoch"]))
        log.info(
            f"Epoch {record['epoch']:.0f}/{self.args.epochs}"
            f"  train: loss {record['Loss/train']:.4f} top-1 {record['Top1/train']:.2f}"
            f" top-5 {record['Top5/train']:.2f}"
            f"  val: loss {record['Loss/val']:.4f} top-1 {record['Top1/val']:.2f}"
            f" top-5 {record['Top5/val']:.2f}"
            + (f" ema {record['Top1/ema']:.2f}" if "Top1/ema" in record else "")
            + f"  lr {record['Lr']:.3g}  {record['Throughput/train']:.1f} images/s"
            + (f"  left {left}" if left else "")
        )

    def finish(self, results: dict[str, Any]) -> None:
        """Complete the record, write summary.json, end what ``at_end`` names. For all ranks."""
        self.record |= results
        if self.world.is_main and self.folder is not None:
            path = self.folder / SUMMARY
            # JSON has no NaN, and other programs read this file: what was not measured is null.
            clean = {key: None if value != value else value for key, value in self.record.items()}
            try:
                _save_json(clean, path)
                if self.events is not None:
                    success = self.record["finished_because"] != "interrupted"
                    self.events.add(addons.closing_summaries(success))
            except OSError as error:
                log.warning(f"cannot write {path} ({error.strerror})")
            self.tell_written(path)
        self.close()
        if self.lock is not None:
            self.lock.release()


def _save_json(content: dict[str, Any], path: Path) -> None:
    text = json.dumps(content, indent=1) + "\n"
    save_atomically(lambda file: file.write(text.encode()), path)
