"""The places of processes, started by hand or by a launcher, and what all nodes must agree on."""

import argparse
import contextlib
import errno
import functools
import io
import os
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from joined import in_processes

from utils.start import agreement, gpu_check, launch, meeting, preflight, world
from utils.start.errors import UserError

MASTER = {"MASTER_ADDR": "b", "MASTER_PORT": "8"}
VARIABLES = ("WORLD_SIZE", "NODE_RANK", "MASTER_PORT")
LAUNCHED = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} | MASTER


@pytest.fixture
def clean(monkeypatch):
    """No variables of a launcher, also afterwards; no GPU is looked for."""
    interfaces = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    with mock.patch.dict(os.environ):
        for name in ("LOCAL_RANK", "RANK", "OMP_NUM_THREADS", *interfaces, *VARIABLES, *MASTER):
            os.environ.pop(name, None)
        monkeypatch.setattr(gpu_check, "check_gpus", lambda: None)
        yield monkeypatch


def run(line: str, env: dict[str, str], visible: int) -> list[dict]:
    """What `launch.run` gives to the processes of this node, which has ``visible`` GPUs."""
    os.environ.update(env)
    parser = argparse.ArgumentParser()
    launch.add_options(parser)
    with (
        mock.patch.object(torch.cuda, "device_count", lambda: visible),
        mock.patch.object(launch, "free_port", lambda: 7),
        mock.patch.object(launch, "supervise", lambda worker, args, places: places),
    ):
        return launch.run(None, parser.parse_args([*line.split(), "--dist-timeout", "9"]))


LINE = "-n 2 -nr 1 --dist-url tcp://a:6 -g 2"
ELSEWHERE = MASTER | {"WORLD_SIZE": "9", "NODE_RANK": "5"}
BY_OPERATOR = MASTER | {"WORLD_SIZE": "2", "RANK": "1"}  # of Kubernetes, which counts pods
DEFAULT_PORT = {"WORLD_SIZE": "2", "NODE_RANK": "1", "MASTER_ADDR": "b"}


@pytest.mark.parametrize(
    ("line", "env", "visible", "places", "nodes"),
    [
        ("", {}, 0, "0/1 0/1 127.0.0.1:7", 1),
        ("-g 2", MASTER, 3, "0/2 0/2 127.0.0.1:7, 1/2 1/2 127.0.0.1:7", 1),  # of another job
        ("--dist-url tcp://a:6", MASTER, 1, "0/1 0/1 a:6", 1),
        (LINE, ELSEWHERE, 0, "2/4 0/2 a:6, 3/4 1/2 a:6", 2),
        ("", DEFAULT_PORT, 2, "2/4 0/2 b:29500, 3/4 1/2 b:29500", 2),
        ("", DEFAULT_PORT | {"RANK": "0"}, 2, "2/4 0/2 b:29500, 3/4 1/2 b:29500", 2),
        ("", BY_OPERATOR, 2, "2/4 0/2 b:8, 3/4 1/2 b:8", 2),
        ("", BY_OPERATOR | {"WORLD_SIZE": "1"}, 1, "0/1 0/1 127.0.0.1:7", 1),
        ("-n 2 -nr 1 -g 3", MASTER, 0, "3/6 0/3 b:8, 4/6 1/3 b:8, 5/6 2/3 b:8", 2),
        ("--world-size 2 --rank 1", MASTER, 2, "2/4 0/2 b:8, 3/4 1/2 b:8", 2),
    ],
)
def test_places_by_hand(clean, line, env, visible, places, nodes):
    """As torchrun gives them. Several nodes check each other first, for --dist-timeout at most."""
    check = mock.Mock()
    clean.setattr(preflight, "meet", check)
    form = "{RANK}/{WORLD_SIZE} {LOCAL_RANK}/{LOCAL_WORLD_SIZE} {MASTER_ADDR}:{MASTER_PORT}"
    assert ", ".join(form.format(**place) for place in run(line, env, visible)) == places
    host, port = places.rpartition(" ")[2].split(":")
    calls = [mock.call(1, 2, places.count(",") + 1, (host, int(port)), 9.0)]
    assert check.mock_calls == (calls if nodes > 1 else [])


@pytest.mark.parametrize(
    ("task", "pid", "nodes", "says"),
    [(0, 0, "1", True), (1, 0, "1", False), (0, 1, "1", False), (0, 0, "2", False)],
)
def test_copies_of_srun_that_train_alone_are_noticed(clean, capsys, task, pid, nodes, says):
    clean.setattr(preflight, "meet", mock.Mock())
    env = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": str(task)} | MASTER
    run("", env | {"SLURM_TASK_PID": str(os.getpid() + pid), "WORLD_SIZE": nodes}, 1)
    assert ("srun has started 4 copies" in capsys.readouterr().out) == says
    world.single_process()  # imagenet_nd.py, which always trains alone
    alone = says or nodes == "2"
    assert ("srun has started 4 copies" in capsys.readouterr().out) == alone


@pytest.mark.parametrize(
    ("line", "env", "words"),
    [
        ("-g 3", {}, "-g 3 is too large: GPUs of this node: 2"),
        ("-n 2 -nr 2", MASTER, "--node-rank 2 is not one of the node ranks 0 to 1"),
        ("", {"NODE_RANK": "1"}, "^NODE_RANK=1 in the environment is not one of .* ranks 0 to 0"),
        ("", BY_OPERATOR | {"RANK": "2"}, "^RANK=2 in the environment is not one of"),
        ("", {"WORLD_SIZE": "2"}, "--dist-url tcp://IP:PORT"),
        ("-n 2", MASTER | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is wrong: "),
        ("-n 2", MASTER | {"MASTER_ADDR": ""}, "2 nodes need the address of node 0"),
        ("", LAUNCHED | {"RANK": "x"}, "RANK=x"),
        ("", LAUNCHED | {"RANK": "2"}, "RANK=2"),
        ("", LAUNCHED | {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 LOCAL_WORLD_SIZE=1"),
        ("", LAUNCHED | {"MASTER_ADDR": ""}, "MASTER_ADDR= in the environment do not describe"),
        ("", LAUNCHED | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999"),
    ],
)
def test_places_that_cannot_be(clean, line, env, words):
    with pytest.raises(UserError, match=words):
        run(line, env, 2)


def join(patch, visible: int, calls: mock.Mock, sync_bn: bool) -> world.World:
    """Join the job that the environment names; ``calls`` notes what it calls."""
    patch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    patch.setattr(torch.cuda, "device_count", lambda: visible)
    patch.setattr(world, "usable_cores", lambda: 6)
    patch.setattr(preflight, "interface_towards", {"b": "eth7"}.get)
    patch.setattr(torch, "set_num_threads", calls.set_num_threads)
    patch.setattr(torch.cuda, "set_device", calls.set_device)
    patch.setattr(preflight, "connect", calls.connect)
    patch.setattr(world, "choose_kernels", lambda _: None)
    patch.setattr(meeting, "meet_all", lambda *_: None)
    patch.setattr(dist, "init_process_group", calls.init_process_group)
    patch.setattr(dist, "new_group", calls.new_group)
    patch.setattr(dist, "all_gather_object", lambda *_, **__: None)
    patch.setattr(dist, "destroy_process_group", lambda: None)
    patch.setattr(world.socket, "create_connection", mock.Mock(side_effect=OSError))  # no signs
    patch.setattr(world.nccl, "version", lambda: (2, 1))
    patch.setattr(agreement, "compare_processes", lambda *_: [])
    args = SimpleNamespace(dist_backend=None, dist_timeout=9.0, sync_bn=sync_bn)
    with world.process_group(args) as joined:
        return joined


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_gpu_may_choose_its_kernels_by_speed(monkeypatch, kind):
    """And compute float32 in TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    precision = torch.get_float32_matmul_precision()
    try:
        world.choose_kernels(torch.device(kind))
        chosen = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
        chosen += (torch.get_float32_matmul_precision() == "high",)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert chosen == (kind == "cuda",) * 3


@pytest.mark.parametrize(("nodes", "visible"), [(1, 0), (1, 2), (2, 0), (2, 2)])
def test_a_process_joins_by_its_own_device_threads_interface_and_limit(clean, nodes, visible):
    """Under every launcher."""
    rank, size, calls = 2 * nodes - 1, 2 * nodes, mock.Mock()
    os.environ.update(LAUNCHED, RANK=str(rank), WORLD_SIZE=str(size))
    joined = join(clean, visible, calls, sync_bn=bool(visible))
    device = torch.device("cuda:1" if visible else "cpu")
    assert joined == world.World(device, rank, size, 1, 2, nodes, calls.new_group.return_value)
    assert joined.node_name == f"{socket.gethostname()} (node {nodes - 1})"
    assert calls.set_device.mock_calls == [mock.call(device)] * bool(visible)
    assert calls.set_num_threads.mock_calls == [mock.call(3)] * (not visible)
    how = calls.init_process_group.call_args
    assert how.args == ("nccl" if visible else "gloo",)
    assert (how.kwargs["rank"], how.kwargs["world_size"]) == (rank, size)
    # NCCL ends without a good message, so gloo's group is to end first.
    assert how.kwargs["timeout"].total_seconds() == (13.5 if visible else 9)
    assert calls.new_group.call_args.kwargs["timeout"].total_seconds() == 9
    assert os.environ["GLOO_SOCKET_IFNAME"] == ("eth7" if nodes > 1 else "lo")
    assert os.environ.get("NCCL_SOCKET_IFNAME") == ("=eth7" if nodes > 1 else None)


@pytest.mark.parametrize(
    ("visible", "error", "words"),
    [
        (1, None, "2 processes on this node, but it has only 1 GPUs"),
        (0, None, "--sync-bn needs GPUs: leave it out"),
        (0, RuntimeError("EADDRINUSE"), "port 8 of b is taken by another program"),
        (0, RuntimeError("timed out\nin C++"), r"rank 1 could not.* b:8 within 9 s.*out\)$"),
        (0, RuntimeError(os.strerror(errno.EAGAIN)), "no more processes or threads can be"),
    ],
)
def test_a_process_that_cannot_join_says_why(clean, visible, error, words):
    os.environ.update(LAUNCHED)
    calls = mock.Mock(**{"init_process_group.side_effect": error})
    with pytest.raises(UserError, match=words):
        join(clean, visible, calls, sync_bn=not error)


def test_options_have_the_names_that_people_know(folder, parse):
    lines = (
        "--b 7 -nr 3 -n 4 -g 2 --local_rank 1 --learning-rate 3 --weight-decay 1",
        "--batch-size 7 --rank 3 --world-size 4 --gpus 2 --local-rank 1 --lr 3 --wd 1",
    )
    one, other = (parse("imagenet_ddp_apex", *line.split(), folder) for line in lines)
    assert one == other


# ---- what differs between the nodes: one error on each, before anything is built

DIFFERS = "the command line differs between the nodes: --"
MANY = f"{DIFFERS}amp: auto on {{0}}, off on {{1}} (and 6 more): use"
DIFFERENT = [
    ("--lr 0.3", "--lr 0.4", f"{DIFFERS}lr: 0.3 on {{0}}, 0.4 on {{1}}: use the same"),
    ("--image-size 64", "", f"{DIFFERS}image-size: 64 on {{0}}, 224 on {{1}}: use the same"),
    ("--seed 1 --mixup 0.2 --comm int8", "-b 6 --amp off -a vgg11 --image-size 64", MANY),
    ("--resume a.pt", "", f"{DIFFERS}resume: True on {{0}}, False on {{1}}"),
    # Not options, but properties of the node.
    ("code=1", "code=2", "this code differs between the nodes: a.py: 1 on {0}, 2 on {1}"),
    ("release=2.13", "release=2.14", "torch differs between the nodes: 2.13 on {0}, 2.14 on {1}"),
    ("script=nd", "script=dp", "the training script differs between the nodes: nd on {0}, dp on"),
    # Other files: one image less.
    ("data=folder", "data=other", "the data set's train folder differs between the nodes: 60 i"),
    # An image of the same name and another size.
    ("data=folder", "data=shrunk", "the size of files in the data set's train folder differs bet"),
    ("-j 1 -p 3 --name a --profile", "-j 2 -p 4 --name b --output-dir b", None),
]


class Built(Exception):
    """Training has come to its model."""


def _ends(lines: list[tuple], folder: Path, rank: int, size: int) -> list[str]:
    """How rank ``rank`` of two nodes ends on each of ``lines`` (the words of each rank)."""
    import imagenet_ddp as script
    from utils.model import models

    results: list[str] = []
    os.environ.update(LAUNCHED, RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    for number, words in enumerate(lines):
        how = functools.partial(dist.init_process_group, init_method=f"file://{folder}/{number}")
        facts = {"code": "1", "release": "2.14", "data": "folder", "script": "ddp"}
        facts |= dict(word.split("=") for word in words[rank].split() if "=" in word)
        options = [word for word in words[rank].split() if "=" not in word]
        line = [facts["script"], *options, str(folder / facts["data"])]
        with (
            mock.patch.object(sys, "argv", line),
            mock.patch.object(dist, "init_process_group", how),
            mock.patch.object(preflight, "connect"),
            mock.patch.object(meeting, "meet_all", return_value=None),
            mock.patch.object(agreement, "code", return_value={"a.py": facts["code"]}),
            mock.patch.object(agreement, "release", return_value=facts["release"]),
            mock.patch.object(models, "build", side_effect=Built),
            contextlib.redirect_stdout(io.StringIO()) as said,
        ):
            try:
                script.main()
            except UserError as error:
                results.append(f"{error.code} {error}")
            except Built:
                results.append(f"built {said.getvalue()}")
        dist.destroy_process_group()
    return results


def test_what_differs_ends_every_node_with_one_error(folder, tmp_path):
    for name in ("folder", "other", "shrunk"):
        shutil.copytree(folder, tmp_path / name)
    with open(tmp_path / "shrunk/train/class_1/003.JPEG", "ab") as changed:
        changed.write(b"x")
    (tmp_path / "other/train/class_2/000.JPEG").unlink()
    results = in_processes(2, functools.partial(_ends, DIFFERENT, tmp_path), join=False)
    assert results[0][:-1] == results[1][:-1]
    nodes = [f"{socket.gethostname()} (node {number})" for number in range(2)]
    for (*_, message), end in zip(DIFFERENT, results[0], strict=True):
        assert end.startswith(f"2 {message.format(*nodes)}" if message else "built"), end
    noted = "note: --name differs between the nodes: a on {}, b on {}".format(*nodes)
    assert noted in results[0][-1] and noted not in results[1][-1]


def test_a_process_whose_torchrun_was_there_waits_less_for_node_0(clean):
    os.environ.update(LAUNCHED, LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    clean.setattr(preflight, "PATIENCE", 3.0)
    calls = mock.Mock(**{"connect.side_effect": UserError("refused")})
    with pytest.raises(UserError, match=r"^torchrun on node 0 cannot be reached any more") as error:
        join(clean, 0, calls, sync_bn=False)
    assert (error.value.code, calls.connect.call_args.args[2]) == (69, 3.0)


def test_messages_of_a_lost_peer():
    """More of them: test_elastic."""
    for message in (
        "Application timeout caused pair closure",
        "Timed out waiting 9000ms for recv operation to complete",
        "NCCL communicator was aborted on rank 0",
    ):
        assert world.is_lost_peer(RuntimeError(message)), message
