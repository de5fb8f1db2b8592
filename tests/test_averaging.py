"""Averaged weights: the arithmetic, precision, snapshots, and which of two models is the best."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from o2_cases import contents, prepare, train
from test_checkpoint import ARGS, CLASSES, OPTIONS, WORLD, build, save_best, save_snapshot
from torch import nn
from torch.distributed.fsdp import fully_shard

from utils.atomic import read_checkpoint
from utils.comm import fsdp
from utils.errors import UserError
from utils.launch.world import local, whole
from utils.model.ema import Average
from utils.run.checkpoint import resume
from utils.train import evaluation, loop

DECAY = 0.9


class Tied(nn.Module):
    """A weight under two names, batch norm, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.other = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.other(self.norm(self.one(x)))


@torch.no_grad()
def descend(model, rate):
    for weight in model.parameters():
        weight.sub_(rate * weight.grad)
        weight.grad = None


def steps(model, number, seed=0):
    """Train, and give the state dict after each step."""
    source = torch.Generator().manual_seed(seed)
    for _ in range(number):
        model(torch.randn(8, 4, generator=source)).square().mean().backward()
        descend(model, 0.5)
        yield {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("most", [DECAY, 0.3])
def test_the_average_is_the_formula(most):
    """In float64; the first steps are below the decay that --ema asks for, with 0.3 some above."""
    torch.manual_seed(0)
    model = Tied()
    floats = [name for name, value in model.state_dict().items() if value.is_floating_point()]
    expected = {name: model.state_dict()[name].double() for name in floats}
    ema = Average(model, most)
    for number, state in enumerate(steps(model, 7), 1):
        ema.after_step()
        decay = min(most, (1 + number) / (10 + number))
        for name in floats:
            expected[name] = decay * expected[name] + (1 - decay) * state[name].double()
        assert ema.averages.keys() == set(floats)
        for name, value in ema.averages.items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert ema.steps == 7


def test_the_model_gets_its_own_bits_back():
    torch.manual_seed(0)
    model = Tied()
    ema = Average(model, DECAY)
    for _ in steps(model, 3):
        ema.after_step()
    own = {name: value.clone() for name, value in model.state_dict().items()}
    with ema.in_model():
        inside = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in model.state_dict().items():
        assert torch.equal(value, own[name])
        assert torch.equal(inside[name], ema.averages.get(name, value)), name


def test_a_float16_model_is_averaged_by_its_masters():
    amp, model, optimizer = prepare()
    masters = amp.weights.named_masters()
    expected = {name: value.double() for name, value in amp.weights.state_dict().items()}
    ema = Average(model, DECAY, masters)
    for number in range(1, 4):
        train(amp, model, optimizer, number)
        ema.after_step()
        decay = (1 + number) / (10 + number)
        for name, value in amp.weights.state_dict().items():
            expected[name] = decay * expected[name] + (1 - decay) * value.double()
    for name, value in ema.averages.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7, msg=name)
    before = contents(amp, model, optimizer)
    with ema.in_model():
        assert torch.equal(model[0].weight, ema.averages["0.weight"].half())
    assert all(
        torch.equal(a, b) for a, b in zip(before, contents(amp, model, optimizer), strict=True)
    )


# ---- in snapshots


def averaged(seed=0, number=3):
    """A state with averages after some steps."""
    state = build(seed)
    state.ema, state.global_batch = Average(state.model, DECAY), 32
    for _ in steps(state.model, number, seed):
        state.ema.after_step()
    state.best = {"epoch": 1, "top1": 50.0, "top5": 90.0, "ema": 1}
    return state


def test_a_snapshot_without_averages_begins_them_from_its_weights(tmp_path):
    save_snapshot(build(seed=1), tmp_path, OPTIONS)
    state = averaged(seed=2)
    resume(state, ARGS, WORLD, tmp_path / "snapshot.pt")
    assert state.ema.steps == 0
    for name, value in state.ema.averages.items():
        assert torch.equal(value, state.model.state_dict()[name])


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda ema: ema["model"].pop("0.weight"), "of another model"),
        (lambda ema: ema.update(model=[]), "does not fit this program"),
    ],
)
def test_averages_that_do_not_fit_are_a_sentence(tmp_path, harm, sentence):
    save_snapshot(averaged(), tmp_path, OPTIONS)
    content = read_checkpoint(tmp_path / "snapshot.pt")
    harm(content["ema"])
    torch.save(content, tmp_path / "snapshot.pt")
    with pytest.raises(UserError, match=sentence):
        resume(averaged(), ARGS, WORLD, tmp_path / "snapshot.pt")


def test_best_pt_has_the_averages_where_they_are_better(tmp_path):
    state = averaged()
    save_best(state, tmp_path, "tiny", CLASSES)
    best = read_checkpoint(tmp_path / "best.pt")
    assert best["weights"] == "ema"
    assert best["state_dict"].keys() == state.model.state_dict().keys()
    for name, value in state.model.state_dict().items():
        assert torch.equal(best["state_dict"][name], state.ema.averages.get(name, value))
    state.best["ema"] = 0
    save_best(state, tmp_path, "tiny", CLASSES)
    best = read_checkpoint(tmp_path / "best.pt")
    assert best["weights"] == "model"
    assert torch.equal(best["state_dict"]["0.weight"], state.model[0].weight)


def test_the_better_one_counts():
    state = averaged()
    state.best, state.epoch, seen = {}, 0, []
    for top1, ema in ((40.0, 35.0), (50.0, 55.0), (54.0, 20.0), (60.0, 60.0)):
        record = {"Top1/val": top1, "Top5/val": 90.0, "Top1/ema": ema, "Top5/ema": 91.0}
        is_best = loop._add_to_history(state, record)
        seen.append((is_best, loop.better(record), state.best["ema"]))
    assert seen == [(True, "val", 0), (True, "ema", 1), (False, "val", 1), (True, "val", 0)]
    assert state.best == {"epoch": 4, "top1": 60.0, "top5": 90.0, "ema": 0}


# ---- evaluation


class Few(list):
    """Batches of an evaluation."""

    def __init__(self, batches):
        super().__init__(batches)
        self.sampler = SimpleNamespace(rounds=len(self), images=sum(len(b[1]) for b in batches))
        self.bad = SimpleNamespace(share=lambda world: None, too_many=False)


def evaluate(model, parts, flip):
    """What `evaluation.evaluate` finds with a model of [n, 3, 4, 4]."""
    session = SimpleNamespace(
        args=SimpleNamespace(val_flip=flip),
        world=WORLD,
        stop=None,
        status=None,
        state=SimpleNamespace(model=model, ema=None),
        run=SimpleNamespace(console=MagicMock()),
    )
    return evaluation.evaluate(session, model, Few(parts))


def test_flips_are_the_mean_of_two_views():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    parts = [(torch.randn(n, 3, 4, 4), torch.arange(n) % 3) for n in (6, 3)]
    images, targets = (torch.cat(part) for part in zip(*parts, strict=True))
    found = evaluate(model, parts, flip=True)
    logits = (model(images) + model(images.flip(3))) / 2
    assert found["Loss/val"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)
    hits = (logits.argmax(1) == targets).float()
    assert found["Top1/val"] == pytest.approx(100 * hits.mean().item())
    assert found["Loss/val"] != evaluate(model, parts, flip=False)["Loss/val"]


# ---- sharded weights


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_weights_are_averaged_shard_by_shard(process_group):
    """By FSDP, here in one process."""
    torch.manual_seed(0)
    plain, model = Tied(), Tied()
    model.load_state_dict(plain.state_dict())
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    expected, found = Average(plain, DECAY), Average(model, DECAY)
    for _ in range(3):
        for one in (plain, model):
            one(torch.ones(8, 4).cumsum(0).cumsum(1)).square().mean().backward()
            descend(one, 0.1)
        expected.after_step()
        found.after_step()
    gathered = {name: whole(value) for name, value in found.averages.items()}
    again = Average(model, DECAY)
    again.restore({"model": fsdp.shards_like(gathered, again.averages), "steps": 3})
    for name, value in expected.averages.items():
        torch.testing.assert_close(gathered[name], value, rtol=0, atol=1e-5)
        assert torch.equal(local(again.averages[name]), local(found.averages[name]))
    own, images = local(model.one.weight).clone(), torch.ones(8, 4).cumsum(0)
    with torch.no_grad():
        model(images)
        with again.in_model(), expected.in_model():
            torch.testing.assert_close(model(images), plain(images), rtol=0, atol=1e-5)
        torch.testing.assert_close(model(images), plain(images), rtol=0, atol=1e-5)
    model.reshard()
    assert torch.equal(local(model.one.weight), own)
