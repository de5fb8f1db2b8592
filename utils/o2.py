"""The opt levels O0..O3 of NVIDIA Apex in plain PyTorch.

Apex removed its amp module in 2025. What its levels do is small enough to stand here; see
https://nvidia.github.io/apex/amp.html for the originals.

    O0  float32
    O1  float32 weights, autocast decides per operation, dynamic loss scale
    O2  float16 weights except batch norm, float32 master weights, dynamic loss scale
    O3  float16 throughout, no master weights, loss scale 1
"""

import argparse
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from utils.errors import UserError


@dataclass(frozen=True)
class OptLevel:
    """What an opt level does. ``loss_scale`` None means dynamic."""

    half_weights: bool
    keep_batchnorm_fp32: bool
    master_weights: bool
    autocast: bool
    loss_scale: float | None

    @property
    def input_dtype(self) -> torch.dtype:
        """What the first layer computes with."""
        return torch.float16 if self.half_weights or self.autocast else torch.float32


LEVELS = {
    "O0": OptLevel(False, True, False, False, 1.0),
    "O1": OptLevel(False, True, False, True, None),
    "O2": OptLevel(True, True, True, False, None),
    "O3": OptLevel(True, False, False, False, 1.0),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Apex's options, with Apex's names."""
    group = parser.add_argument_group("Apex mixed precision")
    group.add_argument("--opt-level", choices=tuple(LEVELS), default="O2", help="Apex opt level")
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


def choose_level(args: argparse.Namespace) -> OptLevel:
    """The level that the command line asks for, overrides included. Raises `UserError`."""
    level = LEVELS[args.opt_level]
    if args.keep_batchnorm_fp32 is not None:
        if args.opt_level == "O1":
            raise UserError("--keep-batchnorm-fp32 has no meaning with O1", alike=True)
        level = replace(level, keep_batchnorm_fp32=args.keep_batchnorm_fp32 == "True")
    if args.loss_scale is not None:
        try:
            scale = None if args.loss_scale == "dynamic" else float(args.loss_scale)
        except ValueError:
            raise UserError(
                f"--loss-scale {args.loss_scale} is neither a number nor dynamic", alike=True
            ) from None
        if scale is not None and not 0 < scale < math.inf:
            raise UserError(f"--loss-scale {args.loss_scale} is not positive", alike=True)
        level = replace(level, loss_scale=scale)
    return level


class LossScaler:
    """Apex's loss scale: 2**16 at first, halved on overflow, doubled after 2000 clean steps.

    Scale, counter and overflow flag stay on ``device``, so that no step waits for it. ``fixed``
    gives a constant scale.
    """

    FIRST, LARGEST, GROWTH_INTERVAL = 2.0**16, 2.0**24, 2000

    def __init__(self, device: torch.device, fixed: float | None = None):
        self.dynamic = fixed is None
        self.value = torch.tensor(self.FIRST if fixed is None else fixed, device=device)
        self.clean_steps = torch.tensor(0, dtype=torch.int32, device=device)
        self.overflow = torch.tensor(0.0, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss (float32 scalar) times the scale."""
        return loss * self.value

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide float32 ``gradients`` by the scale in place and note any that is not finite."""
        self.overflow.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(
            gradients, self.overflow, self.value.reciprocal()
        )

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer.step()``, which its fused kernel leaves undone after an overflow."""
        optimizer.grad_scale, optimizer.found_inf = None, self.overflow
        optimizer.step()

    def update(self) -> None:
        """Move a dynamic scale after a step."""
        if self.dynamic:
            torch._amp_update_scale_(
                self.value, self.clean_steps, self.overflow, 2.0, 0.5, self.GROWTH_INTERVAL
            )
            self.value.clamp_(max=self.LARGEST)

    def state_dict(self) -> dict[str, float]:
        """Scale and number of clean steps. Waits for the device."""
        return {"scale": float(self.value), "clean_steps": int(self.clean_steps)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over what `state_dict` gave."""
        self.value.fill_(state["scale"])
        self.clean_steps.fill_(int(state["clean_steps"]))


class MixedPrecision:
    """An opt level applied to a model: its float16 weights and their float32 masters.

    As a saved object (`state_dict`) it is the model in float32 under its plain names, with the
    masters in place of the rounded weights: a snapshot loses nothing, and fits any other script.
    """

    def __init__(self, model: nn.Module, level: OptLevel, device: torch.device):
        """Cast ``model`` (on ``device``) in place, and let its forward take and give float32."""
        self.model, self.level, self.device = model, level, device
        if level.half_weights:
            _cast(model, level.keep_batchnorm_fp32)
            model.register_forward_pre_hook(_inputs_to_half)
            model.register_forward_hook(_outputs_to_float)
        # Masters start from the rounded weights, as Apex's do.
        self.masters: dict[str, nn.Parameter] = {}
        if level.master_weights:
            self.masters = {
                name: nn.Parameter(weight.detach().float(), requires_grad=weight.requires_grad)
                for name, weight in model.named_parameters()
                if weight.dtype == torch.float16
            }

    def parameters(self) -> list[nn.Parameter]:
        """What the optimiser updates: masters where there are any, in the model's order."""
        return [self.masters.get(name, weight) for name, weight in self.model.named_parameters()]

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the forward pass; it does something at O1 alone."""
        return torch.autocast(self.device.type, torch.float16, enabled=self.level.autocast)

    @torch.no_grad()
    def gradients_to_masters(self) -> list[Tensor]:
        """Copy float16 gradients, still scaled, to the masters; return all of `parameters`'."""
        for name, weight in self.model.named_parameters():
            if name in self.masters and weight.grad is not None:
                self.masters[name].grad = weight.grad.float()
        return [p.grad for p in self.parameters() if p.grad is not None]

    @torch.no_grad()
    def masters_to_weights(self) -> None:
        """Round the masters into the float16 weights, and drop all gradients."""
        weights = dict(self.model.named_parameters())
        for name, master in self.masters.items():
            weights[name].copy_(master)
            master.grad = None
        self.model.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state dict in float32, taken from the masters where there are any."""
        state = {
            name: value.float() if value.is_floating_point() else value
            for name, value in self.model.state_dict().items()
        }
        return state | {name: master.detach() for name, master in self.masters.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load float32 (or float16) weights into the model and the masters."""
        self.model.load_state_dict(state)
        for name, master in self.masters.items():
            master.copy_(state[name])


def _cast(model: nn.Module, keep_batchnorm_fp32: bool) -> None:
    for module in model.modules():
        # Batch norm without affine parameters has nothing to lose in float16, says Apex's rule.
        if isinstance(module, _BatchNorm) and module.affine and keep_batchnorm_fp32:
            continue
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.half()


def _inputs_to_half(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.half() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)


def _outputs_to_float(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    return output.float() if isinstance(output, Tensor) else output
