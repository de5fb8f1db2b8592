"""The last layer of a model, and its repeated blocks.

- Used by ``--pretrained``, ``--freeze``, ``--activation-checkpointing`` and imagenet_fsdp.py.
- Interface: `head_of` and `repeated`, which other extras get by ``addons.extra``.
- Without this file, these options end with an error.
"""

from collections import Counter

from torch import nn

from utils.errors import UserError

SEQUENCES = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def head_of(model: nn.Module, classes: int) -> str:
    """The name of the last layer, with ``classes`` logits. Raises: `UserError`."""
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
    """The repeated blocks of a model, in order: its outermost modules of a class that it has twice.

    Not layers of torch itself, sequences of modules, or stages, which are rows of blocks.
    """
    kinds = Counter(type(module) for module in model.modules() if _is_block(module))
    blocks: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        for child in module.children():
            if kinds[type(child)] > 1:
                blocks.append(child)
            else:
                search(child)

    search(model)
    return blocks


def _is_block(module: nn.Module) -> bool:
    kind, children = type(module), list(module.children())
    if isinstance(module, SEQUENCES) or kind.__module__.startswith("torch.nn"):
        return False
    if len(children) == 1 and isinstance(children[0], SEQUENCES):
        row = list(children[0].children())
        if all(map(_is_block, row)) and len(set(map(type, row))) == 1:
            return False  # a stage
    return bool(children) and not kind.__name__.endswith("Stage")  # timm's
