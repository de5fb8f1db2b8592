"""The meeting point of an elastic job: who holds it, and what the others do when it is gone."""

import re
import signal
import socket
import sys

import pytest
from conftest import python
from nodes import Nodes
from running import TINY_LINE, Running, eventually, tiny

from utils.launch import network
from utils.launch.network import free_port

HERE = "127.0.0.1"
POINT = ("-m", "utils.launch.meeting_point", "--master")
# Deaf to signals, with a child in a session of its own: a torchrun that waits for its store.
DEAF = """
import signal, subprocess, time
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
print("deaf", flush=True)
time.sleep(600)
"""
STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("{}", {}, is_master=False)
store.set("who", "torchrun")
sys.exit(7 if store.get("who") == b"torchrun" else 1)
"""
LISTEN = "import socket, time; s = socket.create_server(('', 8888)); time.sleep(600)"
LINE = "MASTER_ADDR={ip} NPROC=1 bash scripts/elastic_train.sh 1 1:2 run 5 --"


def test_a_port_that_is_taken_is_a_sentence():
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        done = python(*POINT, HERE, "--port", port, "--", "true")
    assert done.code == 2
    assert f"port {port} of {HERE} is taken by another program" in done.sentence


def test_a_meeting_point_that_does_not_come_is_waited_for():
    assert not network.is_own("192.0.2.1")  # which nothing answers from
    done = python(*POINT, "192.0.2.1", "--port", 8888, "--wait", "3", "--", "true")
    assert done.code == 2
    assert "waiting for node 0 at 192.0.2.1:8888" in done.out
    assert "cannot be reached after 3 s" in done.sentence


def test_its_node_keeps_a_store_at_the_given_address_alone():
    """Torchrun's own would listen at all of them. Its exit code is passed on."""
    port = free_port()
    with socket.create_server(("127.0.0.3", port)):  # that of another interface stays free
        done = python(
            *POINT, HERE, "--port", port, "--", sys.executable, "-c", STORE.format(HERE, port)
        )
    assert done.code == 7, done.out + done.err


def test_a_second_ctrl_c_ends_a_deaf_torchrun_and_all_that_it_has_started():
    port = free_port()
    with Running(*POINT, HERE, "--port", port, "--", sys.executable, "-c", DEAF) as run:
        run.until("deaf")
        assert len(run.meet_family()) == 2
        run.send(signal.SIGINT)
        assert eventually(lambda: "Ctrl-C again" in run._error_text())
        run.send(signal.SIGINT)
        assert run.result().code == 128 + signal.SIGKILL
        assert eventually(lambda: not any(one.lives() for one in run.family))


@pytest.mark.long  # three quarters of a minute for the silence of a node alone
def test_without_its_meeting_point_a_node_ends_by_itself():
    with Nodes(2) as nodes:
        with nodes[0].type(["python3", "-c", LISTEN]):
            command = ["python", *POINT, nodes[0].ip, "--port", "8888", "--again", "LINE"]
            with nodes[1].type([*command, "--", "python", "-c", DEAF]) as left:
                left.until("deaf")
                nodes[0].kill()
                left.until("does not answer")
                done = left.result()
        assert done.code == 2
        assert re.search(r"meeting point 10.77.0.1:8888 is gone \(.*\): to continue", done.sentence)
        assert "on every node that is left: MASTER_ADDR=<IP of one of them> LINE" in done.sentence
        assert not nodes[1].processes()


@pytest.mark.long
def test_the_line_that_a_lost_meeting_point_asks_for_continues_the_run(folder, tmp_path):
    """Training has just begun; typed again with another address, the line goes on."""
    _, env = tiny(step_seconds=0.05)
    line = f"{LINE} {TINY_LINE} -p 1 --epochs 4 --output-dir {tmp_path} {folder}"
    with Nodes(2) as nodes:
        with nodes[0].type(line.format(ip=nodes[0].ip), **env) as first:
            with nodes[1].type(line.format(ip=nodes[0].ip), **env) as left:
                left.until(r"Epoch 2/4 step +2/")
                nodes[0].kill()
                done = left.result()
            first.result()
        assert done.code == 2, done.out + done.err
        asked = re.search(r"MASTER_ADDR=<IP of one of them> (.*)", done.err)[1]
        with nodes[1].type(f"MASTER_ADDR={nodes[1].ip} {asked}", **env) as again:
            again.until(r"resumed from .*: epoch 2")
            assert again.result().code == 0
        assert not nodes[1].processes()
