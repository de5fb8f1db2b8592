"""Command lines as people type them; image size, epochs and model made small at their end."""

import argparse
import importlib
import re
import sys
from pathlib import Path

import bench_input
import bench_network
import bench_step
import compare_runs
import doctor
import prepare_data
import pytest
import torch
from conftest import ROOT, TORCHVISION_MODEL, Result, shell, summary
from joined import Forked, command
from running import free_port

from utils.model import models
from utils.start.errors import UserError
from utils.start.option_types import DocstringFormatter, Options

# The last of several equal options counts, so these shrink a line without changing its form.
TINY = "-a tiny_full --image-size 32 -b 5 --workers 0 --epochs 1 --lr 0.01"


def ends_well(*lines: str, **env: str) -> list[Result]:
    """Type the lines into shells, all at once; every one must succeed without a complaint."""
    results = shell(*lines, **env)
    for result in results:
        assert result.code == 0, result.out + result.err
        assert not re.search("Traceback|error", result.err), result.err
    return results


def trained(output: Path, **expected: object) -> Path:
    """The one run in ``output``: an epoch, all 21 validation images, and ``expected``."""
    (run,) = output.iterdir()
    facts = {"epochs_done": 1, "finished_because": "epochs", "val_images": 21} | expected
    assert {key: summary(run)[key] for key in facts} == facts
    written = [(run / name).stat().st_mtime_ns for name in ("best.pt", "snapshot.pt")]
    assert written == sorted(written), "no snapshot refers to a best model that is not there"
    return run


# ---- one line


def test_one_line(folder, tmp_path):
    """DATA comes from $IMAGENET_DIR, and runs go into "runs"; in other tests both are typed.

    Nor does anything of tests/stand_in take part.
    """
    line = f"cd {tmp_path} && python {ROOT}/imagenet_ddp.py {TINY} -n 1 -g 1 -nr 0"
    line += f" {' '.join(TORCHVISION_MODEL)} -b 20"
    ends_well(line, IMAGENET_DIR=str(folder), PYTHONPATH="")
    run = trained(tmp_path / "runs", mode="ddp", world_size=1, nodes=1, global_batch=20)
    assert run.name.endswith("gpux1_b20_cpu0_ddp")
    weights = torch.load(run / "snapshot.pt", weights_only=True)["model"]
    assert not any(name.startswith("module.") for name in weights)


@pytest.mark.parametrize(("text", "value"), [("0.75", 75), ("75", 75), ("1", 100)])
def test_an_accuracy_is_a_share_or_per_cent(folder, parse, text, value):
    longest = ("--epochs", 2, "--warmup-epochs", 2, "--start-epoch", 1)
    assert parse("imagenet_nd", *longest, "--desired-acc", text, folder)["target_top1"] == value


def test_a_tilde_is_the_home_folder_where_a_shell_leaves_it(folder, parse, monkeypatch, tmp_path):
    """After "=", and in a recipe or $IMAGENET_DIR: a folder named ~ was made."""
    (tmp_path / "mine.txt").write_text("--output-dir ~/runs --store=~/copies")
    (tmp_path / "data").symlink_to(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("IMAGENET_DIR", "~/data")
    words = ("--recipe=~/mine.txt", "--resume=~/a.pt", "--classes=~/few")
    options = parse("imagenet_ddp", *words)
    names = {"output_dir": "runs", "store": "copies", "resume": "a.pt", "classes": "few"}
    assert {name: options[name] for name in names} == {
        name: f"{tmp_path}/{file}" for name, file in names.items()
    }
    assert options["data"] == f"{tmp_path}/data"
    assert compare_runs.parse(["run", "--out=~/pages"]).out == tmp_path / "pages"
    prepare = prepare_data.build_parser().parse_args
    for first, option in (("imagenet", "source"), ("parquet in", "names"), ("split", "labels")):
        options = vars(prepare([*first.split(), "out", f"--{option}=~/mine"]))
        assert options[option] == tmp_path / "mine"
    monkeypatch.setattr(sys, "argv", ["doctor.py", "--data=~/mine", "--output-dir=~/mine"])
    asked = doctor.parse()
    assert [asked.data, asked.output_dir] == [f"{tmp_path}/mine"] * 2
    monkeypatch.setattr(sys, "argv", ["bench_input.py", "--cache=~/mine"])
    assert bench_input.parse().cache == tmp_path / "mine"


def test_synthetic_images_are_trained_and_evaluated_without_data(tmp_path):
    """By the usual loop, which resumes; here as 12 and 6 images."""
    few = "from utils.data import dummy; dummy.DUMMY_IMAGES = {'train': 12, 'val': 6, 'test': 3}"
    where = ("--output-dir", tmp_path, "--name", "run", "--resume", "auto")
    line = ("imagenet_nd", "--dummy", "--classes", 5, *TINY.split(), "-b", 4, "-j", 1, *where)
    env = {"IMAGENET_DIR": "/nowhere", "BEFORE": few}
    for epochs in (1, 2):
        done = command(*line, "--epochs", epochs, **env)
        assert done.code == 0, done.err
        facts = summary(tmp_path / "run")
        assert (facts["epochs_done"], facts["val_images"], facts["classes"]) == (epochs, 6, 5)
    assert "resumed from" in done.out
    for part, images in (("val", 6), ("test", 3)):
        done = command(*line, "-e", "--part", part, **env)
        assert f"({images} images)" in done.out


MODES = ("nd", "dp", "ddp", "ddp_apex", "fsdp")


def test_help_names_what_most_people_need_and_where_the_rest_is(tmp_path):
    """Without an import of torch."""
    (tmp_path / "torch.py").write_text("raise ImportError('it was imported')")
    lines = (f"python imagenet_{mode}.py {x}" for mode in MODES for x in ("-h", "--help-all"))
    helps = iter(shell(*lines, COLUMNS="80", PYTHONPATH=str(tmp_path)))
    for mode, short, whole in zip(MODES, helps, helps, strict=False):
        by_hand = mode not in ("nd", "dp")
        for done in (short, whole):
            assert (done.code, done.err) == (0, "")
            assert f" imagenet_{mode}.py -a " in done.out, "an example"
            assert "(default: resnet18)" in done.out
            assert max(map(len, done.out.splitlines())) <= 80
            assert ("--gpus" in done.out) == by_hand
            assert ("--opt-level" in done.out) == (mode == "ddp_apex")
        options = re.findall(r"^  -\S", short.out, re.MULTILINE)
        assert 10 <= len(options) <= 18
        (rest,) = re.findall(r"--help-all prints all options: (.*)\.", short.out.replace("\n", " "))
        assert ("processes and nodes" in rest) == by_hand
        for title in rest.split(", "):
            assert f"\n{title}:\n" in whole.out


@pytest.mark.parametrize("columns", [60, 80])
def test_descriptions_are_wrapped_and_commands_keep_their_lines(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    sentence, command = f"{'word ' * 40}end.", f"    python {'x' * 90} \\\n        -b 8"
    parser = argparse.ArgumentParser(
        description=f"{sentence}\n\n{command}\n", formatter_class=DocstringFormatter
    )
    shown = parser.format_help()
    assert command in shown
    assert max(len(line) for line in shown.splitlines() if "xxx" not in line) <= columns


def test_a_mistyped_option_proposes_only_near_names(parse, capsys, folder):
    near = "--epoch --epochs --learning_rate --learning-rate --batch --batch-size -lr --lr "
    near += "--worker --workers --optimzer --optimizer"
    names = dict.fromkeys(("--weigths", "--foo", "-x", "--shuffle", "--gpu-id"))
    names |= dict(zip(near.split()[::2], near.split()[1::2], strict=True))
    for typed, name in names.items():
        with pytest.raises(SystemExit):
            parse("imagenet_nd", typed, "1", folder)
        printed = capsys.readouterr().err
        assert f"unknown option {typed}" in printed
        assert re.findall(r"did you mean (\S+)\?", printed) == ([name] if name else [])


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        (["\N{EN DASH}lr", 1], "begins with a long dash: type --lr ("),
        (["-b", 1, "\N{EM DASH}j=1"], "begins with a long dash: type --j=1 ("),
        (["\N{EN DASH}e"], "begins with a long dash: type -e ("),
        (["more", "-b", 1], "error: too many arguments: more ("),
    ],
)
def test_what_comes_from_a_word_processor_and_a_second_data(parse, capsys, folder, typed, error):
    with pytest.raises(SystemExit):
        parse("imagenet_nd", folder, *typed)
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("program", [bench_network, bench_step, compare_runs])
def test_a_mistyped_option_of_other_programs_is_one_line(program, capsys):
    with pytest.raises(SystemExit):
        program.parse(["run", "--helo"])
    said = capsys.readouterr().err
    assert said.endswith(" error: unknown option --helo: did you mean --help? (see --help)\n")
    assert said.count("\n") == 1


def test_timm_is_imported_for_its_own_models_alone(parse, folder, monkeypatch):
    """It takes seconds."""
    monkeypatch.setitem(sys.modules, "timm", None)  # an import fails
    monkeypatch.delitem(sys.modules, "utils.model.timm_models", raising=False)
    monkeypatch.delattr("utils.model.timm_models", raising=False)
    assert parse("imagenet_nd", "-a", "resnet50", "--pretrained", "-b", 1, folder)
    assert models.create("resnet18", 3, 32)
    with pytest.raises(UserError, match="pip install timm"):
        parse("imagenet_nd", "-a", "tiny_plain", folder)


# A new option replaces an old one, or its commit says who needs it: people read all of them.
EVERYWHERE = """
    accum-steps=1 activation-checkpointing arch=resnet18 audit auto-augment batch-size=128
    best-by=top1 betas=0.9,0.999 channels-last=True classes clip-grad compile crop-scale=0.08 cutmix
    dummy ema epochs=90 evaluate find-batch freeze global-batch help help-all image-size
    label-smoothing learning-rate lr-scaling=none lr-schedule=step max-bad-files=100 mixup momentum
    name optimizer=sgd output-dir=runs part=val pretrained print-freq=10 profile progressive
    random-erasing recipe resume seed snapshot-minutes=10.0 spot-notice start-epoch store
    target-top1 tracker train-time val-image-size val-resize-size warmup-epochs wd-norm
    weight-decay workers"""
NODES = " dist-backend dist-timeout=300.0 dist-url gpus local-rank node-rank nodes sync-bn"
OPTIONS = {
    "nd": "amp=auto",
    "dp": "amp=auto",
    "ddp": "amp=auto comm=fp32" + NODES,
    "fsdp": "amp=auto reshard=full" + NODES,
    "ddp_apex": "amp-impl=auto keep-batchnorm-fp32 loss-scale opt-level=O2" + NODES,
}


@pytest.mark.parametrize("mode", MODES)
def test_options_keep_their_names_and_defaults(mode):
    parser = importlib.import_module(f"imagenet_{mode}").parser()
    names = {name.removeprefix("--") for name in parser.option_names}
    expected = [word.partition("=") for word in (EVERYWHERE + " " + OPTIONS[mode]).split()]
    assert {name for name, _, _ in expected} <= names
    values = vars(parser.parse_args(["DATA"]))
    usual = {key: str(x) for key, x in values.items() if x and key not in ("data", "workers")}
    assert usual == {name.replace("-", "_"): x for name, _, x in expected if x}
    kept = values.keys() - {"local_rank"}
    assert kept <= Options.__annotations__.keys(), "Options is the typed record of all"


# ---- several processes


def test_two_nodes(folder, tmp_path):
    """Node 0 alone writes."""
    url = f"tcp://127.0.0.1:{free_port()}"
    line = f"--dist-url {url} {folder} --dist-backend nccl --desired-acc 0.75 --world-size 2"
    # Each node's own idea of when a line is due, 1 and 11 steps: that of node 0 counts.
    more = (f"--output-dir {tmp_path}/{rank} --rank {rank} -p {rank}1" for rank in (0, 1))
    nodes = [Forked("imagenet_ddp", *f"{TINY} {line} {words}".split()) for words in more]
    with nodes[0], nodes[1]:
        results = [node.result() for node in nodes]
    for result in results:
        assert (result.code, "error" in result.err) == (0, False), result
    assert not [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    run = trained(tmp_path / "0", world_size=2, nodes=2, global_batch=10, comm="fp32")
    assert run.name.endswith("gpux2_b5_cpu0_ddp")
    for result, steps in zip(results, (12 // 2, 0), strict=True):  # the second says so
        assert result.out.count("Epoch 1/1 step ") == steps
    (note,) = [text for text in results[0].out.splitlines() if "gloo" in text]
    assert "nccl" in note
    assert "gloo" not in results[1].out


PLACE = "--node_rank={rank} --nproc_per_node=1 --nnodes=2 --master_addr=127.0.0.1 --master_port="


@pytest.mark.long
@pytest.mark.parametrize(
    "line",
    [
        "torchrun {} imagenet_ddp.py",
        "python -m torch.distributed.launch {} imagenet_ddp_apex.py --opt-level O0",
    ],
)
def test_two_nodes_by_torchs_launchers(folder, tmp_path, line):
    place = f"{PLACE}{free_port()}"
    typed = (line.format(place.format(rank=rank)) for rank in range(2))
    lines = (f"{one} {TINY} --output-dir {tmp_path}/{i} {folder}" for i, one in enumerate(typed))
    ends_well(*lines)
    trained(tmp_path / "0", nodes=2)
