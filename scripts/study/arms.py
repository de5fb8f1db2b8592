"""The arms of a study: which trainings it consists of, and the options of each."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from utils.errors import UserError
from utils.model.schedules import REFERENCE_BATCH, USUAL_LR, scale_lr

ONE_NODE = ("imagenet_nd.py", "imagenet_dp.py")
DEFAULT_BATCH = 128  # what the training script takes where nothing else is typed
# Options of the training scripts that stand alone, or may: what follows may be DATA.
FLAGS = (
    *("--pretrained", "--dummy", "--channels-last", "--no-channels-last", "--sync-bn", "-e"),
    *("--evaluate", "--profile", "--delay-allreduce", "--spot-notice", "--freeze"),
    *("--zero-init-gamma", "--activation-checkpointing"),
)
# What the study itself decides, and where to say it instead.
OWN = {
    ("--name",): "give --name before the --: an arm's run is NAME_2nodes, say",
    ("--resume",): "leave it out: each arm resumes from its own snapshot",
    ("--train-time",): "give --hours before the --",
    ("--lr-scaling",): "give --lr-scaling before the --: the rate is that of the fewest nodes",
    ("-n", "--world-size"): "give --nodes before the --",
    ("-nr", "--rank"): "leave it out: each node gets its own",
    ("--dist-url",): "leave it out: the study says where nodes meet",
    ("-e", "--evaluate"): "leave it out: a study trains",
    ("--dummy",): "leave it out: a study trains",
}
SPELLINGS = (
    *(("-a", "--arch"), ("-b", "--batch-size", "--b"), ("-j", "--workers"), ("-p", "--print-freq")),
    *(("--lr", "--learning-rate"), ("--wd", "--weight-decay"), ("-g", "--gpus")),
)


@dataclass(frozen=True)
class Wish:
    """What the command line asks for.

    ``vary``: option (without dashes) to values, in the order typed. ``processes``: per node; None
    where each node starts one per GPU.
    """

    name: str
    nodes: tuple[int, ...]
    training: tuple[str, ...]
    hours: float | None = None
    vary: dict[str, tuple[str, ...]] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    global_batch: int | None = None
    lr_scaling: str = "sqrt"
    processes: int | None = None


@dataclass(frozen=True)
class Arm:
    """One training. ``command``: script, options, DATA, as for one node; without the node's own."""

    name: str
    nodes: int
    variation: tuple[tuple[str, str], ...]
    seed: int | None
    command: tuple[str, ...]

    @property
    def group(self) -> str:
        """What the arm's curve is called: the varied options, in words; empty if there are none."""
        return ", ".join(f"{option} {value}" for option, value in self.variation)

    @property
    def run(self) -> Path:
        """Its run directory."""
        return Path(option(self.command, "--output-dir") or "runs") / self.name


def spellings(name: str) -> tuple[str, ...]:
    """All ways to write the option ``name`` (with its dashes)."""
    return next((all_ways for all_ways in SPELLINGS if name in all_ways), (name,))


def option(words: Sequence[str], name: str) -> str | None:
    """The value of an option among ``words``, the last one if there are several; None without."""
    return _take(words, name)[0]


def without(words: Sequence[str], name: str) -> list[str]:
    """``words`` less the option ``name`` and its value."""
    return _take(words, name)[1]


def _take(words: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    names, value, rest = spellings(name), None, []
    waiting = False
    for word in words:
        head, equals, tail = word.partition("=")
        if waiting:
            value, waiting = word, False
        elif word in names:
            waiting = True
        elif equals and head in names:
            value = tail
        elif any(len(n) == 2 and re.fullmatch(rf"{n}\d+", word) for n in names):
            value = word[2:]
        else:
            rest.append(word)
    return value, rest


def is_given(words: Sequence[str], name: str) -> bool:
    """Whether an option (with its dashes) is among ``words``."""
    return len(_take(words, name)[1]) < len(words)


def data_of(training: Sequence[str]) -> str | None:
    """DATA among the words of a training, if it is the last of them; None without."""
    if len(training) < 2 or training[-1].startswith("-"):
        return None
    before = training[-2]
    is_value = before.startswith("-") and "=" not in before and before not in FLAGS
    if before == "--pretrained" and Path(training[-1]).is_file():
        return None  # FILE
    return None if is_value and len(training) > 2 else training[-1]


def plan(wish: Wish) -> list[Arm]:
    """The arms in the order in which they are trained. Raises: `UserError`."""
    _check(wish)
    options = [[(name, value) for value in values] for name, values in wish.vary.items()]
    arms = [
        _arm(wish, nodes, variation, seed)
        for seed in wish.seeds or (None,)
        for nodes in wish.nodes
        for variation in itertools.product(*options)
    ]
    names = [arm.name for arm in arms]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two arms would be called {twice[0]}: say each value of --vary once")
    return arms


def _check(wish: Wish) -> None:
    if not re.fullmatch(r"[\w.+-]+", wish.name) or wish.name in (".", ".."):
        raise UserError(f"--name {wish.name} is not a plain name (letters, digits, . _ + -)")
    for names, what in OWN.items():
        if any(is_given(wish.training, name) for name in names):
            raise UserError(f"{names[-1]} among the training's options: {what}")
    for name in wish.vary:
        dashed = dash(name)
        if dashed in sum(OWN, ()) or dashed in ("--seed", "--output-dir"):
            raise UserError(f"--vary {name}=... is not possible: a study decides that itself")
        if name != "script" and is_given(wish.training[1:], dashed):
            raise UserError(f"{dashed} is varied: leave it out of the training's options")
    if wish.seeds and is_given(wish.training, "--seed"):
        raise UserError("--seeds and the training's --seed exclude each other")
    varied = [dash(name) for name in wish.vary]
    if wish.global_batch and (is_given(wish.training, "-b") or set(varied) & set(spellings("-b"))):
        raise UserError("--global-batch gives each process its share: leave out -b")
    if wish.global_batch and wish.processes is None:
        raise UserError(
            "--global-batch needs to know the processes of a node: write slots=N behind each host, "
            "-g N among the training's options, or --gpus-per-node=N in --slurm"
        )
    scripts = wish.vary.get("script", wish.training[:1])
    if alone := [script for script in scripts if script in ONE_NODE and max(wish.nodes) > 1]:
        raise UserError(f"{alone[0]} trains on one node: use imagenet_ddp.py, or --nodes 1")


def dash(name: str) -> str:
    """An option's name with its dashes."""
    return f"-{name}" if len(name) == 1 else f"--{name}"


def _arm(wish: Wish, nodes: int, variation: tuple[tuple[str, str], ...], seed: int | None) -> Arm:
    script, rest = wish.training[0], list(wish.training[1:])
    own: list[str] = []
    for name, value in variation:
        if name == "script":
            script = value
        else:
            own += [dash(name), value]
    if wish.global_batch:
        own += ["-b", str(_share_of_batch(wish, script, nodes))]
    elif nodes > wish.nodes[0] and wish.lr_scaling != "none":
        optimizer = option(own, "--optimizer") or option(rest, "--optimizer") or "sgd"
        usual = USUAL_LR.get(optimizer, math.nan)  # without one, the training asks for --lr
        lr = float(option(own, "--lr") or option(rest, "--lr") or usual)
        own, rest = without(own, "--lr"), without(rest, "--lr")
        batch = REFERENCE_BATCH * nodes / wish.nodes[0]
        own += ["--lr", f"{scale_lr(lr, batch, wish.lr_scaling):.6g}"]
    if seed is not None:
        own += ["--seed", str(seed)]
    if wish.hours is not None:
        own += ["--train-time", f"{wish.hours:g}"]
    words = [wish.name, f"{nodes}node{'s' * (nodes > 1)}"]
    words += [_plain(f"{name}-{value.removesuffix('.py')}") for name, value in variation]
    words += [f"seed{seed}"] if seed is not None else []
    name = "_".join(words)
    # The study's own options come first: DATA may be the last word, or missing.
    command = (script, "--name", name, "--resume", "auto", *own, *rest)
    return Arm(name, nodes, variation, seed, command)


def _plain(text: str) -> str:
    return re.sub(r"[^\w.+-]", "-", text)


def _share_of_batch(wish: Wish, script: str, nodes: int) -> int:
    """-b for a global batch that stays the same."""
    processes = 1 if script in ONE_NODE else nodes * wish.processes
    if wish.global_batch % processes:
        raise UserError(
            f"--global-batch {wish.global_batch} cannot be shared by {processes} processes: "
            f"choose a multiple of {processes}"
        )
    return wish.global_batch // processes
