"""The doctor on two nodes: green when they are well; and it finds each fault that was put in.

Each test makes sure on the node itself, by other means than the doctor's, that its fault exists.
"""

import argparse
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import doctor
import pytest
from conftest import ROOT, TIMEOUT, Result, activated, draw_folder, python
from nodes import Node, Nodes, need
from test_gpus import T4, play

PORT = 8888
OPTIONS = ("--batch-size", "16", "--image-size", "32", "--wait", str(TIMEOUT))


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
    hosts = pair[0].run("cat /etc/hosts").out
    yield pair
    for node in pair:
        node.unblock_ports()
        node.replace("/etc/hosts", hosts)
        node.run("ip link delete side0; tc qdisc delete dev eth0 root")


def ask_doctor(
    nodes: list[Node], data: Path, *options: str, lines: dict[int, str] | None = None, **how
) -> list[Result]:
    """Type the doctor's command on all nodes; by node, shell ``lines`` before it, and variables."""
    started = []
    for rank, node in enumerate(nodes):
        words = [*OPTIONS, "--rank", rank, "--nodes", len(nodes), "--master", nodes[0].ip]
        words += ["--data", data, *options]
        line = f"exec python {ROOT}/scripts/doctor.py {' '.join(map(str, words))}"
        line = (lines or {}).get(rank, "") + "\n" + line
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(node.popen(line, how.get(f"env{rank}"), **pipes))
    results = []
    for one in started:
        out, err = one.communicate(timeout=TIMEOUT)
        assert "Traceback" not in err + out, err + out
        results.append(Result(one.returncode, out, err))
    return results


def bad(result: Result) -> list[str]:
    """The lines that are warnings or faults."""
    return [line for line in result.out.splitlines() if re.match("(.node[01]. )?[!✗] ", line)]


def reaches(source: Node, target: Node, port: int) -> bool:
    """Whether a plain connection from ``source`` gets to ``port`` of ``target``."""
    listen = f"import socket; s = socket.create_server(('', {port})); print(flush=True); s.accept()"
    connect = f"import socket; socket.create_connection(('{target.ip}', {port}), 1.5)"
    with target.popen(["python", "-c", listen], stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        done = source.run(["python", "-c", connect])
        target.run(["python", "-c", connect.replace(target.ip, "127.0.0.1")])  # ends the server
    return done.code == 0


def test_healthy_nodes_over_ssh_from_one_machine(nodes, data):
    for node in nodes:
        node.start_sshd()
    hosts, found = nodes[0].folder / "hosts", nodes[0].folder / "doctor.json"
    hosts.write_text("# two nodes\nroot@node0 slots=1\n\nnode1  # the second\n")
    # On each node bash finds what --env gives, and the values are on no command line here or there.
    note = nodes[0].folder / "python"
    note.write_text(
        '#!/bin/bash\n[ "$SECRET" = kept ] || exit 1\n'
        'cat /proc/[0-9]*/cmdline | tr "\\0" "\\n" >>"$0.$HOSTNAME"\nexec python "$@"\n'
    )
    note.chmod(0o755)
    line = ["bash", str(ROOT / "scripts/doctor.sh"), str(hosts), *OPTIONS, "--data", str(data)]
    given = ["--env", "SECRET=kept", "--env", f"PATH={activated()['PATH']}", "--python", str(note)]
    given += ["--env", "CUDA_VISIBLE_DEVICES=", "--need", "50", "--json", str(found)]
    done = nodes[0].run([*line, *given])
    assert done.code == 0, done
    assert not bad(done)
    assert "all 2 nodes are here" in done.out
    assert "the same on all nodes" in done.out
    assert "forecast for resnet50" in done.out
    assert "[node0] node 0: all is well" in done.out
    content = json.loads(found.read_text())
    assert content["exit_code"] == 0
    assert content["network"]["bytes_per_s"] > 1e6
    assert content["nodes"][1]["data"]["core"] > 1
    for node in nodes:
        seen = note.with_name(f"python.{node.name}").read_text().splitlines()
        assert "scripts/doctor.py" in seen
        assert not [word for word in seen if word.endswith("=kept")]
    # A node that ssh cannot reach decides the exit code.
    hosts.write_text("node0\nnode9\n")
    done = nodes[0].run([*line, *given])
    assert done.code == 2, done
    assert "error: ssh to node9 failed" in done.err
    # So does a fault, which both nodes report.
    hosts.write_text("node0\nnode1\n")
    nodes[1].block_ports(f"1024-2199, 2300-{PORT - 1}, {PORT + 1}-65535")  # between: sshd
    done = nodes[0].run([*line, *given])
    assert done.code == 2, done
    assert "[node0] ✗ node0 (node 0) cannot connect to node1 (node 1)" in done.out
    assert "[node1] ✗ node0 (node 0) cannot connect to node1 (node 1)" in done.out


def test_faults_of_one_node_are_all_found(nodes, data, tmp_path):
    other = shutil.copytree(data, tmp_path / "data", ignore=shutil.ignore_patterns(".index*"))
    (other / "train/class_7/002.JPEG").unlink()
    nodes[1].replace("/etc/hosts", f"127.0.0.1 localhost\n127.0.1.1 node1\n{nodes[0].ip} node0\n")
    assert nodes[1].run("getent ahostsv4 node1").out.startswith("127.0.1.1")
    add = "ip link add side0 type veth peer name side1 && ip address add 10.99.0.2/24 dev side0"
    assert nodes[1].run(f"{add} && ip link set side0 up && ip link set side1 up").code == 0
    play(tmp_path, "470", T4)
    env = {"GLOO_SOCKET_IFNAME": "side0", "NCCL_SOCKET_IFNAME": "eth7"}
    env |= {"PATH": f"{tmp_path}:{activated()['PATH']}", "CUDA_VISIBLE_DEVICES": "0"}
    # A node of these tests shares the machine's clock: Linux has no namespace for it.
    clock = "import time\nreal = time.time\ntime.time = lambda: real() + 30\n"
    (tmp_path / "sitecustomize.py").write_text(clock)
    env |= {"PYTHONPATH": str(tmp_path)}
    lines = {1: f"ulimit -n 512; mount --bind {other} {data}"}
    results = ask_doctor(nodes, data, lines=lines, env1=env)
    nodes[1].run(f"umount {data}")
    assert [result.code for result in results] == [2, 2], results
    words = {
        "! node 1 (node1): NCCL_SOCKET_IFNAME chooses eth7, which is no interface": True,
        "✗ node 1 (node1): GLOO_SOCKET_IFNAME chooses side0, which has the address 10.99.0.2": True,
        "! the clock of node 1 (node1) is 30.0 s ahead of that of node 0": True,
        "! node 1 (node1): a process may open only 512 files": True,
        "! node 1 (node1): its own name resolves to 127.0.1.1": True,
        "✗ node 1 (node1): torch": True,  # cannot use the GPU
        "! driver differs": False,
        "✗ the train images differ": False,
    }
    said = bad(results[0])
    for start, own in words.items():
        assert [one for one in said if one.startswith(start)], (start, said)
        assert bool([one for one in bad(results[1]) if one.startswith(start)]) == own
    assert len(said) == len(words)
    for text in ("40 images", "39 images", "class_7: 4 images", "driver 470", "why it matters"):
        assert text in results[0].out
    assert results[0].out.count("what to do: ") == len(words)


def test_all_closed_ways_are_listed(nodes, data):
    for node in nodes:
        node.block_ports(f"1024-{PORT - 1}, {PORT + 1}-65535")
    # Not a port from which connections are made: one of before might still hold it.
    assert not reaches(nodes[1], nodes[0], 20000)
    assert reaches(nodes[1], nodes[0], PORT)
    results = ask_doctor(nodes, data)
    assert [result.code for result in results] == [2, 2], results
    said = bad(results[0])
    assert len(said) == 4  # two ports in both directions
    for source, target in ((0, 1), (1, 0)):
        words = f"node{source} (node {source}) cannot connect to node{target} (node {target})"
        assert [words in one for one in said].count(True) == 2
    assert "open all TCP ports" in results[0].out
    assert "cannot connect" in bad(results[1])[0]


def test_a_closed_master_port_and_another_torch(nodes, data, tmp_path):
    nodes[0].block_ports(str(PORT))
    assert not reaches(nodes[1], nodes[0], PORT)
    results = ask_doctor(nodes, data, "--wait", "2")
    assert [result.code for result in results] == [2, 2], results
    assert "✗ node 1 of 2 did not connect" in results[0].out
    assert f"{nodes[0].ip}:{PORT} cannot be reached" in bad(results[1])[0]
    nodes[0].unblock_ports()
    metadata = tmp_path / "torch-2.13.1.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.1\n")
    results = ask_doctor(nodes, data, env1={"PYTHONPATH": str(tmp_path)})
    assert [result.code for result in results] == [2, 2], results
    for result in results:
        assert "2.13 on node1 (node 1)" in bad(result)[0]


def test_the_speed_of_a_link_and_the_forecast_from_it(nodes, data):
    limit = "tc qdisc add dev eth0 root tbf rate 200mbit burst 64kb latency 20ms"
    assert all(node.run(limit).code == 0 for node in nodes)
    path = nodes[0].folder / "slow.json"
    results = ask_doctor(nodes, data, "--need", "50", "--json", str(path))
    assert [result.code for result in results] == [1, 1], results
    (line,) = bad(results[0])
    assert line.startswith("! forecast for resnet50, 16 images per process")
    found = json.loads(path.read_text())
    assert 0.5 * 25e6 < found["network"]["bytes_per_s"] < 1.1 * 25e6
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


def options(data: Path) -> argparse.Namespace:
    """The doctor's, of two nodes."""
    plain = {"rank": 0, "nodes": 2, "image_size": 32, "arch": "resnet50", "batch_size": 16}
    return argparse.Namespace(data=str(data), need=None, **plain)


def test_data_sets_that_differ(data, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    whole = doctor.data_set(options(data))

    def judge(change) -> str:
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        ignore = shutil.ignore_patterns(".index*")
        other = shutil.copytree(data, tmp_path / "other", ignore=ignore)
        change(other)
        found = [whole, doctor.data_set(options(other))]
        return "\n".join(str(one) for one in doctor.of_data(["one", "two"], found) if one.level)

    def nine_classes(root):
        for part in ("train", "val"):
            shutil.rmtree(root / part / "class_4")

    assert judge(lambda root: None) == ""
    text = judge(nine_classes)
    assert text.count("✗") == 2
    assert "class_4: 4 images" in text
    assert "missing on two" in text
    text = judge(lambda root: (root / "val/class_1/000.JPEG").write_bytes(b"damaged"))
    assert text.startswith("! the val images have the same names but different sizes")
    assert "has class_1" in judge(lambda root: shutil.rmtree(root / "val/class_1"))


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"nccl": "2.20"}, 1, "nccl differs: 2.28 on node 0 (a); 2.20 on node 1 (b)"),
        ({"python": "3.10.4"}, 1, "python differs: 3.11 on node 0"),
        ({"gpus": ["Tesla T4"]}, 1, "gpus differs"),
        ({"mtu": "9000"}, 1, "mtu differs"),
        ({"gpus": ["T4", "T4"], "shm": 64e6}, 1, "/dev/shm has only 64 MB"),
        ({"disk": 4e8}, 1, "only 0.4 GB of disk"),
        ({"own_name": []}, 1, "its own name cannot be resolved"),
        ({"gpu_trouble": "torch cannot use T4"}, 2, "torch cannot use T4"),
        ({"gpus": ["NVIDIA A100-SXM4-40GB"]}, 1, "decodes 800 images/s, and will be asked for"),
        ({}, 0, ""),
    ],
)
def test_facts_are_judged(data, change, level, words):
    speeds = {"files_per_s": 1e6, "core": 100.0, "error": "not asked for"}
    one = {"host": "a", "address": "10.0.0.1", "interface": "eth0", "mtu": "1500", "nccl": "2.28"}
    one |= {"own_name": ["10.0.0.1"], "gpus": [], "driver": "", "gpu_trouble": "", "torch": "2.14"}
    one |= {"python": "3.11.7", "shm": 1e9, "disk": 1e12, "disk_place": "/", "files": 4096}
    one |= {"cores": 8, "data": speeds}
    other = one | {"host": "b"} | change
    names, args = ["node 0 (a)", "node 1 (b)"], options(data)
    found = [*doctor.of_versions(names, [one, other])]
    found += doctor.of_node(1, names[1], other, args)
    wrong = [finding for finding in found if finding.level]
    assert max((finding.level for finding in wrong), default=0) == level
    assert any(words in finding.what for finding in wrong) or not words
