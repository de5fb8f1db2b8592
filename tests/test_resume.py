"""A run that is interrupted and resumed ends with the weights of one that was not."""

import os
import re
import shutil
import signal
from pathlib import Path
from shlex import split

import pytest
from conftest import Result, draw_folder, scalars, summary, train
from joined import Job, run_jobs, start
from running import MEASURED, TORCHRUN, assert_same_curves, assert_same_weights, same, snapshot

from utils.run.snapshots import name_newer_snapshot

INTERRUPTED = 75  # launchers and schedulers know this number
ND, DDP = "imagenet_nd.py", "imagenet_ddp.py"
STEPS = 30  # of 10 images in an epoch
# The learning rate depends on the position, and not on the number of epochs.
RECIPE = split("-a tiny_full --epochs 2 -p 1 --lr 0.05 --warmup-epochs 1 --crop-scale 0.5 --seed 3")
ONE = split("-b 10 --ema 0.9 --mixup 0.5 --cutmix 1")
# A line is due after every fifth step, so that a stop comes between two lines. The images of
# the second epoch are larger.
TWO = split("-b 5 -p 5 --ema 0.9 --progressive 96,128")
# Without batch norm and dropout, one process and two see, mix and compute the same.
MOVED = split("-a tiny_plain --mixup 0.5 --cutmix 1 --ema 0.9")
# The scaler's count of clean steps, in runs too short to double the scale, at learning rates too
# small for overflows, which come early on one CPU and late on another.
SCALED = {
    "clean_steps": (
        "imagenet_ddp_apex.py",
        split("-b 5 --accum-steps 2 --lr 0.001 --ema 0.9 --opt-level O2"),
    ),
    "_growth_tracker": (ND, split("-b 10 --lr 0.005 --amp fp16")),
}


class Place:
    """Runs in ``root`` on 300 training and 21 validation images in 3 classes."""

    def __init__(self, root: Path):
        self.root, self.images = root, draw_folder(root / "data", train=100)

    def line(self, name: str, *options: object) -> list[object]:
        """A command line behind the script's name, to begin or continue the run ``name``."""
        here = ("--output-dir", self.root, "--name", name, "--resume", "auto", self.images)
        return [*RECIPE, *options, *here]

    def finish(self, name: str, *options: object) -> Path:
        """Train to the last epoch on one process."""
        train(ND, *self.line(name, *options))
        return self.root / name

    def job(self, script: str, name: str, *options: object, stop: int = 0, size: int = 1) -> Job:
        """The same for `run_jobs`; ``stop`` after so many steps."""
        line = ("--image-size", 32, "-j", 0, *self.line(name, *options))
        return Job(script.removesuffix(".py"), line, processes=size, stop_after=stop)

    def stop(
        self,
        script: str,
        name: str,
        *options: object,
        at: tuple[int, int],
        signum: int = signal.SIGTERM,
        group: bool = False,
        rank: str = "",
        launcher: tuple = (),
        **env: str,
    ) -> Result:
        """Start or continue a run, and send ``signum`` after the step (epoch, step) ``at``.

        To the command, to its process ``group``, or to the process of one ``rank``, which waits for
        it: however late the signal comes, the run is no further than that step.
        """
        run, begun = self.root / name, (0, 0)
        if (run / "snapshot.pt").exists():
            begun = position(run)
        env |= {"HOLD_RANK": rank} if rank else {}
        env["HOLD_AFTER"] = str((at[0] - 1 - begun[0]) * STEPS + at[1] - begun[1])
        with start(script, *self.line(name, *options), launcher=launcher, **env) as running:
            waiting = running.until("waiting for a signal: process")
            if rank:
                os.kill(int(waiting.split()[-1]), signum)
            else:
                running.send(signum, group)
            return running.result()


def position(run: Path) -> tuple[int, int]:
    """Finished epochs, and steps of the next one, of the snapshot from which a run continues."""
    name_newer_snapshot(run)  # a killed process may have written it completely, but not named it
    progress = snapshot(run)["progress"]
    return progress["epoch"], progress["step"]


def assert_same_run(run: Path, other: Path) -> None:
    """Bit for bit the same outcome, best model and all."""
    assert_same_weights(run, other)
    assert_same_curves(run, other)
    one, two = snapshot(run), snapshot(other)
    assert one["scaler"] == two["scaler"]
    for progress in (one["progress"], two["progress"]):
        assert progress.pop("elapsed") > progress.pop("epoch_began") >= 0
        for epoch in progress["history"]:
            for tag in [tag for tag in epoch if tag.startswith((*MEASURED, "Seconds"))]:
                del epoch[tag]
    assert repr(one["progress"]) == repr(two["progress"])  # as text, nan equals nan
    one, two = snapshot(run, "best.pt"), snapshot(other, "best.pt")
    assert same(one.pop("state_dict"), two.pop("state_dict"))
    assert one == two
    names = ("best_", "val_", "epochs", "finished", "global", "world", "nodes")
    one, two = ({k: x for k, x in summary(r).items() if k.startswith(names)} for r in (run, other))
    assert one == two


def resumed_at(run: Path) -> list[str]:
    """Where a run was resumed."""
    return re.findall(r"resumed from \S+: (epoch \d, step \d+)", (run / "train.log").read_text())


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    """Undisturbed runs, and some that were stopped and resumed as soon as torch was loaded."""
    place = Place(tmp_path_factory.mktemp("place"))
    jobs = [
        place.job(ND, "moved", *MOVED, "-b", 12, stop=5),
        place.job(DDP, "moved", *MOVED, "-b", 6, stop=24, size=2),
        place.job(ND, "moved", *MOVED, "-b", 12),
    ]
    for counter, (script, options) in SCALED.items():
        jobs += [place.job(script, f"{counter}_stopped", *options, stop=stop) for stop in (5, 0)]
        jobs += [place.job(script, counter, *options)]
    jobs += [
        place.job(ND, "one", *MOVED, "-b", 12),
        place.job(ND, "whole", *ONE),
        place.job(ND, "half", *ONE, stop=STEPS + 12),
        place.job(DDP, "two", *TWO, size=2),
    ]
    for job, ranks in zip(jobs, run_jobs(jobs, place.root), strict=True):
        assert ranks[0]["code"] == (INTERRUPTED if job.stop_after else 0)
    assert position(place.root / "half") == (1, 12)
    return place


# ---- one process

STOPS = [
    ((1, 5), signal.SIGTERM),
    ((1, 10), signal.SIGKILL),
    ((1, STEPS), signal.SIGTERM),  # in evaluation
    ((2, 3), signal.SIGINT),
    ((2, 10), signal.SIGKILL),
    ((2, 20), signal.SIGUSR1),
]


def test_signals_end_in_snapshots_and_change_nothing(place):
    """Also when the process is killed, with snapshots of most steps."""
    seconds, run, whole = [0.0], place.root / "often", place.root / "whole"
    options = (*ONE, "--snapshot-minutes", "0")
    for (epoch, step), signum in STOPS:
        first = position(run) if run.exists() else (0, 0)
        how = {"at": (epoch, step), "signum": signum, "group": signum != signal.SIGTERM}
        result = place.stop(ND, "often", *options, **how, STEP_SECONDS="0.02")
        done, steps = position(run)
        assert done == epoch - 1
        assert "Traceback" not in result.err
        if signum == signal.SIGKILL:
            assert result.code == -signum
            assert 0 < steps <= step
            (run / ".0123456789abcdef.tmp").write_bytes(b"half a snapshot")
        else:
            assert result.code == INTERRUPTED, result.err
            # In evaluation, none of whose images count; else the step that waits is finished.
            assert steps == min(step + 1, STEPS)
            results = summary(run)
            assert (results["finished_because"], results["epochs_done"]) == (
                "interrupted",
                epoch - 1,
            )
        seconds.append(snapshot(run)["progress"]["elapsed"])
        trained = (done - first[0]) * STEPS + steps - first[1]
        assert seconds[-1] - seconds[-2] > 0.02 * (trained - 1), "until the snapshot"
    place.finish("often", *options)
    assert_same_run(run, whole)
    seconds.append(snapshot(run)["progress"]["elapsed"])
    assert seconds == sorted(set(seconds))
    first, second = (x["Seconds"] for x in snapshot(run)["progress"]["history"])
    assert first > seconds[3] and second > seconds[6] - seconds[4], "those of all its parts"
    assert not list(run.glob(".*"))
    place.finish("often", *ONE)  # there is nothing left to do
    assert_same_run(run, whole)
    assert "epoch 3, step 0 (all 2 epochs are done)" in (run / "train.log").read_text()


def test_another_start_epoch_trains_from_there(place):
    """Its points are drawn again, and its figures are not those of the epochs before."""
    run = shutil.copytree(place.root / "half", place.root / "anew")
    place.finish("anew", *ONE, "--start-epoch", "0")
    assert resumed_at(run) == ["epoch 1, step 0"]
    assert [one["epoch"] for one in snapshot(run)["progress"]["history"]] == [1, 2]
    curves = scalars(run)
    assert [x for x, _ in curves["Loss/val"]] == [1, 2]
    losses = [y for _, y in curves["Step/loss"]]
    assert sum(losses) / STEPS == pytest.approx(sum(y for _, y in curves["Loss/train"]))
    place.finish("anew", *ONE, "--start-epoch", "1")
    assert [x["epoch"] for x in snapshot(run)["progress"]["history"]] == [1, 2]


def test_time_limit_ends_in_a_snapshot_and_a_file_is_continued_in_place(place):
    run = place.finish("limited", *ONE, "--train-time", "0")
    assert (summary(run)["finished_because"], position(run)) == ("train_time", (0, 1))
    assert "has no snapshot yet" in (run / "train.log").read_text()
    again = ("--name", "limited", "--output-dir", place.root, "--resume", "auto", place.images)
    done = train(ND, *RECIPE, *ONE, "--train-time", "0", *again)
    assert position(run) == (0, 1), "no step more each time that it is started again"
    assert "time limit reached" in done.out and "no snapshot yet" not in done.out
    train(ND, *RECIPE, *ONE, "--resume", run / "snapshot.pt", place.images)
    assert_same_run(run, place.root / "whole")


def test_the_accuracy_that_is_desired_is_enough(place):
    """Exactly that of the first epoch, of the better of both models."""
    first = snapshot(place.root / "whole")["progress"]["history"][0]
    desired = max(first["Top1/val"], first["Top1/ema"])
    for _ in range(2):  # also when it is started again
        results = summary(place.finish("desired", *ONE, "--desired-acc", desired))
        assert (results["finished_because"], results["epochs_done"]) == ("desired_acc", 1)
        assert (results["best_top1"], results["best_epoch"]) == (desired, 1)


# ---- two processes


@pytest.mark.long
def test_two_processes_stopped_under_both_launchers_resume_bit_for_bit(place):
    """By SIGTERM to torchrun, and to rank 1 alone."""
    run, whole = place.root / "two_often", place.root / "two"
    ways = (
        ((), {"launcher": (*TORCHRUN, "--nproc_per_node=2")}),
        (("-g", 2), {"rank": "1"}),
    )
    for epoch, (options, how) in enumerate(ways, 1):
        result = place.stop(DDP, "two_often", *TWO, *options, at=(epoch, 5), **how)
        if options:  # torchrun has a code, and a traceback, of its own for a signal
            assert result.code == INTERRUPTED, result.err
            assert "Traceback" not in result.err
        assert result.code
        assert summary(run)["finished_because"] == "interrupted"
        done, steps = position(run)
        assert done == epoch - 1
        assert 5 < steps < STEPS
    run_jobs([place.job(DDP, "two_often", *TWO, size=2)], place.root)
    assert_same_weights(run, whole)
    assert_same_curves(run, whole, tolerance=1e-6)
    assert summary(run)["best_top1"] == summary(whole)["best_top1"]


def test_the_best_model_evaluates_to_its_accuracy(place):
    """On one process, too: all ranks have evaluated with the batch norm that rank 0 saves."""
    whole, runs = place.root / "two", place.root / "evaluated"
    line = ("-a", "tiny_full", "-e", "-b", "8", "--output-dir", runs, place.images)
    train(ND, "--resume", whole / "best.pt", "--name", "run", *line)
    (run,) = runs.iterdir()  # not where the model is
    results, best = summary(run), snapshot(whole, "best.pt")
    part = "ema" if best["weights"] == "ema" else "val"
    curves = {tag: dict(points) for tag, points in scalars(whole).items()}
    for name in ("top1", "top5"):
        assert results[f"val_{name}"] == summary(whole)[f"best_{name}"] == best[name]
    assert results["val_top1"] == curves[f"Top1/{part}"][best["epoch"]]
    assert results["val_loss"] == pytest.approx(curves[f"Loss/{part}"][best["epoch"]], rel=1e-5)
    assert (results["val_images"], results["finished_because"]) == (21, "evaluated")
    # Nothing that compare_runs.py would list, and nothing to resume from.
    assert {path.name for path in run.iterdir()} == {"options.json", "summary.json", "train.log"}


# ---- other numbers of processes, loss scale, accumulation


def test_a_run_moves_between_numbers_of_processes(place):
    run, one = place.root / "moved", place.root / "one"
    first, second = resumed_at(run)
    assert first == "epoch 1, step 5"
    assert second.startswith("epoch 2, step ") and not second.endswith(" 0")
    assert_same_weights(run, one, tolerance=1e-5)
    assert_same_curves(run, one, tolerance=1e-4)


@pytest.mark.parametrize("counter", SCALED)
def test_loss_scale_masters_and_accumulation_go_on(place, counter):
    run, whole = place.root / f"{counter}_stopped", place.root / counter
    assert resumed_at(run) == ["epoch 1, step 5"]
    assert_same_run(run, whole)
    assert snapshot(whole)["scaler"][counter] > STEPS  # one begun again would show


@pytest.mark.parametrize("mode", ["ddp", "ddp_apex"])
def test_three_processes_resume_bit_for_bit(folder, tmp_path, mode):
    """The rounding of a sum of three depends on the place in a bucket, and this model has two."""
    line = ("-a", "tiny_vit", "--image-size", "32", "-j", "0", "-b", "5", "--epochs", "1")
    line += ("--lr", "0.01", "--resume", "auto", "--output-dir", tmp_path)
    line += ("--amp", "off") if mode == "ddp" else ("--opt-level", "O0")
    stops = (("whole", 0), ("run", 1), ("run", 0))
    run_jobs(
        [
            Job(f"imagenet_{mode}", (*line, "--name", n, folder), 3, stop_after=stop)
            for n, stop in stops
        ],
        tmp_path,
    )
    assert resumed_at(tmp_path / "run") == ["epoch 1, step 1"]
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
