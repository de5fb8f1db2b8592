"""A run as a process sees it: which directory it has, what it resumes from, log and curves."""

import contextlib
import itertools
import logging
import math
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from PIL import Image
from tensorboard.compat.proto.summary_pb2 import Summary

from utils.run.console import EVERY_NODE, Console, loss_text
from utils.run.run_folder import OPTIONS, RunFolder
from utils.run.run_lock import Lock
from utils.run.snapshots import BEST, PREVIOUS, SNAPSHOT, latest, name_newer_snapshot, read_whole
from utils.start import errors, gpu_check
from utils.start.addresses import is_elastic
from utils.start.atomic import link_atomically
from utils.start.errors import UserError
from utils.start.option_types import Options, is_url
from utils.start.world import T, World, broadcast_from_rank0

log = logging.getLogger(__name__)


def is_training(args: Options) -> bool:
    """Whether this command trains, so that it writes into the directory of a run."""
    return not (args.evaluate or args.find_batch)


def choose(args: Options, world: World, mode: str) -> Path | None:
    """The run's directory, which may not exist yet; None if this command needs none.

    A training always has one; an evaluation or a measurement has one if it has a --name. An
    evaluation of an existing run does not change the files of that run. For rank 0, as --name and
    the path of --resume may differ between nodes. Raises: `UserError` if the directory is taken.
    """
    name, source = args.name, None if args.evaluate else args.resume
    begins_again = args.start_epoch is not None and not args.evaluate
    continues_one = name and args.resume == "auto" and not begins_again
    if is_training(args):
        if is_elastic() and not continues_one:
            raise UserError(
                "restarts (torchrun --max-restarts, --elastic) continue one run: add --name X "
                "--resume auto, without --start-epoch"
            )
    elif not name or args.find_batch or continues_one:
        return None
    if source and not name:  # continue in the directory of that run
        if is_url(source):
            from utils.run import store

            name = store.run_name(source, OPTIONS)
        elif (Path(source).parent / OPTIONS).is_file():
            return Path(source).parent
    if not name:
        now, host = time.strftime("%b%d_%H-%M-%S"), socket.gethostname().split(".")[0]
        sizes = f"gpux{world.size}_b{args.batch_size}_cpu{args.workers}"
        return claim(Path(args.output_dir, f"{now}_{host}_{args.arch}_{sizes}_{mode}"))
    folder = Path(args.output_dir, name)
    if (folder / OPTIONS).exists() and not source:
        advice = "choose another --name"
        if is_training(args):
            advice = f"continue it with --resume auto, or {advice}"
        raise UserError(f"{folder} contains a run already: {advice}")
    return folder


def _changes(args: Options, folder: Path) -> str:
    """What to change in the command line of a training in ``folder`` to continue it; "" if nothing.

    With --start-epoch it would go back to that epoch. A run has no snapshot at first; one with a
    --name begins with --resume auto, too, unless it begins from another file.
    """
    source = "auto" if args.name else shlex.quote(str(folder / SNAPSHOT))
    changes = [] if args.resume == "auto" else [f"with --resume {source}"]
    changes += [] if args.start_epoch is None else ["without --start-epoch"]
    needed = not args.name or args.resume not in (None, "auto")
    begins = needed and not (folder / SNAPSHOT).exists()
    until = f" (unchanged while {folder / SNAPSHOT} is missing)" if begins else ""
    return " and ".join(changes) + until


def claim(folder: Path) -> Path:
    """Make a new folder: ``folder``, or FOLDER-2, -3, ... if another run began in that second."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for end in itertools.chain([""], (f"-{number}" for number in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            (path := folder.with_name(folder.name + end)).mkdir()
            return path
    raise AssertionError("unreachable")


def checkpoint_file(args: Options) -> Path | None:
    """The local file that ``--resume`` names, or None.

    ``auto`` is the run's last snapshot; in an evaluation, its best model. Raises: `UserError` when
    there is nothing to evaluate.
    """
    if args.resume is None or is_url(args.resume):
        return None
    if args.resume != "auto":
        return Path(args.resume)
    assert args.name is not None  # `utils.options` rejects auto without --name
    folder = Path(args.output_dir, args.name)
    if not args.evaluate:
        return latest(folder)
    best = folder / BEST
    file = best if best.is_file() else latest(folder)
    if file is None:
        remedy = "check --name"
        if args.store:
            copy = f"{args.store.rstrip('/')}/{args.name}/{BEST}"
            remedy = f"for the copy in the store, use --resume {shlex.quote(copy)}"
        raise UserError(f"{folder} has no {BEST} and no {SNAPSHOT} to evaluate: {remedy}")
    return file


class Run:
    """What a process's command reports: options, results, log and curves.

    ``folder``: see `choose`. ``mode``: nd, dp, ddp, ...
    """

    def __init__(self, args: Options, world: World, mode: str):
        """Choose and make the run directory. Raises: `UserError` when it is taken."""
        self.args, self.world, self.mode = args, world, mode
        self.folder: RunFolder | None = None
        self.source: Path | str | None = None  # the checkpoint that was read, as messages name it
        plain = (int, float, str, type(None))
        self.options = {k: v for k, v in vars(args).items() if isinstance(v, plain)}
        # Without the script's folder: event files and best.pt are handed to others.
        command = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
        self.options |= {"mode": mode, "command": command}
        # Facts at the start of the run and results at its end, for HParams and summary.json.
        self.record: dict[str, Any] = {}
        restarts = broadcast_from_rank0(is_elastic, world) and is_training(args)
        above = (Path(args.output_dir), *Path(args.output_dir).parents)
        missing = [folder for folder in above if not os.path.exists(folder)]
        path = self._in_rank0(lambda: choose(args, world, mode))
        lock = None
        if path is not None:
            if is_training(args):
                lock = Lock(path, restarts)  # rank 0 acquires it
                self._say_how_to_continue(path)
            folder = self.folder = RunFolder(path, lock, missing)
            # Poll the lock: in each broadcast, other ranks wait at most --dist-timeout.
            while not self._in_rank0(folder.make):
                time.sleep(0.5)
            if lock is not None and restarts:
                lock.check_shared(world)
        self.console = Console(path, world)
        if world.rank and world.local_rank == 0:
            text = f"this node trains with rank 0 of {world.size}, which prints the progress"
            log.info(text, extra=EVERY_NODE)
        if world.is_main and (unused := gpu_check.unused()):
            log.info(f"note: CUDA_VISIBLE_DEVICES hides {unused}: training uses the CPU")
        if lock is not None and lock.note:
            log.info(lock.note)

    def _say_how_to_continue(self, folder: Path) -> None:
        by_itself = errors.BY_ITSELF if is_elastic() else ""
        how = _changes(self.args, folder) or "again"
        errors.how_to_continue = f"run the same command {how}{by_itself}"

    def tell_written(self, path: Path) -> None:
        """A file of the directory was written: a snapshot, perhaps the first one, or another."""
        if self.folder is not None:
            self._say_how_to_continue(self.folder.path)
            self.folder.tell_written(path)

    def _in_rank0(self, compute: Callable[[], T]) -> T:
        """`broadcast_from_rank0`. Raises: `UserError`, also for a failed write."""

        def guarded() -> T:
            try:
                return compute()
            except OSError as error:
                folder = self.folder.path if self.folder else self.args.output_dir
                raise UserError(
                    f"cannot write into the run directory {folder} ({error.strerror}): "
                    "existing files are intact; free disk space, correct its permissions, or "
                    "choose another --output-dir"
                ) from error

        return broadcast_from_rank0(guarded, self.world)

    def read_checkpoint(self) -> dict[str, Any] | None:
        """The content of the checkpoint to resume from; None if there is none. Sets ``source``.

        Opens ``--store`` first, and keeps the best model beside a snapshot of another folder.
        Raises: `UserError` for a file with only weights, or a snapshot of another folder, in the
        directory of a run: it would be overwritten. And if another node alone has a snapshot.
        """
        self.source, content = self._in_rank0(self._read_checkpoint)
        if content is None and self.folder is not None:
            self._reject_another_disk(self.folder.path)
        return content

    def _reject_another_disk(self, folder: Path) -> None:
        """Raise `UserError` if the run has a snapshot on the disk of another node than node 0."""
        is_here = False
        with contextlib.suppress(OSError):
            is_here = any((folder / name).is_file() for name in (SNAPSHOT, PREVIOUS))
        has_one = is_training(self.args) and self.args.resume == "auto" and is_here
        found = self.world.gather((self.world.node_name, has_one))
        if nodes := list(dict.fromkeys(name for name, has in found if has)):
            raise UserError(
                f"{folder} has a snapshot on {nodes[0]}, but none on node 0, which continues the "
                "run: start with that node as node 0, copy the folder, or choose another --name",
                on_every_rank=True,
            )

    def _read_checkpoint(self) -> tuple[Path | str | None, dict[str, Any] | None]:
        args = self.args
        own = self.folder if is_training(args) else None  # which a training overwrites
        if own is not None and args.store:
            own.open_store(args.store, args.resume)
        if is_url(args.resume):
            from utils.run import store

            if own is not None and not store.is_copy(args.resume, args.store, own.path):
                self._check_overwriting(own, args.resume)
            place = self.folder.path if self.folder else None
            path = store.fetch(args.resume, place, with_best=own is not None)
        else:
            if own is not None and args.resume == "auto":
                name_newer_snapshot(own.path)
            path = checkpoint_file(args)
        if path is None:
            return None, None
        is_own = own is not None and not is_url(args.resume) and own.holds(path)
        path, content = read_whole(path, set_aside=is_own)
        if is_url(args.resume):  # a snapshot may take gigabytes, and this process may be killed
            path.unlink(missing_ok=True)
        source = args.resume if is_url(args.resume) else path  # a URL's file is a temporary one
        would_start_over = "progress" not in content and args.start_epoch is None
        if would_start_over and own is not None and (is_own or own.is_trained()):
            raise UserError(
                f"{source} has weights, but no position in a training: starting over would "
                f"overwrite the run in {own.path}. To train from these weights, use --pretrained "
                "FILE with another --name"
            )
        if own is not None and "progress" in content and not is_url(args.resume):
            if not is_own:
                self._check_overwriting(own, source)
            best, kept = path.with_name(BEST), own.path / BEST
            if best.is_file() and not kept.exists():  # perhaps no later epoch is better
                link_atomically(best, kept)
        return source, content

    def lacks_best(self) -> bool:
        """Whether there is a run directory without the best model so far."""
        return self.folder is not None and not (self.folder.path / BEST).exists()

    def _check_overwriting(self, own: RunFolder, source: Path | str) -> None:
        """Raise `UserError` if the snapshot of another run would overwrite that of this one."""
        if self.args.start_epoch is None and latest(own.path):
            use = "auto" if self.args.name else shlex.quote(str(own.path / SNAPSHOT))
            raise UserError(
                f"{own.path} has a snapshot of its own, and continuing from {source} would "
                f"overwrite it: use --resume {use}, or another --name"
            )

    def begin_training(
        self, epoch: int, position: float, facts: dict[str, Any], opening: Iterable[Summary]
    ) -> RunFolder:
        """Open the files of a training that continues at ``position``; see `open_event_file`.

        ``facts`` about it (see `report.facts`) are the first entries of `record`.
        """
        folder = self.folder
        assert folder is not None  # `choose` gives each training one
        self.record |= facts

        def open_files() -> None:
            folder.write_options(self.options)
            if self.args.tracker:
                folder.open_tracker(self.options, self.record)
            folder.open_event_file(epoch, position, opening)

        self._in_rank0(open_files)
        return folder

    def begin_evaluation(self) -> None:
        """Write the options of an evaluation that has a directory."""
        if (folder := self.folder) is not None:
            self._in_rank0(lambda: folder.write_options(self.options))

    def scalars(self, values: dict[str, float], x: int) -> None:
        """Draw points at ``x``, in rank 0; NaN (nothing measured) is left out."""
        measured = {tag: value for tag, value in values.items() if not math.isnan(value)}
        for sink in self.folder.sinks if self.folder else ():
            sink.scalars(measured, x)

    def image(self, tag: str, image: Image.Image, x: int) -> None:
        """Show a picture at ``x``, in thousandths of an epoch."""
        for sink in self.folder.sinks if self.folder else ():
            sink.image(tag, image, x)

    def epoch(self, record: dict[str, float], left: str) -> None:
        """Write an epoch's record (TensorBoard tags to values, and "epoch") and its line.

        ``left``: the time until the training ends, or "".
        """
        tags = {tag: value for tag, value in record.items() if "/" in tag or tag == "Lr"}
        self.scalars(tags, int(record["epoch"]))
        train, val = (
            f"{part}: loss {loss_text(record[f'Loss/{part}'])} top-1 {record[f'Top1/{part}']:.2f} "
            f"top-5 {record[f'Top5/{part}']:.2f}"
            for part in ("train", "val")
        )
        if "Top1/ema" in record:
            val += f" ema {record['Top1/ema']:.2f}"
        line = [f"Epoch {record['epoch']:.0f}/{self.args.epochs}", train, val]
        line += [f"lr {record['Lr']:.3g}"]
        if not math.isnan(rate := record["Throughput/train"]):  # NaN: resumed after its last step
            line.append(f"{rate:.1f} images/s")
        log.info("  ".join(line + ([f"left {left}"] if left else [])))

    def finish(self, results: dict[str, Any], closing: Iterable[Summary]) -> None:
        """Complete the record, write summary.json, close the run. All ranks call it.

        ``closing``: the last summaries of the event file.
        """
        self.record |= results
        if self.world.is_main and self.folder is not None:
            self.folder.write_summary(self.record, closing)
        self.close()
        if self.folder is not None and self.folder.lock is not None:
            self.folder.lock.release()

    def close(self) -> None:
        """Close the sinks. All ranks wait for rank 0: when one rank exits, a launcher kills the
        others."""

        def end_all() -> None:
            for sink in self.folder.sinks if self.folder else ():
                sink.close()

        broadcast_from_rank0(end_all, self.world)
