"""The opt levels O0..O3 of NVIDIA Apex: what they are, and how options change them.

See https://nvidia.github.io/apex/amp.html for the originals.

    O0  float32
    O1  float32 weights, autocast decides per operation, dynamic loss scale
    O2  float16 weights except batch norm, float32 master weights, dynamic loss scale
    O3  float16 throughout, no master weights, loss scale 1
"""

import argparse
import math
from dataclasses import dataclass, replace

import torch

from utils.errors import UserError


@dataclass(frozen=True)
class OptLevel:
    """What the opt level ``name`` does. ``loss_scale`` None means dynamic."""

    name: str
    half_weights: bool
    keep_batchnorm_fp32: bool
    master_weights: bool
    autocast: bool
    loss_scale: float | None

    @property
    def input_dtype(self) -> torch.dtype:
        """What the first layer computes with."""
        return torch.float16 if self.half_weights or self.autocast else torch.float32

    @property
    def checks_overflow(self) -> bool:
        """Whether gradients are scaled at all; a fixed scale of 1 without masters leaves them."""
        return self.master_weights or self.loss_scale != 1.0

    def __str__(self) -> str:
        words = {
            "O0": "float32",
            "O1": "autocast to float16",
            "O2": "float16 weights, float32 masters",
            "O3": "float16",
        }
        norm = f", batch norm {'float32' if self.keep_batchnorm_fp32 else 'float16'}"
        scale = "dynamic" if self.loss_scale is None else f"{self.loss_scale:g}"
        return f"{self.name} ({words[self.name]}{norm * self.half_weights}, loss scale {scale})"


LEVELS = {
    "O0": OptLevel("O0", False, True, False, False, 1.0),
    "O1": OptLevel("O1", False, True, False, True, None),
    "O2": OptLevel("O2", True, True, True, False, None),
    "O3": OptLevel("O3", True, False, False, False, 1.0),
}


def choose(
    opt_level: str,
    keep_batchnorm_fp32: bool | str | None = None,
    loss_scale: float | str | None = None,
) -> OptLevel:
    """The opt level that `amp.initialize` is asked for; None leaves a property as the level has it.

    Takes what Apex takes: ``keep_batchnorm_fp32`` may be the text True or False, ``loss_scale`` a
    number, also as text, or "dynamic". Raises: `UserError` for what does not go together.
    """
    level = LEVELS[opt_level]
    if keep_batchnorm_fp32 is not None:
        if opt_level == "O1":
            raise UserError("--keep-batchnorm-fp32 has no meaning with O1", alike=True)
        level = replace(level, keep_batchnorm_fp32=str(keep_batchnorm_fp32) == "True")
    if loss_scale is not None:
        try:
            scale = None if loss_scale == "dynamic" else float(loss_scale)
        except ValueError:
            raise UserError(
                f"--loss-scale {loss_scale} is neither a number nor dynamic", alike=True
            ) from None
        if scale is not None and not 0 < scale < math.inf:
            raise UserError(f"--loss-scale {loss_scale} is not positive", alike=True)
        level = replace(level, loss_scale=scale)
    return level


def of(args: argparse.Namespace) -> OptLevel:
    """The opt level that the command line asks for. Raises: `UserError`."""
    return choose(args.opt_level, args.keep_batchnorm_fp32, args.loss_scale)
