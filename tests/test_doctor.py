"""The doctor on two nodes: green when they are well; and it finds each fault that was put in.

Each test makes sure on the node itself, by other means than the doctor's, that its fault exists.
"""

import contextlib
import glob
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT, Result, activated, draw_folder
from nodes import Node, Nodes, need
from running import eventually

DOCTOR = ROOT / "scripts" / "doctor.py"
PORT = 8888
OPTIONS = ("--batch-size", "16", "--image-size", "32", "--workers", "1", "--wait", str(TIMEOUT))


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
    mounts = [node.run("wc -l < /proc/self/mountinfo").out.strip() for node in pair]
    hosts = pair[0].run("cat /etc/hosts").out
    yield pair
    for node, before in zip(pair, mounts, strict=True):
        node.unblock_ports()
        node.replace("/etc/hosts", hosts)
        script = f"""
            hostname {node.name}
            ip link delete side0 2>/dev/null
            tc qdisc delete dev eth0 root 2>/dev/null
            while [ $(wc -l < /proc/self/mountinfo) -gt {before} ]; do
                umount $(tail -1 /proc/self/mountinfo | cut -d ' ' -f 5) || exit 1
            done
        """
        assert node.run(script).code == 0


class Report:
    """What the doctors of both nodes said, and by name the findings that are not good."""

    def __init__(self, results: list[Result], path: Path):
        self.results = results
        self.content = json.loads(path.read_text()) if path.exists() else {"findings": []}
        self.findings = {
            finding["name"]: finding
            for finding in self.content["findings"]
            if finding["level"] != "ok"
        }
        self.good = [f["name"] for f in self.content["findings"] if f["level"] == "ok"]

    def only(self, name: str, code: int, *words: str, node: int | None = None) -> None:
        """The fault called ``name``, and no other, was found, and reported on ``node`` as well."""
        assert list(self.findings) == [name], self.results
        finding = self.findings[name]
        assert [result.code for result in self.results] == [code, code], self.results
        said = [self.results[0].out] + ([self.results[node].out] if node is not None else [])
        for out in said:
            assert {1: "! ", 2: "✗ "}[code] + finding["what"] in out
            assert "why it matters: " + finding["why"] in out
            assert "what to do: " + finding["remedy"] in out
        for word in words:
            assert word in finding["what"], finding["what"]
        if node is not None:
            assert finding["nodes"] == [node]
        for result in self.results:
            assert "Traceback" not in result.err + result.out


def doctor(
    nodes: list[Node],
    data: Path,
    *options: str,
    own: dict[int, Path] | None = None,
    env: dict[int, dict[str, str]] | None = None,
    script: dict[int, Path] | None = None,
) -> Report:
    """Type the doctor's command on all nodes; ``own`` data, ``env`` and ``script`` by node."""
    path = nodes[0].folder / "doctor.json"
    started, results = [], []
    for rank, node in enumerate(nodes):
        line = ["python", str((script or {}).get(rank, DOCTOR)), *OPTIONS, *options]
        line += ["--rank", str(rank), "--nodes", str(len(nodes)), "--master", nodes[0].ip]
        line += ["--data", str((own or {}).get(rank, data)), "--json", str(path)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(node.popen(line, (env or {}).get(rank), **pipes))
        # libfaketime spoils sleeping, so that node 1 should not have to wait for node 0.
        assert eventually(lambda: started[0].poll() is not None or listens(nodes[0]), TIMEOUT)
    for one in started:
        out, err = one.communicate(timeout=TIMEOUT)
        results.append(Result(one.returncode, out, err))
    return Report(results, path)


def listens(node: Node) -> bool:
    """Whether a program waits for connections on the master port."""
    return bool(node.run(f"ss -ltnH sport = {PORT}").out.strip())


def quick(*arguments, **how) -> Report:
    """`doctor` without the part that imports torch."""
    return doctor(*arguments, "--quick", **how)


def reaches(source: Node, target: Node, port: int) -> bool:
    """Whether a plain connection from ``source`` gets to ``port`` of ``target``."""
    listen = f"import socket; s = socket.create_server(('', {port})); print(flush=True); s.accept()"
    connect = f"import socket; socket.create_connection(('{target.ip}', {port}), 1.5)"
    with target.popen(["python", "-c", listen], stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        done = source.run(["python", "-c", connect])
        target.run(["python", "-c", connect.replace(target.ip, "127.0.0.1")])  # ends the server
    return done.code == 0


def ask(node: Node, expression: str, **env: str) -> str:
    """What Python says on a node."""
    done = node.run(["python", "-c", f"import socket, time\nprint({expression})"], env)
    return (done.out or done.err.splitlines()[-1]).strip()


# ---- nodes that are well


def test_healthy_nodes_are_green(nodes, data):
    report = doctor(nodes, data, "--need", "50")
    assert not report.findings, report.results
    assert [result.code for result in report.results] == [0, 0]
    named = {"nodes", "interface", "data-ports", "own-name", "clock", "versions", "data", "input"}
    assert named | {"limits", "network", "forecast"} <= set(report.good)
    out = report.results[0].out
    assert "all is well" in out.splitlines()[-1]
    assert "\033" not in out  # colour is for terminals
    content = report.content
    assert content["exit_code"] == 0
    assert content["torch"]["1"]["gloo"]["bytes_per_s"] > 1e6
    assert 0 < content["link"]["latency_s"] < 1
    assert 0 < content["forecast"]["efficiency"] < 1
    assert content["torch"]["0"]["model"]["gradient_bytes"] == 4 * 25_557_032  # ResNet-50's


def test_bandwidth_is_that_of_the_link(nodes, data):
    for node in nodes:
        limit = "tc qdisc add dev eth0 root tbf rate 200mbit burst 64kb latency 20ms"
        assert node.run(limit).code == 0
    report = quick(nodes, data)
    assert not report.findings, report.results
    for streams in ("1", "4"):
        for rate in report.content["ring_bytes_per_s"][streams].values():
            assert 0.5 * 25e6 < rate < 1.1 * 25e6


def test_from_one_machine_over_ssh(nodes, data):
    for node in nodes:
        node.start_sshd()
    hosts = nodes[0].folder / "hosts"
    hosts.write_text("# two nodes\nnode0\n\nnode1  # the second\n")
    line = ["bash", str(ROOT / "scripts" / "doctor.sh"), str(hosts), *OPTIONS, "--quick"]
    # On each node bash finds what --env gives, and the values are on no command line here or there.
    note = nodes[0].folder / "python"
    note.write_text(
        '#!/bin/bash\n[ "$SECRET" = kept ] || exit 1\n'
        'cat /proc/[0-9]*/cmdline | tr "\\0" "\\n" >>"$0.$HOSTNAME"\nexec python "$@"\n'
    )
    note.chmod(0o755)
    given = ["--env", "SECRET=kept", "--env", f"PATH={activated()['PATH']}", "--python", str(note)]
    done = nodes[0].run([*line, "--data", str(data), *given])
    assert done.code == 0, done
    assert "2 of 2 nodes connected" in done.out
    for node in nodes:
        seen = note.with_name(f"python.{node.name}").read_text().splitlines()
        assert "scripts/doctor.py" in seen
        assert not [word for word in seen if word.endswith("=kept")]
    # A fault of the other node is shown, with the node's name before it, and decides the exit code.
    nodes[1].block_ports(f"1024-2199, 2300-{PORT - 1}, {PORT + 1}-65535")  # between: sshd
    done = nodes[0].run([*line, "--data", str(data)])
    assert done.code == 2, done
    assert "✗ data ports of node 1 (node1) are closed" in done.out
    assert "[node1] ✗ data ports of node 1 (node1) are closed" in done.out
    # So does a node that ssh cannot reach.
    hosts.write_text("node0\nnode9\n")
    done = nodes[0].run([*line, "--data", str(data), "--wait", "1"])
    assert done.code == 2, done
    assert "error: ssh to node9 failed" in done.err
    assert "1 of 2 nodes did not connect" in done.out


# ---- ports and interfaces


def test_closed_master_port(nodes, data):
    assert reaches(nodes[1], nodes[0], PORT)
    nodes[0].block_ports(str(PORT))
    assert not reaches(nodes[1], nodes[0], PORT)
    assert reaches(nodes[1], nodes[0], PORT + 1)
    report = quick(nodes, data, "--wait", "2")
    assert list(report.findings) == ["nodes-missing"]
    assert [result.code for result in report.results] == [2, 2]
    assert "node 1" in report.findings["nodes-missing"]["what"]
    said = report.results[1].out
    assert f"✗ the master {nodes[0].ip}:{PORT} cannot be reached after 2 s (no answer)" in said
    assert "firewall" in said


@pytest.mark.parametrize("blocked", [0, 1])
def test_closed_data_ports(nodes, data, blocked):
    nodes[blocked].block_ports(f"1024-{PORT - 1}, {PORT + 1}-65535")
    # Not a port from which connections are made: one of before might still hold it.
    assert not reaches(nodes[1 - blocked], nodes[blocked], 20000)
    assert reaches(nodes[blocked], nodes[1 - blocked], 20000)
    assert reaches(nodes[1], nodes[0], PORT)
    report = quick(nodes, data)
    who = f"node {1 - blocked} (node{1 - blocked}) cannot connect"
    report.only("data-ports", 2, who, nodes[blocked].ip, "no answer")
    assert report.findings["data-ports"]["nodes"] == [blocked]
    assert not report.content["ring_bytes_per_s"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("side0", "has the address 10.99.0.2, where node 0 (node0) cannot reach it"),
        ("lo", "has the address 127.0.0.1, where node 0 (node0) cannot reach it"),
        ("eth7", "is not an interface of this node"),
    ],
)
def test_wrong_interface(nodes, data, name, reason):
    """An interface in another network, the loopback, and one that does not exist."""
    add = "ip link add side0 type veth peer name side1 && ip address add 10.99.0.2/24 dev side0"
    assert nodes[1].run(f"{add} && ip link set side0 up && ip link set side1 up").code == 0
    assert (nodes[1].run(f"ip link show {name}").code == 0) == (name != "eth7")
    assert "eth0" in nodes[1].run(f"ip route get {nodes[0].ip}").out
    env = {1: {"GLOO_SOCKET_IFNAME": name}}
    quick(nodes, data, env=env).only("interface", 2, f"={name}", reason, node=1)


# ---- names and clocks


def test_own_name_on_loopback(nodes, data):
    """As Debian's installer writes it."""
    hosts = f"127.0.0.1 localhost\n127.0.1.1 node1\n{nodes[0].ip} node0\n"
    nodes[1].replace("/etc/hosts", hosts)
    assert ask(nodes[1], "socket.gethostbyname(socket.gethostname())") == "127.0.1.1"
    quick(nodes, data).only("own-name", 1, "its own name node1 resolves to 127.0.1.1", node=1)


def test_own_name_that_cannot_be_resolved(nodes, data):
    nodes[1].replace("/etc/hosts", f"127.0.0.1 localhost\n{nodes[0].ip} node0\n")
    nodes[1].run("hostname lost-node")
    assert "gaierror" in ask(nodes[1], "socket.gethostbyname(socket.gethostname())")
    report = quick(nodes, data)
    report.only("own-name", 1, "its own name lost-node cannot be resolved", node=1)


@pytest.mark.parametrize(("fast", "words"), [(1, "30.0 s ahead of"), (0, "30.0 s behind")])
def test_clock_that_is_wrong(nodes, data, tmp_path, fast, words):
    env = {"PYTHONPATH": str(tmp_path)}
    (library, *_) = glob.glob("/usr/lib/*/faketime/libfaketime.so.1") or [None]
    if library:
        env = {
            "LD_PRELOAD": library,
            "FAKETIME": "+30s",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
    else:
        # Without the package libfaketime, Python's own clock is the lowest level left. (A node of
        # these tests shares the machine's clock: Linux has no namespace for it.)
        (tmp_path / "sitecustomize.py").write_text(
            "import time\nreal = time.time\ntime.time = lambda: real() + 30\n"
        )
    right = float(ask(nodes[1 - fast], "time.time()"))
    assert 25 < float(ask(nodes[fast], "time.time()", **env)) - right < 35
    quick(nodes, data, env={fast: env}).only("clock", 1, f"node 1 (node1) is {words}", node=1)


# ---- data, versions, limits


@contextlib.contextmanager
def copy(data: Path, folder: Path) -> Iterator[Path]:
    """A copy of the data set for another node, to be damaged."""
    yield shutil.copytree(data, folder / "data", ignore=shutil.ignore_patterns(".index*"))


def count(node: Node, data: Path, what: str) -> int:
    """Folders or files that a node sees below DATA/train."""
    return int(node.run(f"find {data}/train -mindepth 1 -type {what} -not -name '.*' | wc -l").out)


def test_ten_classes_against_nine(nodes, data, tmp_path):
    with copy(data, tmp_path) as other:
        for part in ("train", "val"):
            shutil.rmtree(other / part / "class_4")
        assert (count(nodes[0], data, "d"), count(nodes[1], other, "d")) == (10, 9)
        report = quick(nodes, data, own={1: other})
    assert [f["name"] for f in report.content["findings"]].count("data") == 2  # train and val
    report.only("data", 2, "10 classes", "9 classes", "class_4", "missing on node 1 (node1)")
    assert report.findings["data"]["nodes"] == [0, 1]


def test_one_image_missing(nodes, data, tmp_path):
    with copy(data, tmp_path) as other:
        (other / "train" / "class_7" / "002.JPEG").unlink()
        assert (count(nodes[0], data, "f"), count(nodes[1], other, "f")) == (40, 39)
        report = quick(nodes, data, own={1: other})
    words = ("the train images differ", "40 images", "39 images", "class_7: 4 images")
    report.only("data", 2, *words)


def test_missing_data(nodes, data, tmp_path):
    report = quick(nodes, data, own={1: tmp_path / "none"})
    report.only("data", 2, f"folder {tmp_path}/none/train is missing", node=1)


def test_another_torch(nodes, data, tmp_path):
    """A stand-in for torch, before the real one on node 1's module path."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.1+cu128'\n")
    (tmp_path / "torch" / "__init__.py").write_text("from torch.version import __version__\n")
    env = {"PYTHONPATH": str(tmp_path)}
    assert ask(nodes[1], "__import__('torch').__version__", **env) == "2.13.1+cu128"
    assert not ask(nodes[0], "__import__('torch').__version__").startswith("2.13")
    report = quick(nodes, data, env={1: env})
    # NCCL comes with torch's wheel, and this torch has none.
    assert set(report.findings) == {"torch", "nccl"}
    assert report.findings["torch"]["level"] == "fault"
    assert "2.13 on node 1 (node1)" in report.findings["torch"]["what"]
    assert [result.code for result in report.results] == [2, 2]
    assert "2.13 on node 1 (node1)" in report.results[1].out


def test_another_version_of_this_code(nodes, data, tmp_path):
    for part in ("scripts", "utils"):
        shutil.copytree(ROOT / part, tmp_path / part)
    for script in ROOT.glob("imagenet_*.py"):
        shutil.copy(script, tmp_path)
    with open(tmp_path / "utils" / "schedules.py", "a") as file:
        file.write("# a change\n")
    report = quick(nodes, data, script={1: tmp_path / "scripts" / "doctor.py"})
    report.only("code", 2, "this code differs", "utils/model/schedules.py", "node 1 (node1)")


def test_few_open_files(nodes, data):
    line = f"ulimit -n 512; exec python {DOCTOR} {' '.join(OPTIONS)} --quick --data {data}"
    done = nodes[0].run(line)
    assert done.code == 1, done
    assert "! node 0 (node0): a process may open only 512 files" in done.out
