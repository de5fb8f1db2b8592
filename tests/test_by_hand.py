"""The places of processes, started by hand or by a launcher, and what all nodes must agree on."""

import argparse
import functools
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from joined import in_processes

from utils.errors import UserError
from utils.launch import agreement, gpus, launch, network, preflight, supervise, world

MASTER = {"MASTER_ADDR": "b", "MASTER_PORT": "8"}
SECOND = ["2/4 0/2", "3/4 1/2"]  # the processes of the second of two nodes
VARIABLES = ("WORLD_SIZE", "NODE_RANK", "MASTER_PORT")
LAUNCHED = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} | MASTER
WRONG = ["RANK=x", "RANK=2", "RANK=0", "LOCAL_WORLD_SIZE=1", "LOCAL_WORLD_SIZE=3"]
WRONG += ["MASTER_PORT=99999", "MASTER_ADDR="]


@pytest.fixture
def clean(monkeypatch):
    """No variables of a launcher, also afterwards; no GPU is looked for."""
    changed = mock.patch.dict(os.environ)
    changed.start()
    for name in ("LOCAL_RANK", "RANK", "OMP_NUM_THREADS", *VARIABLES, *MASTER):
        os.environ.pop(name, None)
    monkeypatch.setattr(gpus, "check", lambda: None)
    yield monkeypatch
    changed.stop()


def parsed(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    launch.add_options(parser)
    return parser.parse_args([*line.split(), "--dist-timeout", "9"])


@pytest.mark.parametrize(
    ("line", "env", "visible", "places", "master", "named"),
    [
        ("", {}, 0, ["0/1 0/1"], "127.0.0.1:7", None),
        ("", {}, 2, ["0/2 0/2", "1/2 1/2"], "127.0.0.1:7", None),
        ("-g 2", MASTER, 3, ["0/2 0/2", "1/2 1/2"], "b:8", None),
        (
            "-n 2 -nr 1 --dist-url tcp://a:6 -g 2",
            MASTER | {"WORLD_SIZE": "9", "NODE_RANK": "5"},
            0,
            SECOND,
            "a:6",
            ("--world-size (-n)", "--rank (-nr)", "port in --dist-url"),
        ),
        (
            "",
            {"WORLD_SIZE": "2", "NODE_RANK": "1", "MASTER_ADDR": "b"},
            2,
            SECOND,
            "b:29500",
            VARIABLES,
        ),
        (
            "--world-size 2 --rank 1 --gpus 2",
            MASTER | {supervise.MARKER: "launcher:run"},
            2,
            SECOND,
            "b:8",
            ("NODES", "NODE_RANK", "MASTER_PORT"),
        ),
    ],
)
def test_places_by_hand(clean, line, env, visible, places, master, named):
    """As torchrun gives them. Several nodes check each other first, for --dist-timeout at most."""
    checks = []

    class Check:
        def __init__(self, *how):
            checks.append(how)

        def begin(self, ends_process):
            checks.append(ends_process)

        def finish(self, processes):
            checks.append(processes)

    os.environ.update(env)
    clean.setattr(torch.cuda, "device_count", lambda: visible)
    clean.setattr(network, "free_port", lambda: 7)
    clean.setattr(preflight, "Preflight", Check)
    clean.setattr(supervise, "supervise", lambda worker, args, environments: environments)
    found = launch.run(None, parsed(line))
    form = "{RANK}/{WORLD_SIZE} {LOCAL_RANK}/{LOCAL_WORLD_SIZE}"
    assert [form.format(**place) for place in found] == places
    assert {"{MASTER_ADDR}:{MASTER_PORT}".format(**place) for place in found} == {master}
    host, _, port = master.partition(":")
    assert checks == ([(1, 2, (host, int(port)), 9.0, named), False, 2] if named else [])


@pytest.mark.parametrize(
    ("line", "env", "words"),
    [
        ("-g 3", {}, "-g 3 asks for more GPUs than the 2 of"),
        ("-n 2 -nr 2", MASTER, "--rank 2 is not one of the node ranks 0 to 1"),
        ("", {"WORLD_SIZE": "2"}, "--dist-url tcp://IP:PORT"),
        ("--dist-url 127.0.0.1:8888", {}, "--dist-url 127.0.0.1:8888 is not of the form tcp://"),
        ("", MASTER | {"NODE_RANK": "x"}, "NODE_RANK=x is wrong: 'x' is not a whole"),
        ("", MASTER | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is wrong: "),
        *(("", LAUNCHED | {wrong.split("=")[0]: wrong.split("=")[1]}, wrong) for wrong in WRONG),
    ],
)
def test_places_that_cannot_be(clean, line, env, words):
    os.environ.update(env)
    clean.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=words):
        launch.run(None, parsed(line))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("visible", [0, 2])
def test_a_process_joins_by_its_own_device_threads_interface_and_limit(clean, nodes, visible):
    """Under every launcher; with ``visible`` GPUs."""
    calls = []

    def note(name, result=None):
        return lambda *words, **more: calls.append((name, *words, *more.values())) or result

    place = {"RANK": 2 * nodes - 1, "WORLD_SIZE": 2 * nodes, "LOCAL_RANK": 1} | MASTER
    os.environ.update({name: str(value) for name, value in place.items()}, LOCAL_WORLD_SIZE="2")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.pop(name, None)
    clean.setattr(torch.cuda, "is_available", lambda: visible > 0)
    clean.setattr(torch.cuda, "device_count", lambda: visible)
    clean.setattr(torch.cuda, "set_device", note("device"))
    clean.setattr(torch, "set_num_threads", note("threads"))
    clean.setattr(supervise, "usable_cores", lambda: 6)
    clean.setattr(network, "interface_towards", lambda host: {"b": "eth7"}[host])
    clean.setattr(network, "connect", note("connect", mock.Mock()))
    clean.setattr(dist, "init_process_group", note("init"))
    clean.setattr(dist, "new_group", note("control", "control group"))
    before = torch.get_float32_matmul_precision()
    args = SimpleNamespace(dist_backend=None, dist_timeout=9.0, sync_bn=bool(visible))
    found = world._join(args)
    torch.set_float32_matmul_precision(before)
    assert (found.rank, found.size, found.local_rank) == (2 * nodes - 1, 2 * nodes, 1)
    assert (found.local_size, found.nodes, found.control) == (2, nodes, "control group")
    assert found.device == torch.device("cuda:1" if visible else "cpu")
    limit = world.timedelta(seconds=9)
    assert calls == [
        ("device", torch.device("cuda:1")) if visible else ("threads", 3),
        ("connect", "b", 8, 9.0),
        ("init", "nccl" if visible else "gloo", 2 * nodes - 1, 2 * nodes, limit),
        ("control", "gloo", limit),
    ]
    assert os.environ["GLOO_SOCKET_IFNAME"] == ("eth7" if nodes > 1 else "lo")
    assert os.environ.get("NCCL_SOCKET_IFNAME") == ("=eth7" if nodes > 1 else None)


@pytest.mark.parametrize(
    ("visible", "more", "fault", "words"),
    [
        (1, {}, None, "2 processes on this node, but it has only 1 GPUs"),
        (0, {"sync_bn": True}, None, "--sync-bn needs GPUs"),
        (0, {}, RuntimeError("EADDRINUSE"), "port 8 of b is taken by another program"),
        (
            0,
            {},
            RuntimeError("timed out\nin C++"),
            r"rank 1 could not.* 2 .*b:8 within 9 s.*out\)$",
        ),
    ],
)
def test_a_process_that_cannot_join_says_why(clean, visible, more, fault, words):
    os.environ.update(LAUNCHED)
    clean.setattr(torch.cuda, "is_available", lambda: visible > 0)
    clean.setattr(torch.cuda, "device_count", lambda: visible)
    clean.setattr(network, "connect", mock.Mock())
    clean.setattr(dist, "init_process_group", mock.Mock(side_effect=fault))
    args = {"dist_backend": None, "dist_timeout": 9.0, "sync_bn": False} | more
    with pytest.raises(UserError, match=words):
        world._join(SimpleNamespace(**args))


@pytest.mark.parametrize(
    ("script", "line", "wanted"),
    [
        (
            "ddp_apex",
            "--b 7 -nr 3 -n 4 -g 2 --local_rank 1 --learning-rate 3 --weight-decay 1",
            {"batch_size": 7, "rank": 3, "world_size": 4, "gpus": 2, "local_rank": 1}
            | {"lr": 3.0, "weight_decay": 1.0},
        ),
        (
            "ddp",
            "--batch-size 7 --rank 3 --world-size 4 --wd 1 --desired-acc 75",
            {"batch_size": 7, "rank": 3, "world_size": 4, "weight_decay": 1.0, "desired_acc": 75.0}
            | {"lr": 0.1, "momentum": 0.9, "epochs": 90, "warmup_epochs": 0.0, "seed": 0}
            | {"dist_timeout": 300.0, "snapshot_minutes": 10.0, "max_bad_files": 100},
        ),
    ],
)
def test_options_have_the_names_and_defaults_that_people_know(folder, parse, script, line, wanted):
    found = parse(f"imagenet_{script}", *line.split(), folder)
    assert {name: found[name] for name in wanted} == wanted
    assert found["data"] == str(folder)


# ---- what differs between the nodes: one error on each, before anything is built

LINE = "the command line differs between the nodes: --"
DIFFERENT = [
    ("--lr 0.3", "--lr 0.4", f"{LINE}lr: 0.3 on {{0}}, 0.4 on {{1}}"),
    ("--seed 1", "--seed 2", f"{LINE}seed: 1 on {{0}}, 2 on {{1}}"),
    ("--mixup 0.2", "--wd 0.5", f"{LINE}mixup: 0.2 on {{0}}, 0.0 on {{1}} (and 1 more)"),
    ("--comm int8", "--comm fp32", f"{LINE}comm: int8 on {{0}}, fp32 on {{1}}"),
    ("-b 6", "-b 8", f"{LINE}batch-size: 6 on {{0}}, 8 on {{1}}"),
    ("-a resnet34", "-a resnet18", f"{LINE}arch: resnet34 on {{0}}, resnet18 on {{1}}"),
    ("--image-size 32", "--image-size 64", f"{LINE}image-size: 32 on {{0}}, 64 on {{1}}"),
    ("--resume a.pt", "", f"{LINE}resume: True on {{0}}, False on {{1}}"),
    ("--amp off", "", f"{LINE}amp: off on {{0}}, auto on {{1}}"),
    # Not typed, but what two functions of `agreement` find.
    ("code=1", "code=2", "this code differs between the nodes: a.py: 1 on {0}, 2 on {1}"),
    ("release=2.13", "release=2.14", "torch differs between the nodes: 2.13 on {0}, 2.14 on {1}"),
    # Other files: one image less.
    ("data=folder", "data=other", "the data set's train folder differs between the nodes: 60 i"),
    ("-j 1 -p 3 --name a --profile", "-j 2 -p 4 --name b --output-dir b", None),
]


class Built(Exception):
    """Training goes on to its model."""


def _ends(lines: list[tuple], folder: Path, rank: int, size: int) -> list[str]:
    """How rank ``rank`` of two nodes ends on each of ``lines`` (the words of each rank)."""
    import imagenet_ddp as script
    from utils.model import models

    found: list[str] = []
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(environment, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    for number, words in enumerate(lines):
        how = functools.partial(dist.init_process_group, init_method=f"file://{folder}/{number}")
        facts = dict(word.split("=") for word in words[rank].split() if "=" in word)
        typed = () if facts else words[rank].split()
        code = {"a.py": facts.get("code", "1")}
        with (
            mock.patch.object(
                sys, "argv", ["imagenet_ddp.py", *typed, str(folder / facts.get("data", "folder"))]
            ),
            mock.patch.object(dist, "init_process_group", how),
            mock.patch.object(network, "connect"),
            mock.patch.object(agreement, "code", return_value=code),
            mock.patch.object(agreement, "release", return_value=facts.get("release", "2.14")),
            mock.patch.object(models, "build", side_effect=Built),
        ):
            try:
                script.main()
            except UserError as error:
                found.append(f"{error.code} {error}")
            except Built:
                found.append("built")
        dist.destroy_process_group()
    return found


def test_what_differs_ends_every_node_with_one_error(folder, tmp_path):
    for name in ("folder", "other"):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "other/train/class_2/000.JPEG").unlink()
    found = in_processes(2, functools.partial(_ends, DIFFERENT, tmp_path), join=False)
    assert found[0] == found[1]
    nodes = [f"{socket.gethostname()} (node {number})" for number in range(2)]
    for (*_, message), end in zip(DIFFERENT, found[0], strict=True):
        assert end.startswith(f"2 {message.format(*nodes)}" if message else "built"), end


def crash(rank: int, size: int) -> None:
    if rank == 0:
        time.sleep(600)
    if os.fork():
        os._exit(0)
    time.sleep(5)
    os._exit(0)


def test_in_processes_sees_a_crash_at_once():
    """Without an exit code or a result, and though a child lives on."""
    with pytest.raises(AssertionError, match=r"ranks \{1\} have crashed"):
        in_processes(2, crash, join=False)
