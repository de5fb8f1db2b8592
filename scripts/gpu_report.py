"""Run the tests and benchmarks of scripts/gpu_report.sh in turn, and write the report."""

import argparse
import importlib.util
import os
import shlex
import shutil
import signal
import sys
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from utils.start import launch, signals

launch.prepare()  # before torch is imported, which takes seconds

from utils.start.option_types import DocstringFormatter, Parser, number, place


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=DocstringFormatter)
    above_0 = number(float, 0, exclusive=True)
    parser.add_argument("--minutes", type=above_0, default=15.0, help="time limit (%(default)g)")
    parser.add_argument(
        "--out", type=place, default=Path("gpu_report"), help="folder (%(default)s)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    parse()  # before torch is imported
    launch.print_first_line(sys.stderr)

import torch
from bench import commands, photographs

from utils import comparison
from utils.start.cores import usable_cores
from utils.start.errors import INTERRUPTED, UserError, exit_with
from utils.start.gpu_check import check_gpus


class Part(NamedTuple):
    """A section of the report: the output of a command, run by this Python.

    ``seconds``: time limit. ``gpus``: the number of GPUs that it needs. ``few``: options that make
    it less work, for --device cpu, and for a second attempt after the time limit. ``needs`` and
    ``makes``: folders in `FILES` that it reads and writes.
    """

    title: str
    command: str
    seconds: float
    gpus: int = 0
    few: str = ""
    needs: str = ""
    makes: str = ""


FILES = "gpu_report_files"  # folder in --out, which may be a folder of the user with runs/
CASES = "--rounds 1 --cases examples+{half}+channels_last,torchvision+{half},nd+{half},ddp+{half}"
CASES += ",fsdp+{half},O2,nd+bf16,examples+off,nd+off,nd+{half}+compile"
GPU_TESTS = "tests/test_cuda.py tests/test_real_apex.py -p no:cacheprovider"
READ = "--data {out}/sample -a resnet18 -b 128 -j {workers} --few 2560 --more 20480 --rounds 1"
READ += " --cases examples+{half}+channels_last,nd+{half}"
FEW = "--few 8 --more 64 -b 8 --image-size 32"
RUN = "-a resnet18 -b 64 --lr 0.05 --image-size 64 --epochs 3 --output-dir {out}/runs --name run"
PARTS = [
    Part("Tests that need a GPU", f"-m pytest -m cuda -n 8 {GPU_TESTS}", 300),
    Part("The step", f"scripts/bench_step.py {{model}} {CASES}", 300, few="--cases nd+bf16"),
    Part("Images", "scripts/prepare_data.py sample {out}/sample", 60, few="--train 20 --val 5",
         makes="sample"),
    Part("A run", f"imagenet_nd.py {RUN} {{out}}/sample", 120, few="--epochs 1 --image-size 32",
         needs="sample", makes="runs"),
    Part("Its curves", "scripts/compare_runs.py {out}/runs/run --out {out}/figures", 60,
         needs="runs"),
    Part("The largest batch", "imagenet_nd.py {model} --find-batch --dummy", 90, gpus=1,
         few="-b 4"),
    Part("Input", "scripts/bench_input.py {input} --rounds 2 --batches 8", 240,
         few="--batches 2 --images 200"),
    Part("Reading and training", f"scripts/bench_step.py {READ}", 300, few=FEW, needs="sample"),
    Part("All GPUs", "scripts/bench/time_step.py imagenet_ddp {model}", 60, gpus=2),
]  # fmt: skip


def section(part: Part, deadline: float, names: dict[str, str], small: bool) -> str:
    """Run a part. Returns: its command and output in Markdown.

    After the time limit it runs again with less work, and the section names what was left out.
    Raises: `UserError` if the command fails.
    """
    out, left_out = Path(names["out"]), ""
    made = out / (part.makes or "nothing")
    if part.gpus > int(names["gpus"]):
        return f"Left out: it needs {part.gpus} GPUs or more; this machine has {names['gpus']}."
    if part.command.startswith("-m pytest") and not importlib.util.find_spec("pytest"):
        return "Left out: pytest is not installed, and installing it failed."
    if not (out / part.needs).exists():
        return f"Left out: {out / part.needs} is missing because an earlier part failed."
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if small else {}
    env = os.environ | {"OMP_WAIT_POLICY": "passive"} | hidden
    for few in (part.few,) if small else dict.fromkeys(("", part.few)):
        seconds = min(part.seconds, deadline - time.monotonic())
        if seconds < 5:
            return f"{left_out}Left out: no time was left (`--minutes`)."
        line = f"{part.command} {few}".format(**names | {"out": "{out}"})  # --out may have spaces
        words = [word.replace("{out}", names["out"]) for word in line.split()]
        print(f"... {part.title} (at most {seconds:.0f} s)", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            shutil.rmtree(made, ignore_errors=True)  # from an earlier report or try
            (text,) = commands.run([[sys.executable, *words]], seconds, cwd=ROOT, env=env)
        except UserError as error:
            shutil.rmtree(made, ignore_errors=True)
            if error.code != INTERRUPTED:  # INTERRUPTED: the time limit was too short
                raise
            left_out += f"Left out: {error}.\n\n".replace(sys.executable, "python")
            continue
        text = text.strip()
        if "scripts/bench_" not in words[0]:  # benches print Markdown
            text = f"```\n{text}\n```"
        line = shlex.join(["python", *words])
        return f"{left_out}`{line}` ({time.monotonic() - began:.0f} s)\n\n{text}"
    return left_out.strip()


def main() -> int:
    args = parse()
    small = args.device == "cpu"
    if not small:
        check_gpus()
        if not torch.cuda.is_available():
            raise UserError("there is no GPU here: --device cpu tests the report without one")
    out, gpus = args.out.resolve(), 0 if small else torch.cuda.device_count()
    (out / FILES).mkdir(parents=True, exist_ok=True)
    names = {
        "model": "-a resnet18 -b 4 --image-size 32" if small else "-a resnet50 -b 256",
        "half": "bf16" if small else "fp16",
        "out": str(out / FILES),
        "gpus": str(gpus),
        "input": "" if photographs.find() else "{out}/sample",
        "workers": str(usable_cores()),
    }
    text = f"# GPU report\n\n{date.today():%d %B %Y}, `bash scripts/gpu_report.sh`\n"
    text += "\n**This was a test on the CPU: the figures mean nothing.**\n" if small else ""
    for name, value in (comparison.describe(torch.device(args.device)) | {"gpus": gpus}).items():
        text += f"\n- {name}: {value}"
    page, failed, deadline = out / "gpu_report.md", [], time.monotonic() + 60 * args.minutes
    for part in PARTS:
        try:
            content = section(part, deadline, names, small)
        except UserError as error:
            failed.append(part.title)
            content = f"**Failed:** {error}"
            print(f"{part.title} failed: {error}", file=sys.stderr, flush=True)
        text += f"\n\n## {part.title}\n\n{content}"
        page.write_text(f"{text}\n")  # after each part
    print(f"{page}" + "".join(f"; failed: {title}" for title in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    ends = (signal.SIGTERM, signal.SIGHUP)
    signals.handle(lambda number, _: sys.exit(128 + number), ends)  # and end the command
    exit_with(main)
