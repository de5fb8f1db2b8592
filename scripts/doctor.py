#!/usr/bin/env python3
"""Check nodes before training on them: this machine alone, or all hosts of a file over ssh. Or run
it by hand on each node at the same time, with the --master and --port that training will use.

    bash scripts/doctor.sh --data DIR
    bash scripts/doctor.sh HOSTS_FILE --data DIR -a resnet50 -b 64
    python scripts/doctor.py --rank R --nodes N --master IP --data DIR

It begins with the pre-flight check of a run (ports in both directions, code, torch). Then each node
checks itself: GPUs, disk space, limits, data set, speed of reading and decoding. Node 0 compares
the nodes' versions, data and clocks, measures the all-reduce, and forecasts a step.

Node 0 prints the findings. The exit code is the same on every node: 0 if all is well, 1 after
warnings (training works, but read them), 2 after errors (training would fail).
"""

import argparse
import contextlib
import functools
import os
import platform
import random
import resource
import shutil
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/ssh")]

import choose_torch
import hosts
from job import Job

from utils import errors, launch
from utils.errors import UserError
from utils.extras import preflight
from utils.option_types import count, from_environment, non_negative, port, positive

OK, WARNING, ERROR = 0, 1, 2
MARKS = "✓!✗"
START = timedelta(minutes=2)  # for a node to import torch when all have joined
LONG = timedelta(minutes=30)  # listing ImageNet for the first time on a network disk takes minutes
BUCKET = 25 * 2**20  # bytes of gradients that DDP exchanges at once
SECONDS = 0.5  # for measuring the all-reduce
CLOCK_LIMIT = 2.0  # seconds
POOR_EFFICIENCY, SLOW_LINK = 0.7, 0.65  # SLOW_LINK: fraction of the usual speed
# Images/s that one GPU trains: ResNet-50 in mixed precision, published or estimated.
RESNET50_IMAGES_PER_S = {"T4": 400, "V100": 1200, "A100": 2470, "H100": 4900, "H200": 4900}
RESNET50_GFLOPS = 4.09  # forward pass of one image of 224 x 224
# What should be the same on all nodes, and why.
COMPARED = {
    "NCCL": "NCCL works only with its own version",
    "Python": "one node unpickles objects that another has pickled",
    "GPUs": "all processes wait for the slowest; -g needs the same number of GPUs",
    "driver": "a torch that works on one node may not work on another",
    "MTU": "large messages can vanish, and training hangs at its first all-reduce",
}
# Level and text. A problem also has a reason and a remedy, unless the text names them.
Finding = tuple[int, str] | tuple[int, str, str]


# ---- one node by itself


def check_machine(args: argparse.Namespace, gpus: list[str]) -> Iterator[Finding]:
    """Check GPUs and limits of this node. Appends the names of its GPUs to ``gpus``."""
    import torch

    from utils.extras import gpu_check

    try:
        gpu_check.check_gpus()
        gpus += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except UserError as error:
        yield ERROR, f": {error}"
    interface = preflight.interface_towards(args.master)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ():
        chosen = os.environ.get(name, interface).lstrip("=")
        if chosen[:1] != "^" and not interface.startswith(tuple(chosen.split(","))):
            text = f": {name} chooses {chosen}, but {interface} leads to node 0"
            yield WARNING, text, "training hangs if other nodes cannot reach it there; unset it"
    shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    if shm < 256e6 and len(gpus) > 1:
        why = "NCCL and the loaders pass data through it; start containers with --ipc=host"
        yield WARNING, f": /dev/shm has only {shm / 1e6:.0f} MB free", why
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < 1024:
        why = "workers, sockets and batches need a file descriptor each; run ulimit -n 4096"
        yield WARNING, f": a process may open only {files} files", why
    place = Path(args.output_dir).absolute()
    place = next(one for one in (place, *place.parents) if one.exists())
    free = shutil.disk_usage(place).free
    if free < (5e9 if args.rank == 0 else 5e8):
        level = ERROR if args.rank == 0 and free < 5e8 else WARNING
        why = "node 0 writes two snapshots, several times as large as the model, and the best one; "
        why += "free disk space, or choose another --output-dir"
        yield level, f": only {free / 1e9:.1f} GB of disk are free at {place}", why


def check_data(args: argparse.Namespace, needed: float, sources: dict) -> Iterator[Finding]:
    """Check whether a run can start with the data set, and whether this node reads and decodes the
    images that its GPUs need (``needed``: images/s). Fills ``sources``, by part."""
    from utils.folder import check_same_classes, class_folders, open_source

    root = Path(args.data)
    try:
        classes = class_folders(root / "train")
        check_same_classes(root, "val", classes, subset=False)
        for part in ("val", "train"):
            sources[part] = open_source(root / part, classes, shows=args.rank == 0)
    except UserError as error:
        sources.clear()
        yield ERROR, f": {error}"
        return
    for verb, rate, remedy in (
        ("reads", read_speed(sources["train"]), "a local disk or prepare_data.py shards"),
        ("decodes", decode_speed(sources["train"], args.image_size), "more cores"),
    ):
        if rate >= needed:
            yield OK, f" {verb} {rate:.0f} images/s"
        else:
            text = f" {verb} {rate:.0f} images/s, but its GPUs need {needed:.0f} (see --need)"
            why = f"GPUs wait for images; use {remedy}, or smaller images (prepare_data.py shrink)"
            yield WARNING, text, why


def images_per_gpu(args: argparse.Namespace, gpus: list[str]) -> float | None:
    """Return the images/s that one GPU of this node trains; None if unknown."""
    words = gpus[0].replace("-", " ").split() if gpus else ()
    known = [rate for name, rate in RESNET50_IMAGES_PER_S.items() if name in words]
    if args.need or not known:
        return args.need
    with contextlib.suppress(ValueError, KeyError):  # a model of timm: unknown
        from torchvision.models import get_model_weights

        operations = next(iter(get_model_weights(args.arch))).meta["_ops"]
        return known[0] * RESNET50_GFLOPS / operations * (224 / args.image_size) ** 2
    return None


def read_speed(source: Any) -> float:
    """Return files/s, read at random by one thread per core, not from the page cache."""

    def read(image: int) -> None:
        path, place, size = source.stored(image)
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), place, size or 0, os.POSIX_FADV_DONTNEED)
            file.readall() if size is None else os.pread(file.fileno(), size, place)

    chosen = random.sample(range(len(source)), min(256, len(source)))
    with ThreadPoolExecutor(min(launch.usable_cores(), 16)) as pool:
        began = time.perf_counter()
        list(pool.map(read, chosen))
        return len(chosen) / (time.perf_counter() - began)


def decode_speed(source: Any, size: int) -> float:
    """Return the images/s that all cores decode and crop for training. It is measured on one core,
    in CPU time, so that other programs do not count."""
    import numpy as np
    import torch

    from utils.images import ImageBatches
    from utils.samplers import Batch

    torch.set_num_threads(1)
    order = np.resize(np.random.default_rng().permutation(len(source)), 72)
    batches = ImageBatches(source, size, 0, train=True)
    batches.__getitems__(Batch(0, order[:8]))  # the first call loads libraries
    used = time.process_time()
    batches.__getitems__(Batch(0, order[8:]))
    return launch.usable_cores() * 64 / (time.process_time() - used)


# ---- all nodes


def check_all(args: argparse.Namespace) -> list[Finding]:
    """Check each node and the network between them. Collective.

    Returns: the findings, the same on every node.
    """
    import torch
    import torch.distributed as dist

    from utils.world import World, gather

    gpus: list[str] = []
    sources: dict[str, Any] = {}
    own = list(check_machine(args, gpus))
    interface = preflight.interface_towards(args.master)
    if interface:  # so that the doctor's own messages reach node 0
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    store = dist.TCPStore(args.master, args.port, args.nodes, args.rank == 0, timeout=START)
    place = {"store": store, "rank": args.rank, "world_size": args.nodes}
    dist.init_process_group("gloo", **place, timeout=LONG)
    world = World(torch.device("cpu"), args.rank, args.nodes, nodes=args.nodes)
    dist.barrier()
    now = time.time()
    need = images_per_gpu(args, gpus)
    own += check_data(args, (need or 0) * max(1, len(gpus)), sources)
    mtu = Path(f"/sys/class/net/{interface}/mtu")
    facts = {
        "name": f"node {args.rank} ({socket.gethostname()})",
        "NCCL": dist.is_nccl_available() and torch.cuda.nccl.version(),
        "Python": preflight.release(platform.python_version()),
        "GPUs": gpus,
        "driver": choose_torch.look().driver or "none",
        "MTU": mtu.read_text().strip() if mtu.exists() else "unknown",
    }
    nodes = gather(facts | {"own": own, "now": now, "need": need, "data": bool(sources)}, world)
    shown = ", ".join(nodes[0]["GPUs"]) or "none"
    findings = [(OK, f"node 0 has torch {torch.__version__}, GPUs: {shown}")]
    for node in nodes:
        findings += [(level, node["name"] + text, *why) for level, text, *why in node["own"]]
        ahead = node["now"] - nodes[0]["now"]
        if abs(ahead) > CLOCK_LIMIT:
            side = "ahead of" if ahead > 0 else "behind"
            text = f"the clock of {node['name']} is {abs(ahead):.1f} s {side} that of node 0"
            why = "logs cannot be compared, and object stores reject requests; turn on time "
            why += "synchronisation there (timedatectl set-ntp true, or chrony)"
            findings.append((WARNING, text, why))
    for key, why in COMPARED.items():
        entries = [(node["name"], {key: node[key]}) for node in nodes]
        if mismatch := preflight.describe_mismatch(entries):
            is_error = key == "NCCL" and any(node["GPUs"] for node in nodes)
            findings.append((ERROR if is_error else WARNING, mismatch, why))
    for part in ("train", "val") if all(node["data"] for node in nodes) else ():
        try:
            preflight.compare_data(f"DATA/{part}", sources[part], world)
            findings.append((OK, f"data: {part} {sources[part].fingerprint()}"))
        except UserError as error:
            why = "each node selects images by position in its own list; copy the data set again "
            findings.append((ERROR, str(error), why + "(rsync -a --checksum --delete)"))
    if args.nodes > 1:
        findings += check_network(args, nodes, world)
    dist.barrier()
    dist.destroy_process_group()
    return sorted(findings, key=lambda one: one[0])


def check_network(args: argparse.Namespace, nodes: list[dict], world: Any) -> Iterator[Finding]:
    """Measure the network by all-reduces, and forecast a step. Collective."""
    import torch
    import torch.distributed as dist
    from forecast import buckets, model

    from utils.world import gather

    def seconds(operation: Callable[[], object], times: int) -> list[float]:
        """Return the median time of ``times`` operations on each node."""
        durations = []
        for _ in range(times):
            began = time.perf_counter()
            operation()
            durations.append(time.perf_counter() - began)
        return gather(statistics.median(durations), world)

    small, large, hops = torch.zeros(1), torch.zeros(BUCKET // 4), 2 * (args.nodes - 1)
    seconds(lambda: dist.all_reduce(small), 2)
    latency = max(seconds(lambda: dist.all_reduce(small), 30)) / hops
    once = max(seconds(lambda: dist.all_reduce(large), 1))
    times = max(1, min(8, int(SECONDS / once)))
    exchange_s = max(seconds(lambda: dist.all_reduce(large), times))
    gbit = 8e-9 * hops / args.nodes * BUCKET / exchange_s
    yield OK, f"network: all-reduce reaches {gbit:.3g} Gbit/s, {1000 * latency:.2g} ms"
    speeds: dict[str, float] = {}
    for sender in range(args.nodes):
        receiver = (sender + 1) % args.nodes
        parts = {sender: (dist.send, large, receiver), receiver: (dist.recv, large, sender)}
        part = functools.partial(*parts.get(args.rank, (int,)))  # int(): nothing
        way = f"{nodes[sender]['name']} sends to {nodes[receiver]['name']}"
        speeds[way] = 8e-9 * BUCKET / seconds(part, times)[receiver]
    usual = statistics.median_high(speeds.values())
    for way, speed in speeds.items():
        if speed < SLOW_LINK * usual:
            text = f"network: {way} at {speed:.3g} Gbit/s, others reach {usual:.3g}"
            yield WARNING, text, "all nodes wait for the slowest; check the network of these two"
    needs = [node["need"] for node in nodes]
    if None in needs:
        return
    gpus = max(len(node["GPUs"]) or 1 for node in nodes)
    cluster = model.Cluster(gpus, network_gbit=gbit, protocol=1.0, latency_s=latency)
    packed = buckets.trace(args.arch, image_size=args.image_size)
    work = model.Workload(args.batch_size, min(needs), packed)
    expected = model.forecast(work, cluster, gpus * args.nodes)
    best, name = model.choice(work, cluster, gpus * args.nodes)
    text = f"forecast for {args.arch}, {args.batch_size} images per process: "
    text += f"{1000 * expected.step_s:.0f} ms per step, scaling efficiency "
    text += f"{expected.efficiency:.0%}; with --comm {name} {best.efficiency:.0%}"
    if expected.efficiency >= POOR_EFFICIENCY:
        yield OK, text
    else:
        why = f"nodes wait for gradients; use --comm {name}, a larger -b, --accum-steps"
        yield WARNING, text, why


# ---- the command


def parse() -> argparse.Namespace:
    env, parser = os.environ, hosts.make_parser("doctor.sh", __doc__)
    hosts.add_node_options(parser)
    add = parser.add_argument
    rank, nodes = env.get("NODE_RANK", "0"), env.get("WORLD_SIZE", "1")
    add("--rank", type=count, default=rank, metavar="R", help="rank of this node")
    add("--nodes", type=positive, default=nodes, metavar="N", help="number of nodes")
    add("--master", default=env.get("MASTER_ADDR"), metavar="IP", help="address of node 0")
    add("--port", type=port, help="port of node 0 (8888; with HOSTS_FILE a free one)")
    add("--data", metavar="DIR", help="image folder ($IMAGENET_DIR, else /data)")
    add("-a", "--arch", default="resnet50", help="model for the forecast")
    add("-b", "--batch-size", type=positive, default=128, metavar="N", help="images per process")
    add("--image-size", type=positive, default=224, metavar="PX", help="side of the crops")
    text = "images/s that one GPU trains, measured by --dummy; default: published figures"
    add("--need", type=non_negative, metavar="IMAGES_PER_S", help=text)
    add("--output-dir", default="runs", metavar="DIR", help="where runs will be written")
    text = "how long to wait for the other nodes (60; with HOSTS_FILE 20)"
    add("--wait", type=non_negative, metavar="SECONDS", help=text)
    parser.set_defaults(grace=5.0, elastic=None)
    args = parser.parse_args()
    # Over ssh, all nodes start at the same time, so none has to wait long.
    args.wait = args.wait or (20 if args.hosts else 60)
    if not args.hosts:
        if args.nodes > 1 and not args.master:
            raise UserError(f"--nodes {args.nodes} needs --master, the IP address of node 0")
        if args.rank >= args.nodes:
            raise UserError(f"--rank {args.rank} is not one of 0 to {args.nodes - 1}")
        args.master = args.master or "127.0.0.1"
        args.port = args.port or from_environment("MASTER_PORT", port, 8888)
        args.data = args.data or env.get("IMAGENET_DIR", "/data")
    return args


def examine(args: argparse.Namespace) -> int:
    """Check this node together with the others, and print the findings. Returns: the exit code."""
    launch.prepare()  # before torch is imported, which takes seconds
    is_printed = args.rank == 0
    try:
        if args.nodes > 1:
            preflight.meet(args.rank, args.nodes, 1, (args.master, args.port), args.wait)
        else:
            args.port = launch.free_port()
        from utils import models

        models.check_name(args.arch)
        findings = check_all(args)
    except (UserError, RuntimeError) as error:
        findings, is_printed = [(ERROR, str(error).partition("\n")[0])], True
    for level, text, *more in findings if is_printed else ():
        print(f"{MARKS[level]} {text}", *more, sep="\n    ")
    levels = [level for level, *_ in findings]
    total = f"all is well ({len(findings)} checks)"
    if max(levels):
        numbers = {"error": levels.count(ERROR), "warning": levels.count(WARNING)}
        total = ", ".join(f"{n} {word}{'s' * (n != 1)}" for word, n in numbers.items())
    print(f"node {args.rank}: {total}" + " (see node 0)" * (args.rank > 0), flush=True)
    return max(levels)


def over_ssh(args: argparse.Namespace) -> int:
    """Run this program on every host of a file. Returns its exit code."""
    machines = [replace(host, slots=None) for host in hosts.read(args.hosts)]
    names = ("data", "arch", "batch_size", "image_size", "need", "output_dir", "wait")
    options = [(name.replace("_", "-"), getattr(args, name)) for name in names]
    command = ["scripts/doctor.py", *(f"--{n}={v}" for n, v in options if v is not None)]
    return Job(args, command, machines, "doctor").run()


def main() -> int:
    args = parse()
    if args.hosts:
        return over_ssh(args)
    # When one node has finished, the ssh job ends the others. This one may still have to print.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(4))
    sys.stdout.reconfigure(errors="replace")  # for a terminal without UTF-8
    return examine(args)


if __name__ == "__main__":
    errors.exit_with(main)
