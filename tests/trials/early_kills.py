#!/usr/bin/env python3
"""Kill launchers 0.05 to 8 s after their start, and count the processes that they leave behind.

    python tests/trials/early_kills.py --runs 60 DATA

The runs take turns among five launch styles, a few at once. SIGKILL goes to the launcher. All that
it has started carries a mark in its environment, whoever is its parent by then. Prints a table;
exit code 1 if anything is alive 25 s after a kill, or if a launcher ended before it.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
LAUNCH = (sys.executable, "-m", "torch.distributed.launch", "--use_env", "--nproc_per_node=2")
STYLES = {
    "imagenet_nd.py": (sys.executable, "imagenet_nd.py"),
    "imagenet_ddp.py -g 2": (sys.executable, "imagenet_ddp.py", "-g", "2"),
    "torchrun": (*TORCH, "imagenet_ddp.py"),
    "torch.distributed.launch": (*LAUNCH, "--master_port={port}", "imagenet_ddp.py"),
    "one_node_train.sh": ("bash", "scripts/one_node_train.sh", "1", "{name}", "4", "--"),
}
SECONDS = 25.0  # after the kill


def marked(mark: str) -> list[int]:
    """The processes with ``mark`` in their environment that are alive, zombies excluded."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
        except OSError:  # gone, or of another user
            continue
    return pids


def kill_one(number: int, runs: Path, data: Path) -> tuple[str, float, int, float]:
    """Style, seconds until the kill, processes left `SECONDS` later, seconds until none was."""
    style = list(STYLES)[number % len(STYLES)]
    mark = f"early_kill_{os.getpid()}_{number}"
    words = [word.format(port=20_000 + number, name=f"run{number}") for word in STYLES[style]]
    words += ["-a", "resnet18", "--image-size", "32", "-j", "1", "--epochs", "9"]
    if not style.endswith(".sh"):
        words += ["-b", "4"]
    words += ["--output-dir", str(runs / str(number)), str(data)]
    delay = random.Random(number).uniform(0.05, 8.0)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    env = os.environ | {"MARK": mark}
    env.pop("DATA", None)
    process = subprocess.Popen(words, cwd=ROOT, env=env, start_new_session=True, **quiet)
    time.sleep(delay)
    assert process.poll() is None, f"{' '.join(words)} has ended before it was killed"
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = time.monotonic()
    while (left := marked(mark)) and time.monotonic() < killed + SECONDS:
        time.sleep(0.2)
    took = time.monotonic() - killed
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return style, delay, len(left), took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("data", type=Path, help="a small image folder")
    args = parser.parse_args()
    data = args.data.resolve()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.at_once) as pool:
        rows = list(pool.map(lambda n: kill_one(n, Path(folder), data), range(args.runs)))
    for style in STYLES:
        mine = [row for row in rows if row[0] == style]
        print(
            f"{style:26} {len(mine):3} killed after {min(row[1] for row in mine):.2f} to "
            f"{max(row[1] for row in mine):.2f} s, {sum(row[2] > 0 for row in mine)} left "
            f"processes behind; the last one ended {max(row[3] for row in mine):.1f} s later"
        )
    return int(any(row[2] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
