"""Launchers as far as they go before a node is reached, and the examples without their packages."""

import argparse
import importlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, python

from utils.start.errors import UserError

sys.path += [str(ROOT / "scripts/ssh"), str(ROOT / "scripts/examples")]
import hivemind_train
import launcher
from job import TORCHRUN

DDP = ["imagenet_ddp.py", "-a", "resnet50", "DATA"]
HOSTS = "# two\nu@a slots=2 # one\n\nb ip=10.0.0.2  slots=2 runs=/r\n"


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        (f"-np 4 -H u@a:2,b:2 python {' '.join(DDP)}", [("u@a", 2, None), ("b", 2, None)]),
        (f"--python python -H a,b -- python {' '.join(DDP)}", [("a", 1, None), ("b", 1, None)]),
        (f"FILE -np 4 -- {' '.join(DDP)}", [("u@a", 2, None), ("b", 2, "10.0.0.2")]),
        (f"FILE -np 2 -- {' '.join(DDP)}", [("u@a", 2, None)]),
    ],
)
def test_hosts_of_a_file_and_as_horovod_lists_them(tmp_path, words, hosts):
    (tmp_path / "hosts").write_text(HOSTS)
    options, command = launcher.parse(words.replace("FILE", f"{tmp_path}/hosts").split())
    machines = launcher.machines_of(options)
    assert [(host.address, host.slots, host.ip) for host in machines] == hosts
    assert command == DDP


# Stands in for ssh: this machine, in the folder "home", is every host.
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -[ol] ]] && shift; shift; done
cd %s/home && shift && exec bash -c "$*"
"""
ELASTIC = "-- imagenet_ddp.py --name a"


@pytest.mark.parametrize(
    ("program", "words", "hosts", "named"),
    [
        ("launcher", "FILE -- imagenet_ddp.py", "a\nb slot=2", "line 2"),
        ("launcher", "FILE -- imagenet_ddp.py", "a\nroot@a", "twice"),
        ("launcher", "FILE -- imagenet_nd.py", "a\nb", "one node"),
        ("launcher", "FILE -np 6 -- imagenet_ddp.py", "a slots=2\nb slots=2", "-np 6 does not fit"),
        ("launcher", f"FILE --elastic 2:1 {ELASTIC}", "a", "MIN:MAX"),
        ("launcher", "FILE --env NOT_SET -- imagenet_ddp.py", "a", "NOT_SET has no value"),
        ("hivemind_train", "FILE", "", "pip install hivemind"),
    ],
)
def test_errors_before_a_node_is_reached(
    monkeypatch, capsys, tmp_path, program, words, hosts, named
):
    (tmp_path / "hosts").write_text(hosts)
    monkeypatch.setattr(launcher.Job, "run", None)  # a line that is not refused fails at once
    monkeypatch.setattr(hivemind_train, "find_spec", lambda _: None)
    place = tmp_path if program == "hivemind_train" else tmp_path / "hosts"
    monkeypatch.setattr(sys, "argv", [program, *words.replace("FILE", str(place)).split()])
    with pytest.raises((UserError, SystemExit)) as ended:
        importlib.import_module(program).main()
    said = capsys.readouterr().err if ended.type is SystemExit else str(ended.value)
    assert getattr(ended.value, "code", 2) == 2
    assert said.strip().count("\n") <= 1, said  # argparse shows how to call it first
    assert re.search(named, said)


def test_what_the_launcher_adds_to_a_command_and_what_it_copies(monkeypatch, tmp_path):
    for words, whole in (
        (["--name=a"], ["--resume", "auto", "--name=a"]),
        (["--name", "a", "--resume", "b.pt"], ["--name", "a", "--resume", "b.pt"]),
    ):
        command = ["imagenet_ddp.py", *words, "--output-dir", "out"]
        script = launcher.check(command, several=True, again=True)
        assert command == ["imagenet_ddp.py", *whole, "--output-dir", "out"]
    calls: list[list[str]] = []
    done = SimpleNamespace(returncode=0, stdout=b"")
    monkeypatch.setattr(launcher.subprocess, "run", lambda words, **_: calls.append(words) or done)
    monkeypatch.chdir(tmp_path)
    options, _ = launcher.parse(["hosts", "--dir=~/code", "--", "imagenet_ddp.py"])
    launcher.fetch(options, launcher.Host("u@b"), script)
    assert calls.pop(0)[-2:] == ["u@b", "test -d code/out/a"]
    assert calls[0][-2:] == ["u@b:code/out/a/", "out/a/"]
    monkeypatch.setenv("HOME", str(tmp_path))  # here; there, ssh and rsync begin in the home folder
    script = launcher.check(["imagenet_ddp.py", "--name=a", "--output-dir=~/out"], True, False)
    launcher.fetch(options, launcher.Host("u@b"), script)
    assert calls.pop(1)[-1] == "test -d out/a"
    assert calls.pop(1)[-2:] == ["u@b:out/a/", f"{tmp_path}/out/a/"]
    homes = [launcher.parse(["hosts", "--dir", x, "--", "x"])[0].dir for x in ("~", "~/", "~/a")]
    assert homes == [".", ".", "a"]
    for part in ("scripts", ".venv-oldest/pyvenv.cfg", "my env/conda-meta"):
        (tmp_path / part).mkdir(parents=True)
    monkeypatch.setattr(launcher, "ROOT", tmp_path)
    launcher.sync(options, launcher.Host("u@fe80::1"))
    assert calls[1][-2:] == [f"{tmp_path}/", "u@[fe80::1]:code/"]
    left_out = {one.removeprefix("--exclude=") for one in calls[1] if one.startswith("--exclude")}
    always = {".git", ".venv", "__pycache__", "/runs", "/data", ".*_cache", "/.synced"}
    assert left_out == {"/.venv-oldest", "/my env"} | always


@pytest.fixture
def copying(tmp_path, monkeypatch):
    """The launcher's options with `SSH`. Its code is in "code", the current folder is "here"."""
    if not shutil.which("rsync"):
        pytest.skip("rsync is missing")
    for name in ("home", "code", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "ssh").write_text(SSH % tmp_path)
    (tmp_path / "ssh").chmod(0o755)
    for module in (launcher, launcher.agreement):
        monkeypatch.setattr(module, "ROOT", tmp_path / "code")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("RSYNC_OLD_ARGS", "1")  # as before rsync 3.2.4

    def copying(*words: str) -> argparse.Namespace:
        return launcher.parse(["hosts", f"--ssh={tmp_path}/ssh", *words, "--", "x"])[0]

    return copying


def test_code_and_runs_in_folders_with_spaces(copying, tmp_path):
    options = copying("--dir", "a suite/in it")
    (tmp_path / "code/one.py").touch()
    launcher.sync(options, launcher.Host("u@b"))
    run = tmp_path / "home/a suite/in it/all runs/a run"
    assert (run.parents[1] / "one.py").exists()
    run.mkdir(parents=True)
    (run / "train.log").touch()
    script = argparse.Namespace(output_dir="all runs", name="a run")
    launcher.fetch(options, launcher.Host("b"), script)
    assert (tmp_path / "here/all runs/a run/train.log").exists()


@pytest.mark.parametrize(
    ("answers", "code", "ends", "said"),
    [
        (True, 0, 0, "launcher: nothing to copy back: there is no b:suite/runs/a\n"),
        (True, 69, 69, "launcher: nothing to copy back: there is no b:suite/runs/a\n"),
        (False, 75, 75, "launcher: ssh to b failed: does `{}/ssh u@b python3 -V` work"),
        (False, 0, 2, "ssh to b failed: does "),
    ],
)
def test_a_run_that_cannot_be_fetched_leaves_the_code_of_the_job(
    copying, monkeypatch, capsys, tmp_path, answers, code, ends, said
):
    copying()
    if not answers:
        (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    words = ["-H", "b", "--fetch", "--dir=suite", f"--ssh={tmp_path}/ssh", "--", *DDP]
    monkeypatch.setattr(launcher, "ROOT", ROOT)
    monkeypatch.setattr(sys, "argv", ["train_on_nodes.sh", *words, "--name", "a"])
    monkeypatch.setattr(launcher.signals, "handle", lambda *_: None)
    monkeypatch.setattr(launcher.Job, "run", lambda _: code)
    monkeypatch.setattr(launcher.Job, "run_host", launcher.Host("u@b"))
    try:
        ended = launcher.main()
    except UserError as error:
        ended = launcher.errors.report(error)
    assert ended == ends
    assert capsys.readouterr().err.removeprefix("error: ").startswith(said.format(tmp_path))
    assert not list((tmp_path / "here").iterdir())


def test_a_secret_leaves_the_command_line(monkeypatch):
    """Which a study writes onto its page."""
    monkeypatch.setenv("EMPTY", "a value here")
    words = [
        "hosts",
        "--env=A=secret",
        "--env",
        "B=secret",
        "--env=HOME",
        "--env=EMPTY=",
        "--",
        "x",
    ]
    monkeypatch.setattr(sys, "argv", words)
    options, _ = launcher.parse([*words])
    assert sys.argv == ["hosts", "--env=A", "--env", "B", "--env=HOME", "--env=EMPTY", "--", "x"]
    values = {"A": "secret", "B": "secret", "HOME": os.environ["HOME"], "EMPTY": ""}
    assert dict(options.env) == values


def test_code_that_is_gone_here_goes_there_and_other_files_stay(copying, tmp_path, capsys):
    """Nodes with old files and new ones could not train together."""
    options, there = copying("--dir", "suite"), tmp_path / "home/suite"
    for name in ("utils/old/a.py", "utils/stays.py", "data/x.py", "tests/own.py"):
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).touch()
    launcher.sync(options, launcher.Host("b"))
    own = there / "utils/own.py", there / "runs/x.py", there / "note.txt"
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    shutil.rmtree(tmp_path / "code/utils/old")
    assert "removed" not in capsys.readouterr().err
    for said in (", and removed what is gone here: utils/old/a.py\n", "b:suite\n"):
        launcher.sync(options, launcher.Host("b"))
        assert capsys.readouterr().err.endswith(said)
    left = {path.relative_to(there) for path in there.rglob("*.*") if path.is_file()}
    names = {"utils/stays.py", "tests/own.py", ".synced"}
    assert left == {Path(name) for name in names} | {path.relative_to(there) for path in own}


@pytest.mark.parametrize(
    ("codes", "failed", "code"),
    [((0, 0), None, 0), ((69, 2), 0, 2), ((3, 69), 0, 3), ((75, 75), 0, 75), ((255, 75), 0, 69)],
)
def test_the_cause_decides_the_exit_code_of_a_job(codes, failed, code):
    """A node that lost another one may end before the one that has the reason."""
    job = launcher.Job(argparse.Namespace(), ["x"], [launcher.Host("a"), launcher.Host("b")], "")
    for node, own in zip(job.nodes, codes, strict=True):
        node.code = own
    job.running, job.failed = job.nodes, None if failed is None else job.nodes[failed]
    assert job.exit_code() == code
    job.signals = [15]  # then a snapshot counts, whichever node has written it
    assert job.exit_code() == (75 if 75 in codes else next((x for x in codes if x), 0))


def test_a_killed_process_is_named_though_the_one_that_lost_it_ended_first(capsys):
    """The first failure ends the others; how they end then says nothing more."""
    options = argparse.Namespace(grace=1.0)
    job = launcher.Job(options, ["x"], [launcher.Host(name) for name in "abcd"], "")
    job.running = job.nodes
    for node, node.code in zip(job.nodes, (69, 137, 1, 137), strict=True):
        if node is job.nodes[3]:
            job.kill_at = 0.0  # this one was killed from here
        job.ended(node)
    assert capsys.readouterr().err.splitlines() == [
        "launcher: a ended with exit code 69; stopping the rest",
        "launcher: b ended with exit code 137: killed by SIGKILL",
    ]


def test_each_node_gets_its_place_and_its_own_number_of_processes():
    """Without a number in the hosts file, one for each of its GPUs."""
    options = argparse.Namespace(port=None, env=[("A", "b")], dir="a d", python=None, grace=1.5)
    machines = [launcher.Host("a", 2), launcher.Host("b"), launcher.Host("spare", 4)]
    job, orders = launcher.Job(options, [TORCHRUN, "train.py"], machines, ""), []
    for number, node in enumerate(job.nodes):
        node.hello, node.say = {"port": 7 + number, "address": f"10.0.0.{number}"}, orders.append
    job.start(job.nodes[:2])
    assert len(orders) == 2
    for rank, order in enumerate(orders):
        place = [f"--node_rank={rank}", "--master_addr=10.0.0.0", "--master_port=7"]
        words = [TORCHRUN, "--nnodes=2", *place, f"--nproc_per_node={(2, 'gpu')[rank]}", "train.py"]
        environment = {"IMAGENET_ALL_UP": f"{rank} 2 10.0.0.0:7", "A": "b"}
        expected = {"command": words, "folder": "a d", "python": None, "grace": 1.5}
        assert json.loads(order) == expected | {"environment": environment}
        typed = " ".join(["+ cd 'a d'; A=*** torchrun", *words[1:]])
        assert job.lines.get()[1].decode() == typed
    options.port = 8888
    job.start(job.nodes[:2])
    assert "--master_port=8888" in json.loads(orders[-1])["command"]
    other = "other nodes cannot"
    for address, words in ((None, other), ("127.0.0.1", other), ("fe80::1", "nodes need IPv4")):
        job.nodes[0].hello["address"] = address
        with pytest.raises(UserError, match=f"a .*{address}.* {words}.*: write ip=ADDRESS after"):
            job.start(job.nodes[:2])


def test_without_ray_its_example_says_what_to_install(tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('No module named ray')")
    line = ("--workers", "2", "--", "imagenet_ddp.py", "--name", "a", "DATA")
    done = python("scripts/examples/ray_train.py", *line, PYTHONPATH=str(tmp_path))
    done.fails_with("No module named ray", 'pip install "ray[train]"')
