"""The parts of a step, marked in the right order and read late; GPU and CPU; what limits a run."""

import copy
import json
import math
import re
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import scalars, summary, train
from running import eventually
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.launch.world import World
from utils.train import epoch, report, watch
from utils.train.watch import StepTimer, Watch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Counter:
    """A clock that counts marks; only those up to ``device`` have passed."""

    def __init__(self):
        self.marks, self.device = 0, 10**6

    def mark(self):
        self.marks += 1
        return self.marks

    def seconds(self, begin, end):
        assert self.passed(begin), "read before it passed"
        assert self.passed(end), "read before it passed"
        return end - begin

    def passed(self, mark):
        return mark <= self.device


@pytest.fixture
def timer():
    one = StepTimer(nn.Linear(1, 1), CPU, distributed=False)
    one.clock = Counter()
    one.start()  # mark 1
    return one


def test_nothing_is_read_before_the_device_has_passed_it(timer):
    timer.clock.device = 0
    for _ in range(3):  # marks 2 3 4, 5 6 7, 8 9 10
        timer.begin()
        timer.end(update=True)
        timer.wait()
    assert timer.total["steps"] == 0
    timer.clock.device = 6
    timer.begin()  # 11
    timer.end(update=True)  # 12
    assert timer.recent()["steps"] == 2
    timer.clock.device = 99
    assert timer.stop()["steps"] == 4
    assert timer.recent()["steps"] == 2
    timer.begin()  # evaluation, say: nobody asked
    timer.end(update=True)
    assert timer.stop()["steps"] == 4
    timer.start()
    assert timer.stop()["steps"] == 0


def test_parts_add_up_and_reports_are_no_part(timer):
    timer.clock.marks = 10
    timer.begin()  # 11: 10 s for data
    timer.clock.marks = 20
    timer.end(update=False)  # 21: 10 s of compute
    timer.begin()  # 22: 1 s for data
    timer.clock.marks = 30
    timer._waited(24, 28)  # 4 s for other processes
    timer.end(update=True)  # 31: 9 s
    timer.clock.marks = 1000  # a line is printed
    timer.wait()  # 1001
    timer.begin()  # 1002
    timer.end(update=True)  # 1003
    total = timer.stop()
    assert total == {"steps": 2, "data": 12, "compute": 16, "communication": 4}
    wanted = {"a/data_s": 6, "a/compute_s": 8, "a/communication_s": 2}
    assert watch.per_step(total, "a/", "_s") == wanted


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_marks_stand_around_the_wait_for_buckets_and_change_no_weight(group):
    def reduce_late(state, bucket):
        """An all-reduce that ends only after local backward: when its mark is there."""
        future = torch.futures.Future()
        now = timer.now

        def finish():
            seen.append(eventually(lambda: now[-1][0] == "own", 20))
            future.set_result(bucket.buffer())

        threading.Thread(target=finish).start()
        return future

    def steps(model, forward):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for images in torch.ones(3, 2, 8):
            yield forward(images).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model, seen = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), []
    plain = copy.deepcopy(model)
    replica = DistributedDataParallel(model)
    timer = StepTimer(model, CPU, distributed=True)
    replica.register_comm_hook(None, reduce_late)
    timer.start()
    timer.begin()
    for _ in steps(model, replica):
        data, own, wait = timer.now
        assert (data[0], own[0], wait[0]) == ("data", "own", "communication")
        assert data[2] == own[1] <= own[2] == wait[1] <= wait[2]
        timer.end(update=True)
        timer.begin()
    assert seen == [True] * 3
    total = timer.stop()
    assert (total["steps"], total["communication"] > 0) == (3, True)
    list(steps(plain, DistributedDataParallel(plain)))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


# ---- in a run


def test_curves_summary_and_trace_of_two_processes(folder, tmp_path):
    """Two epochs of six steps of 10 images, with --profile."""
    options = ("-b", "5", "--epochs", "2", "--lr", "0.01", "-p", "2", "--profile")
    place = ("--output-dir", tmp_path, "--name", "x")
    done = train("imagenet_ddp.py", folder, *options, *place, processes=2)
    assert "ERROR" not in done.err
    points, found = scalars(tmp_path / "x"), summary(tmp_path / "x")
    for part in ("data", "compute", "communication"):
        assert len(points[f"Step/{part}_s"]) == 6
        assert all(value > 0 for _, value in points[f"Step/{part}_s"])
        assert [x for x, _ in points[f"Time/{part}"]] == [1, 2]
        assert found[f"{part}_s"] > 0
    for part, images in (("train", 10), ("val", 21 / 3)):
        rates, seconds = points[f"Throughput/{part}"], points[f"Time/{part}"]
        for (_, rate), (_, step) in zip(rates, seconds, strict=True):
            assert rate * step == pytest.approx(images, rel=1e-3)
    assert [x for x, _ in points["CPU/utilisation_rank1"]] == [1, 2]
    assert 0 < found["hardware"]["CPU/memory_gb_rank0"] < 8
    assert 0 <= found["hardware"]["CPU/utilisation_rank1"] <= 100

    (trace,) = (tmp_path / "x").glob("*.pt.trace.json")
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    # Each epoch has six steps: the fifth and later of the run are in it, across the epochs' border.
    steps = {name for name in names if name.startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{number}" for number in (4, 5, 6, 7)}
    assert any("DistributedDataParallel.forward" in name for name in names)


@pytest.mark.parametrize(
    ("seconds", "nodes", "comm", "busy", "told"),
    [
        (0.09, 2, "fp32", 96.0, None),
        (0.45, 2, "fp32", 60.0, "45% of each step; try --comm auto.* or --comm fp16: .* 29% more"),
        (0.45, 2, "int8", 96.0, "45% of each step; a larger -b"),
    ],
)
def test_what_limits_a_run_is_told(logged, seconds, nodes, comm, busy, told):
    session = SimpleNamespace(world=SimpleNamespace(nodes=nodes), args=SimpleNamespace(comm=comm))
    record = {"Time/data": 0.1, "Time/compute": 0.9 - seconds, "Time/communication": seconds}
    report.bottleneck(session, record | {"busy": busy})
    assert (len(logged) == 1 and re.search(told, logged[0])) if told else not logged


def test_input_is_waited_for_by_the_slowest_and_read_by_all(monkeypatch):
    """However long: a share of the time is at most 1."""
    reading = SimpleNamespace(bytes=6e6, files=30)
    session = SimpleNamespace(world=None, train=SimpleNamespace(waited=1.0, reading=reading))
    for waited, share in ((2.5, 0.5), (7.0, 1.0)):
        monkeypatch.setattr(epoch, "gather", lambda own, _, more=waited: [own, (more, 4e6, 10)])
        found = epoch._input_rates(session, 5.0)
        assert found == {"IO/wait_share": share, "IO/read_mb_s": 2.0, "IO/files_s": 8.0}


# ---- GPU and CPU


def test_a_gpu_is_read_but_for_the_sensors_that_it_has_not(monkeypatch):
    sensors = {"utilization": 50, "device_memory_used": 3 * 2**30, "temperature": 71}
    for name, value in (sensors | {"power_draw": 65_500}).items():
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    found = {"GPU/utilisation": 50.0, "GPU/memory_gb": 3.0, "GPU/temperature_c": 71.0}
    assert watch.read_gpu(GPU) == found | {"GPU/power_w": 65.5}
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 1 / 0)
    assert watch.read_gpu(GPU) == found


def test_an_epochs_values_are_of_all_processes(logged, monkeypatch):
    """Means, and the most memory; beside a rank 1 at 97 %. Of few samples there is no median."""

    def gather(own, world):
        others = dict.fromkeys(watch.PARTS, 2.0), {"GPU/utilisation_rank1": 97.0}, own[2] + 37
        return [(dict.fromkeys(watch.PARTS, 1.0), *own[1:]), others]

    def read_gpu(device):
        tags = ("GPU/utilisation", "GPU/memory_gb")
        return dict.fromkeys(tags, values.pop(0)) if values else {}  # at first, as without NVML

    values, ticks = [], [(100, 1000), (100, 1000), (150, 1200)]  # idle, all
    monkeypatch.setattr(watch, "cpu_ticks", lambda: ticks.pop(0) if len(ticks) > 1 else ticks[0])
    monkeypatch.setattr(watch, "gather", gather)
    monkeypatch.setattr(watch, "read_gpu", read_gpu)
    monkeypatch.setattr(watch, "SECONDS", 1000.0)  # no samples but those that are asked for
    options = SimpleNamespace(profile=False)
    with closing(Watch(options, World(GPU), Path("."), nn.Linear(1, 1))) as one:
        assert logged == ["GPU utilisation is not recorded: pip install nvidia-ml-py"]
        one.timer.clock = Counter()
        for samples, busy in ((2, math.inf), (40, 50.0)):
            values = [1.0, *[20.0, 80.0, 50.0] * samples]
            one.start_epoch()  # forgets the 1
            for _ in range(3 * samples - 1):
                one.sample()
            found = one.end_epoch()
            assert (found["GPU/utilisation_rank0"], found["GPU/memory_gb_rank0"]) == (50.0, 80.0)
            assert found["GPU/utilisation_rank1"] == 97.0
            assert [found[part] for part in watch.PARTS] == [1.5] * 3
            assert found["busy"] == busy
            if samples == 2:
                assert found["CPU/utilisation_rank0"] == 75.0, "of the sample with a new tick"
            assert 0.01 < found["CPU/memory_gb_rank0"] < 64
    assert one.thread not in threading.enumerate()
