"""Other people's ways to train on several machines: what of them needs no package of theirs."""

import sys

import pytest
from conftest import ROOT

from utils.errors import UserError

sys.path += [str(ROOT / "scripts/ssh"), str(ROOT / "scripts/examples")]
import hivemind_train
import launcher
import ray_train


def chosen(typed: str) -> tuple[list[tuple[str, int | None]], list[str]]:
    """The hosts with their processes, and the training, that a line of the launcher means."""
    options, command = launcher.parse(typed.split())
    return [(host.address, host.slots) for host in launcher.machines_of(options)], command


def test_lists_of_hosts_as_horovod_takes_them(tmp_path):
    training = ["imagenet_ddp.py", "-a", "resnet50", "DATA"]
    two = [("u@a", 2), ("b", 2)]
    typed = "python imagenet_ddp.py -a resnet50 DATA"
    assert chosen(f"-np 4 -H u@a:2,b:2 {typed}") == (two, training)
    assert chosen(f"--python python -H u@a:2,b:2 -- {typed}") == (two, training)
    assert chosen(f"-np 2 -H u@a:2,b:2 {typed}") == (two[:1], training)
    assert chosen("-H a,b -- imagenet_ddp.py") == ([("a", 1), ("b", 1)], training[:1])
    (file := tmp_path / "hosts").write_text("u@a slots=2\nb slots=2\n")
    assert chosen(f"{file} -np 4 {typed}") == (two, training)
    file.write_text("u@a\nb\n")
    for wrong, named in {
        "-H a:2,b:1": "same number of slots",
        "-H a:2,u@a:2": "twice",
        "-H a:,b:2": "HOST:PROCESSES",
        "-H a:0": "HOST:PROCESSES",
        "-H a:2,b:2 -np 3": "-np 3",
        "-H a:2,b:2 -np 6": "-np 6",
        f"{file} -np 2": "unknown",
        f"{file} -H a:2": "either",
        "-np 2": "either",
    }.items():
        with pytest.raises(UserError, match=named):
            chosen(f"{wrong} {typed}")


TRAINING = ["--", "imagenet_ddp.py", "--name", "a", "DATA"]


def test_what_ray_is_asked_to_train():
    options, command = ray_train.parse(["--nodes", "1:4", "--gpus", "2", *TRAINING])
    assert (options.nodes, options.gpus, options.cpus) == ((1, 4), 2, 1)
    assert command == ["imagenet_ddp.py", "--resume", "auto", "--name", "a", "DATA"]
    options, command = ray_train.parse(["--nodes", "2", *TRAINING, "--resume", "x.pt"])
    assert options.nodes == (2, 2)
    assert command == [*TRAINING[1:], "--resume", "x.pt"]


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("--nodes 2", "what to train"),
        ("--nodes 2 -- imagenet_ddp.py DATA", "--name"),
        ("--nodes 2 -- imagenet_nd.py --name a DATA", "one process"),
        ("--nodes 2 -- train.py --name a DATA", "train.py is not"),
        ("--nodes 2 -- imagenet_ddp.py --name a DATA", "pip install ray"),
    ],
)
def test_ray_is_refused_in_a_sentence(monkeypatch, typed, named):
    monkeypatch.setattr(ray_train, "ray", None)
    monkeypatch.setattr(sys, "argv", ["ray_train.py", *typed.split()])
    with pytest.raises(UserError, match=named):
        ray_train.main()


@pytest.mark.parametrize(
    ("typed", "named"), [("-b 5 --target-batch 12", "multiple"), ("", "pip install hivemind")]
)
def test_hivemind_is_refused_in_a_sentence(monkeypatch, folder, typed, named):
    monkeypatch.setattr(hivemind_train, "hivemind", None)
    monkeypatch.setattr(sys, "argv", ["hivemind_train.py", *typed.split(), str(folder)])
    with pytest.raises(UserError, match=named):
        hivemind_train.main()
