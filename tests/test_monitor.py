"""The hardware monitor on stand-ins of NVML and nvidia-smi, and what it says about an idle GPU."""

import os
import stat
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from running import eventually

from utils.launch import launch
from utils.train import monitor, watch

GPU = "GPU-11111111-2222-3333-4444-555555555555"


class NVMLError(Exception):
    """As pynvml has it."""


def stand_in_nvml(power=True, broken=False) -> types.ModuleType:
    """A module with the functions of pynvml that are used, and their units."""
    module = types.ModuleType("pynvml")
    module.calls = []

    def function(name, answer):
        def call(*arguments):
            module.calls.append((name, *arguments))
            if isinstance(answer, Exception):
                raise answer
            return answer

        setattr(module, name, call)

    module.NVMLError, module.NVML_TEMPERATURE_GPU = NVMLError, 0
    function("nvmlInit", NVMLError("no driver") if broken else None)
    function("nvmlShutdown", None)
    function("nvmlDeviceGetHandleByUUID", "by uuid")
    function("nvmlDeviceGetHandleByIndex", "by index")
    function("nvmlDeviceGetUtilizationRates", types.SimpleNamespace(gpu=87, memory=40))
    function("nvmlDeviceGetMemoryInfo", types.SimpleNamespace(used=3 * 2**30, total=16 * 2**30))
    function("nvmlDeviceGetPowerUsage", 65_500 if power else NVMLError("not supported"))
    function("nvmlDeviceGetTemperature", 71)
    return module


@pytest.fixture
def no_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails


def stand_in_smi(folder, monkeypatch, line="93, 2048, 64.25, 70", lines=1000):
    """An nvidia-smi that notes its arguments and prints ``line`` again and again."""
    program = folder / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\necho $$ > {folder}/pid\necho "$@" > {folder}/arguments\n'
        f"for i in $(seq {lines}); do echo '{line}'; sleep 0.05; done\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


READING = {
    "GPU/utilisation": 87.0, "GPU/memory_gb": 3.0, "GPU/power_w": 65.5, "GPU/temperature_c": 71.0,
}  # fmt: skip


def test_nvml(monkeypatch):
    nvml = stand_in_nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    source = monitor.gpu_source(GPU)
    assert isinstance(source, monitor.Nvml)
    assert source.read() == READING
    assert ("nvmlDeviceGetHandleByUUID", GPU) in nvml.calls
    assert ("nvmlDeviceGetTemperature", "by uuid", 0) in nvml.calls
    source.close()
    assert nvml.calls[-1] == ("nvmlShutdown",)
    monitor.gpu_source("3")
    assert nvml.calls[-1] == ("nvmlDeviceGetHandleByIndex", 3)


def test_a_gpu_without_a_power_sensor(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", stand_in_nvml(power=False))
    found = monitor.gpu_source(GPU).read()
    assert found == {tag: value for tag, value in READING.items() if tag != "GPU/power_w"}


@pytest.mark.parametrize("nvml", [None, "broken"])
def test_nvidia_smi_is_the_fall_back(nvml, monkeypatch, tmp_path):
    module = stand_in_nvml(broken=True) if nvml else None
    monkeypatch.setitem(sys.modules, "pynvml", module)
    stand_in_smi(tmp_path, monkeypatch)
    source = monitor.gpu_source(GPU)
    assert isinstance(source, monitor.NvidiaSmi)
    found = source.read()
    assert found == {
        "GPU/utilisation": 93.0,
        "GPU/memory_gb": 2.0,
        "GPU/power_w": 64.25,
        "GPU/temperature_c": 70.0,
    }
    arguments = (tmp_path / "arguments").read_text()
    assert f"--id={GPU}" in arguments
    assert "--query-gpu=utilization.gpu,memory.used,power.draw,temperature.gpu" in arguments
    source.close()
    pid = int((tmp_path / "pid").read_text())
    assert not os.path.exists(f"/proc/{pid}")


def test_nvidia_smi_without_some_sensors(no_nvml, monkeypatch, tmp_path):
    stand_in_smi(tmp_path, monkeypatch, line="12, 1024, [N/A], [Not Supported]")
    source = monitor.gpu_source(GPU)
    assert source.read() == {"GPU/utilisation": 12.0, "GPU/memory_gb": 1.0}
    source.close()


def test_nvidia_smi_that_ends_gives_no_more_readings(no_nvml, monkeypatch, tmp_path):
    stand_in_smi(tmp_path, monkeypatch, lines=2)
    source = monitor.gpu_source(GPU)
    assert eventually(lambda: source.read() == {})
    source.close()


def test_no_source_at_all(no_nvml, monkeypatch, tmp_path):
    stand_in_smi(tmp_path, monkeypatch, line="No devices were found")
    assert monitor.gpu_source(GPU) is None
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert monitor.gpu_source(GPU) is None


def test_cpu_counts_its_own_cores_and_memory(monkeypatch, tmp_path):
    source = monitor.Cpu()
    assert 0.01 < source.read()["CPU/memory_gb"] < 64
    ticks = iter([(100, 1000), (100, 1000), (150, 1200)])  # idle, all
    monkeypatch.setattr(monitor.Cpu, "_ticks", lambda self: next(ticks))
    source = monitor.Cpu()
    assert "CPU/utilisation" not in source.read()  # no tick has passed
    assert source.read()["CPU/utilisation"] == 75.0


class Fake:
    """A GPU with the next utilisation of a list."""

    def __init__(self, *busy: float):
        self.busy, self.closed = list(busy), False

    def read(self):
        value = self.busy.pop(0) if len(self.busy) > 1 else self.busy[0]
        return {"GPU/utilisation": value, "GPU/memory_gb": value / 10}

    def close(self):
        self.closed = True


@pytest.fixture
def slow(monkeypatch):
    """No samples but those that are asked for."""
    monkeypatch.setattr(monitor, "SECONDS", 1000.0)


def test_means_and_the_most_memory_since_begin(slow):
    source = Fake(1.0, 50.0, 80.0, 20.0)
    watcher = monitor.Monitor([source])
    watcher.begin()  # forgets the 1
    watcher._sample()
    watcher._sample()
    assert watcher.end() == {"GPU/utilisation": 50.0, "GPU/memory_gb": 8.0}
    watcher.close()
    assert source.closed


def test_it_samples_in_the_background(monkeypatch):
    monkeypatch.setattr(monitor, "SECONDS", 0.01)
    watcher = monitor.Monitor([Fake(50.0)])
    watcher.begin()
    assert eventually(lambda: len(watcher.samples.get("GPU/utilisation", [])) > 3)
    watcher.close()
    assert not watcher.thread.is_alive()
    assert watcher.thread not in threading.enumerate()


def test_a_failing_source_costs_a_sample_only(slow):
    class Failing(Fake):
        def read(self):
            raise RuntimeError("GPU is lost")

    watcher = monitor.Monitor([Failing(0.0)])
    watcher.begin()
    assert watcher.end() == {}
    watcher.close()


@pytest.mark.parametrize(
    ("data", "communication", "cause"),
    [(0.3, 0.1, "the input"), (0.1, 0.3, "the network"), (0.01, 0.02, "a small batch")],
)
def test_likely_cause(data, communication, cause):
    assert cause in monitor.likely_cause(data, communication)


# ---- all together


def watching(monkeypatch, busy: float, parts=(0.0, 1.0, 0.0)):
    """A watch of a rank 0 whose GPU is ``busy``, beside a rank 1 at 97 %; a step has ``parts``."""
    args, world = types.SimpleNamespace(profile=False), launch.single_process()
    found = watch.Watch(args, world, Path("."), torch.nn.Linear(1, 1))
    found.monitor.sources = [Fake(busy)]

    def gather(mine, world):
        times, hardware, median = mine
        times.steps, (times.data, times.compute, times.communication) = 1, parts
        other = hardware | {"GPU/utilisation": 97.0}
        return [mine, (times, other, None if median is None else 97.0)]

    monkeypatch.setattr(watch, "gather", gather)
    return found


def epoch(found, samples: int):
    found.start_epoch()
    for _ in range(samples):
        found.monitor._sample()
    return found.end_epoch()


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ((0.5, 0.5, 0.0), "the input: 50%"),
        ((0.1, 0.5, 0.4), "the network: 40%"),
        ((0.0, 1.0, 0.0), "a small batch"),
    ],
)
def test_it_warns_once_and_names_the_cause(slow, monkeypatch, logged, parts, cause):
    found = watching(monkeypatch, 60.0, parts)
    values = epoch(found, 10)
    assert values["GPU/utilisation_rank0"] == 60.0
    assert values["GPU/utilisation_rank1"] == 97.0
    assert values["GPU/memory_gb_rank0"] == 6.0
    assert logged == []  # ten samples are not enough
    for _ in range(3):
        epoch(found, 40)
    (text,) = logged
    assert "rank 0 is 60 % busy" in text
    assert cause in text
    found.close()


def test_it_is_silent_about_a_busy_gpu(slow, monkeypatch, logged):
    found = watching(monkeypatch, 96.0)
    epoch(found, 40)
    assert logged == []
    found.close()
