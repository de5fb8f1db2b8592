"""The parts of a step, read late; GPU and CPU; printed lines; what limits a run."""

import itertools
import json
import math
import os
import re
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import ROOT, scalars, summary, train
from joined import in_processes
from o2_cases import prepare
from running import eventually
from test_checkpoint import build
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils import advice, slowdown
from utils.data import region_decode
from utils.data.images import Reading
from utils.epoch import Meter, input_record
from utils.monitor import ENOUGH, Monitor, StepTimer, StepTimes, cpu_ticks, tensor_bytes
from utils.start.option_types import Options
from utils.start.world import World
from utils.status import Status

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Marks:
    """Counts the marks of a timer, one a second; the device has passed those up to ``passed``."""

    def __init__(self, timer: StepTimer):
        self.number, self.passed, timer.mark = 0, 10**6, self.next

    def next(self):
        self.number += 1
        return self.at(self.number)

    def at(self, number):
        def milliseconds(end):
            assert max(number, end.number) <= self.passed, "read before it passed"
            return 1000 * (end.number - number)

        return SimpleNamespace(
            number=number, query=lambda: number <= self.passed, elapsed_time=milliseconds
        )


@pytest.fixture
def timer():
    return StepTimer(nn.Linear(1, 1), CPU, distributed=False)


def test_nothing_is_read_before_the_device_has_passed_it(timer):
    marks = Marks(timer)
    timer.start()  # mark 1
    marks.passed = 0
    for _ in range(3):  # marks 2 3 4, 5 6 7, 8 9 10
        timer.begin()
        timer.end(update=True)
        timer.wait()
    assert timer.total.steps == 0
    marks.passed = 6
    timer.begin()  # 11
    timer.end(update=True)  # 12
    assert (timer.total.steps, timer.recent()["compute"]) == (2, 1)
    marks.passed = 99
    assert timer.stop()["data"] == 1
    assert (timer.total.steps, timer.recent()["compute"]) == (4, 1)


def test_parts_add_up_and_printing_is_no_part(timer):
    marks = Marks(timer)
    timer.start()  # 1
    marks.number = 10
    timer.begin()  # 11: 10 s for data
    marks.number = 20
    timer.end(update=False)  # 21: 10 s of compute
    timer.begin()  # 22: 1 s for data
    marks.number = 30
    timer.now.append(("communication", marks.at(24), marks.at(28)))  # 4 s for other processes
    timer.end(update=True)  # 31: 9 s
    assert timer.recent()["compute"] == 15
    marks.number = 1000  # a line is printed
    timer.wait()  # 1001
    timer.begin()  # 1002
    timer.end(update=True)  # 1003
    assert timer.recent()["compute"] == 1
    assert timer.stop() == {"data": 6, "compute": 8, "communication": 2}
    assert timer.total == StepTimes(2, {"data": 12, "compute": 16, "communication": 4})


def test_the_marks_stand_around_the_wait_for_buckets(process_group):
    def reduce_late(state, bucket):
        """An all-reduce that ends only after local backward: when its mark is there."""
        future = torch.futures.Future()
        now = timer.now

        def finish():
            seen.append(eventually(lambda: now[-1][0] == "own", 20))
            future.set_result(bucket.buffer())

        threading.Thread(target=finish).start()
        return future

    model, seen = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), []
    replica = DistributedDataParallel(model)
    timer = StepTimer(model, CPU, distributed=True)
    replica.register_comm_hook(None, reduce_late)
    timer.start()
    for images in torch.ones(3, 2, 8):
        timer.begin()
        replica(images).sum().backward()
        data, own, wait = timer.now
        assert (data[0], own[0], wait[0]) == ("data", "own", "communication")
        assert data[2] == own[1] <= own[2] == wait[1] <= wait[2]
        timer.end(update=True)
    assert seen == [True] * 3
    assert timer.stop()["communication"] > 0
    assert timer.total.steps == 3


# ---- in a run


def test_curves_summary_and_trace_of_two_processes(folder, tmp_path):
    """Two epochs of six steps of 10 images, with --profile."""
    options = ("-a", "tiny_full", "-b", "5", "--epochs", "2", "-p", "2", "--profile")
    place = ("--output-dir", tmp_path, "--name", "x")
    long_enough = "from utils import advice, slowdown; advice.MIN_STEPS = advice.MIN_SECONDS = 0"
    any_share = f"{long_enough}; slowdown.LIMIT = advice.LIMIT = -1"
    done = train("imagenet_ddp.py", folder, *options, *place, processes=2, BEFORE=any_share)
    assert "ERROR" not in done.err
    # After the first epoch: what takes most of the time, and why a step is slow.
    assert len(re.findall(r"note: rank [01] \w+ .* and all ranks wait for it", done.out)) == 1
    points, results = scalars(tmp_path / "x"), summary(tmp_path / "x")
    for part in ("data", "compute", "communication"):
        values = [value for _, value in points[f"Step/{part}_s"]]
        assert (len(values), min(values) > 0, results[f"{part}_s"] > 0) == (6, True, True)
        assert [x for x, _ in points[f"Time/{part}"]] == [1, 2]
    for (_, rate), (_, step) in zip(points["Throughput/val"], points["Time/val"], strict=True):
        assert rate * step == pytest.approx(21 / 3, rel=1e-3)
    assert [x for x, _ in points["CPU/utilisation_max"]] == [1, 2]
    assert not [tag for tag in points if "_rank" in tag]
    low, mean, high = (results["hardware"][f"CPU/memory_gb_{of}"] for of in ("min", "mean", "max"))
    assert 0 < low < mean < high < 8 and mean == pytest.approx((low + high) / 2)
    assert 0 <= results["hardware"]["CPU/utilisation_max"] <= 100
    (trace,) = (tmp_path / "x").glob("*.pt.trace.json")
    # Each epoch has six steps: the fifth and later of the run are in it, across the epochs' border.
    steps = set(re.findall(r'"ProfilerStep#(\d+)"', trace.read_text()))
    assert steps == set("4567")


def rank(data=0.02, own=0.3, compute=0.3, communication=0.01):
    return {"data": data, "own": own, "compute": compute, "communication": communication}


LINK = slowdown.Exchange(mb=548.0, seconds=0.72)
BEHIND = "and all ranks wait for it"
REASONS = [
    ([rank(), rank()], LINK, []),
    ([rank(), rank(), rank(own=0.36, compute=0.36)], LINK, []),  # not yet a straggler
    (
        [rank(), rank(), rank(), rank(data=0.21)], LINK,
        ["rank 3 waits for its images for 0.21 of the 0.33 s", "median rank 0.02 s"]
        + [f"{BEHIND}: see its disk and --workers"],
    ),
    ([*[rank(data=1)] * 2, rank(data=1.2)], LINK, ["rank 2 waits for its images for 1.2 of"]),
    (
        [rank(communication=0.3), rank(own=0.6, compute=0.6), rank(communication=0.3)], LINK,
        ["rank 1 computes for 0.6 of the 0.62 s", "median rank 0.3 s"]
        + [f"{BEHIND}: see what else runs there"],
    ),
    ([rank(), rank(), rank(own=0.36, compute=0.36)], LINK, []),  # no more than usual
    (
        [rank(communication=0.58)] * 2, LINK,
        ["548 MB per step take 0.72 s at 6.09 Gbit/s", "0.58 of the 0.9 s", "saves about 0.36 s"],
    ),
    (  # all that is not hidden, in the median rank
        [rank(communication=0.9), *[rank(communication=0.2)] * 2], LINK,
        ["0.2 of the 0.52 s", "saves about 0.2 s"],
    ),
    (
        [rank(communication=0.2)] * 2, slowdown.Exchange(548.0, 0.36, "fp16"),
        ["sent as fp16, take 0.36 s at 6.09 Gbit/s", "What helps: more images per step (-b"],
    ),
    (  # a script without --comm
        [rank(communication=0.58)] * 2, slowdown.Exchange(548.0, 0.72, None),
        ["per step take 0.72 s at 6.09 Gbit/s", "What helps: more images per step (-b"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("times", "exchange", "words"), REASONS, ids=range(len(REASONS)))
def test_the_reason_for_a_slow_step_is_named_with_numbers(times, exchange, words):
    said = slowdown.explain(times, exchange)
    assert bool(said) == bool(words)
    assert not [one for one in words if one not in said], said


def exchange(rank, size):
    model = torch.nn.Linear(1000, 250)
    model.bias.requires_grad_(False)
    time.perf_counter = itertools.count().__next__  # so an exchange takes a second
    world = SimpleNamespace(device=torch.device("cpu"), control=torch.distributed.group.WORLD)
    session = SimpleNamespace(state=SimpleNamespace(model=model), world=world)
    made, whole = [], slowdown.MOST
    for session.args in (SimpleNamespace(comm="int8"), SimpleNamespace(comm=None)):
        made.append(slowdown.time_exchange(session))
    slowdown.MOST = 250_000  # a quarter of them is measured
    made.append(slowdown.time_exchange(session))
    slowdown.MOST = whole
    model.half()  # as with O2
    made.append(slowdown.time_exchange(session))
    return [(one.mb, one.seconds, one.comm) for one in made]


def test_processes_measure_the_exchange_of_their_gradients():
    made = [(1.0, slowdown.SENT["int8"], "int8"), (1.0, 1.0, None)]
    made += [(1.0, 4.0, None), (0.5, 1.0, None)]
    assert in_processes(2, exchange) == [made] * 2


def test_few_steps_or_seconds_are_no_reason_for_advice():
    """They are the start of the workers."""
    for steps, seconds in ((1, 60.0), (500, 5.0), (60, 25.0)):
        measured = StepTimes(steps, {"data": 0.8 * seconds, "compute": 0.2 * seconds})
        assert advice.is_enough(measured) == (steps == 60)


DECODE, SHARDS = f"python {ROOT}/scripts/build_region_decode.py$", "shards 'my photos' 'my photos_s"
SHRINK = f"python {ROOT}/scripts/prepare_data.py shrink 'my photos' 'my photos_small',"
FASTER_INPUT = [  # seconds of reading, of all; bytes of a file; size in an archive; workers; name
    ((0.2, 2.0, 80_000, None, 1, "x.JPEG"), [DECODE, "-j 4 on this node", SHRINK]),
    ((0.2, 2.0, 20_000, None, 4, "x.jpg"), [DECODE]),
    ((0.2, 2.0, 20_000, None, 4, "x.png"), ["a machine with more cores"]),
    ((1.8, 2.0, 20_000, None, 4, "x.jpg"), ["spent 90% .* the 0.0186 GiB of", SHARDS]),
    ((1.8, 2.0, 20_000, 7, 4, "x.jpg"), ["a faster disk"]),
]


@pytest.mark.parametrize(("run", "words"), FASTER_INPUT, ids=range(len(FASTER_INPUT)))
def test_a_run_that_waits_for_images_gets_the_advice_that_fits(
    monkeypatch, tmp_path, logged, run, words
):
    """Its commands can be typed where the training was started."""
    monkeypatch.chdir(tmp_path)
    reading, total, size, stored, workers, name = run
    monkeypatch.setattr(region_decode, "has_library", lambda: False)
    monkeypatch.setattr(advice, "usable_cores", lambda: 4)
    session = mock.MagicMock(args=SimpleNamespace(workers=workers, data="my photos/"))
    session.train.reading = Reading(10, 10 * size, reading, total)
    source = session.train.bad.source
    source.path.return_value, source.stored.return_value = name, ("x", 0, stored)
    source.__len__.return_value = 1000
    advice.bottleneck(session, {"IO/wait_share": 0.05, "busy": 95.0})
    assert not logged
    advice.bottleneck(session, {"IO/wait_share": 0.5, "busy": 50.0})
    note, text = logged  # that it keeps the GPU idle is no news
    assert note == "note: 50% of the time was spent waiting for images"
    helps = text.removeprefix("what helps: ").split("; ")
    assert all(map(re.search, words, helps)) and len(helps) == len(words), helps


@pytest.mark.parametrize(("communication", "notes"), [(0.01, 1), (0.05, 0)])
def test_a_gpu_that_only_short_kernels_keep_idle_is_reported(logged, communication, notes):
    parts = {"Time/compute": 0.09, "Time/communication": communication, "busy": 80.0}
    advice.bottleneck(mock.MagicMock(), parts)
    assert [line.startswith("note: a GPU is 80 % busy") for line in logged] == [True] * notes


# ---- GPU and CPU


def test_an_epochs_values_are_means_of_the_sensors_that_there_are(logged, monkeypatch):
    """And the most memory. Of few samples there is no median."""
    values = []

    def value(factor):
        """No samples but those that are asked for; at first none, as without NVML."""
        assert threading.current_thread() is threading.main_thread()
        return factor * values[0]

    monkeypatch.setattr(torch.cuda, "utilization", lambda _: value(1))
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda _: value(2**30))
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: value(1) and 1000 * values.pop(0))
    monkeypatch.setattr(torch.cuda, "temperature", lambda _: 1 / 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    ticks = itertools.count()  # 30 of 100 are idle
    monkeypatch.setattr("utils.monitor.cpu_ticks", lambda: tuple(next(ticks) * n for n in (3, 10)))
    with closing(monitor(World(GPU))) as one:
        assert logged == ["GPU utilisation is not recorded: pip install nvidia-ml-py"]
        Marks(one)
        for samples, busy in ((2, math.inf), (40, 50.0)):
            values = [1.0, *[20.0, 80.0, 50.0] * samples]
            list(one.timed([]))  # forgets the 1
            for _ in range(3 * samples - 1):
                one.sample()
            measured = one.end_epoch()
            expected = {"CPU/utilisation": pytest.approx(70.0)}
            expected |= {"GPU/utilisation": 50.0, "GPU/power_w": 50.0, "busy": busy}
            assert measured | expected | {"GPU/memory_gb": 80.0} == measured
            assert "GPU/temperature_c" not in measured
    assert one.thread not in threading.enumerate()


STAT = """cpu  90 90 90 90 90 90 90 90 90 90
cpu0 1 2 4 8 16 32 64 128 900 900
cpu1 1000 0 0 0 0 0 0 0 0 0
cpu2 0 0 0 1 1 0 0 0 0 0
intr 7
"""


def test_a_core_that_waits_for_a_disk_is_idle(monkeypatch):
    """Of the cores that this process may use; the time of guests is the user's already."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr(Path, "read_text", lambda _: STAT)
    assert cpu_ticks() == (26, 257)


def test_masters_count_as_memory_of_the_optimiser(monkeypatch):
    """And frozen layers have no gradients. On a GPU the rest of the peak is of activations."""
    _, model, optimizer = prepare("O2")
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    sizes = tensor_bytes(model, optimizer, CPU)
    moments = sum(entry["momentum_buffer"].nbytes for entry in optimizer.state.values())
    masters = (
        sum(p.nbytes for p in trained if p.dtype == torch.float32) - model[1].weight.nbytes * 2
    )
    assert sizes["optimizer"] == moments + masters
    assert sizes["gradients"] == sum(p.nbytes for p in model.parameters() if p.requires_grad)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 10_000_000)
    on_gpu = tensor_bytes(model, optimizer, GPU)
    assert on_gpu == sizes | {"activations": 10_000_000 - sum(sizes.values())}


def test_the_status_of_a_process_is_its_own_compute(tmp_path):
    """Not the wait for others, by which all would look equally slow."""
    state, args = SimpleNamespace(epoch=0, step=3), SimpleNamespace(arch="x", epochs=2)
    status = Status(state, args, World(CPU), "ddp", tmp_path)
    status.folder, status.path = tmp_path, tmp_path / "status.json"
    for more, seconds in (({"own": 0.3}, 0.3), ({}, 0.5)):
        status.show("training", parts={"data": 0.1, "compute": 0.5, **more})
        assert json.loads(status.path.read_text())["compute_seconds"] == seconds


def monitor(world):
    """Of a model of one weight."""
    model = nn.Linear(1, 1)
    return Monitor(model, torch.optim.SGD(model.parameters()), world)


def _epoch(rank, size):
    """What a step records whose compute takes 1 s in rank 0 and 11 s in rank 1.

    The GPU of rank 0 is half as busy as the other one.
    """
    with closing(monitor(World(CPU, rank=rank, size=size))) as one:
        marks = Marks(one)
        for _ in one.timed([SimpleNamespace(ends_step=True)] * 2):
            marks.number += 10 * rank
            one.samples["GPU/utilisation"] += [45.0 * (rank + 1)] * ENOUGH
            one.end(True)
            marks.number += 1000  # a line is printed
        return one.end_epoch()


def test_the_parts_of_a_step_are_means_over_processes():
    for record in in_processes(2, _epoch):
        assert [record[f"Time/{part}"] for part in ("data", "compute")] == [1, 6]
        assert record["busy"] == 45.0, "of the idlest GPU"


def test_the_rank_that_waits_longest_for_its_images_makes_all_wait():
    world = SimpleNamespace(gather=lambda _: [(2.0, 3e6, 4), (5.0, 1e6, 2)])
    train = SimpleNamespace(waited=2.0, reading=Reading())
    for seconds, share in ((10.0, 0.5), (4.0, 1.0)):  # a clock's rounding makes no more of it
        expected = {"wait_share": share, "read_mb_s": 4 / seconds, "files_s": 6 / seconds}
        record = input_record(train, seconds, world)
        assert record == {f"IO/{key}": pytest.approx(value) for key, value in expected.items()}


# ---- printed lines


@pytest.mark.parametrize(("first", "shares"), [(0, (25.0, 33.3, 50.0)), (2, (50.0, 50.0))])
def test_speed_and_waiting_are_of_the_steps_since_the_last_line(monkeypatch, logged, first, shares):
    """Steps take 2 s, of which the last two wait for 1 s, and the others for 0.5 s.

    The last step has a line in any case. Steps before a resume, after step ``first``, were in
    another process.
    """
    clock, state = SimpleNamespace(now=0.0), build()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    session = mock.MagicMock(state=state, world=World(CPU), global_batch=10, print_freq=3)
    session.train.sampler.steps_per_epoch, session.train.waited, session.first_epoch = 4, 0.0, 0
    session.args = Options(epochs=1, batch_size=5, lr=0.1, lr_scaling="none", warmup_epochs=0)
    session.args = session.args.replaced(lr_schedule="linear")
    session.stop.reason, session.train.bad.too_many, session.train.bad.seen = None, False, {}
    session.train.reading, session.monitor.end_epoch.return_value = Reading(), {}
    state.step = first
    meter = Meter(session)
    for state.step in range(first + 1, 5):
        clock.now += 2.0
        session.train.waited += 0.5 if state.step < 3 else 1.0
        meter.print_line()
    told = [line.partition("images/s")[2] for line in logged]
    assert told == [f" 5.0  s/step 2.0000  waiting % {share}" for share in shares]
    rates = [call.args[0]["Step/throughput"] for call in session.run.scalars.call_args_list]
    assert rates == [5.0, 5.0]
    assert session.write_ledger.call_count == len(shares), "if the last one is old"
    record = meter.record()
    assert (record["Throughput/train"], record["Time/train"]) == (5.0, 2.0)
    assert record["Lr"] == pytest.approx(0.1 / 4), "of the last step"
