"""``-b auto``: the largest batch that fits, and a training that is as if it had been typed."""

import argparse
import importlib.util
import json
import logging
import multiprocessing
import os
import random
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, summary
from running import assert_same_weights, snapshot
from torch import nn

from utils.errors import UserError
from utils.launch import supervise
from utils.model import models
from utils.run.checkpoint import TrainState
from utils.train import largest_batch, memory
from utils.train.memory import Counter, Full
from utils.train.rehearsal import rehearsal
from utils.train.search import search

MIB = 2**20


# ---- where to try next


def tries(peak, limit, most=float("inf"), careful=False):
    """What `search` finds, and the sizes that it tried."""
    tried = []

    def take(size):
        tried.append(size)
        return peak(size)

    return search(take, limit, 8, most, careful)[0], tried


def test_a_linear_need_is_met_in_a_few_trials():
    found, tried = tries(lambda size: 250 + 42 * size, 15_000)
    assert found == 344  # 250 + 42 * 344 = 14,698; 352 would be 15,034
    assert len(tried) <= 7


def test_any_growing_need_ends_at_the_largest_size():
    draw = random.Random(0)
    for _ in range(300):
        slope, bend = draw.uniform(0.1, 50), draw.uniform(0, 0.2)
        flat, limit = draw.uniform(0, 5000), draw.uniform(1, 40_000)
        most = draw.choice([float("inf"), 8 * draw.randrange(1, 200)])

        def peak(size, slope=slope, bend=bend, flat=flat):
            return max(flat, slope * size + bend * size**2)

        found, tried = tries(peak, limit, most)
        fitting = [size for size in range(8, 40_000, 8) if peak(size) <= limit and size <= most]
        assert found == (max(fitting) if fitting else 0)
        assert len(tried) == len(set(tried)) <= 18


def test_carefully_nothing_is_tried_that_should_be_too_large():
    found, tried = tries(lambda size: 250 + 42 * size, 15_000, careful=True)
    assert found == max(tried) == 344
    assert tries(lambda size: 1000 * size, 1, careful=True) == (0, [8])


def test_of_what_fails_half_way_nothing_is_known_but_that():
    found, _ = tries(lambda size: 10 * size if size <= 104 else float("inf"), 5000)
    assert found == 104


# ---- the count of tensors


def test_storages_are_counted_once_while_they_live():
    kept = torch.zeros(1024)
    with Counter(existing=[kept, kept.view(2, 512)]) as counter:
        assert counter.now == 4096
        other = kept + 1
        view = other[:10]
        assert counter.now == 8192
        del other
        assert counter.now == 8192  # the view holds it
        del view
        other = kept.double()
        del other
    assert (counter.now, counter.peak) == (4096, 4096 + 8192)
    with counter:
        assert counter.peak == 4096  # of this block


def test_backward_is_counted_and_the_limit_ends_it():
    weight = torch.zeros(256, 256, requires_grad=True)

    def step():
        ((torch.ones(64, 256) @ weight).relu() ** 2).sum().backward()

    with Counter(existing=[weight]) as counter:
        step()
    assert weight.grad is not None
    assert counter.now == 2 * 256 * 256 * 4  # weight and gradient
    weight.grad = None
    with pytest.raises(Full) as fault, Counter(counter.peak - 1, existing=[weight]):
        step()
    assert memory.is_shortage(fault.value)


def test_what_a_gpu_says_when_memory_is_short_is_understood():
    assert memory.is_shortage(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert memory.is_shortage(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    assert memory.is_shortage(RuntimeError("GET was unable to find an engine to execute this"))
    assert not memory.is_shortage(RuntimeError("shape '[2]' is invalid for input of size 3"))
    assert not memory.is_shortage(ValueError("out of memory"))


# ---- steps that leave no trace


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_rehearsal_leaves_everything_as_it_was(kind, broken):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten())
    model.append(nn.Linear(144, 3))
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **more)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    state = TrainState(model, optimizer, scaler)

    def step():
        loss = model(torch.randn(4, 3, 8, 8)).square().sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if broken and inside:
            raise Full
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def everything():
        return repr((model.state_dict(), optimizer.state_dict(), scaler.state_dict(),
                     torch.get_rng_state().sum(), random.random()))  # fmt: skip

    torch.set_printoptions(profile="full", precision=10)
    try:
        inside = False
        if kind is torch.optim.SGD:
            step()
        random.seed(0)
        before = everything()
        random.seed(0)
        inside = True
        with pytest.raises(Full) if broken else mock.MagicMock(), rehearsal(state, print):
            for _ in range(3):
                step()
        assert everything() == before
    finally:
        torch.set_printoptions(profile="default")


# ---- from the command line to the weights


def run(script, *options):
    """Run a script in this process; returns the lines that it logged."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    place = ROOT / "tests/stand_in/timm/__init__.py"
    stand_in = importlib.util.spec_from_file_location("timm", place)
    timm = importlib.util.module_from_spec(stand_in)
    stand_in.loader.exec_module(timm)
    lines, logger = logging.Handler(), logging.getLogger("utils")
    found, before = [], list(logger.handlers)
    lines.emit = lambda record: found.append(record.getMessage())
    logger.addHandler(lines)
    argv = [str(ROOT / script), *map(str, options)]
    try:
        with (
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(models, "timm", timm),
            mock.patch.object(supervise, "die_with_parent", lambda *_: None),
        ):
            assert module.main() == 0
    finally:
        for handler in set(logger.handlers) - set(before):
            logger.removeHandler(handler)
    return found


MODEL = ("-a", "tiny_full", "--image-size", 32, "-j", 0, "--epochs", 2, "--lr", 0.05)


def same_snapshots(one, other):
    """Apart from the clock and the options that name the runs."""
    assert_same_weights(one, other)
    a, b = (snapshot(run) for run in (one, other))
    assert a["scaler"] == b["scaler"]
    for name in ("epoch", "step", "global_batch", "sums"):
        assert a["progress"][name] == b["progress"][name]
    assert a["options"]["batch_size"] == b["options"]["batch_size"]


MORE = ("--accum-steps", 2, "--clip-grad", 1, "--amp", "bf16")


@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.long), MORE])
def test_a_run_that_found_its_batch_equals_one_that_was_told(folder, tmp_path, more):
    place = ("--output-dir", tmp_path, *more)
    limit = 0.0012 if more else 0.00085
    lines = run("imagenet_nd.py", *MODEL, "-b", "auto", "--memory-limit", limit, *place, folder)
    (auto,) = tmp_path.iterdir()  # named after what was found
    size = json.loads((auto / "options.json").read_text())["batch_size"]
    assert 8 <= size < 60
    assert size % 8 == 0
    assert f"_b{size}_" in auto.name
    assert any(f"{size} images per process" in line for line in lines)
    assert summary(auto)["largest_batch"] == size
    run("imagenet_nd.py", *MODEL, "-b", size, "--name", "told", *place, folder)
    same_snapshots(auto, tmp_path / "told")
    assert summary(tmp_path / "told")["largest_batch"] is None


LIMITS = (0.002, 0.0006)  # GiB, of rank 0 and rank 1: what rank 0 could take is too much for 1


def _pair(rank, ports, folder, place, script):
    """One of two processes, as torchrun starts them; the other one has another memory."""
    torch.set_num_threads(1)
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in env.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    sizes = []

    def train(script, *options):
        os.environ["MASTER_PORT"] = str(ports.pop())
        return run(script, *options, folder)

    def searched(*args):
        found = search(*args)
        sizes.append(found[0])
        return found

    auto = (*MODEL, "--output-dir", place, "-b", "auto", "--memory-limit", LIMITS[rank])
    with mock.patch.object(largest_batch, "search", searched):
        lines = train(script, *auto, "--name", "auto")
        same = ("-b", summary(place / "auto")["largest_batch"], "--name", "told")
        train(script, *MODEL, "--output-dir", place, *same)
        more = ("--name", "auto", "--resume", "auto", "--epochs", 3)
        lines += train(script, *auto, *more)
    (place / f"{rank}.json").write_text(json.dumps([sizes, lines]))


@pytest.mark.parametrize(
    "script",
    ["imagenet_ddp.py", pytest.param("imagenet_ddp_apex.py", marks=pytest.mark.long)],
)
def test_all_ranks_take_what_the_one_with_the_least_memory_can(folder, tmp_path, script):
    """Rank 1 runs out of memory where rank 0 goes on; then the batch is in the snapshot."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(3)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    context = multiprocessing.get_context("spawn")
    both = [
        context.Process(target=_pair, args=(rank, ports, folder, tmp_path, script))
        for rank in range(2)
    ]
    for process in both:
        process.start()
    for process in both:
        process.join()
        assert process.exitcode == 0
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    (mine, lines), (others, _) = found
    size = summary(tmp_path / "auto")["largest_batch"]
    assert size == others[0] < mine[0]
    assert len(mine) == 1  # the resumed run did not search
    assert any(line == f"-b auto: {size} images per process, as in "
               f"{tmp_path / 'auto/snapshot.pt'}" for line in lines)  # fmt: skip
    assert any("has the least room" in line for line in lines)
    told, auto = (snapshot(tmp_path / name) for name in ("told", "auto"))
    assert told["progress"]["epoch"] == 2
    assert auto["progress"]["epoch"] == 3
    for a, b in zip(told["progress"]["history"], auto["progress"]["history"], strict=False):
        assert {k: v for k, v in a.items() if k.startswith(("Loss", "Top"))} == {
            k: v for k, v in b.items() if k.startswith(("Loss", "Top"))
        }


def test_what_cannot_be_is_a_sentence(folder, tmp_path):
    tell = largest_batch.check
    with pytest.raises(UserError, match="--memory-limit GIB without a GPU"):
        tell(argparse.Namespace(batch_size="auto", memory_limit=None))
    with pytest.raises(UserError, match="is for -b auto"):
        tell(argparse.Namespace(batch_size=64, memory_limit=2.0))
    little = ("-b", "auto", "--memory-limit", 0.0001, "--output-dir", tmp_path, folder)
    with pytest.raises(UserError, match="not even 8 images fit into"):
        run("imagenet_nd.py", *MODEL, *little)
