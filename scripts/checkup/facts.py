"""What one node can find out about itself without importing torch. Facts only, no judgement."""

import contextlib
import os
import platform
import random
import resource
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.launch import agreement, network, supervise
from utils.run import provenance

READ_SECONDS = 0.4
READ_FILES = 256


def versions() -> dict[str, Any]:
    """Versions of Python, torch, NCCL and this code (a checksum of each file)."""
    return {
        "python": platform.python_version(),
        "torch": agreement.torch_version(),
        "nccl": agreement.nccl_version(),
        "code": agreement.code(*agreement.ROOT.glob("imagenet_*.py")),
        "commit": provenance.commit(),
    }


def gpus() -> dict[str, Any]:
    """Names of the GPUs that a training may use, and their driver, as nvidia-smi reports them."""
    found: dict[str, Any] = {"names": [], "driver": None}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" or not shutil.which("nvidia-smi"):
        return found
    line = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if visible:
        line.append(f"--id={visible}")
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return found | {"error": "nvidia-smi does not answer"}
    if done.returncode != 0:
        return found | {"error": (done.stdout + done.stderr).strip().split("\n")[0]}
    rows = [line.rsplit(", ", 1) for line in done.stdout.strip().splitlines()]
    return {"names": [row[0] for row in rows], "driver": rows[0][-1] if rows else None}


def own_name() -> dict[str, Any]:
    """The host name, and the addresses to which this node itself resolves it (none: an error)."""
    name = socket.gethostname()
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(name, None)}
    except OSError as fault:
        return {"host": name, "addresses": [], "error": fault.strerror or str(fault)}
    return {"host": name, "addresses": sorted(found)}


def ways(master: str) -> dict[str, Any]:
    """Which interfaces this node uses towards the others.

    "default": the interface towards ``master``, which training uses; "address": its address.
    "gloo", "nccl": what GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose instead: their "value",
    and "interface" and "address", or an "error".
    """
    own = network.interfaces()
    default = network.interface_towards(master)
    found: dict[str, Any] = {
        "interfaces": own,
        "default": default,
        "address": own.get(default or "") or _address_towards(master),
        "mtu": _mtu(default),
    }
    for library, variable in (("gloo", "GLOO_SOCKET_IFNAME"), ("nccl", "NCCL_SOCKET_IFNAME")):
        value = os.environ.get(variable)
        if value:
            chosen = _gloo_choice(value, own) if library == "gloo" else _nccl_choice(value, own)
            found[library] = {"variable": variable, "value": value, "interface": chosen}
            if chosen in own:
                found[library]["address"] = own[chosen]
            else:
                there = [name for _, name in socket.if_nameindex()]
                found[library]["error"] = (
                    "has no IPv4 address" if chosen in there else "is not an interface of this node"
                )
    return found


def _gloo_choice(value: str, own: dict[str, str]) -> str:
    """gloo takes the first of the names, exactly as written."""
    return value.split(",")[0]


def _nccl_choice(value: str, own: dict[str, str]) -> str:
    """NCCL takes the first interface that matches: prefixes, ``=exact`` names, ``^`` for "not"."""
    names = value.lstrip("^=").split(",")
    inverted, exact = value.startswith("^"), "=" in value[:2]
    for interface in own:
        fits = interface in names if exact else interface.startswith(tuple(names))
        if fits != inverted and (interface != network.LOOPBACK or not inverted):
            return interface
    return value


def _address_towards(master: str) -> str | None:
    with contextlib.suppress(OSError):
        family, kind, *_, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # UDP: only a route is looked up
            return probe.getsockname()[0]
    return None


def _mtu(interface: str | None) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/sys/class/net/{interface}/mtu").read_text())
    return None


def owns(address: str) -> bool:
    """Whether ``address`` (or a name of it) belongs to this node, which then can listen on it."""
    with contextlib.suppress(OSError):
        family, kind, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
            return True
    return False


def of_master(master: str) -> dict[str, Any]:
    """What only node 0 knows: whether it owns the master's address, and what that is on node 0."""
    with contextlib.suppress(OSError):
        address = socket.getaddrinfo(master, None, type=socket.SOCK_STREAM)[0][4][0]
        return {"owns_master": owns(master), "master_is": address}
    return {"owns_master": False, "master_is": None}


def limits(output: str) -> dict[str, Any]:
    """Shared memory, free disk space at ``output``, open files, cores."""
    place = Path(output).absolute()
    while not place.exists():
        place = place.parent
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "shm_bytes": shm.f_bavail * shm.f_frsize if shm else 0,
        "disk_bytes": shutil.disk_usage(place).free,
        "disk": str(place),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "cores": supervise.usable_cores(),
        "data_ports": _data_ports(),
    }


def _data_ports() -> str:
    """The range from which the kernel chooses ports, such as 32768-60999."""
    with contextlib.suppress(OSError):
        return "-".join(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return "1024-65535"


def data_set(root: str) -> dict[str, Any]:
    """Number of images and classes, and the fingerprints, of DATA/train and DATA/val.

    "error": a sentence, if a training could not use the data set.
    """
    found: dict[str, Any] = {"root": root, "parts": {}}
    try:
        from utils.data.index import ImageIndex, check_same_classes, class_folders
    except ImportError as missing:  # a Python without the suite's packages is a finding as well
        return found | {
            "error": f"{missing.name} is missing in {sys.executable}: activate the "
            "environment there (bash scripts/quickstart.sh makes one)"
        }
    try:
        classes = class_folders(Path(root) / "train")
        check_same_classes(Path(root), "val", classes, subset=False)
        for part in ("train", "val"):
            index = ImageIndex(Path(root) / part, classes, shows=True)
            mean, sizes = index.sample_sizes()
            found["parts"][part] = {
                "images": len(index),
                "classes": len(classes),
                "fingerprint": index.fingerprint(),
                "of_classes": index.class_fingerprints(),
                "bytes": round(mean * len(index)),
                "sizes": sizes,
            }
            if part == "train":
                found["read"] = _read_speed(index)
    except UserError as error:
        found["error"] = str(error)
    return found


def _read_speed(index: Any) -> dict[str, float]:
    """Read images chosen at random; from the disk, if the kernel drops its copies in memory.

    In as many threads as there are loader workers by default: one per core.
    """
    chosen = random.sample(range(len(index)), min(READ_FILES, len(index)))
    end = time.perf_counter() + READ_SECONDS
    done: list[int] = []

    def read(image: int) -> None:
        if time.perf_counter() > end:
            return
        path, place, count = index.stored(image)
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), place, count or 0, os.POSIX_FADV_DONTNEED)
            data = file.readall() if count is None else os.pread(file.fileno(), count, place)
            done.append(len(data))

    began = time.perf_counter()
    with ThreadPoolExecutor(min(supervise.usable_cores(), 16)) as pool:
        list(pool.map(read, chosen))
    seconds = max(time.perf_counter() - began, 1e-6)
    return {"files_per_s": len(done) / seconds, "bytes_per_s": sum(done) / seconds}
