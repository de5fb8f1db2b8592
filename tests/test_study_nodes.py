"""scripts/scaling_study.sh on four nodes with their own sshd; launcher and node are killed."""

import signal
from pathlib import Path

import pytest
from conftest import ROOT, TIMEOUT
from nodes import Nodes, need
from running import TINY_LINE, eventually, tiny
from test_study import lines_without_times

pytestmark = pytest.mark.long
_, ENV = tiny()


def line(hosts: Path, folder: Path, place: Path, slow: bool) -> str:
    """A study of 1, 2 and 4 nodes, as people type it. The nodes share their file system."""
    study = f"bash scripts/scaling_study.sh {hosts} --name s --logbook {place}/book --dir {ROOT}"
    if slow:  # the doctor looks after the nodes of the other one
        study += " --no-doctor --env STEP_SECONDS=0.3"
    options = f"--comm fp32 --output-dir {place}/runs -p 1 --epochs 3"
    return f"{study} -- imagenet_ddp.py {TINY_LINE} {options} {folder}"


def test_a_study_that_is_killed_twice(folder, tmp_path):
    """The table equals that of an undisturbed study but for times."""
    need("rsync")
    with Nodes(5) as nodes:
        for node in nodes[1:]:
            node.start_sshd(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **ENV)
        hosts = tmp_path / "hosts"
        hosts.write_text("".join(f"{node.name}  # one\n" for node in nodes[1:]))
        tables = []
        for kills in (False, True):
            place = tmp_path / f"kills{kills}"
            place.mkdir()
            if kills:
                slow = line(hosts, folder, place, slow=True)
                with nodes[0].type(slow, **ENV) as run:
                    run.limit.cancel()
                    run.until(r"\[node1\] Epoch 2/3 step")
                    run.send(signal.SIGKILL, group=True)
                    run.process.wait()
                with nodes[0].type(slow, **ENV) as run:
                    run.limit.cancel()
                    run.until(r"== arm s_2nodes")
                    run.until(r"\[node1\] Epoch 2/3 step")
                    nodes[2].kill()
                    run.until("lost the connection to node2")
                    nodes[2].start_again()
                    nodes[2].start_sshd(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **ENV)
                    done = run.result()
                assert done.code == 0, done.out + done.err  # the second attempt
            else:
                undisturbed = line(hosts, folder, place, slow=False)
                done = nodes[0].run(undisturbed, env=ENV, timeout=4 * TIMEOUT)
                assert done.code == 0, done.out + done.err
            assert "worth it" in (place / "book/s.md").read_text()
            tables.append(lines_without_times(place / "book/s.md"))
            assert "3 of 3 arms finished" in (place / "book/s.md").read_text()
            assert eventually(lambda: not any(node.processes() for node in nodes[1:]))
        assert tables[0] == tables[1]
        assert any("| 5 | 10 | 20 |" in row for row in tables[0]), tables[0]
