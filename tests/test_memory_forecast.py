"""The forecast of memory: against real steps, counted, and its arithmetic."""

import json

import memory_forecast
import pytest
import torch
from forecast import memory
from forecast.memory import Plan, forecast, largest_batch
from torch import nn

from utils.errors import UserError
from utils.model import models
from utils.model.optim import sgd
from utils.train.memory import Counter, of_state

MIB = 2**20
SMALL = Plan("resnet18", "nd", "off", image_size=32, classes=10, on_cpu=True)


def counted(plan, batch):
    """What a real step of `imagenet_nd.py` takes on the CPU."""
    model = models.create(plan.arch, plan.classes, plan.image_size).train()
    optimizer = sgd(model.parameters(), 0.1, 0.9, 1e-4)
    state = [entry["momentum_buffer"] for entry in optimizer.state.values()]
    dtype = memory.DTYPES[plan.amp]
    with Counter(existing=[*model.parameters(), *model.buffers(), *state]) as counter:
        images = torch.zeros(batch, 3, plan.image_size, plan.image_size, dtype=dtype)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(images), torch.zeros(batch, dtype=torch.int64))
        loss.backward()
        parts = of_state(model, optimizer)
        optimizer.step()
    return counter.peak, parts


@pytest.mark.parametrize(
    ("arch", "amp", "batch"),
    [("linear", "off", 136), ("squeezenet1_1", "bf16", 8)],
)
def test_it_is_what_a_real_step_takes(arch, amp, batch, monkeypatch):
    if arch == "linear":  # whose operators give views of weights

        def linear(*_):
            layers = [nn.Flatten(), nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 300), nn.ReLU()]
            return nn.Sequential(*layers, nn.Linear(300, 10))

        monkeypatch.setattr(models, "create", linear)
    plan = Plan(arch, "nd", amp, image_size=32, classes=10, on_cpu=True)
    peak, parts = counted(plan, batch)
    found = forecast(plan, batch)
    assert found.total == pytest.approx(peak, rel=0.01)
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(found, part) == pytest.approx(parts[part], rel=0.001)


def test_the_largest_batch_is_the_last_that_fits():
    for mode, processes in (("nd", 1), ("ddp", 4), ("dp", 2), ("fsdp", 4)):
        plan = Plan("resnet18", mode, "off", "sgd", 32, 10, processes, processes)
        size = largest_batch(plan, 2.0, reserve=0.5)
        limit = 1.5 * 0.95 * 2**30
        step = 8 * (processes if mode == "dp" else 1)
        assert size % step == 0
        assert forecast(plan, size).total <= limit < forecast(plan, size + step).total
    assert largest_batch(SMALL, 0.55, reserve=0.5) == 0


def test_state_is_shared_out_by_fsdp_and_halved_by_o2(monkeypatch):
    monkeypatch.setattr(memory, "_tried", lambda plan, batch: memory.Step(2**30, 2**30))
    plan = Plan("vit_b_32", "ddp", "fp16", "adamw", processes=4, local=2)
    whole = forecast(plan, 8)
    assert whole.parameters / MIB == pytest.approx(337, abs=1)  # 88,224,232 float32
    assert whole.optimizer == pytest.approx(2 * whole.gradients)
    for reshard, parts in (("full", 4), ("none", 4), ("node", 2)):
        sharded = forecast(Plan(**{**vars(plan), "mode": "fsdp", "reshard": reshard}), 8)
        assert sharded.gradients == pytest.approx(whole.gradients / parts)
        assert sharded.optimizer == pytest.approx(whole.optimizer / parts)
    o2 = forecast(Plan("vit_b_32", "O2", optimizer="sgd"), 8)
    assert o2.parameters == pytest.approx(whole.parameters / 2, rel=0.01)


def test_the_command(capsys, tmp_path):
    line = "-a resnet18 -b 64 --amp off --gpu-memory 16 --mode fsdp --processes 4"
    line += " --image-size 32 --classes 10"
    assert memory_forecast.main(line.split()) == 0
    out = capsys.readouterr().out
    for words in ("parameters", "activations", "largest batch on 16 GiB: ", "% of the GPU's"):
        assert words in out
    assert memory_forecast.main(["-a", "resnet180", "-b", "8"]) == 2
    assert "nearest names" in capsys.readouterr().err
    # Beside a run: here one whose tensors took a tenth more.
    options = {"arch": "resnet18", "mode": "nd", "precision": "off", "image_size": 32}
    options |= {"accum_steps": 1, "batch_size": 64, "dummy_classes": 10}
    taken = 1.1 * forecast(SMALL, 64).total
    summary = {"world_size": 1, "nodes": 1, "device": "cpu", "tensor_peak_bytes": taken}
    (tmp_path / "options.json").write_text(json.dumps(options))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert memory_forecast.main(["--measured", str(tmp_path)]) == 0
    assert "-9.1%" in capsys.readouterr().out
    (tmp_path / "summary.json").write_text(json.dumps(summary | {"tensor_peak_bytes": None}))
    assert memory_forecast.main(["--measured", str(tmp_path)]) == 2


def test_a_model_that_asks_for_values_is_a_sentence(monkeypatch):
    class Asks(nn.Linear):
        def forward(self, images):
            return super().forward(images.flatten(1)[:, :3]) * float(images.mean())

    monkeypatch.setattr(models, "create", lambda *_: Asks(3, 10))
    with pytest.raises(UserError, match="cannot be computed without its values"):
        memory.take_step(("asks", 10, 8), 4, None)
