"""scripts/bench_network.py: that it measures what it claims to; not how fast anything is."""

import os
import shutil

import bench_network
import pytest
from conftest import python
from running import STAND_IN

BENCH = "scripts/bench_network.py"


def figures(ms: float, mb: float = 1.0) -> dict:
    return {
        "ms_per_step": ms,
        "images_per_s": 1000 / ms,
        "network_mb_per_step": mb,
        "comm": "int8",
    }


def test_rows_are_medians_beside_one_node_and_the_first_method():
    found = {
        "alone": [figures(90), figures(80), figures(100)],
        "fp32": [figures(180, 50), figures(200, 52), figures(200, 51)],
        "auto": [figures(90, 13), figures(100, 13), figures(100, 13)],
    }
    assert bench_network.rows_of(4, found) == [
        ["4", "fp32", "51.0", "200", "5", "50%", "1.00"],
        ["4", "auto: int8", "13.0", "100", "10", "100%", "2.00"],
    ]


@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("tc")),
    reason="simulated nodes need root, unshare and tc",
)
@pytest.mark.long
def test_two_simulated_nodes():
    """Bytes that the interfaces count are those of the ring, and headers."""
    line = ("--nodes", 2, "--rounds", 1, "--methods", "fp32,int8", "--gbit", 10, "--")
    options = ("-a", "resnet18", "-b", 2, "--image-size", 32, "--classes", 10)
    done = python(BENCH, *line, *options, PYTHONPATH=STAND_IN)
    assert done.code == 0, done.err
    head, _, *rows = done.out.strip().splitlines()
    assert head.split(" | ")[2] == "MB sent"
    sent = {row.split(" | ")[1]: float(row.split(" | ")[2]) for row in rows}
    values = 11.18  # M, of ResNet-18 with 10 classes
    assert 4 * values < sent["fp32"] < 1.15 * 4 * values
    assert values < sent["int8"] < 1.15 * values


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--methods", "fp32,fp8"), "unknown method fp8"),
        (("--nodes", "1,2"), "at least 2 nodes"),
        (("--nodes", "x"), "invalid list of numbers value: 'x'"),
        (("--nodes", "2,4", "--master", "127.0.0.1"), "one number with --master"),
        (("--gbit", "0"), "--gbit must be more than 0"),
    ],
)
def test_wrong_options_are_one_error_message(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as ended:
        bench_network.parse(list(arguments))
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err
