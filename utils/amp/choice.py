"""Which amp to use: NVIDIA Apex's own, where one is installed, or utils/amp/plain.py."""

import argparse
import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import torch

from utils.amp import levels, nvidia, plain
from utils.errors import UserError
from utils.launch.world import World

HOW_TO_GET_APEX = (
    "install the last Apex that has it (git clone --branch 25.04 https://github.com/NVIDIA/apex, "
    "then pip install --no-build-isolation ./apex), or take --amp-impl torch, which computes the "
    "same"
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Apex's options, with Apex's names."""
    group = parser.add_argument_group("Apex mixed precision")
    group.add_argument(
        "--opt-level", choices=tuple(levels.LEVELS), default="O2", help="Apex opt level"
    )
    group.add_argument(
        "--keep-batchnorm-fp32",
        choices=("True", "False"),
        help="batch norm in float32 though the weights are float16; default: the level's",
    )
    group.add_argument(
        "--loss-scale",
        metavar="X|dynamic",
        help="a fixed number or dynamic; default: the level's",
    )
    group.add_argument(
        "--amp-impl",
        choices=("auto", "apex", "torch"),
        default="auto",
        help="apex: NVIDIA's package, which had amp until 25.04; torch: the same recipe in plain "
        "PyTorch; auto: apex where it can be used",
    )
    group.add_argument(
        "--delay-allreduce",
        action="store_true",
        help="all-reduce gradients after backward, not while it computes",
    )
    group.add_argument(
        "--allreduce",
        choices=("sum-divide", "divide-sum", "fp32"),
        default="sum-divide",
        help="sum float16 gradients over the ranks, then divide, as Apex does; or divide first, as "
        "torch does; or sum them in float32",
    )


def check(args: argparse.Namespace) -> None:
    """Raise `UserError` for options that do not go together, or an Apex that cannot be used."""
    levels.of(args)
    _choose(args)


def amp_and_parallel(args: argparse.Namespace, world: World) -> tuple[Any, Any]:
    """What ``from apex import amp, parallel`` gives, or the same in plain PyTorch.

    ``--amp-impl`` decides; rank 0 prints which it is and why.
    """
    use_apex, why = _choose(args)
    if world.is_main:
        by = "NVIDIA Apex" if use_apex else "plain PyTorch (utils/amp/plain.py)"
        print(f"opt level {levels.of(args)} by {by}: {why}", flush=True)
    return (nvidia.Amp(), nvidia.parallel()) if use_apex else (plain.Amp(world), plain)


def _choose(args: argparse.Namespace) -> tuple[bool, str]:
    """Whether to use Apex, and why."""
    if args.amp_impl == "torch":
        return False, "as --amp-impl says"
    lacking = _why_not_apex()
    if lacking is None:
        return True, f"Apex {_version()} is installed"
    if args.amp_impl == "apex":
        raise UserError(f"--amp-impl apex: {lacking}: {HOW_TO_GET_APEX}", alike=True)
    return False, lacking


def _why_not_apex() -> str | None:
    """What an apex with amp lacks here; None if it can be used."""
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        return "Apex is not installed"
    places = [Path(place) for place in spec.submodule_search_locations]

    def has(name: str) -> bool:
        return any((place / name).is_dir() for place in places)

    if not has("amp"):
        if has("multi_tensor_apply") or has("contrib"):
            return f"Apex {_version()} has no amp any more (it was removed in May 2025)"
        return (
            "the package apex that is installed is not NVIDIA's (PyPI has a toolkit for Pyramid "
            "under that name; pip uninstall it)"
        )
    if not _gpu_is_there():
        return "Apex's amp needs a CUDA GPU"
    try:
        importlib.import_module("apex.amp")
        importlib.import_module("apex.parallel")
    except Exception as fault:  # whatever a module built for another torch raises
        return f"Apex's amp cannot be imported ({type(fault).__name__}: {str(fault)[:200]})"
    return None


def _gpu_is_there() -> bool:
    return torch.cuda.is_available()


def _version() -> str:
    try:
        return importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        return "(of unknown version)"
