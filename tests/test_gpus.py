"""Which torch is installed for the GPUs of a machine, and the error for one that cannot use them.

nvidia-smi, pip and torch are stand-ins."""

import importlib
import json
import re
import shlex
import sys

import check_requirements
import pytest
import torch
from conftest import ROOT, shell, train
from running import alone

from utils.start import nvidia
from utils.start.errors import UserError
from utils.start.gpu_check import check_gpus, explain, has_kernels

T4, V100, H100 = ("Tesla T4", "7.5"), ("Tesla V100-SXM2-16GB", "7.0"), ("NVIDIA H100 PCIe", "9.0")
P100 = ("Tesla P100-PCIE-16GB", "6.0")
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
SCRIPTS = sorted(path.stem for path in ROOT.glob("imagenet_*.py"))
NEWEST_KERNELS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


def simulate(folder, driver="", *cards, fails=""):
    """Put an nvidia-smi into ``folder``."""
    lines = [f"echo '{name}, {driver}.54, {capability}'" for name, capability in cards]
    lines.append("echo WARNING: infoROM is corrupted at gpu 0000:00:1E.0")  # as some cards have
    program(folder / "nvidia-smi", "\n".join(["#!/bin/sh", fails, *lines]))


def program(path, text):
    path.write_text(f"{text}\n")
    path.chmod(0o755)


def loaded_driver(folder, driver, *cards):
    """The files of a loaded driver."""
    version = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}.54.15  Tue Mar 5 2024\n"
    folder.mkdir()
    (folder / "version").write_text(version)
    for number, (name, _) in enumerate(cards):
        (folder / f"gpus/{number}").mkdir(parents=True)
        (folder / f"gpus/{number}/information").write_text(f"Model: \t\t {name}\nIRQ: 10\n")
    return folder


@pytest.fixture
def bin_folder(tmp_path, monkeypatch):
    """A folder in front of PATH; the environment does not hide GPUs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


@pytest.mark.parametrize(
    ("driver", "cards", "expected"),
    [
        ("524", [H100, H100], "driver 525 or newer"),
        ("525", [V100], nvidia.CUDA12),
        ("579", [T4, T4], nvidia.CUDA12),
        ("580", [H100, T4], nvidia.NEWEST),
        ("580", [H100, V100], nvidia.CUDA12),
        ("600", [P100], "sm_70"),
        ("600", [H100, P100], nvidia.NEWEST),
    ],
)
def test_torch_is_chosen_by_driver_and_gpus(bin_folder, tmp_path, driver, cards, expected):
    """As nvidia-smi reports them; without it, by the files of the driver."""
    simulate(bin_folder, driver, *cards)
    by_smi = nvidia.look(tmp_path / "none")
    (bin_folder / "nvidia-smi").unlink()
    for machine in (by_smi, nvidia.look(loaded_driver(tmp_path / "proc", driver, *cards))):
        assert [name for name, _ in machine.gpus] == [name for name, _ in cards]
        if expected.startswith("constraints"):
            file, why = nvidia.choose(machine)
            assert file == expected
            assert f"{cards[0][0]}" in why and f"driver {driver}.54" in why
        else:
            with pytest.raises(UserError, match=expected):
                nvidia.choose(machine)


def test_without_gpus_the_newest_is_chosen_and_nothing_is_wrong(bin_folder, tmp_path):
    """A machine for many tasks may have nvidia-smi all the same."""
    for _ in range(2):
        assert nvidia.choose(nvidia.look(tmp_path)) == (nvidia.NEWEST, "no NVIDIA GPU here")
        check_gpus()
        simulate(bin_folder, fails="echo No devices were found; exit 6")


@pytest.mark.parametrize(
    ("fails", "words"),
    [(f"echo {MISMATCH}; exit 18", "mismatch.*reboot"), ("exec sleep 600", "did not answer")],
)
def test_an_nvidia_smi_that_fails_or_hangs(bin_folder, tmp_path, monkeypatch, fails, words):
    simulate(bin_folder, fails=fails)
    machine = nvidia.look(loaded_driver(tmp_path / "proc", "535", T4), limit=0.5)
    with pytest.raises(UserError, match=words):
        nvidia.choose(machine)
    for hidden in ("-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert nvidia.choose(machine)[0] == nvidia.NEWEST


def test_kernels_run_on_later_minor_versions_and_ptx_on_all_later_ones():
    for capability, built_for, expected in (
        ((7, 0), NEWEST_KERNELS, False),
        ((8, 9), NEWEST_KERNELS, True),  # sm_86 runs on 8.9
        ((9, 0), ["sm_80", "compute_80"], True),  # PTX
        ((9, 0), ["sm_80", "compute_100"], False),
        ((9, 0), ["sm_90a"], True),
    ):
        assert has_kernels(capability, built_for) is expected, (capability, built_for)


def simulated_torch(monkeypatch, *seen, cuda="13.0"):
    """A torch that sees the GPUs ``seen``."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    stand_ins = {
        "is_available": lambda: bool(seen),
        "device_count": lambda: len(seen),
        "get_arch_list": lambda: NEWEST_KERNELS,
        "get_device_capability": lambda i: tuple(map(int, seen[i][1].split("."))),
        "get_device_name": lambda i: seen[i][0],
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)


@pytest.mark.parametrize(
    ("driver", "cards", "seen", "cuda", "words"),
    [
        ("550", [T4], (), "13.0", ("driver 550", "driver 580 or newer", "cuda12.txt")),
        ("470", [T4], (), "12.8", ("driver 525 or newer", "install a newer driver")),
        ("580", [V100], (V100,), "13.0", ("no kernels", "(sm_70)", "cuda12.txt")),
        ("580", [T4, P100], (T4, P100), "13.0", ("no kernels", "CUDA_VISIBLE_DEVICES=0 ")),
        ("", [], (), "13.0", ("reboot",)),
    ],
)
def test_gpus_that_torch_cannot_use_are_an_error(
    bin_folder, tmp_path, monkeypatch, driver, cards, seen, cuda, words
):
    simulate(bin_folder, driver, *cards, fails="" if driver else f"echo {MISMATCH}; exit 18")
    simulated_torch(monkeypatch, *seen, cuda=cuda)
    monkeypatch.chdir(tmp_path)  # where what the text proposes can be typed, too
    text = explain(nvidia.look(tmp_path / "none"))
    assert text.count(f"`bash {ROOT}/scripts/quickstart.sh`") == text.count("quickstart.sh")
    assert text.count(f"then run {ROOT}/.venv/bin/python;") == text.count("quickstart.sh")
    for word in (f"torch {torch.__version__} (CUDA {cuda})", 'CUDA_VISIBLE_DEVICES=""', *words):
        assert word in text
    assert "\n" not in text
    with pytest.raises(UserError, match=r"torch .* cannot use the GPUs of this machine"):
        check_gpus()
    if seen:
        simulated_torch(monkeypatch, T4, H100)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_gpus()


def test_gpus_are_not_renumbered_where_some_are_hidden_already(bin_folder, tmp_path, monkeypatch):
    """CUDA_VISIBLE_DEVICES=0 would be another GPU than the first of these."""
    simulate(bin_folder, "580", T4, P100)
    simulated_torch(monkeypatch, T4, P100)
    assert "CUDA_VISIBLE_DEVICES=0 uses the others" in explain(nvidia.look(tmp_path / "none"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert "uses the others" not in explain(nvidia.look(tmp_path / "none"))


@pytest.mark.parametrize(
    ("said", "visible", "words"),
    [
        ("The NVIDIA driver\n is too old (12040).", "7", "The NVIDIA driver is too old"),
        ("No CUDA GPUs are available", "7", "CUDA_VISIBLE_DEVICES=7 selects none of them"),
        ("Found no NVIDIA driver on your system.", "", "a container needs `--gpus all`"),
    ],
)
def test_the_reason_of_cuda_comes_first(bin_folder, monkeypatch, said, visible, words):
    """Also if torch has warned about it before: it does that once in a process."""

    def init():
        raise RuntimeError(said)

    simulate(bin_folder, "550", T4)
    simulated_torch(monkeypatch)
    monkeypatch.setattr(torch.cuda, "init", init)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UserError, match=f"this machine: {words}"):
        check_gpus()


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_ends_with_the_error(bin_folder, monkeypatch, folder, script):
    # As under torchrun: the processes that a script starts itself have a torch of their own.
    for name, value in (alone() | {"GLOO_SOCKET_IFNAME": "lo"}).items():
        monkeypatch.setenv(name, value)
    simulate(bin_folder, "580", V100)
    simulated_torch(monkeypatch, V100)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "-a", "resnet18", str(folder)])
    with pytest.raises(UserError, match=r"torch.*cannot use the GPUs") as caught:
        importlib.import_module(script).main()
    assert caught.value.code == 2


def test_wrappers_end_with_the_error_and_without_gpus_the_log_says_so(bin_folder, tmp_path, folder):
    simulate(bin_folder, "515", T4)
    wrappers = ("one_node_train.sh 1", "multi_node_train.sh 1 0 2", "elastic_train.sh 1 1:2")
    set_up = f"export CUDA_VISIBLE_DEVICES=0 MASTER_ADDR=127.0.0.1 PATH={bin_folder}:$PATH"
    for result in shell(*(f"{set_up}; bash scripts/{one} name 4 -- {folder}" for one in wrappers)):
        result.fails_with("Tesla T4 (driver 515.54)", "driver 525")
    options = ("-a", "tiny_plain", "-b", 20, "--epochs", 1)
    where = ("--output-dir", tmp_path, "--name", "cpu", folder)
    train("imagenet_nd.py", *options, *where, PATH=f"{bin_folder}:/usr/bin:/bin")
    first = (tmp_path / "cpu/train.log").read_text().splitlines()[0]
    assert "CUDA_VISIBLE_DEVICES hides Tesla T4 (driver 515.54): training" in first


# ---- the set-up

PYTHON = """#!/bin/bash
# In place of python: venv and pip only note what they were asked for.
case "$*" in
*"-m venv"*) [ ! -L "${@: -1}" ] || exit 1 # as the real one
    mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
*"-m pip"*)
    echo "Collecting torch"
    echo "$*" >>LOG
    [ ! -e LOG.fails ] || { cat LOG.fails >&2; exit 1; } ;;
*check_requirements*) echo "it lacks torch" >&2; exit 1 ;;
*build_region_decode.py*) ;;
*) exec REAL "$@" ;;
esac
"""


class SetUp:
    """A repository without environments, and a python whose pip installs nothing."""

    def __init__(self, root, bin_folder):
        self.root, self.bin, self.log = root, bin_folder, root / "pip"
        for name in ("scripts", "utils", "tests", "requirements.txt"):
            (root / name).symlink_to(ROOT / name)
        text = PYTHON.replace("LOG", str(self.log)).replace("REAL", sys.executable)
        program(bin_folder / "python3", text)

    def run(self, *files, typed=None, **env):
        """use_environment; its exit code and all that it prints. ``typed``: on a terminal."""
        env = {"PATH": f"{self.bin}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "0"} | env
        line = f"set -eu; source scripts/environment.sh; use_environment {' '.join(files)}"
        line = f"cd {self.root}; {line}; echo using $PYTHON"
        if typed is not None:
            line = f"printf '{typed}' | script -qec {shlex.quote(line)} /dev/null"
        (done,) = shell(line, **env)
        return done.code, done.out + done.err

    def installed(self):
        """The constraints files that pip was given since the last call."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.partition("-c ")[2].split()[0].rpartition("/")[2] for line in lines]


@pytest.fixture
def set_up(tmp_path, bin_folder):
    return SetUp(tmp_path, bin_folder)


def test_the_set_up_installs_a_torch_for_the_driver_once(set_up):
    more = ("tests/requirements.txt",)  # as scripts/test.sh does
    (set_up.root / ".venv").symlink_to("on another disk")  # whose quota is larger
    for driver, files, installed in (
        (550, (), [nvidia.CUDA12]),
        (550, (), []),
        (550, more, [nvidia.CUDA12]),
        (550, (), []),
        (550, more, []),
        (580, (), [nvidia.NEWEST]),
    ):
        simulate(set_up.bin, driver, T4)
        code, out = set_up.run(*files, VIRTUAL_ENV="")
        assert (code, set_up.installed()) == (0, installed), out
        assert f"using {set_up.root}/.venv/bin/python" in out
        assert f"{set_up.bin}/python3 is not used: it lacks torch\n" in out
        assert ("about 5.5 GB" in out) == ("Collecting torch" in out) == bool(installed)
        noted = "Tesla T4 (driver 550.54); newer versions of torch need driver 580" in out
        assert noted == (installed == [nvidia.CUDA12])


@pytest.mark.parametrize(("typed", "code", "words"), [("\\n", 0, "using"), ("", 2, "nothing was")])
def test_on_a_terminal_enter_begins_the_installation(set_up, typed, code, words):
    simulate(set_up.bin, "580", T4)
    done, out = set_up.run(typed=typed, SHELL="/bin/bash", VIRTUAL_ENV="")
    assert "Press Enter to install, or Ctrl-C to stop: " in out
    assert (done, words in out.splitlines()[-1]) == (code, True), out
    assert set_up.installed() == [nvidia.NEWEST][: code == 0]


def test_the_set_up_says_what_it_lacks(set_up):
    simulate(set_up.bin, "515", T4)
    code, out = set_up.run(VIRTUAL_ENV="")
    assert code == 2
    assert "error: Tesla T4 (driver 515.54): torch needs driver 525" in out
    (set_up.bin / "nvidia-smi").unlink()
    fails = set_up.log.with_suffix(".fails")
    version = f"for Python {'.'.join(map(str, sys.version_info[:3]))}"
    for said, words in (
        ("ERROR: No matching distribution found for torch==2.14.1", version),
        ("ERROR: ReadTimeoutError", "run this again to continue"),
    ):
        fails.write_text(said)
        code, out = set_up.run(VIRTUAL_ENV="")
        assert code == 2
        assert said in out
        assert words in out.splitlines()[-1]
    fails.unlink()
    set_up.installed()
    assert set_up.run(VIRTUAL_ENV="")[0] == 0  # what was interrupted is done again
    assert set_up.installed() == [nvidia.NEWEST]


def test_an_environment_is_taken_when_its_torch_can_use_the_gpus(set_up):
    """Unless the oldest torch is asked for, which has an environment of its own."""
    mine, own = f"{set_up.bin}/python", f"{set_up.root}/.venv"
    lacks = next(line for line in PYTHON.splitlines() if "check_requirements" in line)
    has_all = (set_up.bin / "python3").read_text().replace(f"{lacks}\n", "")
    program(set_up.bin / "python", has_all)
    for driver, torch_of, installed, used in (
        ("", "", [], mine),
        ("", "oldest", [nvidia.CUDA12], f"{own}-oldest/bin/python"),
        ("525", "", [nvidia.CUDA12], f"{own}/bin/python"),
    ):
        if driver:
            simulate(set_up.bin, driver, T4)
        code, out = set_up.run(VIRTUAL_ENV=str(set_up.bin), TORCH=torch_of)
        assert (code, set_up.installed()) == (0, installed), out
        assert f"using {used}\n" in out
        assert ("/bin/python is not used: torch" in out) == bool(driver)


def test_packages_that_are_missing_or_too_old_are_named(tmp_path):
    lines = "# ours\ntorch>=99  # too old here\n\nnumpy\nno-such-package==1\n"
    (tmp_path / "requirements.txt").write_text(lines)
    unmet = check_requirements.missing(tmp_path / "requirements.txt")
    assert unmet == ["torch>=99", "no-such-package==1"]


def test_quickstart_keeps_the_global_batch_and_repeats_nothing(set_up):
    text = '#!/bin/bash\ncase "$*" in *imagenet_*|*compare_runs*) echo "$*" on $OMP_NUM_THREADS ;; '
    text += "*build_region*) ;;\n"
    text += f'*device_count*) echo 0 ;; *) exec {sys.executable} "$@" ;; esac'
    program(set_up.bin / "python", text)
    (set_up.root / "images").mkdir()
    line = f"cd {set_up.root}; bash scripts/quickstart.sh images"
    env = {"PYTHON": str(set_up.bin / "python"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "7"}
    program(set_up.bin / "python", text.replace("echo 0", "echo 1"))  # GPU
    (done,) = shell(line, **env)
    assert re.search(
        r"\nimagenet_ddp.py -g 1 -b 64 --name quickstart_images_1-ddp .* on 7\n", done.out
    )
    program(set_up.bin / "python", text)
    (done,) = shell(line, **env)
    assert done.code == 0, done.err
    assert done.out.count(f"{set_up.root}/images on 1\n") == 2
    for words in ("nd.py -b 64 --name quickstart_images_1", "ddp.py -g 2 -b 32 --name quickstart_"):
        assert f"\nimagenet_{words}" in done.out
    both = "runs/quickstart_images_1 runs/quickstart_images_2-ddp"
    assert f"\nscripts/compare_runs.py {both} --labels" in done.out
    run = set_up.root / "runs/quickstart_images_1"
    run.mkdir()
    (run / "summary.json").write_text('{"finished_because": "epochs"}')
    for data, trains in ((set_up.root / "images", False), ("/other", True)):
        (run / "options.json").write_text(json.dumps({"data": str(data)}))
        (done,) = shell(line, **env)
        assert ("\nruns/quickstart_images_1 is finished already" in done.out) != trains
        assert ("imagenet_nd.py -b 64 --name quickstart_images.2_1" in done.out) == trains
    (set_up.root / "images").rename(set_up.root / "my images")
    (done,) = shell(line.replace("images", "'my images'"), **env)
    assert "\n+ python imagenet_nd.py -b 64 --name quickstart_my\\ images_1 -a " in done.out
    (set_up.root / "my images").rename(set_up.root / "images")
    (run / "options.json").unlink()
    (done,) = shell(f"cd /; bash {set_up.root}/scripts/quickstart.sh {set_up.root}/images", **env)
    for words in ("runs/quickstart_images_1 is finished", "runs/quickstart_images/overlay.png\n"):
        assert f" {set_up.root}/{words}" in done.out.replace("\n/", "\n /")
    assert f"python {set_up.root}/imagenet_nd.py -a resnet50 {set_up.root}/images\n" in done.out


@pytest.mark.parametrize("how", ["on PATH", "PYTHON", "own .venv"])
def test_a_python_that_has_everything_is_taken_and_named(set_up, how):
    """Also if no environment is active, as in a container, or under pyenv."""
    python = set_up.bin / "python"
    if how == "own .venv":  # which nobody has activated, as in a job of cron
        python = set_up.root / ".venv/bin/python"
        python.parent.mkdir(parents=True)
    else:
        (set_up.bin / "python3").unlink()
    program(python, f'#!/bin/bash\nexec {sys.executable} "$@"')
    given = {"PYTHON": str(python), "PATH": "/usr/bin:/bin"} if how == "PYTHON" else {}
    code, out = set_up.run(VIRTUAL_ENV="", **given)
    assert code == 0, out
    assert f"Python: {python}, which has all packages\n" in out
    assert (set_up.root / ".venv").exists() == (how == "own .venv") and not set_up.installed()


def test_commands_without_packages_prefer_our_environment_to_the_systems_python(set_up):
    """Which may be older than 3.10; an active one comes first."""
    own = set_up.root / ".venv/bin/python"
    own.parent.mkdir(parents=True)
    for python in (own, set_up.bin / "python3"):
        program(python, f"#!/bin/bash\necho {python} ${{1##*/}}")
    path = f"{set_up.bin}:/usr/bin:/bin"
    for name, file in (
        ("status", "status"),
        ("cleanup", "cleanup"),
        ("train_on_nodes", "launcher"),
    ):
        for given, python in (({}, own), ({"VIRTUAL_ENV": "/x"}, set_up.bin / "python3")):
            env = {"VIRTUAL_ENV": "", "CONDA_PREFIX": "", "PATH": path} | given
            (done,) = shell(f"bash {set_up.root}/scripts/{name}.sh", **env)
            assert done.out == f"{python} {file}.py\n"
