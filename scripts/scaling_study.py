"""Train on 1, 2, 4, ... nodes, one arm after the other, and keep a log book.

    bash scripts/scaling_study.sh HOSTS_FILE --nodes 1,2,4,8 --hours 2 -- SCRIPT OPTIONS DATA
    bash scripts/scaling_study.sh --simulate 2 -- SCRIPT OPTIONS DATA    # on this machine
    bash scripts/scaling_study.sh --slurm='--gpus-per-node=4' --nodes 1,2 -- SCRIPT OPTIONS DATA

An arm is one run: a number of nodes, a value of each --vary option, a seed. If the study is
interrupted, run the same command again: finished arms are not repeated, an unfinished one resumes
from its snapshot.
"""

import argparse
import contextlib
import fcntl
import functools
import importlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/ssh")]

from utils import launch

launch.prepare()  # before torch is imported, which takes seconds

import hosts
import launcher
from bench import namespaces
from compare import pictures, runs, table
from compare.runs import Run

from utils import errors, network
from utils.errors import BAD_INPUT, INTERRUPTED, UserError
from utils.optim import REFERENCE_BATCH, scale_lr
from utils.option_types import count, list_of, number, positive

FINISHED = ("epochs", "desired_acc", "train_time")  # in summary.json: the run did all it was asked
LARGEST = "largest"  # as -b of the study
FOUND = re.compile(r"largest batch per GPU: (\d+)")  # the last line of a script with --find-batch
# A line of training in the log, but no epoch's last one, after which evaluation begins.
STEP = re.compile(r"Epoch (\d+)/(\d+) step +(\d+)/(?!\3\s)(\d+)\s")
ONE_NODE = ("imagenet_nd.py", "imagenet_dp.py")
# What the study itself decides, and its own option for that, if there is one.
OWN = {"--name": "--name", "--train-time": "--hours", "--lr-scaling": "--lr-scaling"}
OWN |= dict.fromkeys(("-n", "--world-size"), "--nodes")
OWN |= dict.fromkeys(("-nr", "--rank", "--dist-url", "--resume", "-e", "--evaluate", "--dummy"))
PICTURES = ("overlay", "training_throughput", "scaling", "loss_val_hours", "top1_val_hours", "gpu")
LEGEND = (
    "Learning rate: the highest that was reached. Epoch time: evaluation included, the first epoch "
    "left out if there are others. Epochs at a time: finished by then. Scaling efficiency: epoch "
    "time x processes of the first column, divided by the same of this one. Validation loss and "
    "test figures: of the model in best.pt, which --best-by chooses."
)


@dataclass(frozen=True)
class Arm:
    """One run; ``command`` is script and options, as for one node."""

    name: str
    nodes: int
    group: str  # the varied options
    seed: int | None
    command: tuple[str, ...]
    run: Path
    data: str

    @property
    def is_finished(self) -> bool:
        try:
            summary = json.loads((self.run / "summary.json").read_text())
        except (OSError, ValueError):
            return False
        return summary.get("finished_because") in FINISHED

    @property
    def log(self) -> Path:
        return self.run / "study.log"

    @property
    def begun(self) -> Path:
        """It holds the command with which the arm has begun."""
        return self.run / "study.command"

    @property
    def batch(self) -> int | None:
        """The largest batch per GPU, once it was found."""
        file = self.run / "study.batch"
        return int(file.read_text()) if file.exists() else None

    @property
    def title(self) -> str:
        return f"{self.nodes} Node{'s' * (self.nodes > 1)}"

    @property
    def state(self) -> str:
        """Finished, or the last error in its log."""
        if self.is_finished:
            return "finished"
        text = self.log.read_text(errors="replace") if self.log.is_file() else ""
        return ": ".join(["not finished", *re.findall(r"error: (.*)", text)[-1:]])


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The study's own options, and SCRIPT with its options. Raises: `UserError`."""
    words, training = launcher.split(words)
    parser = hosts.make_parser("scaling_study.sh", __doc__)
    hosts.add_node_options(parser)
    add = parser.add_argument
    add("--sync", action="store_true", help="copy this code to the nodes first")
    add("--no-doctor", action="store_true", help="do not check the nodes before the first arm")
    add("--simulate", type=positive, metavar="N", help="so many processes of this machine as nodes")
    text = "with --simulate, as root: network namespaces with links of this rate, such as 300mbit"
    add("--link", metavar="RATE", help=text)
    text = "each arm is a job, submitted with these options of sbatch"
    add("--slurm", nargs="?", const="", metavar="='OPTIONS'", help=text)
    text = "numbers of nodes, such as 1,2,4,8; default: 1, 2, 4, ... up to all"
    add("--nodes", type=list_of(positive), help=text)
    above_0 = number(float, 0, exclusive=True)
    add("--hours", type=above_0, metavar="H", help="training time of each arm; default: --epochs")
    add("--name", help="of the study and its page; its runs are NAME_2nodes; default: the model")
    text = "repeat each arm with these seeds; the table has means and standard deviations"
    add("--seeds", type=list_of(count), help=text)
    text = "train with each value of an option; again for another one. script=A,B varies the script"
    add("--vary", action="append", type=varied, metavar="OPTION=A,B", help=text)
    text = "keep the global batch (strong scaling); default: keep -b, per process (weak scaling)"
    add("--global-batch", type=positive, metavar="N", help=text)
    text = "images per process of each run; largest: first find how many fit into the GPUs' memory"
    add("-b", "--batch-size", type=batch_size, metavar="N|largest", help=text)
    text = "how --lr, meant for the fewest nodes, grows with the global batch of more"
    add("--lr-scaling", choices=("none", "sqrt", "linear"), default="sqrt", help=text)
    add("--logbook", type=Path, default=Path("logbook"), metavar="DIR", help="of all studies")
    text = "copy each run's best model and last snapshot to URL/NAME OF THE RUN/"
    add("--store", metavar="URL|DIR", help=text)
    add("--dry-run", action="store_true", help="only print each arm's command")
    args = parser.parse_args(words)
    if [args.hosts, args.simulate, args.slurm].count(None) != 2:
        raise UserError("give either a HOSTS_FILE, or --simulate N, or --slurm")
    if args.link and not (args.simulate and re.fullmatch(r"\d+(\.\d+)?[kmg]bit", args.link)):
        raise UserError(f"--link {args.link} is not a rate such as 300mbit, with --simulate N")
    if not training:
        raise UserError("what to train is missing: ... -- imagenet_ddp.py OPTIONS DATA")
    if args.slurm is not None and not args.nodes:
        raise UserError("--slurm needs --nodes, such as --nodes 1,2,4")
    if args.global_batch and args.batch_size:
        raise UserError("give either --global-batch or -b")
    args.vary = args.vary or []
    args.machines = hosts.read(args.hosts) if args.hosts else []
    most = args.simulate or len(args.machines) or args.nodes[-1]
    args.nodes = args.nodes or sorted({2**i for i in range(20) if 2**i <= most} | {most})
    if args.nodes[-1] > most:
        raise UserError(f"--nodes {args.nodes[-1]}, but there are {most}")
    return args, training


def batch_size(text: str) -> str:
    """A number of images, or `LARGEST`; as text, for a command line."""
    return text if text == LARGEST else str(positive(text))


batch_size.__name__ = "whole number"


def varied(text: str) -> list[tuple[str, str]]:
    name, _, values = text.partition("=")
    if not name.strip("-") or not all(values.split(",")):
        raise argparse.ArgumentTypeError(f"{text} is not of the form OPTION=A,B")
    return [(name.lstrip("-"), value) for value in values.split(",")]


def parse_with_script(script: str, words: Sequence[str], local: bool) -> argparse.Namespace:
    """Parse ``words`` as the script does; ``local``: it will run on this machine.

    Raises: `UserError`, or SystemExit after a message.
    """
    from utils import options

    parser = importlib.import_module(script.removesuffix(".py")).parser()
    parser.prog = script
    return options.parse(parser, words, local)


def plan(args: argparse.Namespace, training: list[str]) -> list[Arm]:
    """The arms, in the order in which they are trained. Raises: `UserError`."""
    script, *rest = training
    own = OWN | ({"--seed": "--seeds"} if args.seeds else {})
    own |= dict.fromkeys(("-b", "--b", "--batch-size"), "-b") if args.batch_size else {}
    own |= {"--store": "--store"} if args.store else {}
    for name, value in itertools.chain(*args.vary):
        if as_option(name) in OWN or name in ("seed", "output-dir"):
            raise UserError(f"--vary {name}={value} is not possible: a study decides that itself")
        own[as_option(name)] = f"--vary {name}"
    for word in (one.partition("=")[0] for one in rest):
        if word in own:
            how = f"give {own[word]} before the --" if own[word] else "leave it out"
            raise UserError(f"{word} among the script's options: {how}")
    arms: dict[str, Arm] = {}
    for seed, nodes, *variation in itertools.product(args.seeds or [None], args.nodes, *args.vary):
        script = dict(variation).get("script", training[0])
        if not re.fullmatch(r"imagenet_\w+\.py", script) or not (ROOT / script).is_file():
            raise UserError(f"{script} is not a training script in {ROOT}")
        if script in ONE_NODE and nodes > 1:
            raise UserError(f"{script} trains on one node: use imagenet_ddp.py, or --nodes 1")
        more = [word for n, v in variation if n != "script" for word in (as_option(n), v)]
        typed = parse_with_script(script, [*rest, *more], bool(args.simulate))
        args.name = args.name or typed.arch
        if args.global_batch:
            more += ["-b", str(share_of_batch(args, script, typed, nodes))]
        elif nodes > args.nodes[0] and args.lr_scaling != "none":
            batch = REFERENCE_BATCH * nodes / args.nodes[0]
            more += ["--lr", f"{scale_lr(typed.lr, batch, args.lr_scaling):.6g}"]
        more += ["--seed", str(seed)] if seed is not None else []
        more += ["--train-time", f"{args.hours:g}"] if args.hours else []
        more += ["--store", args.store] if args.store else []
        more += ["-b", args.batch_size] if args.batch_size not in (None, LARGEST) else []
        parts = [args.name, f"{nodes}node{'s' * (nodes > 1)}"]
        parts += [f"{n}-{v.removesuffix('.py')}" for n, v in variation]
        parts += [f"seed{seed}"] if seed is not None else []
        name = re.sub(r"[^\w.+-]", "-", "_".join(parts))
        if name in arms:
            raise UserError(f"two arms would be called {name}: each number and value once")
        # The study's own options stand behind the typed ones: the last of two wins.
        command = (script, *rest, *more, "--name", name, "--resume", "auto")
        group = ", ".join(f"{option} {value}" for option, value in variation)
        run = Path(typed.output_dir) / name
        arms[name] = Arm(name, nodes, group, seed, command, run, typed.data)
    return list(arms.values())


def as_option(name: str) -> str:
    return f"--{name}" if len(name) > 1 else f"-{name}"


def share_of_batch(args: argparse.Namespace, script: str, typed: Any, nodes: int) -> int:
    """-b for a global batch that stays the same."""
    each = getattr(typed, "gpus", None) or (args.machines and args.machines[0].slots)
    each = 1 if args.simulate else each
    if not each:
        raise UserError(
            "--global-batch needs to know the processes of a node: write slots=N behind each host, "
            "or -g N among the script's options"
        )
    processes = 1 if script in ONE_NODE else nodes * each
    if args.global_batch % processes:
        raise UserError(f"--global-batch {args.global_batch} is not a multiple of {processes}")
    return args.global_batch // processes


def start_of(arm: Arm, args: argparse.Namespace, folder: Path, find: bool = False) -> list[str]:
    """The command that trains an arm, and returns when the run has ended.

    With ``find`` it finds the largest batch instead.
    """
    script, *words = arm.command
    if find:
        words.append("--find-batch")
    elif args.batch_size == LARGEST:
        words += ["-b", str(arm.batch or "LARGEST")]
    if args.simulate:
        many = [] if script in ONE_NODE else ["-g", "1" if args.link else str(arm.nodes)]
        return [sys.executable, str(ROOT / script), *words, *many]
    if args.slurm is not None:
        # A job of an earlier launcher may still be there: the next one of that name waits for it.
        own = [f"--nodes={arm.nodes}", f"--job-name={arm.name}", "--dependency=singleton"]
        own += [f"--output={arm.log}", *shlex.split(args.slurm)]
        return ["sbatch", "--wait", *own, "scripts/train.sbatch", script, *words]
    start = ["bash", "scripts/train_on_nodes.sh", str(folder / f"hosts_{arm.nodes}")]
    start += [] if find else ["--fetch"]
    return [*start, *reach(args), "--", script, *words]


def reach(args: argparse.Namespace) -> list[str]:
    """The given options of how to reach the hosts. No values of --env: they may be secrets."""
    usual = {"dir": hosts.default_directory(), "python": None, "ssh": "ssh", "grace": 20.0}
    given = {name: getattr(args, name) for name in usual}
    words = [f"--{name}={value}" for name, value in given.items() if value != usual[name]]
    return [*words, *(f"--env={name}" for name, _ in args.env or ())]


class Runner:
    """Runs an arm; Ctrl-C and SIGTERM stop it with a snapshot, and then the study."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.stopped = False
        self.started: list[subprocess.Popen] = []
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self.stop)

    def stop(self, *_: object) -> None:
        self.stopped = True
        for process in self.started:
            process.send_signal(signal.SIGINT)

    def train(self, arm: Arm) -> None:
        """Train an arm, with the largest batch if that was asked for. Raises: `UserError`."""
        arm.run.mkdir(parents=True, exist_ok=True)
        if self.args.batch_size == LARGEST and not arm.batch:
            begin = arm.log.stat().st_size if arm.log.exists() else 0
            code = self.start(arm, find=True)
            if found := FOUND.findall(arm.log.read_bytes()[begin:].decode(errors="replace")):
                (arm.run / "study.batch").write_text(found[-1])
            elif code == BAD_INPUT:
                raise UserError(
                    f"no largest batch was found, see above: give -b N, not -b {LARGEST}"
                )
            else:
                return
        arm.begun.write_text(shlex.join(arm.command))
        self.start(arm)

    def start(self, arm: Arm, find: bool = False) -> int:
        """Run the command of `start_of` on all nodes. Returns its exit code."""
        words = start_of(arm, self.args, self.folder, find)
        print(f"\n== arm {arm.name}\n+ {shlex.join(words)}", flush=True)
        if not self.args.link or arm.nodes == 1:
            return self.run([words], arm)
        with namespaces.network(arm.nodes) as nodes:
            for node in nodes:
                namespaces.limit(node, self.args.link)
            place = ["-n", str(arm.nodes), "--dist-url"]
            place += [f"tcp://{namespaces.address(0)}:{network.free_port()}", "-nr"]
            starts = [[*one.enter, *words, *place, str(i)] for i, one in enumerate(nodes)]
            return self.run(starts, arm)

    def run(self, commands: list[list[str]], arm: Arm | None = None) -> int:
        """Run ``commands`` side by side. The log of an arm gets what they print, and is shown."""
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "NODE_RANK")}
        env |= {"PYTHONUNBUFFERED": "1", **dict(self.args.env or ())}
        # In a session of its own: Ctrl-C is for this process, which passes it on.
        how = {"env": env, "start_new_session": True, "stdin": subprocess.DEVNULL}
        how["preexec_fn"] = functools.partial(launch.die_with_parent, os.getpid())
        how["cwd"] = ROOT if self.args.slurm is not None else None
        with contextlib.ExitStack() as files:
            if arm:
                out = files.enter_context(open(arm.log, "ab"))
                log = files.enter_context(open(arm.log, errors="replace"))
                log.seek(0, os.SEEK_END)
                how |= {"stdout": out, "stderr": subprocess.STDOUT}
            self.started = [subprocess.Popen(one, **how) for one in commands]
            if arm:
                self.watch(arm, log)
            codes = [process.wait() for process in self.started]
            self.started = []
        return next((128 - code if code < 0 else code for code in codes if code), 0)

    def is_running(self) -> bool:
        return any(process.poll() is None for process in self.started)

    def watch(self, arm: Arm, log: TextIO) -> None:
        """Show the log of an arm until it has ended. While it trains, run nvidia-smi: early on, and
        in its second half."""
        began, due, tail, running = None, [0.0, 0.5], "", True
        while running:
            running = self.is_running()  # before reading, or the last lines may be missed
            time.sleep(0.1)
            text = log.read()
            print(text, end="", flush=True)
            tail = tail[-500:] + text
            if due and (lines := STEP.findall(tail)):
                tail, now = "", time.monotonic()
                began = began or now
                epoch, epochs, step, steps = map(int, lines[-1])
                part = (epoch - 1 + step / steps) / epochs
                if self.args.hours:
                    part = max(part, (now - began) / 3600 / self.args.hours)
                if part >= due[0]:
                    self.nvidia_smi(arm, f"in epoch {epoch} of {epochs}, step {step} of {steps}")
                    due = [one for one in due if one > part]

    def nvidia_smi(self, arm: Arm, place: str) -> None:
        """Keep what nvidia-smi prints on each node while an arm trains, where there is one."""
        where = {"this machine": []} if self.args.simulate else {}
        for host in self.args.machines[: arm.nodes]:
            where[host.name] = [*shlex.split(self.args.ssh), "-o", "BatchMode=yes", host.address]
        if self.args.slurm is not None:
            # The job that trains, whose name train.sbatch has printed, is not always the newest.
            job = re.findall(r"--name slurm_(\d+)", arm.log.read_text(errors="replace"))[-1]
            on_all = [f"--jobid={job}", f"--nodes={arm.nodes}", "--ntasks-per-node=1", "--overlap"]
            where[f"job {job}"] = ["srun", *on_all, "--label"]

        def ask(before: list[str]) -> str:
            """The lines, by node where srun has put a node's number before each."""
            how = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run([*before, "nvidia-smi"], timeout=30, check=True, **how)
                lines = done.stdout.splitlines()
                if "--label" in before:
                    lines.sort(key=lambda line: line.partition(":")[0])
                return "\n".join(lines)
            return ""

        with ThreadPoolExecutor() as pool:
            texts = dict(zip(where, pool.map(ask, where.values()), strict=True))
        dumps = [f"# {name}, {place}\n{text}\n" for name, text in texts.items() if text]
        if dumps and self.is_running():
            (self.folder / f"{arm.name}.nvidia-smi.txt").write_text("\n".join(dumps))

    def check_nodes(self, arms: list[Arm]) -> None:
        """Copy the code to all hosts, if asked to, and check them. Raises: `UserError`."""
        args, arm = self.args, max(arms, key=lambda arm: arm.nodes)
        lines = [text for text in args.hosts.read_text().splitlines() if text.split("#")[0].split()]
        for nodes in {one.nodes for one in arms}:
            (self.folder / f"hosts_{nodes}").write_text("\n".join(lines[:nodes]) + "\n")
        for host in args.machines[: arm.nodes] if args.sync else ():
            launcher.sync(args, host)
        words = ["bash", "scripts/doctor.sh", str(self.folder / f"hosts_{arm.nodes}"), *reach(args)]
        if not args.no_doctor and self.run([[*words, "--data", arm.data]]) not in (0, 1):
            raise UserError(
                "the nodes are not ready, see above: correct that and run the same command again "
                "(--no-doctor trains all the same)"
            )


def rows(columns: dict[str, list[tuple[Arm, Run]]], hours: float | None) -> list[list[str]]:
    """The table that published scaling experiments have, row for row. A column has repeats."""
    rates = [rate for found in columns.values() for _, run in found if (rate := run.highest("Lr"))]
    # 1e-4 that went through 32 bits must not become 9.99e-5.
    power = math.floor(math.log10(min(rates) * 1.0001)) if rates else 0
    first = next((found for found in columns.values() if found), [])
    base = [run.epoch_seconds * processes(arm, run) for arm, run in first if run.epoch_seconds]

    def epochs(arm: Arm, run: Run) -> int | None:
        if hours is None:
            return run.epochs
        known = arm.is_finished or (run.total_hours or 0.0) >= hours
        return run.done_within(hours) if known else None

    def efficiency(arm: Arm, run: Run) -> float | None:
        own = (run.epoch_seconds or 0.0) * processes(arm, run)
        return statistics.fmean(base) / own if base and own else None

    minutes = lambda value: f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"  # noqa: E731
    of = "" if hours is None else f" @ {hours:g} hr"
    asked: list[tuple[str, Callable[[Arm, Run], float | None], Callable[[float], str]]] = [
        (f"Learning Rate (e{power})", lambda _, run: run.highest("Lr"),
         lambda x: f"{x / 10.0**power:.2f}"),
        ("Global Batch Size", lambda _, run: run.facts.get("global_batch"), "{:.0f}".format),
        ("Steps Per Epoch", lambda _, run: run.facts.get("steps_per_epoch"), "{:.0f}".format),
        ("Avg Epoch Time (min)", lambda _, run: runs.ratio(run.epoch_seconds, 60), minutes),
        (f"Epoch Num{of}", epochs, lambda x: f"{x:.3g}" if x % 1 else f"{x:.0f}"),
        ("Scaling Efficiency", efficiency, "{:.2f}".format),
        ("Best Validation Loss", lambda _, run: run.of_best("Loss"), "{:.4f}".format),
        ("Test Loss", lambda _, run: run.last("Loss/test"), "{:.4f}".format),
        ("Top1 Test Accuracy", lambda _, run: run.last("Top1/test"), "{:.2f}%".format),
    ]  # fmt: skip
    if any(arm.batch for column in columns.values() for arm, _ in column):
        asked.insert(1, ("Largest Batch Per GPU", lambda arm, _: arm.batch, "{:.0f}".format))
    found = []
    for title, value_of, show in asked:
        cells = []
        for column in columns.values():
            values = [v for arm, run in column if (v := value_of(arm, run)) is not None]
            mean = show(statistics.fmean(values)) if values else table.NONE
            several = len(set(values)) > 1
            cells.append(f"{mean} ± {show(statistics.stdev(values))}" if several else mean)
        found.append([title, *cells])
    return found


def processes(arm: Arm, run: Run) -> float:
    return run.facts.get("gpus") or arm.nodes


def write_page(args: argparse.Namespace, arms: list[Arm], command: str) -> None:
    """Bring LOGBOOK/NAME.md and the list of all studies up to date."""
    page, folder = args.logbook / f"{args.name}.md", args.logbook / args.name
    finished = [arm for arm in arms if arm.is_finished]
    found = []
    for arm in arms:
        run = runs.read(arm.run) if list(arm.run.glob("*tfevents*")) else None
        if run and run.epochs is not None:
            seed = "" if arm.seed is None else f"seed {arm.seed}"
            run.label = ", ".join(filter(None, [arm.title.lower(), arm.group, seed]))
            run.facts["nodes"] = arm.nodes  # simulated ones share a machine, which is one node
            found.append((arm, run))
    parts = [
        f"# {table.escape_markdown(args.name)}",
        f"{len(finished)} of {len(arms)} arms finished.",
    ]
    if args.simulate:
        links = f", with links of {args.link}" if args.link else ""
        parts.append(
            f"**Simulated: the nodes are processes that share the {os.cpu_count()} cores of one "
            f"machine{links}; their speeds say nothing about a cluster.**"
        )
    parts.append("## Scaling")
    for group in dict.fromkeys(arm.group for arm in arms):
        columns = {
            title: [(arm, run) for arm, run in found if (arm.title, arm.group) == (title, group)]
            for title in dict.fromkeys(arm.title for arm in arms)
        }
        parts += [f"**{table.escape_markdown(group)}**"] if group else []
        parts.append(table.markdown_table(["", *columns], rows(columns, args.hours)))
    states = [[arm.name, arm.state] for arm in arms]
    parts += [LEGEND, "## Arms", table.markdown_table(["arm", "state"], states)]
    if found:
        wanted = [json.loads((arm.run / "options.json").read_text()) for arm, _ in found]
        target = next((top1 for one in wanted if (top1 := one.get("desired_acc"))), None)
        both = table.Comparison([run for _, run in found], args.hours, target)
        drawn = pictures.draw(both, folder, only=PICTURES)
        parts.append(both.section(page, "Metrics", command, [one.file for one in drawn]))
    if len({arm.nodes for arm in finished}) == len(finished) > 1:
        words = ["--from", *(str(arm.run) for arm in finished)]
        words += ["--nodes", ",".join(map(str, args.nodes))]
        words += ["--gpus-per-node", "1"] if args.simulate else []
        words += [] if args.simulate and not args.link else ["--fit-network"]
        line = [sys.executable, str(ROOT / "scripts/forecast_scaling.py"), *words]
        told = subprocess.run(line, capture_output=True, text=True, check=False)
        parts += ["## Forecast and measured", table.fence((told.stdout + told.stderr).strip())]
    for file in (folder / f"{arm.name}.nvidia-smi.txt" for arm in arms):
        if text := file.is_file() and file.read_text().strip():
            parts += [f"## {file.name.removesuffix('.txt')}", table.fence(text)]
    table.put(page, "scaling_study", args.name, "\n\n".join(parts))
    names = sorted(one.stem for one in args.logbook.glob("*.md") if one.stem != "README")
    links = "\n".join(f"- [{name}]({name}.md)" for name in names)
    table.put(args.logbook / "README.md", "scaling_study", "index", f"# Log book\n\n{links}")
    print(f"log book: {page} is up to date", flush=True)


@contextlib.contextmanager
def held(folder: Path, arms: list[Arm]) -> Iterator[None]:
    """No second launcher works at this study meanwhile; its arms stay as they have begun.

    Raises: `UserError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for arm in arms:
        begun = arm.begun.read_text() if arm.begun.exists() else shlex.join(arm.command)
        if begun != shlex.join(arm.command):
            raise UserError(
                f"the arm {arm.name} has begun with other options: run the command as it was "
                f"({begun}), or choose another --name"
            )
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError("this study is running already: choose another --name") from None
        yield


def main() -> int:
    hosts.tolerate_broken_pipe()
    args, training = parse(sys.argv[1:])
    command = shlex.join(["bash", "scripts/scaling_study.sh", *sys.argv[1:]])
    arms, folder = plan(args, training), args.logbook / args.name
    left = [arm for arm in arms if not arm.is_finished]
    print(f"study {args.name}: {len(arms)} arms, {len(left)} to be trained")
    for arm in arms:
        print(f"{arm.name}: {'to be trained' if arm in left else 'finished'}")
        if args.dry_run and arm in left:
            if args.batch_size == LARGEST and not arm.batch:
                print(f"    + {shlex.join(start_of(arm, args, folder, find=True))}")
            print(f"    + {shlex.join(start_of(arm, args, folder))}")
    if args.hours:
        node_hours = args.hours * sum(arm.nodes for arm in left)
        print(f"at most {args.hours * len(left):g} h of training ({node_hours:g} node-hours)")
    if args.dry_run:
        return 0
    with held(folder, arms):
        runner = Runner(args, folder)
        if args.hosts and left:
            runner.check_nodes(left)
        for arm in [*left, *left]:  # once more what a lost node or process has ended
            if arm.is_finished or runner.stopped:
                continue
            runner.train(arm)
            if not arm.is_finished and not runner.stopped:
                print(f"error: arm {arm.name}: {arm.state}", file=sys.stderr, flush=True)
            write_page(args, arms, command)
        if not left:
            write_page(args, arms, command)
    if runner.stopped:
        print("stopped; run the same command again to continue this study", flush=True)
        return INTERRUPTED
    return 0 if all(arm.is_finished for arm in arms) else 1


if __name__ == "__main__":
    errors.exit_with(main)
