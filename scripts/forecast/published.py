#!/usr/bin/env python3
"""How far is the forecast off? Against published runs, and what the answer depends on.

    python scripts/forecast/published.py [--figures figures]

HAL: a cluster of 16 nodes with 4 V100 (NVLink) each, InfiniBand EDR, shared storage; ResNet-50,
Apex O2, 208 images per GPU. g4dn: g4dn.2xlarge nodes of one T4, 10 Gbit/s (bursts of 25), VGG-19
with 20 classes in float32, 32 images per node; only its efficiencies are published, so the speed of
one GPU is an estimate: 118 GFLOP per image (3 x 2 x 19.6 G multiply-adds) at 5 of the T4's 8.1
TFLOP/s. What its network really gave is not known either: it is fitted on the run on two nodes.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from forecast import buckets, picture, scaling  # noqa: E402
from forecast.scaling import Cluster, Measured, Workload  # noqa: E402

from utils.comm import methods  # noqa: E402

LIMIT = 0.15

HAL_RATES = {2: 1582, 4: 3003, 8: 5819, 16: 11257, 32: 19490, 64: 32619}  # GPUs: images/s
HAL = [Measured(gpus, 208 * gpus / rate) for gpus, rate in HAL_RATES.items()]
HAL_CLUSTER = Cluster(gpus_per_node=4, network_gbit=100, local_gbit=600, latency_s=5e-6)
HAL_WORK = Workload(208, 1.0, buckets.of("resnet50"), methods.parse("fp16"))

G4DN_EFFICIENCY = {1: 1.0, 2: 0.81, 4: 0.65, 8: 0.46}  # nodes: share of the first node's images/s
G4DN_SHEET = Cluster(network_gbit=10)
G4DN_BUCKETS = buckets.of("vgg19", 20)
T4_VGG19 = 42.0  # images/s


def g4dn(rate: float) -> tuple[Workload, list[Measured]]:
    """Workload and measured steps if one T4 does ``rate`` images/s."""
    work = Workload(32, rate, G4DN_BUCKETS)
    return work, [Measured(n, work.compute_s / share) for n, share in G4DN_EFFICIENCY.items()]


def g4dn_cluster(rate: float = T4_VGG19, node: int = 1) -> Cluster:
    """The nodes with the network that explains the run on two (or on the ``node``-th number)."""
    work, points = g4dn(rate)
    return scaling.fit_network(work, G4DN_SHEET, points[node])


G4DN_CLUSTER = g4dn_cluster()


def hal_errors(cluster: Cluster) -> list[float]:
    """The errors on HAL; the speed of one GPU is taken from the run on two."""
    return scaling.errors(scaling.fit_compute(HAL_WORK, cluster, HAL[0]), cluster, HAL)


def g4dn_errors(cluster: Cluster, rate: float = T4_VGG19) -> list[float]:
    """The errors on g4dn if one T4 does ``rate`` images/s."""
    work, points = g4dn(rate)
    return scaling.errors(work, cluster, points)


def show(name: str, errors: Sequence[float]) -> None:
    """One line: the errors in per cent, and how many are within the limit."""
    within = sum(abs(error) <= LIMIT for error in errors)
    text = " ".join(f"{round(100 * error, 1) + 0.0:+6.1f}" for error in errors)
    print(f"{name:<42} {text}   {within} of {len(errors)}")


def show_both(name: str, hal: Cluster, other: Cluster, rate: float = T4_VGG19) -> None:
    """One line with the errors of all ten points."""
    show(name, hal_errors(hal) + g4dn_errors(other, rate))


def pictures(folder: Path) -> None:
    """Draw both forecasts with the measured points into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    work, points = g4dn(T4_VGG19)
    hal = scaling.fit_compute(HAL_WORK, HAL_CLUSTER, HAL[0])
    for name, title, what, cluster, measured in (
        ("hal", "HAL: V100, ResNet-50, 208 images per GPU", hal, HAL_CLUSTER, HAL),
        ("g4dn", "g4dn.2xlarge: T4, VGG-19, 32 images per GPU", work, G4DN_CLUSTER, points),
    ):
        rows = [scaling.forecast(what, cluster, point.gpus) for point in measured]
        picture.draw(rows, {p.gpus: p for p in measured}, title, folder / f"forecast_{name}.png")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw pictures into DIR")
    args = parser.parse_args()
    if args.figures:
        pictures(args.figures)
    head = " ".join(f"{n:>6}" for n in (*HAL_RATES, *G4DN_EFFICIENCY))
    print(f"error of the step time, %; within {LIMIT:.0%}\n")
    print(f"{'':<42} {'HAL, GPUs':^41} {'g4dn, nodes':^27}")
    print(f"{'':<42} {head}")
    show_both("forecast", HAL_CLUSTER, G4DN_CLUSTER)
    show_both("g4dn by its data sheet", HAL_CLUSTER, G4DN_SHEET)
    perfect = {"jitter": 0.0, "network_gbit": 1e6, "local_gbit": 1e6, "latency_s": 0.0}
    show_both("no model: perfect scaling", *both(**perfect))
    show_both("network alone (jitter 0)", *both(jitter=0.0))

    print("\njitter fitted on one HAL point instead (2 GPUs give the speed), used for all")
    for point in HAL[1:]:
        jitter = scaling.fit_jitter(HAL_WORK, HAL_CLUSTER, HAL[0], point).jitter
        show_both(f"on {point.gpus} GPUs: {jitter:.3f}", *both(jitter=jitter))

    print("\none assumption changed")
    for jitter in (0.03, 0.09):
        show_both(f"jitter {jitter}", *both(jitter=jitter))
    for node, count in list(enumerate(G4DN_EFFICIENCY))[1:]:
        other = g4dn_cluster(node=node)
        name = f"g4dn's network fitted on {count}: {10 * other.protocol:.1f} Gbit/s"
        show_both(name, HAL_CLUSTER, other)
    print("\nanother speed of the T4: the same errors, with another network to explain two nodes")
    for rate in (30.0, 36.0, 41.0, 44.4, 50.0, 60.0):
        gbit = 10 * g4dn_cluster(rate).protocol
        print(f"{rate:g} images/s, {32 / rate:.2f} s of compute: {gbit:.1f} Gbit/s")

    print("\nAnother cluster: Goyal et al., about 90 % efficiency from 8 to 256 GPUs (ResNet-50)")
    for jitter in (Cluster().jitter, 0.0085):
        ratio = (1 + jitter * (256**0.5 - 1)) / (1 + jitter * (8**0.5 - 1))
        print(f"jitter {jitter:g}: {100 / ratio:.0f} %")
    return 0


def both(**changes: float) -> tuple[Cluster, Cluster]:
    """The two clusters with the same changes."""
    return replace(HAL_CLUSTER, **changes), replace(G4DN_CLUSTER, **changes)


if __name__ == "__main__":
    sys.exit(main())
