"""Which amp is taken and why, Apex or native; the calls that Apex gets, by a stand-in for it."""

import argparse
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SMALL, scalars
from joined import command
from preparing import put
from running import alone, same, snapshot

from utils.model import amp, o2
from utils.model import apex as choice
from utils.model.options import add_apex
from utils.start import world
from utils.start.errors import UserError
from utils.start.option_types import Parser

STAND_IN_APEX = str(ROOT / "tests" / "stand_in_apex")
WORLD = world.World(torch.device("cpu"))
OVERFLOW = "apex.amp.overflow_next = True"
STOP = """
import os, signal
from torch.optim.optimizer import register_optimizer_step_pre_hook
steps = []
def hook(*_):
    steps.append(1)
    if len(steps) == 6:  # that of the first epoch with an overflow is not taken
        os.kill(os.getpid(), signal.SIGTERM)
register_optimizer_step_pre_hook(hook)"""


def test_apex_is_used_as_published_scripts_use_it(tmp_path, folder):
    """Stopped after one epoch of two, a run goes on exactly, though Apex makes its masters late."""

    def run(script, name, epochs, *more, code=0, change=""):
        line = ("-b", 5, "--accum-steps", 2, "-p", 2, "--epochs", epochs, "--resume", "auto")
        where = ("--output-dir", tmp_path, "--name", name, folder)
        env = alone() | {"CHANGE": change}
        done = command(script, *SMALL, "-a", "tiny_plain", *line, *more, *where, **env)
        assert done.code == code, done.out + done.err
        assert ("opt level O2 using NVIDIA Apex" in done.out) == (script == "apex_runner")
        return [eval(line) for line in done.out.splitlines() if line.startswith("('")]

    options = ("--loss-scale", "dynamic", "--keep-batchnorm-fp32", "False")
    run("apex_runner", "whole", 2, *options, change=OVERFLOW)
    first = run("apex_runner", "parts", 2, *options, code=75, change=OVERFLOW + STOP)
    # Options reach Apex where they differ from the level.
    changes = {"keep_batchnorm_fp32": False}
    assert first[:2] == [("initialize", "O2", changes), ("DistributedDataParallel", {})]
    micro = [("disable_allreduce",), ("scale_loss", True), ("enable_allreduce",)]
    micro += [("scale_loss", False)]
    skipped, step = ([*micro, (end,), ("zero_grad",)] for end in ("skip", "step"))
    assert first[2:] == skipped + step * 6, "60 images in tens; 1 more"
    run("apex_runner", "parts", 2, *options)
    one, other = (snapshot(tmp_path / name) for name in ("whole", "parts"))
    assert other["progress"]["epoch"] == 2
    assert same(one["model"], other["model"])
    assert one["scaler"] == other["scaler"] == {"scale": 32768, "clean_steps": 11, "skipped": 1}
    # What Apex has saved goes on with what Apex is not.
    run("imagenet_ddp_apex", "parts", 3, "--opt-level", "O0")
    curves = scalars(tmp_path / "parts")
    assert curves["Amp/skipped"] == [(1, 1.0), (2, 1.0), (3, 1.0)]


def forget(package: str) -> None:
    """Have a package imported anew."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


@pytest.fixture
def site(monkeypatch):
    """Puts a folder with a package apex in front of all others."""

    def use(folder):
        forget("apex")
        monkeypatch.syspath_prepend(folder)

    yield use
    forget("apex")


def parsed(*options):
    parser = Parser()
    add_apex(parser)
    return parser.parse_args(options)


# ---- the choice


def test_float16_on_a_cpu_comes_with_a_warning(monkeypatch, capsys):
    """It draws no random numbers: weights stay as the seed makes them."""
    conv2d = torch.conv2d

    def slow(images, weights):
        time.sleep(0.2 if images.dtype == torch.float16 else 0)
        return conv2d(images, weights)

    monkeypatch.setattr(torch, "conv2d", slow)  # whatever this CPU is
    before = torch.get_rng_state()
    choice.amp_and_parallel(parsed("--opt-level", "O0"), WORLD)
    amp.autocast_dtype(argparse.Namespace(amp="off"), WORLD)
    assert "float16 is slow" not in capsys.readouterr().out
    choice.amp_and_parallel(parsed("--opt-level", "O2"), WORLD)
    amp.autocast_dtype(argparse.Namespace(amp="fp16"), WORLD)
    output = capsys.readouterr().out
    assert re.search(r"float16 is slow on this CPU: .* [\d.]+ times .*use --opt-level O0", output)
    assert re.search(r"float16 is slow on this CPU: .* [\d.]+ times .*use --amp off", output)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("init", "has_gpu", "reason", "remedy"),
    [
        ("raise ImportError('no amp')", True, r"no NVIDIA Apex .*no amp", ".*25.04.*or "),
        ("raise OSError('undefined symbol')", True, r"imported \(OSError\('undef", ".*25.04.*or "),
        ("", False, "needs an NVIDIA GPU, and torch sees none here", ": "),
    ],
)
def test_why_apex_is_not_used(site, tmp_path, monkeypatch, capsys, init, has_gpu, reason, remedy):
    put(tmp_path, {"apex/__init__.py": init.encode(), "apex/amp.py": b"", "apex/parallel.py": b""})
    site(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    amp, parallel = choice.amp_and_parallel(parsed(), WORLD)
    assert isinstance(amp, o2.Amp) and parallel is o2
    assert re.search(f"O2 using plain PyTorch .*: .*{reason}", capsys.readouterr().out)
    with pytest.raises(UserError, match=f"{reason}{remedy}use --amp-impl torch"):
        choice.check(parsed("--amp-impl", "apex"))


def test_an_apex_that_is_missing_is_told_before_processes_start(tmp_path, folder):
    options = (*SMALL, "--amp-impl", "apex", "-g", 2, "--output-dir", tmp_path / "runs", folder)
    command("imagenet_ddp_apex", *options).fails_with("--amp-impl apex: ")
    assert not (tmp_path / "runs").exists()


def test_torch_is_taken_when_asked_for_though_apex_is_there(site, monkeypatch):
    site(STAND_IN_APEX)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for options, kind in (((), choice.Amp), (("--amp-impl", "torch"), o2.Amp)):
        assert type(choice.amp_and_parallel(parsed(*options), WORLD)[0]) is kind
    # All nodes do the same: one of them has no Apex.
    monkeypatch.setattr(world.World, "gather", lambda _, mine: [mine, "it is missing"])
    assert type(choice.amp_and_parallel(parsed(), WORLD)[0]) is o2.Amp


# ---- --amp: bf16 on CPUs with AMX and images that are large enough, and only there


def test_amx_is_read_from_the_flags_of_the_cpu(tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    assert not amp.has_amx(info)
    for flags, limit, expected in (
        ("fpu amx_bf16 avx512f amx_tile amx_int8", "ALL", True),
        ("fpu amx_bf16 amx_tile", "", True),  # no limit
        ("fpu amx_bf16 amx_tile", "avx512_core_amx", True),
        ("fpu amx_bf16 amx_tile", "AVX512_CORE_AMX_FP16", True),
        ("fpu amx_bf16 amx_tile", "AVX512_CORE_BF16", False),
        ("fpu amx_tile avx512_bf16", "ALL", False),
    ):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        info.write_text(f"processor: 0\nflags\t\t: {flags}\nbugs: none\n")
        assert amp.has_amx(info) is expected, (flags, limit)


@pytest.mark.parametrize(
    ("device", "option", "fast", "sizes", "precision", "words"),
    [
        ("cpu", "auto", True, [64, 128, 224], "bf16", "AMX"),
        ("cpu", "auto", True, [64], "off", ""),
        ("cpu", "auto", False, [224], "off", ""),
        ("cuda", "auto", True, [224], "fp16", ""),
        ("cuda", "bf16", True, [224], "bf16", ""),
        ("cuda", "bf16", False, [224], "bf16", "only emulates bf16"),  # as a T4
    ],
)
def test_precision(monkeypatch, capsys, device, option, fast, sizes, precision, words):
    """``fast``: the CPU has AMX, the GPU computes in bf16."""
    flags = "flags : amx_tile amx_bf16" if fast else "flags : fpu"
    monkeypatch.setattr(Path, "read_text", lambda path: flags)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "ALL")
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or fast,
    )
    args = argparse.Namespace(amp=option, image_size=sizes[0], epoch_sizes=sizes[1:])
    one = world.World(torch.device(device))
    assert amp.autocast_dtype(args, one) is amp.DTYPES[precision]
    output = capsys.readouterr().out
    assert words in output and bool(words) == bool(output)
    if words == "AMX":  # but another process has none
        monkeypatch.setattr(world.World, "gather", lambda _, own: [own, False])
        assert amp.autocast_dtype(args, one) is None
