"""``--find-batch``: the largest batch that fits."""

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from o2_cases import network
from torch import nn

from utils import find_batch
from utils.find_batch import GIB
from utils.run.snapshots import TrainState
from utils.start.errors import UserError
from utils.start.world import World

THIRD = int(4.6 * GIB / 12)  # values of four bytes that take a third of 4.6 GiB


class StandInGpu:
    """A GPU whose memory a step of ``size`` images takes ``flat + slope * size`` GiB of, at least
    ``least``: workspaces of small batches are as large as those of larger ones."""

    def __init__(
        self, monkeypatch, flat: float, slope: float, breaks: float = math.inf, least: float = 0.0
    ):
        self.breaks, self.tried, peaks = breaks, [], {}

        def peak(device: int) -> float:
            """Of all steps since the last reset."""
            now = max(least, flat + slope * self.tried[-1]) * GIB
            peaks[device] = max(now, peaks.get(device, 0.0))
            return peaks[device]

        answers = dict.fromkeys(("get_rng_state", "set_rng_state"), lambda *_: None) | {
            "current_device": lambda: 0,
            "reset_peak_memory_stats": lambda device: peaks.pop(device, None),
            "memory_reserved": lambda _: 2 * GIB,
            "mem_get_info": lambda _: (8 * GIB, 16 * GIB),
            "max_memory_allocated": peak,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def step(self, images: torch.Tensor, *_: Any) -> None:
        self.tried.append(len(images))
        if len(images) >= self.breaks:
            raise RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")


def session(images: int = 10**6, values: int = 0, **changes: Any) -> SimpleNamespace:
    """As far as the search needs one; its model has ``values`` values, as many that are frozen, and
    few others."""
    usual = {"accum_steps": 1, "global_batch": None, "compile": None, "ema": None, "sync_bn": False}
    usual |= {"memory_format": torch.channels_last}
    model = network()
    if values:
        for name, is_trained in (("large", True), ("frozen", False)):
            weight = nn.Parameter(torch.empty(values, device="meta"), requires_grad=is_trained)
            model.register_parameter(name, weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = SimpleNamespace(images=images)
    return SimpleNamespace(
        args=SimpleNamespace(**usual | changes),
        state=TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False)),
        world=World(torch.device("cpu")),
        run=SimpleNamespace(mode="nd"),
        train=SimpleNamespace(sampler=sampler),
        loaders=SimpleNamespace(dtype=torch.float32),
    )


@pytest.mark.parametrize(
    ("memory", "changes", "expected"),
    [
        # 10 GiB are free or ours already: 9.2 without the margin's share.
        ((0.2, 0.042), {}, 208),  # 0.2 + 0.042 * 208 = 8.94; 216 would take 9.27, less than 10
        ((0.2, 0.042), {"images": 100, "accum_steps": 2}, 56),  # the data set has no more
        ((0.2, 0.042), {"global_batch": 100, "images": 999}, 104),  # in steps of 8
        ((0.2, 0.042, 150), {}, 144),  # fails earlier than it should
        # The optimiser's state and the average take 3.07 GiB, or all three 4.6.
        ((0.2, 0.042), {"values": THIRD}, 136),
        ((0.2, 0.042), {"values": THIRD, "ema": 0.9}, 104),
        # Processes that wait for each other try nothing that should fail.
        ((0.2, 0.042, 150), {"sync_bn": True}, "ALLOC_FAILED"),
        ((0.2, 0.042, 150), {"sharded": True}, "ALLOC_FAILED"),
        ((0.2, 0.042, 230, 1.0), {"sync_bn": True}, 208),  # 8 and 16 images take as much
        ((9.0, 0.1), {}, r"not even 8 images fit into 9\.2 GiB"),
    ],
)
def test_the_memory_is_filled_but_for_the_margin(monkeypatch, memory, changes, expected):
    gpu = StandInGpu(monkeypatch, *memory)
    monkeypatch.setattr(TrainState, "sharded", "sharded" in changes)
    if isinstance(expected, str):
        with pytest.raises((UserError, RuntimeError), match=expected):
            find_batch.search(session(**changes), gpu.step, 8)
        return
    size, _, how = find_batch.search(session(**changes), gpu.step, 8)
    assert size == expected
    assert how.endswith("no more images") == ("images" in changes)
    assert len(set(gpu.tried)) <= 9
    # The second micro-batch of a step finds gradients.
    assert gpu.tried.count(expected) == 1 + bool({"accum_steps", "global_batch"} & {*changes})


def test_the_fullest_gpu_of_all_processes_decides(monkeypatch):
    """Another one has 4.2 GiB less, and takes 0.5 GiB more."""

    def gather(world, own):
        if isinstance(own, tuple):
            return [own, (own[0] - 4.2 * GIB, "poor")]
        return [own, own + 0.5 * GIB]

    monkeypatch.setattr(World, "gather", gather)
    # 0.7 + 0.042 * 96 = 4.73; 104 would take 5.07
    how = "takes about 4.73 of 5.43 GiB on poor, which has the least memory"
    gpu = StandInGpu(monkeypatch, 0.2, 0.042)
    assert find_batch.search(session(), gpu.step, 8) == (96, 1, how)
    shared = session(images=90)  # of which each process gets 45 at most
    shared.world = World(torch.device("cpu"), 0, 2)
    assert find_batch.search(shared, gpu.step, 8)[0] == 48


def test_data_parallel_prints_the_share_of_a_gpu(monkeypatch, capsys):
    """Both GPUs hold half of the images. The second one has 4 GiB less, and takes 0.5 GiB more."""
    gpu, one = StandInGpu(monkeypatch, 0.2, 0.021, least=2.0), session()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: ((8 - 4 * d) * GIB, 16 * GIB))
    peak = torch.cuda.max_memory_allocated
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: peak(d) + d * GIB / 2)
    one.run.mode, one.train.dataset, one.args.arch = "dp", SimpleNamespace(size=8), "x"
    assert find_batch.find(one, gpu.step) == 0
    assert capsys.readouterr().out == "largest batch per GPU: 112\n"


def test_each_trial_is_a_micro_batch_without_gradients_of_the_last_one(monkeypatch):
    """And is not compiled, which would take longer than all trials."""
    gpu, one, stance = StandInGpu(monkeypatch, 0.2, 0.3), session(compile="default"), MagicMock()
    monkeypatch.setattr(torch.compiler, "set_stance", stance)
    model, eager = one.state.model, stance.return_value

    def train_step(images, targets, weight, update):
        gpu.step(images)
        assert not update and eager.__enter__.called and not eager.__exit__.called
        assert all(parameter.grad is None for parameter in model.parameters())
        nn.functional.cross_entropy(model(images), targets).backward()

    find_batch.search(one, train_step, 8)
    assert len(gpu.tried) > 2
    stance.assert_called_once_with("force_eager")
