"""What a step costs with each way to exchange gradients: known tables, equalities, monotony."""

from dataclasses import replace

import pytest
from forecast import model
from forecast.model import Bucket, Link

from utils.comm import methods

MI = 2**20 // 4  # float32 values in a MiB
# VGG19 with 20 classes as DDP packs it: 139.65 M values.
VGG19 = (
    *(Bucket(64 * MI, 0.33), Bucket(392 * MI, 0.34), Bucket(27 * MI, 0.38), Bucket(27 * MI, 0.53)),
    Bucket(139_652_180 - 510 * MI, 1.0),
)
SLOW = Link(4, bytes_per_s=1e8, latency_s=1e-4)
PLAIN = methods.parse("fp32")


def step(name: str, compute: float, gbit: float, nodes: int, codec: float | None = 0.0) -> float:
    link = Link(nodes, gbit * 1e9 / 8)
    return model.step_seconds(compute, VGG19, link, methods.parse(name), codec)


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


@pytest.mark.parametrize("name", ["fp32", "fp16", "int8", "int4", "powersgd:4"])
def test_a_slower_link_and_more_nodes_never_help(name):
    steps = [[step(name, 0.2, gbit, nodes, None) for nodes in (1, 2, 4, 8)] for gbit in (25, 10, 1)]
    for row in (*steps, *zip(*steps, strict=True)):
        assert list(row) == sorted(row)
    assert steps[0][0] == 0.2


def test_what_is_there_early_is_hidden_and_the_rest_is_not():
    seconds = model.exchange_seconds(4 * MI, SLOW)
    assert model.step_seconds(9.0, [Bucket(MI, 0.1)], SLOW, PLAIN) == 9.0
    assert model.step_seconds(9.0, [Bucket(MI, 1.0)], SLOW, PLAIN) == pytest.approx(9 + seconds)
    # The second has to wait for the first.
    both = [Bucket(MI, 1.0), Bucket(MI, 1.0)]
    assert model.step_seconds(9.0, both, SLOW, PLAIN) == pytest.approx(9 + 2 * seconds)


def test_arithmetic_takes_time_of_the_device():
    codec = 1.0 / MI  # a second for the bucket
    early, late = [Bucket(MI, 0.1)], [Bucket(MI, 1.0)]
    fast, how = replace(SLOW, bytes_per_s=1e15, latency_s=0), methods.parse("fp16")
    assert model.step_seconds(9.0, early, fast, how, codec) == pytest.approx(10)
    seconds = model.exchange_seconds(2 * MI, SLOW)
    assert model.step_seconds(9.0, late, SLOW, how, codec) == pytest.approx(10 + seconds)


def test_bytes_of_a_bucket_are_those_of_its_tensors():
    bucket = Bucket(100_000 + 900, 1.0, ((1000, 100), (3, 3)))
    assert model.wire_bytes(bucket, PLAIN) == 4 * bucket.values
    assert model.wire_bytes(bucket, methods.parse("powersgd:2")) == 4 * (1100 * 2 + 900)
