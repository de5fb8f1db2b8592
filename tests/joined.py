"""Training scripts as functions, in processes that are forked with torch loaded.

A start of a script imports torch for seconds. Here a server imports it once, and forks.
"""

import functools
import importlib
import logging
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import running
from conftest import AT_START, ROOT, SMALL, Result, environment
from running import STAND_IN, Running

from utils.launch.network import free_port

SCRIPTS = ("imagenet_nd", "imagenet_dp", "imagenet_ddp", "imagenet_fsdp")


@dataclass(frozen=True)
class Job:
    """A command line of ``script`` on ``nodes`` nodes of ``processes`` each.

    With ``stop_after`` a stop is asked for when that many steps of it are done.
    """

    script: str
    options: tuple[Any, ...]
    processes: int = 2
    nodes: int = 1
    stop_after: int | None = None
    env: dict[str, str] = field(default_factory=dict)


def command(script: str, *words: object, **env: str) -> Result:
    """Run a script of one process, as `conftest.python` does, but in a fork of the server."""
    with _Forked(script, *words, **env) as run:
        return run.result()


class _Forked(Running):
    """A script of one process in a fork of the server, in its own session, too."""

    def launch(self, script: str, *words: object, **env: str) -> SimpleNamespace:
        self.folder = tempfile.TemporaryDirectory()
        out, err = f"{self.folder.name}/out", f"{self.folder.name}/err"
        os.mkfifo(out)
        self.errors = open(err, "w+")
        line = (script, list(map(str, words)), environment(*words, **env), (out, err))
        process = _server().Process(target=_as_command, args=line)
        process.start()

        def wait() -> int:
            process.join()
            return process.exitcode

        return SimpleNamespace(pid=process.pid, kill=process.kill, wait=wait, stdout=open(out))


def start(script: str, *arguments: object, launcher: tuple = (), **env: str) -> Running:
    """Like `running.start`; a script of one process runs in a fork of the server."""
    if launcher or script not in ("imagenet_nd.py", "imagenet_dp.py"):
        return running.start(script, *arguments, launcher=launcher, **env)
    return _Forked(script.removesuffix(".py"), *SMALL, *arguments, **env)


def _as_command(script: str, words: list[str], env: dict[str, str], files: tuple[str, str]) -> None:
    os.setsid()
    for number, path in enumerate(files, 1):  # first, as the other side waits until both are open
        os.dup2(os.open(path, os.O_WRONLY), number)
    import torch
    from fake_runs import stand_in

    from utils.launch import supervise
    from utils.model import models

    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    sys.argv = [f"{script}.py", *words]
    models.timm = stand_in("timm") if STAND_IN in env.get("PYTHONPATH", "") else None
    supervise.run_main(importlib.import_module(script).main)


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["joined", "tensorboard", *SCRIPTS])
    with mock.patch.dict(os.environ, AT_START, clear=True):  # its children inherit this
        forkserver.ensure_running()
    return context


def run_jobs(jobs: Iterable[Job], folder: Path) -> list[list[dict[str, Any]]]:
    """Run all jobs, and give of each what `_run` returns in its processes, by rank."""
    jobs = list(jobs)
    most = max(job.processes * job.nodes for job in jobs)
    with mock.patch.dict(os.environ, environment(), clear=True):
        found = in_processes(most, functools.partial(_run_all, jobs, str(folder)), join=False)
    return [[one for one in ranks if one] for ranks in zip(*found, strict=True)]


def in_processes(
    size: int, work: Callable[[int, int], Any], join: bool = True, limit: float = 600.0
) -> list[Any]:
    """What ``work(rank, size)`` returns (plain values) in each of ``size`` processes, by rank.

    With ``join`` they have a gloo process group. Fails, with its traceback, as soon as one fails.
    """
    context = _server()
    results, port = context.Queue(), free_port() if join else None
    more = (size, port, work, results)
    started = [context.Process(target=_child, args=(r, *more), daemon=True) for r in range(size)]
    for process in started:
        process.start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + limit
    try:
        while len(found) < size:
            # Not by exit codes: of a process whose own children live on they come late.
            ended = {
                rank for rank, one in enumerate(started) if not os.path.exists(f"/proc/{one.pid}")
            }
            try:
                rank, result, fault = results.get(timeout=0.2)
            except queue.Empty:
                assert not ended - found.keys(), f"ranks {ended - found.keys()} have crashed"
                assert time.monotonic() < deadline, "the processes hang"
                continue
            assert not fault, f"rank {rank}: {fault}"
            found[rank] = result
        for process in started:
            process.join(60)
            assert process.exitcode == 0
    finally:
        for process in started:
            process.kill()
    return [found[rank] for rank in range(size)]


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


def _run_all(jobs: list[Job], folder: str, rank: int, size: int) -> list[dict[str, Any] | None]:
    sys.stdout = sys.stderr = open(f"{folder}/rank{rank}.txt", "w")
    return [_run(job, rank, f"{folder}/store{i}") for i, job in enumerate(jobs)]


def _run(job: Job, rank: int, store: str) -> dict[str, Any] | None:
    """One job in one of its processes: exit code, bytes of state in the last step, at the end; for
    each micro-batch, whether gradients are exchanged."""
    import torch
    import torch.distributed as dist
    from fake_runs import stand_in
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.nn.parallel import DistributedDataParallel

    from utils.launch import network
    from utils.launch.world import local, reshard
    from utils.model import models
    from utils.run.checkpoint import TrainState
    from utils.train.stopping import Reason, StopRequest

    size = job.processes * job.nodes
    if rank >= size:
        return None
    module = importlib.import_module(job.script)
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % job.processes}
    place |= {"LOCAL_WORLD_SIZE": job.processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    place |= job.env
    init = functools.partial(dist.init_process_group, init_method=f"file://{store}")

    def bytes_of(tensors: Iterable[Any]) -> int:
        return sum(local(t).numel() * t.element_size() for t in tensors if torch.is_tensor(t))

    found = SimpleNamespace(code=None, bytes={}, calls=0, model=None, synced=[])

    def note(module: Any, _: Any) -> None:
        if isinstance(module, DistributedDataParallel) and module.training:
            found.synced.append(module.require_backward_grad_sync)

    request_sync = FSDPModule.set_requires_gradient_sync

    def requested(model: Any, sync: bool) -> None:
        found.synced.append(sync)
        request_sync(model, sync)

    def watched(*args: Any, **more: Any) -> TrainState:
        state = TrainState(*args, **more)
        found.model = state.model

        def count(*_: Any) -> None:
            gradients = [w.grad for g in state.optimizer.param_groups for w in g["params"]]
            reshard(state.model)
            kept = [v for entry in state.optimizer.state.values() for v in entry.values()]
            found.bytes = {
                "parameters": bytes_of(state.model.parameters()),
                "gradients": bytes_of(gradients),
                "optimizer": bytes_of(kept),
            }

        state.optimizer.register_step_pre_hook(count)
        return state

    poll = StopRequest.poll

    def counted(request: StopRequest) -> Any:
        found.calls += 1
        if found.calls == job.stop_after:
            request.ask(Reason.INTERRUPTED)
        return poll(request)

    with (
        mock.patch.object(sys, "argv", [f"{job.script}.py", *map(str, job.options)]),
        mock.patch.object(models, "timm", stand_in("timm")),
        mock.patch.object(network, "connect"),
        mock.patch.dict(os.environ, {name: str(value) for name, value in place.items()}),
        mock.patch.object(dist, "init_process_group", init),
        mock.patch.object(module, "TrainState", watched),
        mock.patch.object(StopRequest, "poll", counted),
        mock.patch.object(FSDPModule, "set_requires_gradient_sync", requested),
    ):
        hook = register_module_forward_pre_hook(note)
        try:
            found.code = module.main()
        finally:
            hook.remove()
            for handler in logging.getLogger("utils").handlers[:]:
                logging.getLogger("utils").removeHandler(handler)
    at_end = bytes_of(found.model.parameters())
    return {"code": found.code, "at_end": at_end, "synced": found.synced, **found.bytes}


sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests")) if path not in sys.path]
