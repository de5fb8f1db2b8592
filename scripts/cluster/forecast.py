"""How long will a step take on several nodes? A small model of a ring all-reduce under DDP.

Rough, and on the careful side of rough: it knows one link and one size of messages.
"""

from dataclasses import dataclass

BUCKET = 25 * 2**20  # bytes; DDP's default: gradients travel in buckets while backward computes
OVERLAP = 2 / 3  # share of the step that is backward, behind which all-reduces can hide

# Images/s of ResNet-50 training with mixed precision on one GPU, from published figures and, for
# T4 and H100, estimates from them; what a GPU of that name asks of the input path.
RESNET50_IMAGES_PER_S = {"T4": 400, "V100": 1200, "A100": 2470, "H100": 4900, "H200": 4900}
RESNET50_GFLOPS = 4.09  # forward, one image of 224 x 224


@dataclass(frozen=True)
class Link:
    """Between two nodes: bytes a second one way, and seconds from one to the other."""

    bandwidth: float
    latency: float


def assumed_need(gpu: str, gflops: float | None) -> float | None:
    """Images/s that a model of ``gflops`` (forward, one image) trains at on ``gpu``; None: unknown.

    Other models are put to ResNet-50 by their number of operations.
    """
    words = gpu.replace("-", " ").split()
    known = [rate for name, rate in RESNET50_IMAGES_PER_S.items() if name in words]
    return known[0] * RESNET50_GFLOPS / gflops if known and gflops else None


def exchange_seconds(gradients: float, processes: int, nodes: int, link: Link) -> float:
    """All-reduce of ``gradients`` bytes over ``processes`` on ``nodes`` nodes.

    In a ring of P processes each link between nodes carries 2 (P - 1) / P times the gradients, and
    each bucket makes 2 (P - 1) hops, of which the share between nodes pays the network's latency.
    """
    if nodes == 1:
        return 0.0
    rounds = 2 * (processes - 1)
    buckets = max(1, -(-int(gradients) // BUCKET))
    hops = rounds * nodes / processes
    return rounds / processes * gradients / link.bandwidth + buckets * hops * link.latency


def step_seconds(compute: float, exchange: float, gradients: float) -> float:
    """A step of ``compute`` seconds on one GPU, with the ``exchange`` that backward does not hide.

    The last bucket is ready when backward is done, and cannot be hidden.
    """
    last = exchange * min(1.0, BUCKET / max(gradients, 1))
    return compute + max(exchange - OVERLAP * compute, last)


def efficiency(compute: float, gradients: float, shape: tuple[int, int], link: Link) -> float:
    """Speed of ``shape`` (nodes, processes in all), relative to that many single processes."""
    nodes, processes = shape
    exchange = exchange_seconds(gradients, processes, nodes, link)
    return compute / step_seconds(compute, exchange, gradients)
