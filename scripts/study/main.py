"""A scaling study: trains each arm, one after the other, and keeps the log book up to date.

See scripts/scaling_study.sh for the command.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/ssh")]

import utils.launch.installed  # noqa: E402, F401 (a missing package becomes one sentence)

import hosts  # noqa: E402
from study import arms, outcome, page, places, state  # noqa: E402
from study.arms import Arm, Wish  # noqa: E402
from study.page import Study  # noqa: E402
from study.running import Runner  # noqa: E402
from study.slurm import Slurm  # noqa: E402
from study.state import FAILED, FINISHED, RUNNING, STOPPED, State  # noqa: E402

from utils import errors  # noqa: E402
from utils.errors import BAD_INPUT, INTERRUPTED, UserError  # noqa: E402
from utils.option_types import Formatter, count, number, positive, with_recipe  # noqa: E402

Place = places.Simulated | places.Hosts | Slurm
NOT_DONE = 1  # exit code: an arm has failed


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The study's own options, and SCRIPT with its options. Raises: `UserError`."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="scaling_study.sh",
        usage="bash scripts/scaling_study.sh HOSTS_FILE [options] -- SCRIPT TRAINING OPTIONS DATA",
        description="Trains on 1, 2, 4, ... nodes and keeps a log book. The same line continues a "
        "study that was stopped.",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    hosts.add_options(parser, needed=False)
    add = parser.add_argument
    add("--sync", action="store_true", help="copy this code to the nodes first")
    add("--no-doctor", action="store_true", help="do not check the nodes before the first arm")
    text = "instead of hosts: so many nodes that are processes of this machine"
    add("--simulate", type=positive, metavar="N", help=text)
    text = "with --simulate, as root: network namespaces with links of this rate, such as 300mbit"
    add("--link", metavar="RATE", help=text)
    text = "instead of hosts: each arm is a job, submitted with these options of sbatch"
    add("--slurm", nargs="?", const="", metavar="='OPTIONS'", help=text)
    text = "no training: a page of the log book about these runs, or folders of runs"
    add("--runs", nargs="+", type=Path, metavar="RUN", help=text)
    text = "numbers of nodes, such as 1,2,4,8; default: 1, 2, 4, ... up to all"
    add("--nodes", metavar="LIST", help=text)
    above_0 = number(float, 0, exclusive=True)
    add("--hours", type=above_0, metavar="H", help="training time of each arm; default: --epochs")
    add("--name", help="of the study and its page; its runs are NAME_2nodes; default: the model")
    text = "repeat each arm with these seeds; the table has means and standard deviations"
    add("--seeds", metavar="LIST", help=text)
    text = "train with each value of an option; again for another one. script=A,B varies the script"
    add("--vary", action="append", metavar="OPTION=A,B", help=text)
    text = "keep the global batch (strong scaling); default: keep -b, per process (weak scaling)"
    add("--global-batch", type=positive, metavar="N", help=text)
    text = "how --lr, meant for the fewest nodes, grows with the global batch of more"
    add("--lr-scaling", choices=("none", "sqrt", "linear"), default="sqrt", help=text)
    add("--logbook", type=Path, default=Path("logbook"), metavar="DIR", help="folder of the pages")
    add("--dry-run", action="store_true", help="say what would be done, with each arm's command")
    return parser.parse_args(arguments[:cut]), arguments[cut + 1 :]


def whole_numbers(text: str, name: str, kind: object) -> tuple[int, ...]:
    """A list such as 1,2,4. Raises: `UserError`."""
    try:
        found = tuple(kind(word) for word in text.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        found = ()
    if not found or len(set(found)) < len(found):
        raise UserError(f"{name} {text} is not a list of different whole numbers such as 1,2,4")
    return found


def varied(given: list[str]) -> dict[str, tuple[str, ...]]:
    """The options of --vary and their values. Raises: `UserError`."""
    found: dict[str, tuple[str, ...]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        words = tuple(values.split(","))
        name = name.lstrip("-")
        if not (name and equals and all(words)) or name in found:
            raise UserError(f"--vary {text} is not of the form OPTION=A,B, each option once")
        found[name] = words
    return found


def place_of(options: argparse.Namespace) -> Place:
    """Where the arms are trained. Raises: `UserError`."""
    if [options.hosts, options.simulate, options.slurm].count(None) != 2:
        raise UserError(
            "give either a HOSTS_FILE, or --simulate N for nodes on this machine, or --slurm"
        )
    if options.link and not options.simulate:
        raise UserError("--link is for --simulate: hosts have links of their own")
    if options.simulate:
        return places.Simulated(options.simulate, options.link)
    return places.Hosts(options) if options.hosts else Slurm(options)


def wish_of(options: argparse.Namespace, training: list[str], place: Place) -> Wish:
    """What the command line asks for. Raises: `UserError`."""
    if not training:
        raise UserError("what to train is missing: ... -- imagenet_ddp.py OPTIONS DATA")
    vary = varied(options.vary or [])
    for script in vary.get("script", training[:1]):
        if not (ROOT / script).is_file() or "/" in script or not script.startswith("imagenet_"):
            raise UserError(f"{script} is not a training script in {ROOT}")
    powers = [2**i for i in range(place.nodes.bit_length()) if 2**i <= place.nodes]
    nodes = powers if powers[-1] == place.nodes else [*powers, place.nodes]
    if options.nodes:
        nodes = sorted(whole_numbers(options.nodes, "--nodes", positive))
    if nodes[-1] > place.nodes:
        source = options.hosts or f"--simulate {place.nodes}"
        raise UserError(f"--nodes {nodes[-1]}, but {source} gives {place.nodes}")
    own = arms.option(training, "-g")
    processes = int(own) if own and own.isdecimal() else place.processes
    return Wish(
        name=options.name,
        nodes=tuple(nodes),
        training=tuple(training),
        hours=options.hours,
        vary=vary,
        seeds=whole_numbers(options.seeds, "--seeds", count) if options.seeds else (),
        global_batch=options.global_batch,
        lr_scaling=options.lr_scaling,
        processes=processes,
    )


def announce(plan: list[Arm], kept: State, place: Place, options: argparse.Namespace) -> None:
    """Say what is going to happen, and how long it takes."""
    left = [arm for arm in plan if kept.arms[arm.name].status != FINISHED]
    print(f"study {options.name}: {outcome.count(len(plan), 'arm')} on {place.what}; ", end="")
    print(f"{len(left)} to be trained")
    for number_of, arm in enumerate(plan, 1):
        known = kept.arms[arm.name]
        print(f"{number_of:3} {arm.name}: {known.status}", end="")
        print(f" ({known.why})" if known.why and known.status == FAILED else "")
        if options.dry_run and arm in left:
            for line in place.lines(arm):
                print(f"    + {line}")
    if options.hours:
        total = options.hours * len(left)
        node_hours = options.hours * sum(arm.nodes for arm in left)
        print(
            f"at most {total:g} h of training ({node_hours:g} node-hours) if nothing has been "
            "trained of these yet; each arm's start and last evaluation come on top"
        )
    else:
        print("each arm trains for its --epochs: how long that takes, the first one will show")
    print(f"log book: {options.logbook / options.name}.md", flush=True)


def run(plan: list[Arm], kept: State, place: Place, study: Study, book: Path) -> int:
    """Train all arms that are not finished. Returns: the exit code."""
    runner = Runner()

    def update() -> None:
        try:
            said = page.write(book, study, [outcome.of_arm(one) for one in plan], kept)
        except (UserError, OSError) as fault:
            print(f"note: the log book is not up to date: {fault}", flush=True)
            return
        print("\n".join([*said, f"log book: {book / study.name}.md is up to date"]), flush=True)

    def train(arm: Arm) -> None:
        known = kept.arms[arm.name]
        known.status, known.why, known.code = RUNNING, "", None
        known.hosts, known.began = place.names(arm), known.began or state.now()
        known.attempts += 1
        kept.save()
        print(f"\n== arm {arm.name}", flush=True)
        for line in place.lines(arm):
            print(f"+ {line}")
        known.code = place.train(runner, arm, kept.folder)
        known.ended = state.now()
        if is_done(arm):
            known.status, known.why = FINISHED, ""
        elif runner.stops:
            known.status = STOPPED
        else:
            known.status = FAILED
            known.why = runner.error or f"exit code {known.code}, without a summary.json of its end"
            print(f"error: arm {arm.name} has failed: {known.why}", file=sys.stderr, flush=True)
        kept.save()

    fresh = False
    for again in (False, True):  # once more what a lost node or process has ended
        for arm in plan:
            known = kept.arms[arm.name]
            retry = known.status == FAILED and known.code != BAD_INPUT
            if known.status == FINISHED or (again and not retry):
                continue
            if is_done(arm):  # the last launcher died before it could note that
                known.status, fresh = FINISHED, False
                kept.save()
                continue
            train(arm)
            update()
            fresh = True
            if runner.stops:
                print("stopped; the same line continues this study", flush=True)
                return INTERRUPTED
    if not fresh:
        update()
    failed = [name for name, known in kept.arms.items() if known.status != FINISHED]
    for name in failed:
        print(f"error: arm {name} has failed: {kept.arms[name].why}", file=sys.stderr)
    if failed:
        print("the same line tries failed arms again, from their snapshots", file=sys.stderr)
    return NOT_DONE if failed else 0


def is_done(arm: Arm) -> bool:
    """Whether the arm's run has ended as it should."""
    return outcome.of_arm(arm).is_finished


def of_runs(options: argparse.Namespace, command: str) -> int:
    """The page about runs that exist already. Returns: the exit code."""
    if not options.name:
        raise UserError("--runs needs --name, what the page is called")
    found = outcome.of_runs(options.runs)
    if not found:
        raise UserError("none of these runs has finished an epoch")
    kept = State(options.logbook / options.name)
    if kept.arms:
        raise UserError(f"{kept.file} is a study's own: choose another --name")
    with kept.held():
        study = Study(options.name, command, options.hours)
        said = page.write(options.logbook, study, found, kept)
    print("\n".join([*said, f"log book: {options.logbook / options.name}.md"]))
    return 0


def main() -> int:
    hosts.go_on_without_reader()
    hosts.hide_values()
    options, training = parse(sys.argv[1:])
    training = [*training[:1], *with_recipe(training[1:])]
    command = shlex.join(["bash", "scripts/scaling_study.sh", *sys.argv[1:]])
    if options.runs:
        return of_runs(options, command)
    place = place_of(options)
    options.name = options.name or arms.option(training, "--arch") or "study"
    plan = arms.plan(wish_of(options, training, place))
    folder = options.logbook / options.name
    kept = State(folder)
    kept.join(plan)
    announce(plan, kept, place, options)
    if options.dry_run:
        return 0
    study = Study(options.name, command, options.hours, options.global_batch is None)
    if options.simulate:
        links = f", with links of {options.link}" if options.link else ""
        study.notes.append(
            f"**Simulated: the nodes are processes that share the {os.cpu_count()} cores of one "
            f"machine{links}; their speeds say nothing about a cluster.**"
        )
    with kept.held() as silent:
        kept = State(folder)
        kept.join(plan)
        if any(known.status == RUNNING for known in kept.arms.values()):
            place.wait_until_empty(silent)
        left = [arm for arm in plan if kept.arms[arm.name].status != FINISHED]
        kept.save()
        if left:
            place.check(Runner(), left, folder)
        return run(plan, kept, place, study, options.logbook)


if __name__ == "__main__":
    errors.end_with(main)
