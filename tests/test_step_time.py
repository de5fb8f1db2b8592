"""The parts of a step: marks in the right order, read late, and nothing changed by them."""

import copy
import json
import re
import threading
from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import scalars, summary, train
from forecast import buckets
from nodes import Nodes
from running import eventually
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.train import report
from utils.train.step_time import StepTimer, StepTimes, mean_times

CPU = torch.device("cpu")


class Counter:
    """A clock that counts marks; only those below ``device`` have passed."""

    def __init__(self):
        self.marks, self.device = 0, 0

    def mark(self):
        self.marks += 1
        return self.marks

    def seconds(self, begin, end):
        assert self.passed(begin), "read before it passed"
        assert self.passed(end), "read before it passed"
        return end - begin

    def passed(self, mark):
        return mark <= self.device


def counting(model=None, distributed=False):
    timer = StepTimer(model or nn.Linear(1, 1), CPU, distributed)
    timer.clock = Counter()
    return timer


def test_nothing_is_read_before_the_device_has_passed_it():
    timer = counting()
    timer.start()  # mark 1
    for _ in range(3):  # marks 2 3 4, 5 6 7, 8 9 10
        timer.begin()
        timer.end(update=True)
        timer.wait()
    assert timer.total.steps == 0
    timer.clock.device = 6
    timer.begin()  # 11
    timer.end(update=True)  # 12
    assert timer.recent().steps == 2
    timer.clock.device = 99
    assert timer.stop().steps == 4
    assert timer.recent().steps == 2
    timer.begin()  # evaluation, say: nobody asked
    timer.end(update=True)
    assert timer.stop().steps == 4
    timer.start()
    assert timer.stop().steps == 0


def test_parts_add_up_and_reports_are_no_part():
    timer = counting()
    timer.clock.device = 10**6
    timer.start()  # 1
    timer.clock.marks = 10
    timer.begin()  # 11: 10 s for data
    timer.clock.marks = 20
    timer.end(update=False)  # 21: 10 s of compute
    timer.begin()  # 22: 1 s for data
    timer.end(update=True)  # 23: 1 s of compute
    timer.clock.marks = 1000  # a line is printed
    timer.wait()  # 1001
    timer.begin()  # 1002
    timer.end(update=True)  # 1003
    assert astuple(timer.stop()) == (2, 12.0, 12.0, 0.0, 12.0)


def test_means_over_processes():
    found = mean_times((StepTimes(2, 2.0, 4.0, 0.0), StepTimes(2, 0.0, 4.0, 2.0)))
    assert found == {"Time/data": 0.5, "Time/compute": 2.0, "Time/communication": 0.5}
    assert mean_times((StepTimes(), StepTimes())) == {}


# ---- with DistributedDataParallel


@pytest.fixture
def group(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_the_marks_stand_around_the_wait_for_buckets(group):
    model = small()
    replica = DistributedDataParallel(model)
    timer = StepTimer(model, CPU, distributed=True)
    seen = []

    def reduce_late(state, bucket):
        """An all-reduce that ends only after local backward: when its mark is there."""
        future = torch.futures.Future()
        now = timer.now

        def finish():
            seen.append(eventually(lambda: now.local is not None, 20) and not now.waits)
            future.set_result(bucket.buffer())

        threading.Thread(target=finish).start()
        return future

    replica.register_comm_hook(None, reduce_late)
    timer.start()
    for _ in range(3):
        timer.begin()
        replica(torch.ones(2, 8)).sum().backward()
        marks = timer.now
        ((begun, ended),) = marks.waits
        assert marks.began <= marks.local == begun <= ended
        timer.end(update=True)
    assert seen == [True] * 3
    total = timer.stop()
    assert total.communication > 0
    assert total.steps == 3


def test_accumulation_without_all_reduce_has_no_communication_to_speak_of(group):
    model = small()
    replica = DistributedDataParallel(model)
    timer = counting(model, distributed=True)
    timer.clock.device = 10**6
    timer.start()
    for update in (False, True):
        timer.begin()
        with replica.no_sync():
            loss = replica(torch.ones(2, 8)).sum()
            timer.clock.marks += 100
            loss.backward()
        timer.end(update)
    assert timer.stop().communication == 2  # two marks in a row, twice


def test_weights_are_the_same_bit_for_bit_with_a_timer(group):
    def trained(timed: bool) -> list[torch.Tensor]:
        model = copy.deepcopy(start)
        replica = DistributedDataParallel(model)
        timer = StepTimer(model, CPU, distributed=True) if timed else counting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        timer.start()
        for images in batches:
            timer.begin()
            replica(images).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            timer.end(update=True)
        return list(model.parameters())

    start, batches = small(), torch.randn(5, 3, 8)
    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


# ---- in a run


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A run of two processes, two epochs of six steps, with --profile."""
    output = tmp_path_factory.mktemp("run")
    arguments = ("-b", "5", "--epochs", "2", "--lr", "0.01", "-p", "2", "--profile")
    result = train(
        "imagenet_ddp.py", folder, *arguments, "--output-dir", output, "--name", "x", processes=2
    )
    assert "ERROR" not in result.err
    return output / "x"


def test_curves_epoch_values_and_summary(run):
    points = scalars(run)
    found = summary(run)
    for part in ("data", "compute", "communication"):
        assert len(points[f"Step/{part}_s"]) == 6
        assert all(value > 0 for _, value in points[f"Step/{part}_s"])
        assert [x for x, _ in points[f"Time/{part}"]] == [1, 2]
        assert found[f"{part}_s"] > 0
    assert [x for x, _ in points["CPU/utilisation_rank1"]] == [1, 2]
    assert 0 < found["hardware"]["CPU/memory_gb_rank0"] < 8
    assert 0 <= found["hardware"]["CPU/utilisation_rank1"] <= 100


def test_the_trace_shows_steps_and_their_parts(run):
    (trace,) = run.glob("*.pt.trace.json")
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    # Each epoch has six steps: the fifth and later of the run are in it, across the epochs' border.
    assert {"ProfilerStep#4", "ProfilerStep#7"} <= names
    assert "ProfilerStep#3" not in names
    assert any("DistributedDataParallel.forward" in name for name in names)


def test_one_process_communicates_not_at_all(folder, tmp_path):
    arguments = ("-b", "20", "--epochs", "1", "--lr", "0.01", "--profile")
    result = train("imagenet_nd.py", folder, *arguments, "--output-dir", tmp_path, "--name", "x")
    found = summary(tmp_path / "x")
    assert found["communication_s"] == 0
    ((_, step),) = scalars(tmp_path / "x")["Time/train"]
    assert 0 < found["data_s"] + found["compute_s"] <= step  # the rest: lines, polls
    assert "--profile: no trace, as it needs more than 4 steps" in result.out


@pytest.mark.long
def test_a_slow_link_shows_as_communication(folder, tmp_path):
    values = sum(bucket.values for bucket in buckets.trace("resnet18", 3))
    seconds = 2 / 2 * values * 4 / (150e6 / 8)  # of the all-reduce; 2 nodes
    with Nodes(2, rate="150mbit") as nodes:
        command = (
            "python -m torch.distributed.run --nnodes=2 --node_rank={} --nproc_per_node=1"
            f" --master_addr={nodes[0].ip} --master_port=8888 imagenet_ddp.py -a resnet18"
            f" --image-size 32 -j 1 -b 5 --epochs 1 --lr 0.01 --output-dir {tmp_path} --name x"
            f" {folder}"
        )
        typed = [node.type(command.format(rank)) for rank, node in enumerate(nodes)]
        for one in typed:
            with one:
                result = one.result()
                assert result.code == 0, result.out + result.err
    found = summary(tmp_path / "x")
    # At most, all of compute hides communication; and a link gives no more than it can (but for
    # the first 256 kB, which its bucket holds).
    assert found["communication_s"] > 0.95 * seconds - found["compute_s"]
    assert found["communication_s"] > 0.3 * seconds


@pytest.mark.parametrize(
    ("seconds", "nodes", "comm", "told"),
    [
        (0.09, 2, "fp32", None),
        (0.45, 2, "fp32", "45% of each step; try --comm auto.* or --comm fp16: .* 29% more"),
        (0.45, 1, "fp32", "45% of each step; try --comm fp16"),
        (0.45, 2, "int8", "45% of each step; a larger -b"),
    ],
)
def test_a_run_that_waits_for_its_network_is_told(logged, seconds, nodes, comm, told):
    session = SimpleNamespace(world=SimpleNamespace(nodes=nodes), args=SimpleNamespace(comm=comm))
    record = {"Time/data": 0.1, "Time/compute": 0.9 - seconds, "Time/communication": seconds}
    report.communication(session, record)
    assert (len(logged) == 1 and re.search(told, logged[0])) if told else not logged
