"""The hardware monitor on a played GPU, and what it says about an idle one."""

import math
import threading
import types
from pathlib import Path

import pytest
import torch
from running import eventually

from utils.launch.world import single_process
from utils.train import hardware

GPU = torch.device("cuda", 0)


@pytest.fixture
def busy(monkeypatch):
    """Sets the utilisation of the GPU; there are no samples but those that are asked for."""
    monkeypatch.setattr(hardware, "SECONDS", 1000.0)
    monkeypatch.setattr(torch.cuda, "temperature", lambda _: 71)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 65_500)

    def play(*values: float) -> None:
        left = list(values)
        monkeypatch.setattr(torch.cuda, "device_memory_used", lambda _: left[0] * 2**30)
        use = lambda _: left.pop(0) if len(left) > 1 else left[0]  # noqa: E731
        monkeypatch.setattr(torch.cuda, "utilization", use)

    play(50.0)
    return play


def test_a_gpu_is_read_but_for_the_sensors_that_it_has_not(busy, monkeypatch):
    found = {"GPU/utilisation": 50.0, "GPU/memory_gb": 50.0, "GPU/temperature_c": 71.0}
    assert hardware.read_gpu(GPU) == found | {"GPU/power_w": 65.5}
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 1 / 0)
    assert hardware.read_gpu(GPU) == found


def test_without_nvml_a_line_says_so(monkeypatch, logged):
    """As on this machine, where torch.cuda's functions raise errors of many kinds."""
    monitor = hardware.Monitor(GPU)
    assert logged == ["GPU utilisation is not recorded: pip install nvidia-ml-py"]
    assert set(monitor.end()) <= {"CPU/memory_gb", "CPU/utilisation"}
    monitor.close()


def test_cpu_counts_its_own_cores_and_memory(monkeypatch):
    source = hardware.Cpu()
    assert 0.01 < source.read()["CPU/memory_gb"] < 64
    ticks = iter([(100, 1000), (100, 1000), (150, 1200)])  # idle, all
    monkeypatch.setattr(hardware.Cpu, "_ticks", lambda self: next(ticks))
    source = hardware.Cpu()
    assert "CPU/utilisation" not in source.read()  # no tick has passed
    assert source.read()["CPU/utilisation"] == 75.0


def test_means_and_the_most_memory_since_begin(busy):
    monitor = hardware.Monitor(GPU)
    busy(1.0, 50.0, 80.0, 20.0)
    monitor.begin()  # forgets the 1
    monitor._sample()
    monitor._sample()
    found = monitor.end()
    assert (found["GPU/utilisation"], found["GPU/memory_gb"]) == (50.0, 80.0)
    monitor.close()


def test_it_samples_in_the_background(busy, monkeypatch):
    monkeypatch.setattr(hardware, "SECONDS", 0.01)
    monitor = hardware.Monitor(GPU)
    monitor.begin()
    assert eventually(lambda: len(monitor.samples.get("GPU/utilisation", [])) > 3)
    monitor.close()
    assert monitor.thread not in threading.enumerate()


@pytest.mark.parametrize(
    ("mine", "parts", "cause"),
    [
        (60.0, (0.5, 0.5, 0.0), "the input: 50%"),
        (60.0, (0.1, 0.5, 0.4), "the network: 40%"),
        (60.0, (0.0, 1.0, 0.0), "kernels too short"),
        (96.0, (0.5, 0.5, 0.0), None),
    ],
)
def test_an_idle_gpu_is_named_once_with_the_cause(busy, monkeypatch, logged, mine, parts, cause):
    """Of a rank 0 beside a rank 1 at 97 %; ``parts`` are those of a step."""

    def gather(own, world):
        times, found, median = own
        times.steps, (times.data, times.compute, times.communication) = 1, parts
        other = found | {"GPU/utilisation": 97.0}
        return [own, (times, other, 97.0 if median < math.inf else median)]

    monkeypatch.setattr(hardware, "gather", gather)
    busy(mine)
    args, world = types.SimpleNamespace(profile=False), single_process()
    watch = hardware.Watch(args, world, Path("."), torch.nn.Linear(1, 1))
    watch.monitor.device = GPU

    def epoch(samples: int) -> dict:
        watch.start_epoch()
        for _ in range(samples):
            watch.monitor._sample()
        return watch.end_epoch()

    values = epoch(10)
    assert (values["GPU/utilisation_rank0"], values["GPU/utilisation_rank1"]) == (mine, 97.0)
    assert logged == []  # ten samples are not enough
    for _ in range(3):
        epoch(40)
    assert len(logged) == bool(cause)
    if cause:
        assert "rank 0 is 60 % busy" in logged[0]
        assert cause in logged[0]
    watch.close()
