"""How many CPU cores this process may use.

python -m utils.start.cores  # print the number
"""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """The CPU cores of this process's affinity, or fewer if its container has a quota.

    ``docker run --cpus 2`` and limits of Kubernetes are quotas: the affinity does not show them.
    ``root``: where /proc and /sys are, for tests.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """The CPU quotas, in cores, of this process's control group and of all groups above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux, or no /proc
        return
    top = root / "sys/fs/cgroup"
    for line in lines:  # NUMBER:CONTROLLERS:PATH; version 2 has no controllers
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = top if not controllers else top / controllers
        if controllers and not mount.is_dir():
            mount = top / "cpu"
        # In a container the path may be that of the host, and the mount may be its own group.
        group = mount / path.lstrip("/")
        for folder in {group, *group.parents, mount}:
            if folder == mount or mount in folder.parents:
                yield from _quota(folder, version=1 if controllers else 2)


def _quota(folder: Path, version: int) -> Iterator[float]:
    """The quota of one control group, if it has one."""
    with contextlib.suppress(OSError, ValueError):  # no such file; "max": no limit
        if version == 2:
            quota, period = map(int, (folder / "cpu.max").read_text().split())
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = (int((folder / name).read_text()) for name in names)
        if quota > 0 and period > 0:  # -1: no limit
            yield quota / period


if __name__ == "__main__":
    print(usable_cores())
