"""--spot-notice: a small HTTP server plays EC2's instance metadata service, token and all."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from conftest import python, summary
from running import Running, eventually, snapshot, start, tiny

from utils.launch.network import free_port
from utils.launch.world import World
from utils.train import stopping
from utils.train.stopping import Reason, StopRequest

INTERRUPTED = 75
NOTICE = json.dumps({"action": "terminate", "time": "2026-11-21T08:22:00Z"})
ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"


class Service(ThreadingHTTPServer):
    """Answers on loopback like the service. ``texts``: path to what is there."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.texts: dict[str, str] = {}
        self.tokens = 0  # given out; only the last one is good
        self.asked = 0  # questions with a good token for the action


class Answer(BaseHTTPRequestHandler):
    """One request to a `Service`."""

    server: Service

    def do_PUT(self) -> None:
        seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.path != "/latest/api/token" or not 1 <= int(seconds or 0) <= 21600:
            self._send(400)
            return
        self.server.tokens += 1
        self._send(200, f"token{self.server.tokens}")

    def do_GET(self) -> None:
        good = self.headers.get("X-aws-ec2-metadata-token") == f"token{self.server.tokens}"
        if not good:
            self._send(401)
            return
        self.server.asked += self.path == ACTION
        text = self.server.texts.get(self.path)
        self._send(404 if text is None else 200, text or "")

    def _send(self, code: int, text: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serve() -> Iterator[Service]:
    with Service() as service:
        thread = threading.Thread(target=service.serve_forever, daemon=True)
        thread.start()
        yield service
        service.shutdown()


@pytest.fixture
def service() -> Iterator[Service]:
    with serve() as one:
        yield one


def endless(script: str, folder: Path, runs: Path, *options: object) -> Running:
    model, env = tiny(step_seconds=0.05)
    lasting = ("-b", "5", "--epochs", "10000", "-p", "1")
    where = ("--output-dir", runs, "--name", "run", folder)
    return start(script, *model, *lasting, *options, *where, **env)


def test_a_notice_stops_the_run_with_a_snapshot(folder, tmp_path, service):
    with endless("imagenet_nd.py", folder, tmp_path, "--spot-notice", service.url) as run:
        run.until(r"step +3/")
        service.texts[ACTION] = NOTICE
        run.until(r'spot notice: .*"terminate", "time": "2026-11-21T08:22:00Z"')
        result = run.result()
    assert result.code == INTERRUPTED, result.err
    assert summary(tmp_path / "run")["finished_because"] == "interrupted"
    assert snapshot(tmp_path / "run")["progress"]["epoch"] >= 0


@pytest.mark.long
def test_a_notice_for_one_node_stops_both(folder, tmp_path):
    """Node 1 alone is reclaimed; both nodes stop, after the same step."""
    with serve() as quiet, serve() as reclaimed:
        nodes = ("--dist-url", f"tcp://127.0.0.1:{free_port()}", "-n", "2", "-g", "1")
        first, second = (
            (*nodes, "-nr", str(rank), "--spot-notice", one.url)
            for rank, one in enumerate((quiet, reclaimed))
        )
        with (
            endless("imagenet_ddp.py", folder, tmp_path, *first) as main,
            endless("imagenet_ddp.py", folder, tmp_path, *second) as other,
        ):
            main.until(r"step +3/")
            reclaimed.texts[ACTION] = NOTICE
            other.until(r"\[rank 1\] spot notice")
            results = [main.result(), other.result()]
    assert [result.code for result in results] == [INTERRUPTED] * 2, results
    assert "spot notice" not in results[0].out
    assert summary(tmp_path / "run")["finished_because"] == "interrupted"
    assert quiet.asked >= 1
    last = [[x for x in result.out.splitlines() if " step " in x][-1] for result in results]
    steps = [text.removeprefix("[rank 1] ").split("  ")[0] for text in last]
    assert steps[0] == steps[1]


def test_a_url_that_is_none(folder):
    result = python("imagenet_nd.py", "--spot-notice", folder)
    assert result.code == 2
    assert "the option goes after DATA" in result.err


@pytest.fixture
def watch(monkeypatch):
    """Starts a request to stop that asks a service without pause."""
    monkeypatch.setattr(stopping, "SPOT_INTERVAL", 0.01)
    monkeypatch.setattr(stopping, "_SIGNALS", ())
    begun = []

    def begin(url: str) -> StopRequest:
        begun.append(StopRequest(World(torch.device("cpu")), None, 0.0))
        begun[-1].watch_spot(url)
        return begun[-1]

    yield begin
    for one in begun:
        one.close()


def test_advice_to_rebalance_is_told_once_and_stops_nothing(service, watch, logged):
    service.texts[REBALANCE] = json.dumps({"noticeTime": "2026-11-21T08:20:00Z"})
    stop = watch(service.url)
    assert eventually(lambda: service.asked > 3)
    assert len(logged) == 1
    assert "elevated risk" in logged[0]
    assert stop.poll() is None


def test_a_service_that_comes_late_is_heard(service, watch, monkeypatch, logged):
    """And a notice that cannot be read is a notice."""
    service.texts[ACTION] = "no JSON"
    real, missing = stopping._ask_spot, f"http://127.0.0.1:{free_port()}"
    stop = watch(missing)
    assert eventually(lambda: logged)
    monkeypatch.setattr(stopping, "_ask_spot", lambda _: real(service.url))
    assert eventually(lambda: stop.poll() is Reason.INTERRUPTED)
    assert len(logged) == 2
