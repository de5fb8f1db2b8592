"""The scripts in tests/trials: they start, and the trial of kills sees what differs."""

from conftest import ROOT, shell
from trials.kill_runs import Case

# Each in a fork of one process that has imported torch, as if it had been typed.
HELP = """
import os, runpy, sys, torch, torchvision
for trial in sys.argv[1:]:
    if not os.fork():
        sys.path[0], sys.argv = os.path.dirname(trial), [trial, "--help"]
        try:
            runpy.run_path(trial, run_name="__main__")
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(ended.code)  # to take torch apart would take seconds
    assert os.wait()[1] == 0, trial
"""


def test_each_starts_from_any_folder(tmp_path):
    trials = " ".join(map(str, (ROOT / "tests/trials").glob("*.py")))
    (done,) = shell(f"cd {tmp_path} && python -c '{HELP}' {trials}")
    assert (done.code, done.out.count("usage: ")) == (0, len(trials.split())), done.err


def test_kill_runs_sees_what_differs(tmp_path):
    """A batch left out, one seen twice without a snapshot, and one with other images."""
    case = Case("nd", tmp_path, tmp_path)
    order = [str(step) for step in range(16)]
    for run, attempts, log in [
        ("whole", [order], ""),
        ("good", [order[:6], order[4:]], "resumed from a: epoch 2, step 0"),
        ("epoch", [order[:4], order[4:]], "resumed from a: epoch 1, step 4"),
        ("gap", [order[:6], order[8:]], "resumed from a: epoch 3, step 0"),
        ("again", [order[:6], order[5:]], "resumed from a: epoch 2, step 0"),
        ("other", [[*order[:5], "7", *order[6:]]], ""),
        ("short", [order[:-1]], ""),
    ]:
        (tmp_path / f"{run}_seen").mkdir()
        (tmp_path / f"{run}.log").write_text(log)
        for number, seen in enumerate(attempts):
            (tmp_path / f"{run}_seen" / f"0_{number}").write_text("\n".join(seen) + "\n")
        case.differences.clear()
        case.compare_images(run)
        assert bool(case.differences) == (run not in ("whole", "good", "epoch")), run
