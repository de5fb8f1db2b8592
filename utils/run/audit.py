"""``--audit``: a log from which scripts/audit_run.py proves what a run was trained on.

`audit.jsonl` in the run directory has one JSON object per line:

- ``{"began": [epoch, step], "images": N, ...}``, where processes begin or resume; see `Setup`;
- ``{"epoch": E, "step": K, "taken": [...]}``, before each snapshot: for each shard of the global
  batch a text with `DIGITS` hexadecimal digits for each micro-batch since step K, which are the
  CRC-32 of the indices that a data loading worker has read;
- ``{"epoch": E, "step": K, "weights": "..."}``: the checksum of the weights after K steps of epoch
  E, which was equal on all ranks.

A line is on disk before the snapshot that follows it. So a run that was killed may repeat steps,
but its log has no gap. Epochs and steps count from 0.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from utils.data.samplers import checksum, epoch_order
from utils.start import errors
from utils.start.errors import UserError

FILE = "audit.jsonl"
log = logging.getLogger(__name__)

DIGITS = 8
STEPS_BETWEEN_CHECKS = 100  # of the weights; they are also compared at each snapshot


@dataclass(frozen=True)
class Setup:
    """What the order of images depends on; it holds until the next line of this kind."""

    images: int
    seed: int
    global_batch: int
    shards: int  # processes that read images of their own
    accum: int  # micro-batches per step

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return self.images // self.global_batch

    def expected(self, order: np.ndarray, step: int) -> list[list[int]]:
        """The checksums of a step, [shard][micro-batch], if it keeps to the epoch's ``order``."""
        parts = self.shards * self.accum
        size, sums = self.global_batch, []
        for part in range(parts):  # micro-batch by micro-batch, over all shards
            low, high = (step * size + (part + more) * size // parts for more in (0, 1))
            sums.append(checksum(order[low:high]))
        return [sums[shard :: self.shards] for shard in range(self.shards)]


# ---- writing


class Log:
    """The steps that a process has taken since the last snapshot; rank 0 writes those of all."""

    def __init__(self, path: Path | None, setup: Setup, epoch: int, step: int):
        """``path``: the file, in rank 0; None in other ranks."""
        self.path, self.setup = path, setup
        self.taken: list[str] = []
        self.position = (epoch, step)  # of the first step in `taken`
        if path is not None and path.is_file():
            whole = path.read_bytes().rpartition(b"\n")  # a killed process may leave half a line
            os.truncate(path, len(whole[0] + whole[1]))
        self.write({"began": [epoch, step], **asdict(setup)})

    def add(self, taken: int) -> None:
        """Note the `checksum` of a micro-batch that this process trains on."""
        self.taken.append(f"{taken:0{DIGITS}x}")

    def move_to(self, epoch: int, step: int) -> str:
        """The checksums since the last call, to be gathered. The next step is ``step``."""
        taken, self.taken = "".join(self.taken), []
        self.begun, self.position = self.position, (epoch, step)
        return taken

    def write_taken(self, taken: list[str]) -> None:
        """Write what `move_to` returned in each shard. Call it in rank 0."""
        if any(taken):
            epoch, step = self.begun
            self.write({"epoch": epoch, "step": step, "taken": taken})

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, and wait until it is on disk. If it cannot be written, say so once."""
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            log.warning(f"{self.path} cannot be written ({error}): --audit ends here")
            self.path = None


def check_equal(checksums: list[str], epoch: int, step: int) -> None:
    """Raise `UserError`, which names the ranks, unless all ranks have the same checksum."""
    (common, count), *others = Counter(checksums).most_common()
    if not others:
        return
    ranks = [rank for rank, one in enumerate(checksums) if one != common]
    what = f"the weights of rank {', '.join(map(str, ranks))} differ from those of other ranks"
    if 2 * count <= len(checksums):
        what = "the weights differ between ranks"
    raise UserError(
        f"{what} before step {step + 1} of epoch {epoch + 1}: a GPU, its memory or a link is "
        "faulty, or the model changes its weights by itself. A snapshot, if there is one, is "
        f"older: check that machine, then, on others, {errors.how_to_continue}",
        on_every_rank=True,
    )


# ---- reading


@dataclass
class Proof:
    """What a log shows. Every promise was kept if there are no ``problems``."""

    epochs: dict[int, str] = field(default_factory=dict)  # a line for each epoch
    problems: list[str] = field(default_factory=list)
    repeated: int = 0  # steps that were trained again after a resume
    checks: int = 0  # comparisons of the weights of all ranks
    processes: list[int] = field(default_factory=list)  # shards, in the order of their use
    position: tuple[int, int] = (0, 0)  # epoch, and steps of it that are recorded
    complete: bool = False  # whether the epoch of ``position`` is at its end

    def follows(self, epoch: int, step: int) -> bool:
        """Whether a step is the next one."""
        return (epoch, step) == self.position or (
            self.complete and (epoch, step) == (self.position[0] + 1, 0)
        )


def read(path: Path) -> Proof:
    """Check a log. Raises: `UserError` if the file is not one."""
    proof, setup, steps = Proof(), None, {}
    for number, line in _lines(path):
        try:
            if "began" in line:
                names = ("images", "seed", "global_batch", "shards", "accum")
                before, setup = setup, Setup(*(int(line[name]) for name in names))
                if min(setup.images, setup.global_batch, setup.shards, setup.accum) < 1:
                    raise ValueError
                epoch, step = map(int, line["began"])
                _resume(proof, steps, before or setup, setup, epoch, step)
                if setup.shards not in proof.processes[-1:]:
                    proof.processes.append(setup.shards)
            elif "weights" in line:
                proof.checks += 1
            elif setup is not None:
                _take(proof, steps, setup, line)
            else:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{path}, line {number}: not a line of --audit") from None
    if setup is None:
        raise UserError(f"{path} is empty: nothing was recorded")
    for epoch in sorted({epoch for epoch, _ in steps}):
        counts = [steps[position] for position in sorted(steps) if position[0] == epoch]
        images = sum(count for count, _ in counts)
        total = counts[-1][1]
        proof.epochs[epoch] = (
            f"epoch {epoch + 1}: {len(counts)} steps, {images} of {total} images, each once"
        )
    return proof


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): train with --audit") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is damaged: it is no text") from None
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError:
            if number == len(texts):  # the process was killed while it wrote
                return
            raise UserError(f"{path}, line {number}: not a line of --audit") from None
        if not isinstance(line, dict):
            raise UserError(f"{path}, line {number}: not a line of --audit")
        yield number, line


def _resume(
    proof: Proof,
    steps: dict[tuple[int, int], Any],
    before: Setup,
    setup: Setup,
    epoch: int,
    step: int,
) -> None:
    """Processes begin at this step of ``setup``: images after it that earlier processes trained on,
    in steps of ``before``, do not count."""
    began = epoch, step * setup.global_batch
    done = proof.position[0], proof.position[1] * before.global_batch
    follows = proof.complete and (epoch, step) == (done[0] + 1, 0)
    if steps and began > done and not follows:
        proof.problems.append(
            f"steps before epoch {epoch + 1}, step {step} are missing: the log ends at epoch "
            f"{proof.position[0] + 1}, step {proof.position[1]}"
        )
    for place, (count, images) in [*steps.items()]:
        left = min(count, began[1] - place[1]) if place[0] == epoch else count
        if place > began or left <= 0:
            del steps[place]
        else:
            steps[place] = (left, images)
        proof.repeated += place not in steps or left < count
    proof.position, proof.complete = (epoch, step), step >= setup.steps


def _take(proof: Proof, steps: dict[tuple[int, int], Any], setup: Setup, line: dict) -> None:
    """Compare the steps of a line with the order that the seed gives."""
    epoch, first, taken = int(line["epoch"]), int(line["step"]), line["taken"]
    if not proof.follows(epoch, first):
        proof.problems.append(
            f"epoch {epoch + 1}, step {first} follows epoch {proof.position[0] + 1}, step "
            f"{proof.position[1]}"
        )
    size = DIGITS * setup.accum
    if len(taken) != setup.shards or any(len(text) % size for text in taken):
        raise ValueError
    if len(set(map(len, taken))) > 1:
        proof.problems.append(
            f"epoch {epoch + 1}, step {first}: the processes have taken different numbers of steps"
        )
    order = epoch_order(setup.images, setup.seed, epoch)
    for number in range(len(taken[0]) // size):
        step = first + number
        for shard, expected in enumerate(setup.expected(order, step)):
            text = taken[shard][number * size : (number + 1) * size]
            if text != "".join(f"{one:0{DIGITS}x}" for one in expected):
                proof.problems.append(
                    f"epoch {epoch + 1}, step {step}: process {shard} read other images than the "
                    "order of this seed and epoch"
                )
        if step >= setup.steps:
            proof.problems.append(f"epoch {epoch + 1} has only {setup.steps} steps, not {step + 1}")
        steps[epoch, step * setup.global_batch] = (setup.global_batch, setup.images)
    proof.position = (epoch, first + len(taken[0]) // size)
    proof.complete = proof.position[1] == setup.steps
