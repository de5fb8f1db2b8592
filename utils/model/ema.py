"""``--ema``: an exponential moving average (EMA) of the weights, evaluated beside the model.

average = d * average + (1 - d) * weights after each step (Polyak and Juditsky 1992; same rule as
timm's ModelEma and torchvision's references). Batch norm's running statistics are averaged like
weights, so that both cover the same steps; integer counters are not averaged.

Interface: `Average.after_step` is a hook of the optimiser's step. A step that a loss scaler skips
on the device counts, as in timm and torchvision: the weights are unchanged and finite, and
counting needs no host-device sync. A step that torch.amp's scaler skips on the host (CPU) does not
count.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from utils.model import kernels
from utils.start.world import local, shard_like


class Average:
    """The averages of a model's weights and running statistics, float32, on the model's device.

    ``averages`` has the names of the model's state dict. Each process averages its own shard of a
    DTensor.
    """

    def __init__(self, model: nn.Module, decay: float, masters: Mapping[str, Tensor] | None = None):
        """``masters``: the float32 originals of the model's float16 weights, by name."""
        self.decay = decay
        # Keep the variables themselves: FSDP may move a shard's memory.
        state = model.state_dict(keep_vars=True)
        self.live = {name: x for name, x in state.items() if x.is_floating_point()}
        self.sources = [*{**self.live, **(masters or {})}.values()]
        self.averages = {n: torch.empty_like(x, dtype=torch.float32) for n, x in self.live.items()}
        with torch.no_grad():
            kernels.copy_all([*map(local, self.averages.values())], [*map(local, self.sources)])
        self.steps = 0  # since the average began

    @torch.no_grad()
    def after_step(self) -> None:
        """Update the averages after an optimiser step, without waiting for the device."""
        self.steps += 1
        # A smaller decay at first forgets the initial weights, as TensorFlow's averages do.
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        sources = [source.float() for source in map(local, self.sources)]
        kernels.lerp_all([*map(local, self.averages.values())], sources, 1 - decay)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Context in which the model has the averages in place of its weights.

        The weights are copied meanwhile, which takes as much memory again. FSDP must not hold
        gathered weights then: `utils.epoch.evaluate_weights` frees them at its end.
        """
        own = [local(tensor).detach().clone() for tensor in self.live.values()]
        self._put([*map(local, self.averages.values())])
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        kernels.copy_all([*map(local, self.live.values())], values)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the number of averaged steps, for a snapshot."""
        return {"model": self.averages, "steps": self.steps}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` with whole (unsharded) tensors.

        Raises: ValueError if it belongs to another model.
        """
        self.steps = state["steps"]
        for name, average in self.averages.items():
            saved = state["model"].get(name)
            if saved is None or saved.shape != average.shape:
                raise ValueError(f"no averages of {name}")
            average.copy_(shard_like(saved, average))
