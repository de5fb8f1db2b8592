"""NVIDIA Apex's own amp and parallel (until its tag 25.04), so that their state can be saved."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from utils.amp import levels
from utils.amp.loss_scale import SMALLEST
from utils.amp.plain import master_params


class Amp:
    """The module ``apex.amp``, for one model and one optimiser, whose masters can be saved."""

    scaler: "Scaler"
    weights: "Weights"

    def __init__(self) -> None:
        self.amp = importlib.import_module("apex.amp")

    def initialize(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        opt_level: str = "O1",
        keep_batchnorm_fp32: bool | str | None = None,
        loss_scale: float | str | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """``amp.initialize``: cast, and make masters."""
        level = levels.choose(opt_level, keep_batchnorm_fp32, loss_scale)
        usual = levels.LEVELS[opt_level]
        changes: dict[str, Any] = {}  # Apex takes offence at some overrides that override nothing
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
        """``amp.scale_loss``. It waits for the device in every step."""
        before = self.scaler.value
        with self.amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale) as scaled_loss:
            yield scaled_loss
        self.scaler.skipped += self.scaler.value < before

    def master_params(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """What the optimiser updates, in order."""
        return list(self.amp.master_params(optimizer))


class Scaler:
    """The loss scaler inside Apex, saved in the form of `utils.amp.loss_scale.LossScaler`.

    Apex itself prints that a step is skipped, in rank 0.
    """

    def __init__(self, amp: Any):
        self.amp, self.skipped = amp, 0

    @property
    def value(self) -> float:
        """The loss scale."""
        return float(self.amp.state_dict()["loss_scaler0"]["loss_scale"])

    @property
    def lost(self) -> bool:
        """Whether the scale keeps falling without end."""
        return self.value < SMALLEST

    def state_dict(self) -> dict[str, float]:
        """Scale, number of clean steps in a row and of skipped ones."""
        state = self.amp.state_dict()["loss_scaler0"]
        return {
            "scale": float(state["loss_scale"]),
            "clean_steps": int(state["unskipped"]),
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over what `state_dict` gave."""
        self.skipped = int(state["skipped"])
        saved = {"loss_scale": state["scale"], "unskipped": int(state["clean_steps"])}
        self.amp.load_state_dict({"loss_scaler0": saved})


class Weights:
    """The model in float32 with Apex's masters, which Apex's own checkpoints leave out."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self.model, self.optimizer = model, optimizer
        # Apex will put its masters in the places of the weights.
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.names = [names[parameter] for parameter in master_params(optimizer)]

    def named_masters(self) -> dict[str, nn.Parameter]:
        """What the optimiser updates, under the names of the weights."""
        # Apex makes its masters only when the first backward begins: later than a snapshot is
        # loaded.
        if hasattr(self.optimizer, "_amp_lazy_init"):
            self.optimizer._amp_lazy_init()
        return dict(zip(self.names, master_params(self.optimizer), strict=True))

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state dict in float32, taken from the masters where there are any."""
        state = {
            name: value.float() if value.is_floating_point() else value
            for name, value in self.model.state_dict().items()
        }
        masters = self.named_masters().items()
        return state | {name: value.detach().float() for name, value in masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load float32 (or float16) weights into the model and the masters."""
        masters = self.named_masters()
        self.model.load_state_dict(state)
        for name, master in masters.items():
            master.copy_(state[name])


def parallel() -> Any:
    """The module ``apex.parallel``, with a ``no_sync()`` like torch's on its replicas."""
    original = importlib.import_module("apex.parallel")

    class DistributedDataParallel(original.DistributedDataParallel):
        @contextmanager
        def no_sync(self) -> Iterator[None]:
            """In this context, backward adds up gradients without an all-reduce."""
            self.disable_allreduce()
            try:
                yield
            finally:
                self.enable_allreduce()

    return SimpleNamespace(
        DistributedDataParallel=DistributedDataParallel,
        convert_syncbn_model=original.convert_syncbn_model,
    )
