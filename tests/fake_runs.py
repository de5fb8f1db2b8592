"""The training scripts from their command lines to their ends on a simulated GPU."""

import logging
import runpy
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import timm
import torch
import torch.distributed as dist
from conftest import ROOT
from fake_cuda import Gpu, fake_cuda
from running import alone
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher

BATCH = 8  # of all processes; three times that in DATA/train
JOBS = {"imagenet_nd": (1, 1), "imagenet_dp": (1, 2)}  # nodes, GPUs of each


def run(data: Path, folder: Path, script: str, *options: Any, quiet_from: int = 0) -> Path:
    """Run a script on the images of ``data``, into ``folder``/run, a tiny model for an epoch.

    It runs as rank 0 of `JOBS`, or of two nodes of two GPUs. In the second step of an epoch, and
    between the batches of an evaluation, the host must not wait for the device, once
    ``quiet_from`` steps are done. Returns: the run's folder.
    """
    nodes, gpus = JOBS.get(script, (2, 2))
    processes = nodes * gpus if script not in JOBS else 1
    # Three steps: in the middle one nobody may wait.
    batch = BATCH // processes // (2 if "--accum-steps" in options else 1)
    line = f"{script}.py -a tiny_full --image-size 32 -b {batch} -j 0 --epochs 1 --name run"
    argv = [*line.split(), "--output-dir", folder, *options, data]
    env = alone() | {"WORLD_SIZE": str(nodes * gpus), "LOCAL_WORLD_SIZE": str(gpus)}
    images, save, errors = len(list((data / "val").glob("*/*"))), torch.save, []

    def save_values(content: Any, file: Any) -> None:
        try:
            save(_with_values(content), file)
        except AssertionError as error:  # in the thread that writes
            errors.append(error)

    with ExitStack() as stack:
        gpu = stack.enter_context(fake_cuda(gpus))
        logger = logging.getLogger("utils")
        fetch = _disable_current_modes()(_MapDatasetFetcher.fetch)  # by a worker, without a GPU
        for place, name, value in (
            (sys, "argv", [*map(str, argv)]),
            (logger, "handlers", [*logger.handlers]),  # a run adds its own
            (torch, "save", save_values),
            (_MapDatasetFetcher, "fetch", fetch),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        main = runpy.run_path(str(ROOT / f"{script}.py"))["main"]
        stack.enter_context(mock.patch.dict("os.environ", env))
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        calls = (2 if "--accum-steps" in options else 1) * (gpus if script == "imagenet_dp" else 1)
        _watch(stack, gpu, calls, quiet_from, -(-images // (batch * processes)))
        assert main() == 0
        if errors:
            raise errors[0]
        return folder / "run"


def _watch(stack: ExitStack, gpu: Gpu, calls: int, quiet_from: int, rounds: int) -> None:
    """Let no one wait in the second of an epoch's three steps, each of so many ``calls`` of the
    model, and between the ``rounds`` of an evaluation."""
    count = SimpleNamespace(training=0, evaluation=0)

    def after_forward(module: nn.Module, *_: Any) -> None:
        if not isinstance(module, timm.Tiny):
            return
        if module.training:
            count.training, count.evaluation = count.training + 1, 0
        else:
            count.evaluation += not torch.is_grad_enabled()

    def quiet() -> bool:
        if count.training <= calls * quiet_from:
            return False
        if count.evaluation:
            return count.evaluation < rounds
        return calls < count.training % (3 * calls) <= 2 * calls

    stack.callback(register_module_forward_hook(after_forward).remove)
    stack.enter_context(mock.patch.object(gpu, "quiet", quiet))


def _with_values(content: Any) -> Any:
    """What a snapshot holds, with zeros for the values that there are not."""

    def zeros(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # Its `device` is another one while another thread is in the middle of an operation.
        device = getattr(leaf, "fake_device", leaf.device)
        assert device.type == "cpu", "a snapshot of what is on the device"
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()

    return tree_map(zeros, content)
