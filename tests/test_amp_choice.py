"""--amp auto: bf16 on CPUs with AMX and images that are large enough, and only there."""

from argparse import Namespace

import pytest
import torch

from utils.amp import native
from utils.launch import world
from utils.launch.world import World

WORLD = World(torch.device("cpu"))


@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [
        ("fpu amx_bf16 avx512f amx_tile amx_int8", None, True),
        ("fpu amx_bf16 amx_tile", "AVX10_1_512_AMX", True),
        ("fpu amx_bf16 amx_tile", "AVX512_CORE_BF16", False),
        ("fpu avx512f avx512_bf16", None, False),
        (None, None, False),
    ],
)
def test_amx_is_read_from_the_flags_of_the_cpu(tmp_path, monkeypatch, flags, limit, expected):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    info = tmp_path / "cpuinfo"
    if flags is not None:
        info.write_text(f"processor: 0\nflags\t\t: {flags}\nbugs: none\n")
    assert world.has_amx(info) is expected


@pytest.mark.parametrize(
    ("amx", "sizes", "dtype"),
    [
        (True, {"image_size": 224}, torch.bfloat16),
        (True, {"image_size": 64}, None),
        (True, {"image_size": 64, "progressive": "128,224", "epochs": 2}, torch.bfloat16),
        (False, {"image_size": 224}, None),
    ],
)
def test_auto_takes_bf16_with_amx_and_says_so(monkeypatch, capsys, amx, sizes, dtype):
    monkeypatch.setattr(native, "has_amx", lambda: amx)
    args = Namespace(amp="auto", **{"progressive": None, **sizes})
    assert native.autocast_dtype(args, WORLD) is dtype
    assert args.precision == ("bf16" if dtype else "off")
    assert ("AMX" in capsys.readouterr().out) is bool(dtype)
    assert native.autocast_dtype(Namespace(amp="off"), WORLD) is None
