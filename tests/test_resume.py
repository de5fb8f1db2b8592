"""A run that is interrupted and resumed ends with the weights of one that was not."""

import shutil
import signal
from pathlib import Path
from shlex import split

import pytest
from conftest import SMALL, Result, draw_folder, python, scalars, summary, train
from running import TORCHRUN, assert_same_weights, snapshot, start, tiny

from utils.launch.network import free_port

INTERRUPTED = 75
STEPS = 30  # of 10 images in an epoch
# The learning rate depends on the position, and not on the number of epochs.
RECIPE = split("--epochs 2 -p 1 --lr 0.05 --warmup-epochs 1 --crop-scale 0.5 --seed 3")
# Never the same twice: of an epoch, and of a step.
SPEED = ("Throughput/", "Time/", "IO/", "CPU/", "GPU/")
PARTS = ("Step/data_s", "Step/compute_s", "Step/communication_s")
MEASURED = (*SPEED, "Step/throughput", *PARTS)


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """300 training and 21 validation images in 3 classes."""
    return draw_folder(tmp_path_factory.mktemp("images") / "data", train=100)


class Place:
    """Where the runs of one way to train lie, and how they are started.

    ``steps`` an epoch, each of ``accum`` micro-batches.
    """

    def __init__(
        self,
        root: Path,
        images: Path,
        *options: str,
        full: bool = True,
        steps: int = STEPS,
        accum: int = 1,
    ):
        self.root, self.images, self.options, self.full = root, images, options, full
        self.steps, self.accum = steps, accum

    def line(self, name: str, *more: object) -> tuple[list, dict[str, str]]:
        """Command line behind the script's name, and environment, for the run ``name``."""
        model, env = tiny(self.full)
        here = ("--output-dir", self.root, "--name", name, "--resume", "auto", self.images)
        return [*model, *RECIPE, *self.options, *more, *here], env

    def finish(self, script: str, name: str, *more: object, processes: int = 0) -> Path:
        """Train to the last epoch; ``processes`` by torchrun, if given."""
        arguments, env = self.line(name, *more)
        train(script, *arguments, processes=processes, **env)
        return self.root / name

    def stop(
        self,
        script: str,
        name: str,
        *more: object,
        at: tuple[int, int],
        signum: int = signal.SIGTERM,
        group: bool = False,
        launcher: tuple = (),
    ) -> Result:
        """Start or continue a run, and send ``signum`` after the step (epoch, step) ``at``.

        However late the signal comes, the run is no further than that step.
        """
        arguments, env = self.line(name, *more)
        begun = (0, 0)
        if (self.root / name / "snapshot.pt").exists():
            begun = position(self.root / name)
        steps = (at[0] - 1 - begun[0]) * self.steps + at[1] - begun[1]
        env["HOLD_AFTER"] = str(steps * self.accum)
        with start(script, *arguments, launcher=launcher, **env) as run:
            run.until(rf"Epoch {at[0]}/\d+ step +{at[1]}/")
            run.send(signum, group)
            return run.result()

    def copy(self, name: str, new: str) -> Path:
        """A copy of a run, to try something on."""
        return shutil.copytree(self.root / name, self.root / new)


def position(run: Path) -> tuple[int, int]:
    """Finished epochs, and steps of the next one, of a run's snapshot."""
    progress = snapshot(run)["progress"]
    return progress["epoch"], progress["step"]


def assert_same_curves(run: Path, other: Path, tolerance: float = 0.0) -> None:
    """The same points, each once."""
    ours, theirs = scalars(run), scalars(other)
    # A run that was on two processes for a while has curves of the second one's hardware.
    of_ranks = ("CPU/", "GPU/", "Memory/")
    hardware = {tag for tag in ours.keys() | theirs.keys() if tag.startswith(of_ranks)}
    assert ours.keys() - hardware == theirs.keys() - hardware
    assert "Step/loss" in ours
    assert "Top1/val" in ours
    for tag in ours:
        x = [x for x, _ in ours[tag]]
        assert x == sorted(set(x)), f"{tag} runs backward"
        if tag.startswith(SPEED) or (tag in hardware and tag not in theirs):
            continue  # an epoch that was resumed after its last step has no speed
        assert x == [x for x, _ in theirs[tag]], tag
        if not tag.startswith(MEASURED):
            wanted = [y for _, y in theirs[tag]]
            near = pytest.approx(wanted, rel=tolerance, abs=tolerance / 100)  # a step's loss is ~0
            assert [y for _, y in ours[tag]] == near, tag


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


@pytest.fixture(scope="module")
def stopped(one) -> dict[str, Result]:
    """The run ``often`` is stopped by each of `STOPS` in turn; copies have the stops' names."""
    results = {}
    for name, how in STOPS.items():
        results[name] = one.stop(ND, "often", **how)
        one.copy("often", name)
    one.finish(ND, "often")
    return results


@pytest.mark.parametrize("name", STOPS)
def test_a_signal_ends_in_a_snapshot(one, stopped, name):
    result, run = stopped[name], one.root / name
    assert result.code == INTERRUPTED, result.err
    assert "Traceback" not in result.err
    assert summary(run)["finished_because"] == "interrupted"
    epoch, step = STOPS[name]["at"]
    done, steps = position(run)
    assert done == summary(run)["epochs_done"] == epoch - 1
    assert step <= steps <= STEPS
    assert steps < STEPS or name == "evaluation", "the signal came too late to be a test"


def test_four_stops_change_nothing_and_time_goes_on_counting(one, stopped):
    assert_same_run(one.root / "often", one.root / "whole")
    seconds = [snapshot(one.root / name)["progress"]["elapsed"] for name in (*STOPS, "often")]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1]


def test_kill_in_the_second_epoch_goes_on_from_the_last_snapshot(one):
    result = one.stop(ND, "killed", at=(2, 10), signum=signal.SIGKILL)
    run = one.root / "killed"
    assert result.code == -signal.SIGKILL
    assert position(run) == (1, 0)
    (run / ".snapshot.pt.12345.tmp").write_bytes(b"half a snapshot")
    one.finish(ND, "killed")
    assert_same_run(run, one.root / "whole")


@pytest.fixture(scope="module")
def first_epoch(one) -> Path:
    """A finished run of a single epoch."""
    return one.finish(ND, "first_epoch", "--epochs", "1")


def test_points_past_the_snapshot_are_drawn_again(one, first_epoch):
    """As after a crash between writing an epoch's points and writing its snapshot."""
    run = one.copy("whole", "ahead")
    for name in ("snapshot.pt", "best.pt"):
        shutil.copy(first_epoch / name, run / name)
    one.finish(ND, "ahead")
    assert_same_run(run, one.root / "whole")


def test_raised_epochs_continue_a_finished_run(one, first_epoch):
    run = one.copy("first_epoch", "raised")
    one.finish(ND, "raised")
    assert_same_run(run, one.root / "whole")


def test_another_global_batch_at_the_end_of_an_epoch(one, first_epoch):
    run = one.copy("first_epoch", "larger")
    one.finish(ND, "larger", "-b", "20")
    assert summary(run)["epochs_done"] == 2
    x = [x for x, _ in scalars(run)["Step/loss"]]
    assert len(x) == STEPS + STEPS // 2
    assert x == sorted(set(x))


def test_an_unfit_global_batch_within_an_epoch_is_refused_once(one, stopped):
    run = one.copy("SIGTERM", "unfit")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    arguments, env = one.line(run.name, "-b", "32", "-g", "2")
    result = python(DDP, *SMALL, *arguments, **env)
    assert result.code == 2
    assert "global batch 10 " in result.sentence
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_time_limit_ends_in_a_snapshot_and_a_file_is_continued_in_place(one):
    arguments, env = one.line("limited", "--train-time", "0")
    result = train(ND, *arguments, **env)
    run = one.root / "limited"
    assert summary(run)["finished_because"] == "train_time"
    assert position(run) == (0, 1)
    assert "time limit" in result.out
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
    assert found["val_top1"] == summary(whole)["best_top1"] == best["top1"]
    averaged = best["weights"] == "ema"
    losses = dict(scalars(whole)["Loss/ema" if averaged else "Loss/val"])
    assert (
        found["val_top1"]
        == dict(scalars(whole)["Top1/ema" if averaged else "Top1/val"])[best["epoch"]]
    )
    assert found["val_loss"] == pytest.approx(losses[best["epoch"]], rel=1e-5)
    assert found["val_images"] == 21
    assert found["finished_because"] == "evaluated"


@pytest.fixture(scope="module")
def stopped_twice(two) -> list[Result]:
    """Stopped under torchrun, stopped again under spawn, finished under torchrun."""
    torchrun = (*TORCHRUN, "--nproc_per_node=2")
    results = [two.stop(DDP, "often", at=(1, 5), launcher=torchrun)]
    two.copy("often", "torchrun")
    results.append(two.stop(DDP, "often", "-g", "2", at=(2, 5)))
    two.copy("often", "spawn")
    two.finish(DDP, "often", processes=2)
    return results


@pytest.mark.parametrize(("name", "epoch"), [("torchrun", 1), ("spawn", 2)])
def test_sigterm_to_the_launcher_ends_in_a_snapshot(two, stopped_twice, name, epoch):
    result = stopped_twice[epoch - 1]
    run = two.root / name
    assert summary(run)["finished_because"] == "interrupted"
    done, steps = position(run)
    assert done == epoch - 1
    assert 5 <= steps < STEPS
    # torchrun has a code, and a traceback, of its own for a signal.
    assert result.code == INTERRUPTED if name == "spawn" else result.code
    assert "Traceback" not in result.err or name == "torchrun"


def test_two_processes_resume_bit_for_bit(two, stopped_twice):
    often, whole = two.root / "often", two.root / "whole"
    assert_same_weights(often, whole)
    assert_same_curves(often, whole, tolerance=1e-6)
    assert summary(often)["best_top1"] == summary(whole)["best_top1"]


def test_a_run_moves_between_numbers_of_processes(tmp_path, images):
    """Without batch norm and dropout, one process and two see, mix and compute the same."""
    mixed = ("--mixup", "0.5", "--cutmix", "1", "--ema", "0.9", "--repeated-aug", "2")
    place = Place(tmp_path, images, *mixed, full=False, steps=300 // 12)
    whole = place.finish(ND, "whole", "-b", "12")
    assert place.stop(ND, "moved", "-b", "12", at=(1, 5)).code == INTERRUPTED
    stop = place.stop(DDP, "moved", "-b", "6", "-g", "2", at=(2, 5))
    assert stop.code == INTERRUPTED
    done, steps = position(place.root / "moved")
    assert done == 1
    assert 5 <= steps < place.steps
    moved = place.finish(ND, "moved", "-b", "12")
    assert_same_weights(moved, whole, tolerance=1e-5)
    assert_same_curves(moved, whole, tolerance=1e-4)


# ---- loss scale, accumulation


def check_stop_and_resume(place: Place, script: str, *options: object) -> dict:
    """Compare an undisturbed run and a stopped one; return the scaler's state."""
    whole = place.finish(script, "whole", *options)
    stop = place.stop(script, "stopped", *options, at=(1, 5))
    assert stop.code == INTERRUPTED, stop.err
    assert 0 < position(place.root / "stopped")[1] < STEPS
    assert_same_run(place.finish(script, "stopped", *options), whole)
    return snapshot(whole)["scaler"]


def test_masters_loss_scale_and_accumulation_go_on(tmp_path, images):
    # At --lr 0.05 a gradient overflows, early in the run on one CPU and late on another; at 0.001
    # none is larger than half of float16's range.
    options = ("-b", "5", "--accum-steps", "2", "--lr", "0.001", "--ema", "0.9")
    place = Place(tmp_path, images, *options, accum=2)
    scaler = check_stop_and_resume(place, "imagenet_ddp_apex.py", "-g", "1", "--opt-level", "O2")
    assert scaler["clean_steps"] > STEPS  # so that a counter begun again would show


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
def test_native_loss_scale_goes_on(tmp_path, images):
    place = Place(tmp_path, images, "-b", "10", "--lr", "0.005")  # too small to overflow
    scaler = check_stop_and_resume(place, ND, "--amp", "fp16")
    assert scaler["_growth_tracker"] > STEPS  # so that a counter begun again would show


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
def test_a_sharded_run_that_is_killed_goes_on(tmp_path, images):
    """kill -9 of all processes in the middle of the second epoch."""
    options = ("-b", "5", "-g", "2", "--snapshot-minutes", "0")
    place, script = Place(tmp_path, images, *options), "imagenet_fsdp.py"
    whole = place.finish(script, "whole")
    place.stop(script, "killed", at=(2, 10), signum=signal.SIGKILL, group=True)
    begun = position(tmp_path / "killed")
    assert begun[0] == 1
    assert 0 < begun[1] <= 10
    assert_same_run(place.finish(script, "killed"), whole)
