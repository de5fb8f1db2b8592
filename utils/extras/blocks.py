"""Options that change a new model: --freeze, --zero-init-gamma, --drop-path,
--activation-checkpointing. This file also identifies a model's last layer and repeated blocks.

Interface: `utils.models` calls `change` and `drop_path` with the new model; other extras call
`head_of` and `repeated`. Without this file, these options, --pretrained and imagenet_fsdp.py fail.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet
from torchvision.ops import StochasticDepth

from utils.errors import UserError

SEQUENCES = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

# ---- parts of a model


def head_of(model: nn.Module, classes: int) -> str:
    """Return the name of the last layer with ``classes`` outputs. Raises: `UserError`."""
    own = model.get_classifier() if hasattr(model, "get_classifier") else None  # timm's
    head = ""
    for name, layer in model.named_modules():
        if layer is own:
            return name
        width = getattr(layer, "out_features", getattr(layer, "out_channels", None))
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and width == classes:
            head = name
    if not head:
        raise UserError(f"this model has no last layer of {classes} classes", on_every_rank=True)
    return head


def repeated(model: nn.Module) -> list[nn.Module]:
    """Return a model's repeated blocks in order: the outermost modules whose class occurs twice.

    Layers of torch itself, sequences of modules and stages (rows of blocks) do not count.
    """
    kinds = Counter(type(module) for module in model.modules() if _is_block(module))

    def search(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if kinds[type(child)] > 1:
                yield child
            else:
                yield from search(child)

    return list(search(model))


def _is_block(module: nn.Module) -> bool:
    kind, children = type(module), list(module.children())
    if isinstance(module, SEQUENCES) or kind.__module__.startswith("torch.nn"):
        return False
    if len(children) == 1 and isinstance(children[0], SEQUENCES):
        row = list(children[0].children())
        if all(map(_is_block, row)) and len(set(map(type, row))) == 1:
            return False  # a stage
    return bool(children) and not kind.__name__.endswith("Stage")  # timm's


# ---- options


def change(model: nn.Module, args: Any, classes: int) -> list[str]:
    """Apply the options to ``model``. Returns: notes for the log. Raises: `UserError`."""
    notes = []
    if args.zero_init_gamma:
        zero_init_gamma(model)
    if args.freeze:
        head = head_of(model, classes)
        freeze(model, head)
        notes.append(f"--freeze: only {head} is trained")
    if args.activation_checkpointing:
        notes.append(f"--activation-checkpointing: {checkpoint_blocks(model)}")
    return notes


def freeze(model: nn.Module, head: str) -> None:
    """``--freeze``: train only the layer ``head``; freeze batch-norm statistics elsewhere."""
    model.requires_grad_(False)
    model.get_submodule(head).requires_grad_(True)
    model.train = MethodType(_train_the_unfrozen, model)
    model.train(model.training)


def _train_the_unfrozen(model: nn.Module, mode: bool = True) -> nn.Module:
    # Search the modules in each call, because batch norm may have become SyncBatchNorm.
    type(model).train(model, mode)
    for module in model.modules():
        if isinstance(module, _NormBase) and not any(p.requires_grad for p in module.parameters()):
            module.eval()
    return model


@torch.no_grad()
def zero_init_gamma(model: nn.Module) -> None:
    """Start each residual block as the identity (Goyal et al. 2017, arXiv:1706.02677).

    Same as torchvision's ``zero_init_residual``. Raises: `UserError` if it is not a ResNet.
    """
    timm_blocks = [block for block in model.modules() if hasattr(block, "zero_init_last")]
    for block in timm_blocks:
        block.zero_init_last()
    own = [m for m in model.modules() if isinstance(m, (resnet.Bottleneck, resnet.BasicBlock))]
    for block in own:
        (block.bn3 if isinstance(block, resnet.Bottleneck) else block.bn2).weight.zero_()
    if not timm_blocks + own:
        raise UserError("--zero-init-gamma is for ResNets: leave it out", on_every_rank=True)


def drop_path(model: nn.Module, share: float) -> None:
    """Set the stochastic depth (Huang et al. 2016, arXiv:1603.09382) of a torchvision model.

    The last block's drop rate becomes ``share``; the others are scaled by the same factor.
    Raises: `UserError` for a model without stochastic depth.
    """
    drops = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    most = max((drop.p for drop in drops), default=0.0)
    if not most:
        raise UserError(
            "--drop-path: this model has no stochastic depth: leave it out", on_every_rank=True
        )
    for drop in drops:
        drop.p = drop.p / most * share


class Checkpointed:
    """A base class that makes a block recompute its activations during backward.

    Chen et al. 2016 (arXiv:1604.06174). Unlike a wrapper module, a base class keeps the weights'
    names, and DataParallel can copy the block.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward pass, with checkpointing during training."""
        own = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return own(*args, **kwargs)
        if torch.compiler.is_compiling():  # compiled code updates buffers only once
            return checkpoint(own, *args, use_reentrant=False, **kwargs)
        contexts = lambda: (nullcontext(), _without_statistics(self))  # noqa: E731
        return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _without_statistics(block: Any) -> Iterator[None]:
    """Context in which batch norm updates copies of its statistics: the batch counts only once."""
    norms = [module for module in block.modules() if isinstance(module, _NormBase)]
    kept = [norm._buffers for norm in norms]
    for norm in norms:
        copies = {n: None if b is None else b.clone() for n, b in norm._buffers.items()}
        norm.__dict__["_buffers"] = copies
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            norm.__dict__["_buffers"] = buffers


def checkpoint_blocks(model: nn.Module) -> str:
    """Make the repeated blocks of ``model`` `Checkpointed`. Returns: the block count per class.

    Raises: `UserError` if the model has no repeated blocks.
    """
    blocks = repeated(model)
    if not blocks:
        text = "--activation-checkpointing: this model has no repeated blocks: leave it out"
        raise UserError(text, on_every_rank=True)
    kinds = Counter(type(block) for block in blocks)
    made = {kind: type(kind.__name__, (Checkpointed, kind), {}) for kind in kinds}
    for block in blocks:
        block.__class__ = made[type(block)]
    return ", ".join(f"{number} {kind.__name__}" for kind, number in kinds.items())
