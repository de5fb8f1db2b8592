"""Will the nodes keep up? Judges limits, disk, input and network, and forecasts the step time."""

import math
from collections.abc import Iterator

from checkup.findings import FAULT, OK, WARNING, Checkup, Finding
from forecast import scaling

from utils.comm.cost import Bucket

OPEN_FILES = 1024
SHM_BYTES = 256e6  # Docker gives a container 64 MB unless it is told otherwise
DISK, DISK_LEAST = 5e9, 0.5e9  # bytes free where runs/ is; less: a warning, a fault
SLOW_LINK = 0.25  # of the median speed: such a node holds the others up
POOR_EFFICIENCY = 0.7
_BIT = 8 / 1e9  # bytes to Gbit
# Images/s that one GPU asks of the input path: ResNet-50 training in mixed precision, by published
# figures, and for T4 and H100 by estimates from them.
RESNET50_IMAGES_PER_S = {"T4": 400, "V100": 1200, "A100": 2470, "H100": 4900, "H200": 4900}
RESNET50_GFLOPS = 4.09  # forward, one image of 224 x 224


def judge(check: Checkup) -> Iterator[Finding]:
    """All findings on limits and speed."""
    yield from _limits(check)
    yield from _torch_part(check)
    yield from _input(check)
    if check.nodes > 1:
        yield from _network(check)
        yield from _forecast(check)


def assumed_need(gpu: str, gflops: float | None) -> float | None:
    """Images/s that a model of ``gflops`` (forward, one image) trains at on ``gpu``; None: unknown.

    Other models are related to ResNet-50 by their number of operations.
    """
    words = gpu.replace("-", " ").split()
    known = [rate for name, rate in RESNET50_IMAGES_PER_S.items() if name in words]
    return known[0] * RESNET50_GFLOPS / gflops if known and gflops else None


def _limits(check: Checkup) -> Iterator[Finding]:
    good = True
    for rank, facts in check.facts.items():
        limits, node = facts["limits"], check.node(rank)
        if limits["shm_bytes"] < SHM_BYTES and len(facts["gpus"]["names"]) > 1:
            good = False
            yield Finding(
                "shm",
                WARNING,
                f"{node}: /dev/shm has only {limits['shm_bytes'] / 1e6:.0f} MB free",
                "NCCL hands gradients from GPU to GPU of a node there, where they cannot reach "
                "each other directly, and ends with an error if it is full",
                "docker run --ipc=host (or --shm-size=1g), or mount -o remount,size=1g /dev/shm",
                [rank],
            )
        if limits["open_files"] < OPEN_FILES:
            good = False
            yield Finding(
                "open-files",
                WARNING,
                f"{node}: a process may open only {limits['open_files']} files",
                "workers, sockets and batches that are handed over need a file descriptor each",
                f"ulimit -n {4 * OPEN_FILES} before the start",
                [rank],
            )
        # Rank 0 writes snapshots; the others write next to nothing.
        if limits["disk_bytes"] < (DISK if rank == 0 else DISK_LEAST):
            good = False
            level = FAULT if rank == 0 and limits["disk_bytes"] < DISK_LEAST else WARNING
            yield Finding(
                "disk",
                level,
                f"{node}: only {limits['disk_bytes'] / 1e9:.1f} GB of disk are free at "
                f"{limits['disk']}",
                "node 0 writes two snapshots, each several times as large as the model, and the "
                "best model",
                "free disk space, or choose another --output-dir",
                [rank],
            )
    if good and check.facts:
        least = min(facts["limits"]["shm_bytes"] for facts in check.facts.values())
        files = min(facts["limits"]["open_files"] for facts in check.facts.values())
        disk = check.facts[0]["limits"]["disk_bytes"]
        yield Finding(
            "limits",
            OK,
            f"limits: /dev/shm {least / 1e9:.1f} GB, {files} open files, {disk / 1e9:.0f} GB of "
            "disk free on node 0",
        )


def _torch_part(check: Checkup) -> Iterator[Finding]:
    for rank, found in check.torch.items():
        if "error" in found:
            yield Finding(
                "torch-part",
                FAULT,
                f"{check.node(rank)}: the part of the check that needs torch failed after "
                f"{', '.join(key for key in found if key != 'error') or 'nothing'}: "
                f"{found['error']}",
                "a training would probably fail in the same way",
                "see the message; --quick skips this part",
                [rank],
            )


def need_of(check: Checkup, rank: int) -> tuple[float | None, str]:
    """Images/s that one GPU of a node will ask for, and where that number comes from."""
    if check.options["need"]:
        return check.options["need"], "--need"
    names = check.facts[rank]["gpus"]["names"]
    model = check.torch.get(rank, {}).get("model")
    need = assumed_need(names[0], model["gflops"]) if names and model else None
    return need, f"assumed for {check.options['arch']} on {names[0]}; --need" if need else ""


def _input(check: Checkup) -> Iterator[Finding]:
    slow, speeds = False, []
    for rank, facts in check.facts.items():
        read, limits = facts["data"].get("read"), facts["limits"]
        if not read:
            continue
        files, core = read["files_per_s"], 0.0
        text = f"reads {files:.0f} files/s ({read['bytes_per_s'] / 1e6:.0f} MB/s)"
        decode = check.torch.get(rank, {}).get("decode")
        if decode:
            core = decode["images_per_s_core"]
            text += f", decodes {core:.0f} images/s per core, {core * limits['cores']:.0f} on all"
        speeds.append(f"{check.node(rank)} {text}")
        need, source = need_of(check, rank)
        if not need:
            continue
        gpus = max(1, len(facts["gpus"]["names"]))
        asked = need * gpus
        for what, rate, remedy in (
            (
                "reads",
                files,
                "put the data on a local disk, or shrink the images "
                "(scripts/prepare_data.py shrink)",
            ),
            (
                "decodes",
                core * limits["cores"],
                "shrink the images (scripts/prepare_data.py shrink), or use a machine with more "
                "cores per GPU",
            ),
        ):
            if 0 < rate < asked:
                slow = True
                yield Finding(
                    "read-speed" if what == "reads" else "decode-speed",
                    WARNING,
                    f"{check.node(rank)} {what} {rate:.0f} images/s, and will be asked for "
                    f"{asked:.0f} ({need:.0f} for each of {gpus}: {source})",
                    "GPUs are idle while they wait for images",
                    remedy,
                    [rank],
                )
    if speeds and not slow:
        first = need_of(check, min(check.facts))
        against = (
            f"; needed for each GPU: {first[0]:.0f} images/s ({first[1]})"
            if first[0]
            else "; not judged without a GPU (--need IMAGES_PER_S says how fast it must be)"
        )
        yield Finding("input", OK, f"input: {'; '.join(speeds)}{against}")


def _network(check: Checkup) -> Iterator[Finding]:
    if not check.ring:
        return
    seconds = [way["seconds"] for way in check.ways if way.get("seconds")]
    # A slow port is slow with any number of connections; another program may have disturbed one of
    # the measurements.
    best = {rank: max(one[rank] for one in check.ring.values()) for rank in check.ring[1]}
    middle = sorted(best.values())[len(best) // 2]
    for rank, rate in best.items():
        if rate < SLOW_LINK * middle:
            to = (rank + 1) % check.nodes
            yield Finding(
                "slow-link",
                WARNING,
                f"{check.node(rank)} sends {rate * _BIT:.2g} Gbit/s to {check.node(to)}, the "
                f"others {middle * _BIT:.2g}",
                "the slowest link sets the pace of every all-reduce",
                "look for a slow port, a wrong interface, or another program that uses that link",
                [rank],
            )
    parts = [
        f"{streams} connection{'s' * (streams > 1)} {min(rates.values()) * _BIT:.3g} Gbit/s"
        for streams, rates in check.ring.items()
    ]
    for backend in ("gloo", "nccl"):
        found = [one[backend] for one in check.torch.values() if backend in one]
        if found:
            worst = min(found, key=lambda one: one["bytes_per_s"])
            parts.append(
                f"{backend} all-reduce {1000 * worst['latency_s']:.2g} ms, 25 MiB in "
                f"{1000 * 25 * 2**20 / worst['bytes_per_s']:.0f} ms"
            )
    trip = f"{1000 * max(seconds):.2g} ms round trip, " if seconds else ""
    yield Finding("network", OK, f"network: {trip}{', '.join(parts)}")


def link_of(check: Checkup) -> tuple[float, float] | None:
    """The slowest link: bytes per second in one direction, and seconds to its other end.

    As the all-reduce saw it if there was one, else by plain TCP.
    """
    for backend in ("nccl", "gloo"):
        found = [one[backend] for one in check.torch.values() if backend in one]
        if found and len(found) == check.nodes:
            # What a ring over the nodes makes of a link, undone.
            rounds = 2 * (check.nodes - 1)
            speed = min(one["bytes_per_s"] for one in found)
            latency = max(one["latency_s"] for one in found)
            return rounds / check.nodes * speed, latency / rounds
    seconds = [way["seconds"] for way in check.ways if way.get("seconds")]
    if not check.ring or not seconds:
        return None
    return min(check.ring[1].values()), max(seconds) / 2


def predict(check: Checkup) -> dict[str, float | str] | None:
    """Step time (s) and scaling efficiency of the chosen model on these nodes; None if unknown.

    Also of the method that --comm auto would take, under ``auto``, ``auto_step_s``, ...
    """
    link, models = link_of(check), [one["model"] for one in check.torch.values() if "model" in one]
    rates = [need_of(check, rank)[0] for rank in check.facts]
    if link is None or not models or None in rates or len(rates) != check.nodes:
        return None
    processes = sum(max(1, len(facts["gpus"]["names"])) for facts in check.facts.values())
    nodes = scaling.Cluster(
        gpus_per_node=math.ceil(processes / check.nodes),
        network_gbit=8 * link[0] / 1e9,
        protocol=1.0,  # measured through the same protocol
        latency_s=link[1],
    )
    packed = tuple(
        Bucket(one["values"], one["ready"], tuple(map(tuple, one["matrices"])))
        for one in models[0]["buckets"]
    )
    work = scaling.Workload(check.options["batch_size"], min(rates), packed)
    found = scaling.forecast(work, nodes, processes)
    best, name = scaling.choice(work, nodes, processes)
    return {
        "compute_s": found.compute_s,
        "exchange_s": found.exchange_s,
        "step_s": found.step_s,
        "efficiency": found.efficiency,
        "processes": processes,
        "auto": name,
        "auto_step_s": best.step_s,
        "auto_efficiency": best.efficiency,
    }


def _forecast(check: Checkup) -> Iterator[Finding]:
    found = predict(check)
    if found is None:
        return
    options = check.options
    _, source = need_of(check, 0)
    what = (
        f"forecast for {options['arch']}, {options['batch_size']} images per process, "
        f"{found['processes']} processes: a step takes {1000 * found['step_s']:.0f} ms, with "
        f"{1000 * found['compute_s']:.0f} ms of computing ({source}) and, partly at the same time, "
        f"{1000 * found['exchange_s']:.0f} ms of all-reduce; scaling efficiency "
        f"{found['efficiency']:.0%}; "
    )
    if found["auto"] == scaling.PLAIN.name:
        what += "no compression of the gradients would make that much shorter (--comm fp32)"
    else:
        what += (
            f"with --comm {found['auto']}, which auto would take, {found['auto_efficiency']:.0%} "
            f"and {1000 * found['auto_step_s']:.0f} ms"
        )
    if found["efficiency"] >= POOR_EFFICIENCY:
        yield Finding("forecast", OK, what)
        return
    compress = "" if found["auto"] == scaling.PLAIN.name else f"--comm {found['auto']}, "
    yield Finding(
        "forecast",
        WARNING,
        what,
        "the nodes would spend much of the time waiting for each other's gradients",
        f"{compress}more images between two exchanges (-b, --accum-steps), a faster network "
        "between the nodes, or fewer of them",
    )
