#!/usr/bin/env python3
"""Run all trials of this folder, which take too long for tests, and print a table.

    sudo .venv/bin/python tests/trials/run_all.py [--output-dir runs/trials] [--only kills starts]

Takes about an hour on two cores; needs root, for network namespaces. --output-dir keeps the
output of each trial, with a table of its own. Exit code 1 if any has failed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from conftest import draw_folder

LIMIT = 1800  # seconds for one of them
TRIALS = {  # name: what it shows, and the command
    "kills": ("killed runs continue bit for bit", "kill_runs.py --kills 100"),
    "launchers": ("a killed launcher leaves no process", "early_kills.py --runs 60 {data}"),
    "starts": ("no way to exchange gradients hangs", "comm_starts.py --starts 60"),
    "index": ("tar files of 1.28 million images are indexed", "large_index.py"),
    "faults": ("runs on several nodes continue after each fault", "faults.py"),
}


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--only", nargs="+", choices=TRIALS, default=TRIALS)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs/trials", metavar="DIR")
    args = parser.parse_args()
    folder = args.output_dir.resolve()
    data = folder / "data"
    if not data.exists():
        draw_folder(data, train=200)
    table, failed = [], 0
    for name in args.only:
        shows, line = TRIALS[name]
        words, log, began = line.format(data=data).split(), folder / f"{name}.log", time.monotonic()
        print(f"{name}: {' '.join(words)} > {log}", flush=True)
        # A trial ends with this program.
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, *words]
        with open(log, "w") as out:
            how = {"cwd": ROOT / "tests/trials", "stdout": out, "stderr": out, "timeout": LIMIT}
            try:
                code = subprocess.run(command, check=False, **how).returncode
                result = "passed" if code == 0 else f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                result = f"not finished within {LIMIT // 60} minutes"
        failed += result != "passed"
        minutes = (time.monotonic() - began) / 60
        table.append(f"| {name} | {shows} | {minutes:.1f} | {result} |")
    print("| trial | shows that | minutes | result |\n|---|---|---|---|", *table, sep="\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
