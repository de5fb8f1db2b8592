#!/usr/bin/env python3
"""Run all trials of this folder, which take too long for tests, and print a table.

    sudo .venv/bin/python tests/trials/run_all.py [--output-dir runs/trials] [--only kills,starts]

Takes less than an hour on two cores; needs root, for network namespaces. --output-dir keeps the
output of each trial, with a table of its own. Exit code 1 if any has failed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

LIMIT = 1800  # seconds for one of them
TRIALS = {  # name: what it shows, and the command
    "kills": ("killed runs continue bit for bit", ["kill_runs.py", "--kills", "100"]),
    "starts": ("no way to exchange gradients hangs", ["comm_starts.py", "--starts", "60"]),
    "batches": ("batches equal those of whole images", ["same_batches.py", "DATA", "3"]),
    "faults": ("runs on several nodes continue after each fault", ["faults.py"]),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(TRIALS), metavar="LIST", help="(%(default)s)")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs/trials", metavar="DIR")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(TRIALS):
        parser.error(f"--only {unknown.pop()} is not one of {', '.join(TRIALS)}")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    rows = [try_it(name, args.output_dir) for name in names]
    print("| trial | shows that | minutes | result |\n|---|---|---|---|")
    for name, minutes, result in rows:
        print(f"| {name} | {TRIALS[name][0]} | {minutes:.1f} | {result} |")
    return int(any(result != "passed" for *_, result in rows))


def try_it(name: str, folder: Path) -> tuple[str, float, str]:
    """Run a trial. Returns: its name, minutes, and its result."""
    from conftest import draw_folder

    file, *options = TRIALS[name][1]
    if "DATA" in options and not (folder / "data").exists():
        draw_folder(folder / "data", train=200)
    words = [str(folder / "data") if word == "DATA" else word for word in options]
    began, log = time.monotonic(), folder / f"{name}.log"
    print(f"{name}: {file} {' '.join(words)} > {log}", flush=True)
    with open(log, "w") as out:
        command = ["setpriv", "--pdeathsig", "KILL"]  # a trial ends with this program
        command += [sys.executable, str(ROOT / "tests/trials" / file), *words]
        try:
            code = subprocess.run(
                command, cwd=ROOT, stdout=out, stderr=out, timeout=LIMIT, check=False
            ).returncode
            result = "passed" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            result = f"not finished within {LIMIT // 60} minutes"
    return name, (time.monotonic() - began) / 60, result


if __name__ == "__main__":
    sys.exit(main())
