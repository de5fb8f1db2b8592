"""A run that is interrupted and resumed ends with the weights of one that was not."""

import re
import shutil
import signal
from pathlib import Path
from shlex import split

import pytest
from conftest import Result, draw_folder, scalars, summary, train
from joined import Job, run_jobs
from running import (
    MEASURED,
    TORCHRUN,
    assert_same_curves,
    assert_same_weights,
    snapshot,
    start,
    tiny,
)

from utils.launch.network import free_port

INTERRUPTED = 75
STEPS = 30  # of 10 images in an epoch
# The learning rate depends on the position, and not on the number of epochs.
RECIPE = split("--epochs 2 -p 1 --lr 0.05 --warmup-epochs 1 --crop-scale 0.5 --seed 3")


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """300 training and 21 validation images in 3 classes."""
    return draw_folder(tmp_path_factory.mktemp("images") / "data", train=100)


class Place:
    """Where the runs of one way to train lie, and how they are started: ``steps`` an epoch."""

    def __init__(self, root: Path, images: Path, *options: str, steps: int = STEPS):
        self.root, self.images, self.options, self.steps = root, images, options, steps

    def line(self, name: str, *more: object) -> tuple[list, dict[str, str]]:
        """Command line behind the script's name, and environment, for the run ``name``."""
        model, env = tiny(full=True)
        here = ("--output-dir", self.root, "--name", name, "--resume", "auto", self.images)
        return [*model, *RECIPE, *self.options, *more, *here], env

    def finish(self, script: str, name: str, *more: object, processes: int = 0) -> Path:
        """Train to the last epoch; ``processes`` by torchrun, if given."""
        arguments, env = self.line(name, *more)
        train(script, *arguments, processes=processes, **env)
        return self.root / name

    def job(
        self, script: str, name: str, *more: object, stop: int | None = None, size: int = 1
    ) -> Job:
        """The same for processes that import torch once; ``stop`` after so many steps."""
        line = ("--image-size", 32, "-j", 0, *self.line(name, *more)[0])
        return Job(script.removesuffix(".py"), line, processes=size, stop_after=stop)

    def stop(
        self,
        script: str,
        name: str,
        *more: object,
        at: tuple[int, int],
        signum: int = signal.SIGTERM,
        group: bool = False,
        launcher: tuple = (),
        step_seconds: float = 0.0,
    ) -> Result:
        """Start or continue a run, and send ``signum`` after the step (epoch, step) ``at``.

        However late the signal comes, the run is no further than that step.
        """
        arguments, env = self.line(name, *more)
        env["STEP_SECONDS"] = str(step_seconds)
        begun, run = (0, 0), self.root / name
        if (run / "snapshot.pt").exists():
            begun = position(run)
        env["HOLD_AFTER"] = str((at[0] - 1 - begun[0]) * self.steps + at[1] - begun[1])
        with start(script, *arguments, launcher=launcher, **env) as running:
            running.until(rf"Epoch {at[0]}/\d+ step +{at[1]}/")
            running.send(signum, group)
            return running.result()

    def kill_and_finish(self, script: str, *more: object) -> Path:
        """Kill a run in the middle of both epochs, with snapshots of most steps; then finish it."""
        run, line = self.root / "killed", (*more, "--snapshot-minutes", "0")
        how = {"signum": signal.SIGKILL, "group": True, "step_seconds": 0.05}
        for at in ((1, 10), (2, 10)):
            result = self.stop(script, "killed", *line, at=at, **how)
            assert result.code == -signal.SIGKILL
            epoch, step = position(run)
            assert epoch == at[0] - 1
            assert 0 < step <= at[1]
        (run / ".snapshot.pt.12345.tmp").write_bytes(b"half a snapshot")
        return self.finish(script, "killed", *line)


def position(run: Path) -> tuple[int, int]:
    """Finished epochs, and steps of the next one, of a run's snapshot."""
    progress = snapshot(run)["progress"]
    return progress["epoch"], progress["step"]


def assert_same_progress(run: Path, other: Path) -> None:
    """Snapshots agree on position, best epoch, loss scale and the metrics of all epochs."""
    one, two = snapshot(run), snapshot(other)
    assert one["scaler"] == two["scaler"]
    for progress in (one["progress"], two["progress"]):
        assert progress.pop("elapsed") > 0
        for epoch in progress["history"]:
            for tag in [tag for tag in epoch if tag.startswith((*MEASURED, "Seconds"))]:
                del epoch[tag]
    assert repr(one["progress"]) == repr(two["progress"])  # as text, nan equals nan


def assert_same_run(run: Path, other: Path) -> None:
    """Bit for bit the same outcome."""
    assert_same_weights(run, other)
    assert_same_curves(run, other)
    assert_same_progress(run, other)
    assert summary(run)["finished_because"] == "epochs"


# ---- one process

ND, DDP = "imagenet_nd.py", "imagenet_ddp.py"


@pytest.fixture(scope="module")
def one(tmp_path_factory, images) -> Place:
    """Runs on one process; ``whole`` is the undisturbed one."""
    options = ("-b", "10", "--ema", "0.9", "--mixup", "0.5", "--cutmix", "1")
    place = Place(tmp_path_factory.mktemp("one"), images, *options)
    place.finish(ND, "whole")
    return place


STOPS = {
    "SIGTERM": {"at": (1, 5), "signum": signal.SIGTERM},
    "evaluation": {"at": (1, STEPS), "signum": signal.SIGTERM},
    "SIGINT": {"at": (2, 3), "signum": signal.SIGINT, "group": True},
    "SIGUSR1": {"at": (2, 20), "signum": signal.SIGUSR1},
}


def test_four_signals_end_in_snapshots_and_change_nothing(one):
    seconds, run = [], one.root / "often"
    for name, how in STOPS.items():
        result = one.stop(ND, "often", **how)
        assert result.code == INTERRUPTED, result.err
        assert "Traceback" not in result.err
        assert summary(run)["finished_because"] == "interrupted"
        epoch, step = how["at"]
        done, steps = position(run)
        assert done == summary(run)["epochs_done"] == epoch - 1
        assert step <= steps <= STEPS
        assert steps < STEPS or name == "evaluation", "the signal came too late to be a test"
        seconds.append(snapshot(run)["progress"]["elapsed"])
    one.finish(ND, "often")
    assert_same_run(run, one.root / "whole")
    seconds.append(snapshot(run)["progress"]["elapsed"])
    assert 0 < seconds[0] < seconds[-1]
    assert seconds == sorted(seconds)


def test_a_killed_run_goes_on_from_the_last_snapshot(one):
    assert_same_run(one.kill_and_finish(ND), one.root / "whole")


def test_points_past_the_snapshot_are_drawn_again(one):
    """As after a crash between writing an epoch's points and writing its snapshot, which is of a
    finished run of a single epoch."""
    first = one.finish(ND, "first", "--epochs", "1")
    run = shutil.copytree(one.root / "whole", one.root / "ahead")
    for name in ("snapshot.pt", "best.pt"):
        shutil.copy(first / name, run / name)
    one.finish(ND, "ahead")
    assert_same_run(run, one.root / "whole")


def test_time_limit_ends_in_a_snapshot_and_a_file_is_continued_in_place(one):
    run = one.finish(ND, "limited", "--train-time", "0")
    assert summary(run)["finished_because"] == "train_time"
    assert position(run) == (0, 1)
    assert "time limit" in (run / "train.log").read_text()
    model, env = tiny(full=True)
    where = ("--resume", run / "snapshot.pt", one.images)
    train(ND, *model, *RECIPE, *one.options, *where, **env)
    assert_same_run(run, one.root / "whole")


# ---- two processes


@pytest.fixture(scope="module")
def two(tmp_path_factory, images) -> Place:
    """Runs on two processes; ``whole`` is the undisturbed one."""
    # A line is due after every fifth step, so that a stop comes between two lines. The images of
    # the second epoch are larger.
    options = split("-b 5 -p 5 --ema 0.9 --progressive 96,128")
    place = Place(tmp_path_factory.mktemp("two"), images, *options)
    place.finish(DDP, "whole", "-g", "2")
    return place


def test_the_best_model_evaluates_to_its_accuracy(two):
    """On one process, too: all ranks have evaluated with the batch norm that rank 0 saves."""
    whole = two.root / "whole"
    model, env = tiny(full=True)
    where = ("--resume", whole / "best.pt", "--output-dir", two.root, "--name", "evaluated")
    train(ND, *model, *where, "-e", "-b", "8", two.images, **env)
    found, best = summary(two.root / "evaluated"), snapshot(whole, "best.pt")
    part = "ema" if best["weights"] == "ema" else "val"
    curves = scalars(whole)
    assert found["val_top1"] == summary(whole)["best_top1"] == best["top1"]
    assert found["val_top1"] == dict(curves[f"Top1/{part}"])[best["epoch"]]
    assert found["val_loss"] == pytest.approx(dict(curves[f"Loss/{part}"])[best["epoch"]], rel=1e-5)
    assert found["val_images"] == 21
    assert found["finished_because"] == "evaluated"


def test_two_processes_stopped_under_both_launchers_resume_bit_for_bit(two):
    """By SIGTERM to torchrun, and to the process that spawns; finished under torchrun."""
    often, whole = two.root / "often", two.root / "whole"
    by_torchrun = {"launcher": (*TORCHRUN, "--nproc_per_node=2")}
    for epoch, launch, words in ((1, by_torchrun, ()), (2, {}, ("-g", "2"))):
        result = two.stop(DDP, "often", *words, at=(epoch, 5), **launch)
        assert summary(often)["finished_because"] == "interrupted"
        done, steps = position(often)
        assert done == epoch - 1
        assert 5 <= steps < STEPS
        if launch:  # torchrun has a code, and a traceback, of its own for a signal
            assert result.code
        else:
            assert result.code == INTERRUPTED
            assert "Traceback" not in result.err
    two.finish(DDP, "often", processes=2)
    assert_same_weights(often, whole)
    assert_same_curves(often, whole, tolerance=1e-6)
    assert summary(often)["best_top1"] == summary(whole)["best_top1"]


# ---- other numbers of processes, loss scale, accumulation

# The scaler's count of clean steps, in runs too short to double the scale, at learning rates too
# small for overflows, which come early on one CPU and late on another.
SCALED = {
    "clean_steps": (
        "imagenet_ddp_apex.py",
        split("-b 5 --accum-steps 2 --lr 0.001 --ema 0.9 --opt-level O2"),
    ),
    "_growth_tracker": (ND, split("-b 10 --lr 0.005 --amp fp16")),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, images) -> Path:
    """Undisturbed runs, and some that were stopped."""
    place = Place(tmp_path_factory.mktemp("jobs"), images)
    # Without batch norm and dropout, one process and two see, mix and compute the same.
    mixed = split("-a tiny_plain --mixup 0.5 --cutmix 1 --ema 0.9 --repeated-aug 2")
    planned = [
        place.job(ND, "one", *mixed, "-b", 12),
        place.job(ND, "moved", *mixed, "-b", 12, stop=5),
        place.job(DDP, "moved", *mixed, "-b", 6, stop=28, size=2),
        place.job(ND, "moved", *mixed, "-b", 12),
    ]
    for counter, (script, words) in SCALED.items():
        planned += [
            place.job(script, counter, *words),
            place.job(script, f"{counter}_stopped", *words, stop=5),
            place.job(script, f"{counter}_stopped", *words),
        ]
    codes = [ranks[0]["code"] for ranks in run_jobs(planned, place.root)]
    assert codes == [INTERRUPTED if job.stop_after else 0 for job in planned]
    return place.root


def stops(run: Path) -> list[tuple[int, int]]:
    """Where a run was resumed: epoch and step."""
    found = re.findall(r"resumed from \S+: epoch (\d), step (\d+)", (run / "train.log").read_text())
    return [(int(epoch), int(step)) for epoch, step in found]


def test_a_run_moves_between_numbers_of_processes(jobs):
    first, (epoch, step) = stops(jobs / "moved")
    assert (first, epoch) == ((1, 5), 2)
    assert 0 < step < 300 // 12
    assert_same_weights(jobs / "moved", jobs / "one", tolerance=1e-5)
    assert_same_curves(jobs / "moved", jobs / "one", tolerance=1e-4)


@pytest.mark.parametrize("counter", SCALED)
def test_loss_scale_masters_and_accumulation_go_on(jobs, counter):
    assert stops(jobs / f"{counter}_stopped") == [(1, 5)]
    assert_same_run(jobs / f"{counter}_stopped", jobs / counter)
    assert snapshot(jobs / counter)["scaler"][counter] > STEPS  # one begun again would show


# ---- long: every script, and launchers


@pytest.mark.long
def test_the_launch_module_with_o2_goes_on(tmp_path, images):
    """Ctrl-C, in a terminal, on two processes of torch.distributed.launch."""
    place = Place(tmp_path, images, "--b", "5", "--opt-level", "O2")
    launch = ("-m", "torch.distributed.launch", f"--master_port={free_port()}")
    script, launcher = "imagenet_ddp_apex.py", (*launch, "--nproc_per_node=2")
    whole = place.finish(script, "whole", processes=2)
    arguments = {"signum": signal.SIGINT, "group": True, "launcher": launcher}
    result = place.stop(script, "stopped", at=(1, 5), **arguments)
    assert summary(place.root / "stopped")["finished_because"] == "interrupted", result.err
    assert 0 < position(place.root / "stopped")[1] < STEPS
    assert_same_weights(place.finish(script, "stopped", processes=2), whole)
    assert snapshot(whole)["scaler"] == snapshot(place.root / "stopped")["scaler"]


@pytest.mark.long
@pytest.mark.parametrize(
    "script", [ND, "imagenet_dp.py", DDP, "imagenet_ddp_apex.py", "imagenet_fsdp.py"]
)
def test_a_real_model_goes_on(tmp_path, images, script):
    """ResNet-18, in every script as it is without options."""
    where = ("-b", "10", "--output-dir", tmp_path)
    arguments = [*RECIPE, *where, "--resume", "auto", images]
    train(script, "--name", "whole", *arguments)
    with start(script, "--name", "stopped", *arguments) as run:
        run.until(r"Epoch 1/2 step +5/")
        run.send(signal.SIGTERM)
        assert run.result().code == INTERRUPTED
    train(script, "--name", "stopped", *arguments)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("script", [DDP, "imagenet_fsdp.py"])
def test_two_processes_that_are_killed_go_on(tmp_path, images, script):
    """kill -9 of all processes."""
    place = Place(tmp_path, images, "-b", "5", "-g", "2")
    whole = place.finish(script, "whole")
    assert_same_run(place.kill_and_finish(script), whole)
