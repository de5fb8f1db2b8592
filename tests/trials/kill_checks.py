"""How a run that was killed and resumed may differ from the undisturbed run."""

import re
from dataclasses import dataclass, field
from pathlib import Path

RESUMED = re.compile(r"^resumed from .*: epoch (\d+), step (\d+)", re.MULTILINE)


@dataclass
class Checks:
    """Compares runs in the folder ``root``, of so many ranks and epochs, and collects differences.

    A run NAME has its directory NAME, its output in NAME.log, and what each attempt has seen in
    each rank in NAME_seen/RANK_TIME, one line per step.
    """

    root: Path
    ranks: int
    epochs: int
    differences: list[str] = field(default_factory=list)
    steps_repeated: int = 0

    def attempts(self, run: str, rank: int) -> list[list[str]]:
        """What each attempt of a run has seen in one rank, one text per step."""
        files = (self.root / f"{run}_seen").glob(f"{rank}_*")
        files = sorted(files, key=lambda file: int(file.name.split("_")[1]))
        return [file.read_text().splitlines() for file in files]

    def compare(self, run: str, whole: str) -> None:
        """Note all differences between a run and the undisturbed one."""
        from running import assert_same_curves, assert_same_weights

        self.compare_images(run, whole)
        for what, same in (("weights", assert_same_weights), ("curves", assert_same_curves)):
            try:
                same(self.root / run, self.root / whole)
            except (AssertionError, OSError) as fault:
                self.differences.append(f"{run}: {what} differ: {fault}")

    def compare_images(self, run: str, whole: str) -> None:
        """Each attempt must begin at the position of its snapshot, and continue step by step."""
        resumed = RESUMED.findall((self.root / f"{run}.log").read_text())
        for rank in range(self.ranks):
            (order,) = self.attempts(whole, rank)
            per_epoch = len(order) // self.epochs
            # After an epoch's last step, evaluated or not, the position is that of the next epoch.
            stands = {0} | {(int(epoch) - 1) * per_epoch + int(step) for epoch, step in resumed}
            reached, place = 0, {sums: number for number, sums in enumerate(order)}
            for number, seen in enumerate(self.attempts(run, rank)):
                first = place.get(seen[0], -1)
                if first < 0 or seen != order[first : first + len(seen)]:
                    self.differences.append(f"{run}: attempt {number} saw other images or order")
                elif first not in stands or first > reached:
                    self.differences.append(f"{run}: attempt {number} began at another step")
                self.steps_repeated += max(0, reached - first) if rank == 0 else 0
                reached = first + len(seen)
            if reached != len(order):
                self.differences.append(f"{run}: rank {rank} saw {reached} of {len(order)} steps")

    def check_epochs(self, whole: str, images: int) -> None:
        """The undisturbed run must see each of its ``images`` once per epoch."""
        ranks = [self.attempts(whole, rank)[0] for rank in range(self.ranks)]
        per_epoch = len(ranks[0]) // self.epochs
        for epoch in range(self.epochs):
            steps = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
            sums = [one for seen in ranks for line in seen[steps] for one in line.split()]
            if not len(sums) == len(set(sums)) == images:
                self.differences.append(
                    f"{whole}: epoch {epoch + 1} has {len(sums)} images, {len(set(sums))} different"
                )
