"""The training scripts' commands, in processes that are forked with torch loaded.

A start of a script imports torch for seconds. Here a server imports it once, and forks. What a
process has computed is seen by torch's own hooks alone.
"""

import importlib.util
import json
import multiprocessing
import os
import queue
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from conftest import AT_START, ROOT, SMALL, Result, environment
from running import Running, free_port

SCRIPTS = ("imagenet_nd", "imagenet_dp", "imagenet_ddp", "imagenet_fsdp")
LIMIT = 600.0  # seconds


@dataclass(frozen=True)
class Job:
    """A command line of ``script`` on ``nodes`` nodes of ``processes`` each.

    With ``stop_after`` each process gets SIGTERM in that step of its optimiser.
    """

    script: str
    options: tuple[Any, ...]
    processes: int = 2
    nodes: int = 1
    stop_after: int = 0
    env: dict[str, str] = field(default_factory=dict)


def command(script: str, *words: object, **env: str) -> Result:
    """Run a script, as `conftest.python` does, but in a fork of the server.

    It runs the code in ``BEFORE`` first.
    """
    with Forked(script, *words, **env) as run:
        return run.result()


class Forked(Running):
    """A script, or "-m" and a module, in a fork of the server, in its own session, too.

    A training script forks its own processes. Those of torchrun are new interpreters.
    """

    def launch(self, script: str, *words: object, **env: str) -> SimpleNamespace:
        self.folder = tempfile.TemporaryDirectory()
        out, err = f"{self.folder.name}/out", f"{self.folder.name}/err"
        os.mkfifo(out)
        self.errors = open(err, "w+")
        if script == "-m":
            script, *words = importlib.util.find_spec(words[0]).origin, *words[1:]
        process = _fork(script.removesuffix(".py"), words, environment(**env), (out, err))

        def wait(seconds: float | None = None) -> int:
            process.join(seconds)
            return process.exitcode

        def poll() -> int | None:
            return process.exitcode

        calls = {"kill": process.kill, "wait": wait, "poll": poll}
        return SimpleNamespace(pid=process.pid, stdout=open(out), **calls)


def start(script: str, *arguments: object, launcher: tuple = (), **env: str) -> Running:
    """Like `running.start`, but the script, or its launcher, runs in a fork of the server."""
    first, *words = (*launcher, script, *SMALL, *arguments)
    return Forked(first, *words, **env)


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    # What a script imports later than at its start is of no use in the server otherwise.
    late = ("tensorboard", "torch._dynamo", "torch.distributed.fsdp", "matplotlib")
    late += ("torch.distributed.run",)
    context.set_forkserver_preload(["joined", *late, *SCRIPTS, "warm"])
    # Older Pythons tell the server no paths, and it passes over what it does not find.
    paths = os.pathsep.join([AT_START["PYTHONPATH"], *map(str, (ROOT, ROOT / "tests"))])
    # Huge pages, or each fork would copy the table of a hundred thousand small ones.
    own = {"PYTHONPATH": paths, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    with mock.patch.dict(os.environ, AT_START | own, clear=True):
        forkserver.ensure_running()  # its children inherit this
    return context


def _fork(
    script: str, words: Iterable[object], env: dict[str, str], files: tuple[str, str], stop: int = 0
) -> Any:
    """Start a command whose outputs go to two ``files``; see `Job` for ``stop``."""
    line = (script, [*map(str, words)], env, files, stop)
    process = _server().Process(target=_as_command, args=line)
    process.start()
    return process


def _as_command(
    script: str, words: list[str], env: dict[str, str], files: tuple[str, str], stop: int
) -> None:
    os.setsid()
    for number, path in enumerate(files, 1):  # first, as the other side waits until both are open
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    import torch

    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    # A script marks the temporary folder as its own, and the next one clears it away.
    multiprocessing.current_process()._config.pop("tempdir", None)
    tempfile.tempdir = None  # that of its own TMPDIR
    multiprocessing.process._parent_process = None  # a script that a person starts has none
    torch.set_num_threads(1)
    sys.argv = [f"{script}.py", *words]
    with _observed(f"{files[0]}.json", stop), _forked_ranks():
        exec(os.environ.pop("BEFORE", ""), {})
        folder = ROOT if (ROOT / f"{script}.py").is_file() else ROOT / "tests"
        runpy.run_path(str(folder / f"{script}.py"), run_name="__main__")


@contextmanager
def _forked_ranks() -> Iterator[None]:
    """Let `utils.start.launch` fork the processes of a node instead of spawning them."""
    import torch

    from utils.start import launch

    get_context = multiprocessing.get_context

    class Rank(multiprocessing.get_context("fork").Process):
        def run(self) -> None:
            # Or two threads at once would replace torch's pool of threads, which no fork copies.
            torch.set_num_threads(1)
            launch.prepare("__mp_main__")  # as a spawned one does, when it imports the script
            super().run()

    def context(method: str | None = None) -> Any:
        return SimpleNamespace(Process=Rank) if method == "spawn" else get_context(method)

    with mock.patch.object(multiprocessing, "get_context", context):
        yield


@contextmanager
def _observed(path: str, stop: int) -> Iterator[None]:
    """Write to ``path`` what torch does meanwhile; at step ``stop`` send SIGTERM to this process.

    The bytes of parameters, gradients and optimiser state in the last step, those of parameters
    ``after_forward`` and ``at_end``; for each micro-batch whether gradients are exchanged
    (``synced``).
    """
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen: dict[str, Any] = {"synced": []}
    models, steps = [], 0

    def bytes_of(tensors: Iterable[Any]) -> int:
        mine = (x.to_local() if isinstance(x, DTensor) else x for x in tensors)
        return sum(x.numel() * x.element_size() for x in mine if torch.is_tensor(x))

    def see_forward(module: Any, _: Any) -> None:
        if isinstance(module, (DistributedDataParallel, FSDPModule)) and not models:
            models.append(module)  # the whole one, which is called before its parts
        if isinstance(module, DistributedDataParallel) and module.training:
            seen["synced"].append(module.require_backward_grad_sync)

    def see_end(module: Any, *_: Any) -> None:
        if module.training and module in models[:1]:
            seen["after_forward"] = bytes_of(module.parameters())

    def see_step(optimizer: Any, *_: Any) -> None:
        nonlocal steps
        steps += 1
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        kept = [value for entry in optimizer.state.values() for value in entry.values()]
        seen["parameters"] = bytes_of(weights)
        seen["gradients"] = bytes_of(weight.grad for weight in weights)
        seen["optimizer"] = bytes_of(kept)
        if steps == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    request_sync = FSDPModule.set_requires_gradient_sync

    def see_request(model: Any, sync: bool) -> None:
        seen["synced"].append(sync)
        request_sync(model, sync)

    hooks = [register_module_forward_pre_hook(see_forward), register_module_forward_hook(see_end)]
    hooks += [register_optimizer_step_pre_hook(see_step)]
    try:
        with mock.patch.object(FSDPModule, "set_requires_gradient_sync", see_request):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        seen["at_end"] = bytes_of(models[0].parameters()) if models else 0
        Path(path).write_text(json.dumps(seen))


def run_jobs(jobs: Iterable[Job], folder: Path) -> list[list[dict[str, Any]]]:
    """Run all jobs, one after the other. Returns for each what its processes have done, by rank:
    the exit ``code``, and what `_observed` has seen. Each must train to its end, or to SIGTERM."""
    return [_run(job, f"{folder}/job{number}") for number, job in enumerate(jobs)]


def _run(job: Job, place: str) -> list[dict[str, Any]]:
    size, port = job.processes * job.nodes, free_port()
    whole = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": job.processes, "MASTER_PORT": port}
    env = environment(MASTER_ADDR="127.0.0.1", **job.env)
    files = [f"{place}_rank{rank}" for rank in range(size)]
    started = []
    for rank, file in enumerate(files):
        mine = {"RANK": rank, "LOCAL_RANK": rank % job.processes} | whole
        mine = env | {name: str(value) for name, value in mine.items()}
        started.append(_fork(job.script, job.options, mine, (file, f"{file}.err"), job.stop_after))
    good, deadline = ({75} if job.stop_after else {0}), time.monotonic() + LIMIT
    try:
        while any(one.is_alive() for one in started) and time.monotonic() < deadline:
            started[0].join(0.05)
            if {one.exitcode for one in started} - good - {None}:
                deadline = min(deadline, time.monotonic() + 30)
        codes = [one.exitcode for one in started]
    finally:
        for one in started:
            one.kill()
    assert {*codes} <= good, [*codes, *(Path(f"{file}.err").read_text() for file in files)]
    seen = [json.loads(Path(f"{file}.json").read_text()) for file in files]
    return [{"code": code, **mine} for code, mine in zip(codes, seen, strict=True)]


def in_processes(
    size: int, work: Callable[[int, int], Any], join: bool = True, limit: float = LIMIT
) -> list[Any]:
    """What ``work(rank, size)`` returns (plain values) in each of ``size`` processes, by rank.

    With ``join`` they have a gloo process group. Fails, with its traceback, as soon as one fails.
    """
    results, port = _server().Queue(), free_port() if join else None
    more = (size, port, work, results)
    started = [_server().Process(target=_child, args=(r, *more), daemon=True) for r in range(size)]
    for process in started:
        process.start()
    by_rank: dict[int, Any] = {}
    deadline = time.monotonic() + limit
    try:
        while len(by_rank) < size:
            # Not by exit codes: of a process whose own children live on they come late.
            ended = {
                rank for rank, one in enumerate(started) if not os.path.exists(f"/proc/{one.pid}")
            }
            try:
                rank, result, error = results.get(timeout=0.2)
            except queue.Empty:
                assert not ended - by_rank.keys(), f"ranks {ended - by_rank.keys()} have crashed"
                assert time.monotonic() < deadline, "the processes hang"
                continue
            assert not error, f"rank {rank}: {error}"
            by_rank[rank] = result
        for process in started:
            process.join(60)
            assert process.exitcode == 0
    finally:
        for process in started:
            process.kill()
    return [by_rank[rank] for rank in range(size)]


def _child(rank: int, size: int, port: int | None, work: Callable[..., Any], results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if port:
            where = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", where, rank=rank, world_size=size)
        results.put((rank, work(rank, size), None))
        if port:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        results.close()
        results.join_thread()
        os._exit(1)  # others may wait in a collective


sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]
