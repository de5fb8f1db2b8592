"""What the name of a run's folder says, where the event file does not."""

import re
from collections.abc import Sequence
from typing import Any

FAMILIES = (
    *("alexnet", "convnext", "deit", "densenet", "dpn", "efficientnet", "googlenet", "inception"),
    *("maxvit", "mnasnet", "mobilenet", "nasnet", "pnasnet", "regnet", "resnest", "resnet"),
    *("resnext", "se_resne", "senet", "seresne", "shufflenet", "squeezenet", "swin", "vgg"),
    *("vit_", "wide_resnet", "xception"),
)
_DATE = r"(?:[A-Z][a-z]{2}\d\d?_\d\d-\d\d-\d\d_)?"
# <month><day>_<time>_<host>_<arch>_gpux<processes>_b<batch>_cpu<workers>_<mode>, as
# utils/run/tracking.py makes it up, and older suites did
_AUTOMATIC = re.compile(rf"{_DATE}(?P<front>.*?)[_-]?gpux(?P<gpus>\d+)(?P<rest>.*)")
_ARCH = re.compile(rf"(?:^|[_.-])((?:{'|'.join(FAMILIES)}).*)$")
_GPUS = re.compile(r"(?:^|[_-])(\d+)[_-]?gpus?(?:$|[_-])|(?:^|[_-])gpus?[_-]?(\d+)(?:$|[_-])", re.I)
_NODES = re.compile(
    r"(?:^|[_-])(\d+)[_-]?nodes?(?:$|[_-])|(?:^|[_-])nodes?[_x-]?(\d+)(?:$|[_-])", re.I
)


def facts(names: Sequence[str]) -> dict[str, Any]:
    """What the first of ``names`` that says anything says; {} if none does.

    Keys, as far as it has them: gpus, nodes (numbers), batch (the number given by ``-b``), workers,
    arch, mode, and automatic (true for a name that a training script has generated).
    """
    for name in names:
        found = _of_automatic(name) or _of_words(name)
        if found:
            return found
    return {}


def _of_automatic(name: str) -> dict[str, Any]:
    match = _AUTOMATIC.search(name)
    if not match:
        return {}
    found: dict[str, Any] = {"gpus": int(match["gpus"]), "automatic": True}
    # SummaryWriter puts the date and the host in front; neither has an underscore, as a rule.
    arch = _ARCH.search(match["front"])
    if arch:
        found["arch"] = arch[1]
    elif "_" in match["front"]:
        found["arch"] = match["front"].partition("_")[2]
    rest = match["rest"]
    for key, pattern in (("batch", r"_bs?(\d+)"), ("workers", r"_cpu(\d+)")):
        if number := re.search(pattern + r"(?=_|$)", rest):
            found[key] = int(number[1])
            rest = rest[: number.start()] + rest[number.end() :]
    if nodes := _NODES.search(rest):
        found["nodes"] = int(nodes[1] or nodes[2])
        rest = rest[: nodes.start()] + rest[nodes.end() :]
    if rest.strip("_-"):
        found["mode"] = rest.strip("_-")
    return found


def _of_words(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, pattern in (("gpus", _GPUS), ("nodes", _NODES)):
        if match := pattern.search(name):
            found[key] = int(match[1] or match[2])
    return found


def natural(text: str) -> list[Any]:
    """Sort key by which run10 comes after run9."""
    return [
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"(\d+)", text)
        if part
    ]
