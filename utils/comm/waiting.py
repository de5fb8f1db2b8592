"""How long the computation waits for weights to be gathered and gradients to be scattered."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def listen(model: nn.Module, mark: Callable[[], Any], waited: Callable[[Any, Any], None]) -> None:
    """Have ``waited(begin, end)`` called, with two of ``mark()``, whenever a part of a sharded
    model has waited for other processes, in forward and backward.

    On a GPU the marks stand in the stream that computes, where it waits for those that communicate.
    torch has no public hook there: what it calls is wrapped, and nothing is timed if it has gone.
    """
    for module in model.modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for name in ("unshard", "wait_for_unshard", "post_backward", "finalize_backward"):
                call = getattr(group, name, None)
                # A list of modules shares a group: it must not be timed twice.
                if call is not None and name not in vars(group):
                    setattr(group, name, _timed(call, mark, waited))


def _timed(
    call: Callable[..., Any], mark: Callable[[], Any], waited: Callable[[Any, Any], None]
) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = mark()
        try:
            return call(*args, **kwargs)
        finally:
            waited(began, mark())

    return timed
