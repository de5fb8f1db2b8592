"""What a step costs with each way to exchange gradients: equalities, monotony, known tables."""

from dataclasses import replace

import pytest
import torch

from utils.comm import auto, cost
from utils.comm.cost import Bucket, Link
from utils.comm.lane import Alone
from utils.errors import UserError
from utils.processes.distributed import World

MI = 2**20 // 4  # float32 values in a MiB
# VGG19 with 20 classes as DDP packs it: 139.65 M values.
VGG19 = (
    *(Bucket(64 * MI, 0.33), Bucket(392 * MI, 0.34), Bucket(27 * MI, 0.38), Bucket(27 * MI, 0.53)),
    Bucket(139_652_180 - 510 * MI, 1.0),
)
SLOW = Link(4, bytes_per_s=1e8, latency_s=1e-4)


def step(name: str, compute: float, gbit: float, nodes: int, buckets=VGG19, codec: float = 0.0):
    link = Link(nodes, gbit * 1e9 / 8)
    return cost.step_seconds(compute, buckets, link, cost.method(name), codec)


@pytest.mark.parametrize(
    ("compute", "gbit", "name", "efficiencies"),
    [
        (0.78, 7, "fp32", (0.87, 0.64, 0.56)),
        (0.78, 7, "fp16", (0.98, 0.97, 0.95)),
        (0.78, 7, "int8", (0.99, 0.99, 0.98)),
        (0.20, 7, "fp32", (0.28, 0.19, 0.17)),
        (0.20, 7, "fp16", (0.52, 0.37, 0.32)),
        (0.20, 7, "int8", (0.88, 0.65, 0.57)),
        (0.20, 21, "fp32", (0.71, 0.52, 0.45)),
        (0.20, 21, "fp16", (0.98, 0.88, 0.78)),
    ],
)
def test_an_independent_simulation_is_met(compute, gbit, name, efficiencies):
    found = [compute / step(name, compute, gbit, nodes) for nodes in (2, 4, 8)]
    assert found == pytest.approx(efficiencies, abs=0.015)


@pytest.mark.parametrize("name", ["fp32", "fp16", "int8", "int4", "powersgd:4", "localsgd:8"])
def test_a_slower_link_and_more_nodes_never_help(name):
    steps = [[step(name, 0.2, gbit, nodes, codec=None) for nodes in (1, 2, 4, 8)]
             for gbit in (25, 10, 5, 1)]  # fmt: skip
    for row in (*steps, *zip(*steps, strict=True)):
        assert list(row) == sorted(row)
    assert steps[0][0] == 0.2


def test_what_is_there_early_is_hidden_and_the_rest_is_not():
    seconds = cost.exchange_seconds(4 * MI, SLOW)
    plain = cost.method("fp32")
    assert cost.step_seconds(9.0, [Bucket(MI, 0.1)], SLOW, plain) == 9.0
    assert cost.step_seconds(9.0, [Bucket(MI, 1.0)], SLOW, plain) == pytest.approx(9 + seconds)
    # The second has to wait for the first.
    both = [Bucket(MI, 1.0), Bucket(MI, 1.0)]
    assert cost.step_seconds(9.0, both, SLOW, plain) == pytest.approx(9 + 2 * seconds)


def test_arithmetic_takes_time_of_the_device():
    codec = 1.0 / MI  # a second for the bucket
    early, late = [Bucket(MI, 0.1)], [Bucket(MI, 1.0)]
    fast, how = replace(SLOW, bytes_per_s=1e15, latency_s=0), cost.method("fp16")
    assert cost.step_seconds(9.0, early, fast, how, codec) == pytest.approx(10)
    seconds = cost.exchange_seconds(2 * MI, SLOW)
    assert cost.step_seconds(9.0, late, SLOW, how, codec) == pytest.approx(10 + seconds)


def test_bytes_on_the_wire():
    bucket = Bucket(100_000 + 900, 1.0, ((1000, 100), (3, 3)))
    wire = {name: cost.wire_bytes(bucket, cost.method(name)) for name in ("fp32", "fp16", "int8")}
    assert wire["fp32"] == 4 * bucket.values == 2 * wire["fp16"]
    assert wire["int8"] == pytest.approx(bucket.values * 260 / 256)
    assert cost.wire_bytes(bucket, cost.method("int4")) == pytest.approx(bucket.values * 68 / 128)
    # The factors of the large matrix; the small one is no smaller as factors.
    assert cost.wire_bytes(bucket, cost.method("powersgd:2")) == 4 * (1100 * 2 + 900)
    # Ring: each node sends all but its own part, twice.
    assert cost.sent_bytes([bucket], SLOW, cost.method("fp32")) == 1.5 * wire["fp32"]
    assert cost.sent_bytes([bucket], SLOW, cost.method("localsgd:4")) == 1.5 * wire["fp32"] / 4


def test_local_sgd_pays_all_of_its_exchange_once_in_a_period():
    plain = cost.all_exchanges_seconds(VGG19, SLOW, cost.method("fp32"))
    for period in (2, 8):
        how = cost.method(f"localsgd:{period}")
        assert cost.step_seconds(0.2, VGG19, SLOW, how) == pytest.approx(0.2 + plain / period)


def test_the_mildest_that_is_nearly_best():
    steps = [("fp32", 2.0), ("fp16", 1.04), ("int8", 1.0), ("powersgd:4", 1.01)]
    assert cost.mildest(steps) == "fp16"
    assert cost.mildest(steps, within=0.01) == "int8"
    assert cost.mildest([("fp32", 1.0), ("fp16", 1.0)]) == "fp32"


@pytest.mark.parametrize(
    "name", ["", "fp8", "fp16:2", "powersgd:", "powersgd:0", "powersgd:x", "localsgd:-1", "auto"]
)
def test_unknown_methods(name):
    with pytest.raises(UserError, match=r"unknown method .*powersgd"):
        cost.method(name)


def test_known_methods():
    for name in ("fp32", "bf16", "powersgd:2", "localsgd:16"):
        assert cost.method(name).name == name
    assert cost.method("powersgd").name == "powersgd:4"
    assert cost.method("localsgd").name == "localsgd:8"


def test_exchanges_that_take_longer_than_the_link_says():
    buckets = [cost.Bucket(1000, 0.5), cost.Bucket(1000, 1.0)]
    link, int8 = cost.Link(2, 1000.0, 0.0), cost.method("int8")
    one = 1000 * int8.bytes_per_value / 1000.0  # seconds
    assert cost.step_seconds(1.0, buckets, link, int8, 0.0) == pytest.approx(0.5 + 2 * one)
    assert cost.step_seconds(1.0, buckets, link, int8, 0.0, 3.0) == pytest.approx(0.5 + 6 * one)


def test_auto_tries_how_much_longer(monkeypatch):
    """By a clock that only the collectives move: as of a link with the rate that auto measured,
    but for the exchange of parts, which gets a third of it."""
    now, rate = [0.0], 1e6
    monkeypatch.setattr(auto.time, "perf_counter", lambda: now[0])
    for name in ("barrier", "all_reduce"):
        monkeypatch.setattr(auto.dist, name, lambda *_, **__: None)

    class Slow(Alone):
        def pass_time(self, values, share):
            now[0] += share * values.nbytes * (self.size - 1) / self.size / rate

        def exchange(self, parts):
            self.pass_time(parts, 3)
            return parts

        def gather(self, part):
            whole = super().gather(part)
            self.pass_time(whole, 1)
            return whole

        def sum(self, values):
            self.pass_time(values, 2)

    world = World(torch.device("cpu"), 0, 4, 0, 1, 4, None)
    link, buckets = cost.Link(4, rate, 0.0), [cost.Bucket(4_000_000, 1.0, ((2000, 2000),))]

    def found(name):
        return auto.stretch(name, 0.0, buckets, link, world, Slow(4))

    assert found("int8") == pytest.approx((3 + 1) / 2, rel=0.02)
    assert found("powersgd:4") == pytest.approx(1, rel=0.02)
    assert found("fp16") == 1
