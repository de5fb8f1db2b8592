"""What a run leaves behind: its directory, TensorBoard curves, summary; rank 0 writes all files.

The first process of every other node prints plain lines (see utils/run/console.py), so that nobody
sits in front of a silent terminal; all further processes are quiet.
"""

import contextlib
import json
import logging
import math
import socket
import sys
import time
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from utils import tensorboard
from utils.atomic import remove_leftovers, save_atomically
from utils.errors import UserError
from utils.launch import gpus
from utils.launch.world import World, from_main, gather, node_name
from utils.option_types import AUTO
from utils.run import elastic, store
from utils.run.console import LOG, Console
from utils.run.lock import LOCK, Lock
from utils.run.snapshots import BEST, PREVIOUS, SNAPSHOT, latest

Facts = dict[str, tensorboard.Value]
VISIBLE_SECONDS = 10.0  # for a file to be seen on another node
OPTIONS, SUMMARY = "options.json", "summary.json"

log = logging.getLogger(__name__)


def _directory(args: Any, plan: elastic.Plan, world: World, mode: str) -> Path:
    """The run's directory, which may not exist yet; refused if another run is in it. For rank 0."""
    root = Path(args.output_dir)
    snapshot = Path(plan.resume) if plan.resume and plan.resume != "auto" else None
    name = plan.name
    if not name and store.is_url(plan.resume) and not args.evaluate:
        name = store.run_name(plan.resume, SNAPSHOT, mark=OPTIONS)
    if name:
        folder = root / name
    elif snapshot and not args.evaluate and (snapshot.parent / OPTIONS).is_file():
        folder = snapshot.parent  # a run continues where it was
    else:
        host = socket.gethostname().split(".")[0]
        now = time.strftime("%b%d_%H-%M-%S")
        name = (
            f"{now}_{host}_{args.arch}_gpux{world.size}_b{args.batch_size}_cpu{args.workers}_{mode}"
        )
        # Two runs may start in the same second.
        names = (name + (f"-{number}" if number else "") for number in range(1000))
        folder = next(root / name for name in names if not (root / name).exists())
    goes_on = plan.resume and not args.evaluate
    if (folder / OPTIONS).exists() and not goes_on:
        raise UserError(
            f"{folder} holds a run already: continue it with --resume, or choose another --name"
        )
    return folder


def _make(folder: Path) -> None:
    """Make the run's directory and its log. For rank 0."""
    for name in (SNAPSHOT, PREVIOUS, BEST, OPTIONS, SUMMARY, LOG):
        path = folder / name
        if path.exists() and not path.is_file():
            raise UserError(
                f"{path} is not a file, and training will write one there: move it away, or choose "
                "another --name"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LOG).touch()
    except OSError as fault:
        raise UserError(f"cannot write the run directory {folder}: {fault.strerror}") from None


class Run:
    """Where this process reports to. ``mode`` is the script's short name (nd, dp, ddp, ...)."""

    def __init__(self, args: Any, world: World, mode: str):
        """Choose and make the run directory. Raises `UserError` when it is taken.

        Where the batch size is part of its name, but is still to be found, that waits for `open`.
        """
        self.args, self.world, self.mode = args, world, mode
        plan = self.plan = elastic.plan(args, world, OPTIONS)
        self.resume = plan.resume  # --resume, or what a restart has made of it
        self.folder: Path | None = None
        self.lock: Lock | None = None  # nobody else trains here; in rank 0
        self.fetched: Path | None = None
        plain = (int, float, str, type(None))
        self.options = {k: v for k, v in vars(args).items() if isinstance(v, plain)}
        self.options |= {"name": plan.name, "resume": plan.resume}
        self.options |= {"mode": mode, "command": " ".join(sys.argv)}
        if elastic.job_id():
            self.options["elastic_job"] = elastic.job_id()
        self.writer: SummaryWriter | None = None
        self.has_gap = False  # the writer was lost to a full disk
        self.is_training = False  # an entry is open in the event file
        if args.batch_size != AUTO or plan.name or store.is_url(self.resume):
            self.open()

    def open(self) -> None:
        """Choose and make the run directory, unless that is done. Raises `UserError`."""
        if self.folder is not None:
            return
        args, plan, world = self.args, self.plan, self.world
        self.folder = from_main(lambda: _directory(args, plan, world, self.mode), world)
        if not args.evaluate and not args.dummy:
            self._acquire(patient=plan.note is not None)
            if elastic.is_elastic():
                self._check_shared()
        from_main(lambda: _make(self.folder), world)
        self.console = Console(self.folder, world)
        self.console.attach()
        unused = gpus.unused() if world.device.type == "cpu" else None
        for note in (unused, plan.note, self.lock.note if self.lock else None):
            if note:
                log.info(note)
        self.stores = bool(args.store and not args.evaluate and not args.dummy)
        url = args.store if self.stores and world.is_main else None
        self.store = store.Store(url, self.folder)
        self.fetched = from_main(self._open_store, world)

    def _acquire(self, patient: bool) -> None:
        """Acquire the directory's lock. Raises `UserError` while another run holds it."""
        lock = Lock(self.folder, patient)
        # In short rounds, as the other ranks wait no longer than --dist-timeout for one.
        while not from_main(lock.poll, self.world):
            time.sleep(0.5)
        if self.world.is_main:
            self.lock = lock

    def _check_shared(self) -> None:
        """Raise `UserError` unless all nodes see the directory: any may have rank 0 next time."""
        text = from_main(lambda: self.lock.text, self.world)
        deadline = time.monotonic() + VISIBLE_SECONDS

        def is_seen() -> bool:
            with contextlib.suppress(OSError):
                return (self.folder / LOCK).read_text() == text
            return False

        while not (seen := is_seen()) and time.monotonic() < deadline:
            time.sleep(0.2)
        found = gather((node_name(self.world), seen), self.world)
        if blind := [name for name, sees in found if not sees]:
            raise UserError(
                f"{blind[0]} does not see what {found[0][0]} writes into {self.folder}: a "
                "training that goes on when nodes fail needs an --output-dir that they share",
                alike=True,
            )

    def _open_store(self) -> Path | None:
        """Get from the store what it has to resume from. Returns the file that a URL has given."""
        resume = self.resume
        self.store.open(bool(resume), (BEST, SNAPSHOT) if resume == "auto" else ())
        if not store.is_url(resume):
            return None
        return store.fetch(resume, SNAPSHOT, self.folder, also=BEST)

    def close_store(self) -> None:
        """Wait for the last uploads. All ranks: a launcher ends the others when one has ended."""
        if self.stores:
            from_main(self.store.close, self.world)

    @property
    def snapshot(self) -> Path | None:
        """What to resume from: the file given, or with "auto" the run's own, if it has one."""
        if self.fetched is not None:
            return self.fetched
        if self.resume != "auto":
            return Path(self.resume) if self.resume else None
        return latest(self.folder)

    def begin(self, epoch: int, position: float, facts: Facts | None = None) -> None:
        """Open the files. Points past ``epoch`` (finished) and ``position`` (epochs, fractional)
        that a killed run left in the event files are cut off, so that curves never run backward.
        ``facts`` about a training (see `report.facts`) go into the event file with the options.
        """
        from_main(lambda: self._begin(epoch, position, facts), self.world)

    def _begin(self, epoch: int, position: float, facts: Facts | None) -> None:
        try:
            remove_leftovers(self.folder)
            self._open_files(epoch, position, facts)
        except OSError as fault:
            raise UserError(
                f"cannot write into the run directory {self.folder} ({fault.strerror}): existing "
                "files are intact; free disk space"
            ) from fault

    def _open_files(self, epoch: int, position: float, facts: Facts | None) -> None:
        text = json.dumps(self.options, indent=1) + "\n"
        save_atomically(lambda file: file.write(text.encode()), self.folder / OPTIONS)
        tensorboard.cut_off(self.folder, epoch, round(1000 * position))
        # What is here may be newer than what the store has: the last process died while sending.
        for name in (OPTIONS, BEST, SNAPSHOT):
            self.store.upload(self.folder / name)
        if facts is not None:  # without curves, an event file would make it a run to compare
            self.writer = tensorboard.open_writer(self.folder)
            self.writer.add_custom_scalars(tensorboard.LAYOUT)
            if facts.get("comm") != "auto":
                self._add_entry(facts)
            self.writer.flush()  # from now on other programs can see what is trained here
            self.is_training = True

    def describe(self, facts: Facts) -> None:
        """Write the entry that `begin` left out, as ``facts`` lacked what is chosen later."""
        if self.writer is None:
            return
        with contextlib.suppress(OSError):  # the next point says so
            self._add_entry(facts)
            self.writer.flush()

    def _add_entry(self, facts: Facts) -> None:
        for summary in tensorboard.entry(self.options | facts, self.folder.name):
            self.writer.file_writer.add_summary(summary, 0)

    def step(self, place: str, done: int, values: dict[str, float]) -> None:
        """Report ``done`` steps of an epoch: move the bar, or print a line."""
        text = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        if self.console.bar is not None:
            self.console.move_bar(done, text)
        else:
            log.info(f"{place}  {text}")

    def scalars(self, values: dict[str, float], x: int, flush: bool = False) -> None:
        """Write TensorBoard points at ``x``, in rank 0; NaN (nothing measured) is left out."""
        if self.writer is None:
            return
        try:
            for tag, value in values.items():
                if not math.isnan(value):
                    self.writer.add_scalar(tag, value, x)
            if flush:
                self.writer.flush()
        except OSError as fault:  # of TensorBoard's thread, which ends with its first
            self.writer, self.has_gap = None, True
            log.warning(
                f"cannot write the event file ({fault.strerror}): training goes on, and "
                "its curves have a gap"
            )

    def epoch(self, record: dict[str, float], left: str) -> None:
        """Write an epoch's record (TensorBoard tags to values, and "epoch") and its line.

        ``left``, for the end of the line, says how long the training will go on; "": no longer.
        """
        tags = {tag: value for tag, value in record.items() if "/" in tag or tag == "Lr"}
        if self.has_gap:
            with contextlib.suppress(OSError):  # there may be room again
                self.writer, self.has_gap = tensorboard.open_writer(self.folder), False
        self.scalars(tags, int(record["epoch"]), flush=True)
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

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json, close the event file, wait for the store. For all ranks."""
        if self.world.is_main:
            self._finish(summary)
            self.store.upload(self.folder / SUMMARY)
        self.close_store()
        if self.lock is not None:
            self.lock.release()

    def _finish(self, summary: dict[str, Any]) -> None:
        # JSON has no NaN, and other programs read this file: what was not measured is null.
        clean = {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in summary.items()
        }
        text = json.dumps(clean, indent=1) + "\n"
        try:
            save_atomically(lambda file: file.write(text.encode()), self.folder / SUMMARY)
            if self.writer is not None:
                if self.is_training:
                    done = summary["finished_because"] != "interrupted"
                    self.writer.file_writer.add_summary(tensorboard.closing(done), 0)
                self.writer.close()
        except OSError as fault:
            log.warning(f"cannot write {self.folder / SUMMARY} ({fault.strerror})")
