"""--store and s3:// URLs: copies of a run in the S3 of a real moto server, and faults of it."""

import contextlib
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Result, python, summary, train
from running import TORCHRUN, assert_same_weights, eventually, snapshot, start, tiny

from utils.errors import UserError
from utils.launch.network import free_port
from utils.run import store

pytest.importorskip("moto", reason="the server of moto[server] plays S3")
boto3 = pytest.importorskip("boto3", reason="boto3 talks to the store")

INTERRUPTED = 75
KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_EC2_METADATA_DISABLED": "true",  # no machine's role stands in for them
}
URL = "s3://runs/some/prefix"
TWO_EPOCHS = ("-b", "10", "--epochs", "2", "-p", "1")


class Server:
    """A moto server with the bucket "runs". ``env`` is what leads a script to it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = {"AWS_ENDPOINT_URL": self.url, **KEYS}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert eventually(self._answers)
        self.client = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket="runs")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{self.url}/moto-api/", timeout=5).close()
            return True
        return False

    def names(self, run: str) -> set[str]:
        """The files of a run that are in the store."""
        prefix = f"some/prefix/{run}/"
        found = self.client.list_objects_v2(Bucket="runs", Prefix=prefix).get("Contents", ())
        return {item["Key"].removeprefix(prefix) for item in found}

    def read(self, run: str, name: str) -> bytes:
        """What a file of the store holds."""
        key = f"some/prefix/{run}/{name}"
        return self.client.get_object(Bucket="runs", Key=key)["Body"].read()

    def kill(self) -> None:
        """The store is gone."""
        self.process.kill()
        self.process.wait()


class Slow(socketserver.BaseRequestHandler):
    """A way to a server's port, which lets each connection wait at first."""

    port: int

    def handle(self) -> None:
        time.sleep(2)
        with socket.create_connection(("127.0.0.1", self.port)) as far:
            back = threading.Thread(target=self._pass, args=(far, self.request), daemon=True)
            back.start()
            self._pass(self.request, far)
            back.join()

    @staticmethod
    def _pass(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def slow_way_to(server: Server) -> Iterator[dict[str, str]]:
    """The environment that leads to ``server``, slowly."""
    handler = type("SlowTo", (Slow,), {"port": server.port})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as way:
        way.daemon_threads = True
        way.block_on_close = False
        threading.Thread(target=way.serve_forever, daemon=True).start()
        yield server.env | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{way.server_address[1]}"}
        way.shutdown()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.kill()


def line(folder: Path, runs: Path, name: str | None, *more: object) -> tuple[object, ...]:
    """A command line behind the script's name."""
    named = ("--name", name) if name else ()
    return (*tiny(full=True)[0], *TWO_EPOCHS, "--output-dir", runs, *named, *more, folder)


def environment(env: dict[str, str], step_seconds: float = 0.0) -> dict[str, str]:
    return {**tiny(step_seconds=step_seconds)[1], **env}


def interrupted(env: dict[str, str], *arguments: object, script: str, launcher: tuple) -> Result:
    """Send SIGTERM after the third step of the second epoch."""
    with start(script, *arguments, launcher=launcher, **environment(env, 0.05)) as run:
        run.until(r"Epoch 2/2 step +3/")
        run.send(signal.SIGTERM)
        return run.result()


def attempt(folder: Path, runs: Path, env: dict[str, str], *more: object) -> Result:
    """Run to the end, whatever it is."""
    arguments = line(folder, runs, "run", "--image-size", "32", "-j", "1", *more)
    return python("imagenet_nd.py", *arguments, **environment(env))


def warnings(result: Result) -> list[str]:
    assert "Traceback" not in result.err
    return [text for text in result.out.splitlines() if text.startswith("warning")]


# ---- to the store


def test_best_and_last_arrive(folder, tmp_path, server):
    where = line(folder, tmp_path, "arrive", "--store", URL + "/")
    result = train("imagenet_nd.py", *where, **environment(server.env))
    assert warnings(result) == []
    files = {"best.pt", "snapshot.pt", "options.json", "summary.json"}
    assert server.names("arrive") == files
    for name in files:
        assert server.read("arrive", name) == (tmp_path / "arrive" / name).read_bytes()
    (tmp_path / "copy.pt").write_bytes(server.read("arrive", "snapshot.pt"))
    assert torch.load(tmp_path / "copy.pt", weights_only=True)["progress"]["epoch"] == 2


@pytest.mark.long
def test_the_ranks_wait_for_the_upload_at_the_end(folder, tmp_path, server):
    """torchrun ends all as soon as one has ended with 75."""
    where = line(folder, tmp_path, "pair", "--store", URL)
    launcher = (*TORCHRUN, "--nproc_per_node=2")
    with slow_way_to(server) as env:
        result = interrupted(env, *where, script="imagenet_ddp.py", launcher=launcher)
    assert result.code != 0
    assert summary(tmp_path / "pair")["finished_because"] == "interrupted"
    for name in ("snapshot.pt", "summary.json"):
        assert server.read("pair", name) == (tmp_path / "pair" / name).read_bytes()


def test_a_taken_name_is_refused(folder, tmp_path, server):
    key = "some/prefix/run/snapshot.pt"
    server.client.put_object(Bucket="runs", Key=key, Body=b"other")
    result = attempt(folder, tmp_path, server.env, "--store", URL)
    server.client.delete_object(Bucket="runs", Key=key)
    assert result.code == 2
    assert f"{URL}/run holds a run already" in result.sentence


# ---- faults of the store


@pytest.mark.parametrize("fault", ["down", pytest.param("credentials", marks=pytest.mark.long)])
def test_a_failing_store_is_told_once_and_training_ends_well(folder, tmp_path, server, fault):
    env = dict(server.env)
    if fault == "down":
        env["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{free_port()}"
    if fault == "credentials":
        env |= {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": str(tmp_path)}
    result = attempt(folder, tmp_path, env, "--store", URL)
    assert result.code == 0, result.err
    (warning,) = warnings(result)
    texts = {
        "down": env["AWS_ENDPOINT_URL"],
        "credentials": "no credentials: set",
    }
    assert texts[fault] in warning
    assert "snapshot.pt, summary.json did not get to" in result.out
    assert summary(tmp_path / "run")["finished_because"] == "epochs"


@pytest.mark.parametrize("more", [(), ("--resume", "auto")])
def test_a_bucket_that_does_not_exist_is_refused_at_the_start(tmp_path, server, monkeypatch, more):
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    one = store.Store("s3://wrong/prefix", tmp_path / "run")
    with pytest.raises(UserError, match="there is no bucket wrong"):
        one.open(bool(more), ("best.pt", "snapshot.pt") if more else ())
    assert one.thread is None


@pytest.mark.long
def test_a_store_that_dies_while_training(folder, tmp_path):
    server = Server()
    try:
        where = line(folder, tmp_path, "run", "--store", URL, "--epochs", "4")
        with start("imagenet_nd.py", *where, **environment(server.env, 0.05)) as run:
            run.until(r"Epoch 2/4 step +1/")
            assert eventually(lambda: "snapshot.pt" in server.names("run"))
            server.kill()
            result = run.result()
        assert result.code == 0, result.err
        assert len(warnings(result)) == 1
        assert summary(tmp_path / "run")["epochs_done"] == 4
    finally:
        server.kill()


@pytest.mark.long
def test_a_store_that_cannot_be_asked_is_not_resumed_over(folder, tmp_path):
    """There may be a snapshot, which a run that begins anew would replace."""
    env = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", **KEYS}
    result = attempt(folder, tmp_path, env, "--store", URL, "--resume", "auto")
    assert result.code == 2
    assert "cannot tell whether" in result.sentence


def test_wrong_urls():
    for wrong in ("runs/prefix", "s3://"):
        with pytest.raises(UserError, match="s3://BUCKET/PREFIX"):
            store.check_options(wrong, None)


def test_without_boto3(folder, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['boto3'] = None\n")
    env = {"PYTHONPATH": f"{tmp_path}:{tiny()[1]['PYTHONPATH']}"}
    without = attempt(folder, tmp_path, env, "--store", URL)
    assert without.code == 2
    assert "pip install boto3" in without.sentence


# ---- from the store


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, folder, server) -> Path:
    """The undisturbed run "whole", and "half", stopped in epoch 2 and in the store too."""
    runs = tmp_path_factory.mktemp("stopped")
    train("imagenet_nd.py", *line(folder, runs, "whole"), **environment({}))
    where = line(folder, runs, "half", "--store", URL)
    result = interrupted(server.env, *where, script="imagenet_nd.py", launcher=())
    assert result.code == INTERRUPTED, result.err
    assert snapshot(runs / "half")["progress"]["step"] >= 3
    return runs


def test_a_missing_snapshot_is_told(folder, tmp_path, server):
    absent = attempt(folder, tmp_path, server.env, "--resume", f"{URL}/absent/snapshot.pt")
    assert f"there is no {URL}/absent/snapshot.pt" in absent.sentence


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("half", ("--resume", "auto", "--store", URL)),
        pytest.param(None, ("--resume", f"{URL}/half/snapshot.pt"), marks=pytest.mark.long),
        (None, ("--resume", f"{URL}/half/")),
    ],
    ids=["auto", "file", "folder"],
)
def test_a_new_machine_goes_on_bit_for_bit(folder, tmp_path, server, stopped, name, options):
    before = {file: server.read("half", file) for file in server.names("half")}
    result = train(
        "imagenet_nd.py", *line(folder, tmp_path, name, *options), **environment(server.env)
    )
    for file, content in before.items():
        server.client.put_object(Bucket="runs", Key=f"some/prefix/half/{file}", Body=content)
    assert "resumed from" in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["half"]
    assert not list((tmp_path / "half").glob(".*"))
    assert (tmp_path / "half" / "best.pt").is_file()
    assert_same_weights(tmp_path / "half", stopped / "whole")
    best = [snapshot(run, "best.pt") for run in (tmp_path / "half", stopped / "whole")]
    assert best[0]["epoch"] == best[1]["epoch"]


@pytest.mark.long
def test_two_processes_take_one_snapshot(folder, tmp_path, server, stopped):
    options = ("--resume", f"{URL}/half", "-b", "5", "-e", "-g", "2", "-j", "2")
    result = train(
        "imagenet_ddp.py", *line(folder, tmp_path, "seen", *options), **environment(server.env)
    )
    assert "21 images" in result.out
