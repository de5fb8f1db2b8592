"""Questions about the network, on the loopback interface alone."""

import socket
import threading

import pytest

from utils.errors import UserError
from utils.launch import network
from utils.launch.network import (
    address_towards,
    connect,
    free_port,
    interface_towards,
    interfaces,
    is_own,
    parse_tcp_url,
)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("tcp://10.0.0.1:23456", ("10.0.0.1", 23456)),
        ("tcp://node-0.cluster:1", ("node-0.cluster", 1)),
        ("tcp://localhost:65535/", ("localhost", 65535)),
        ("tcp://[fe80::1]:80", ("fe80::1", 80)),
    ],
)
def test_parse_tcp_url(url, expected):
    assert parse_tcp_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "10.0.0.1:80",
        "tcp://10.0.0.1",
        "tcp://10.0.0.1:",
        "tcp://:80",
        "tcp://10.0.0.1:0",
        "tcp://10.0.0.1:65536",
        "tcp://10.0.0.1:123456",
        "tcp://10.0.0.1:port",
        "tcp://10.0.0.1:-1",
        "http://10.0.0.1:80",
        "tcp://10.0.0.1:80/path",
        "env://",
    ],
)
def test_parse_tcp_url_refuses(url):
    with pytest.raises(UserError, match="tcp://HOST:PORT"):
        parse_tcp_url(url)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_free_port_can_be_listened_on(host):
    port = free_port(host)
    with socket.create_server((host, port)):
        connect("127.0.0.1", port, 0).close()
        with pytest.raises(OSError, match="in use"):
            socket.create_server((host, port))


@pytest.fixture
def late_master():
    """A port at which somebody listens a moment later."""
    port, servers = free_port(), []
    late = threading.Timer(1.5, lambda: servers.append(socket.create_server(("127.0.0.1", port))))
    late.start()
    yield port
    assert servers, "it was not waited for"
    late.join()
    servers[0].close()


def test_master_that_starts_late_is_waited_for(late_master):
    connect("127.0.0.1", late_master, 60).close()


def test_elastic_nodes_say_that_they_wait_for_the_master(late_master, monkeypatch, capsys):
    monkeypatch.setattr(network, "is_own", lambda _: False)
    assert network.rendezvous(f"127.0.0.1:{late_master}") == "127.0.0.1 false"
    said = capsys.readouterr().err
    assert f"waiting for 127.0.0.1:{late_master}: connection refused (1 s, at most 300)" in said


def test_nobody_there_is_a_sentence():
    port = free_port()
    with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port} cannot be reached .*refused"):
        connect("127.0.0.1", port, 0.5)


def test_unknown_host_is_reported_at_once(monkeypatch):
    """Without waiting for the deadline: a wrong name does not become right."""
    asked = []

    def unknown(host, *_, **__):
        asked.append(host)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UserError, match=r"name nod-0 cannot be resolved \(Name.*use its IP"):
        connect("nod-0", 29500, 1e9)
    assert asked == ["nod-0"]


def test_own_addresses_and_interfaces():
    assert is_own("127.0.0.1")
    assert is_own("localhost")
    assert not is_own("192.0.2.1")
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert interfaces()["lo"] == "127.0.0.1"
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("::1") is None
