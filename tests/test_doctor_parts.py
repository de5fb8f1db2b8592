"""The doctor's judgement of facts that one machine cannot show, and doctors on the loopback.

Needs no root.
"""

import json
import socket
import threading
from dataclasses import asdict

import pytest
from conftest import ROOT, Result, python, shell
from forecast import buckets

from utils.launch import agreement
from utils.launch.network import free_port

DOCTOR = "scripts/doctor.py"
SMALL = "--quick --batch-size 16 --image-size 32 --workers 1"


@pytest.fixture(autouse=True, scope="module")
def scripts_on_path():
    """Modules of scripts/checkup, as scripts/doctor.py finds them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))
        yield


def facts(rank: int, **changes) -> dict:
    """What a healthy node reports about itself; ``a__b=x`` sets facts["a"]["b"] to x."""
    address = f"10.0.0.{rank + 1}"
    part = {
        "images": 10,
        "fingerprint": "10 images in 1 classes (0)",
        "of_classes": {"a": "10 images (0)"},
        "bytes": 1000,
        "sizes": "0",
    }
    found = {
        "versions": {
            "python": "3.11.2",
            "torch": "2.14.1+cu130",
            "nccl": "2.30.7",
            "code": {"utils/data/loaders.py": "0"},
            "commit": "",
        },
        "gpus": {"names": ["Tesla T4"] * 4, "driver": "580.1"},
        "name": {"host": f"host{rank}", "addresses": [address]},
        "ways": {
            "interfaces": {"lo": "127.0.0.1", "eth0": address},
            "default": "eth0",
            "address": address,
            "mtu": 1500,
        },
        "limits": {
            "shm_bytes": 8e9,
            "disk_bytes": 1e11,
            "disk": "/",
            "open_files": 4096,
            "cores": 32,
            "data_ports": "32768-60999",
        },
        "data": {
            "parts": {"train": part, "val": part},
            "read": {"files_per_s": 9000.0, "bytes_per_s": 9e8},
        },
        "seen_from": address,
        "owns_master": True,
        "master_is": "10.0.0.1",
    }
    for place, value in changes.items():
        *folders, name = place.split("__")
        inside = found
        for folder in folders:
            inside = inside[folder]
        inside[name] = value
    return found


def check(*nodes: dict, **measured):
    """A checkup of nodes that report ``nodes``."""
    from checkup.findings import Checkup

    ways = [
        {"from": a, "to": b, "address": one["ways"]["address"], "port": 40000, "reason": None}
        | {"seconds": 1e-4}
        for a in range(len(nodes))
        for b, one in enumerate(nodes)
        if a != b
    ]
    options = {"master": "10.0.0.1", "port": 8888, "wait": 60, "arch": "resnet50", "need": None}
    options |= {"batch_size": 128, "image_size": 224, "workers": None}
    torch = {"gpus": 4, "cuda": True, "built_for": "13.0"}
    model = {"gradient_bytes": 102_228_128, "gflops": 4.09}
    model["buckets"] = [asdict(one) for one in buckets.of("resnet50")]
    ring = {"latency_s": 1e-4, "bytes_per_s": 1e9}
    part = {"torch": torch, "model": model, "decode": {"images_per_s_core": 300}, "nccl": ring}
    base = {
        "facts": dict(enumerate(nodes)),
        "ways": ways,
        "clocks": dict.fromkeys(range(1, len(nodes)), (0.001, 1e-4)),
        "ring": {1: dict.fromkeys(range(len(nodes)), 1.2e9)},
        "torch": dict.fromkeys(range(len(nodes)), part),
    }
    return Checkup(len(nodes), options, **(base | measured))


def troubles(checkup) -> dict[str, str]:
    """Findings that are not good: name -> level and sentence."""
    from checkup import judge_network, judge_nodes, judge_speed

    judges = (judge_network, judge_nodes, judge_speed)
    found = [finding for module in judges for finding in module.judge(checkup)]
    assert all(one.why and one.remedy for one in found if one.level != "ok")
    return {one.name: f"{one.level}: {one.what}" for one in found if one.level != "ok"}


def test_healthy_gpu_nodes_have_no_troubles():
    assert not troubles(check(facts(0), facts(1), facts(2)))


@pytest.mark.parametrize(
    ("name", "level", "words", "changes"),
    [
        ("gpus", "warning", "2 x Tesla T4", {"gpus__names": ["Tesla T4"] * 2}),
        ("gpus", "fault", "does not answer", {"gpus__error": "nvidia-smi does not answer"}),
        ("gpus", "fault", "built for CUDA 13.0) uses 4", {"gpus__names": ["Tesla T4"] * 8}),
        ("nccl", "fault", "2.29.1", {"versions__nccl": "2.29.1"}),
        ("torch", "fault", "no torch", {"versions__torch": None}),
        ("python", "warning", "3.12", {"versions__python": "3.12.1"}),
        ("mtu", "warning", "9001 on node 1 (host1)", {"ways__mtu": 9001}),
        ("data-sizes", "warning", "2,000 bytes on node 1", {}),
        ("disk", "warning", "0.1 GB", {"limits__disk_bytes": 1e8}),
        ("open-files", "warning", "256 files", {"limits__open_files": 256}),
        ("read-speed", "warning", "1600", {"data__read": {"files_per_s": 900, "bytes_per_s": 1}}),
        ("decode-speed", "warning", "400 for each of 4", {"limits__cores": 4}),
    ],
)
def test_trouble_of_one_node(name, level, words, changes):
    second = facts(1, **changes)
    if name == "data-sizes":
        second["data"]["parts"] = {
            part: one | {"sizes": "1", "bytes": 2000}
            for part, one in second["data"]["parts"].items()
        }
    found = troubles(check(facts(0), second))
    assert list(found) == [name]
    assert found[name].startswith(level)
    assert words in found[name]


def test_small_shared_memory_matters_between_the_gpus_of_a_node():
    for count, expected in ((1, []), (2, ["shm"])):
        gpus = {"gpus__names": ["Tesla T4"] * count}
        found = troubles(check(facts(0, **gpus), facts(1, limits__shm_bytes=67e6, **gpus)))
        assert list(found) == expected


def test_little_disk_on_node_0_is_a_fault():
    found = troubles(check(facts(0, limits__disk_bytes=1e8), facts(1)))
    assert found["disk"].startswith("fault")


def test_master_by_a_name_that_means_loopback_on_node_0():
    found = troubles(check(facts(0, master_is="127.0.1.1"), facts(1)))
    assert list(found) == ["master-name"]
    assert "127.0.1.1" in found["master-name"]
    # Doctors on one machine may meet on the loopback.
    alone = facts(0, master_is="127.0.0.1", seen_from="127.0.0.1")
    assert not troubles(check(alone, facts(1, seen_from="127.0.0.1")))


def test_public_address_of_the_master():
    assert list(troubles(check(facts(0, owns_master=False), facts(1)))) == ["master-address"]


def test_slow_link_and_slow_network():
    rates = {0: 1.2e9, 1: 0.1e9, 2: 1.2e9}
    found = troubles(check(facts(0), facts(1), facts(2), ring={1: rates}))
    assert list(found) == ["slow-link"]
    assert "node 1 (host1) sends 0.8 Gbit/s to node 2 (host2)" in found["slow-link"]
    slow = check(facts(0), facts(1))
    slow.torch = {
        r: one | {"nccl": {"latency_s": 0.1, "bytes_per_s": 1e8}} for r, one in slow.torch.items()
    }
    found = troubles(slow)
    assert list(found) == ["forecast"]
    assert "with --comm int4, which auto would take" in found["forecast"]


def test_lost_node_and_failed_torch_part_are_faults():
    checkup = check(facts(0), facts(1))
    checkup.lost = {1: "it has left the check"}
    checkup.torch[1] = {"torch": {"gpus": 4}, "error": "no end after 300 s"}
    found = troubles(checkup)
    assert set(found) == {"node-lost", "torch-part"}
    assert "after torch: no end after 300 s" in found["torch-part"]


# ---- numbers


def test_assumed_need():
    from checkup.judge_speed import assumed_need

    assert assumed_need("Tesla T4", 4.09) == 400
    assert assumed_need("NVIDIA A100-SXM4-40GB", 8.18) == 1235
    assert assumed_need("GeForce 9", 4.09) is None
    assert assumed_need("Tesla T4", None) is None


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("eth", "eth0"),
        ("=eth1", "eth1"),
        ("=eth", "=eth"),
        ("^docker,eth0", "eth1"),
        ("ib0,eth1", "eth1"),
        ("lo", "lo"),
    ],
)
def test_what_nccl_takes(value, chosen):
    from checkup.facts import _nccl_choice

    own = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1", "eth1": "10.1.0.1"}
    assert _nccl_choice(value, own) == chosen


def test_unlike():
    a, b = {"this code": {"x.py": "1", "y.py": "1"}, "torch": "2.14"}, {}
    assert agreement.unlike([("n0", a), ("n1", a)]) is None
    b = a | {"this code": {"x.py": "1", "y.py": "2", "z.py": "3"}}
    sentence = agreement.unlike([("n0", a), ("n1", a), ("n2", b)])
    assert "this code differs" in sentence
    assert "y.py: 1 on n0 and n1, 2 on n2 (and 1 more)" in sentence
    sentence = agreement.unlike([("n0", a), ("n1", a | {"torch": "2.11"})])
    assert "torch differs between the nodes: 2.14 on n0, 2.11 on n1: install" in sentence


def test_versions_without_importing_torch():
    done = python(
        "-c",
        "import sys; from utils.launch import agreement as p; "
        "print(p.torch_version(), 'torch' in sys.modules); import torch; print(torch.__version__)",
    )
    first, second = done.out.splitlines()
    assert first == f"{second} False"


# ---- doctors on the loopback


def two(rest: str, *changes: str) -> list[Result]:
    """The doctor of node 0, and others, whose additional options are ``changes``."""
    base = f"python {DOCTOR} {SMALL} --master 127.0.0.1 {rest}"
    return shell(f"{base} --rank 0", *(f"{base} {change}" for change in changes))


def test_two_doctors_on_one_machine(folder, tmp_path):
    rest = f"--port {free_port()} --nodes 2 --data {folder} --json {tmp_path}/found.json"
    results = two(rest, "--rank 1")
    assert [result.code for result in results] == [0, 0], results
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["ways"]) == 4  # 2 directions x 2 ports
    assert {way["reason"] for way in found["ways"]} == {None}


def test_one_node_alone(folder):
    done = python(DOCTOR, *SMALL.split(), "--data", folder)
    assert done.code == 0, done
    assert "data ports" not in done.out


def test_python_without_packages(folder):
    """-S: the bare interpreter, as if the environment had not been activated."""
    assert python("-S", "-c", "import numpy").code == 1
    done = python("-S", DOCTOR, "--batch-size", "16", "--image-size", "32", "--data", folder)
    assert done.code == 2
    assert "✗ node 0" in done.out
    assert "has no torch" in done.out
    assert "numpy is missing" in done.out
    assert not done.err


def test_rank_typed_twice(folder):
    rest = f"--port {free_port()} --nodes 3 --data {folder} --wait 4"
    results = two(rest, "--rank 1", "--rank 1")
    assert [result.code for result in results] == [2, 2, 2], results
    refused = [result.out for result in results[1:] if "refuses this node" in result.out]
    assert len(refused) == 1
    assert "has connected with --rank 1, too" in refused[0]
    assert "1 of 3 nodes did not connect" in results[0].out


def test_other_number_of_nodes(folder):
    rest = f"--port {free_port()} --data {folder} --wait 3"
    results = two(f"{rest} --nodes 2", "--rank 1 --nodes 3")
    assert "node 0 was started with --nodes 2, this node with 3" in results[1].out
    assert [result.code for result in results] == [2, 2]


def test_nobody_at_the_master_port(folder):
    options = (*SMALL.split(), "--nodes", "2", "--rank", "1", "--wait", "0.5", "--data", folder)
    done = python(DOCTOR, *options, "--master", "127.0.0.1", "--port", free_port())
    assert done.code == 2
    assert "cannot be reached after 0.5 s (connection refused)" in done.out


def close_the_first(server: socket.socket) -> None:
    """Accept one connection and close it."""
    server.accept()[0].close()


@pytest.mark.parametrize("rank", [0, 1])
def test_master_port_of_another_program(folder, rank):
    """Node 0 cannot open the port; what answers node 1 is not the doctor."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = ("--nodes", "2", "--rank", rank, "--port", port, "--data", folder)
        if rank == 1:
            other.settimeout(60)
            threading.Thread(target=close_the_first, args=(other,), daemon=True).start()
        done = python(DOCTOR, *SMALL.split(), *options, "--master", "127.0.0.1")
    assert done.code == 2
    assert ("cannot be opened" if rank == 0 else "it is not the doctor") in done.out


def test_wrong_options_are_a_sentence():
    for options, words in (
        (("--nodes", "2"), "needs --master"),
        (("--nodes", "2", "--rank", "2", "--master", "x"), "not one of 0 to 1"),
        (("--port", "65536"), "--port: 65536 is not from 1 to 65535"),
        (("--batch-size", "many"), "--batch-size: invalid whole number"),
    ):
        done = python(DOCTOR, *options)
        assert done.code == 2
        assert words in done.sentence
    assert "--rank: invalid whole number" in python(DOCTOR, NODE_RANK="first").sentence
