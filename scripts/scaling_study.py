"""Train on 1, 2, 4, ... nodes, one run after the other, and keep a log book.

    bash scripts/scaling_study.sh HOSTS_FILE --nodes 1,2,4,8 --hours 2 \\
        SCRIPT OPTIONS DATA
    bash scripts/scaling_study.sh --simulate 2 SCRIPT OPTIONS DATA  # here
    bash scripts/scaling_study.sh --slurm='--gpus-per-node=4' --nodes 1,2 \\
        SCRIPT OPTIONS DATA

A study trains once for each combination of a number of nodes, a value of each --vary option, and a
seed. Its own options stand before SCRIPT, such as imagenet_ddp.py, and those of the training after
it. Add --try first: in a minute or two it shows whether all of the study works.

If it is interrupted, run the same command again. Finished runs are not repeated, and an unfinished
one resumes from its snapshot. With larger --hours, all runs continue; with larger --epochs, those
whose schedule does not depend on it (step, constant).
"""

import argparse
import contextlib
import fcntl
import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/ssh")]

from utils.start import launch

launch.prepare()  # before torch is imported, which takes seconds

import hosts
import launcher
from bench import namespaces
from studies import page, tiny
from studies.plan import LARGEST, ONE_NODE, OPEN_END, Study, plan
from studies.runs import STEP, StudyRun

from utils import options
from utils.start import addresses, errors, orphans, signals
from utils.start.errors import BAD_INPUT, INTERRUPTED, UserError
from utils.start.option_types import count, list_of, number, place, positive

SCRIPT = re.compile(r"(.*/)?imagenet_\w+\.py")
# The last line that a script prints with --find-batch.
LARGEST_LINE = re.compile(r"largest batch per GPU: (\d+)")
DUMPS = ("early", "late")  # nvidia-smi's output, from the first and the second half of a run


def parse(words: list[str]) -> tuple[Study, list[str]]:
    """The study's own options, and SCRIPT with its options. Raises: `UserError`."""
    words, training = split_words(words)
    parser = hosts.make_parser("scaling_study.sh", __doc__)
    hosts.add_node_options(parser)
    add = parser.add_argument
    add("--sync", action="store_true", help="copy this code to the nodes first")
    add("--no-doctor", action="store_true", help="do not check the nodes before the first run")
    text = "simulate N nodes with N processes of this machine"
    add("--simulate", type=positive, metavar="N", help=text)
    text = "with --simulate, as root: network namespaces with links of this rate, such as 300mbit"
    add("--link", metavar="RATE", help=text)
    text = "submit each run as a job, with these options of sbatch"
    add("--slurm", nargs="?", const=" ", metavar="='OPTIONS'", help=text)
    text = "numbers of nodes, such as 1,2,4,8; default: 1, 2, 4, ... up to all"
    add("--nodes", type=list_of(positive), help=text)
    above_0 = number(float, 0, exclusive=True)
    text = "training time of each run, with --epochs without limit and a constant learning rate, "
    text += "unless the script's --epochs or --recipe is given; default: --epochs"
    add("--hours", type=above_0, metavar="H", help=text)
    add("--name", help="of the study, its page and its runs (NAME_2nodes); default: the model")
    text = "repeat each run with these seeds; the table has means and standard deviations"
    add("--seeds", type=list_of(count), help=text)
    text = "train with each value of an option; repeatable. script=A,B varies the script"
    add("--vary", action="append", type=varied, metavar="OPTION=A,B", help=text)
    text = "keep the global batch (strong scaling); default: keep -b, per process (weak scaling)"
    add("--global-batch", type=positive, metavar="N", help=text)
    text = "images per process; largest: first measure how many fit into the GPUs' memory"
    add("-b", "--batch-size", type=batch_size, metavar="N|largest", help=text)
    text = "how --lr, meant for the fewest nodes, grows with the global batch"
    add("--lr-scaling", choices=("none", "sqrt", "linear"), default="sqrt", help=text)
    add(
        "--logbook", type=place, default=Path("logbook"), metavar="DIR", help="pages of all studies"
    )
    text = "copy each run's best model and last snapshot to URL/NAME OF THE RUN/"
    add("--store", metavar="URL|DIR", help=text)
    add("--dry-run", action="store_true", help="only print each run's command")
    text = f"first see whether all of it works: {tiny.WHAT}. Its page is in logbook_try"
    add("--try", dest="tiny", action="store_true", help=text)
    args, unknown = parser.parse_known_args(words, Study())
    if unknown:
        name = unknown[0].partition("=")[0]
        if name in options.build_parser(None, "").option_names:
            raise UserError(f"{name} is an option of the training: give it after the script's name")
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.tiny and not args.hosts and args.slurm is None:
        args.simulate = args.simulate or max(args.nodes or [2])
    if [args.hosts, args.simulate, args.slurm].count(None) != 2:
        raise UserError("give either a HOSTS_FILE, or --simulate N, or --slurm")
    if args.link and not (args.simulate and re.fullmatch(r"\d+(\.\d+)?[kmg]bit", args.link)):
        raise UserError(f"--link {args.link} is not a rate such as 300mbit, with --simulate N")
    if not training:
        raise UserError("the training command is missing: ... imagenet_ddp.py OPTIONS DATA")
    if args.slurm is not None and not args.nodes:
        raise UserError("--slurm needs --nodes, such as --nodes 1,2,4")
    if args.global_batch and args.batch_size:
        raise UserError("give either --global-batch or -b")
    args.name, args.vary, args.overrides = args.name or "", args.vary or [], []
    args.machines = hosts.read(args.hosts) if args.hosts else []
    most = args.simulate or len(args.machines) or args.nodes[-1]
    args.nodes = args.nodes or sorted({2**i for i in range(20) if 2**i <= most} | {most})
    if args.nodes[-1] > most:
        raise UserError(f"--nodes {args.nodes[-1]}, but there are only {most} nodes")
    return args, training


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """The study's own words, and SCRIPT with its options: the words after `--`, or those from the
    script's name on. Between two `--` are more options of the script: a file in scripts/studies
    appends the second, and its user types the first."""
    if "--" not in words:
        cut = next((i for i, word in enumerate(words) if SCRIPT.fullmatch(word)), len(words))
        return words[:cut], words[cut:]
    own, rest = launcher.split(words)
    more, training = launcher.split(rest)
    return (own, [*training, *more]) if training else (own, more)


def batch_size(text: str) -> str:
    """Check a number of images, or `LARGEST`. Returns it as text, for a command line."""
    return text if text == LARGEST else str(positive(text))


batch_size.__name__ = "whole number"


def varied(text: str) -> list[tuple[str, str]]:
    """Parse OPTION=A,B into pairs of the option, such as --lr, and a value."""
    name, _, values = text.partition("=")
    name = name.lstrip("-")
    if not name or not all(values.split(",")):
        raise argparse.ArgumentTypeError(f"{text} is not of the form OPTION=A,B")
    return [(f"--{name}" if len(name) > 1 else f"-{name}", value) for value in values.split(",")]


def launch_command(run: StudyRun, args: Study, folder: Path, find: bool = False) -> list[str]:
    """Build the command that trains a run, or with ``find`` finds its largest batch, and waits."""
    script, *words = run.command
    if find:
        words.append("--find-batch")
    elif args.batch_size == LARGEST:
        words += ["-b", str(run.batch or "LARGEST")]
    if args.simulate:
        many = [] if script in ONE_NODE else ["-g", "1" if args.link else str(run.nodes)]
        return [sys.executable, str(ROOT / script), *words, *many]
    if args.slurm is not None:
        # A job that an earlier study submitted may still exist: this one waits until it has ended.
        own = [f"--nodes={run.nodes}", f"--job-name={run.name}", "--dependency=singleton"]
        own += [f"--output={run.file('log')}", *shlex.split(args.slurm)]
        return ["sbatch", "--wait", *own, "scripts/train.sbatch", script, *words]
    start = ["bash", errors.path_of("scripts/train_on_nodes.sh")]
    start.append(str(folder / f"hosts_{run.nodes}"))
    return [*start, *([] if find else ["--fetch"]), *ssh_options(args), "--", script, *words]


def ssh_options(args: Study) -> list[str]:
    """Return the options for reaching the hosts. --env without values: they may be secrets."""
    given = {name: getattr(args, name) for name in ("dir", "python", "ssh", "grace")}
    words = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return [*words, *(f"--env={name}" for name, _ in args.env or ())]


class Runner:
    """Starts runs. Ctrl-C and SIGTERM end the current run with a snapshot, then the study."""

    def __init__(self, args: Study, book: Path):
        self.args, self.book = args, book
        self.stopped = False
        self.processes: list[subprocess.Popen] = []
        signals.handle(self.stop, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

    def stop(self, *_: object) -> None:
        self.stopped = True
        for process in self.processes:
            process.send_signal(signal.SIGINT)

    def train(self, run: StudyRun) -> None:
        """Train a run. With `LARGEST` as -b, find its batch first. Raises: `UserError`."""
        run.folder.mkdir(parents=True, exist_ok=True)
        if self.args.batch_size == LARGEST and not run.batch:
            log = run.file("log")
            begin = log.stat().st_size if log.exists() else 0
            code = self.start(run, find=True)
            if sizes := LARGEST_LINE.findall(log.read_bytes()[begin:].decode(errors="replace")):
                run.file("batch").write_text(sizes[-1])
            elif code == BAD_INPUT:
                raise UserError(f"--find-batch failed, see above: give -b N, not -b {LARGEST}")
            else:
                return
        run.file("command").write_text(shlex.join(run.command))
        self.start(run)

    def start(self, run: StudyRun, find: bool = False) -> int:
        """Run `launch_command` on all nodes. Returns its exit code."""
        words = launch_command(run, self.args, self.book, find)
        print(f"\n== run {run.name}\n+ {shlex.join(words)}", flush=True)
        if not self.args.link or run.nodes == 1:
            return self.execute([words], run)
        with namespaces.network(run.nodes) as nodes:
            for node in nodes:
                namespaces.limit(node, self.args.link)
            place = ["-n", str(run.nodes), "--dist-url"]
            place += [f"tcp://{namespaces.address(0)}:{addresses.free_port()}", "-nr"]
            starts = [[*one.enter, *words, *place, str(i)] for i, one in enumerate(nodes)]
            return self.execute(starts, run)

    def execute(self, commands: list[list[str]], run: StudyRun | None = None) -> int:
        """Run ``commands`` side by side. The run's log gets their output, which is also shown.

        Returns: the first exit code that is not 0.
        """
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "NODE_RANK")}
        env |= {"PYTHONUNBUFFERED": "1", **dict(self.args.env or ())}
        env |= {"CUDA_VISIBLE_DEVICES": ""} if self.args.tiny else {}
        # Each command has its own session: Ctrl-C reaches only this process, which passes it on.
        how = {"env": env, "start_new_session": True, "stdin": subprocess.DEVNULL}
        how["preexec_fn"] = functools.partial(orphans.die_with_parent, os.getpid())
        how["cwd"] = ROOT if self.args.slurm is not None else None
        log: TextIO | None = None
        with contextlib.ExitStack() as files:
            if run:
                out = files.enter_context(open(run.file("log"), "ab"))
                how |= {"stdout": out, "stderr": subprocess.STDOUT}
                log = files.enter_context(open(run.file("log"), errors="replace"))
                log.seek(0, os.SEEK_END)
            self.processes = [subprocess.Popen(one, **how) for one in commands]
            if run and log:
                self.follow(run, log)
            codes = [process.wait() for process in self.processes]
            self.processes = []
        if run and self.stopped and self.args.slurm is not None:
            submitted = re.findall(r"batch job (\d+)", run.file("log").read_text(errors="replace"))
            for job in submitted[-1:]:
                text = f"job {job} goes on: `scancel {job}` ends it with a snapshot"
                print(text, flush=True)
        return next(filter(None, codes), 0)

    def is_running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def follow(self, run: StudyRun, log: TextIO) -> None:
        """Show a run's log until it ends. Call nvidia-smi twice while it trains: early on, and in
        the second half."""
        began, due, tail, running = None, dict(zip(DUMPS, (0.0, 0.5), strict=True)), "", True
        while running:
            running = self.is_running()  # check before reading, or the last lines may be missed
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
                reached = [name for name, begin in due.items() if part >= begin]
                if reached:
                    of = "" if epochs == OPEN_END else f" of {epochs}"
                    place = f"epoch {epoch}{of}, step {step} of {steps}"
                    # A run that is resumed in its second half has its first dump already.
                    self.keep_nvidia_smi(run, reached[-1], place)
                    due = {name: begin for name, begin in due.items() if begin > part}

    def keep_nvidia_smi(self, run: StudyRun, when: str, place: str) -> None:
        """Save nvidia-smi's output from each node that has it, if the run still trains.
        ``when``: one of `DUMPS`. ``place``: the progress of the run, as text."""
        prefixes = {"this machine": []} if self.args.simulate else {}
        for host in self.args.machines[: run.nodes]:
            prefixes[host.name] = [*shlex.split(self.args.ssh), "-o", "BatchMode=yes", host.address]
        if self.args.slurm is not None:
            # train.sbatch prints the id of the job that trains; it is not always the newest job.
            job = re.findall(r"--name slurm_(\d+)", run.file("log").read_text(errors="replace"))[-1]
            nodes = [f"--jobid={job}", f"--nodes={run.nodes}", "--ntasks-per-node=1", "--overlap"]
            prefixes[f"job {job}"] = ["srun", *nodes, "--label"]
        how = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        dumps = []
        for name, prefix in prefixes.items():
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                done = subprocess.run([*prefix, "nvidia-smi"], timeout=30, check=True, **how)
                lines = done.stdout.splitlines()
                if "--label" in prefix:  # srun puts the number of its node before each line
                    lines.sort(key=lambda line: line.partition(":")[0])
                dumps.append("\n".join([f"# {name}, in {place}", *lines, ""]))
        if dumps and self.is_running():
            (self.book / f"{run.name}.nvidia-smi.{when}.txt").write_text("\n".join(dumps))

    def check_nodes(self, file: Path, runs: list[StudyRun]) -> None:
        """With --sync, copy the code to the hosts in ``file``. Check them. Raises: `UserError`."""
        args, run = self.args, max(runs, key=lambda run: run.nodes)
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        lines = [text for text in lines if text.split("#")[0].split()]
        for nodes in {one.nodes for one in runs}:
            (self.book / f"hosts_{nodes}").write_text("\n".join(lines[:nodes]) + "\n")
        for host in args.machines[: run.nodes] if args.sync else ():
            launcher.sync(args, host)
        words = ["bash", errors.path_of("scripts/doctor.sh")]
        words += [str(self.book / f"hosts_{run.nodes}"), *ssh_options(args), "--data", run.data]
        if not args.no_doctor and self.execute([words]) not in (0, 1):
            raise UserError(
                "the nodes are not ready, see above: correct that and run the same command again "
                "(--no-doctor leaves this check out)"
            )


ENDS = ("--epochs", "--train-time")  # options that a study may change later


def without_ends(command: Iterable[str]) -> list[str]:
    """Return a command without `ENDS` and their values."""
    words = list(command)
    for option in ENDS:
        while option in words:
            place = words.index(option)
            del words[place : place + 2]
    return [word for word in words if not word.startswith(tuple(f"{option}=" for option in ENDS))]


@contextlib.contextmanager
def study_lock(folder: Path, runs: list[StudyRun]) -> Iterator[None]:
    """Lock the study. Raises: `UserError` if a run began with other options, or it is locked."""
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        begun = run.file("command").read_text() if run.file("command").exists() else None
        if not begun or not run.has_trained or shlex.split(begun) == [*run.command]:
            continue
        if run.ends_with_epochs and without_ends(shlex.split(begun)) == without_ends(run.command):
            raise UserError(
                f"the run {run.name} cannot be lengthened, as its --lr-schedule or --progressive "
                f"depends on --epochs: use that command ({begun}), or choose another --name"
            )
        if without_ends(shlex.split(begun)) != without_ends(run.command):
            raise UserError(
                f"the run {run.name} began with other options: use that command "
                f"({begun}), or choose another --name"
            )
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError("this study is running already: choose another --name") from None
        yield


def main() -> int:
    args, training = parse(sys.argv[1:])
    runs, began = plan(args, training), time.monotonic()
    if not args.tiny:
        return carry_out(args, runs)
    print(f"a try: {tiny.WHAT}", flush=True)
    with tempfile.TemporaryDirectory(prefix="study_try_") as place:
        code = carry_out(args, plan(args, tiny.shrink(args, training, Path(place))))
    if not code and not args.dry_run:
        took = f"{time.monotonic() - began:.0f} s"
        print(f"the try took {took}, and all of it works; leave out --try to train", flush=True)
    return code


def carry_out(args: Study, runs: list[StudyRun]) -> int:
    """Train the runs that are not finished, and write the study's page. Returns: an exit code."""
    folder, left = args.logbook / args.name, [run for run in runs if not run.is_finished]
    command = f"bash {errors.typed('scripts/scaling_study.sh')} {shlex.join(sys.argv[1:])}"
    print(f"study {args.name}: {len(runs)} runs, {len(left)} to be trained")
    for run in runs:
        print(f"{run.name}: {'to be trained' if run in left else 'finished'}")
        if args.dry_run and run in left:
            if args.batch_size == LARGEST and not run.batch:
                print(f"    + {shlex.join(launch_command(run, args, folder, find=True))}")
            print(f"    + {shlex.join(launch_command(run, args, folder))}")
    if args.hours:
        node_hours = args.hours * sum(run.nodes for run in left)
        print(f"at most {args.hours * len(left):g} h of training ({node_hours:g} node-hours)")
    if args.dry_run:
        return 0
    with study_lock(folder, runs):
        runner = Runner(args, folder)
        if args.hosts and left:
            runner.check_nodes(args.hosts, left)
        # A run that fails, say because a node is lost, gets a second attempt.
        for run in left if args.tiny else [*left, *left]:
            if run.is_finished or runner.stopped:
                continue
            runner.train(run)
            if not run.is_finished and not runner.stopped:
                print(f"error: {run.name}: {run.state}", file=sys.stderr, flush=True)
            page.write(args, runs, command)
        if not left:
            page.write(args, runs, command)
    if runner.stopped:
        print("stopped; run the same command again to continue this study", flush=True)
        return INTERRUPTED
    return 0 if all(run.is_finished for run in runs) else 1


if __name__ == "__main__":
    errors.exit_with(main)
