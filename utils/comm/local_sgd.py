"""``--comm localsgd:PERIOD``: each process steps by its own gradients, and now and then they meet.

Post-local SGD: after a first part of the training with the usual exchange, the weights are averaged
every PERIOD steps and nothing travels in between (Lin et al. 2018, arxiv.org/abs/1808.07217). Each
process keeps its own momentum.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from utils.launch.world import World


class LocalSGD:
    """One process's part. ``active``: gradients stay here; ``due``: this step ends in a mean."""

    def __init__(self, period: int, optimizer: torch.optim.Optimizer, world: World, scaled: bool):
        """``scaled``: there is a loss scale, so that a step may be skipped."""
        self.period, self.optimizer, self.world, self.scaled = period, optimizer, world, scaled
        self.active = self.due = False
        self.fine: Tensor | None = None  # whether all gradients so far are finite numbers
        optimizer.register_step_post_hook(self._average)

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Leave the gradients of ``bucket`` as they are, but let all skip a step that one must."""
        buffer = bucket.buffer()
        if self.scaled:
            fine = torch.isfinite(buffer).all()
            self.fine = fine if self.fine is None else self.fine & fine
            if bucket.is_last():
                flag = self.fine.to(torch.float32)
                dist.all_reduce(flag, dist.ReduceOp.MIN)
                buffer[:1] = torch.where(flag > 0, buffer[:1], torch.inf)
                self.fine = None
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else [])
        future.set_result(buffer)
        return future

    @torch.no_grad()
    def _average(self, *_: Any) -> None:
        if not (self.active and self.due):
            return
        # torch's average_parameters waits for the device, and gives each weight another memory
        # layout than its momentum has, which the fused optimiser refuses.
        weights = self._weights()
        flat = torch.cat([weight.reshape(-1) for weight in weights]).div_(self.world.size)
        dist.all_reduce(flat)
        means = flat.split([weight.numel() for weight in weights])
        means = [mean.view(weight.shape) for mean, weight in zip(means, weights, strict=True)]
        torch._foreach_copy_(weights, means)

    def _weights(self) -> list[Tensor]:
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def state_dict(self) -> dict[str, list[Tensor]]:
        """This process's weights and momentum (and what else its optimiser keeps for a weight)."""
        return {
            "weights": [weight.detach() for weight in self._weights()],
            "momentum": self._moments(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        """Take over what `state_dict` gave; the optimiser must have its state already."""
        torch._foreach_copy_(self._weights(), state["weights"])
        if moments := self._moments():
            torch._foreach_copy_(moments, state["momentum"])

    def _moments(self) -> list[Tensor]:
        states = [self.optimizer.state[weight] for weight in self._weights()]
        found = [state[name] for state in states for name in sorted(state)]
        return [value for value in found if isinstance(value, Tensor)]
