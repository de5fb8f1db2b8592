"""scripts/doctor.sh: no finding about healthy nodes, and one about each defect that was put in."""

import argparse
import functools
import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import doctor
import pytest
import torch
from checks import node as one_node
from checks import together
from checks.findings import ERROR, OK, WARNING, Finding
from conftest import ROOT, TIMEOUT, Result, draw_folder
from joined import command
from nodes import Node, Nodes, need
from running import free_port
from test_gpus import T4, simulate

from utils.data.opening import class_folders, open_source
from utils.start.cores import usable_cores
from utils.start.world import World

PORT = 8888
OPTIONS = ("--batch-size", "16", "--image-size", "32", "--wait", str(TIMEOUT))
CLOSED = "node{0} (node {0}) cannot connect to node{1} (node {1})"


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two healthy nodes, with links so slow that other load of the machine does not change them."""
    need("nft", "tc")
    with Nodes(2) as two:
        set_speeds(two, 300, 300)
        yield two


def set_speeds(nodes: list[Node], *mbit: int) -> None:
    """Limit what each node sends."""
    for node, speed in zip(nodes, mbit, strict=True):
        limit = f"tbf rate {speed}mbit burst 64kb latency 20ms"
        assert node.run(f"tc qdisc replace dev eth0 root {limit}").code == 0


def ask_doctor(
    nodes: list[Node], folder: Path, *options: object, code: int, **env: str
) -> list[Result]:
    """Run the doctor on both nodes, on node 1 with ``env``. Both must end with ``code``."""
    line = [*OPTIONS, "--data", folder, "--nodes", 2, "--master", nodes[0].ip, "--rank", "{rank}"]
    one, other = ([str(x).format(rank=rank) for x in (*line, *options)] for rank in (0, 1))
    with (
        nodes[0].fork("scripts/doctor.py", *one) as first,
        nodes[1].fork("scripts/doctor.py", *other, **env) as second,
    ):
        results = [first.result(), second.result()]
    assert [one.code for one in results] == [code] * 2, results
    assert not [one for one in results if "Traceback" in one.err + one.out]
    return results


def bad(result: Result) -> list[str]:
    """The lines that are warnings or errors."""
    return [line for line in result.out.splitlines() if re.match("(.node[01]. )?[!✗] ", line)]


def test_over_ssh_from_one_machine(nodes, folder):
    for node in nodes:
        node.start_sshd()
    hosts = nodes[0].folder / "hosts"
    line = ["bash", str(ROOT / "scripts/doctor.sh"), "--need", "0.01", str(hosts), *OPTIONS]
    line += ["--data", str(folder), "--python", sys.executable, "--env", "CUDA_VISIBLE_DEVICES="]

    def ask(listed: str, *more: object, code: int) -> Result:
        hosts.write_text(listed)
        done = nodes[0].run([*line, *more])
        assert done.code == code, done
        return done

    done = ask("# two nodes\nroot@node0 slots=1\n\nnode1  # the second\n", code=0)
    assert not bad(done)
    for text in ("all 2 nodes are here", "data: train 60 images", "node 1 (node1) decodes "):
        assert text in done.out
    step = "resnet50: each node sends 102 MB .*; a GPU computes the step in 1600000 ms"
    assert re.search(step, done.out), "16 images at 0.01 a second"
    assert "[node0] node 0: all is well" in done.out
    # A node that ssh cannot reach decides the exit code.
    assert "error: ssh to node9 failed" in ask("node0\nnode9\n", code=2).err
    # So does an error, which both nodes report: the closed ports, two in each direction.
    for node in nodes:
        node.block_ports(f"1024-2199, 2300-{PORT - 1}, {PORT + 1}-65535")  # between: sshd
    done = ask("node0\nnode1\n", "--port", PORT, code=2)
    assert len(bad(done)) == 2
    for line in bad(done):
        assert [line.count(CLOSED.format(*ways)) for ways in ((0, 1), (1, 0))] == [2, 2]
    assert "open all TCP ports" in done.out


def test_all_defects_of_one_node_are_reported(nodes, folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "data", ignore=shutil.ignore_patterns(".index*"))
    small = tmp_path / "small"
    small.mkdir()
    (other / "train/class_1/002.JPEG").unlink()
    (other / "val/class_1/000.JPEG").write_text("damaged")
    (other / "train/class_2/004.JPEG").unlink()
    (other / "train/class_2/004.JPEG").symlink_to("gone")
    simulate(tmp_path, "470", T4)
    mounts = f"mount --bind {other} {folder} && mount -t tmpfs -o size=400m x {small}"
    assert nodes[1].run(mounts).code == 0
    # A node of these tests shares the machine's clock: Linux has no namespace for it.
    before = "import resource, time\nresource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\n"
    before += "real = time.time\ntime.time = lambda: real() + 30"
    env = {"BEFORE": before, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env |= {"CUDA_VISIBLE_DEVICES": "0", "GLOO_SOCKET_IFNAME": "side0"}
    env |= {"NCCL_SOCKET_IFNAME": "eth7"}
    first, second = ask_doctor(nodes, folder, "--output-dir", small / "runs", code=2, **env)
    words = [
        "! node 1 (node1): NCCL_SOCKET_IFNAME chooses eth7, but eth0 leads to node 0",
        "! node 1 (node1): GLOO_SOCKET_IFNAME chooses side0, but eth0 leads to node 0",
        "! the clock of node 1 (node1) is 30.0 s ahead of that of node 0",
        "! node 1 (node1): a process may open only 512 files",
        "! node 1 (node1): only 0.4 GB of disk",  # on node 0 an error
        f"! node 1 (node1): 1 of the image files that were tried cannot be read, such as {folder}/",
        "✗ node 1 (node1): torch",  # cannot use the GPU
        "! driver differs",
        "✗ DATA/train differs between the nodes: 60 images ",
        "✗ the size of files in DATA/val differs between the nodes",
    ]
    lines = bad(first)
    assert not bad(second)
    assert "node 1: 3 errors, 7 warnings (see node 0)" in second.out
    for start in words:
        assert [one for one in lines if one.startswith(start)], (start, lines)
    assert len(lines) == len(words)
    for text in ("59 images", "class_1: 20 images", "driver 470"):
        assert text in first.out


@pytest.mark.long
def test_the_speed_of_links_and_what_it_means_for_a_step(nodes, folder):
    """200 Mbit/s from node 1, 400 from node 0: the slower one decides."""
    set_speeds(nodes, 400, 200)
    results = ask_doctor(nodes, folder, "--need", "{rank}25", code=1)  # node 0 is the slower one
    link, exchange = sorted(bad(results[0]))
    assert re.match(
        r"! network: node 1 \(node1\) sends to node 0 \(node0\) at 0.\d+ Gbit/s, others reach 0.",
        link,
    )
    sent, step = re.match(
        r"! resnet50: each node sends (\d+) MB .* takes .* in (\d+) ms", exchange
    ).groups()
    assert (sent, step) == ("102", "640")
    assert "node 0: 0 errors, 2 warnings\n" in results[0].out
    gbit, ms = re.search(r"all-reduce reaches (\S+) Gbit/s, (\S+) ms", results[0].out).groups()
    assert 0.1 < float(gbit) < 0.22
    assert float(ms) > 0.01


def test_what_a_gpu_trains_and_the_disk_that_a_run_needs(monkeypatch):
    """A T4: 400 images/s of ResNet-50, with a quarter of the pixels four times as many.

    EfficientNet-B7's published 37.7 GFLOPS are of images of 600 pixels."""
    options = {"need": None, "arch": "resnet50", "image_size": 112}
    rate = one_node.images_per_gpu(argparse.Namespace(**options), ["Tesla T4"])
    assert rate == pytest.approx(1600, rel=0.01)
    options |= {"image_size": 224, "arch": "vgg19"}
    rate = one_node.images_per_gpu(argparse.Namespace(**options), ["Tesla T4"])
    assert rate == pytest.approx(400 * 4.09 / 19.63, rel=0.01)
    options |= {"image_size": 600, "arch": "efficientnet_b7"}
    rate = one_node.images_per_gpu(argparse.Namespace(**options), ["Tesla T4"])
    assert rate == pytest.approx(400 * 4.09 / 37.75, rel=0.01)
    monkeypatch.setattr(one_node.addresses, "interface_towards", lambda _: None)
    for free, levels in ((4e9, [WARNING, None]), (4e8, [ERROR, WARNING]), (6e9, [None, None])):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(one_node.shutil, "disk_usage", lambda _, usage=usage: usage)
        for rank, level in enumerate(levels):
            args = argparse.Namespace(master="x", rank=rank, output_dir="runs")
            found = [x.level for x in one_node.check_machine(args, []) if "of disk" in x.text]
            assert found == ([] if level is None else [level])
    usage.free = 2e8  # of shared memory, too
    for gpus in (["T4"], 2 * ["T4"]):
        texts = [x.text for x in one_node.check_machine(args, gpus)]
        assert (": /dev/shm has only 200 MB free" in texts) == (len(gpus) > 1)
    monkeypatch.setattr(one_node.os, "access", lambda path, mode: not mode & os.W_OK)
    for rank, number in ((0, 1), (1, 0)):  # node 0 alone writes the run directory
        args = argparse.Namespace(master="x", rank=rank, output_dir="runs/new")
        found = [x.level for x in one_node.check_machine(args, []) if "may not write" in x.text]
        assert found == [ERROR] * number


def test_the_speeds_of_a_node_are_those_of_all_its_cores(monkeypatch, folder):
    """By simulated clocks: 60 files are read in 2 s, 64 images take 2 s of one core."""
    source = open_source(folder / "train", class_folders(folder / "train"))
    decode = functools.partial(one_node.decode_speed, size=32, unreadable={})
    for clock, measure, speed in (
        ("perf_counter", functools.partial(one_node.read_speed, unreadable={}), 30),
        ("process_time", decode, 32 * usable_cores()),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(one_node.time, clock, itertools.count(0, 2).__next__)
            assert measure(source) == speed


def test_the_parts_of_a_data_set(tmp_path):
    """Images that cannot be decoded are named, and no part of the speed. Training opens DATA/test,
    too, on all nodes."""
    data = draw_folder(tmp_path, train=3, val=1)
    shutil.copytree(data / "val", data / "test")
    damaged, sources = sorted((data / "train").glob("*/*")), {}
    for path in damaged:
        path.write_bytes(b"x")
    args = argparse.Namespace(rank=0, data=str(data), image_size=32)
    *speeds, found = one_node.check_data(args, 0.1, sources)
    assert [one.level for one in speeds] == [OK, WARNING] and "decodes 0 images" in speeds[1].text
    text = ": 9 of the image files that were tried cannot be read, such as "
    assert found.level == WARNING and found.text.startswith(f"{text}{damaged[0]} (")
    nodes = [together.Report(name, [], {}, [], 0.0, None, [*sources]) for name in "ab"]
    world = World(torch.device("cpu"))
    assert [one.level for one in together.compare_data(sources, nodes, world)] == 3 * [OK]
    nodes[1].parts.remove("test")
    *others, found = together.compare_data(sources, nodes, world)
    assert [one.level for one in others] == 2 * [OK]
    assert (found.level, found.text) == (ERROR, "DATA/test is missing on b")
    nodes[0].parts.remove("test")  # nor is it needed
    assert len([*together.compare_data(sources, nodes, world)]) == 2
    (data / "test/class_2").rename(data / "test/other")
    (found,) = one_node.check_data(args, 0, sources)
    text = f": {data}/train and {data}/test have different classes: only train has class_2"
    assert found.level == ERROR and found.text.startswith(text) and not sources


@pytest.mark.parametrize(
    ("chosen", "wrong"), [("eth7", 1), ("eth", 0), ("=eth0", 0), ("lo,eth0", 0), ("^docker0,lo", 0)]
)
def test_an_interface_that_does_not_lead_to_node_0(monkeypatch, chosen, wrong):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(one_node.addresses, "interface_towards", lambda _: "eth0")
    args = argparse.Namespace(master="x", rank=1, output_dir="runs")
    found = [x.text for x in one_node.check_machine(args, []) if "IFNAME" in x.text]
    words = f": NCCL_SOCKET_IFNAME chooses {chosen}, but eth0 leads to node 0"
    assert found == [words] * wrong


def test_a_node_feeds_all_its_gpus(monkeypatch, folder):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    args = argparse.Namespace(rank=0, nodes=1, master="127.0.0.1", port=free_port(), need=100.0)
    vars(args).update(data=str(folder), arch="resnet50", image_size=32, output_dir="runs")
    monkeypatch.setattr(one_node, "check_machine", lambda _, gpus: gpus.extend(3 * ["T4"]) or ())
    for name, rate in (("read_speed", 299.0), ("decode_speed", 301.0)):
        monkeypatch.setattr(one_node, name, lambda *_, rate=rate: rate)
    texts = [found.text for found in together.check_all(args)]
    assert [text.partition(") ")[2] for text in texts if "images/s" in text] == [
        "decodes 301 images/s",
        "reads 299 images/s, but its GPUs need 300 (see --need)",
    ]


@pytest.mark.parametrize(("gpus", "level"), [([], WARNING), (["T4"], ERROR)])
def test_another_nccl_is_an_error_where_it_is_used(gpus, level):
    facts = dict.fromkeys(together.COMPARED, "1")
    nodes = [
        together.Report(name, own, facts | {"NCCL": name}, [], 0.0, None, [])
        for name, own in (("a", gpus), ("b", []))
    ]
    (found,) = together.compare_facts(nodes)
    assert (found.level, found.text[:12]) == (level, "NCCL differs")


def test_as_many_gpus_of_another_kind_are_noticed():
    nodes = [
        together.Report(gpu, [gpu], together.facts(None, [gpu]), [], 0.0, None, [])
        for gpu in ("T4", "A100")
    ]
    (found,) = together.compare_facts(nodes)
    assert (found.level, found.text[:12]) == (WARNING, "GPUs differs")


@pytest.mark.parametrize(
    ("levels", "said"),
    [
        ([OK], "all is well (1 checks)"),
        ([OK, WARNING], "0 errors, 1 warning"),
        ([OK, WARNING, WARNING, ERROR], "1 error, 2 warnings"),
    ],
)
def test_the_exit_code_is_that_of_the_worst_finding(monkeypatch, capsys, levels, said):
    for name in ("prepare", "print_first_line"):
        monkeypatch.setattr(doctor.launch, name, lambda: None)
    findings = [Finding(level, "text", "") for level in levels]
    monkeypatch.setattr(together, "check_all", lambda _: findings)
    args = argparse.Namespace(rank=0, nodes=1, arch="resnet18")
    assert doctor.examine(args) == {OK: 0, WARNING: 1, ERROR: 2}[levels[-1]]
    assert capsys.readouterr().out.splitlines()[-1] == f"node 0: {said}"


@pytest.mark.parametrize(("given", "waits"), [(["--wait=0.0"], "--wait=0.0"), ([], "--wait=20")])
def test_hosts_are_asked_what_was_asked_here(monkeypatch, tmp_path, given, waits):
    (tmp_path / "hosts").write_text("a slots=2\nb\n")
    words = ["--data=d", "--arch=a", "--batch-size=1", "--image-size=2", "--need=3.0"]
    words.append("--output-dir=o")
    jobs = []
    monkeypatch.setattr(
        doctor, "Job", lambda *given: jobs.append(given) or argparse.Namespace(run=int)
    )
    monkeypatch.setattr(sys, "argv", ["doctor.py", *words, *given, str(tmp_path / "hosts")])
    assert doctor.main() == 0
    ((_, command, machines, _),) = jobs
    assert command == ["scripts/doctor.py", *words, waits]
    assert [(one.name, one.slots) for one in machines] == [("a", None), ("b", None)]


def test_one_node_alone(folder):
    options = ("--need 1e9 --output-dir /proc", "--data=~/none", "-a nosuch", "--nodes 2")
    options += ("--need 0",)  # by which a time would be divided
    options += ("--nodes 2 --rank 1 --master 127.0.0.1 --wait 0",)
    line = ("scripts/doctor", "--data", folder, "--image-size", 32)
    done = [command(*line, *words.split(), HOME=str(folder)) for words in options]
    slow, missing, unknown, alone, zero, waits = done
    assert [one.code for one in done] == [2] * 6
    assert "127.0.0.1:8888 cannot be reached after 0 s" in bad(waits)[0]
    reads, decodes, full = bad(slow)
    assert [line.split()[4] for line in (reads, decodes)] == ["reads", "decodes"]
    assert re.match("✗ .* (only 0.0 GB of disk are free at|this user may not write to) /proc", full)
    assert f"{folder}/none/train" in bad(missing)[-1]
    assert "unknown arch 'nosuch'" in bad(unknown)[0]
    assert alone.sentence.endswith("IP address of node 0")
    assert "argument --need: 0 is not more than 0" in zero.sentence
