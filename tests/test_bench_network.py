"""scripts/bench_network.py: that it measures what it claims to; not how fast anything is."""

import json
from pathlib import Path
from types import SimpleNamespace

import bench_network
import pytest
from conftest import python
from nodes import need
from running import STAND_IN

BENCH = "scripts/bench_network.py"
TABLE = """
fp32 | 51.0 | 200 | 5 | 50% | 1.00
auto: int8 | 13.0 | 100 | 10 | 100% | 2.00
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_table_is_of_medians_beside_one_node_and_the_first_method(monkeypatch, capsys, rank):
    took = {"alone": [90, 80, 100], "fp32": [180, 200, 200], "auto": [90, 100, 100]}
    sent = {"alone": [0] * 3, "fp32": [50, 52, 51], "auto": [13] * 3}

    def run(commands, seconds, late, **options):
        ((_, script, dummy, *words),) = commands
        assert (Path(script).name, dummy, words.pop()) == ("imagenet_ddp.py", "--dummy", "case")
        given = dict(zip(words[::2], words[1::2], strict=False))
        where = given["--rank"], given["--dist-url"], given["-b"]
        assert where == (str(rank), "tcp://10.0.0.1:29555", "8")
        method = given["--comm"] if given["--world-size"] == "2" else "alone"
        ms, mb = took[method].pop(0), sent[method].pop(0)
        figures = {"ms_per_step": ms, "images_per_s": 1000 / ms, "network_mb_per_step": mb}
        case = Path(given["--output-dir"], "case")
        case.mkdir(parents=True)
        (case / "summary.json").write_text(json.dumps(figures | {"comm": "int8"}))
        return [SimpleNamespace(returncode=0)]

    monkeypatch.setattr(bench_network.commands, "run", run)
    line = ["--methods", "fp32,auto", "--master", "10.0.0.1", "--rank", str(rank), "--", "-b", "8"]
    assert bench_network.main(line) == 0
    out = capsys.readouterr().out
    assert all(row in out for row in TABLE.split("\n")) == (rank == 0)
    assert took == {"alone": [90, 80, 100] * rank, "fp32": [], "auto": []}


@pytest.mark.long
def test_two_simulated_nodes():
    """Bytes that the interfaces count are those of the ring, and headers."""
    need("tc")
    line = ("--nodes", 2, "--rounds", 1, "--methods", "fp32,int8", "--gbit", 10, "--")
    options = ("-a", "resnet18", "-b", 2, "--image-size", 32, "--classes", 10)
    done = python(BENCH, *line, *options, PYTHONPATH=STAND_IN)
    assert done.code == 0, done.err
    _, _, *rows = done.out.strip().splitlines()
    sent = {row.split(" | ")[1]: float(row.split(" | ")[2]) for row in rows}
    values = 11.18  # M, of ResNet-18 with 10 classes
    assert 4 * values < sent["fp32"] < 1.15 * 4 * values
    assert values < sent["int8"] < 1.15 * values
