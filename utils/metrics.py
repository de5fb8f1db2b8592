"""Loss and accuracy as sums and counts that stay on the device until they are printed."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from utils.data.samplers import UNREADABLE
from utils.start.world import World


class Sums:
    """Running sums of [loss, top-1 hits, top-5 hits, images] on ``device`` (float64).

    float64 holds every count exactly; the sums of all ranks are then the same at any world size.
    """

    def __init__(self, device: torch.device, start: list[float] | None = None):
        self.values = torch.tensor(start or [0.0] * 4, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, loss_sum: Tensor, logits: Tensor, targets: Tensor) -> None:
        """Add a batch: its summed loss (scalar), logits [n, classes] and targets [n] (int64).

        Nothing here waits for the device.
        """
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hits = best.eq(targets[:, None])
        counts = torch.stack([hits[:, 0].sum(), hits.sum(), (targets != UNREADABLE).sum()])
        self.values[0] += loss_sum.detach().double()
        self.values[1:] += counts

    def total(self, world: World) -> list[float]:
        """The four sums over all ranks, which must all call it. Waits for them and the device."""
        values = self.values.clone()
        if world.size > 1:
            dist.all_reduce(values)
        return values.tolist()


def means(total: list[float], part: str) -> dict[str, float]:
    """Mean loss, top-1 and top-5 accuracy in per cent, by their TensorBoard tags.

    ``total`` are the sums of `Sums.total`; ``part`` is the end of the tags, such as "train". NaN if
    there was no image.
    """
    loss, top1, top5, images = total
    count = images or math.nan
    top1, top5 = 100.0 * top1 / count, 100.0 * top5 / count
    return {f"Loss/{part}": loss / count, f"Top1/{part}": top1, f"Top5/{part}": top5}
