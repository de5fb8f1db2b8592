"""What a run has used: GPU-hours, energy by a simulated sensor, the model's share of the peak."""

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import summary, train
from test_monitor import GPU, monitor

from utils import report
from utils.model import flops
from utils.run import ledger
from utils.run.ledger import EnergyMeter, Entry, Ledger
from utils.session import Training
from utils.start.world import World


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_energy_is_power_over_time(monkeypatch):
    """200 W for 10 s, then up to 400 W within 5 s. Without a sensor there is none, not zero."""
    clock = Clock()
    monkeypatch.setattr(ledger, "time", clock)
    meter = EnergyMeter()
    assert meter.joules is None
    for seconds, watts in ((0, 200), (4, 200), (6, 200), (5, 400)):
        clock.now += seconds
        meter.add(watts)
    assert meter.joules == 10 * 200 + 5 * 300


def test_energy_of_all_ranks(monkeypatch):
    """That of the last epoch's end, and since then so much for each rank as for this one."""
    clock = Clock()
    monkeypatch.setattr(ledger, "time", clock)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda _: 100_000)
    for name in ("utilization", "temperature", "device_memory_used", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 1)
    monkeypatch.setattr("utils.monitor.SECONDS", 1e6)
    monkeypatch.setattr(World, "gather", lambda _, mine: [mine, (*mine[:2], 40.0, 5000.0)])
    with closing(monitor(World(GPU, size=1))) as one:
        one.world = World(GPU, size=2)
        one.sample()
        clock.now = 10.0
        assert one.end_epoch()["busy"] == 40.0, "the other GPU, as this one has few samples"
        assert one.joules() == 10 * 100 + 5000
        clock.now = 13.0
        one.sample()
        assert one.joules() == 10 * 100 + 5000 + 2 * 300
        one.joules_of_all = [1.0, None]
        assert one.joules() is None


def test_all_starts_of_a_run_count(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ledger, "time", clock)
    monkeypatch.setattr(ledger, "process_seconds", lambda: 1800.0)
    file = tmp_path / ledger.FILE
    Ledger(file, Entry(nodes=2, gpus=8)).write(images=1000, joules=3.6e6)  # is then killed
    second = Ledger(file, Entry(nodes=1, gpus=4))
    clock.now = 61.0
    assert second.is_due()
    second.write(images=1, joules=1.0)
    assert not second.is_due()
    second.write(images=800, joules=0.9e6)
    used = {"node_hours": 1.5, "gpu_hours": 6.0, "energy_kwh": 1.25}
    assert second.totals() == pytest.approx(used | {"images_per_joule": 1800 / 4.5e6})
    on_a_cpu = Ledger(file, Entry(nodes=1, gpus=0))
    on_a_cpu.write(images=5, joules=None)
    assert on_a_cpu.totals().keys() == {"node_hours", "gpu_hours"}


def test_hours_are_not_those_of_a_containers_clock(monkeypatch):
    """LXC's /proc/uptime counts from the start of the container, a process's own file from that of
    the machine."""
    read = Path.read_text
    short = {"/proc/uptime": "0.01 0.01\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: short.get(str(path)) or read(path))
    assert 0 < ledger.process_seconds() < 3600


def test_a_ledger_that_cannot_be_read_or_written_is_no_error(tmp_path, logged):
    Ledger(tmp_path / "removed" / ledger.FILE, Entry(nodes=1, gpus=0)).write(1, None)
    assert "cannot write" in logged.pop()
    Ledger(tmp_path / ledger.FILE, Entry(nodes=1, gpus=0))  # of a run that begins
    assert not logged
    for text in ("[{", '[{"of_another_version": 1}]'):
        (tmp_path / ledger.FILE).write_text(text)
        assert Ledger(tmp_path / ledger.FILE, Entry(nodes=1, gpus=0)).before == []
        assert "cannot be read" in logged.pop()


def test_a_run_on_a_cpu_has_hours_but_no_energy(folder, tmp_path):
    options = ("-a", "tiny_plain", "-b", "10", "--output-dir", tmp_path, "--name", "run")
    for epochs, *limit in ((1, "--train-time", "0"), (1,), (3,)):  # the first after a step
        train("imagenet_nd.py", *options, "--epochs", epochs, *limit, "--resume", "auto", folder)
    facts = summary(tmp_path / "run")
    assert facts["node_hours"] > 0
    assert not {"gpu_hours", "energy_kwh", "images_per_joule", "mfu"} & facts.keys()
    starts = json.loads((tmp_path / "run" / ledger.FILE).read_text())
    assert [(one["images"], one["gpus"]) for one in starts] == [(10, 0), (50, 0), (120, 0)]


def test_the_models_share_of_the_peak():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Flatten())
    operations = flops.of_image(model, torch.zeros(1, 3, 10, 10))
    assert operations == 2 * 8 * 3 * 9 * 100
    assert model.training
    block = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # torch has a faster path
    operations = flops.of_image(block, torch.zeros(1, 5, 8))
    assert torch.backends.mha.get_fastpath_enabled(), "again"
    products = 2 * 5 * (4 * 8 * 8 + 2 * 8 * 16)  # those of attention itself a CPU does not count
    assert products <= operations <= products + 2 * 2 * 5 * 5 * 8
    assert flops.peak("Tesla T4", "fp16") == 65e12
    assert flops.peak("NVIDIA H100 80GB HBM3", "fp32") == 494e12
    assert flops.peak("Tesla V100-SXM2-16GB", "bf16") == 125e12
    assert flops.peak("NVIDIA H100 PCIe", "bf16") == 756e12
    assert flops.peak("GeForce", "fp16") is None
    assert flops.utilisation(4e12, 4, 100e12, freeze=False) == pytest.approx(0.03)
    assert flops.utilisation(4e12, 4, 100e12, freeze=True) == pytest.approx(0.01)


def test_the_peak_is_that_of_the_precision(monkeypatch):
    asked = mock.Mock(return_value=None)
    monkeypatch.setattr(flops, "peak", asked)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
    for level, dtype, precision in (
        ("", torch.float32, "fp32"),
        ("O0", torch.float32, "fp32"),
        ("", torch.float16, "fp16"),
        ("O2", torch.float16, "O2"),
    ):
        session = mock.MagicMock(spec=Training)
        session.ledger, session.world = mock.MagicMock(), World(GPU)
        session.state = SimpleNamespace(sharded=False, history=[{"epoch": 1}])
        session.args = SimpleNamespace(opt_level=level, freeze=False)
        session.loaders = SimpleNamespace(dtype=dtype)
        report.used(session)
        asked.assert_called_with("T4", precision)


def test_the_share_of_the_peak_is_of_each_epochs_own_size(monkeypatch):
    """With --progressive; like speed, it is the median of the epochs after the first."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    epochs = ((1, 16.0, 5.0), (2, 16.0, 4e6), (3, 16.0, 2e6), (4, 32.0, 1e6))
    tags = ("epoch", "Size/train", "Throughput/train")
    session = mock.MagicMock(spec=Training)
    session.ledger, session.world, session.train = mock.MagicMock(), World(GPU), mock.Mock()
    session.run = SimpleNamespace(mode="nd")
    session.args = SimpleNamespace(opt_level="O0", freeze=False)
    session.ledger.totals.return_value = {}
    session.train.blank = lambda side: torch.zeros(1, 3, side or 32, side or 32)
    model, history = torch.nn.Conv2d(3, 8, 1), [dict(zip(tags, x, strict=True)) for x in epochs]
    session.state = SimpleNamespace(sharded=False, history=history, model=model)
    flop = 3 * 2 * 3 * 8 * 16**2  # of a small image
    assert report.used(session) == {"mfu": pytest.approx(4e6 * flop / 8.1e12)}
    for record in history:
        del record["Size/train"]
    assert report.used(session) == {"mfu": pytest.approx(2e6 * 4 * flop / 8.1e12)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GeForce")  # of unknown peak
    session.ledger.totals.return_value = {}
    assert report.used(session) == {}


def test_gpus_of_data_parallel_are_all_of_the_machine(monkeypatch):
    """Its one process does not measure the energy of the others. The images are those since its
    start in the fourth step of an epoch of five."""
    for gpus, joules in ((4, None), (1, 5.0)):
        training = mock.MagicMock(began=(1, 3), world=World(GPU), global_batch=10)
        training.state, training.train.sampler.steps_per_epoch = mock.Mock(epoch=3, step=1), 5
        training.ledger.entry.gpus, training.monitor.joules.return_value = gpus, 5.0
        Training.write_ledger(training)
        assert training.ledger.write.call_args.args == (80, joules)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for mode, device, gpus in (("dp", GPU, 4), ("dp", torch.device("cpu"), 1), ("ddp", GPU, 1)):
        session = SimpleNamespace(world=World(device), run=SimpleNamespace(mode=mode))
        assert report.gpu_count(session) == gpus
