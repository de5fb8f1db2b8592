#!/usr/bin/env python3
"""Train on a Ray cluster with Ray's own TorchTrainer, and the unchanged training scripts.

    python scripts/examples/ray_train.py --workers 4 -- imagenet_ddp.py --name my_run DATA
    python scripts/examples/ray_train.py --workers 1:8 --gpu -- imagenet_ddp.py --name my_run DATA

Ray places the workers (one process each), reserves their GPUs and CPUs, and starts all of them
again when one fails or, with MIN:MAX, when nodes come or go. Each worker starts the script, which
resumes from the run's latest snapshot. After Ctrl-C, work since that snapshot is lost: Ray kills
its workers.

Needs `pip install "ray[train]"` in one version on all nodes, this code and the data at one path,
and an --output-dir that the nodes share. `ray start --head` starts a cluster (with
RAY_worker_niceness=0, or training gets little CPU time); ray_g4dn.yaml starts one on EC2. Anyone
who can reach Ray's ports can run code.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context, report
    from ray.train.torch import TorchConfig, TorchTrainer
except ImportError as missing:
    print(f'error: {missing}: pip install "ray[train]"', file=sys.stderr)
    sys.exit(2)

ROOT = Path(__file__).resolve().parents[2]
BAD_INPUT = 2  # exit code of the scripts; it is no use to start them again
FAILURES = 100  # after so many the job ends


def train(config: dict[str, Any]) -> None:
    """Run the script as one of its processes, in one of Ray's workers. Raises: RuntimeError."""
    import torch.distributed as dist

    context = get_context()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: list[Any] = [probe.getsockname()[1]]
    dist.broadcast_object_list(port)  # Ray's process group holds its own port
    place = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_PORT": port[0],
        "TORCHELASTIC_MAX_RESTARTS": FAILURES,  # the script resumes its own run
        "IMAGENET_LAUNCHER": os.getpid(),  # the script dies with this process
    }
    environment = os.environ | {name: str(value) for name, value in place.items()}
    code = subprocess.call([sys.executable, "-u", *config["command"]], env=environment, cwd=ROOT)
    if code not in (0, BAD_INPUT):
        raise RuntimeError(f"{config['command'][0]} ended with exit code {code}")
    report({"code": code})


def workers(text: str) -> int | tuple[int, int]:
    """Parse N or MIN:MAX."""
    numbers = [int(word) for word in text.split(":")]
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    usage = "ray_train.py --workers N [options] -- SCRIPT TRAINING OPTIONS"
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--address", default="auto", help="Ray's head node; default: $RAY_ADDRESS, or this machine")
    add("--workers", type=workers, default=1, metavar="N|MIN:MAX", help="processes in all")
    add("--gpu", action="store_true", help="reserve a GPU for each worker")
    add("--cpus", type=int, default=1, help="CPUs to reserve for each worker")
    add("command", nargs="+", metavar="-- SCRIPT OPTIONS", help="must include --name RUN")
    args = parser.parse_args()
    ray.init(args.address, logging_level="ERROR")
    trainer = TorchTrainer(
        train,
        train_loop_config={"command": [args.command[0], "--resume", "auto", *args.command[1:]]},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=args.workers, use_gpu=args.gpu, resources_per_worker={"CPU": args.cpus}
        ),
        run_config=RunConfig(
            storage_path=tempfile.mkdtemp(prefix="ray_train_"),  # of Ray's own notes
            failure_config=FailureConfig(max_failures=FAILURES),
        ),
    )
    return int((trainer.fit().metrics or {}).get("code", 0))


if __name__ == "__main__":
    sys.exit(main())
