"""A small network, its batches, and one training step, for the tests of O2."""

import torch
import torch.nn.functional as F
from torch import nn

from utils.model.o2 import Amp
from utils.model.optim import sgd
from utils.start.world import World

CPU = torch.device("cpu")


def network(device=CPU) -> nn.Sequential:
    """Convolutions, of which one is frozen; batch norm with and without weights; layer norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.BatchNorm2d(8, affine=False),
        nn.Conv2d(8, 8, 1),
        nn.Flatten(),
        nn.LayerNorm(8 * 36),
        nn.Linear(8 * 36, 5),
    )
    model[4].requires_grad_(False)
    return model.to(device)


def groups(model: nn.Module) -> list[dict]:
    """Two parameter groups, not in the model's order: without weight decay, and with it."""
    plain = [p for p in model.parameters() if p.ndim == 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    return [{"params": plain, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 1e-3}]


def usual(groups):
    """The optimiser of the script."""
    return sgd(groups, 0.05, 0.9, 0.0)


def batch(step: int, device=CPU):
    """Images [6, 3, 8, 8] and targets [6]."""
    source = torch.Generator().manual_seed(step)
    images = torch.randn(6, 3, 8, 8, generator=source)
    return images.to(device), torch.randint(5, (6,), generator=source).to(device)


def prepare(opt_level="O2", device=CPU, amp=None, **changes):
    """``amp``, ours if none is given, with a model and an optimiser."""
    amp, model = amp or Amp(World(device)), network(device)
    return amp, *amp.initialize(model, usual(groups(model)), opt_level, **changes)


def train(amp, model, optimizer, step, weight=1.0):
    """One step as imagenet_ddp_apex.py takes it. Returns the loss."""
    images, targets = batch(step, next(model.parameters()).device)
    logits = model(images)
    assert logits.dtype == torch.float32
    loss = F.cross_entropy(logits, targets)
    with amp.scale_loss(loss * weight, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
