"""Model FLOPs utilisation: the part of a GPU's peak that the model itself needs."""

import torch
from torch import Tensor, nn
from torch.backends import mha

# A step's operations over those of its forward pass: backward takes two more. A model of which only
# the classifier is trained has next to no backward pass.
TRAINING, FROZEN = 3, 1
# FLOP/s of tensor cores without sparsity, in 16 bits and in float32 (TF32 where there is one).
PEAKS = {
    "T4": (65e12, 8.1e12),
    "V100": (125e12, 15.7e12),
    "A100": (312e12, 156e12),
    "L4": (121e12, 60e12),
    "H100": (989e12, 494e12),
    "H200": (989e12, 494e12),
    # Cards take less power than modules on a board.
    "V100 PCIE": (112e12, 14e12),
    "H100 PCIe": (756e12, 378e12),
    "H100 NVL": (835e12, 417e12),
    "H200 NVL": (835e12, 417e12),
}


@torch.no_grad()
def of_image(model: nn.Module, image: Tensor) -> float:
    """Operations of the forward pass of ``image`` [1, 3, size, size]; a multiply-add is two.

    The model is left as it was. It must not be sharded. ``image`` is float32, as outside of
    autocast all models of the suite take it.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, and sympy to count

    was_training, has_fast_attention = model.training, mha.get_fastpath_enabled()
    model.eval()
    mha.set_fastpath_enabled(False)  # in it, torch does not count
    with FlopCounterMode(display=False) as counter:
        model(image)
    mha.set_fastpath_enabled(has_fast_attention)
    model.train(was_training)
    return float(counter.get_total_flops())


def peak(name: str, precision: str) -> float | None:
    """FLOP/s of the GPU of this ``name`` ("Tesla T4"); None if it is not known.

    ``precision``: "fp32", or any other for 16 bits.
    """
    words = set(name.replace("-", " ").split())
    known = [peaks for kind, peaks in PEAKS.items() if words.issuperset(kind.split())]
    return known[-1][precision == "fp32"] if known else None


def utilisation(forward: float, gpus: int, peak: float, freeze: bool) -> float:
    """The fraction of the ``gpus``' peak that training needs; ``forward`` passes take so many
    operations per second. ``freeze``: only the classifier is trained."""
    return (FROZEN if freeze else TRAINING) * forward / (gpus * peak)
