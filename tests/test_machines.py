"""Ordinary machines and shells: no home, few files, a terminal without UTF-8, other work."""

import os
import resource
import tempfile

import pytest
from conftest import ROOT, SMALL, draw_folder, python, shell
from joined import command

LINE = " ".join(("-a tiny_plain", *SMALL[2:4], "-b 5 --epochs 1"))
TRAINING = sorted(path.name for path in ROOT.glob("imagenet_*.py"))


SLOW_STARTS = ["bench_input.py", "bench_network.py", "bench_step.py", "doctor.py --data=DATA"]
SLOW_STARTS += ["gpu_report.py --device=cpu", "model_results.py DATA", "show_images.py DATA"]


@pytest.mark.parametrize("line", [*TRAINING, *SLOW_STARTS])
def test_a_start_says_so_and_sets_up_openmp_before_torch_is_imported(line, folder, tmp_path):
    """The import takes seconds. Threads that spin take the cores of the loader workers; one who
    wants them to spin sets it."""
    (tmp_path / "torch").mkdir()
    lines = "import os", "raise SystemExit('policy: ' + os.environ.get('OMP_WAIT_POLICY', ''))"
    (tmp_path / "torch/__init__.py").write_text("\n".join(lines))
    name = line.split()[0]
    line = f"{line} {folder}" if line in TRAINING else f"scripts/{line}"
    own = {"OMP_WAIT_POLICY": "active"} if line.startswith("imagenet_nd") else {}
    line = line.replace("DATA", str(folder))
    (done,) = shell(f"python {line}", PYTHONPATH=str(tmp_path), **own)
    lines = (done.out + done.err).splitlines()
    policy = own.get("OMP_WAIT_POLICY", "passive")
    assert lines == [f"starting {name}: loading PyTorch", f"policy: {policy}"], done


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_user_without_home_and_name_leaves_no_folder_in_the_working_directory():
    """As in ``docker run --user 12345``."""
    code = "import getpass, os; from utils.start import launch; from ssh import hosts; "
    code += "os.setuid(12345); hosts.add_node_options(hosts.make_parser('doctor.sh', None)); "
    code += "launch.prepare()"
    code += "; home = os.environ['HOME']; print(home, getpass.getuser(), os.stat(home).st_uid)"
    unset = "unset HOME USER LOGNAME LNAME USERNAME"
    with tempfile.TemporaryDirectory() as here:  # pytest's folders are closed to other users
        os.chmod(here, 0o777)
        for _ in range(2):  # the second one finds the folder of the first
            line = f'{unset}; cd {here}; exec python -c "{code}"'
            (done,) = shell(line, PYTHONPATH=f"{ROOT}:{ROOT}/scripts", TMPDIR=here)
            assert done.out == f"{here}/home_12345 uid12345 12345\n", done
        assert os.listdir(here) == ["home_12345"]


def test_few_open_files_are_raised_to_the_hard_limit_and_named_where_that_is_too_low(
    folder, tmp_path
):
    """16 workers in training and 16 in the first evaluation need more than 70 files."""
    line = ("imagenet_nd", *LINE.split(), "-j", 16, "--output-dir", tmp_path, folder, "--name")
    limit = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (70, {}))".format
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    raised = command(*line, "raised", BEFORE=limit(hard))
    assert raised.code == 0, raised.err
    command(*line, "low", BEFORE=limit(70)).fails_with("too many open files", "ulimit -n")


@pytest.mark.parametrize("shell_of", [{"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}, {}])
def test_names_that_the_terminal_cannot_show_end_no_training(tmp_path, shell_of):
    data = draw_folder(tmp_path / "données", train=6, val=2)
    open(os.fsencode(data / "val/class_0") + b"/\xff\xe4.JPEG", "w").close()  # no image
    name = "modèle_日本"
    words = (*LINE.split(), "-j", "1", "--max-bad-files", "5", "--name", name)
    new = ("-u",) if shell_of else ()  # an interpreter, which reads these variables
    line = (*new, "imagenet_nd.py", *words, "--output-dir", tmp_path / "läufe", data)
    done = python(*line, **shell_of)
    assert done.code == 0, done
    log = (tmp_path / "läufe" / name / "train.log").read_text("utf-8")
    assert "JPEG" in log and "Traceback" not in done.err
