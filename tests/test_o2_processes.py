"""O2 on two processes: against one process on the joined batch, and when one rank overflows."""

import multiprocessing
import socket

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from o2_cases import CPU, level
from torch import nn

from utils.amp.o2 import Amp, DistributedDataParallel
from utils.launch.world import World
from utils.model.optim import sgd

STEPS = 4


def network():
    """Without batch norm, so that the gradient of a batch is the mean over its images."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5)
    )


def batch(step):
    source = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 8, 8, generator=source), torch.randint(5, (8,), generator=source)


def train(rank, size, port, options, weights, results):
    """``weights[rank][step]`` multiplies the loss. Puts (rank, masters, scales, reduces)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    amp = Amp(World(CPU, rank, size))
    model = network()
    optimizer = sgd(model.parameters(), 0.05, 0.9, 1e-3)
    model, optimizer = amp.initialize(model, optimizer, **level())
    replica = DistributedDataParallel(model, **options)
    scales = []
    for step in range(STEPS):
        images, targets = (part.chunk(size)[rank] for part in batch(step))
        loss = F.cross_entropy(replica(images), targets) * weights[rank][step]
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(float(amp.scaler.value))
    masters = [p.detach().numpy() for p in amp.master_params(optimizer)]
    results.put((rank, masters, scales))
    dist.barrier()
    dist.destroy_process_group()


def run(size, options=None, weights=None):
    """Masters and scales of each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    weights = weights or [[1.0] * STEPS] * size
    started = [
        context.Process(target=train, args=(r, size, port, options or {}, weights, results))
        for r in range(size)
    ]
    for process in started:
        process.start()
    found = sorted((results.get(timeout=120) for _ in started), key=lambda one: one[0])
    for process in started:
        process.join(60)
        assert process.exitcode == 0
    return [(masters, scales) for _, masters, scales in found]


@pytest.fixture(scope="module")
def alone():
    return run(1)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"delay_allreduce": True}, marks=pytest.mark.long),
        {"gradient_predivide_factor": 2.0},  # torch's own order
        pytest.param({"gradient_predivide_factor": 4.0}, marks=pytest.mark.long),
        {"allreduce_always_fp32": True, "delay_allreduce": True},
    ],
    ids=str,
)
def test_two_processes_update_as_one_on_the_joined_batch(options, alone):
    first, second = run(2, options)
    for one, two, whole in zip(first[0], second[0], alone[0], strict=True):
        assert (one == two).all()
        start = torch.tensor(whole).abs().max()
        assert torch.allclose(torch.tensor(one), torch.tensor(whole), atol=2e-3 * float(start))
    assert not (first[0][0] == network()[0].weight.detach().half().float().numpy()).all()


def test_ranks_agree_to_skip_when_one_overflows():
    """Rank 1 overflows in steps 0 and 2; rank 0 by itself would not."""
    first, second = run(2, weights=[[1.0] * STEPS, [1e8, 1.0, 1e8, 1.0]])
    assert first[1] == second[1] == [2.0**15, 2.0**15, 2.0**14, 2.0**14]
    for one, two in zip(first[0], second[0], strict=True):
        assert (one == two).all()
