"""The optimiser of all modes, by name, and its parameter groups."""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from utils.errors import UserError
from utils.model.schedules import USUAL_LR

NAMES = tuple(USUAL_LR)
# Position embeddings in torchvision and timm: added to activations, like biases.
_TABLES = ("pos_embedding", "pos_embed", "relative_position_bias_table")


def resolve(args: argparse.Namespace) -> None:
    """Set the defaults that depend on ``--optimizer``. Raises: `UserError`."""
    name = args.optimizer
    if args.lr is None:
        args.lr = USUAL_LR[name]
    if args.momentum is None:
        args.momentum = 0.95 if name == "muon" else 0.9
    if name == "nesterov" and not args.momentum:
        raise UserError("--optimizer nesterov needs a --momentum", alike=True)
    if args.weight_decay is None:
        args.weight_decay = 0.05 if name in ("adamw", "muon") else 1e-4
    if getattr(args, "opt_level", None) == "O3" and name in ("adamw", "muon"):
        raise UserError(
            f"--optimizer {name} needs float32: --opt-level O2 keeps float32 masters, O3 does not",
            alike=True,
        )


def build(args: Any, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser that the options ask for, for the trained parameters of ``model``.

    None of its steps makes the host wait for the device, not even with a loss scaler.
    """
    name, lr, momentum, decay = args.optimizer, args.lr, args.momentum, args.weight_decay
    betas = tuple(float(beta) for beta in args.betas.split(","))
    fused = next(model.parameters()).is_cuda  # on the CPU not, see `sgd`
    if name == "muon":
        from utils.model.muon import Muon, hidden_matrices

        groups = _groups(model, hidden_matrices(model), decay, args.wd_norm)
        return Muon(groups, lr, momentum, betas, fused)
    groups = _groups(model, None, decay, args.wd_norm)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr, betas=betas, weight_decay=decay, fused=fused)
    return sgd(groups, lr, momentum, decay, nesterov=name == "nesterov")


def _groups(
    model: nn.Module,
    matrices: list[nn.Parameter] | None,
    decay: float,
    decay_of_norms: float | None,
) -> list[Any]:
    """The trained parameters of ``model``, or groups of them where their options differ.

    ``matrices``: the parameters for Muon; None for other optimisers.
    """
    trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
    if matrices is None and decay_of_norms is None:
        return list(trained)
    inside = set(matrices or ())
    kinds: dict[str, dict[str, Any]] = {
        "matrices": {"params": [], "weight_decay": decay, "muon": True},
        "others": {"params": [], "weight_decay": decay},
        "small": {"params": [], "weight_decay": decay_of_norms},
    }
    for p, name in trained.items():
        small = decay_of_norms is not None and _is_small(name, p)
        kind = "matrices" if p in inside else "small" if small else "others"
        kinds[kind]["params"].append(p)
    return [group for group in kinds.values() if group["params"]]


def _is_small(name: str, parameter: Tensor) -> bool:
    """Whether ``--wd-norm`` applies: norms, biases, layer scales and class tokens, which are
    vectors of whatever shape, and position embeddings."""
    return sum(n > 1 for n in parameter.shape) <= 1 or name.endswith(_TABLES)


def sgd(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool = False,
) -> torch.optim.SGD:
    """SGD with momentum; on a GPU by the fused kernel, which can skip a step on the device.

    With any other implementation a loss scaler needs a host-device sync in every step. The CPU
    needs none, and there the plain loop gives the same bits for all tensors: the fused kernel
    rounds the last elements of some differently.
    """
    parameters = list(parameters)
    first = parameters[0]["params"][0] if isinstance(parameters[0], dict) else parameters[0]
    fused = first.is_cuda and (not hasattr(first, "to_local") or _fused_takes_shards())
    optimizer = torch.optim.SGD(
        parameters, lr, momentum, weight_decay=weight_decay, nesterov=nesterov, fused=fused
    )
    if momentum:
        # The fused kernel leaves momentum uninitialised when the very first step overflows, as
        # often with a new loss scale. Starting from zeros gives the same first step.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _fused_takes_shards() -> bool:
    """Let the fused kernel of SGD work on shards (DTensors), which torch does only for Adam.

    It computes element by element. torch has no public way to say so; without its private table, a
    loss scaler waits for the device in each step.
    """
    from torch.distributed.tensor import DTensor

    def step(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = tree_map_only(DTensor, DTensor.to_local, (args, kwargs))
        op(*args, **kwargs)

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if handlers is None:
        return False
    handlers.setdefault(torch.ops.aten._fused_sgd_.default, step)
    return True
