"""Kernels that torch cannot play on fake tensors: what they demand of their arguments."""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def alike(what: str, *tensors: Tensor) -> None:
    """One device and dtype."""
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    assert len(kinds) == 1, f"{what}: {kinds}"


def fused_sgd(
    gpu: Any, params: Any, grads: Any, buffers: Any, *, grad_scale=None, found_inf=None, **_: Any
) -> None:
    for param, *others in zip(params, grads, *([buffers] if buffers else []), strict=True):
        alike("fused optimiser", param, *others)
        for other in others:
            steps = zip(param.shape, param.stride(), other.stride(), strict=True)
            assert all(n == 1 or a == b for n, a, b in steps), "memory formats differ"
    flags = [flag for flag in (grad_scale, found_inf) if flag is not None]
    alike("flags", params[0].float(), *flags)
    gpu.optimised.add(params[0].dtype)


def fused_adamw(
    gpu: Any, params: Any, grads: Any, means: Any, squares: Any, _: Any, steps: Any, **flags: Any
) -> None:
    """torch's fused AdamW: what it keeps lies beside the weight, the count of steps, too."""
    alike("counts of steps", params[0].float(), *steps)
    for kept in (means, squares):
        fused_sgd(gpu, params, grads, kept, **flags)


def check_and_unscale(gpu: Any, grads: Any, found_inf: Tensor, inverse: Tensor) -> None:
    alike("unscale", *grads)
    alike("unscale", found_inf, inverse, grads[0].float())


def update_scale(gpu: Any, scale: Tensor, tracker: Tensor, found_inf: Tensor, *_: Any) -> None:
    alike("update", scale, found_inf, tracker.float())
    assert tracker.dtype == torch.int32


# SyncBatchNorm: statistics of a process in float32, those of all, forward, sums of gradients.


def bn_stats(gpu: Any, images: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stats = torch.empty(images.shape[1], device=images.device)
    return stats, torch.empty_like(stats)


def bn_gather(gpu: Any, images: Tensor, mean: Tensor, invstd: Tensor, *_: Any) -> Any:
    return mean[0].clone(), invstd[0].clone()


def bn_apply(gpu: Any, images: Tensor, *others: Any) -> Tensor:
    alike("SyncBatchNorm", *others[:4])
    return torch.empty_like(images)


def bn_backward_sums(gpu: Any, grad: Tensor, images: Tensor, mean: Tensor, *_: Any) -> Any:
    alike("SyncBatchNorm", grad, images)
    return tuple(torch.empty_like(mean) for _ in range(4))


KERNELS = {
    aten._fused_sgd_: fused_sgd,
    aten._fused_adamw_: fused_adamw,
    aten._amp_foreach_non_finite_check_and_unscale_: check_and_unscale,
    aten._amp_update_scale_: update_scale,
    aten.batch_norm_stats: bn_stats,
    aten.batch_norm_gather_stats_with_counts: bn_gather,
    aten.batch_norm_elemt: bn_apply,
    aten.batch_norm_backward_reduce: bn_backward_sums,
    aten.batch_norm_backward_elemt: lambda gpu, grad, images, *_: torch.empty_like(images),
}
