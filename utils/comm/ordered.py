"""Collectives in one fixed order, beside the backward pass.

A compressed mean takes two collectives, while backward makes further gradients ready. If the second
began in a callback of the first, it would begin at another moment in each process: gloo then pairs
collectives of different buckets, and hangs or aborts. Here one thread (CPU) or one stream (GPU)
takes the buckets in DistributedDataParallel's order, which is the same in all processes.
"""

import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class OrderedCollectives:
    """Runs jobs one after the other, in the order in which they were submitted."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.jobs: queue.SimpleQueue = queue.SimpleQueue()
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
        else:
            threading.Thread(target=self._work, name="ordered collectives", daemon=True).start()

    def submit(self, job: Callable[[], None], buffer: Tensor) -> Future[Tensor]:
        """Run ``job`` after those before it; it changes ``buffer``, the future's value."""
        if self.stream is None:
            future: Future[Tensor] = Future()
            self.jobs.put((job, buffer, future))
            return future
        # NCCL's collectives wait in the stream, not on the host: so this returns at once.
        future = Future(devices=[self.device])
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            job()
            future.set_result(buffer)
        return future

    def _work(self) -> None:
        with torch.no_grad():
            while True:
                job, buffer, future = self.jobs.get()
                try:
                    job()
                except Exception as fault:  # backward raises it
                    future.set_exception(fault)
                else:
                    future.set_result(buffer)


class Peers:
    """The processes that share a mean: the collectives that the methods need.

    Each returns when its result is there (on a GPU: when the stream will have it).
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None):
        self.rank, self.size, self.group = rank, size, group

    def sum(self, values: Tensor) -> None:
        """Sum ``values`` (any shape) in place."""
        dist.all_reduce(values, group=self.group)

    def exchange(self, parts: Tensor) -> Tensor:
        """``parts`` [size * n, ...]: part r goes to rank r. Returns those that the others sent."""
        received = torch.empty_like(parts)
        if parts.is_cuda:
            dist.all_to_all_single(received, parts, group=self.group)
            return received
        # Not gloo's all-to-all: measured, parts of some MB often travelled at half the link's rate.
        # Receives come before sends.
        theirs, mine = received.chunk(self.size), parts.chunk(self.size)
        theirs[self.rank].copy_(mine[self.rank])
        others = [(self.rank + i) % self.size for i in range(1, self.size)]
        work = [dist.irecv(theirs[peer], group=self.group, group_src=peer) for peer in others]
        work += [dist.isend(mine[peer], group=self.group, group_dst=peer) for peer in others]
        for one in work:
            one.wait()
        return received

    def gather(self, part: Tensor) -> Tensor:
        """``part`` [n, ...] of every rank, as [size * n, ...]."""
        whole = part.new_empty((self.size * len(part), *part.shape[1:]))
        dist.all_gather(list(whole.chunk(self.size)), part, group=self.group)
        return whole
