"""utils/amp/o2.py against NVIDIA Apex's own code, where an Apex with amp (25.04) is installed.

Without a GPU, the tests make Apex believe that the CPU is one: its Python code computes the same.
"""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from o2_cases import CPU, contents, groups, level, network, prepare, train, usual

from utils.amp import apex


def real_apex_is_there() -> bool:
    spec = importlib.util.find_spec("apex")
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return any((p / "amp").is_dir() and (p / "multi_tensor_apply").is_dir() for p in places)


pytestmark = [
    pytest.mark.skipif(not real_apex_is_there(), reason="no NVIDIA Apex with amp is installed"),
    pytest.mark.filterwarnings("ignore"),
]
GPU = torch.device("cuda")
DEVICES = [
    pytest.param(CPU, id="cpu"),
    pytest.param(
        GPU,
        id="cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == CPU:
        real_type = torch.Tensor.type

        def cuda_type(tensor, *arguments, **options):
            name = real_type(tensor, *arguments, **options)
            return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

        monkeypatch.setattr(torch.Tensor, "type", cuda_type)
        monkeypatch.setattr(torch.cuda, "IntTensor", torch.IntTensor)
        state = importlib.import_module("apex.amp._amp_state")._amp_state
        monkeypatch.setattr(state, "allow_incoming_model_not_fp32", True)
    return request.param


def original(device, chosen=None):
    amp, model = apex.Amp(), network(device)
    return amp, *amp.initialize(model, usual(groups(model)), **chosen or level())


def assert_alike(ours, theirs, where):
    for a, b in zip(contents(*ours), contents(*theirs), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), where


@pytest.mark.parametrize("chosen", [level("O2"), level("O2", keep_batchnorm_fp32=False)])
def test_o2_is_equal_bit_for_bit(device, chosen):
    torch.backends.cudnn.deterministic = True
    weights = [1e6, 1, 1, 1e6, 1e6, 1, 1, 1, 1, 1e6, 1, 1]
    ours, theirs = prepare(chosen, device), original(device, chosen)
    for step, weight in enumerate(weights):
        assert torch.equal(train(*ours, step, weight), train(*theirs, step, weight)), step
        assert float(ours[0].scaler.value) == theirs[0].scaler.value, step
        assert_alike(ours, theirs, step)
    assert theirs[0].scaler.value == 2.0**12
    assert theirs[0].scaler.skipped == int(ours[0].scaler.skipped) == 4


@pytest.mark.parametrize("name", ["O0", "O3"])
def test_levels_without_masters_are_equal(device, name):
    ours, theirs = prepare(level(name), device), original(device, level(name))
    for step in range(4):
        assert torch.equal(train(*ours, step), train(*theirs, step))
        assert_alike(ours, theirs, step)


def test_a_snapshot_goes_from_one_to_the_other(device):
    """Masters, momentum and scale pass both ways, though Apex makes its masters late."""
    ours, theirs = prepare(device=device), original(device)
    for step in range(3):
        train(*theirs, step, 1e6 if step == 0 else 1)
    go_on_alike(theirs, ours)
    go_on_alike(ours, original(device))


def go_on_alike(source, target):
    target[0].weights.load_state_dict(source[0].weights.state_dict())
    target[0].scaler.load_state_dict(source[0].scaler.state_dict())
    target[2].load_state_dict(copy.deepcopy(source[2].state_dict()))
    assert_alike(source, target, "at once")
    for step in range(3, 6):
        assert torch.equal(train(*source, step), train(*target, step))
        assert_alike(source, target, step)
