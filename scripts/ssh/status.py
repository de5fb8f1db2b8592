"""Show what the ranks of this user's runs are doing; see scripts/status.sh for the command.

It reads the files that utils/status.py writes, and calls nvidia-smi if it is installed. With
HOSTS_FILE, this file is sent to each host, which needs only Python (3.7 or newer). So it does not
import utils/start/nvidia.py.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import socket
import statistics
import subprocess
import time

HELP = """Show what this user's runs are doing, all ranks together.

    bash scripts/status.sh                # on this machine
    bash scripts/status.sh HOSTS_FILE     # on all hosts of a file

Each rank shows its own part of a step in seconds: waiting for its images (data_s), and computing
until its gradients are ready (comp_s). All other ranks wait for a rank marked as a straggler."""
STRAGGLES = 1.25  # a straggler's part of a step is longer than this times the median
# A line of a terminal with 80 columns.
COLUMNS = "{:>4} {:10.10} {:>7} {:>10} {:>8} {:>6} {:>6} {:>5} {:>11} {}"
HEADINGS = ("rank", "node", "epoch", "step", "images/s", "data_s", "comp_s", "GPU_%", "MiB", "seen")
FOLDER = f"/dev/shm/imagenet-suite-{os.getuid()}"
ARGUMENTS = globals().get("ARGUMENTS")  # given when this file was sent over ssh


def node():
    """Return the reports of this node's living ranks, with figures of disk and GPU."""
    ranks, devices = [], None
    for path in sorted(glob.glob(FOLDER + "/*.json")):
        try:
            with open(path) as file:
                rank = json.load(file)
            if not lives(rank):
                with contextlib.suppress(OSError):
                    os.unlink(path)  # its process was killed
                continue
            if rank["gpu"]:
                devices = gpus() if devices is None else devices
                rank["gpu"] = devices.get(rank["gpu"])
            rank["age"] = time.time() - rank["at"]  # by this node's clock
            list(describe([("", [rank])]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the rank has just ended, or another program wrote the file
        with contextlib.suppress(OSError):
            disk = shutil.disk_usage(rank["run"])
            rank["disk"] = f"{disk.free / 2**30:.1f} of {disk.total / 2**30:.0f} GiB free"
            rank["snapshot_age"] = time.time() - os.stat(rank["run"] + "/snapshot.pt").st_mtime
        ranks.append(rank)
    return ranks


def lives(rank):
    """Whether the rank's process still runs, and its id was not given to another process."""
    try:
        with open(f"/proc/{rank['pid']}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in "ZX" and fields[19] == rank["started"]


def gpus():
    """Return uuid: [utilisation (%), memory used, total (MiB)] of each GPU; {} without GPUs."""
    query = "--query-gpu=uuid,utilization.gpu,memory.used,memory.total"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [line.split(", ") for line in done.stdout.decode().splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) == 4}


def ago(seconds):
    """Format a length of time: 12 s, 5 min, 3 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def describe(answers):
    """Yield the lines to show. ``answers``: pairs of a node's name and the result of `node`."""
    runs = {}
    for name, answer in answers:
        if answer is None:
            yield f"{name}: no answer"
            continue
        ranks = f"{len(answer)} rank{'s' * (len(answer) > 1)}" if answer else "no runs"
        yield f"{name}: {ranks}"
        for rank in answer:
            # The home folders of a run's hosts may differ. Hosts may have runs of the same name.
            key, number = (os.path.basename(rank["run"]), rank["size"]), 0
            while clashes(dict(rank, node=name), runs.get((*key, number), {})):
                number += 1
            runs.setdefault((*key, number), {})[rank["rank"]] = dict(rank, node=name)
    for (_, size, _), ranks in sorted(runs.items()):
        first = ranks[min(ranks)]
        yield f"\n{first['run']} ({first['arch']}, {first['mode']})"
        if 0 in ranks and "disk" in first:
            age = first.get("snapshot_age")
            saved = "no snapshot yet" if age is None else f"snapshot {ago(age)} ago"
            yield f"  {saved}; disk {first['disk']}"
        yield COLUMNS.format(*HEADINGS)
        measured = [one for one in ranks.values() if one.get("compute_seconds") is not None]
        own = {one["rank"]: one["compute_seconds"] + one["data_seconds"] for one in measured}
        usual = statistics.median_low(own.values()) if own else 0.0  # of two, the faster
        for number in sorted(ranks):
            straggler = own.get(number, 0.0) > STRAGGLES * usual
            yield row(ranks[number]) + ("  << straggler" if straggler else "")
        missing = [str(number) for number in range(size) if number not in ranks]
        if missing:
            yield f"  not seen here: rank {', '.join(missing)}"


def clashes(rank, ranks):
    """Whether a rank cannot belong to the run of these ``ranks``."""
    here = {one["run"] for one in ranks.values() if one["node"] == rank["node"]}
    return rank["rank"] in ranks or not here <= {rank["run"]}


def row(rank):
    """Format the line of one rank."""

    def number(key, digits):
        return f"{rank[key]:.{digits}f}" if rank.get(key) is not None else "-"

    epoch = f"{min(rank['epoch'] + 1, rank['epochs'])}/{rank['epochs']}"
    step = f"{rank['step']}/{rank['steps']}" if rank["phase"] == "training" else rank["phase"]
    use, *memory = rank["gpu"] or ("-", "-")
    figures = number("images_per_s", 1), number("data_seconds", 3), number("compute_seconds", 3)
    place = rank["rank"], rank["node"], epoch, step
    return COLUMNS.format(*place, *figures, use, "/".join(memory), ago(rank["age"]))


def main():
    import hosts  # not at the top: this file is sent to nodes without that module

    options = hosts.make_parser("status.sh", HELP).parse_args()
    if options.hosts:
        answers = []
        for host, failed, out in hosts.ask_all(options.hosts, options.ssh, __file__, {}):
            last = out.strip().rpartition("\n")[2]  # after what a login shell has printed
            try:
                answers.append((host.name, None if failed else json.loads(last)))
            except ValueError:
                answers.append((host.name, None))
    else:
        answers = [(socket.gethostname(), node())]
    for line in describe(answers):
        print(line)
    return 2 if any(answer is None for _, answer in answers) else 0


if __name__ == "__main__":
    if ARGUMENTS is not None:
        print("\n" + json.dumps(node()))
    else:
        import hosts

        hosts.exit_with(main)
