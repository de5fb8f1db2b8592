"""``--compile``: torch.compile for the training step.

Interface: `compiled` and `first_step_timed`.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from utils.start.errors import UserError
from utils.start.option_types import Options
from utils.start.world import is_sharded

log = logging.getLogger(__name__)


def compiled(module: nn.Module, args: Options) -> Callable[..., Any]:
    """Compile ``module`` for the training step, in the mode of ``--compile``. Weights are shared.

    All training batches have one size, or two with ``--global-batch``. The last evaluation batch is
    smaller, so evaluation calls the original module. Each size of batches, and with
    ``--progressive`` of images, is compiled, because kernels with dynamic shapes would be slower.
    Raises: `UserError` if the module cannot be compiled.
    """
    if not args.compile:
        return module
    if isinstance(module, nn.DataParallel) or is_sharded(module):
        what = "DataParallel" if isinstance(module, nn.DataParallel) else "sharded models"
        raise UserError(
            f"--compile does not support {what}: use imagenet_ddp.py", on_every_rank=True
        )
    # After this many shapes of a batch, torch would stop compiling.
    limit, sizes = torch._dynamo.config.recompile_limit, len(set(args.epoch_sizes)) or 1
    shapes = sizes * (2 if args.global_batch else 1)  # its micro-batches may differ by an image
    torch._dynamo.config.recompile_limit = max(limit, shapes)
    mode = None if args.compile == "default" else args.compile
    return torch.compile(module, mode=mode, dynamic=False)


def first_step_timed(train_step: Any, args: Options, device: torch.device) -> Any:
    """Wrap ``train_step``: log how long its first call takes, which compiles it.

    The first call raises `UserError` if torch.compile fails.
    """
    from torch._dynamo.exc import TorchDynamoException  # takes seconds to import

    is_compiled = False

    def step(*batch: Any) -> Any:
        nonlocal is_compiled
        if is_compiled:
            return train_step(*batch)
        is_compiled, began = True, time.perf_counter()
        try:
            result = train_step(*batch)
        except TorchDynamoException as error:
            text = str(error).strip().splitlines()
            raise UserError(
                f"--compile {args.compile} does not work here ({text[0] if text else error!r}): "
                "install what is missing, or leave it out",
                on_every_rank=True,
            ) from error
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        log.info(f"--compile {args.compile}: the first step took {seconds:.1f} s, with compilation")
        return result

    return step
