"""The parts of the GPU report, the most important first."""

import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from bench import photographs
from compare.table import markdown_table
from gpu_report.report import ROOT, Failed, Part, Sitting
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from utils.launch import supervise
from utils.model import models

STEP = "The step"
PICTURES = 400  # files, each under many names


def _tests(sitting: Sitting) -> tuple[str, Any]:
    """All tests marked cuda."""
    try:
        out = sitting.run("-m", "pytest", "-m", "cuda", "tests", "-p", "no:cacheprovider")
    except Failed as fault:
        if "exit code 5" in str(fault):  # pytest: none was selected
            return "No test is marked `cuda`.", {}
        named = [line for line in fault.out.splitlines() if line.startswith(("FAILED", "ERROR"))]
        raise Failed("; ".join([str(fault), *named])) from None
    last = out.strip().splitlines()[-1]
    return f"`pytest -m cuda`: {last}", {"summary": last}


# ---- the step


def _model(sitting: Sitting) -> list[str]:
    if sitting.small:
        return ["-a", "resnet18", "-b", "4", "--image-size", "32"]
    return ["-a", "resnet50", "-b", "256", "--image-size", "224"]


def _bench(sitting: Sitting, name: str, cases: str, *more: str) -> dict[str, Any]:
    """What bench_step.py measures; cases that failed are missing. Raises: `Failed`."""
    file = sitting.out / f"{name}.json"
    steps = ("2", "1") if sitting.small else ("20", "10")
    sizes = [*_model(sitting), "--steps", steps[0], "--warm-up", steps[1], "--rounds", "1"]
    file.unlink(missing_ok=True)
    try:
        sitting.run("scripts/bench_step.py", *sizes, "--cases", cases, *more, "--json", file)
    except Failed:
        if not file.exists():  # else some cases are done
            raise
    found = json.loads(file.read_text())["found"]
    return {name: rounds for name, rounds in found.items() if rounds}


def _step(sitting: Sitting) -> tuple[str, Any]:
    """The scripts' steps and the peers' loops on synthetic batches."""
    half = "bf16" if sitting.small else "fp16"  # float16 on a CPU takes for ever
    cases = f"examples+{half}+channels_last,torchvision+{half},nd+{half},ddp+{half}"
    cases += (
        "" if sitting.small else f",fsdp+{half},O2,nd+bf16,examples+off,nd+off,nd+{half}+compile"
    )
    cases += ",dp+fp16" if sitting.gpus > 1 else ""
    found = _bench(sitting, "step", cases)
    images = {name: rounds[0]["images_per_s"] for name, rounds in found.items()}
    flops, reached = _flops_per_image(sitting), _product_flops(sitting)
    best = max((rate for name, rate in images.items() if name in cases.split(",")[:2]), default=0.0)
    rows = []
    for name, (one,) in found.items():
        rows.append(
            [
                name,
                f"{one['images_per_s']:.0f}",
                f"{one['ms']:.2f}",
                f"{one['host_ms']:.2f}",
                f"{one['memory_bytes'] / 2**30:.2f}",
                f"{one['images_per_s'] * flops / reached:.1%}",
                f"{one['images_per_s'] / best:.2f}" if best else "-",
            ]
        )
    head = [
        "case",
        "images/s",
        "ms per step",
        "host ms",
        "GiB",
        "of a product's FLOP/s",
        "to peers",
    ]
    what = (
        f"{' '.join(_model(sitting))}, synthetic batches on the device. A large product of 16-bit "
        f"matrices reaches {reached / 1e12:.1f} TFLOP/s here. To peers: to the better of the first "
        "two rows, the usual loops in 16 bits."
    )
    figures = {"cases": found, "flops_per_image": flops, "product_flops": reached}
    return f"{markdown_table(head, rows)}\n\n{what}", figures


def _flops_per_image(sitting: Sitting) -> float:
    """Of a step: forward, and twice that backward."""
    arch, size = _model(sitting)[1], int(_model(sitting)[-1])
    with torch.device("meta"):
        model, images = models.get_model(arch), torch.empty(1, 3, size, size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(images)
    return 3.0 * counter.get_total_flops()


def _product_flops(sitting: Sitting) -> float:
    """What a product of large matrices reaches, FLOP/s."""
    n, times = (512, 3) if sitting.small else (8192, 20)
    kind = torch.bfloat16 if sitting.small else torch.float16
    a = torch.randn(n, n, device=sitting.device).to(kind)

    def wait() -> float:
        if sitting.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for _ in range(3):
        a @ a
    began = wait()
    for _ in range(times):
        a @ a
    return 2.0 * n**3 * times / (wait() - began)


def _waits(sitting: Sitting) -> tuple[str, Any]:
    """Operations that make the host wait for the device, within the step and the loop around it."""
    cases = {"nd": ("imagenet_nd.py", "--amp", "fp16"), "bf16": ("imagenet_nd.py", "--amp", "bf16")}
    cases["O2"] = ("imagenet_ddp_apex.py", "--opt-level", "O2", "--amp-impl", "torch")
    cases["fsdp"] = ("imagenet_fsdp.py", "--amp", "fp16")
    if sitting.small:
        cases = {"nd": ("imagenet_nd.py",)}
    found = {}
    for name, (script, *options) in cases.items():
        run = () if "nd" in script else ("-m", "torch.distributed.run", "--standalone")
        line = (*run, "scripts/bench/step_case.py", script, "--warm-up", "3", "--steps", "12")
        out = sitting.run(*line, "--count-waits", "--", *_model(sitting), *options)
        found[name] = json.loads(out.strip().splitlines()[-1])["waits"]
    said = "; ".join(f"{name}: {len(waits)}" for name, waits in found.items())
    places = sorted({place for waits in found.values() for place in waits})
    where = "\n".join(f"- {place}" for place in places)
    return f"Waits in 12 steps by `torch.cuda.set_sync_debug_mode`: {said}.\n\n{where}", found


# ---- from files


def _pictures(sitting: Sitting, images: int) -> Path:
    """A data set of files like ImageNet's: of real photographs where some are installed."""
    root = sitting.out / "pictures"
    if not root.is_dir():
        sources = photographs.find()
        if sources:
            made = photographs.make(sitting.out, sources, 20 if sitting.small else PICTURES)
            files = sorted((made / "train").rglob("*.JPEG"))
        else:
            files = _drawn(sitting.out / "drawn", 20 if sitting.small else PICTURES)
        for part, count in (("train", images), ("val", max(16, images // 50))):
            for i in range(count):
                link = root / part / f"class_{i % 10}" / f"{i:06}.JPEG"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(files[i % len(files)])
    return root


def _drawn(folder: Path, count: int) -> list[Path]:
    """Smooth noise of 500 x 375 pixels, about 100 KB in a file."""
    folder.mkdir(parents=True, exist_ok=True)
    source, files = random.Random(0), []
    for number in range(count):
        noise = Image.frombytes("RGB", (250, 188), source.randbytes(3 * 250 * 188))
        files.append(folder / f"{number}.JPEG")
        noise.resize((500, 375), Image.BICUBIC).save(files[-1], "JPEG", quality=70)
    return files


def _input(sitting: Sitting) -> tuple[str, Any]:
    """Training from files with fewer and fewer workers: what the GPU eats."""
    cores = supervise.usable_cores()
    data = _pictures(sitting, 48 if sitting.small else 20_000)
    counts = [1] if sitting.small else sorted({cores, max(1, cores // 2), max(1, cores // 4)})
    found, rows = {}, []
    for workers in reversed(counts):
        name = f"input_{workers}"
        where = ("--output-dir", sitting.out / "runs", "--name", name, data)
        amp = () if sitting.small else ("--amp", "fp16")
        options = ("-j", workers, "--epochs", "1", "--lr", "0.01", *amp, "-p", "10")
        sitting.run("imagenet_nd.py", *_model(sitting), *options, *where)
        one = json.loads((sitting.out / "runs" / name / "summary.json").read_text())
        found[workers] = {key: one[key] for key in ("images_per_s", "data_s", "compute_s")}
        share = one["data_s"] / (one["data_s"] + one["compute_s"])
        rate = one["images_per_s"]
        rows.append([str(workers), f"{rate:.0f}", f"{rate / workers:.0f}", f"{share:.1%}"])
    text = markdown_table(["workers", "images/s", "per worker", "waiting for data"], rows)
    cases = sitting.figures.get(STEP, {}).get("cases", {})
    alone = next(
        (cases[name][0]["images_per_s"] for name in ("nd+fp16", "nd+bf16") if name in cases), 0
    )
    if alone:
        each = max(one["images_per_s"] / workers for workers, one in found.items())
        best = max(one["images_per_s"] for one in found.values())
        text += (
            f"\n\nThe step alone: {alone:.0f} images/s, which takes about {alone / each:.1f} "
            f"workers; with {cores} cores training reaches {best / alone:.1%} of it, the start of "
            "the epoch included."
        )
    return text, found


def _snapshot(sitting: Sitting) -> tuple[str, Any]:
    arch = ("-a", "resnet18", "--rounds", "2") if sitting.small else ("-a", "resnet50")
    said = sitting.run("scripts/bench/snapshot_pause.py", *arch).strip()
    return said, said


def _accuracy(sitting: Sitting) -> tuple[str, Any]:
    """A short run that learns, with its curves."""
    data, size = (
        ROOT / "data/fashion",
        ("--image-size", "48", "--val-resize-size", "48", "-b", "256"),
    )
    if sitting.small or not (data / "train").is_dir():
        data, size = sitting.out / "sample", ("--image-size", "32", "-b", "64")
        if not data.is_dir():
            few = ("--train", "20", "--val", "5") if sitting.small else ()
            sitting.run("scripts/prepare_data.py", "sample", data, *few)
    runs = sitting.out / "runs"
    epochs = "1" if sitting.small else "4"
    recipe = (
        "--epochs",
        epochs,
        "--lr",
        "0.1",
        "--lr-schedule",
        "cosine",
        "--warmup-epochs",
        "0.5",
    )
    options = ("-a", "resnet18", *size, *recipe, "--crop-scale", "0.7", "--output-dir", runs)
    sitting.run("imagenet_nd.py", *options, "--name", "accuracy", data)
    one = json.loads((runs / "accuracy" / "summary.json").read_text())
    sitting.run("scripts/compare_runs.py", runs / "accuracy", "--out", sitting.out / "figures")
    text = (
        f"{data.name}, ResNet-18, {one['epochs_done']} epochs: best top-1 "
        f"{one['best_top1']:.2f} %, {one['images_per_s']:.0f} images/s, "
        f"{one['elapsed_seconds']:.0f} s; curves in `figures/`."
    )
    return text, {key: one[key] for key in ("best_top1", "images_per_s", "elapsed_seconds")}


def _nccl(sitting: Sitting) -> tuple[str, Any]:
    """Bandwidth of an all-reduce over all GPUs."""
    run = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={sitting.gpus}")
    out = sitting.run(*run, "scripts/gpu_report/bandwidth.py")
    found = json.loads(out.strip().splitlines()[-1])
    rows = [[f"{one['mb']:g}", f"{one['ms']:.3f}", f"{one['gb_per_s']:.1f}"] for one in found]
    return markdown_table(["MB", "ms", "bus bandwidth, GB/s"], rows), found


PARTS = [
    Part("Tests that need a GPU", _tests, 150),
    Part(STEP, _step, 240),
    Part("Waits", _waits, 90),
    Part("From image files", _input, 150),
    Part("A snapshot", _snapshot, 40),
    Part("Accuracy", _accuracy, 90),
    Part("NCCL", _nccl, 60, gpus=2),
]
