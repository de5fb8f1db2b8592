"""The doctor on two nodes: green when they are well; and it finds each fault that was put in."""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import doctor
import pytest
from conftest import ROOT, TIMEOUT, Result, draw_folder, python
from nodes import Node, Nodes, need, type_on_each
from test_gpus import T4, play

PORT = 8888
OPTIONS = ("--batch-size", "16", "--image-size", "32", "--wait", str(TIMEOUT))
NAMES = ["node 0 (a)", "node 1 (b)"]
CLOSED = "node{0} (node {0}) cannot connect to node{1} (node {1})"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A data set of 10 classes. Not to be changed."""
    return draw_folder(tmp_path_factory.mktemp("doctor") / "data", train=4, val=2, classes=10)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Node]]:
    """Two nodes, shared by the tests, as it takes seconds to remove them."""
    need("nft", "tc")
    with Nodes(2) as two:
        yield two


@pytest.fixture
def nodes(pair) -> Iterator[list[Node]]:
    """Two healthy nodes; what a test does to them is undone."""
    yield pair
    for node in pair:
        node.unblock_ports()
        node.run("ip link delete side0; tc qdisc delete dev eth0 root")


def ask_doctor(
    nodes: list[Node], data: Path, *options: object, code: int, first: str = "true"
) -> list[Result]:
    """Type the doctor's command on both nodes, on node 1 after the commands ``first``.

    Both must end with ``code``.
    """
    words = [*OPTIONS, "--data", data, *options, "--rank {rank} --nodes {n} --master {ip}"]
    line = f"[ {{rank}} = 0 ] || {{{{ {first}; }}}}\nexec python scripts/doctor.py "
    results = type_on_each(nodes, line + " ".join(map(str, words)))
    assert [one.code for one in results] == [code] * 2, results
    assert not [one for one in results if "Traceback" in one.err + one.out]
    return results


def bad(result: Result) -> list[str]:
    """The lines that are warnings or faults."""
    return [line for line in result.out.splitlines() if re.match("(.node[01]. )?[!✗] ", line)]


def speed_of_link(result: Result) -> float:
    """Gbit/s."""
    return float(re.search(r"all-reduce reaches (\S+) Gbit/s, ", result.out)[1])


def test_over_ssh_from_one_machine(nodes, data):
    for node in nodes:
        node.start_sshd()
    hosts = nodes[0].folder / "hosts"
    line = ["bash", str(ROOT / "scripts/doctor.sh"), "--need", "0.01", str(hosts), *OPTIONS]
    line += ["--data", str(data), "--python", sys.executable, "--env", "CUDA_VISIBLE_DEVICES="]

    def ask(listed: str, *more: object, code: int) -> Result:
        hosts.write_text(listed)
        done = nodes[0].run([*line, *more])
        assert done.code == code, done
        return done

    done = ask("# two nodes\nroot@node0 slots=1\n\nnode1  # the second\n", code=0)
    assert not bad(done)
    for text in ("all 2 nodes are here", "the same on all nodes", "node 1 (node1) decodes "):
        assert text in done.out
    assert "forecast for resnet50, 16 images per process: " in done.out
    assert "[node0] node 0: all is well" in done.out
    assert speed_of_link(done) > 0.01
    # A node that ssh cannot reach decides the exit code.
    assert "error: ssh to node9 failed" in ask("node0\nnode9\n", code=2).err
    # So does a fault: node 0 lists the closed ports, two in each direction; node 1 prints one line.
    for node in nodes:
        node.block_ports(f"1024-2199, 2300-{PORT - 1}, {PORT + 1}-65535")  # between: sshd
    done = ask("node0\nnode1\n", "--port", PORT, code=2)
    assert len(bad(done)) == 5
    for ways in ((0, 1), (1, 0)):
        assert [CLOSED.format(*ways) in one for one in bad(done)].count(True) == 3
    assert "open all TCP ports" in done.out


def test_faults_of_one_node_are_all_found(nodes, data, tmp_path):
    other = shutil.copytree(data, tmp_path / "data", ignore=shutil.ignore_patterns(".index*"))
    (other / "train/class_7/002.JPEG").unlink()
    add = "ip link add side0 type veth peer name side1 && ip address add 10.99.0.2/24 dev side0"
    assert nodes[1].run(f"{add} && ip link set side0 up && ip link set side1 up").code == 0
    play(tmp_path, "470", T4)
    # A node of these tests shares the machine's clock: Linux has no namespace for it.
    clock = "import time\nreal = time.time\ntime.time = lambda: real() + 30\n"
    (tmp_path / "sitecustomize.py").write_text(clock)
    line = f"ulimit -n 512; mount --bind {other} {data}; export GLOO_SOCKET_IFNAME=side0 "
    line += f"NCCL_SOCKET_IFNAME=eth7 CUDA_VISIBLE_DEVICES=0 PATH={tmp_path}:$PATH PYTHONPATH="
    first, second = ask_doctor(nodes, data, code=2, first=line + str(tmp_path))
    nodes[1].run(f"umount {data}")
    words = [
        "! node 1 (node1): NCCL_SOCKET_IFNAME chooses eth7, which is no interface",
        "✗ node 1 (node1): GLOO_SOCKET_IFNAME chooses side0, which has the address 10.99.0.2",
        "! the clock of node 1 (node1) is 30.0 s ahead of that of node 0",
        "! node 1 (node1): a process may open only 512 files",
        "✗ node 1 (node1): torch",  # cannot use the GPU
        "! driver differs",
        "✗ the train images differ",
    ]
    said = bad(first)
    assert not bad(second)
    assert "node 1: 3 faults, 4 warnings (see node 0)" in second.out
    for start in words:
        assert [one for one in said if one.startswith(start)], (start, said)
    assert len(said) == len(words)
    for text in ("40 images", "39 images", "class_7: 4 images", "driver 470", "why it matters"):
        assert text in first.out
    assert first.out.count("what to do: ") == len(words)


def test_a_closed_master_port_and_another_torch(nodes, data, tmp_path):
    nodes[0].block_ports(str(PORT))
    first, second = ask_doctor(nodes, data, "--wait", "2", code=2)
    assert "✗ node 1 of 2 did not connect" in first.out
    assert f"{nodes[0].ip}:{PORT} cannot be reached" in bad(second)[0]
    nodes[0].unblock_ports()
    metadata = tmp_path / "torch-2.13.1.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.1\n")
    for result in ask_doctor(nodes, data, code=2, first=f"export PYTHONPATH={tmp_path}"):
        assert "2.13 on node1 (node 1)" in bad(result)[0]


def test_the_speed_of_a_link_and_the_forecast_from_it(nodes, data):
    limit = "tc qdisc add dev eth0 root tbf rate 200mbit burst 64kb latency 20ms"
    assert all(node.run(limit).code == 0 for node in nodes)
    results = ask_doctor(nodes, data, "--need", "50", code=1)
    (line,) = bad(results[0])
    assert line.startswith("! forecast for resnet50, 16 images per process")
    assert 0.1 < speed_of_link(results[0]) < 0.22
    # 102 MB of gradients at 25 MB/s against 16 images at 50 images/s.
    assert "with --comm fp32" not in line


def test_one_node_alone(data):
    done = python("scripts/doctor.py", "--data", data, "--image-size", "32", "--need", "1e9")
    assert done.code == 1, done
    assert [line.split()[4] for line in bad(done)] == ["reads", "decodes"]
    done = python("scripts/doctor.py", "--data", data / "none")
    assert done.code == 2
    assert "none/train" in bad(done)[0]
    assert python("scripts/doctor.py", "--nodes", "2").sentence.endswith("IP address of node 0")


# ---- judgement

FACTS = {"host": "a", "interface": "eth0", "mtu": "1500", "nccl": "2.28"}
FACTS |= {"gpus": [], "driver": "", "gpu_trouble": "", "torch": "2.14"}
FACTS |= {"python": "3.11.7", "shm": 1e9, "disk": 1e12, "disk_place": "/", "files": 4096}
FACTS |= {"cores": 8, "data": {"files_per_s": 1e6, "core": 100.0, "error": "not asked for"}}
ARGS = argparse.Namespace(rank=0, nodes=2, image_size=32, arch="resnet50", batch_size=16, need=None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("true", []),
        ("rm -r train/class_4 val/class_4",
         ["✗ the train images differ", "✗ the val images differ", "class_4: 4 images",
          "missing on two"]),
        ("echo damaged > val/class_1/000.JPEG",
         ["! the val images have the same names but different sizes"]),
        ("rm -r val/class_1", ["has class_1"]),
    ],
)  # fmt: skip
def test_data_sets_that_differ(data, tmp_path, monkeypatch, change, words):
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    other = shutil.copytree(data, tmp_path / "o", ignore=shutil.ignore_patterns(".index*"))
    subprocess.run(change, shell=True, cwd=other, check=True)
    both = [doctor.data_set(argparse.Namespace(data=one, **vars(ARGS))) for one in (data, other)]
    said = "\n".join(str(one) for one in doctor.of_data(["one", "two"], both) if one.level)
    assert bool(said) == bool(words)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("rank", "change", "level", "words"),
    [
        (1, {"nccl": "2.20"}, 1, "nccl differs: 2.28 on node 0 (a); 2.20 on node 1 (b)"),
        (1, {"python": "3.10.4"}, 1, "python differs: 3.11 on node 0"),
        (1, {"gpus": ["Tesla T4"]}, 1, "gpus differs"),
        (1, {"mtu": "9000"}, 1, "mtu differs"),
        (1, {"gpus": ["T4", "T4"], "shm": 64e6}, 1, "/dev/shm has only 64 MB"),
        (1, {"disk": 4e8}, 1, "only 0.4 GB of disk"),
        (0, {"disk": 4e8}, 2, "only 0.4 GB of disk"),
        (0, {"disk": 4e9}, 1, "only 4.0 GB of disk"),
        (1, {"gpu_trouble": "torch cannot use T4"}, 2, "torch cannot use T4"),
        (1, {"gpus": ["NVIDIA A100-SXM4-40GB"]}, 1, "decodes 800 images/s, and will be asked for"),
        (1, {"disk": 6e8, "python": "3.11.9"}, 0, ""),
        (0, {"disk": 6e9}, 0, ""),
    ],
)
def test_facts_are_judged(rank, change, level, words):
    """Node 0 needs disk space for snapshots."""
    everyone = [FACTS, FACTS | {"host": "b"}]
    everyone[rank] = everyone[rank] | change
    found = [*doctor.of_versions(NAMES, everyone)]
    found += doctor.of_node(rank, NAMES[rank], everyone[rank], ARGS)
    wrong = [finding for finding in found if finding.level]
    assert max((finding.level for finding in wrong), default=0) == level
    assert any(words in finding.what for finding in wrong) or not words
