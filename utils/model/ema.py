"""``--ema``: an exponential moving average (EMA) of the weights, evaluated beside the model.

average = d * average + (1 - d) * weights after each step (Polyak and Juditsky 1992; as timm's
ModelEma and torchvision's references do it). Batch norm's running statistics are averaged like
weights, so that both are of the same steps; integer counters stay the model's own.

A step that a loss scaler skips counts like any other, as in timm and torchvision: the weights are
unchanged and finite, and there is no host-device sync.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from utils.errors import UserError
from utils.launch.world import local, reshard

Named = dict[str, Tensor]


def build(args: Any, state: Any) -> "Average | None":
    """The average that ``--ema`` asks for, of the model in a `utils.run.checkpoint.TrainState`."""
    if not args.ema or args.evaluate or args.dummy:
        return None
    masters = getattr(state.weights, "named_masters", dict)()
    return Average(state.model, args.ema, masters)


class Average:
    """The averages of a model's weights and running statistics, float32, on the model's device.

    A tensor that is sharded over the processes (a DTensor) is averaged shard by shard. `restore`
    has to be called before the first step.
    """

    def __init__(self, model: nn.Module, decay: float, masters: Named | None = None):
        """``masters``: the float32 originals of the model's float16 weights, by name."""
        self.model, self.decay, masters = model, decay, masters or {}
        self.steps = 0  # since the average began
        kept = set(model.state_dict())
        named = dict(model.named_parameters(remove_duplicate=False))
        named |= dict(model.named_buffers(remove_duplicate=False))
        named = {n: t for n, t in named.items() if n in kept and t.is_floating_point()}
        first = {id(t): name for name, t in reversed(named.items())}  # a tensor may have two names
        self.names = {name: first[id(tensor)] for name, tensor in named.items()}
        own = dict.fromkeys(self.names.values())
        self.live = [named[name] for name in own]
        self.sources = [masters.get(name, named[name]) for name in own]
        self.averages = [torch.empty_like(s.detach(), dtype=torch.float32) for s in self.sources]

    @torch.no_grad()
    def after_step(self) -> None:
        """Update the averages after an optimiser step. Nothing here waits for the device."""
        self.steps += 1
        # Not much of the first weights: as TensorFlow's ExponentialMovingAverage with num_updates.
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        sources = [s if s.dtype == torch.float32 else s.float() for s in _local(self.sources)]
        torch._foreach_lerp_(_local(self.averages), sources, 1 - decay)

    def weights(self) -> Named:
        """The averages under the names of the model's state dict."""
        averages = dict(zip(dict.fromkeys(self.names.values()), self.averages, strict=True))
        return {name: averages[first] for name, first in self.names.items()}

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """In this context the model has the averages in place of its weights.

        Meanwhile a copy of its own weights takes as much memory as they do.
        """
        live = _local([tensor.detach() for tensor in self.live])
        own = [tensor.clone() for tensor in live]
        self._put(_local(self.averages), live)
        try:
            yield
        finally:
            self._put(own, live)

    @torch.no_grad()
    def _put(self, values: list[Tensor], live: list[Tensor]) -> None:
        torch._foreach_copy_(live, values)
        reshard(self.model)  # FSDP may still have whole weights of before

    def state_dict(self) -> dict[str, Any]:
        """The averages and their number of steps, for a snapshot."""
        return {"model": self.weights(), "steps": self.steps}

    @torch.no_grad()
    def restore(self, saved: dict[str, Any] | None) -> None:
        """Continue from a `state_dict` (sharded like the model), or start from the weights.

        Raises: `UserError` when it is of another model.
        """
        if saved is None:
            torch._foreach_copy_(_local(self.averages), _local(self.sources))
            self.steps = 0
            return
        self.steps = saved["steps"]
        for name, average in self.weights().items():
            found = saved["model"].get(name)
            if found is None or found.shape != average.shape:
                raise UserError(
                    f"the averaged weights in the snapshot are of another model ({name})",
                    alike=True,
                )
            average.copy_(found)


def better(record: dict[str, float]) -> str:
    """Which has the higher top-1 in an epoch's record: "val", the model, or "ema"."""
    return "ema" if record.get("Top1/ema", -1.0) > record["Top1/val"] else "val"


def _local(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, or this process's shards of them (the same memory)."""
    return [local(tensor) for tensor in tensors]
