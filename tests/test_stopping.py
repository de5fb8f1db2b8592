"""When all ranks stop: by votes, signals, spot notices and time limits."""

import functools
import json
import re
import shutil
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import draw_folder, summary, train
from joined import in_processes, start
from running import free_port, snapshot

from utils.run.stopping import Reason, StopRequest
from utils.start.errors import INTERRUPTED
from utils.start.world import World


def polled(seconds: float, rank: int, size: int) -> dict[str, Any]:
    """What a rank sees when steps take ``seconds``; rank 1 requests the end in the 21st.

    A snapshot is due every sixth step. Rank 0 writes one from step 11 to step 15.
    """
    clock = SimpleNamespace(now=0.0)
    time.monotonic = lambda: clock.now
    world, busy = World(torch.device("cpu"), rank, size), lambda: 11 <= clock.now / seconds <= 15
    stop = StopRequest(world, None, 0.0, minutes=seconds / 10, is_busy=busy)
    due = []
    for number in range(1, 30):
        clock.now += seconds
        if number == 21 and rank == 1:
            stop.ask(Reason.INTERRUPTED)
        stop.poll()
        if stop.snapshot_due:
            due.append(number)
        if stop.reason:
            break
    stop.close()
    return {"due": due, "stopped after": number, "reason": stop.reason}


@pytest.mark.parametrize(("seconds", "late"), [(1.0, 1), (10.0, 0)])
def test_two_ranks_stop_at_the_same_step(seconds, late):
    """One step after the vote, where steps are short. A snapshot waits until the last one is
    written."""
    expected = {"due": [6 + late, 16 + late], "stopped after": 21 + late}
    expected["reason"] = Reason.INTERRUPTED
    assert in_processes(2, functools.partial(polled, seconds)) == [expected, expected]


def reasons(rank: int, size: int) -> list[Any]:
    stop = StopRequest(World(torch.device("cpu")), hours=0.0, elapsed=0.0)
    found = [stop.poll(), stop.end_training(), stop.poll()]
    stop.ask(Reason.BAD_FILES)
    stop.ask(Reason.INTERRUPTED)
    found += [stop.poll(), stop.end_training()]
    stop = StopRequest(World(torch.device("cpu")), hours=None, elapsed=0.0)
    stop.ask(Reason.EPOCHS)
    stop.ask(Reason.INTERRUPTED)  # a signal after the last step
    return [*found, stop.end_training(), stop.poll()]


def test_after_the_time_limit_images_are_evaluated_unless_something_else_comes():
    """Of two reasons at once the worse one counts."""
    over, worse = Reason.TRAIN_TIME, Reason.BAD_FILES
    late = [Reason.EPOCHS, Reason.INTERRUPTED]
    assert in_processes(1, reasons) == [[over, over, None, worse, worse, *late]]


# ---- the end of a run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Folder of a run ``done`` of one epoch, and of its data, which has DATA/test."""
    root = tmp_path_factory.mktemp("finished")
    data = draw_folder(root / "data")
    shutil.copytree(data / "val", data / "test")
    train("imagenet_nd.py", *line(root, "done", 1))
    return root


def line(root: Path, name: str, epochs: int) -> tuple[object, ...]:
    """The options of a run in ``root`` on the data there, to begin or to continue it."""
    options = ("-a", "tiny_plain", "-b", "10", "--epochs", epochs, "--output-dir", root)
    return (*options, "--name", name, "--resume", "auto", root / "data")


def test_a_signal_while_the_test_images_are_evaluated(finished):
    """The run has ended as interrupted; continued, it evaluates them."""
    run = shutil.copytree(finished / "done", finished / "signalled")
    words = line(finished, run.name, 1)
    with start("imagenet_ddp.py", "-g", "2", *words, HOLD_AFTER="0") as command:
        command.until("waiting for a signal")
        command.send(signal.SIGTERM)
        result = command.result()
    assert result.code == INTERRUPTED, result.err
    assert "continue" in result.out
    facts = summary(run)
    assert (facts["finished_because"], facts["epochs_done"]) == ("interrupted", 1)
    assert "test_top1" not in facts
    train("imagenet_nd.py", *words)
    facts = summary(run)
    assert (facts["finished_because"], facts["test_images"]) == ("epochs", 21)


@pytest.mark.parametrize(
    ("used", "ended", "epochs", "of"),
    [(3600.0, "train_time", 1, 2), (1800.0, "epochs", 2, 2), (3600.0, "epochs", 1, 1)],
)
def test_used_up_time_counts_after_a_resume(finished, used, ended, epochs, of):
    """The limit is on the whole run: one that has used it up trains no further step.

    The test images are evaluated all the same: they need no training time.
    """
    run = shutil.copytree(finished / "done", finished / f"{ended}_{of}")
    content = snapshot(run)
    content["progress"]["elapsed"] = used
    torch.save(content, run / "snapshot.pt")
    train("imagenet_nd.py", *line(finished, run.name, of), "--train-time", "1")
    facts, progress = summary(run), snapshot(run)["progress"]
    assert (facts["finished_because"], facts["epochs_done"]) == (ended, epochs)
    assert (facts["test_images"], progress["step"]) == (21, 0)
    assert facts["elapsed_seconds"] >= progress["elapsed"] >= used


# ---- --spot-notice

NOTICE = json.dumps({"action": "terminate", "time": "2026-11-21T08:22:00Z"})


class Service(ThreadingHTTPServer):
    """A server on loopback that simulates EC2's instance metadata service, token and all."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.fails, self.notice = fails, ""
        self.asked = 0  # questions with its token

    def __enter__(self) -> "Service":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Answer(BaseHTTPRequestHandler):
    """One request to a `Service`."""

    server: Service

    def do_PUT(self) -> None:
        seconds = int(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "0"))
        is_right = self.path == "/latest/api/token" and 1 <= seconds <= 21600
        self._send(503 if self.server.fails else 200 if is_right else 400, "secret")

    def do_GET(self) -> None:
        is_known = self.headers.get("X-aws-ec2-metadata-token") == "secret"
        self.server.asked += is_known
        is_right = self.path == "/latest/meta-data/spot/instance-action" and self.server.notice
        self._send((200 if is_right else 404) if is_known else 401, self.server.notice)

    def _send(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_spot_notice_for_one_node_stops_both(folder, tmp_path):
    """Node 1 alone is reclaimed; both nodes stop with a snapshot, after the same step.

    Its service fails at first, and is asked again.
    """
    line = ("imagenet_ddp.py", "-a", "tiny_plain", "-b", "5", "--epochs", "10000", "-p", "1")
    line += ("--output-dir", tmp_path, "--name", "run", folder, "-n", "2", "-g", "1")
    line += ("--dist-url", f"tcp://127.0.0.1:{free_port()}", "-nr")
    slow = {"STEP_SECONDS": "0.05"}
    with (
        Service() as quiet,
        Service(fails=True) as reclaimed,
        start(*line, 0, "--spot-notice", quiet.url, **slow) as main,
        start(*line, 1, "--spot-notice", reclaimed.url, **slow) as other,
    ):
        main.until(r"step +3/")
        other.until(r"\[rank 1\] warning: http.* did not answer")
        reclaimed.fails, reclaimed.notice = False, NOTICE
        other.until(r'\[rank 1\] spot notice: .*"terminate", "time": "2026-11-21T08:22:00Z"')
        results = [main.result(), other.result()]
    assert [result.code for result in results] == [INTERRUPTED] * 2, results
    assert not re.search("spot notice|did not answer", results[0].out)
    assert summary(tmp_path / "run")["finished_because"] == "interrupted"
    assert quiet.asked >= 1
    lines = [[x for x in result.out.splitlines() if " step " in x] for result in results]
    assert not lines[1], "the second node does not repeat the first one's lines"
    step = snapshot(tmp_path / "run")["progress"]["step"]
    assert f" step {step}/6 " in lines[0][-1]
