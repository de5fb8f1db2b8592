#!/usr/bin/env python3
"""Does a run that loses and regains nodes learn what an undisturbed one learns?

    sudo PYTHON tests/trials/elastic_curves.py DATA [--output-dir runs]

Trains twice with --global-batch 60: on one node with four processes, and on four simulated nodes
(tests/nodes.py) of one process each under train_on_nodes.sh --elastic 1:4. There, the node of
rank 0 is switched off in the first epoch, another one in the second, and both are switched on
again in the third. The model is a ViT of timm: without batch norm and dropout, each step is the
same on any number of processes. Prints the curves of both runs, the largest difference of their
weights, and what audit_run.py says of the disturbed run; draws both with compare_runs.py.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from faults import ROOT, STEP, Trial
from nodes import Nodes
from running import eventually

EPOCHS, NODES, LIMIT = 4, 4, 1200
OPTIONS = (
    "-a vit_tiny_patch16_224 --image-size 32 --val-resize-size 32 --crop-scale 0.7 --amp off -j 1"
    f" --global-batch 60 -b 15 --epochs {EPOCHS} --optimizer adamw --lr 1e-3 --wd 0.05 -p 10"
    " --lr-schedule cosine --warmup-epochs 0.5 --snapshot-minutes 0.05 --audit"
)
ENV = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # where timm may be


def undisturbed(name: str, output: Path, data: Path) -> None:
    """Train on one node."""
    command = f"imagenet_ddp.py -g {NODES} {OPTIONS} --output-dir {output} --name {name} {data}"
    subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=os.environ | ENV, check=True)


def disturbed(name: str, output: Path, data: Path) -> None:
    """Train on four nodes that go and come back. Raises: `AssertionError`."""
    with tempfile.TemporaryDirectory() as folder, Nodes(NODES + 1) as nodes:
        trial = Trial(nodes, "curves", data, output)
        hosts = Path(folder) / "hosts"
        hosts.write_text("".join(f"{node.name}\n" for node in nodes[1:]))
        for node in nodes[1:]:
            node.start_sshd(**ENV)
        launcher = f"bash scripts/train_on_nodes.sh {hosts} --dir {ROOT} --python {sys.executable}"
        script = f"imagenet_ddp.py {OPTIONS} --output-dir {output} --name {name} {data}"
        trial.type(0, f"{launcher} --elastic 1:{NODES} -- {script}", {})

        def reached(epoch: int, step: int) -> bool:
            found = (re.match(r"Epoch (\d+)/\d+ step +(\d+)", line) for *_, line in trial.lines)
            return any((int(one[1]), int(one[2])) >= (epoch, step) for one in found if one)

        assert eventually(lambda: reached(1, 50), LIMIT)
        first = next(node for _, node, text in reversed(trial.lines) if STEP.match(text))
        nodes[int(first.removeprefix("node"))].kill()
        assert eventually(lambda: reached(2, 40), LIMIT)
        rank0 = next(node for _, node, text in reversed(trial.lines) if STEP.match(text))
        second = next(one.name for one in nodes[1:] if one.name not in (first, rank0))
        nodes[int(second.removeprefix("node"))].kill()
        assert eventually(lambda: reached(3, 50), LIMIT)
        for again in (first, second):
            node = nodes[int(again.removeprefix("node"))]
            node.start_again()
            node.start_sshd(**ENV)
        assert eventually(lambda: trial.jobs[0].poll() is not None, LIMIT)
        assert trial.jobs[0].returncode == 0, f"see {trial.log.name}"


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("data", type=Path)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs", metavar="DIR")
    args = parser.parse_args()
    output, data = args.output_dir.resolve(), args.data.resolve()
    output.mkdir(parents=True, exist_ok=True)
    runs = [output / f"elastic_{kind}_{os.getpid()}" for kind in ("undisturbed", "disturbed")]
    undisturbed(runs[0].name, output, data)
    disturbed(runs[1].name, output, data)
    weights = [torch.load(run / "snapshot.pt", weights_only=True)["model"] for run in runs]
    differ = max(float((a - weights[1][key]).abs().max()) for key, a in weights[0].items())
    largest = max(float(a.abs().max()) for a in weights[0].values())
    print(f"weights differ by at most {differ:.2g}; the largest is {largest:.2g}")
    for run in runs:
        summary = json.loads((run / "summary.json").read_text())
        print({key: summary[key] for key in ("val_loss", "val_top1", "elapsed_seconds")}, run.name)
    commands = [["audit_run.py", runs[1]]]
    labels = ["--labels", "undisturbed", "4, 3, 2 and 4 nodes"]
    commands += [["compare_runs.py", *runs, *labels, "--out", output / "elastic_curves"]]
    for command in commands:
        subprocess.run(
            [sys.executable, f"scripts/{command[0]}", *command[1:]], cwd=ROOT, check=True
        )


if __name__ == "__main__":
    main()
