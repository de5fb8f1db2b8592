"""The optimiser of all modes, by name, and its parameter groups."""

import argparse
from typing import Any

import torch
from torch import nn
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
    groups = _groups(model, [], decay, args.wd_norm)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr, betas=betas, weight_decay=decay, fused=fused)
    return sgd(groups, lr, momentum, decay, nesterov=name == "nesterov")


def _groups(
    model: nn.Module, matrices: list[nn.Parameter], decay: float, decay_of_norms: float | None
) -> list[dict[str, Any]]:
    """The trained parameters of ``model``, in groups where their options differ.

    ``matrices``: the parameters for Muon. ``decay_of_norms`` is for norms, biases, layer scales and
    class tokens, which are vectors in any shape, and position embeddings.
    """
    inside = set(matrices)
    muon: dict[str, Any] = {"params": [], "weight_decay": decay, "muon": True}
    others: dict[str, Any] = {"params": [], "weight_decay": decay}
    small: dict[str, Any] = {"params": [], "weight_decay": decay_of_norms}
    for name, p in model.named_parameters():
        is_small = sum(n > 1 for n in p.shape) <= 1 or name.endswith(_TABLES)
        group = small if is_small and decay_of_norms is not None else others
        if p.requires_grad:
            (muon if p in inside else group)["params"].append(p)
    return [group for group in (muon, others, small) if group["params"]]


def sgd(
    groups: list[dict[str, Any]],
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
    weights = [weight for group in groups for weight in group["params"]]
    fused = weights[0].is_cuda and (not hasattr(weights[0], "to_local") or _fused_takes_shards())
    optimizer = torch.optim.SGD(
        groups, lr, momentum, weight_decay=weight_decay, nesterov=nesterov, fused=fused
    )
    # The fused kernel leaves momentum uninitialised when the very first step overflows, as often
    # with a new loss scale. Starting from zeros gives the same first step.
    for weight in weights if momentum else ():
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
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
