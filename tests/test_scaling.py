"""The forecast of step time on more nodes: arithmetic, errors on published runs, the tool."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torchvision
from conftest import python
from forecast import buckets, model, published, scaling
from forecast.model import Bucket
from forecast.scaling import Cluster, Measured, Workload
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

from utils.tensorboard import entry

TOOL = "scripts/forecast_scaling.py"
WORK = Workload(128, 400, (Bucket(5_000_000, 0.4), Bucket(12_000_000, 0.6), Bucket(8_000_000, 1.0)))


@pytest.mark.parametrize("arch", [*buckets.USUAL, "squeezenet1_1"])
def test_parameters_are_those_of_torchvision(arch):
    with torch.device("meta"):
        model = torchvision.models.get_model(arch, num_classes=37)
    assert scaling.parameters(arch, 37) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("arch", ["resnet18", "vit_b_32"])
def test_the_stored_table_is_what_the_model_says(arch):
    stored, traced = buckets.layers(arch, 20), buckets.trace(arch, 20, 224)
    assert [one[1:] for one in stored] == [one[1:] for one in traced]
    assert [one[0] for one in stored] == pytest.approx([one[0] for one in traced], abs=0.005)


def test_grouped_convolutions_count_what_they_cost():
    # Backward is twice forward: the last layer's gradient is there after a third of the step.
    assert buckets.layers("mobilenet_v2", image_size=96)[0][0] == pytest.approx(1 / 3, abs=0.02)


def test_buckets_are_those_of_ddp(tmp_path):
    model = torchvision.models.resnet18(num_classes=10)
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        replica = DistributedDataParallel(model)
        seen: list[int] = []

        def watch(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            seen.append(bucket.buffer().numel())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        replica.register_comm_hook(None, watch)
        for _ in range(2):  # the first step finds the order
            seen.clear()
            nn.functional.cross_entropy(
                replica(torch.randn(2, 3, 32, 32)), torch.tensor([0, 1])
            ).backward()
    finally:
        dist.destroy_process_group()
    assert [one.values for one in buckets.of("resnet18", 10)] == seen


def test_buckets_of_vgg19_are_ready_early():
    found = [
        (round(4 * one.values / 2**20), round(one.ready, 2)) for one in buckets.of("vgg19", 20)
    ]
    assert found == [(64, 0.33), (392, 0.34), (27, 0.39), (27, 0.53), (22, 1.0)]


def test_one_gpu_computes_and_nothing_else():
    alone = scaling.forecast(WORK, Cluster(), 1)
    assert alone.step_s == WORK.compute_s == 0.32
    assert alone.images_per_s == pytest.approx(400)
    assert alone.efficiency == 1.0


def exchange(size: float, gpus: int, cluster: Cluster) -> float:
    return model.exchange_seconds(size, cluster.link(gpus))


def test_the_ring_moves_what_it_must():
    # 4 T4 per node, two nodes: 179 MB per node and step, 143 ms at 10 Gbit/s (ResNet-50, fp32).
    cluster = Cluster(gpus_per_node=4, network_gbit=10, protocol=1, latency_s=0, local_latency_s=0)
    size = scaling.parameters("resnet50") * 4
    assert exchange(size, 8, cluster) == pytest.approx(0.143, abs=0.001)
    assert exchange(size / 2, 8, cluster) == pytest.approx(0.0715, abs=0.001)
    # Within one node, the node's own links decide.
    local = exchange(size, 4, replace(cluster, local_gbit=80))
    assert local == pytest.approx(2 * 3 / 4 * size * 8 / 80e9)


def test_latency_grows_with_the_logarithm_of_many_nodes():
    cluster = Cluster(latency_s=1e-3)
    few, many = (exchange(1000.0, nodes, cluster) for nodes in (2, 1024))
    assert few == pytest.approx(2e-3, rel=0.01)
    assert many == pytest.approx(20e-3, rel=0.01)


def test_communication_hides_behind_compute_except_its_end():
    cluster = Cluster(network_gbit=10, jitter=0)
    last = exchange(4 * WORK.buckets[-1].values, 2, cluster)
    assert scaling.forecast(WORK, cluster, 2).exposed_s == pytest.approx(last)
    slow = scaling.forecast(WORK, replace(cluster, network_gbit=1), 2)
    hidden = (1 - WORK.buckets[0].ready) * WORK.compute_s
    assert slow.exposed_s == pytest.approx(slow.exchange_s - hidden)


def test_the_choice_is_the_mildest_that_is_nearly_best():
    fast, slow = (Cluster(network_gbit=gbit) for gbit in (1000, 12))
    assert scaling.choice(WORK, fast, 2)[1] == "fp32"
    found, name = scaling.choice(WORK, slow, 8)
    assert name == "fp16"
    assert found.step_s < scaling.forecast(WORK, slow, 8).step_s
    real = replace(WORK, buckets=buckets.of("resnet50"))
    assert scaling.choice(real, replace(slow, network_gbit=0.1), 8)[1] == "powersgd:32"


def test_published_runs_are_met():
    errors = published.hal_errors(published.HAL_CLUSTER)
    errors += published.g4dn_errors(published.G4DN_CLUSTER)
    assert len(errors) == 10
    assert sum(abs(error) <= 0.15 for error in errors) == 10
    # By its data sheet the network of g4dn is faster than eight nodes saw it.
    assert 6 < 10 * published.G4DN_CLUSTER.protocol < 8


def test_fits_find_what_made_the_points():
    cluster = Cluster(network_gbit=1, jitter=0.05, protocol=0.7)
    points = [Measured(n, scaling.forecast(WORK, cluster, n).step_s) for n in (1, 2, 4, 8)]
    unknown = replace(WORK, images_per_s=1.0)
    assert scaling.fit_compute(unknown, cluster, points[2]).images_per_s == pytest.approx(400)
    fitted = scaling.fit_jitter(unknown, replace(cluster, jitter=0.5), points[1], points[3])
    assert fitted.jitter == pytest.approx(0.05)
    network = scaling.fit_network(WORK, replace(cluster, protocol=0.9), points[1])
    assert network.protocol == pytest.approx(0.7)
    assert scaling.errors(WORK, network, points) == pytest.approx([0] * 4, abs=1e-6)


def test_from_which_node_on():
    perfect = Cluster(network_gbit=1e9, latency_s=0, jitter=0)
    assert scaling.not_worth_it(WORK, perfect, 64) is None
    node, gain = scaling.not_worth_it(WORK, Cluster(jitter=0.06), 256)
    assert 50 < node < 256
    assert 0.4 < gain < 0.5
    # A network so slow that two nodes are slower than one.
    node, gain = scaling.not_worth_it(WORK, Cluster(network_gbit=0.1), 64)
    assert node == 2
    assert gain < 0


# ---- the tool


def forecast(*arguments: object):
    return python(TOOL, *arguments)


def test_table_picture_and_verdict(tmp_path):
    done = forecast(
        *("--arch", "resnet50", "--batch-size", "208", "--gpu-images-per-s", "400"),
        *("--network-gbit", "25", "--nodes", "1,2,4,8,...,1024", "--out", tmp_path / "f.png"),
    )
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines() if line.endswith("%")]
    assert [int(row[0]) for row in rows] == [2**k for k in range(11)]
    assert "Not worth it: node " in done.out
    assert (tmp_path / "f.png").stat().st_size > 10_000


def test_fp16_halves_the_bytes():
    arguments = ("--gpu-images-per-s", "400", "--nodes", "2")
    assert "102.2 MB of fp32" in forecast(*arguments).out
    assert "51.1 MB of fp16" in forecast(*arguments, "--comm", "fp16").out


def test_all_methods_are_compared():
    arguments = ("-a", "vgg19", "--classes", "20", "--gpu-images-per-s", "160", "-b", "32")
    out = forecast(*arguments, "--nodes", "1,2,4,8", "--comm", "powersgd:2").out
    _, below = out.split("efficiency, %, on GPUs")
    rows = {words[0]: words[1:] for words in map(str.split, below.splitlines()[1:7]) if words}
    assert list(rows) == ["fp32", "fp16", "int8", "int4", "powersgd:32", "powersgd:2"]
    efficiency = {name: [int(word) for word in row] for name, row in rows.items()}
    for found in efficiency.values():
        assert found == sorted(found, reverse=True)
    assert efficiency["fp32"][2] < efficiency["fp16"][2] < efficiency["int8"][2]
    assert "--comm auto takes  int8  int4  int4" in below


def write_run(folder, gpus, nodes, rate, batch=32):
    folder.mkdir()
    found = {"arch": "resnet18", "classes": 10, "world_size": gpus, "nodes": nodes}
    found |= {"global_batch": gpus * batch, "images_per_s": rate}
    (folder / "summary.json").write_text(json.dumps(found))
    return folder


def test_from_runs(tmp_path):
    runs = [write_run(tmp_path / str(n), n, n, 100 * n**0.9) for n in (4, 1, 2)]
    done = forecast("--from", *runs, "--nodes", "1,2,4,8", "--network-gbit", "1")
    assert done.code == 0, done.err
    assert "resnet18: 32 images per GPU at 100 images/s alone, 44.7 MB" in done.out
    rows = {line.split()[1]: line.split() for line in done.out.splitlines() if "%" in line}
    assert rows["1"][-3:] == ["320.0", "+0.0", "%"]
    assert rows["8"][-2:] == ["-", "-"]
    fitted = forecast("--from", *runs, "--nodes", "1,2,4", "--fit-network")
    (second,) = [line for line in fitted.out.splitlines() if line.split()[:1] == ["2"]]
    assert second.split()[-2] == "+0.0"


def test_from_event_files_of_an_older_suite(tmp_path):
    folder = tmp_path / "Dec01_21-13-35_hal02_resnet50_gpux2_b208_cpu20_opt02"
    writer = SummaryWriter(str(folder))
    for epoch, rate in enumerate((900.0, 1582.0, 1580.0, 1584.0), start=1):
        writer.add_scalar("Throughput/train", rate, epoch)
    writer.close()
    done = forecast("--from", folder, "--gpus", "2,4,8", "--gpus-per-node", "4")
    assert done.code == 0, done.err
    (row,) = [line for line in done.out.splitlines() if line.split()[:2] == ["1", "2"]]
    assert row.split()[-3] == "263.0"


def test_from_event_files_of_a_run_that_was_killed(tmp_path):
    options = {"arch": "resnet18", "gpus": 2, "nodes": 2, "batch_per_gpu": 32, "global_batch": 64}
    with SummaryWriter(str(tmp_path / "any_name")) as writer:
        for part in entry(options | {"class_count": 10}):
            writer.file_writer.add_summary(part, 0)
        writer.add_scalar("Throughput/train", 200.0, 1)
    done = forecast("--from", tmp_path / "any_name", "--nodes", "2")
    assert "resnet18: 32 images per GPU at" in done.out, done.err
    assert "44.7 MB" in done.out
    (row,) = [line for line in done.out.splitlines() if line.split()[:2] == ["2", "2"]]
    assert row.split()[-3] == "320.0"


@pytest.mark.parametrize("found", ["", "[]", '{"arch": "resnet18"}', '{"images_per_s": null}'])
def test_a_summary_without_a_speed(found, tmp_path):
    (tmp_path / "summary.json").write_text(found)
    assert "summary.json has no speed" in forecast("--from", tmp_path).sentence
    (tmp_path / "summary.json").unlink()
    assert "has no summary.json, and no" in forecast("--from", tmp_path).sentence


def test_a_run_of_another_kind_is_refused(tmp_path):
    runs = [write_run(tmp_path / str(batch), 1, 1, 100, batch) for batch in (32, 64)]
    assert "such runs cannot share a forecast" in forecast("--from", *runs).sentence


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "how fast is one GPU"),
        (("--gpu-images-per-s", "400", "--nodes", "1,4,2"), "not a rising list"),
        (("--gpu-images-per-s", "400", "--nodes", "...,8"), "not a rising list"),
        (("--gpu-images-per-s", "400", "--nodes", "1,2,..."), "not a rising list"),
        (("--gpu-images-per-s", "-1"), "--gpu-images-per-s: -1 is not more than 0"),
        (("--gpu-images-per-s", "400", "--protocol", "0"), "--protocol: 0 is not more than 0"),
        (("--gpu-images-per-s", "400", "-a", "resnet51"), "unknown arch"),
        (("--gpu-images-per-s", "400", "--comm", "fp8"), "unknown method fp8"),
        (("--from", "nowhere"), "nowhere is not a run directory"),
        (("--gpu-images-per-s", "400", "--fit-network"), "needs a second RUN"),
    ],
)
def test_errors_are_one_sentence(arguments, sentence):
    done = forecast(*arguments)
    assert done.code == 2
    assert sentence in done.sentence


def test_the_errors_against_published_runs_are_printed_and_drawn(tmp_path):
    done = python("scripts/forecast/published.py", "--figures", tmp_path)
    assert done.code == 0, done.err
    assert "10 of 10" in done.out
    assert {file.name for file in tmp_path.iterdir()} == {"forecast_hal.png", "forecast_g4dn.png"}
