"""What a step costs with each way to exchange gradients: measured or computed data in, seconds out.

    step_seconds(0.2, buckets, Link(4, 0.875e9, 25e-6), methods.parse("int8"))

DistributedDataParallel gathers gradients in buckets and exchanges them one after the other, each as
soon as it is full and the one before is through, while backward goes on. So a step ends with
backward or with the last exchange, whichever is later; the method's own arithmetic delays both.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from utils.comm import methods
from utils.comm.methods import Method

FLOAT32 = 4  # bytes
# What the arithmetic of compression is limited by, on a T4 (320 GB/s on its data sheet).
MEMORY_BYTES_PER_S = 300e9


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged together.

    ``values``: how many float32 numbers; ``ready``: the share of the step's compute (0 to 1) after
    which the last of them is there; ``matrices``: the shapes of those that PowerSGD sees as
    matrices (rows x all other dimensions), tensors of one dimension left out.
    """

    values: int
    ready: float
    matrices: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Link:
    """What connects ``gpus`` processes, which fill nodes of ``gpus_per_node``.

    Rates in bytes per second in one direction, as a collective gets them; latencies in seconds per
    hop.
    """

    gpus: int
    bytes_per_s: float  # of a node's link
    latency_s: float = 25e-6  # TCP sockets; InfiniBand has a fifth
    gpus_per_node: int = 1
    local_bytes_per_s: float = 10e9  # between the GPUs of a node: PCIe 3 x16; NVLink: 50e9 or more
    local_latency_s: float = 5e-6

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)


# How often a method's arithmetic reads or writes 4 bytes of memory per value. Not measured but
# counted:
# bytes that the operations of utils/comm/methods.py read and write per value on a GPU, each in a
# kernel of its own. 16 bits: 4 + 2 there, 2 + 4 back. 8 bits: into the blocks 8, largest 4, round
# 16, narrow 5, the parts of all nodes 9, rounded again 8 (with 4 nodes), widen 5, out of the blocks
# 8. 4 bits: packing and unpacking besides. PowerSGD: add the error 12, two products 8, the product
# of the factors 4, copy 8, the new error 32.
PASSES = {"fp32": 0, "fp16": 3, "bf16": 3, "int8": 16, "int4": 18, "powersgd": 16}


def wire_bytes(bucket: Bucket, how: Method) -> float:
    """Bytes of a bucket in an exchange: what enters the collectives, not yet times the nodes."""
    rest = bucket.values - sum(rows * columns for rows, columns in bucket.matrices)
    return methods.wire_bytes([*bucket.matrices, (rest,)], how)


def _collectives(how: Method) -> int:
    """How many a bucket takes, one after the other. PowerSGD: the first factors of the matrices and
    the tensors of one dimension, then the second factors."""
    return 2 if how.rank else 1


def exchange_seconds(size: float, link: Link, collectives: int = 1) -> float:
    """Seconds to sum ``size`` bytes over all GPUs, in so many all-reduces one after the other.

    A ring over all GPUs, whose slowest link decides; the latency is that of a ring or a tree,
    whichever has less.
    """
    if link.gpus == 1 or not size:
        return 0.0
    rate = link.local_bytes_per_s
    if link.nodes > 1:
        rate = min(rate, link.bytes_per_s)
    # Each link carries every byte once on its way to the sum and once back, less its own part.
    transfer = methods.sent_bytes(size, link.gpus) / rate
    local_hops = 2 * (min(link.gpus, link.gpus_per_node) - 1)
    ring = 2 * (link.nodes - 1) * link.latency_s + link.nodes * local_hops * link.local_latency_s
    depth = math.ceil(math.log2(link.nodes))
    tree = 2 * depth * link.latency_s + local_hops * link.local_latency_s
    return transfer + collectives * min(ring, tree)


def all_exchanges_seconds(buckets: Iterable[Bucket], link: Link, how: Method) -> float:
    """Seconds per step that the exchanges take, hidden or not."""
    sizes = (wire_bytes(bucket, how) for bucket in buckets)
    return sum(exchange_seconds(size, link, _collectives(how)) for size in sizes)


def step_seconds(
    compute_s: float,
    buckets: Sequence[Bucket],
    link: Link,
    how: Method,
    codec_s_per_value: float | None = None,
) -> float:
    """Seconds of a step of ``compute_s`` seconds of compute (forward and backward).

    ``buckets`` in the order in which they become ready. ``codec_s_per_value`` is what the method's
    own arithmetic takes, half of it before and half after the exchange; None assumes a device with
    `MEMORY_BYTES_PER_S`.
    """
    if link.gpus == 1:
        return compute_s
    if codec_s_per_value is None:
        codec_s_per_value = PASSES[how.name.split(":")[0]] * FLOAT32 / MEMORY_BYTES_PER_S
    device = network = done = 0.0  # until when each is busy; share of compute done
    beside: list[tuple[float, float]] = []  # decoding to come, while backward may go on: when, cost
    for bucket in (*buckets, Bucket(0, 1.0)):
        device += (bucket.ready - done) * compute_s
        done = bucket.ready
        while beside and beside[0][0] <= device:  # backward had to share the device with it
            device += beside.pop(0)[1]
        half = codec_s_per_value * bucket.values / 2
        device += half
        size = wire_bytes(bucket, how)
        arrival = max(network, device) + exchange_seconds(size, link, _collectives(how))
        network = arrival + half  # the next exchange begins when this one is decoded
        beside.append((arrival, half))
    return max(device, network)
