"""Runs the parts of scripts/gpu_report.sh within the time given, and writes what they found."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import utils.launch.installed  # noqa: E402, F401 (a missing package becomes one sentence)

import torch  # noqa: E402

from utils.errors import UserError, go_on_without_reader, report  # noqa: E402
from utils.option_types import number  # noqa: E402
from utils.run import provenance  # noqa: E402

LEAST = 5.0  # seconds; with less left, no part begins
GRACE = 10.0  # seconds for a command to end by itself


class Failed(Exception):
    """A part's command ended with an error, or did not end in time. ``out``: what it printed."""

    def __init__(self, why: str, out: str = ""):
        super().__init__(why)
        self.out = out


@dataclass
class Part:
    """One section of the report. ``work(sitting)`` returns its text and its figures.

    ``gpus`` is how many it needs, ``seconds`` the most that it may take.
    """

    title: str
    work: Callable[["Sitting"], tuple[str, Any]]
    seconds: float
    gpus: int = 0


@dataclass
class Sitting:
    """The device, the time that is left, and what has been found so far."""

    device: str  # cuda or cpu
    gpus: int
    out: Path
    deadline: float  # time.monotonic()
    limit: float = 0.0  # of the part that runs
    figures: dict[str, Any] = field(default_factory=dict)  # of parts, by title
    sections: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def small(self) -> bool:
        """Whether this only tries the report."""
        return self.device == "cpu"

    def left(self) -> float:
        """Seconds for the part that runs."""
        return min(self.deadline, self.limit) - time.monotonic()

    def run(self, *command: object, **env: str) -> str:
        """What a command of this Python prints. Raises: `Failed`."""
        line = [sys.executable, *map(str, command)]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.small else {}
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                line,
                cwd=ROOT,
                env=os.environ | {"OMP_WAIT_POLICY": "passive"} | hidden | env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
            try:
                process.wait(max(1.0, self.left()))
            except subprocess.TimeoutExpired:
                raise Failed("it did not end in the time that there was") from None
            finally:
                end(process)
            out.seek(0)
            errors.seek(0)
            text, wrong = out.read(), errors.read()
        if process.returncode:
            lines = [one for one in (wrong or text).splitlines() if one.strip()]
            why = f"exit code {process.returncode}: {lines[-1] if lines else 'silent'}"
            raise Failed(why, text)
        return text


def end(process: subprocess.Popen) -> None:
    """End a command with all that it has started: it gets some seconds to do so by itself."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


def sit(sitting: Sitting, parts: list[Part]) -> None:
    """Run ``parts`` in their order; after each, the files hold what there is."""
    for part in parts:
        left = sitting.deadline - time.monotonic()
        if part.gpus > sitting.gpus and not (sitting.small and part.gpus == 1):
            text = f"Left out: needs {part.gpus} GPUs, and there are {sitting.gpus}."
        elif left < LEAST:
            text = "Left out: no time was left (`--minutes`)."
        else:
            print(f"... {part.title} ({left:.0f} s left)", file=sys.stderr, flush=True)
            text = _one(sitting, part)
        sitting.sections.append(f"## {part.title}\n\n{text}")
        write(sitting)


def _one(sitting: Sitting, part: Part) -> str:
    began = time.monotonic()
    sitting.limit = began + part.seconds
    try:
        text, figures = part.work(sitting)
    except Exception as fault:  # whatever it is, the next part may do
        sitting.failed.append(part.title)
        why = str(fault) if isinstance(fault, (Failed, UserError)) else repr(fault)
        print(f"{part.title} failed: {why}", file=sys.stderr, flush=True)
        return f"**Failed:** {why}"
    sitting.figures[part.title] = figures
    return f"{text}\n\n({time.monotonic() - began:.0f} s)"


def machine(device: str) -> dict[str, str]:
    """What the report was made on."""
    found = provenance.describe(torch.device(device))
    found["cores"] = str(len(os.sched_getaffinity(0)))
    found["python"] = sys.version.split()[0]
    if device == "cuda":
        found["gpus"] = str(torch.cuda.device_count())
        found["cuda"], found["cudnn"] = str(torch.version.cuda), str(torch.backends.cudnn.version())
        memory = torch.cuda.get_device_properties(0).total_memory
        found["gpu_memory_gib"] = f"{memory / 2**30:.1f}"
    return found


def write(sitting: Sitting) -> None:
    """Write gpu_report.md and gpu_report.json."""
    about = machine(sitting.device)
    lines = "\n".join(f"- {name}: {value}" for name, value in about.items())
    warning = "\n\n**Tried on the CPU: no figure here means anything.**" if sitting.small else ""
    head = f"# GPU report\n\n{date.today():%d %B %Y}, `bash scripts/gpu_report.sh`{warning}\n\n"
    text = "\n\n".join([head + lines, *sitting.sections]) + "\n"
    (sitting.out / "gpu_report.md").write_text(text)
    content = {"machine": about, "failed": sitting.failed, "parts": sitting.figures}
    (sitting.out / "gpu_report.json").write_text(json.dumps(content, indent=1))


def main(argv: list[str] | None = None) -> int:
    from gpu_report.parts import PARTS  # which import from here

    parser = argparse.ArgumentParser(description=__doc__)
    above_0 = number(float, 0, exclusive=True)
    parser.add_argument("--minutes", type=above_0, default=9.0, help="(%(default)g)")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="(%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        if args.device == "cuda" and not gpus:
            raise UserError("there is no GPU here that torch can use (--device cpu: try without)")
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        return report(UserError(f"cannot write to {args.out}: {fault.strerror}"))
    except UserError as error:
        return report(error)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and `end`
    deadline = time.monotonic() + 60 * args.minutes
    count = gpus if args.device == "cuda" else 0
    sitting = Sitting(args.device, count, args.out.resolve(), deadline)
    sit(sitting, PARTS)
    print(f"{args.out}/gpu_report.md" + "".join(f"; failed: {one}" for one in sitting.failed))
    return 1 if sitting.failed else 0


if __name__ == "__main__":
    go_on_without_reader()
    # One module, whether it is run or imported by the parts.
    sys.modules["gpu_report.report"] = sys.modules["__main__"]
    sys.exit(main())
