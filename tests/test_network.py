"""Questions about the network, on the loopback interface alone."""

import socket
import threading

import pytest

from utils.errors import UserError
from utils.launch import network

URLS = {
    "tcp://node-0.cluster:1": ("node-0.cluster", 1),
    "tcp://localhost:65535/": ("localhost", 65535),
    "tcp://[fe80::1]:80": ("fe80::1", 80),
}
WRONG = ["", "10.0.0.1:80", "tcp://:80", "http://10.0.0.1:80"]
WRONG += [f"tcp://10.0.0.1{port}" for port in ("", ":", ":0", ":65536", ":port", ":80/path")]


@pytest.mark.parametrize("url", [*URLS, *WRONG])
def test_urls_of_the_master(url):
    if url in URLS:
        assert network.parse_tcp_url(url) == URLS[url]
    else:
        with pytest.raises(UserError, match="tcp://HOST:PORT"):
            network.parse_tcp_url(url)


def test_a_master_that_starts_late_is_waited_for(monkeypatch, capsys):
    port, servers = network.free_port(), []
    late = threading.Timer(1.5, lambda: servers.append(socket.create_server(("127.0.0.1", port))))
    late.start()
    monkeypatch.setattr(network, "is_own", lambda _: False)
    assert network.rendezvous(f"127.0.0.1:{port}") == "127.0.0.1 false"
    assert servers, "it was not waited for"
    said = capsys.readouterr().err
    assert f"waiting for 127.0.0.1:{port}: connection refused (1 s, at most 300)" in said
    late.join()
    servers[0].close()


def test_no_master_in_time_or_an_unknown_one_is_an_error(monkeypatch):
    port = network.free_port()
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port} cannot be reached .*refused"):
        network.connect("127.0.0.1", port, 0.5)

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match=r"name nod-0 cannot be resolved \(Name.*use its IP"):
        network.connect("nod-0", 29500, 1e9)  # at once: a wrong name does not become right


def test_a_wait_is_printed_after_1_s_then_every_5_then_every_15(monkeypatch):
    clock = network.Clock(300)
    times = []
    for second in range(100):
        monkeypatch.setattr(network.Clock, "seconds", second)
        if line := clock.line("waiting"):
            assert line == f"waiting ({second} s, at most 300)"
            times.append(second)
    assert times == [1, *range(6, 62, 5), 76, 91]


def test_own_addresses_and_interfaces():
    assert network.is_own("127.0.0.1")
    assert network.is_own("localhost")
    assert not network.is_own("192.0.2.1")
    assert network.interfaces()["lo"] == "127.0.0.1"
    assert network.interface_towards("127.0.0.1") == "lo"
    assert network.interface_towards("::1") is None
