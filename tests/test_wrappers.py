"""The shell scripts: --help, wrong arguments, waiting, and a host whose own name is unknown."""

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Result, shell, summary
from nodes import Nodes, type_on_each
from running import TINY_LINE, Running, eventually

SCRIPTS = ROOT / "scripts"
INNER = ("environment.sh", "launch.sh")  # not commands
WRAPPERS = sorted(path.name for path in SCRIPTS.glob("*.sh") if path.name not in INNER)
WRAPPERS.append("train.sbatch")


@pytest.mark.parametrize("name", WRAPPERS)
def test_help_says_how_to_use_it(name, tmp_path):
    """From another folder, with no environment active. The study's is printed by its script."""
    bare = f"env -i PATH=/usr/bin:/bin PYTHON={sys.executable} COLUMNS=80 HOME={tmp_path} bash"
    (done,) = shell(f"cd {tmp_path} && {bare} {SCRIPTS}/{name} --help")
    assert (done.code, done.err) == (0, "")
    assert f"scripts/{name}" in done.out, "no example"
    assert not [line for line in done.out.splitlines() if len(line) > 80], "of a usual terminal"
    assert "Installing" not in done.out and "set -" not in done.out and "SBATCH -" not in done.out
    assert not list(tmp_path.iterdir())


def test_every_command_begins_without_the_callers_functions_and_keeps_its_words():
    """As the tests below show of some: all of them by the same line."""
    begins = re.compile(r'\n\[\[ \$- == \*p\* \]\] \|\| exec "\$BASH" -p "\$0" "\$@" #.*\nset ')
    for path in [*(SCRIPTS / name for name in WRAPPERS), *SCRIPTS.glob("studies/*.sh")]:
        code = re.split(r"\n(?!#)", path.read_text(), maxsplit=1)
        assert begins.match(f"\n{code[1]}"), path


def run_wrapper(command: str, folder: Path, **env: str) -> Result:
    """Run a wrapper in ``folder``."""
    (done,) = shell(f"cd {folder} && exec bash {SCRIPTS}/{command}", **env)
    return done


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("one_node_train.sh", "TRAIN_HOURS SAVE_NAME BATCH_SIZE"),
        ("one_node_train.sh soon mine 5", "soon"),
        ("one_node_train.sh 1 mine 5 --epochs 1", "--epochs"),
        ("one_node_train.sh 1 ../../out 5", "../../out"),
        ("one_node_train.sh 1 mine five", "BATCH_SIZE is five: it must be a whole number"),
        ("one_node_train.sh 1 mine 0", "BATCH_SIZE is 0"),
        ("one_node_train.sh 3.0 0 4 multi_node 32", "multi_node_train.sh 3.0 0 4 multi_node 32"),
        ("multi_node_train.sh 1 2 2 mine 5", "2"),
        ("multi_node_train.sh 1 0 2 mine 5", "MASTER_ADDR"),
        ("elastic_train.sh 1 3:2 mine 5", "3:2"),
        ("elastic_train.sh 1 1:2 mine 5", "MASTER_ADDR"),
    ],
)
def test_a_wrong_argument_is_named_and_writes_nothing(command, named, tmp_path):
    here = tmp_path / "a" / "b"
    here.mkdir(parents=True)
    given = {} if named == "MASTER_ADDR" else {"MASTER_ADDR": "127.0.0.1"}
    run_wrapper(command, here, **given).fails_with(named)
    assert sorted(tmp_path.rglob("*")) == [here.parent, here]


def test_the_command_for_several_nodes_has_all_that_was_given(tmp_path):
    env = {"DATA": "a b", "ARCH": "x", "SCRIPT": "imagenet_fsdp.py", "NPROC": "3"}
    done = run_wrapper("one_node_train.sh 3.0 0 4 run 32", tmp_path, **env)
    done.fails_with("MASTER_ADDR=IP DATA=a\\ b ARCH=x SCRIPT=imagenet_fsdp.py NPROC=3 bash ")


HERE, PORT = "127.0.0.1", str(20000 + os.getpid() % 10000)  # none that the kernel gives to others
SIMULATED = f"""#!/bin/bash
case "$*" in # in place of training, print the command
*imagenet_*) echo "$* at $MASTER_ADDR for $IMAGENET_SUITE" ;;
*) exec {sys.executable} "$@" ;;
esac
"""


# What a shell may hand to the commands that it starts. HERE is a folder of the test.
FUNCTIONS = """cd() { builtin cd "$@" && ls -a; }
python3() { echo mine; }; sed() { echo mine; }; dirname() { echo /; }"""
VARIABLES = f"""mkdir -p HERE/other/scripts; export CDPATH=HERE/other:.:..
cat >HERE/rc <<'END'
{FUNCTIONS}
END
export BASH_ENV=HERE/rc GREP_OPTIONS='-v --color=always' LC_ALL=C LANG=C
export PYTHONHOME=/nowhere PYTHONSAFEPATH=1 PYTHONINSPECT=1
export shell=zsh root=/ base=/ name=a files=b log=c why=d listed=e
export label=f torchrun=g variables=h preflight=i processes=7 most=1 cores=k data=l
unset HOME USER LOGNAME HOSTNAME"""
EXPORTS = {
    "variables": VARIABLES,
    "functions": f"{FUNCTIONS}; export -f cd python3 sed dirname",
    "options": "set -f; export SHELLOPTS POSIXLY_CORRECT=1",  # in which BASH_ENV is not read
}


@pytest.mark.parametrize("exports", EXPORTS.values(), ids=EXPORTS)
def test_exports_of_the_callers_shell_change_nothing(tmp_path, exports):
    (tmp_path / "python").write_text(SIMULATED)
    (tmp_path / "python").chmod(0o755)
    env = {"PYTHON": f"{tmp_path}/python", "DATA": "/d", "SCRIPT": "imagenet_nd.py"}
    exports = exports.replace("HERE", str(tmp_path))
    cd = f"{exports}\nbuiltin cd {ROOT}; exec bash scripts"
    trained, started, listened, helped = shell(
        f"{cd}/one_node_train.sh 1.5 mine 8 -- --output-dir {tmp_path}/runs",
        f"{cd}/quickstart.sh {tmp_path}/none",
        f"{cd}/tensorboard.sh {tmp_path}/none",
        f"{cd}/scaling_study.sh --help",
        **env,
    )
    assert (trained.code, trained.err) == (0, "")
    words = "-b 8 --train-time 1.5 --name mine --resume auto --epochs 100000"
    words += f" --lr-schedule constant --output-dir {tmp_path}/runs /d"
    last = trained.out.splitlines()[-1]
    assert last.split(" at ")[0] == f"{ROOT}/imagenet_nd.py {words}"
    started.fails_with(f"there is no folder {tmp_path}/none")
    listened.fails_with(f"{tmp_path}/none")
    assert (helped.code, helped.err) == (0, "")
    assert helped.out.startswith("usage: scaling_study.sh")


def test_closed_streams_are_no_place_for_files(tmp_path):
    """As over ssh, so that it returns at once: what is printed must not go into a user's files."""
    (tmp_path / "python").write_text(SIMULATED)
    (tmp_path / "python").chmod(0o755)
    code = "from utils.start import launch; launch.prepare(); print(1); file = open('it', 'w'); "
    code += "import os; [os.write(n, b'lost') for n in (1, 2)]; print(file.write('kept'))"
    wrapper = f"{SCRIPTS}/one_node_train.sh 1 mine 8 -- --output-dir {tmp_path}/runs"
    env = {"PYTHON": f"{tmp_path}/python", "SCRIPT": "imagenet_nd.py", "PYTHONPATH": str(ROOT)}
    for done in shell(
        f"cd {tmp_path}; exec {sys.executable} -c {shlex.quote(code)} <&- >&- 2>&-",
        f"exec bash {wrapper} <&- >&- 2>&-",
        **env,
    ):
        assert done.code == 0
    assert (tmp_path / "it").read_text() == "kept"
    log = tmp_path / "runs/mine/node0.log"
    assert eventually(lambda: "--name mine" in log.read_text())  # tee may still write


ELASTIC = f"--nnodes=1:2 --rdzv_backend=c10d --rdzv_id=mine --local_addr={HERE} "
ELASTIC += "--rdzv_conf=is_host=true,last_call_timeout=15 "
ELASTIC += f"--rdzv_endpoint={HERE}:{PORT} --max_restarts=100 "


def test_arguments_reach_the_training(tmp_path):
    """On one node, without the variables of a job on several, and on several, each with its log. Of
    a repeated option the last counts; a recipe decides about the end."""
    text = SIMULATED.replace("*imagenet_*)", "*imagenet_*|*preflight\\ [0-9]*)")
    text = text.replace("\n*)", "\n*choose_torch.py\\ check*) echo 1 2 7 ;;\n*)")  # seven cores
    programs = tmp_path / "my programs"
    programs.mkdir()
    (programs / "python").write_text(text)
    (programs / "python").chmod(0o755)
    env = {"PYTHON": f"{programs}/python", "NPROC": "2", "MASTER_ADDR": HERE, "WORLD_SIZE": "2"}
    env |= {"ARCH": "vgg19", "DATA": "/d", "OMP_NUM_THREADS": "", "OMP_WAIT_POLICY": ""}
    env["HOME"] = str(tmp_path)
    other = "PYTHON=./python SCRIPT=imagenet_nd.py"
    end = "mine 8 -- -p 3 --tag 'two  words' --output-dir a '--output-dir=~/my runs"
    results = shell(
        f"cd '{programs}'; {other} bash {SCRIPTS}/one_node_train.sh 1 {end}/0'",
        f"bash {SCRIPTS}/one_node_train.sh 1 {end}/1' --recipe tiny",
        f"bash {SCRIPTS}/multi_node_train.sh 1 1 2 {end}/2'",
        f"MASTER_PORT={PORT} bash {SCRIPTS}/elastic_train.sh 1 1:2 {end}/3'",
        f"MASTER_PORT=7 bash {SCRIPTS}/multi_node_train.sh 1 0 2 {end}/4'",
        **env,
    )
    one = "--nnodes=1 --node_rank=0 --master_addr=127.0.0.1 --master_port="
    two = f"--nnodes=2 --node_rank={{}} --master_addr={HERE} --master_port={{}} "
    places = "", one, two.format(1, 8888), ELASTIC, two.format(0, 7)
    logs = "node0", "node0", "node1", "node_*", "node0"
    for number, (done, place) in enumerate(zip(results, places, strict=True)):
        assert (done.code, done.err) == (0, "")
        lasting = "" if number == 1 else " --epochs 100000 --lr-schedule constant"
        line = f"imagenet_{'ddp' if number else 'nd'}.py -b 8 --train-time 1 --name mine"
        line += f" --resume auto{lasting} -a vgg19 -p 3 --tag two words --output-dir a"
        line += f" --output-dir=~/my runs/{number}{' --recipe tiny' * (number == 1)} /d"
        assert "--tag two  words" in done.out.splitlines()[-1]
        last = " ".join(done.out.splitlines()[-1].split())
        assert f"{ROOT}/{line} at{f' {HERE}' * (number > 1)} for launcher:mine" in last
        (file,) = (tmp_path / f"my runs/{number}/mine").glob("*.log")
        assert file.match(f"{logs[number]}.log") and line in re.sub(" +", " ", file.read_text())
        if number:
            assert last.startswith(f"{ROOT}/scripts/torchrun.py {place}")
            assert f"--nproc_per_node=2 {ROOT}/{line}" in last
            shown = [line for line in done.out.splitlines() if line.startswith("+ ")]
            typed = ["+", *["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"] * (number == 3)]
            typed += ["OMP_NUM_THREADS=3", "OMP_WAIT_POLICY=passive", f"{programs}/torchrun"]
            assert shlex.split(shown[-1])[: len(typed)] == typed
            assert len(shown) == 1 or f"{programs}/python" in shlex.split(shown[0])
            assert ("torchrun waits for at least 1 of 2 nodes at " in done.out) == (number == 3)


def test_an_ipv6_address_gets_the_brackets_that_a_port_needs():
    for given, used in (("fd00::1", "[fd00::1]"), ("[::1]", "[::1]"), ("10.0.0.1", "10.0.0.1")):
        line = f"source {SCRIPTS}/launch.sh; MASTER_ADDR={given}; need_master; echo $MASTER_ADDR"
        (done,) = shell(line)
        assert done == Result(0, f"{used}\n", "")


@pytest.mark.parametrize("processes", ["0", "two", "99999", "9" * 30])
def test_a_number_of_processes_that_cannot_be_meant(tmp_path, processes):
    done = run_wrapper("one_node_train.sh 1 mine 8", tmp_path, NPROC=processes)
    done.fails_with(f"NPROC is {processes}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrapper", "words", "named"),
    [
        ("one_node_train.sh 1 run", "{folder}/none", "none is missing"),
        pytest.param(
            *("elastic_train.sh 1 1:1 run", "--mixup 2 {folder}", "--mixup"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_bad_input_ends_with_one_error(folder, tmp_path, wrapper, words, named):
    """Not with torchrun's stack trace, nor its exit code, nor after a hundred restarts."""
    command = f"{wrapper} 5 -- {TINY_LINE} {words.format(folder=folder)}"
    env = {"MASTER_ADDR": HERE, "MASTER_PORT": PORT, "NPROC": "2"}
    done = run_wrapper(command, tmp_path, **env)
    assert done.code == 2, done
    assert "Traceback" not in done.out + done.err
    assert named in done.sentence


def training(wrapper: str, *options: object, **env: str) -> Running:
    """A wrapper that trains, in the background."""
    become = "import os, sys; os.execvp('bash', ['bash', *sys.argv[1:]])"
    words = [f"{SCRIPTS}/{wrapper.split()[0]}", *wrapper.split()[1:], "--", *TINY_LINE.split()]
    env = {"NPROC": "1", "STEP_SECONDS": "0.05"} | env
    return Running("-c", become, *words, "-p", "1", *options, **env)


def ended(run: Running, end: str) -> Result:
    """The result of a training that a signal ends, after which none of its processes lives."""
    run.until(r"step +3/")
    family = run.meet_family()
    if end == "rank":
        parents = {one.parent for one in family}  # the ranks have loader workers
        ranks = [one for one in family if one.parent == run.pid and one.pid in parents]
        os.kill(max(one.pid for one in ranks), signal.SIGKILL)
    else:
        run.send(getattr(signal, end), group=end == "SIGINT")
    result = run.result()
    assert eventually(lambda: not any(one.lives() for one in family)), family
    assert "Traceback" not in result.err
    return result


@pytest.mark.parametrize("name", ["INT", "HUP", "TERM"])
def test_the_last_words_after_a_signal_to_all_processes_are_shown_and_kept(tmp_path, name):
    """As from the terminal, from `timeout` and from systemd, which stops a service so."""
    late = f"trap 'sleep 0.5; echo stopped; echo error >&2' {name}; kill -{name} 0"
    (done,) = shell(f"source {SCRIPTS}/launch.sh; log_to {tmp_path}/log; sleep 0.5; {late}")
    assert (done.out, done.err) == ("stopped\n", "error\n")
    assert sorted((tmp_path / "log").read_text().split()) == ["error", "stopped"]


@pytest.mark.parametrize("end", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.long)])
def test_the_printed_torchrun_command_continues_a_stopped_training(folder, tmp_path, end):
    """As the wrapper itself would."""
    options = ("--epochs", "10000", "--output-dir", tmp_path, folder)
    with training("one_node_train.sh 1 run 5", *options) as run:
        line = run.until(r"^\+ .*torchrun .*--nnodes=1 ")
        result = ended(run, end)
    assert result.code == 75, result.err
    assert "interrupted by a signal" in result.out  # tee outlives what it copies
    assert summary(tmp_path / "run")["finished_because"] == "interrupted"
    assert (tmp_path / "run/snapshot.pt").is_file()
    assert line in (tmp_path / "run/node0.log").read_text()
    epoch = int(re.findall(r"Epoch (\d+)/10000 step", result.out)[-1])
    pasted = line.removeprefix("+ ").strip().replace("--epochs 10000", f"--epochs {epoch}")
    (done,) = shell(f"cd {tmp_path} && {pasted}")
    assert done.code == 0, done.err
    assert "resumed from" in done.out
    facts = summary(tmp_path / "run")
    assert facts["epochs_done"] == epoch


@pytest.mark.parametrize(
    ("end", "code"), [("SIGKILL", -9), pytest.param("rank", 137, marks=pytest.mark.long)]
)
def test_a_training_by_torchrun_or_a_rank_of_it_is_killed(folder, tmp_path, end, code):
    options = ("--epochs", "10000", "--output-dir", tmp_path, folder)
    with training("one_node_train.sh 1 run 5", *options) as run:
        result = ended(run, end)
    assert result.code == code, result.err
    if end == "rank":
        assert result.err.splitlines()[-1] == "error: a training process was killed by SIGKILL"


@pytest.mark.long
def test_hosts_whose_own_names_do_not_resolve_can_train(folder, tmp_path):
    """Two, one of which is lost, and one elastically. Closed data ports are one error on both."""

    def line(command: str, processes: int, port: int = 8888) -> str:
        first = f"NPROC={processes} MASTER_ADDR={{ip}} MASTER_PORT={port} exec bash scripts/"
        return f"{first}{command} -- {TINY_LINE} -p 1 --output-dir {tmp_path} {folder} --epochs "

    by_hand = line("multi_node_train.sh 1 {rank} 2 by_hand 5", 1)
    env = {"STEP_SECONDS": "0.05"}
    with Nodes(2) as nodes:
        for node in nodes:
            node.replace("/etc/hosts", "127.0.0.1 localhost\n")
        commands = [f"{by_hand}10000".format(rank=rank, ip=nodes[0].ip) for rank in range(2)]
        with nodes[0].type(commands[0], **env) as first, nodes[1].type(commands[1], **env) as other:
            first.until("all 2 nodes are here")
            first.until(r"^\+ .*torchrun --nnodes=2 --node_rank=0 --master_addr=10.77.0.1 ")
            first.until(r"Epoch 2/10000 step")
            os.kill(other.pid, signal.SIGKILL)  # bash, which has become torchrun
            lost = first.result()
            assert eventually(lambda: not nodes[1].processes()), nodes[1].processes()
        assert (lost.code, "Traceback" in lost.err) == (69, False), lost.err
        assert "lost touch with rank 1 on node1" in lost.err.splitlines()[-1]
        log = (tmp_path / "by_hand/train.log").read_text()
        assert "processes: 2, nodes: 2" in log
        nodes[1].block_ports("1024-8887, 8889-65535")
        closed = "node0 (node 0) cannot connect to node1 (node 1)"
        alone = line("elastic_train.sh 1 1:1 elastic 5", 2, 7777).format(ip=nodes[0].ip)
        with nodes[0].type(f"{alone}1", **env) as elastic:
            for result in type_on_each(nodes, f"{by_hand}1", **env):
                result.fails_with(closed, "open all TCP ports")
            assert elastic.result().code == 0
        facts = summary(tmp_path / "elastic")
        assert [facts[key] for key in ("world_size", "epochs_done")] == [2, 1]
        assert eventually(lambda: not any(node.processes() for node in nodes))
