"""NVIDIA Apex's own amp and parallel (until its tag 25.04), where they are installed and usable.

Elsewhere utils/amp/o2.py computes the same; `amp_and_parallel` chooses.
"""

import argparse
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from utils.amp import o2
from utils.amp.loss_scale import SMALLEST
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
    group.add_argument("--opt-level", choices=tuple(o2.LEVELS), default="O2", help="Apex opt level")
    group.add_argument(
        "--keep-batchnorm-fp32",
        choices=("True", "False"),
        help="batch norm in float32 though the weights are float16; default: the level's",
    )
    group.add_argument(
        "--loss-scale", metavar="X|dynamic", help="a fixed number or dynamic; default: the level's"
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
    o2.from_args(args)
    _choose(args)


def amp_and_parallel(args: argparse.Namespace, world: World) -> tuple[Any, Any]:
    """The result of ``from apex import amp, parallel``, or the same in plain PyTorch.

    ``--amp-impl`` decides; rank 0 prints which it is and why.
    """
    use_apex, why = _choose(args)
    if world.is_main:
        by = "NVIDIA Apex" if use_apex else "plain PyTorch (utils/amp/o2.py)"
        print(f"opt level {o2.from_args(args)} by {by}: {why}", flush=True)
    return (Amp(), parallel()) if use_apex else (o2.Amp(world), o2)


def _choose(args: argparse.Namespace) -> tuple[bool, str]:
    """Whether to use Apex, and why."""
    if args.amp_impl == "torch":
        return False, "as --amp-impl says"
    reason = _why_unusable()
    if reason and args.amp_impl == "apex":
        raise UserError(f"--amp-impl apex: {reason}: {HOW_TO_GET_APEX}", alike=True)
    return not reason, reason or "it is installed"


def _why_unusable() -> str | None:
    """Why Apex's amp cannot be used here; None if it can."""
    try:
        if importlib.util.find_spec("apex") is None:
            return "Apex is not installed"
        if importlib.util.find_spec("apex.amp") is None:
            return (
                "the installed apex has no amp (NVIDIA removed it in May 2025; PyPI's apex is "
                "another package)"
            )
        if not _gpu_is_there():
            return "Apex's amp needs a CUDA GPU"
        importlib.import_module("apex.amp")
        importlib.import_module("apex.parallel")
    except Exception as fault:  # whatever a module built for another torch raises
        return f"Apex cannot be imported ({fault!r:.200})"
    return None


def _gpu_is_there() -> bool:
    return torch.cuda.is_available()


class Amp:
    """The module ``apex.amp``, for one model and one optimiser; see `utils.amp.o2.Amp`."""

    def __init__(self) -> None:
        self.amp = importlib.import_module("apex.amp")

    def initialize(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        opt_level: str = "O1",
        **overrides: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """``amp.initialize``."""
        level, usual = o2.choose(opt_level, **overrides), o2.LEVELS[opt_level]
        changes: dict[str, Any] = {}  # Apex refuses some overrides that override nothing
        if level.keep_batchnorm_fp32 != usual.keep_batchnorm_fp32:
            changes["keep_batchnorm_fp32"] = level.keep_batchnorm_fp32
        if level.loss_scale != usual.loss_scale:
            changes["loss_scale"] = "dynamic" if level.loss_scale is None else level.loss_scale
        model, optimizer = self.amp.initialize(model, optimizer, opt_level=opt_level, **changes)
        self.scaler = Scaler(self.amp)
        self.weights = Weights(model, optimizer)
        return model, optimizer

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizer: torch.optim.Optimizer, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        """``amp.scale_loss``, which waits for the device in every step."""
        before = self.scaler.value
        with self.amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale) as scaled_loss:
            yield scaled_loss
        self.scaler.skipped += self.scaler.value < before

    def master_params(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """``amp.master_params``."""
        return list(self.amp.master_params(optimizer))


class Scaler:
    """Apex's loss scaler, saved like a `utils.amp.loss_scale.LossScaler`."""

    def __init__(self, amp: Any):
        self.amp, self.skipped = amp, 0

    @property
    def value(self) -> float:
        """The loss scale."""
        return float(self.amp.state_dict()["loss_scaler0"]["loss_scale"])

    @property
    def lost(self) -> bool:
        """Whether the scale has fallen too far to recover."""
        return self.value < SMALLEST

    def state_dict(self) -> dict[str, float]:
        """Scale, clean steps in a row, and skipped steps."""
        clean = int(self.amp.state_dict()["loss_scaler0"]["unskipped"])
        return {"scale": self.value, "clean_steps": clean, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict`."""
        self.skipped = int(state["skipped"])
        saved = {"loss_scale": state["scale"], "unskipped": int(state["clean_steps"])}
        self.amp.load_state_dict({"loss_scaler0": saved})


class Weights(o2.Weights):
    """The model in float32 with Apex's masters, which Apex's own checkpoints leave out."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        super().__init__(model, {})
        self.optimizer = optimizer
        # Apex will replace the weights in the optimiser by its masters.
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.names = [names[parameter] for parameter in o2.Amp.master_params(optimizer)]

    def named_masters(self) -> dict[str, nn.Parameter]:
        """The parameters of the optimiser under the names of their weights."""
        # Apex makes its masters with the first backward: after a snapshot is loaded.
        if hasattr(self.optimizer, "_amp_lazy_init"):
            self.optimizer._amp_lazy_init()
        return dict(zip(self.names, o2.Amp.master_params(self.optimizer), strict=True))


def parallel() -> Any:
    """The module ``apex.parallel``, its replicas with torch's ``no_sync()``."""
    original = importlib.import_module("apex.parallel")

    class DistributedDataParallel(original.DistributedDataParallel):
        @contextmanager
        def no_sync(self) -> Iterator[None]:
            """In this context, backward accumulates gradients without an all-reduce."""
            self.disable_allreduce()
            try:
                yield
            finally:
                self.enable_allreduce()

    return SimpleNamespace(
        DistributedDataParallel=DistributedDataParallel,
        convert_syncbn_model=original.convert_syncbn_model,
    )
