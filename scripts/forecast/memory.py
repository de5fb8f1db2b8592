"""What a training takes of a GPU's memory, without the GPU.

State (parameters, gradients, optimiser) is arithmetic. For the activations a step is taken on fake
tensors, which have shapes and no values: forward and backward of the real model, every tensor
counted while it lives, as `utils.train.memory.Counter` does. It takes seconds for any batch,
and what it takes is linear in the batch, so that two batches tell all others.

Not in it: what a kernel takes for itself while it runs (cuDNN's workspaces), and fragments. What
lies beside torch's allocator (CUDA's context, libraries, NCCL) is `RESERVE`, an assumption.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from utils.errors import UserError
from utils.model import models
from utils.train.largest_batch import MARGIN, STEP
from utils.train.memory import GIB, Counter

RESERVE = 0.7  # GiB of a GPU that torch's allocator never gets; assumed, not measured
MODES = ("nd", "dp", "ddp", "O2", "fsdp")
RESHARD = ("none", "full", "node")
DTYPES = {"off": None, "fp16": torch.float16, "bf16": torch.bfloat16}
# Bytes of state per parameter. Muon has one momentum for its matrices, and AdamW's two elsewhere.
OPTIMIZERS = {"sgd": 4, "nesterov": 4, "adamw": 8}
TRIED = (64, 128)  # images; large enough that activations, not weights, make the peak


@dataclass(frozen=True)
class Plan:
    """A training. ``processes``: GPUs in all; ``local``: of a node. Sizes in pixels."""

    arch: str
    mode: str = "ddp"
    amp: str = "fp16"
    optimizer: str = "sgd"
    image_size: int = 224
    classes: int = 1000
    processes: int = 1
    local: int = 1
    reshard: str = "full"
    accum: int = 1
    on_cpu: bool = False  # where no batch lies ready while another is computed with


@dataclass(frozen=True)
class Forecast:
    """Bytes in one process: those of the fullest, at its peak."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float  # and images, and whatever else lives at the peak

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class Step:
    """A step's bytes besides state: ``peak`` with gradients as they come, ``rest`` without them."""

    peak: float
    rest: float


def forecast(plan: Plan, batch: int) -> Forecast:
    """What ``batch`` images per process take; with dp, in all. Raises: `UserError`."""
    facts = _facts(plan.arch, plan.classes, plan.image_size)
    weight = 2 if plan.mode == "O2" else 4
    values, buffers = facts.values, 4.0 * facts.buffers
    # Batch norm stays float32 in O2.
    parameters = weight * values + (4 - weight) * facts.norms + buffers
    gradients = parameters - buffers
    optimizer = OPTIMIZERS[plan.optimizer] * values
    if plan.mode == "O2":
        optimizer += 4.0 * (values - facts.norms)  # masters
    if plan.mode == "dp":
        batch = math.ceil(batch / plan.processes)
    step = _step(plan, batch)
    activations = step.rest
    ready = 0.0 if plan.on_cpu else _next_batch(plan, batch)
    if plan.mode == "nd":
        # Gradients come while activations go.
        activations = max(0.0, step.peak - gradients)
        if plan.accum > 1:
            activations = step.rest
    elif plan.mode == "dp" and plan.processes > 1:
        gradients *= 2  # those of another GPU arrive beside its own
    elif plan.mode == "O2":
        gradients *= 2  # beside the buckets, which Apex's do not lie in
        halves = parameters - buffers - 4.0 * facts.norms
        # After backward the masters get theirs, in float32, one copy before the other is gone.
        activations = max(activations, 2 * halves)
    elif plan.mode == "ddp" and plan.accum > 1:
        gradients *= 2  # the first micro-batch's lie beside the buckets
    elif plan.mode == "fsdp":
        parts = plan.local if plan.reshard == "node" else plan.processes
        compute = 4 if DTYPES[plan.amp] is None else 2
        if compute == 2:  # weights are gathered in it; autocast would hold copies of all
            activations = max(0.0, activations - compute * values)
        if parts > 1:
            # When backward begins, most activations are there, and the last two blocks are whole;
            # later, a block's gradients and, on their way, the same in float32.
            whole = values if plan.reshard == "none" else facts.root + facts.last
            later = values if plan.reshard == "none" else facts.root + 2 * facts.block
            later = compute * later + (compute + 4) * facts.block
            activations = max(activations + compute * whole, later)
        parameters = (parameters - buffers) / parts + buffers
        gradients, optimizer = gradients / parts, optimizer / parts
    if plan.on_cpu:  # where SGD is not fused, and makes a copy of one gradient after the other
        parts = plan.processes if plan.mode == "fsdp" else 1
        images = 3.0 * plan.image_size**2 * batch * (4 if plan.amp == "off" else 2)
        activations = max(activations, images + 4.0 * facts.largest / parts)
    return Forecast(parameters, gradients, optimizer, activations + ready)


def largest_batch(plan: Plan, gpu_memory: float, reserve: float = RESERVE) -> int:
    """What ``-b auto`` should find on a GPU of ``gpu_memory`` GiB; 0 if nothing fits."""
    step = STEP * (plan.processes if plan.mode == "dp" else 1)
    limit = (gpu_memory - reserve) * (1 - MARGIN) * GIB
    low, high = (step * n for n in TRIED)
    a, b = (forecast(plan, size).total for size in (low, high))
    slope = (b - a) / (high - low)
    size = step * math.floor((low + (limit - a) / slope) / step)
    # Below, what is largest may be something else than above.
    while size > 0 and forecast(plan, size).total > limit:
        size -= step
    return max(size, 0)


@dataclass(frozen=True)
class _Facts:
    """Numbers of values: of all parameters, those of batch norm, buffers; for FSDP of the largest
    repeated block, of the last two of them, and of what lies outside of such blocks."""

    values: int
    norms: int
    buffers: int
    block: int
    last: int
    root: int
    largest: int  # parameter


@cache
def _facts(arch: str, classes: int, image_size: int) -> _Facts:
    with torch.device("meta"):
        model = models.create(arch, classes, image_size)
    values = _size(model)
    norms = sum(_size(m) for m in model.modules() if isinstance(m, _BatchNorm))
    blocks = [_size(block) for block in _blocks(model)]
    root = values - sum(blocks)
    buffers = sum(buffer.numel() for buffer in model.buffers())
    largest = max(parameter.numel() for parameter in model.parameters())
    if not blocks:
        return _Facts(values, norms, buffers, values, values, 0, largest)
    return _Facts(values, norms, buffers, max(blocks), sum(blocks[-2:]), root, largest)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Modules that stand in a row of their kind: a transformer's layers, a ResNet's blocks."""
    found: list[nn.Module] = []
    for child in model.children():
        inner = list(child.children())
        kinds = {type(one) for one in inner}
        if isinstance(child, (nn.Sequential, nn.ModuleList)) and len(inner) > 1 == len(kinds):
            found += inner
        else:
            found += _blocks(child)
    return found


def _step(plan: Plan, batch: int) -> Step:
    """A step of so many images; of many, by two smaller ones."""
    if batch <= TRIED[1]:
        return _tried(plan, batch)
    low, high = (_tried(plan, size) for size in TRIED)

    def at(a: float, b: float) -> float:
        return max(0.0, a + (batch - TRIED[0]) * (b - a) / (TRIED[1] - TRIED[0]))

    return Step(at(low.peak, high.peak), at(low.rest, high.rest))


def _tried(plan: Plan, batch: int) -> Step:
    model_of = (plan.arch, plan.classes, plan.image_size)
    if plan.mode == "O2":
        return take_step(model_of, batch, None, torch.float16)
    return take_step(model_of, batch, DTYPES[plan.amp])


@cache
def take_step(
    model_of: tuple[str, int, int],
    batch: int,
    autocast: torch.dtype | None,
    half: torch.dtype | None = None,
) -> Step:
    """Forward and backward of ``model_of`` = (arch, classes, image size), counted.

    ``half``: the dtype of all weights but batch norm's. Raises: `UserError` for what cannot be
    computed without values.
    """
    arch, classes, size = model_of
    try:
        return _take_step(arch, classes, size, batch, (autocast, half))
    except UserError:
        raise
    except Exception as fault:
        text = " ".join(str(fault).split())[:160]
        raise UserError(f"{arch} cannot be computed without its values ({text})") from fault


def _take_step(
    arch: str,
    classes: int,
    size: int,
    batch: int,
    dtypes: tuple[torch.dtype | None, torch.dtype | None],
) -> Step:
    autocast, half = dtypes
    with torch.device("meta"):
        model = models.create(arch, classes, size).train()
    with FakeTensorMode():
        _remake(model, half)
        images = torch.empty(batch, 3, size, size, dtype=autocast or half or torch.float32)
        targets = torch.zeros(batch, dtype=torch.int64)
        # Weights are counted elsewhere, also where an operator gives a view of them.
        weights = [*model.parameters(), *model.buffers()]
        all_of_it, rest = (Counter(existing=[*weights, images]) for _ in range(2))
        known = Counter(existing=weights).now
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: rest.leave_out(p.grad))
        with all_of_it, rest:
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                logits = model(images)
                loss = nn.functional.cross_entropy(logits.float(), targets)
            loss.backward()
    return Step(all_of_it.peak - known, rest.peak - known)


def _remake(model: nn.Module, half: torch.dtype | None) -> None:
    """Give a model of the meta device (some random values cannot be faked) fake tensors instead.

    And weights in another precision, all but batch norm's.
    """

    def remade(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(tensor.shape, dtype=dtype, device="cpu")

    made: dict[int, nn.Parameter] = {}  # two modules may share a parameter
    for module in model.modules():
        to_half = half is not None and not isinstance(module, _BatchNorm)
        for name, weight in module._parameters.items():
            if weight is not None:
                if id(weight) not in made:
                    dtype = half if to_half else weight.dtype
                    made[id(weight)] = nn.Parameter(remade(weight, dtype))
                module._parameters[name] = made[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = remade(buffer, buffer.dtype)


def _next_batch(plan: Plan, batch: int) -> float:
    """Bytes of the batch that lies on a GPU beside the one that is computed with."""
    pixels = 3.0 * plan.image_size**2 * batch
    return pixels * (1 + (4 if DTYPES[plan.amp] is None and plan.mode != "O2" else 2))
