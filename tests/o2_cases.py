"""A small network, its batches, and one training step, for the tests of O2."""

import torch
import torch.nn.functional as F
from torch import nn

from utils.amp.o2 import Amp
from utils.launch.world import World
from utils.model.optim import sgd

CPU = torch.device("cpu")
RECIPE = {"lr": 0.05, "momentum": 0.9}
DECAY = 1e-3


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
    for parameter in model[4].parameters():
        parameter.requires_grad_(False)
    return model.to(device)


def groups(model: nn.Module) -> list[dict]:
    """Two parameter groups, not in the model's order: without weight decay, and with it."""
    plain = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": plain, "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": DECAY},
    ]


def batch(step: int, device=CPU):
    """Images [6, 3, 8, 8] and targets [6]."""
    source = torch.Generator().manual_seed(step)
    images = torch.randn(6, 3, 8, 8, generator=source)
    return images.to(device), torch.randint(5, (6,), generator=source).to(device)


def level(name="O2", **changes):
    """What `initialize` takes: an opt level, and changes to it."""
    return {"opt_level": name, **changes}


def usual(groups):
    """The optimiser of the script."""
    return sgd(groups, RECIPE["lr"], RECIPE["momentum"], 0.0)


def prepare(chosen=None, device=CPU, build=usual):
    """A plain `Amp`, its model and its optimiser."""
    amp, model = Amp(World(device)), network(device)
    return amp, *amp.initialize(model, build(groups(model)), **chosen or level())


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


def contents(amp, model, optimizer):
    """Copies of all that training changes: weights, masters and momentum."""
    tensors = [p for p in (*model.parameters(), *amp.master_params(optimizer)) if p.requires_grad]
    trained = set(map(id, tensors))
    tensors += [
        state["momentum_buffer"] for p, state in optimizer.state.items() if id(p) in trained
    ]
    return [tensor.detach().clone() for tensor in tensors]
