"""What a step costs with each way to exchange gradients: equalities, monotony, known tables."""

import math
from dataclasses import replace

import pytest

from utils.comm import auto, cost
from utils.comm.cost import Bucket, Link
from utils.errors import UserError

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


@pytest.fixture
def search(monkeypatch):
    """Builds auto's search, whose steps take what a table says; the link seems as fast as SLOW."""

    def build(seconds):
        class Timing:
            def __init__(self, *_):
                self.done = False

            def begin_step(self):
                self.done = True

            def compute(self):
                return 9.0, [Bucket(MI, 1.0)]

            def end(self):
                return seconds[found.method]

        monkeypatch.setattr(auto, "Timing", Timing)
        monkeypatch.setattr(auto, "measure_link", lambda _: SLOW)
        monkeypatch.setattr(auto, "arithmetic", lambda *_: 0.0)
        found = auto.Search(list(seconds), None, None)
        taken = [found.method]
        while not found.sentence:
            found.begin_step()
            taken += [found.method] * (found.method != taken[-1])
        return found, taken

    return build


SLOW_FP32 = {"fp32": 20.0, "bf16": 9.2, "int8": 9.1, "int4": 9.1}


def test_auto_tries_what_it_would_take(search):
    found, taken = search(SLOW_FP32)
    assert taken == ["fp32", "bf16"]
    assert found.sentence.startswith(
        "communication: bf16. 1 MB of gradients per step at 0.8 Gbit/s"
    )
    tried = "steps took 20000 ms with fp32, 9200 ms with bf16"
    assert f"{tried}, would take at least 9004 ms with int8, 9002 ms with int4" in found.sentence
    assert "saves 54% of the time" in found.sentence


def test_auto_takes_no_method_that_does_not_keep_its_word(search):
    _, taken = search(SLOW_FP32 | {"bf16": 12.0})
    assert taken == ["fp32", "bf16", "int8"]
    # All are bad: the mildest of the best, once all that promised more were tried.
    found, taken = search({"fp32": 20.0, "bf16": 19.5, "int8": 30.0, "int4": 30.0})
    assert taken == ["fp32", "bf16", "int8", "int4", "fp32"]
    assert "saves" not in found.sentence
    # No weight changed in its steps: the forecast has to do.
    _, taken = search(SLOW_FP32 | {"bf16": math.inf})
    assert taken == ["fp32", "bf16"]
