"""NVIDIA Apex's own amp and parallel (until its tag 25.04), where they are installed and usable.

Used by imagenet_ddp_apex.py, which does not start without this file. Interface: `amp_and_parallel`
returns Apex's modules or the equivalent ones of o2.py; ``--amp-impl`` chooses.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from utils.model import amp, o2
from utils.start.errors import UserError
from utils.start.option_types import Options
from utils.start.world import World

INSTALL = (
    "install the last Apex that has it (git clone --branch 25.04 https://github.com/NVIDIA/apex, "
    "then pip install --no-build-isolation ./apex), or "
)


def check(args: Options) -> None:
    """Raise `UserError` if options contradict each other or a required Apex cannot be used."""
    o2.from_args(args)
    _why_not(args)


def amp_and_parallel(args: Options, world: World) -> tuple[Any, Any]:
    """Return Apex's modules ``amp`` and ``parallel``, or their equivalents in plain PyTorch.

    ``--amp-impl`` chooses; rank 0 prints the choice and its reason.
    """
    # Apex on some of the nodes only: their collectives would not match those of the others.
    reason = next(filter(None, world.gather(_why_not(args))), None)
    if world.is_main:
        which = f"plain PyTorch (utils/model/o2.py): {reason}" if reason else "NVIDIA Apex"
        print(f"opt level {args.opt_level} using {which}", flush=True)
        if world.device.type == "cpu" and args.opt_level != "O0":
            amp.note_slow_float16("--opt-level O0")
    if reason:
        return o2.Amp(world), o2
    parallel = importlib.import_module("apex.parallel")
    parallel.DistributedDataParallel.no_sync = _no_sync
    return Amp(), parallel


def _why_not(args: Options) -> str | None:
    """Why Apex's amp is not used; None if it is."""
    if args.amp_impl == "torch":
        return "chosen by --amp-impl"
    reason = None if has_gpu() else "Apex's amp needs an NVIDIA GPU, and torch sees none here"
    try:
        if not reason:
            importlib.import_module("apex.amp")
            importlib.import_module("apex.parallel")
    except ImportError as error:
        reason = f"no NVIDIA Apex with amp is installed ({error!s:.200})"
    except Exception as error:  # a module built for another torch can raise anything
        reason = f"Apex cannot be imported ({error!r:.200})"
    if reason and args.amp_impl == "apex":
        remedy = f"{INSTALL if has_gpu() else ''}use --amp-impl torch, which computes the same"
        raise UserError(f"--amp-impl apex: {reason}: {remedy}", on_every_rank=True)
    return reason


def has_gpu() -> bool:
    """Whether Apex's amp could run here."""
    return torch.cuda.is_available()


class Amp(o2.Amp):
    """The module ``apex.amp``, for one model and one optimiser; see `utils.model.o2.Amp`.

    This object is also the ``scaler``; it has the same state as `utils.model.o2.LossScaler`.
    """

    def __init__(self) -> None:
        self.amp, self.scaler, self.skipped = importlib.import_module("apex.amp"), self, 0

    def initialize(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, opt_level: str, **overrides: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Call ``amp.initialize``."""
        level, usual = vars(o2.choose(opt_level, **overrides)), vars(o2.LEVELS[opt_level])
        # Apex rejects some overrides that equal the level's own value.
        changes = {name: level[name] for name in overrides if level[name] != usual[name]}
        model, optimizer = self.amp.initialize(model, optimizer, opt_level=opt_level, **changes)
        name_of = {weight: name for name, weight in model.named_parameters()}
        names = [name_of[weight] for weight in self.master_params(optimizer)]

        def named_masters() -> dict[str, nn.Parameter]:
            # Apex creates its masters at the first backward, too late for loading a snapshot.
            lazy_init = getattr(optimizer, "_amp_lazy_init", None)
            if lazy_init is not None:
                lazy_init()
            return dict(zip(names, self.master_params(optimizer), strict=True))

        # Apex's own checkpoints do not include the masters.
        self.weights = o2.Weights(model, named_masters)
        return model, optimizer

    @contextmanager
    def scale_loss(
        self, loss: Tensor, optimizer: torch.optim.Optimizer, delay_unscale: bool = False
    ) -> Iterator[Tensor]:
        """Call ``amp.scale_loss``, which waits for the device in every step."""
        before = self.value
        with self.amp.scale_loss(loss, optimizer, delay_unscale=delay_unscale) as scaled_loss:
            yield scaled_loss
        self.skipped += self.value < before

    @property
    def value(self) -> float:
        """The loss scale."""
        return float(self.amp.state_dict()["loss_scaler0"]["loss_scale"])

    @property
    def failure(self) -> str | None:
        """An error message, if the scale has fallen too far to recover."""
        return o2.ENDLESSLY.format(self.value) if self.value < o2.SMALLEST else None

    def state_dict(self) -> dict[str, float]:
        """Scale, clean steps in a row, and skipped steps."""
        clean = int(self.amp.state_dict()["loss_scaler0"]["unskipped"])
        return {"scale": self.value, "clean_steps": clean, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a `state_dict`."""
        self.skipped = int(state["skipped"])
        saved = {"loss_scale": state["scale"], "unskipped": int(state["clean_steps"])}
        self.amp.load_state_dict({"loss_scaler0": saved})


@contextmanager
def _no_sync(replica: Any) -> Iterator[None]:
    """In this context, backward accumulates gradients without an all-reduce, as in torch."""
    replica.disable_allreduce()
    try:
        yield
    finally:
        replica.enable_allreduce()
