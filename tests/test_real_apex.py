"""utils/amp/o2.py against NVIDIA Apex's own code, where an Apex with amp (25.04) is installed.

Without a GPU, the tests make Apex believe that the CPU is one: its Python code computes the same.
"""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from o2_cases import CPU, prepare, train

from utils.amp import apex


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


@pytest.mark.parametrize(
    ("name", "changes"),
    [("O2", {}), ("O2", {"keep_batchnorm_fp32": False}), ("O3", {})],
)
def test_every_step_is_equal_bit_for_bit(device, name, changes):
    """In the middle of O2, the state of Apex goes to two others: masters, momentum, scale."""
    weights = [1e6, 1, 1, 1e6, 1e6, 1, 1, 1, 1, 1e6, 1, 1] if name == "O2" else [1.0] * 4
    ours = prepare(name, device, **changes)
    theirs = prepare(name, device, amp=apex.Amp(), **changes)
    for step, weight in enumerate(weights):
        if step == 6:
            source = [theirs[0].weights, theirs[0].scaler, theirs[2]]
            states = [copy.deepcopy(part.state_dict()) for part in source]
            ours = prepare(name, device, **changes)
            theirs = prepare(name, device, amp=apex.Amp(), **changes)
            for amp, _, optimizer in (ours, theirs):
                for part, state in zip((amp.weights, amp.scaler, optimizer), states, strict=True):
                    part.load_state_dict(copy.deepcopy(state))
        assert torch.equal(train(*ours, step, weight), train(*theirs, step, weight)), step
        for a, b in zip(contents(*ours), contents(*theirs), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), step
        assert float(ours[0].scaler.value) == float(theirs[0].scaler.value), step
    if name == "O2":
        assert theirs[0].scaler.value == 2.0**12
        assert theirs[0].scaler.skipped == int(ours[0].scaler.skipped) == 4
