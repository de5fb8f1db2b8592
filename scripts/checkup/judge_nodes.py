"""Are the nodes equipped alike? Judges versions, GPUs and data sets."""

from collections.abc import Iterator

from checkup.findings import FAULT, OK, WARNING, Checkup, Finding

from utils.launch import agreement


def judge(check: Checkup) -> Iterator[Finding]:
    """All findings about what is on the nodes."""
    yield from _versions(check)
    yield from _gpus(check)
    yield from _data(check)


def _versions(check: Checkup) -> Iterator[Finding]:
    found = {rank: facts["versions"] for rank, facts in check.facts.items()}
    for rank, one in found.items():
        if one["torch"] is None:
            yield Finding(
                "torch",
                FAULT,
                f"{check.node(rank)} has no torch in the Python that runs the doctor",
                "nothing can be trained without it",
                "activate the environment there (bash scripts/quickstart.sh makes one)",
                [rank],
            )
    comparisons = (
        ("this code", "code", FAULT, "nodes with different code train different models, or hang"),
        ("torch", "torch", FAULT, "different releases of torch may not understand each other"),
        ("NCCL", "nccl", FAULT, "NCCL refuses to work with another version of itself"),
        ("Python", "python", WARNING, "objects are pickled on one node and unpickled on others"),
    )
    on_gpus = any(facts["gpus"]["names"] for facts in check.facts.values())
    equal = True
    for title, key, level, why in comparisons:
        values = [
            (check.node(rank), one[key] if key == "code" else _release(key, one[key]))
            for rank, one in found.items()
            if one["torch"] or key not in ("torch", "nccl")
        ]
        if len(values) < 2:
            continue
        sentence = agreement.unlike([(node, {title: value}) for node, value in values])
        if sentence:
            equal = False
            what, _, remedy = sentence.rpartition(": ")
            if title == "NCCL" and not on_gpus:
                level = WARNING  # noqa: PLW2901
            yield Finding(title.split()[-1].lower(), level, what, why, remedy, list(found))
    if equal and found:
        one = found[0]
        commit = f" ({one['commit']})" if one["commit"] else ""
        alike = "the same on all nodes: " if len(found) == check.nodes > 1 else ""
        yield Finding(
            "versions",
            OK,
            f"versions: {alike}this code{commit}, Python {one['python']}, torch {one['torch']}, "
            f"NCCL {one['nccl'] or 'unknown'}",
        )


def _release(key: str, version: str | None) -> str:
    return version or "none" if key == "nccl" else agreement.release(version)


def _gpus(check: Checkup) -> Iterator[Finding]:
    described = {}
    for rank, facts in check.facts.items():
        gpus = facts["gpus"]
        torch = check.torch.get(rank, {}).get("torch")
        problem = gpus.get("error")
        if torch and len(gpus["names"]) > torch["gpus"]:
            problem = (
                f"nvidia-smi shows {len(gpus['names'])} GPUs (driver {gpus['driver']}), but torch "
                f"{facts['versions']['torch']} (built for CUDA {torch['built_for']}) uses "
                f"{torch['gpus']}"
            )
        if problem:
            yield Finding(
                "gpus",
                FAULT,
                f"{check.node(rank)}: {problem}",
                "training would use the CPU there, or fail",
                "install a driver that is new enough for torch, or a torch built for that driver",
                [rank],
            )
            continue
        kinds = sorted(set(gpus["names"]))
        described[rank] = (
            f"{len(gpus['names'])} x {' and '.join(kinds)}, driver {gpus['driver']}"
            if kinds
            else "none (training on the CPU, with gloo)"
        )
    if len(set(described.values())) > 1:
        listed = "; ".join(f"{check.node(rank)}: {text}" for rank, text in described.items())
        yield Finding(
            "gpus",
            WARNING,
            f"GPUs differ between the nodes: {listed}",
            "all processes wait for the slowest at every step; torchrun and -g need the same "
            "number on every node",
            "train on equal nodes, or use as many GPUs on each as the smallest node has",
            list(described),
        )
    elif described:
        yield Finding("gpus", OK, f"GPUs of each node: {next(iter(described.values()))}")


def _data(check: Checkup) -> Iterator[Finding]:
    usable = {}
    for rank, facts in check.facts.items():
        data = facts["data"]
        if "error" in data:
            yield Finding(
                "data",
                FAULT,
                f"{check.node(rank)}: {data['error']}",
                "a training could not start there",
                "put the whole data set there (--data names its folder)",
                [rank],
            )
        else:
            usable[rank] = data
    good = True
    for part in ("train", "val"):
        parts = {rank: data["parts"][part] for rank, data in usable.items()}
        if len({one["fingerprint"] for one in parts.values()}) > 1:
            good = False
            listed = "; ".join(f"{check.node(r)} has {p['fingerprint']}" for r, p in parts.items())
            first = agreement.first_difference(
                [(check.node(rank), one["of_classes"]) for rank, one in parts.items()]
            )
            yield Finding(
                "data",
                FAULT,
                f"the {part} images differ: {'; '.join(filter(None, (listed, first)))}",
                "each node takes its share of the images by their numbers in its own list: if the "
                "lists differ, some images are seen twice and some never (training refuses to "
                "start)",
                "copy the data set to the wrong node again (rsync -a --delete DATA/ NODE:DATA/)",
                list(parts),
            )
        elif len({one["sizes"] for one in parts.values()}) > 1:
            good = False
            listed = "; ".join(f"{p['bytes']:,} bytes on {check.node(r)}" for r, p in parts.items())
            yield Finding(
                "data-sizes",
                WARNING,
                f"the {part} images have the same names but different sizes: {listed}",
                "one copy is damaged, or was made in another way (shrunk, for example)",
                "compare the copies: rsync -an --checksum --itemize-changes DATA/ NODE:DATA/",
                list(parts),
            )
    if usable and good:
        counts = [usable[min(usable)]["parts"][part]["fingerprint"] for part in ("train", "val")]
        alike = " the same on all nodes," if len(usable) == check.nodes > 1 else ""
        yield Finding("data", OK, f"data set:{alike} train {counts[0]}, val {counts[1]}")
