"""The training scripts from their command lines to their ends on a GPU that is played."""

import importlib
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_cuda import Gpu
from fake_torch import fake_cuda
from running import STAND_IN, alone
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from utils.data.dataset import ImageBatches
from utils.launch import supervise
from utils.model import models
from utils.run import snapshots
from utils.train import epoch, evaluation

# What changes the step, but not its precision.
EVERYTHING = "--accum-steps 2 --clip-grad 1 --label-smoothing 0.1 --no-channels-last --ema 0.9"
MIXED = "--mixup 0.2 --cutmix 1 --val-flip"  # of pairs, which four processes would cut
BATCH = 8  # of all processes; three times that in DATA/train
JOBS = {"imagenet_nd": (1, 1), "imagenet_dp": (1, 2)}  # nodes, GPUs of each


@contextmanager
def changed(function: Callable[..., Any], old: str, new: str) -> Iterator[None]:
    """A function or method of this repository with ``new`` for ``old`` in its source."""
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{function.__qualname__} has no {old!r} any more"
    space = dict(function.__globals__)
    exec(compile(source.replace(old, new), function.__code__.co_filename, "exec"), space)
    before = function.__code__
    function.__code__ = inspect.unwrap(space[function.__name__]).__code__
    try:
        yield
    finally:
        function.__code__ = before


def stand_in(name: str) -> ModuleType:
    """A package of tests/stand_in."""
    spec = spec_from_file_location(name, f"{STAND_IN}/{name}/__init__.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(
    data: Path,
    folder: Path,
    script: str,
    *options: Any,
    job: tuple[int, int] | None = None,
    excused: tuple[str, ...] = (),
) -> SimpleNamespace:
    """Run a script on the images of ``data``, into ``folder``/run, a tiny model for an epoch.

    It runs on ``job`` = (nodes, GPUs of each), as its rank 0, until it ends. From the end of the
    first step of an epoch to the end of the last but one, and between the batches of an evaluation,
    the host must not wait for the device, save in functions of the names ``excused``. Returns: the
    gpu, the session and the folder.
    """
    nodes, gpus = job or JOBS.get(script, (2, 2))
    processes = nodes * gpus if script not in JOBS else 1
    # Three steps: in the middle one nobody may wait.
    batch = BATCH // processes // (2 if "--accum-steps" in options else 1)
    line = f"{script}.py -a tiny_full --image-size 32 -b {batch} -j 0 --epochs 1 --name run"
    argv = [*line.split(), "--output-dir", folder, *options, data]
    env = alone() | {"WORLD_SIZE": str(nodes * gpus), "LOCAL_WORLD_SIZE": str(gpus)}
    main = importlib.import_module(script).main
    with ExitStack() as stack:

        def patch(place: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(place, name, value))

        stack.enter_context(mock.patch.dict("os.environ", env))
        patch(sys, "argv", [*map(str, argv)])
        gpu = stack.enter_context(fake_cuda(gpus))
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        # A slot of the ring is written again when its upload has passed, batches ago; and a line
        # waits for its numbers.
        gpu.excused = (*excused, "take", "print_line")
        sessions, faults = _watch(stack, gpu), []
        write = snapshots.write

        def write_values(content: Any, path: Path) -> None:
            try:
                write(_with_values(content, gpu), path)
            except Exception as fault:  # in the thread that writes
                faults.append(fault)

        if "apex" in options:
            stack.callback(forget, "apex")
            patch(sys, "path", [f"{STAND_IN}_apex", *sys.path])
        logger = logging.getLogger("utils")
        patch(logger, "handlers", [*logger.handlers])  # a run adds its own
        patch(models, "timm", stand_in("timm"))
        patch(snapshots, "write", write_values)
        # Done by a worker, which has no GPU to look at.
        patch(ImageBatches, "fill", _disable_current_modes()(ImageBatches.fill))
        patch(supervise, "die_with_parent", lambda *_: None)
        assert main() == 0
        if faults:
            raise faults[0]
        session = sessions[-1] if sessions else None
        return SimpleNamespace(gpu=gpu, session=session, folder=folder / "run")


def _watch(stack: ExitStack, gpu: Gpu) -> list[Any]:
    """Let no one wait in the middle of training and evaluation. Returns: the sessions to come."""
    sessions: list[Any] = []
    train, evaluate = epoch.train, evaluation.evaluate

    def train_watched(session: Any, step: Any) -> Any:
        sessions.append(session)
        # After a fault its thread would read the GPUs of later tests.
        stack.callback(lambda: session.watch.ended.is_set() or session.watch.close())
        last = session.train.sampler.steps_per_epoch - 1
        gpu.heavy.clear()  # of what came before the first step
        with mock.patch.object(gpu, "quiet", lambda: 1 <= session.state.step < last):
            return train(session, step)

    def evaluate_watched(session: Any, predict: Any, batches: Any) -> Any:
        counted, last = mock.Mock(wraps=predict), batches.sampler.rounds
        with mock.patch.object(gpu, "quiet", lambda: 1 <= counted.call_count < last):
            return evaluate(session, counted, batches)

    stack.enter_context(mock.patch.object(epoch, "train", train_watched))
    stack.enter_context(mock.patch.object(evaluation, "evaluate", evaluate_watched))
    return sessions


def _with_values(content: Any, gpu: Gpu) -> Any:
    """What a snapshot holds, with zeros for the values that there are not."""

    def zeros(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # Its `device` is another one while another thread is in the middle of an operation.
        device = getattr(leaf, "fake_device", leaf.device)
        assert device.type == "cpu", "a snapshot of what is on the device"
        gpu.use(leaf, False, gpu.host)
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()

    return tree_map(zeros, content)


def forget(package: str) -> None:
    """Have a package imported anew."""
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
