"""What the parts refuse: one line that names the cause and says what to do."""

import argparse
import io
import json
import math
import sys
import tarfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import audit_run
import compare_runs
import model_results
import pytest
import scaling_study
import show_images
import torch
from conftest import ROOT
from event_files import write
from prepare.writing import check_place
from preparing import fail, images, put, succeed, tree
from results import figures, predictions
from studies import plan
from torch import nn

from utils.data import devkit
from utils.data.opening import class_folders, open_source
from utils.data.preprocessing import Preprocessing
from utils.model import blocks, pretrained_weights
from utils.run import audit, store
from utils.start import known_errors, option_types, orphans, preflight
from utils.start.atomic import read_checkpoint
from utils.start.errors import UserError

sys.path.append(str(ROOT / "scripts/ssh"))
import launcher


def refused(call: Callable[[], object], capsys: pytest.CaptureFixture) -> str:
    """The message of an error, or of a parser that ends the command."""
    with pytest.raises((UserError, SystemExit, argparse.ArgumentTypeError)) as caught:
        call()
    return capsys.readouterr().err if caught.type is SystemExit else str(caught.value)


# ---- commands

DDP = "-- imagenet_ddp.py --name run data"


def over_ssh(line: str) -> None:
    """The options of train_on_nodes.sh."""
    options, command = launcher.parse(line.split())
    several = launcher.machines_of(options)
    launcher.check(command, len(several) > 1, bool(options.elastic))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-H a,b", "the script is missing: ... HOSTS_FILE -- imagenet_ddp.py OPTIONS DATA"),
        (DDP, "the hosts are missing: give either HOSTS_FILE or -H HOST:N,HOST:N"),
        (f"hosts -H a {DDP}", "the hosts are missing: give either"),
        (f"-H a:1,b:2 {DDP}", "-H a:1,b:2: give all nodes the same number of slots, or none"),
        (f"-np 3 -H a:2,b:2 {DDP}", "-np 3 does not fit 2 hosts (slots of each: 2)"),
        (f"-np 6 -H a:2,b:2 {DDP}", "-np 6 does not fit 2 hosts"),
        (f"--elastic 3:4 -H a,b {DDP}", "--elastic needs 3 nodes; -H a,b names 2"),
        (f"--elastic 2:1 -H a,b {DDP}", "2:1 is not of the form MIN:MAX, such as 1:4"),
        (f"--elastic 0:1 -H a,b {DDP}", "0:1 is not of the form MIN:MAX"),
        ("-H a -- imagenet_none.py data", f"imagenet_none.py is not a training script in {ROOT}"),
        ("-H a -- scripts/doctor.py data", "scripts/doctor.py is not a training script in"),
        ("-H a -- README.md data", "README.md is not a training script in"),
        ("-H a,b -- imagenet_dp.py data", "imagenet_dp.py is one process on one node: use"),
        ("--elastic 1:1 -H a -- imagenet_nd.py --name x data", "imagenet_nd.py is one process"),
        ("--elastic 1:2 -H a,b -- imagenet_ddp.py data", "--elastic needs --name RUN after --"),
        (f"-H a --env 1=2 {DDP}", "argument --env: 1 is not the name of a variable"),
        (f"-H a --env NOT_HERE {DDP}", "NOT_HERE has no value here: write NOT_HERE=VALUE"),
        (f"-H a --port 0 {DDP}", "argument --port: "),
    ],
)
def test_a_job_over_ssh(capsys, line, words):
    assert words in refused(lambda: over_ssh(line), capsys)


def test_the_help_of_a_script_is_that_of_the_node():
    given = launcher.check(["imagenet_ddp.py", "--help", "--nam", "x"], several=True, again=False)
    assert given.name is None, "options are not abbreviated"


def test_slots_and_processes_that_fit_are_as_many_hosts(tmp_path):
    put(tmp_path, {"hosts": b"a slots=2\nb slots=2\nc slots=2\n"})
    for line, names in (("-np 4", "ab"), ("", "abc"), ("-np 6 --elastic 3:3", "abc")):
        options, _ = launcher.parse([str(tmp_path / "hosts"), *line.split(), *DDP.split()])
        assert [one.name for one in launcher.machines_of(options)] == list(names)
    put(tmp_path, {"hosts": b"a\nb\n"})
    options, _ = launcher.parse([str(tmp_path / "hosts"), "-np", "2", *DDP.split()])
    with pytest.raises(UserError, match=r"-np 2 does not fit 2 hosts \(slots of each: unknown\)"):
        launcher.machines_of(options)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (DDP, "give either a HOSTS_FILE, or --simulate N, or --slurm"),
        (f"--simulate 2 --slurm --nodes 1 {DDP}", "give either a HOSTS_FILE, or --simulate N"),
        ("--simulate 2", "the training command is missing: ... imagenet_ddp.py OPTIONS DATA"),
        (f"--simulate 2 --vary lr= {DDP}", "lr= is not of the form OPTION=A,B"),
        (f"--simulate 2 --vary =1 {DDP}", "=1 is not of the form OPTION=A,B"),
        (f"--slurm {DDP}", "--slurm needs --nodes, such as --nodes 1,2,4"),
        (f"--simulate 2 --link 3mb {DDP}", "--link 3mb is not a rate such as 300mbit"),
        (f"--slurm --nodes 1 --link 3mbit {DDP}", "with --simulate N"),
        (f"--simulate 2 --nodes 1,3 {DDP}", "--nodes 3, but there are only 2 nodes"),
        (f"--simulate 2 -b 8 --global-batch 8 {DDP}", "give either --global-batch or -b"),
        (f"--simulate 2 --lr 3 {DDP}", "--lr is an option of the training: give it after"),
        (f"--simulate 2 --seed-s 3 {DDP}", "unknown option --seed-s: did you mean --seeds?"),
    ],
)
def test_a_study(capsys, line, words):
    assert words in refused(lambda: scaling_study.parse(line.split()), capsys)


@pytest.mark.parametrize(
    ("script", "batch", "words"),
    [
        ("imagenet_none.py", 8, "imagenet_none.py is not a training script in"),
        ("imagenet_nd.py", 8, "imagenet_nd.py trains on one node: use imagenet_ddp.py, or"),
        ("imagenet_ddp.py", 9, "--global-batch 9 is not a multiple of 2"),
    ],
)
def test_a_run_of_a_study(capsys, folder, script, batch, words):
    line = ["--simulate", "2", "--global-batch", str(batch), "--", script, str(folder)]
    study, training = scaling_study.parse(line)
    assert words in refused(lambda: plan.plan_run(study, training, None, 2, ()), capsys)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("one two --labels x x", "each run needs a label of its own: change --labels"),
        ("one --formats png,gif", "png,gif is not a list of png, svg and pdf"),
        ("empty", "empty is left out: it has no finished epoch, or other tags"),
        ("one --gpus 1 2", "2 numbers of GPUs for 1 runs (one); give one per run"),
    ],
)
def test_a_comparison(tmp_path, monkeypatch, capsys, line, words):
    monkeypatch.chdir(tmp_path)
    for name, tag in (("one", "Top1/val"), ("two", "Top1/val"), ("empty", "Other/tag")):
        write(tmp_path / name, {1: {tag: 10.0}})
    assert words in refused(lambda: compare_runs.main(line.split()), capsys)


# ---- files of models


def saved(path: Path, **values: object) -> Path:
    """A file like that of a best model."""
    path.parent.mkdir(exist_ok=True)
    how = asdict(Preprocessing((0.5,) * 3, (0.5,) * 3, "bilinear", 32, 36))
    content = {"arch": "shufflenet_v2_x0_5", "classes": ["a", "b"], "state_dict": {}}
    content |= {"model_args": {}}
    torch.save({**content, "preprocessing": how} | values, path)
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("none", "none does not exist: name a run directory in which an epoch has finished"),
        ("one data more", "data has no best.pt: give one or two runs, then DATA"),
        ("one other data", "one and other have different classes"),
        ("one data --onnx", "--onnx is a part of --export DIR: give both"),
        ("one", "one/options.json does not say what one/best.pt was trained on: give DATA"),
        ("foreign.pt", "foreign.pt is no best.pt of this suite: it has no classes"),
    ],
)
def test_the_results_of_a_model(tmp_path, monkeypatch, capsys, line, words):
    (tmp_path / "data/train").mkdir(parents=True)
    saved(tmp_path / "one/best.pt", classes=["a", "class_1", "class_2"])
    saved(tmp_path / "other/best.pt")
    torch.save({"arch": "resnet18", "state_dict": {}}, tmp_path / "foreign.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["model_results.py", *line.split(), "-j", "0"])
    assert words in refused(model_results.main, capsys)
    best, args = predictions.Best(Path("one")), SimpleNamespace(data="data", part="val")
    said = refused(best.build, capsys)
    assert "one/best.pt does not fit shufflenet_v2_x0_5 (Error(s) in loading state_dict" in said
    said = refused(lambda: predictions.open_part(best, args, SimpleNamespace()), capsys)
    assert said == "folder data/val is missing"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mean": [0.5, 0.5]}, "mean and std must have three numbers"),
        ({"std": [1, 1, math.nan]}, "mean and std must have three numbers"),
        ({"std": [1, 0, 1]}, "std must not be 0, interpolation be bilinear or bicubic"),
        ({"interpolation": "x"}, "std must not be 0, interpolation be bilinear or bicubic"),
        ({"image_size": 32.0}, "sizes must be numbers of pixels"),
        ({"val_resize_size": 0}, "sizes must be numbers of pixels"),
        ({"val_image_size": -1}, "sizes must be numbers of pixels"),
        ({"crop": 3}, "unexpected keyword argument 'crop'"),
    ],
)
def test_the_preprocessing_in_a_file(capsys, values, words):
    said = refused(lambda: Preprocessing.from_dict(values, "a.pt"), capsys)
    assert said.startswith("a.pt has unknown preprocessing: ") and words in said


def test_weights_that_a_model_cannot_take(tmp_path, capsys):
    put(tmp_path, {"a.safetensors": b"no weights", "b.pt": b"no weights"})
    torch.save({"state_dict": [1]}, tmp_path / "list.pt")
    content = read_checkpoint(tmp_path / "list.pt")
    tiny = nn.Sequential(nn.Linear(2, 3))
    for call, words in (
        (lambda: pretrained_weights.read_weights(tmp_path / "a.safetensors"), "read as weights"),
        (lambda: pretrained_weights.read_weights(tmp_path / "b.pt"), "is not a checkpoint"),
        (
            lambda: pretrained_weights.plain_weights(content, Path("list.pt")),
            "list.pt contains no model weights",
        ),
        (lambda: blocks.heads_of(tiny, 4), "this model has no last layer of 4 classes"),
        (lambda: blocks.checkpoint_blocks(tiny), "this model has no repeated blocks: leave it out"),
        (
            lambda: figures.real_accuracy(SimpleNamespace(classes=["a"]), tmp_path / "x"),
            "--real is for models of ImageNet's 1000 classes",
        ),
    ):
        assert words in refused(call, capsys)
    assert blocks.heads_of(tiny, 3) == ["0"]


# ---- data


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (b"1,c\n1,d\n", "labels.csv names none of the 3 images in"),  # there are two of that name
        (b"name,class\nx,c\n", "labels.csv names none of the 3 images in"),
        (b"2,b/c\n1.jpg,c\n", "line 1 of {data}/labels.csv: a class cannot be named 'b/c'"),
        (b"1,c\n2,.c\n", "line 2 of {data}/labels.csv: a class cannot be named '.c'"),
        (b"1,c\n2, \n", "line 2 of {data}/labels.csv: a class cannot be named ''"),
        (b"1,c\nsub/1.jpg,c\n", "1.jpg are both images c/1.jpg: rename one"),
        (b"1.jpg,c\n2,\xff\n", "cannot read {data}/labels.csv: give a CSV file (name, class) in"),
    ],
)
def test_a_table_of_labels(tmp_path, table, words):
    files = {"1.jpg": b"1", "2.jpg": b"2", "sub/1.jpg": b"3", "labels.csv": table}
    data = put(tmp_path / "data", files)
    if b"sub" in table:
        put(data, {"labels.csv": table.replace(b"1,c", b"1.jpg,c", 1)})
    before = tree(data)
    assert words.format(data=data) in fail("split", data, "--val", 0.5)
    assert tree(data) == before


def test_what_a_table_leaves_out_is_counted(tmp_path):
    rows = [f"{i},c{i % 2}" for i in range(8)]
    table = "\n".join(["file,what", "", *rows, "none,c0", "8"]).replace(",", "\t").encode()
    data = put(tmp_path / "data", {f"{i}.jpg": b"%d" % i for i in range(10)} | {"l.csv": table})
    said = succeed("split", data, "--val", 0.25, "--labels", data / "l.csv")
    assert "left out: 2 lines of" in said and "left out: 2 images that" in said
    assert "train 6 images, val 2 images" in said
    # The first line names an image, of which there are two.
    succeed("split", data, "--undo")
    put(data, {"l.csv": "\n".join(["8,c0", *rows]).encode(), "more/8.jpg": b"other"})
    said = succeed("split", data, "--val", 0.25, "--labels", data / "l.csv")
    assert "left out: 1 lines of" in said and "left out: 3 images that" in said


@pytest.mark.parametrize(
    ("files", "words", "said"),
    [
        ({}, "", "say which part to make: --val 0.2, --test 0.1, or both; or --undo"),
        ({}, "--val 0.6 --test 0.4", "--val and --test take 100%: leave some for training"),
        ({".split.json": b"{"}, "--val 0.2", ".split.json is damaged: remove it, and look where"),
        ({".split.json": b"[]"}, "--val 0.2", ".split.json is damaged"),
    ],
)
def test_a_part_that_cannot_be_made(tmp_path, files, words, said):
    names = {f"train/{c}/{i}.jpg": b"x" for c in "ab" for i in range(5)}
    data = put(tmp_path / "data", names | files)
    before = tree(data)
    assert said in fail("split", data, *words.split())
    assert tree(data) == before


def test_an_image_that_is_in_two_parts_and_one_whose_place_is_taken(tmp_path):
    """Of another program, or of a copy: neither is overwritten."""
    data = put(tmp_path / "data", {f"train/{c}/{i}.jpg": b"x" for c in "ab" for i in range(5)})
    succeed("split", data, "--val", 0.2)
    (there,) = (data / "val/a").iterdir()
    put(data, {f"train/a/{there.name}": b"other"})
    before = tree(data)
    assert "both exist: remove one of them" in fail("split", data, "--undo")
    assert tree(data) == before
    photos = put(tmp_path / "photos", {f"{c}/{i}.jpg": b"x" for c in "ab" for i in range(5)})
    succeed("split", photos, "--val", 0.2)
    put(photos, {name.partition("/")[2]: b"new" for name in images(photos)})
    before = tree(photos)
    assert "both exist: remove one of them" in fail("split", photos, "--val", 0.2)
    assert tree(photos) == before
    said = fail("split", photos, "--undo")
    assert "both exist: remove one of them" in said
    assert sorted(images(photos).values()) == [b"new"] * 10 + [b"x"] * 10


def test_tar_files(tmp_path, capsys):
    samples = [("a.jpg", b"x"), ("a.cls", b"0"), ("b.jpg", b"y" * 9), ("b.cls", b"1")]
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, content in samples:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    put(tmp_path, {"x-000.tar": file.getvalue(), "classes.txt": b"cat\n.dog\n"})
    said = refused(lambda: class_folders(tmp_path), capsys)
    assert f"line 2 of {tmp_path}/classes.txt is not the name of a class" in said
    put(tmp_path, {"classes.txt": b"cat\ndog\n"})
    assert class_folders(tmp_path) == ["cat", "dog"]
    said = refused(lambda: open_source(tmp_path, ["cat", "cow", "dog"]), capsys)
    assert said.endswith("has no class cow")
    source = open_source(tmp_path, ["cat", "dog"])
    assert source.read(1) == b"y" * 9
    source.records["bytes"][1] += 10**5
    with pytest.raises(OSError, match=r"x-000\.tar ends before the image does"):
        source.read(1)


def test_places_and_parts_that_cannot_be(tmp_path, capsys, parse, monkeypatch):
    for place in ("train/.a/x.jpg", "train/a/.x.jpg", ".train/a/x.jpg"):
        said = refused(lambda place=place: check_place(tmp_path, place), capsys)
        assert said.endswith("in the source is a hidden file, which training would ignore")
    for place in ("train/x.jpg", "train/../x.jpg", "/train/a/x", "train//x", "train/a/x\0"):
        said = refused(lambda place=place: check_place(tmp_path, place), capsys)
        assert f"would be outside {tmp_path}: get the source again" in said
    assert check_place(tmp_path, "val/a/b/x..jpg") == "val/a/b/x..jpg"
    loaders = SimpleNamespace(val="of val", test="of test")
    assert [show_images.evaluated(loaders, part) for part in ("val", "test")] == [
        "of val",
        "of test",
    ]
    loaders = SimpleNamespace(val=None, test=None)
    said = refused(lambda: show_images.evaluated(loaders, "test"), capsys)
    assert said == "DATA/test is missing, or no part that is evaluated"
    (photos := tmp_path / "my photos").mkdir()
    said = refused(lambda: parse("imagenet_nd", "--name", "x", "--resume", photos), capsys)
    assert f"--resume read {photos} as its FILE; use --resume auto '{photos}'" in said
    monkeypatch.chdir(tmp_path)
    said = refused(lambda: parse("imagenet_nd", "nowhere"), capsys)
    assert said.endswith(f": python {ROOT}/scripts/prepare_data.py sample data/sample")
    with tarfile.open(tmp_path / devkit.DEVKIT, "w:gz") as tar:
        member = tarfile.TarInfo(f"ILSVRC2012_devkit_t12/{devkit.TRUTH}")
        tar.addfile(member, io.BytesIO(b""))
    said = refused(lambda: devkit.val_labels(tmp_path), capsys)
    assert f"cannot read {tmp_path}/" in said and "data/meta.mat is missing" in said


# ---- what other programs leave


START = json.dumps(
    {"began": [0, 0], "images": 4, "seed": 0, "global_batch": 2, "shards": 1, "accum": 1}
).encode()
STEP = b'{"epoch": 0, "step": %d, "taken": ["%s"]}\n'


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (b"", "is empty: nothing was recorded"),
        (b"\xff\n", "is damaged: it is no text"),
        (b"half\n" + START, "line 1: not a line of --audit"),
        (b"[]\n" + START, "line 1: not a line of --audit"),
        (START.replace(b'"shards": 1', b'"shards": 0'), "line 1: not a line of --audit"),
        (START.replace(b'"images": 4', b'"images": 0'), "line 1: not a line of --audit"),
        (START + b'\n{"epoch": 0, "step": 0, "taken": ["", ""]}', "line 2: not a line"),
        (b'{"epoch": 0, "step": 0, "taken": [""]}\n' + START, "line 1: not a line"),
    ],
)
def test_a_log_of_an_audit(tmp_path, capsys, log, words):
    (tmp_path / "audit.jsonl").write_bytes(log)
    said = refused(lambda: audit.read(tmp_path / "audit.jsonl"), capsys)
    assert words in said and str(tmp_path) in said


def test_of_many_problems_the_first_are_printed_and_the_rest_counted(tmp_path, monkeypatch, capsys):
    step = b'{"epoch": %d, "step": %d, "taken": ["00000000"]}'
    steps = [step % (epoch, number) for epoch in range(12) for number in (0, 1)]
    (tmp_path / "audit.jsonl").write_bytes(b"\n".join([START, *steps, b""]))
    monkeypatch.setattr(sys, "argv", ["audit_run.py", str(tmp_path)])
    assert audit_run.main() == 1
    said = capsys.readouterr().out
    assert said.count("problem: ") == 20 and "... and 4 more problems\n" in said


def test_more_steps_than_an_epoch_has_and_a_line_that_was_being_written(tmp_path):
    setup = audit.Setup(4, 0, 2, 1, 1)
    order = audit.epoch_order(4, 0, 0)
    sums = "".join(f"{setup.expected(order, step)[0][0]:08x}" for step in (0, 1))
    whole = START + b"\n" + STEP % (0, sums.encode())
    for log, problems in (
        (whole + b'{"epoch": 1, "st', []),
        (whole + STEP % (2, b"0" * 8), ["epoch 1 has only 2 steps, not 3"]),
    ):
        (tmp_path / "audit.jsonl").write_bytes(log)
        proof = audit.read(tmp_path / "audit.jsonl")
        assert proof.problems[-1:] == problems
        assert proof.epochs[0].startswith(f"epoch 1: {2 + len(problems)} steps, ")


def test_a_file_in_a_store(tmp_path, capsys):
    put(tmp_path, {"run/snapshot.pt": b"new", "run/best.pt": b"best"})
    file = store.fetch(f"file://{tmp_path}/run", None, with_best=True)
    assert (file.read_bytes(), (file.parent / "best.pt").read_bytes()) == (b"new", b"best")
    for call, words in (
        (lambda: store.check_options("memory://", None), "memory:// cannot be used (it names no"),
        (lambda: store.check_options(None, "file:///"), "cannot be used (it names no bucket)"),
        (lambda: store.fetch(f"file://{tmp_path}/run/none", None), "none does not exist, or is a"),
        (
            lambda: store.fetch(f"file://{tmp_path}/run/snapshot.pt", tmp_path / "no folder"),
            "cannot download",
        ),
    ):
        assert words in refused(call, capsys)


# ---- surroundings


def test_packages_temporary_files_and_processes(tmp_path, capsys, monkeypatch):
    """What is to be typed can be typed in any folder."""
    monkeypatch.chdir(tmp_path)
    how = f"`bash {ROOT}/scripts/quickstart.sh` makes an environment with all packages"
    if (ROOT / ".venv").exists():
        how = f"`source {ROOT}/.venv/bin/activate` first"
    for error, words in (
        (
            ModuleNotFoundError("No module named 'PIL'", name="PIL"),
            f"pillow is not installed for {sys.executable}: {how}, or `pip install -r "
            f"{ROOT}/requirements.txt`",
        ),
        (
            FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"),
            "no folder for temporary files, such as /tmp, can be written to",
        ),
    ):
        assert words in str(known_errors.explain(error))
    assert known_errors.explain(ModuleNotFoundError("x", name="unknown")) is None
    assert known_errors.explain(FileNotFoundError(2, "No such file")) is None
    monkeypatch.setenv(orphans.LAUNCHER, "1x")
    assert "=1x in the environment is not a process id" in refused(
        orphans.die_with_launcher, capsys
    )
    monkeypatch.setattr(preflight, "address_towards", lambda host: None)
    said = refused(lambda: preflight.rendezvous("192.0.2.1:29500"), capsys)
    assert said == "no IPv4 route from here to MASTER_ADDR=192.0.2.1: is the link up?"
    said = refused(lambda: option_types.http("data"), capsys)
    assert said == "data is not an http:// URL: to omit it, put the option after DATA"
    args = option_types.Options(lr=1)
    with pytest.raises(AttributeError, match="options do not change after parsing: lr"):
        args.lr = 2
    assert (args.lr, args.replaced(lr=2).lr) == (1, 2)
