"""The optimiser of all modes, by name; which of its hyperparameters holds for which weight."""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from utils.errors import UserError
from utils.launch.world import local
from utils.model.muon import Muon, hidden_matrices
from utils.model.schedules import USUAL_LR

NAMES = tuple(USUAL_LR)
# Weights that are tables of positions, by the names of torchvision and timm: they are added to
# what flows, like biases.
_TABLES = ("pos_embedding", "pos_embed", "relative_position_bias_table")


def add_options(group: argparse._ArgumentGroup) -> None:
    """``--optimizer`` and what belongs to it; rate, momentum and decay are in utils/options.py."""
    group.add_argument(
        "--optimizer",
        choices=NAMES,
        default="sgd",
        help="muon: for the matrices and convolutions inside the model, adamw for the rest of it, "
        "with one --lr and --wd for both",
    )
    group.add_argument(
        "--betas",
        type=_betas,
        default="0.9,0.999",
        metavar="B1,B2",
        help="of adamw, and of the adamw part of muon",
    )
    group.add_argument(
        "--wd-norm",
        type=_decay,
        metavar="D",
        help="weight decay of norms, biases and position tables; 0 is common; default: --wd",
    )


def _decay(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value


_decay.__name__ = "number"


def _betas(text: str) -> str:
    """Checked, but as it was typed: options are numbers and texts wherever they are kept."""
    values = [float(part) for part in text.split(",")]
    if len(values) != 2 or not all(0 <= value < 1 for value in values):
        raise argparse.ArgumentTypeError(
            f"{text} is not two numbers from 0 to below 1, as 0.9,0.95"
        )
    return text


_betas.__name__ = "pair of numbers"


def resolve(args: argparse.Namespace) -> None:
    """Set options that were not given to the usual values of ``--optimizer``. Raises:
    `UserError`."""
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

    No step of it makes the host wait for the device, with a loss scaler either.
    """
    name, lr, momentum, decay = args.optimizer, args.lr, args.momentum, args.weight_decay
    matrices = hidden_matrices(model) if name == "muon" else None
    groups = _groups(model, matrices, decay, args.wd_norm)
    if name in ("sgd", "nesterov"):
        return sgd(groups, lr, momentum, decay, nesterov=name == "nesterov")
    betas = tuple(float(beta) for beta in args.betas.split(","))
    device = next(model.parameters()).device
    fused = device.type == "cuda"
    if name == "adamw":
        # On the CPU not the fused kernel, for the reason that `sgd` gives.
        return torch.optim.AdamW(groups, lr, betas=betas, weight_decay=decay, fused=fused)
    found = Muon(groups, lr, momentum, betas, fused)
    if fused:
        skip_on_device(found)
    return found


def _groups(
    model: nn.Module,
    matrices: list[nn.Parameter] | None,
    decay: float,
    decay_of_norms: float | None,
) -> list[Any]:
    """The trained parameters of ``model``: a list of them, or of groups if they are not alike.

    ``matrices``: those for Muon; None for other optimisers.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if matrices is None and decay_of_norms is None:
        return [p for _, p in trained]
    inside = set(matrices or ())
    others = [(name, p) for name, p in trained if p not in inside]
    small = {p for name, p in others if decay_of_norms is not None and is_small(name, p)}
    groups = [
        {"params": [p for _, p in trained if p in inside], "weight_decay": decay, "muon": True},
        {"params": [p for _, p in others if p not in small], "weight_decay": decay},
        {"params": [p for _, p in others if p in small], "weight_decay": decay_of_norms},
    ]
    return [group for group in groups if group["params"]]


def is_small(name: str, parameter: Tensor) -> bool:
    """Whether ``--wd-norm`` is for this one: norms, biases, scales of layers, class tokens, which
    are vectors, of whatever shape, and tables of positions."""
    return sum(n > 1 for n in parameter.shape) <= 1 or name.endswith(_TABLES)


def sgd(
    parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool = False,
) -> torch.optim.SGD:
    """SGD with momentum; on a GPU by the fused kernel, which can skip a step on the device.

    Any other implementation makes a loss scaler ask the host, and wait for it, in every step. On
    the CPU there is nothing to wait for, and the plain loop is the one whose every bit is known:
    the fused kernel rounds the last elements of some tensors in another way.
    """
    parameters = list(parameters)
    first = parameters[0]["params"][0] if isinstance(parameters[0], dict) else parameters[0]
    decay = {"weight_decay": weight_decay, "nesterov": nesterov}
    fused = first.is_cuda and (not hasattr(first, "to_local") or _fused_takes_shards())
    optimizer = torch.optim.SGD(parameters, lr, momentum, **decay, fused=fused)
    if momentum:
        # The fused kernel leaves momentum uninitialised when the very first step overflows, as it
        # often does with a fresh loss scale. From zeros, the first step is the same as without.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _fused_takes_shards() -> bool:
    """Let the fused kernel of SGD work on shards, which torch itself does for Adam alone.

    It computes element by element, so that shards get what the whole would. torch has no public
    way to say so; without its private table, a loss scaler waits for the device in each step.
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


def skip_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer`` skip a step after an overflow as torch's fused ones do: on the device.

    A loss scaler gives it ``grad_scale`` (or None) and ``found_inf``, a flag on the device, instead
    of asking for the flag's value. So it steps in any case, and after an overflow its weights and
    state are put back from copies, which take as much memory as they do while a step lasts.
    """
    copies: dict[tuple[nn.Parameter, str], Tensor] = {}

    def tensors() -> dict[tuple[nn.Parameter, str], Tensor]:
        """What a step changes: of each weight with a gradient its own values, and its state."""
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        found = {(p, ""): local(p) for p in weights if p.grad is not None}
        for p, _ in list(found):
            state = optimizer.state[p].items()
            found |= {(p, name): local(t) for name, t in state if isinstance(t, Tensor)}
        return found

    @torch.no_grad()
    def before(*_: Any) -> None:
        if getattr(optimizer, "found_inf", None) is None:
            return
        copies.update({key: tensor.clone() for key, tensor in tensors().items()})
        if getattr(optimizer, "grad_scale", None) is not None:
            gradients = [local(p.grad) for p, name in copies if not name]
            torch._foreach_div_(gradients, optimizer.grad_scale)

    @torch.no_grad()
    def after(*_: Any) -> None:
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return
        overflow = (found.full_tensor() if hasattr(found, "full_tensor") else found) > 0
        for key, tensor in tensors().items():
            # What the first step has made begins at zero.
            copy = copies[key] if key in copies else torch.zeros_like(tensor)
            tensor.copy_(torch.where(overflow, copy, tensor))
        copies.clear()

    optimizer._step_supports_amp_scaling = True
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
