"""The nodes that other tests use are what they claim to be."""

import os

from conftest import ROOT
from nodes import Nodes, inside
from running import eventually

REACH = "python3 -c 'import socket; socket.create_connection((\"{}\", {}), 1)'"
LISTEN = """
import socket, time
servers = [socket.create_server(("", port)) for port in (5000, 5001)]
print("up", flush=True)
time.sleep(600)
"""


def test_nodes_have_names_addresses_ssh_firewall_and_cables_of_their_own():
    harness = Nodes(2)
    with harness as nodes:
        one, other = nodes
        for node in nodes:
            node.start_sshd(WHERE=f"at {node.name}")
        assert one.run("hostname; pwd").out == f"node0\n{ROOT}\n"
        assert "10.77.0.2/24" in other.run("ip -4 address show eth0").out
        assert one.run("ls /sys/class/net").out.split() == ["eth0", "lo"]
        assert one.run("ssh node1 'hostname; echo $WHERE'").out == "node1\nat node1\n"
        assert one.run(f"ssh -F {harness.ssh_config} node1 hostname").out == "node1\n"
        first = other.run("ps -e -o pid=,comm=").out.split("\n")[0].split()
        assert first == ["1", "sleep"]

        with other.type(["python3", "-c", LISTEN]) as server:
            server.until("up")
            assert one.run(REACH.format("node1", 5000)).code == 0
            other.block_ports("1-4999, 5000")
            assert "timed out" in one.run(REACH.format("node1", 5000)).err
            assert one.run(REACH.format("node1", 5001)).code == 0
            other.unblock_ports()
            assert one.run(REACH.format("node1", 5000)).code == 0
            other.link(False)
            assert one.run(REACH.format("node1", 5000)).code != 0
            other.link(True)
            assert eventually(lambda: one.run(REACH.format("node1", 5000)).code == 0)

        lasting = one.popen("setsid sleep 600 & exec sleep 600")
        pid = inside(lasting)
        assert os.readlink(f"/proc/{pid}/ns/net") == os.readlink(one.netns)
        folder = harness.folder
    lasting.wait()
    assert not os.path.exists(f"/proc/{pid}")
    assert not folder.exists()
