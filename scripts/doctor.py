#!/usr/bin/env python3
"""Check the nodes before training on them: this machine alone, all hosts of a file over ssh, or by
hand on each node at the same time, with the master's address and --port that training will use.

    bash scripts/doctor.sh --data DIR
    bash scripts/doctor.sh HOSTS_FILE --data DIR -a resnet50 -b 64
    python scripts/doctor.py --rank R --nodes N --master IP --data DIR

It begins with the pre-flight check of a run (ports in both directions, code, torch). Then one
process per node compares data, GPUs, versions, clocks and limits, measures reading, decoding and
the all-reduce, and forecasts a step.

Exit code, the same on every node: 0 all is well; 1 warnings: training works, but look at them; 2
errors: training would fail. Node 0 prints the findings.
"""

import argparse
import contextlib
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
START = timedelta(minutes=2)  # for a node to import torch once all are there
LONG = timedelta(minutes=30)  # listing ImageNet for the first time on a network disk takes minutes
BUCKET = 25 * 2**20  # bytes of gradients that DDP exchanges at once
SECONDS = 0.5  # for each measurement of a disk, a core
CLOCK_LIMIT = 2.0  # seconds
POOR_EFFICIENCY = 0.7
# Images/s that one GPU needs: ResNet-50 in mixed precision, published or estimated from that.
RESNET50_IMAGES_PER_S = {"T4": 400, "V100": 1200, "A100": 2470, "H100": 4900, "H200": 4900}
RESNET50_GFLOPS = 4.09  # forward, one image of 224 x 224
Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """A line of the report. Warnings and errors also say why they matter and what to do."""

    level: int
    what: str
    why: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{MARKS[self.level]} {self.what}"
        text += f"\n    why it matters: {self.why}" if self.why else ""
        return text + (f"\n    what to do: {self.remedy}" if self.remedy else "")


# ---- facts about one node


def facts(args: argparse.Namespace, interface: str | None) -> Facts:
    """All facts about this node; no communication."""
    import torch

    from utils.extras.gpu_check import check_gpus

    trouble, devices = "", []
    place = Path(args.output_dir).absolute()
    try:
        check_gpus()
        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    except UserError as error:
        trouble = str(error)
    while not place.exists():
        place = place.parent
    nccl = torch.distributed.is_nccl_available() and torch.cuda.nccl.version()
    mtu = Path(f"/sys/class/net/{interface}/mtu")
    return {
        "host": socket.gethostname(),
        "mtu": mtu.read_text().strip() if mtu.exists() else None,
        "gpus": devices,
        "driver": choose_torch.machine().driver,
        "gpu_trouble": trouble,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, nccl or ())) or None,
        "shm": shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        "disk": shutil.disk_usage(place).free,
        "disk_place": str(place),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cores": launch.usable_cores(),
        "data": data_set(args),
    }


def data_set(args: argparse.Namespace) -> Facts:
    """Fingerprints of train and val, and the speed of reading and decoding; or, if a run could not
    start with this data set, the "error"."""
    from utils.folder import check_same_classes, class_folders, open_source

    root, result = Path(args.data), {}
    try:
        classes = class_folders(root / "train")
        check_same_classes(root, "val", classes, subset=False)
        for part in ("val", "train"):
            index = open_source(root / part, classes, shows=args.rank == 0)
            result[part] = {
                "fingerprint": index.fingerprint(),
                "of_classes": index.class_fingerprints(),
                "sizes": index.sample_sizes()[1],
            }
        return result | {"files_per_s": read_speed(index), "core": decode_speed(index, args)}
    except UserError as error:
        return {"error": str(error)}


def read_speed(index: Any) -> float:
    """Files/s, read at random by one thread per core; copies in memory are dropped first."""
    chosen = random.sample(range(len(index)), min(256, len(index)))
    began, done = time.perf_counter(), []

    def read(image: int) -> None:
        if time.perf_counter() - began < SECONDS:
            path, place, size = index.stored(image)
            with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), place, size or 0, os.POSIX_FADV_DONTNEED)
                file.readall() if size is None else os.pread(file.fileno(), size, place)
                done.append(image)

    with ThreadPoolExecutor(min(launch.usable_cores(), 16)) as pool:
        list(pool.map(read, chosen))
    return len(done) / (time.perf_counter() - began)


def decode_speed(index: Any, args: argparse.Namespace) -> float:
    """Images/s that one core decodes and crops for training."""
    import numpy as np
    import torch

    from utils.images import ImageBatches
    from utils.samplers import Batch

    torch.set_num_threads(1)
    order = np.random.default_rng().permutation(len(index))
    batches = ImageBatches(index, args.image_size, 0, train=True)
    batches.__getitems__(Batch(0, order[:4]))  # the first call loads libraries
    images, began, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < SECONDS:
        batches.__getitems__(Batch(0, np.take(order, range(images, images + 8), mode="wrap")))
        images += 8
    # CPU time, so that other programs do not count.
    return images / max(time.process_time() - used, 1e-6)


# ---- facts about the network


def compare_nodes(args: argparse.Namespace) -> tuple[list[Facts], Facts]:
    """The facts of all nodes, and of the network between them. Collective."""
    import torch.distributed as dist

    interface = preflight.interface_towards(args.master)
    own = other_interfaces(interface)
    if interface:  # the doctor itself must get through
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    store = dist.TCPStore(args.master, args.port, args.nodes, args.rank == 0, timeout=START)
    place = {"store": store, "rank": args.rank, "world_size": args.nodes}
    dist.init_process_group("gloo", **place, timeout=LONG)
    dist.barrier()
    times = gather(time.time())
    everyone = gather(facts(args, interface) | {"interfaces": own})
    between = {"clocks": [one - times[0] for one in times]}
    if args.nodes > 1:
        between |= all_reduce()
    dist.barrier()
    dist.destroy_process_group()
    return everyone, between


def other_interfaces(leads: str | None) -> list[str]:
    """A line for each variable that makes gloo or NCCL use another network interface than the one
    that ``leads`` to node 0."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    chosen = {name: os.environ.get(name, "").lstrip("=") for name in names if leads}
    return [
        f"{name} chooses {value}, but {leads} leads to node 0"
        for name, value in chosen.items()
        if value and value[0] != "^" and not leads.startswith(tuple(value.split(",")))
    ]


def gather(value: Any) -> list[Any]:
    """The ``value`` of every node. Collective."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_reduce() -> Facts:
    """Bytes/s and latency in seconds of a link, measured by all-reduces. Collective."""
    import torch
    import torch.distributed as dist

    def seconds(tensor: Any, times: int) -> float:
        durations = []
        for _ in range(times):
            began = time.perf_counter()
            dist.all_reduce(tensor)
            durations.append(time.perf_counter() - began)
        return max(gather(statistics.median(durations)))  # the same on every node

    nodes, small, large = dist.get_world_size(), torch.zeros(1), torch.zeros(BUCKET // 4)
    seconds(small, 2)
    times = max(1, min(8, int(SECONDS / seconds(large, 1))))
    rounds = 2 * (nodes - 1)
    speed = rounds / nodes * BUCKET / seconds(large, times)
    return {"bytes_per_s": speed, "latency_s": seconds(small, 30) / rounds}


# ---- findings


def judge(everyone: list[Facts], between: Facts, args: argparse.Namespace) -> Iterator[Finding]:
    """All findings, in the same order on every node."""
    names = [f"node {rank} ({one['host']})" for rank, one in enumerate(everyone)]
    yield from of_versions(names, everyone)
    for rank, one in enumerate(everyone):
        yield from of_node(rank, names[rank], one, args)
    yield from of_data(names, [one["data"] for one in everyone])
    for name, ahead in zip(names, between["clocks"], strict=True):
        if abs(ahead) > CLOCK_LIMIT:
            side = "ahead of" if ahead > 0 else "behind"
            text = f"the clock of {name} is {abs(ahead):.1f} s {side} that of {names[0]}"
            why = "logs cannot be compared, and object stores reject requests"
            remedy = "turn on time synchronisation there (timedatectl set-ntp true, or chrony)"
            yield Finding(WARNING, text, why, remedy)
    if args.nodes > 1:
        yield from of_speed(everyone, between, args)


def of_versions(names: list[str], everyone: list[Facts]) -> Iterator[Finding]:
    on_gpus = any(one["gpus"] for one in everyone)
    for key, level, why in (
        ("nccl", ERROR if on_gpus else WARNING, "NCCL works only with its own version"),
        ("python", WARNING, "one node unpickles objects that another has pickled"),
        ("gpus", WARNING, "all processes wait for the slowest; -g needs the same number of GPUs"),
        ("driver", WARNING, "a torch that works on one node may not work on another"),
        ("mtu", WARNING, "large messages can vanish, and training hangs at its first all-reduce"),
    ):
        values = [preflight.release(one[key]) if key == "python" else one[key] for one in everyone]
        if any(value != values[0] for value in values):
            each = "; ".join(f"{v or 'none'} on {n}" for n, v in zip(names, values, strict=True))
            yield Finding(level, f"{key} differs: {each}", why, "make it the same on every node")
    one = everyone[0]
    kinds = f"{len(one['gpus'])} x {one['gpus'][0]}" if one["gpus"] else "none, training on the CPU"
    yield Finding(OK, f"versions of node 0: Python {one['python']}, torch {one['torch']}")
    yield Finding(OK, f"GPUs of node 0: {kinds}")


def of_node(rank: int, name: str, one: Facts, args: argparse.Namespace) -> Iterator[Finding]:
    """Problems of one node by itself."""
    free = one["disk"]
    for text in one["interfaces"]:
        why = "training hangs if the other nodes cannot reach this one there"
        yield Finding(WARNING, f"{name}: {text}", why, "unset it if that is not intended")
    for bad, level, what, why, remedy in (
        (one["gpu_trouble"], ERROR, one["gpu_trouble"], "training would end with this error",
         "see there"),
        (one["shm"] < 256e6 and len(one["gpus"]) > 1, WARNING,
         f"/dev/shm has only {one['shm'] / 1e6:.0f} MB free",
         "NCCL and the loaders pass data through it", "docker run --ipc=host"),
        (one["files"] < 1024, WARNING, f"a process may open only {one['files']} files",
         "workers, sockets and batches need a file descriptor each", "ulimit -n 4096"),
        (free < (5e9 if rank == 0 else 5e8), ERROR if rank == 0 and free < 5e8 else WARNING,
         f"only {free / 1e9:.1f} GB of disk are free at {one['disk_place']}",
         "node 0 writes two snapshots, several times as large as the model, and the best model",
         "free disk space, or choose another --output-dir"),
    ):  # fmt: skip
        if bad:
            yield Finding(level, f"{name}: {what}", why, remedy)
    needed = (need_of(one, args) or 0) * max(1, len(one["gpus"]))
    for verb, rate, remedy in (
        ("reads", one["data"].get("files_per_s"), "use a local disk or prepare_data.py shards, or"),
        ("decodes", one["cores"] * one["data"].get("core", 0), "use more cores, or"),
    ):
        text = f"{name} {verb} {rate or 0:.0f} images/s"
        if rate and rate < needed:
            text += f", but its GPUs need {needed:.0f} (see --need)"
            shrink = f"{remedy} shrink the images (scripts/prepare_data.py shrink)"
            yield Finding(WARNING, text, "GPUs wait for images", shrink)
        elif rate:
            yield Finding(OK, text)


def need_of(one: Facts, args: argparse.Namespace) -> float | None:
    """Images/s that one GPU of a node needs; None if unknown."""
    words = one["gpus"][0].replace("-", " ").split() if one["gpus"] else ()
    known = [rate for name, rate in RESNET50_IMAGES_PER_S.items() if name in words]
    if args.need or not known:
        return args.need
    with contextlib.suppress(ValueError, KeyError):  # a model of timm: unknown
        from torchvision.models import get_model_weights

        operations = next(iter(get_model_weights(args.arch))).meta["_ops"]
        return known[0] * RESNET50_GFLOPS / operations * (224 / args.image_size) ** 2
    return None


def of_data(names: list[str], data_sets: list[Facts]) -> Iterator[Finding]:
    usable = {}
    for name, data in zip(names, data_sets, strict=True):
        if "error" in data:
            why, remedy = "a run could not start there", "put the whole data set there (--data)"
            yield Finding(ERROR, f"{name}: {data['error']}", why, remedy)
        else:
            usable[name] = data
    for part in ("train", "val"):
        prints = {name: data[part]["fingerprint"] for name, data in usable.items()}
        if len(set(prints.values())) > 1:
            first = [(name, data[part]["of_classes"]) for name, data in usable.items()]
            each = "; ".join(f"{name} has {fingerprint}" for name, fingerprint in prints.items())
            text = f"the {part} images differ: {each}; {preflight.first_difference(first)}"
            why = "a node takes its slice by position in its own list: training does not start"
            remedy = "copy the data set again (rsync -a --delete DATA/ NODE:DATA/)"
            yield Finding(ERROR, text, why, remedy)
        elif len({data[part]["sizes"] for data in usable.values()}) > 1:
            text = f"the {part} images have the same names but different sizes"
            why = "one copy is damaged, or was made in another way: training does not start"
            remedy = "compare them: rsync -an --checksum --itemize-changes DATA/ NODE:DATA/"
            yield Finding(ERROR, text, why, remedy)
        elif usable:
            same = ", the same on all nodes" if len(usable) == len(names) > 1 else ""
            yield Finding(OK, f"data: {part} {next(iter(prints.values()))}{same}")


def of_speed(everyone: list[Facts], between: Facts, args: argparse.Namespace) -> Iterator[Finding]:
    from forecast import buckets, model

    gbit, latency = 8e-9 * between["bytes_per_s"], between["latency_s"]
    yield Finding(OK, f"network: all-reduce reaches {gbit:.3g} Gbit/s, {1000 * latency:.2g} ms")
    needs = [need_of(one, args) for one in everyone]
    if None in needs:
        return
    each = max(len(one["gpus"]) or 1 for one in everyone)
    cluster = model.Cluster(each, network_gbit=gbit, protocol=1.0, latency_s=latency)
    packed = buckets.trace(args.arch, image_size=args.image_size)
    work = model.Workload(args.batch_size, min(needs), packed)
    expected = model.forecast(work, cluster, each * len(everyone))
    best, name = model.choice(work, cluster, each * len(everyone))
    text = (
        f"forecast for {args.arch}, {args.batch_size} images per process: "
        f"{1000 * expected.step_s:.0f} ms per step, scaling efficiency "
        f"{expected.efficiency:.0%}; with --comm {name} {best.efficiency:.0%}"
    )
    if expected.efficiency >= POOR_EFFICIENCY:
        yield Finding(OK, text)
    else:
        remedy = f"--comm {name}, more images between two exchanges (-b, --accum-steps)"
        yield Finding(WARNING, text, "nodes wait for each other's gradients", remedy)


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
    # Over ssh all are started at the same time: no node has to wait long.
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
    """Check this node and, with the others, what is between them. Returns: the exit code."""
    launch.prepare()  # before torch is imported, which takes seconds
    everyone: list[Facts] = []
    try:
        if args.nodes > 1:
            preflight.meet(args.rank, args.nodes, 1, (args.master, args.port), args.wait)
        else:
            args.port = launch.free_port()
        from utils import models

        models.check_name(args.arch)
        everyone, between = compare_nodes(args)
        findings = sorted(judge(everyone, between, args), key=lambda one: one.level)
    except (UserError, RuntimeError) as error:
        why = "training would not start on these nodes"
        findings = [Finding(ERROR, str(error).partition("\n")[0], why, "see the message")]
    for one in findings:
        if args.rank == 0 or not everyone:
            print(one)
    levels = [one.level for one in findings]
    code, total = max(levels), f"all is well ({len(findings)} checks)"
    if code:
        numbers = {"error": levels.count(ERROR), "warning": levels.count(WARNING)}
        total = ", ".join(f"{n} {word}{'s' * (n != 1)}" for word, n in numbers.items())
    print(f"node {args.rank}: {total}" + " (see node 0)" * (args.rank > 0), flush=True)
    return code


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
    # The job over ssh ends all nodes once the first has: this one may still have to print.
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(4))
    sys.stdout.reconfigure(errors="replace")  # for a terminal without UTF-8
    return examine(args)


if __name__ == "__main__":
    errors.exit_with(main)
