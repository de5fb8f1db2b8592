"""scripts/bench_network.py: that it measures what it claims to; not how fast anything is."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from bench import network_table, sleeping
from bench.network_table import Case
from conftest import python, shell
from forecast import buckets, model

from utils.comm import methods
from utils.launch.network import free_port

BENCH = "scripts/bench_network.py"
CASE = Case("resnet18", 10, "amp", 0.2, 10.0, 2, ("fp32", "fp16"), slow_down=10, shrink=16)


@pytest.fixture
def group(tmp_path):
    """A process group of one."""
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sleeping_model(layers: buckets.Layers, compute_s: float) -> sleeping.Sleeping:
    values = sum(bucket.values for bucket in buckets.fill(layers))
    return sleeping.Sleeping(layers, compute_s, torch.zeros(values), torch.randn(values))


@pytest.mark.parametrize("times", [1, 16])
def test_ddp_sees_the_buckets_of_the_model_in_their_order(times, group):
    layers = buckets.shrink(buckets.layers("resnet18", 10), times)
    replica = sleeping.replica(sleeping_model(layers, 0.0), times)
    seen = []

    def watch(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append((bucket.buffer().numel(), bucket.buffer().abs().sum() > 0))
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    replica.register_comm_hook(None, watch)
    for _ in range(2):  # the first step finds the order
        seen.clear()
        replica(torch.zeros(1)).backward()
    wanted = buckets.fill(layers, times)
    assert seen == [(one.values, True) for one in wanted]
    whole = sum(one.values for one in buckets.of("resnet18", 10))
    assert sum(one.values for one in wanted) == pytest.approx(whole / times, rel=0.02)


def test_it_sleeps_as_long_as_the_model_computes():
    layers = buckets.layers("resnet18", 10)
    model = sleeping_model(layers, 6.0)
    naps = []
    model.naps.sleep = naps.append
    number = model(torch.zeros(1))
    assert naps == [2.0]  # forward
    for layer in (one for one in model.layers if len(one.own)):
        layer.own[0].register_post_accumulate_grad_hook(lambda _: seen.append(sum(naps)))
    seen: list[float] = []
    number.backward()
    assert sum(naps) == pytest.approx(6.0)
    ready = sorted({one[0] for one in layers})
    assert seen == pytest.approx([6 * share for share in ready])


def test_naps_make_up_for_oversleeping(monkeypatch):
    clock, slept = [0.0], []

    def oversleep(seconds: float) -> None:
        slept.append(round(seconds, 9))
        clock[0] += seconds + 0.25

    monkeypatch.setattr(sleeping.time, "sleep", oversleep)
    monkeypatch.setattr(sleeping.time, "perf_counter", lambda: clock[0])
    naps = sleeping.Naps()
    for seconds in (1.0, 1.0, 0.1, 0.2):
        naps.sleep(seconds)
    assert slept == [1.0, 0.75, 0.05]  # the third was 0.15 less than nothing: the debt goes on


def found(**methods: tuple[float, float]) -> dict:
    """Measurements of methods: seconds and bytes per step."""
    return {
        name: {"rounds": [{"step_s": step, "bytes": size}] * 3}
        for name, (step, size) in methods.items()
    }


def test_a_row_is_in_units_of_the_real_thing():
    # 10 x slower, 16 x smaller; 50 MB at 10 Gbit/s take 40 ms, of which the step is 10 ms longer.
    measured = found(compute=(2.0, 100.0), fp32=(2.1, 50e6 / 16), fp16=(2.0, 25e6 / 16))
    plain, half = (network_table.row_of(CASE, name, measured) for name in CASE.methods)
    assert (plain.sent, plain.compute_s, plain.step_s) == pytest.approx((50e6, 0.2, 0.21))
    assert plain.hidden == pytest.approx(0.75)
    assert (plain.speed_up, half.speed_up) == pytest.approx((1, 1.05))
    assert half.hidden == 1
    head, rows = network_table.table([(CASE, measured)])
    assert [len(row) for row in rows] == [len(head)] * 2
    assert (
        "compute was 10 times longer" in " ".join(network_table.remarks([(CASE, measured)])).lower()
    )


@pytest.mark.parametrize(("step", "said"), [(2.09, "1 of 1"), (2.3, "0 of 1")])
def test_the_choice_of_auto_is_beside_the_best(step, said):
    measured = found(compute=(2.0, 1.0), fp32=(2.4, 1.0), fp16=(2.0, 1.0), auto=(step, 1.0))
    measured["auto"]["method"] = "int8"
    case = replace(CASE, methods=("fp32", "fp16", "auto"))
    assert f"best method beside it in {said} cases" in " ".join(
        network_table.remarks([(case, measured)])
    )


def test_two_nodes_on_the_loopback(tmp_path):
    options = (
        "--models resnet50 --nodes 2 --gbit 10 --compute-s 0.01 --methods fp32,int8 --rounds 1"
    )
    options += " --steps 1 --shrink 16 --master 127.0.0.1 --interface lo"
    options += f" --port {free_port()}"
    files = f"--json {tmp_path}/found.json --results {tmp_path}/RESULTS.md"
    line = f"python {BENCH} {options} --rank 1 & python {BENCH} {options} {files}; wait"
    # Where it is allowed, with a loopback of their own: then nobody else's bytes are counted.
    own = os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
    if own:
        line = f"unshare --net bash -c 'ip link set lo up; {line}'"
    (done,) = shell(line)
    assert done.code == 0, done.err
    assert "resnet50 amp" in done.out
    assert "bench_network begin ways-to-exchange-gradients" in (tmp_path / "RESULTS.md").read_text()
    ((case, measured),) = [
        one.values() for one in json.loads((tmp_path / "found.json").read_text())
    ]
    packed = buckets.fill(buckets.shrink(buckets.layers("resnet50"), 16), 16)
    for name in ("fp32", "int8"):
        (one,) = measured[name]["rounds"]
        size = sum(model.wire_bytes(bucket, methods.parse(name)) for bucket in packed)
        wanted = 2 * methods.sent_bytes(size, case["nodes"])
        assert one["bytes"] > wanted  # of both nodes, as they share the interface; and headers
        assert not own or one["bytes"] < 1.15 * wanted
        assert one["step_s"] >= 0.01
    assert not own or measured["compute"]["rounds"][0]["bytes"] < 20_000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--methods", "fp32,fp8"), "unknown method fp8"),
        (("--models", "resnet51"), "--models takes vgg19, resnet50, vit_b_32"),
        (("--nodes", "1,2"), "at least 2"),
        (("--nodes", "2,4", "--master", "127.0.0.1"), "one number with --master"),
        (("--gbit", "0"), "--gbit 0 is not a list"),
    ],
)
def test_errors_are_one_sentence(arguments, sentence):
    done = python(BENCH, *arguments)
    assert done.code == 2
    assert sentence in done.sentence
