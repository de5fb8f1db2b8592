"""torch's fused SGD for sharded weights, which torch itself has for Adam alone."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree


def allow_sharded_sgd() -> None:
    """Let the fused kernel of SGD work on each process's own pieces.

    It computes element by element, so that pieces get what the whole would. Any other SGD makes a
    loss scaler ask the host, and wait for it, in every step (see `utils.model.optim`).
    """
    DTensor._op_dispatcher._custom_op_handlers.setdefault(torch.ops.aten._fused_sgd_.default, _step)


def _step(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    args, kwargs = pytree.tree_map_only(DTensor, lambda one: one._local_tensor, (args, kwargs))
    op(*args, **kwargs)
