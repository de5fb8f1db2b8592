"""Options that change a new model: --freeze and --activation-checkpointing. This file also
identifies a model's last layer and repeated blocks.

Interface: `utils.model.models` calls `change` with the new model; other modules call `heads_of` and
`repeated`.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint
from torchvision.models import list_models

from utils.start.errors import UserError
from utils.start.option_types import Options

SEQUENCES = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

# ---- which library a model is from, and how it scales its input


def is_own(arch: str) -> bool:
    """Whether torchvision has ``arch``; else it is timm's."""
    return arch in list_models(module=torchvision.models)


def scale_input_as(content: dict[str, Any], model: nn.Module) -> None:
    """Let GoogLeNet and Inception rescale their input as the checkpoint's model did.

    They rescale it only with published weights.
    """
    saved = content.get("model_args") or {}
    if "transform_input" in saved:
        annotate(model, transform_input=saved["transform_input"], constructor_args=saved)


# ---- parts of a model


def annotate(model: Any, **values: Any) -> None:
    """Set attributes of a module that are neither tensors nor modules: its class has no types."""
    for name, value in values.items():
        setattr(model, name, value)


def heads_of(model: nn.Module, classes: int) -> list[str]:
    """Return the names of the classifiers: the last layer with ``classes`` outputs, or what timm
    says, which for models trained by distillation (DeiT, LeViT) are two. Raises: `UserError`."""
    classifier_of = getattr(model, "get_classifier", None)  # timm's
    own = classifier_of() if classifier_of is not None else ()
    own, heads, last = own if isinstance(own, tuple) else (own,), [], []
    for name, layer in model.named_modules():
        if any(layer is one for one in own):
            heads.append(name)
        width = getattr(layer, "out_features", getattr(layer, "out_channels", None))
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and width == classes:
            last = [name]
    if not (heads := heads or last):
        raise UserError(f"this model has no last layer of {classes} classes", on_every_rank=True)
    return heads


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


def with_activations(model: nn.Module) -> nn.Module:
    """Return ``model``, whose batch norm has just become SyncBatchNorm, with its activations.

    A batch norm of timm may contain the activation that follows it. torch's and Apex's conversions
    keep that module, but their SyncBatchNorm does not call it.
    """
    for module in model.modules():
        if isinstance(module, _NormBase) and [*module.children()]:
            module.register_forward_hook(_call_children)
    return model


def _call_children(norm: nn.Module, _: Any, output: Tensor) -> Tensor:
    for child in norm.children():  # dropout, then the activation
        output = child(output)
    return output


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


def change(model: nn.Module, args: Options, classes: int) -> list[str]:
    """Apply the options to ``model``. Returns: notes for the log. Raises: `UserError`."""
    notes = []
    if args.freeze:
        heads = heads_of(model, classes)
        freeze(model, heads)
        note = f"--freeze: only {' and '.join(heads)} {'are' if len(heads) > 1 else 'is'} trained"
        if not args.pretrained and args.resume in (None, "auto"):
            note += "; without --pretrained the other weights stay random, and it learns little"
        notes.append(note)
    if args.activation_checkpointing:
        notes.append(f"--activation-checkpointing: {checkpoint_blocks(model)}")
    return notes


def freeze(model: nn.Module, heads: list[str]) -> None:
    """``--freeze``: train only the layers ``heads``; freeze batch-norm statistics elsewhere."""
    model.requires_grad_(False)
    for head in heads:
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


class Checkpointed(nn.Module):
    """A base class that makes a block recompute its activations during backward.

    Chen et al. 2016 (arXiv:1604.06174). Unlike a wrapper module, a base class keeps the weights'
    names, and DataParallel can copy the block.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward pass, with checkpointing during training."""
        plain = super().forward
        if not (self.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)

        def own(*args: Any, **kwargs: Any) -> Any:
            return plain(*_with_own_lists(args), **kwargs)

        # DenseNet's list has grown when backward calls the block again, and a block of timm's
        # HRNet changes its list.
        args = _with_own_lists(args)
        if torch.compiler.is_compiling():  # compiled code updates buffers only once
            return checkpoint(own, *args, use_reentrant=False, **kwargs)
        contexts = lambda: (nullcontext(), _without_statistics(self))  # noqa: E731
        return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _with_own_lists(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([*arg] if isinstance(arg, list) else arg for arg in args)


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
