"""The options of a study, and the runs that follow from them."""

import argparse
import importlib
import itertools
import re
from pathlib import Path

from hosts import Host
from studies.runs import StudyRun

from utils.model.options import TO_THE_END
from utils.start.errors import UserError
from utils.start.option_types import Options

ROOT = Path(__file__).resolve().parents[2]
LARGEST = "largest"  # value of the study's -b
OPEN_END = 100_000  # epochs of a run that --hours ends
ONE_NODE = ("imagenet_nd.py", "imagenet_dp.py")
# Options of the script that the study sets itself, and the study's option for each, if any.
OWN = {"--name": "--name", "--train-time": "--hours", "--lr-scaling": "--lr-scaling"}
OWN |= dict.fromkeys(("-n", "--nodes", "--world-size"), "--nodes")
OWN |= {name: name for name in ("--try", "--dry-run", "--simulate", "--slurm", "--sync", "--link")}
OWN |= {name: name for name in ("--hours", "--seeds", "--vary", "--logbook", "--no-doctor")}
OWN |= dict.fromkeys(
    ("-nr", "--node-rank", "--rank", "--dist-url", "--resume", "-e", "--evaluate", "--dummy")
)


class Study(argparse.Namespace):
    """The values of a study's own options."""

    # ---- where: one of the first three
    hosts: Path | None
    simulate: int | None  # nodes
    slurm: str | None  # options of sbatch
    machines: list[Host]  # of the file ``hosts``
    link: str | None  # rate, such as 300mbit
    ssh: str
    env: list[tuple[str, str]] | None
    sync: bool
    no_doctor: bool

    # ---- what
    name: str  # "" until `plan` takes that of the model
    nodes: list[int]
    hours: float | None
    seeds: list[int] | None
    vary: list[list[tuple[str, str]]]  # for each --vary: pairs of an option and a value
    global_batch: int | None
    batch_size: str | None  # a number, or `LARGEST`
    lr_scaling: str
    logbook: Path
    store: str | None
    dry_run: bool
    tiny: bool  # --try
    overrides: list[str]  # options of the script that come after all others


def plan(study: Study, training: list[str]) -> list[StudyRun]:
    """The runs, in the order in which they are trained. Raises: `UserError`."""
    check_words(study, training)
    planned: dict[str, StudyRun] = {}
    for seed, nodes in itertools.product(study.seeds or [None], study.nodes):
        for variation in itertools.product(*study.vary):
            run = plan_run(study, training, seed, nodes, variation)
            if run.name in planned:
                text = "give each number and value once"
                raise UserError(f"two runs would be called {run.name}: {text}")
            planned[run.name] = run
    return list(planned.values())


def check_words(study: Study, training: list[str]) -> None:
    """Raise `UserError` if one of the script's options is the study's own."""
    own = OWN | ({"--seed": "--seeds"} if study.seeds else {})
    own |= dict.fromkeys(("-b", "--b", "--batch-size"), "-b") if study.batch_size else {}
    own |= {"--store": "--store"} if study.store else {}
    for option, value in itertools.chain(*study.vary):
        if option in (*OWN, "--seed", "--output-dir"):
            raise UserError(f"--vary {option}={value} is not possible: the study sets it")
        own[option] = f"--vary {option.lstrip('-')}"
    script, *options = training
    for word in (one.partition("=")[0] for one in options):
        if word in own:
            how = f"give {own[word]} before {script}" if own[word] else "leave it out"
            raise UserError(f"the study sets {word}: {how}")


def plan_run(
    study: Study,
    training: list[str],
    seed: int | None,
    nodes: int,
    variation: tuple[tuple[str, str], ...],
) -> StudyRun:
    """The run of ``training`` with this seed, on so many nodes, with the varied options.

    The first one gives a study without a name that of its model. Raises: `UserError`.
    """
    script, rest = dict(variation).get("--script", training[0]), training[1:]
    if not re.fullmatch(r"imagenet_\w+\.py", script) or not (ROOT / script).is_file():
        raise UserError(f"{script} is not a training script in {ROOT}")
    if script in ONE_NODE and nodes > 1:
        raise UserError(f"{script} trains on one node: use imagenet_ddp.py, or --nodes 1")
    more = [word for pair in variation if pair[0] != "--script" for word in pair]
    words = [*rest, *more, *study.overrides]
    options = script_options(script, words, local=bool(study.simulate))
    study.name = study.name or options.arch
    more += batch_and_rate(study, script, options, nodes)
    more += ["--seed", str(seed)] if seed is not None else []
    more += ["--train-time", f"{study.hours:g}"] if study.hours else []
    more += ["--store", study.store] if study.store else []
    more += ["-b", study.batch_size] if study.batch_size not in (None, LARGEST) else []
    more += study.overrides
    parts = [study.name, f"{nodes}node{'s' * (nodes > 1)}"]
    parts += [f"{o.lstrip('-')}-{v.removesuffix('.py')}" for o, v in variation]
    parts += [f"seed{seed}"] if seed is not None else []
    name = re.sub(r"[^\w.+-]", "-", "_".join(parts))
    # A Slurm job trains in the repository's root, wherever the study was started.
    place = Path() if study.slurm is None or Path.cwd() == ROOT else ROOT
    # The study's own options come last, so that they override the others.
    limits = without_limit(study, [*rest, *more])
    return StudyRun(
        name,
        nodes,
        group=", ".join(f"{option.lstrip('-')} {value}" for option, value in variation),
        seed=seed,
        command=(script, *limits, *rest, *more, "--name", name, "--resume", "auto"),
        folder=place / options.output_dir / name,
        data=options.data,
        epochs=OPEN_END if limits else options.epochs,
        hours=study.hours,
        ends_with_epochs=options.lr_schedule in TO_THE_END or bool(options.progressive),
    )


def script_options(script: str, words: list[str], local: bool) -> Options:
    """Parse ``words`` as the script does. Raises: `UserError`."""
    from utils import options  # of all rooms; --help needs none

    parser = importlib.import_module(script.removesuffix(".py")).parser()
    parser.prog = script
    return options.parse(parser, words, local=local)


def batch_and_rate(study: Study, script: str, options: Options, nodes: int) -> list[str]:
    """The options that keep the global batch, or scale the learning rate with it."""
    if study.global_batch:
        return ["-b", str(batch_per_process(study, study.global_batch, script, options, nodes))]
    if nodes > study.nodes[0] and study.lr_scaling != "none":
        from utils.model.optim import REFERENCE_BATCH, scale_lr  # imports torch

        batch = REFERENCE_BATCH * nodes / study.nodes[0]
        return ["--lr", f"{scale_lr(options.lr, batch, study.lr_scaling):.6g}"]
    return []


def without_limit(study: Study, words: list[str]) -> list[str]:
    """Return the options that leave the end of a run to --hours alone, with a learning rate that
    does not depend on how many epochs a run reaches; none if ``words`` decide about epochs."""
    given = {word.partition("=")[0] for word in words} & {"--epochs", "--recipe"}
    if not study.hours or given:
        return []
    return ["--epochs", str(OPEN_END), "--lr-schedule", "constant"]


def batch_per_process(
    study: Study, global_batch: int, script: str, options: Options, nodes: int
) -> int:
    """Return the -b that gives ``global_batch`` on ``nodes``. Raises: `UserError`."""
    slots = study.machines[0].slots if study.machines else None
    each = getattr(options, "gpus", None) or slots  # not each script has -g
    each = 1 if study.simulate or script in ONE_NODE else each
    if not each:
        raise UserError(
            "--global-batch needs a node's number of processes: write slots=N after each host, "
            "or -g N after the script's name"
        )
    batch, rest = divmod(global_batch, nodes * each)
    if rest:
        raise UserError(f"--global-batch {global_batch} is not a multiple of {nodes * each}")
    return batch
