"""``--ema``: an exponential moving average (EMA) of the weights, evaluated beside the model.

average = d * average + (1 - d) * weights after each step (Polyak and Juditsky 1992; as timm's
ModelEma and torchvision's references do it). Batch norm's running statistics are averaged like
weights, so that both are of the same steps; what is counted in whole numbers stays the model's own.

A step that a loss scaler skips counts like any other, as in timm and torchvision: the weights are
what they were, and finite, and nobody has to ask the device.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from utils.errors import UserError
from utils.launch.world import local, reshard
from utils.option_types import number

Named = dict[str, Tensor]


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--ema``."""
    group = parser.add_argument_group("averaged weights")
    group.add_argument(
        "--ema",
        type=_decay,
        metavar="DECAY",
        help="keep an exponential moving average of the weights as well, and evaluate it beside "
        "the model after each epoch; best.pt is the better of the two. 0.9999 for long trainings, "
        "0.998 and less for short ones: about 1/(1-DECAY) steps are averaged",
    )


def _decay(text: str) -> float:
    value = number(float, 0, 1, exclusive=True)(text)
    if value == 1:
        raise argparse.ArgumentTypeError("1 would keep the weights of the first step")
    return value


_decay.__name__ = "number"


def build(args: Any, state: Any) -> "Average | None":
    """What ``--ema`` asks for, of the model in ``state`` (`utils.run.checkpoint.TrainState`)."""
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
        """``masters``: the float32 originals of weights that the model has in less, by name."""
        self.model, self.decay = model, decay
        self.steps = 0  # since the average began
        kept, masters = set(model.state_dict()), masters or {}
        self.place: dict[str, int] = {}  # a tensor that stands under two names is averaged once
        self.live: list[Tensor] = []  # the model's own
        self.sources: list[Tensor] = []
        known: dict[int, int] = {}
        for names in (model.named_parameters, model.named_buffers):
            for name, tensor in names(remove_duplicate=False):
                if name not in kept or not tensor.is_floating_point():
                    continue
                self.place[name] = known.setdefault(id(tensor), len(self.live))
                if self.place[name] == len(self.live):
                    self.live.append(tensor)
                    self.sources.append(masters.get(name, tensor))
        with torch.no_grad():
            averages = [torch.empty_like(s, dtype=torch.float32) for s in self.sources]
        self.averages = [average.detach() for average in averages]

    @torch.no_grad()
    def after_step(self) -> None:
        """The weights have changed. Nothing here waits for the device."""
        self.steps += 1
        # Not much of the first weights: as TensorFlow's ExponentialMovingAverage with num_updates.
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        sources = [s if s.dtype == torch.float32 else s.float() for s in _local(self.sources)]
        torch._foreach_lerp_(_local(self.averages), sources, 1 - decay)

    def weights(self) -> Named:
        """The averages under the names of the model's state dict."""
        return {name: self.averages[place] for name, place in self.place.items()}

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """In this context the model has the averages in place of its weights; then its own again.

        It takes as much memory as the model has, as long as it lasts.
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
        reshard(self.model)  # whole weights that FSDP may still have are old now

    def state_dict(self) -> dict[str, Any]:
        """What a snapshot keeps."""
        return {"model": self.weights(), "steps": self.steps}

    @torch.no_grad()
    def restore(self, saved: dict[str, Any] | None) -> None:
        """Continue as a snapshot says (`state_dict`, sharded as the model); without one, begin from
        the weights.

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
    """Whose top-1 is the higher one in an epoch's record: "val", the model's, or "ema"."""
    return "ema" if record.get("Top1/ema", -1.0) > record["Top1/val"] else "val"


def _local(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors; of those that are sharded, this process's shard (the same memory)."""
    return [local(tensor) for tensor in tensors]
