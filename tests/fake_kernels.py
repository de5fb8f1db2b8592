"""Kernels that torch cannot play on fake tensors: what they demand of their arguments."""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def fused_sgd(
    gpu: Any, params: Any, grads: Any, buffers: Any, *, grad_scale=None, found_inf=None, **_: Any
) -> None:
    for param, *others in zip(params, grads, *([buffers] if buffers else []), strict=True):
        for other in others:
            assert other.device == param.device, "fused SGD: another device"
            assert other.dtype == param.dtype, f"fused SGD: {other.dtype} and {param.dtype}"
            assert other.shape == param.shape, "fused SGD: another shape"
            steps = zip(param.shape, param.stride(), other.stride(), strict=True)
            assert all(n == 1 or a == b for n, a, b in steps), (
                f"fused SGD: memory formats differ: {param.shape} {param.stride()} {other.stride()}"
            )
    for flag in (grad_scale, found_inf):
        assert flag is None or flag.device == params[0].device, "fused SGD: a flag elsewhere"
        assert flag is None or flag.dtype == torch.float32, "fused SGD: a flag that is no float"
    gpu.optimised.add(params[0].dtype)


def fused_adamw(gpu: Any, params: Any, grads: Any, *kept: Any, **flags: Any) -> None:
    """torch's fused AdamW: what it keeps lies beside the weight, the count of steps, too."""
    means, squares, _, steps = kept
    for param, mean, square, step in zip(params, means, squares, steps, strict=True):
        assert step.device == param.device, "fused AdamW: steps are counted elsewhere"
        assert mean.stride() == square.stride(), "fused AdamW: memory formats differ"
        assert mean.dtype == square.dtype == param.dtype
    flags = {name: flags.get(name) for name in ("grad_scale", "found_inf")}
    fused_sgd(gpu, params, grads, means, **flags)


def check_and_unscale(gpu: Any, grads: Any, found_inf: Tensor, inverse: Tensor) -> None:
    for tensor in (*grads, found_inf, inverse):
        assert tensor.device == grads[0].device, "unscale: another device"
        assert tensor.dtype == grads[0].dtype or tensor in (found_inf, inverse)
    assert found_inf.dtype == inverse.dtype == torch.float32


def update_scale(gpu: Any, scale: Tensor, tracker: Tensor, found_inf: Tensor, *_: Any) -> None:
    assert scale.device == tracker.device == found_inf.device, "update: another device"
    assert scale.dtype == found_inf.dtype == torch.float32
    assert tracker.dtype == torch.int32


# SyncBatchNorm: statistics of a process in float32, those of all, forward, sums of gradients.


def bn_stats(gpu: Any, images: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stats = torch.empty(images.shape[1], device=images.device)
    return stats, torch.empty_like(stats)


def bn_gather(gpu: Any, images: Tensor, mean: Tensor, invstd: Tensor, *others: Any) -> Any:
    for tensor in (images, mean, invstd, *(t for t in others if isinstance(t, Tensor))):
        assert tensor.device == images.device, "SyncBatchNorm: another device"
    return mean[0].clone(), invstd[0].clone()


def bn_apply(gpu: Any, images: Tensor, *others: Any) -> Tensor:
    weight, bias, mean, invstd, _ = others
    assert weight.dtype == bias.dtype == mean.dtype == invstd.dtype
    return torch.empty_like(images)


def bn_backward_sums(gpu: Any, grad: Tensor, images: Tensor, mean: Tensor, *_: Any) -> Any:
    assert grad.dtype == images.dtype, f"SyncBatchNorm: {grad.dtype} and {images.dtype}"
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
