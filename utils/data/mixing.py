"""``--mixup`` and ``--cutmix`` blend pairs of training images.

Interface: `build` returns a function for `utils.data.batches.TrainBatches.mix`, called with each
micro-batch.

Mixup (Zhang et al. 2018, arXiv:1710.09412) takes a weighted mean of two images. CutMix (Yun et al.
2019, arXiv:1905.04899) pastes a box of one into the other. With both options, each pair gets either
with probability 0.5. As in timm's mode "pair", each pair draws its own mixing weight from
Beta(A, A). Images 2k and 2k+1 of a global batch form a pair: the order is random anyway, and one
process has both. (seed, epoch, step, k) determine how a pair is mixed, so the result is the same on
any number of processes, and a resume needs no saved state.
"""

import numpy as np
import torch
from torch import Tensor

from utils.data.batches import Mix
from utils.data.samplers import TrainSampler
from utils.start.errors import UserError

_STREAM = 0x6D6978  # makes mixing independent of the sample order, which uses (seed, epoch)


def build(alphas: tuple[float, float], sampler: TrainSampler, classes: int) -> Mix:
    """Return a function that mixes the batches of one rank, whose sampler is ``sampler``.

    ``alphas`` are the values of --mixup and --cutmix, 0 if the option is omitted.

    The function takes a micro-batch, images float [n, 3, size, size] and targets int64 [n], and its
    position (epoch, step, micro). It returns the images; targets float [n, classes], whose rows sum
    to 1; and the class with the larger share in each image, int64 [n]. It does not wait for the
    device. The last of an odd number of images is not mixed. Raises: `UserError` if a pair
    would be on two ranks or in two micro-batches.
    """
    parts = sampler.num_replicas * sampler.accum
    if any((part * sampler.global_batch // parts) % 2 for part in range(parts)):
        raise UserError(
            f"--mixup and --cutmix blend pairs of images, and {sampler.global_batch} images per "
            f"step in {parts} parts separate some pairs: choose -b or --global-batch so that a "
            f"step has a multiple of {2 * parts} images",
            on_every_rank=True,
        )

    def mixed(
        images: Tensor, targets: Tensor, position: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        epoch, step, micro = position
        low = (micro * sampler.num_replicas + sampler.rank) * sampler.global_batch // parts
        key = (sampler.seed, epoch, step)
        plan = draw(key, sampler.global_batch // 2, images.shape[-1], alphas)
        return mix(images, targets, plan[low // 2 : low // 2 + len(targets) // 2], classes)

    return mixed


def draw(
    key: tuple[int, int, int], pairs: int, size: int, alphas: tuple[float, float]
) -> np.ndarray:
    """Draw how to mix the ``pairs`` of a global batch: float32 [pairs, 6], or 2 without CutMix.

    ``key`` is (seed, epoch, step), ``size`` the side of the images in pixels, ``alphas`` those of
    mixup and CutMix. Columns: the partner's share in an image's target; the partner's weight in
    every pixel (mixup); top, bottom, left and right of the box copied from the partner (CutMix;
    drawn like torchvision's v2 transform).
    """
    # RandomState: see `utils.data.samplers.epoch_order`.
    source = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([*key, _STREAM])))
    kind, *centre = source.random_sample((3, pairs))
    share = np.zeros(pairs)
    mixup, cutmix = alphas
    boxed = kind < 0.5 if mixup and cutmix else np.full(pairs, bool(cutmix))
    for alpha, chosen in ((mixup, ~boxed), (cutmix, boxed)):
        if alpha:
            share[chosen] = source.beta(alpha, alpha, pairs)[chosen]
    plan = np.zeros((pairs, 6 if cutmix else 2), np.float32)
    plan[:, 0] = plan[:, 1] = share
    if not cutmix:
        return plan
    half = np.where(boxed, (0.5 * size * np.sqrt(share)).astype(int), 0)
    for column, middles in zip((2, 4), centre, strict=True):
        middle = (size * middles).astype(int)
        plan[:, column] = np.maximum(middle - half, 0)
        plan[:, column + 1] = np.minimum(middle + half, size)
    area = (plan[:, 3] - plan[:, 2]) * (plan[:, 5] - plan[:, 4])
    plan[:, 0] = np.where(boxed, area / size**2, share)
    plan[:, 1] = np.where(boxed, 0.0, share)
    return plan


def mix(
    images: Tensor, targets: Tensor, plan: np.ndarray, classes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix images [n, 3, size, size] with the ``plan`` for n // 2 pairs from `draw`; see `build`."""
    paired = 2 * len(plan)
    todo = torch.from_numpy(plan)
    if images.is_cuda:  # copies from pageable memory would wait for the device
        todo = todo.pin_memory().to(images.device, non_blocking=True)
    pairs = images[:paired].unflatten(0, (-1, 2))
    weight = todo[:, 1, None, None]
    if plan.shape[1] > 2:
        line = torch.arange(images.shape[-1], device=images.device)
        top, bottom, left, right = todo[:, 2:, None].unbind(1)
        rows, columns = (line >= top) & (line < bottom), (line >= left) & (line < right)
        weight = weight.masked_fill(rows[:, :, None] & columns[:, None, :], 1.0)
    weight = weight[:, None, None].to(images.dtype)
    mixed = torch.lerp(pairs, pairs.flip(1), weight).flatten(0, 1)
    share = todo[:, :1].expand(-1, 2).reshape(-1)
    partner = targets[:paired].view(-1, 2).flip(1).reshape(-1)
    if paired < len(targets):
        mixed = torch.cat([mixed, images[paired:]])
        share = torch.cat([share, share.new_zeros(1)])
        partner = torch.cat([partner, targets[paired:]])
    soft = share.new_zeros(len(targets), classes)
    soft.scatter_(1, targets[:, None], 1 - share[:, None])
    soft.scatter_add_(1, partner[:, None], share[:, None])
    return mixed, soft, torch.where(share > 0.5, partner, targets)
