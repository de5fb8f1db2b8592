#!/usr/bin/env python3
"""Compare the forecast with runs on 1, 2 and 4 nodes with limited links, made on this machine.

    python scripts/prepare_data.py fashion-mnist data/fashion
    sudo python tests/trials/namespace_runs.py data/fashion

The nodes are namespaces (tests/nodes.py; needs root, iproute2 and pytest), with one process and one
thread each, joined by links that the kernel limits. They share this machine's cores: if there are
more nodes than cores, each gets its share, which the forecast here takes into account, as it is
known beforehand. Nothing else is fitted: the run on one node gives the speed of computing. As other
programs may use the cores meanwhile, a second forecast starts from the compute time that each run
has itself measured: it tests the network's part alone.

Each run trains with imagenet_ddp.py on the first images of each class; a run that exists already is
not repeated.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

from compare.table import text_table  # noqa: E402
from forecast import buckets, model  # noqa: E402
from forecast.measured import MeasuredRun, read_run  # noqa: E402
from forecast.model import Cluster, Workload  # noqa: E402

from utils.errors import UserError, report  # noqa: E402

ARCH, BATCH, CLASSES = "resnet18", 32, 10
HEAD = ("link", "nodes", "measured s", "compute", "forecast", "error %", "its compute", "forecast",
        "error %")  # fmt: skip
OPTIONS = (
    f"-a {ARCH} -b {BATCH} --image-size 48 --val-resize-size 48 --lr 0.02 --epochs 6 -j 1 -p 10 "
    "--comm fp32"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, metavar="DATA", help="folder with train/CLASS/*")
    parser.add_argument("--rates", default="1000,300", metavar="LIST", help="Mbit/s (%(default)s)")
    parser.add_argument("--nodes", default="2,4", metavar="LIST", help="(%(default)s)")
    parser.add_argument("--images", type=int, default=640, metavar="N", help="(%(default)s)")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "runs", metavar="DIR")
    args = parser.parse_args()
    # Event files keep the command lines, which are easier to read with short paths.
    output = Path(os.path.relpath(args.output_dir, ROOT))
    args.data = args.data.resolve()
    os.chdir(ROOT)
    try:
        data = part_of(args.data, output / "namespace_data", args.images)
        alone = read_run(train(1, None, data, output))
        work = Workload(BATCH, 1.0, buckets.trace(ARCH, CLASSES))
        work = model.fit_compute(work, Cluster(), alone.gpus, alone.step_s)
        rows = [row("no link", alone, work, Cluster())]
        for rate in map(int, args.rates.split(",")):
            for nodes in map(int, args.nodes.split(",")):
                run = read_run(train(nodes, rate, data, output))
                rows.append(row(f"{rate} Mbit/s", run, work, Cluster(network_gbit=rate / 1000)))
        print(text_table(HEAD, rows))
    except UserError as error:
        return report(error)
    return 0


def part_of(data: Path, out: Path, images: int) -> Path:
    """A folder of links to the first images of each class: ``images`` in train, a sixth in val."""
    if not (data / "train").is_dir():
        raise UserError(f"{data} has no train/: make it with scripts/prepare_data.py fashion-mnist")
    for part, count in (("train", images), ("val", images // 6)):
        folders = sorted(path for path in (data / part).iterdir() if path.is_dir())
        for folder in folders[:CLASSES]:
            place = out / part / folder.name
            place.mkdir(parents=True, exist_ok=True)
            for file in sorted(folder.iterdir())[: count // CLASSES]:
                link = place / file.name
                if not link.is_symlink():
                    link.symlink_to(file.resolve())
    return out


def train(nodes: int, rate: int | None, data: Path, output: Path) -> Path:
    """Train on so many nodes, unless that run exists already. Returns its directory."""
    from nodes import Nodes

    name = f"namespaces_{nodes}" + (f"_{rate}mbit" if rate else "")
    if (output / name / "summary.json").is_file():
        return output / name
    with Nodes(nodes, f"{rate}mbit" if rate else None) as places, ExitStack() as stack:
        started = []
        for number, node in enumerate(places):
            # One thread per node: with more, one node alone would have more cores than each of two.
            command = (
                f"python -m torch.distributed.run --nnodes={nodes} --node_rank={number}"
                f" --nproc_per_node=1 --master_addr={places[0].ip} --master_port=8888"
                f" imagenet_ddp.py {OPTIONS} --output-dir {output} --name {name} {data}"
            )
            log = stack.enter_context(open(output / f"{name}_node{number}.log", "w"))
            env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
            started.append(node.popen(command, env, stdout=log, stderr=log))
        codes = [one.wait() for one in started]
    if any(codes):
        raise UserError(f"the run {name} failed: see {output}/{name}_node*.log")
    return output / name


def row(link: str, run: MeasuredRun, work: Workload, cluster: Cluster) -> list[str]:
    """A run's measured and forecast step time; the forecast also from its measured compute time."""
    slower = max(1.0, run.nodes / (os.cpu_count() or 1))  # nodes on the same core take turns
    cells = [link, str(run.nodes), f"{run.step_s:.3f}"]
    for compute_s in (work.compute_s * slower, run.compute_s):
        one = replace(work, images_per_s=BATCH / compute_s)
        step_s = model.forecast(one, cluster, run.gpus).step_s
        cells += [f"{compute_s:.3f}", f"{step_s:.3f}", f"{100 * (step_s / run.step_s - 1):+.1f}"]
    return cells


if __name__ == "__main__":
    sys.exit(main())
