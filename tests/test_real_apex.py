"""utils/model/o2.py against NVIDIA Apex's own code, where an Apex with amp (25.04) is installed.

Without a GPU, the tests make Apex believe that the CPU is one: its Python code computes the same.
"""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from o2_cases import CPU, prepare, train

from utils.model import apex


def real_apex_is_there() -> bool:
    spec = importlib.util.find_spec("apex")
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    return any((p / "amp").is_dir() and (p / "multi_tensor_apply").is_dir() for p in places)


pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not real_apex_is_there(), reason="no NVIDIA Apex with amp is installed"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def device(monkeypatch):
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        return torch.device("cuda")
    real_type = torch.Tensor.type

    def cuda_type(tensor, *arguments, **options):
        name = real_type(tensor, *arguments, **options)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    monkeypatch.setattr(torch.Tensor, "type", cuda_type)
    monkeypatch.setattr(torch.cuda, "IntTensor", torch.IntTensor)
    state = importlib.import_module("apex.amp._amp_state")._amp_state
    monkeypatch.setattr(state, "allow_incoming_model_not_fp32", True)
    return CPU


def contents(amp, model, optimizer):
    """All that training changes: weights, masters and momentum."""
    tensors = [p for p in (*model.parameters(), *amp.master_params(optimizer)) if p.requires_grad]
    trained = set(map(id, tensors))
    state = [state for p, state in optimizer.state.items() if id(p) in trained]
    return tensors + [entry["momentum_buffer"] for entry in state]


def assert_alike(one, other, steps, weights=None):
    """Also in what they do in further steps."""
    for step in steps:
        weight = weights[step] if weights else 1.0
        assert torch.equal(train(*one, step, weight), train(*other, step, weight)), step
        for a, b in zip(contents(*one), contents(*other), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), step
        assert float(one[0].scaler.value) == float(other[0].scaler.value), step


@pytest.mark.parametrize(
    ("name", "changes"),
    [("O2", {}), ("O2", {"keep_batchnorm_fp32": False}), ("O3", {})],
)
def test_every_step_is_equal_bit_for_bit(device, name, changes):
    weights = [1e6, 1, 1, 1e6, 1e6, 1, 1, 1, 1, 1e6, 1, 1] if name == "O2" else [1.0] * 4
    ours = prepare(name, device, **changes)
    theirs = prepare(name, device, amp=apex.Amp(), **changes)
    assert_alike(ours, theirs, range(len(weights)), weights)
    if name == "O2":
        assert theirs[0].scaler.value == 2.0**12
        assert theirs[0].scaler.skipped == int(ours[0].scaler.skipped) == 4


def test_a_snapshot_goes_from_one_to_the_other(device):
    """Masters, momentum and scale pass both ways, though Apex makes its masters late."""
    source = prepare(device=device, amp=apex.Amp())
    for step in range(3):
        train(*source, step, 1e6 if step == 0 else 1)
    for target in (prepare(device=device), prepare(device=device, amp=apex.Amp())):
        target[0].weights.load_state_dict(source[0].weights.state_dict())
        target[0].scaler.load_state_dict(source[0].scaler.state_dict())
        target[2].load_state_dict(copy.deepcopy(source[2].state_dict()))
        assert_alike(source, target, range(3, 6))
        source = target
