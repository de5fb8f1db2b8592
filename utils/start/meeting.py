"""The processes of a job meet in its store, and tell each other there why one of them cannot go on.

Until the process group is complete, torch has no way to do so: gloo waits for a process that does
not come until its time limit is over.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from utils.start import addresses, errors, known_errors, launch, signals
from utils.start.addresses import is_elastic, port_in_use
from utils.start.errors import BAD_INPUT, LOST_PEER, UserError
from utils.start.hang import MOST_NAMED

END_SECONDS = 5.0  # for the exit, and for the others to hear of a failure
LOOK_SECONDS = 0.5  # between looks at whether another process has failed
FAILED = "failed"  # key of the error of the process that has failed


def meet_all(address: tuple[str, int], rank: int, size: int, seconds: float) -> PrefixStore:
    """The store of the job at ``address``, once all ranks have come to it.

    torch's own rendezvous does not say which rank is missing. Raises: `UserError`, which does.
    """
    hosts = rank == 0 and not is_store_in_agent()
    timeout = timedelta(seconds=seconds)
    server = TCPStore(*address, is_master=hosts, timeout=timeout, wait_for_workers=False)
    store = PrefixStore(_store_prefix(), server)
    host, twice = socket.gethostname(), "two_have_one_rank"
    me = f"{os.urandom(8).hex()} {host}"
    other = store.compare_set(f"rank_{rank}", "", me).decode()  # the first one that comes
    if other != me:
        store.set(twice, f"rank {rank} of {size}, on {other.partition(' ')[2]} and on {host}")
    here, deadline = store.add("here", 1), time.monotonic() + seconds
    # Not `store.wait`, which prints a trace of C++ functions when the time is over.
    try:
        while here < size and time.monotonic() < deadline:
            if store.add("given_up", 0) or store.check([twice]):
                break
            time.sleep(0.05)
            here = store.add("here", 0)
    except signals.Stopped as stop:
        store.set(FAILED, f"on {host}: {_why_it_ends(stop)}")
        _leave(store, here if hosts else 0)
        raise
    except RuntimeError as error:  # DistNetworkError
        text = f"lost touch with the store of the job at {address[0]}:{address[1]}, which ends "
        text += "with node 0: look at what it has printed, then start all nodes again"
        raise UserError(text, on_every_rank=True, code=LOST_PEER) from error
    was_twice = store.check([twice])
    if here == size and not was_twice:
        return store
    error = missing_ranks([r for r in range(size) if not store.check([f"rank_{r}"])], size, seconds)
    if was_twice:
        hosts = hosts and addresses.is_own(address[0])  # of two ranks 0, one has the store
        text = f"two processes have {store.get(twice).decode()}: give each its own (RANK, or "
        text += "--node_rank of torchrun)"
        code = LOST_PEER if is_elastic() else BAD_INPUT
        error = UserError(text, on_every_rank=True, code=code)
    elif store.check([FAILED]):
        error = UserError(store.get(FAILED).decode(), on_every_rank=True, code=LOST_PEER)
    _leave(store, here if hosts else 0)
    raise error


@contextmanager
def failing_together(name: str, size: int, on_store_node: bool, seconds: float) -> Iterator[None]:
    """If a process fails in this block, all others end at once, with its error.

    ``name``: of this process's node; ``on_store_node``: whether the job's store may be there.
    """
    over = threading.Event()

    def listen(signs: Signs) -> None:
        with suppress(OSError, RuntimeError):  # the store is gone
            while not over.wait(LOOK_SECONDS):
                if text := signs.find(FAILED):
                    _leave(signs.store, size if on_store_node else 0)
                    if not over.is_set():
                        give_up(UserError(text, on_every_rank=True, code=LOST_PEER))
                    return

    signs = None
    with suppress(OSError, RuntimeError):  # there is no such store
        signs = Signs(_store_prefix(), seconds) if size > 1 else None
    if signs is not None:
        threading.Thread(target=listen, args=(signs,), daemon=True).start()
    try:
        yield
    except BaseException as error:
        over.set()
        if signs is not None:
            with suppress(OSError, RuntimeError):
                signs.set(FAILED, f"on {name}: {_why_it_ends(error)}")
                _leave(signs.store, size if on_store_node else 0)
        raise
    finally:
        over.set()


def tell_others(error: UserError) -> None:
    """End the processes that wait for this one in the store, to which it does not come."""
    with suppress(UserError, OSError, RuntimeError, KeyError, ValueError):  # no job, or no store
        rank, size, here = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if here < size and not is_elastic():  # otherwise torchrun knows what to do
            signs = Signs(_store_prefix(), END_SECONDS)
            signs.set(FAILED, f"on {socket.gethostname()}: {error}")
            _leave(signs.store, size if rank < here else 0)


@contextmanager
def explained(rank: int, size: int, address: tuple[str, int], seconds: float) -> Iterator[None]:
    """Raise `UserError` for an error of torch that keeps this process from joining the job."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        text = str(error) or type(error).__name__
        if "EADDRINUSE" in text or "address already in use" in text.lower():
            raise port_in_use(*address) from error
        if known := known_errors.explain(error):  # no threads, memory or files are left
            raise known from error
        raise UserError(
            f"rank {rank} could not join the {size} processes of the job at "
            f"{address[0]}:{address[1]} within {seconds:g} s: are all nodes started, with "
            "different node ranks, and is every port between them open, not only the master's? "
            f"({text.splitlines()[0]})",
            code=LOST_PEER,
        ) from error


def _why_it_ends(error: BaseException) -> str:
    """``error``, as the others read it."""
    if isinstance(error, signals.Stopped):
        return f"{error} has stopped it; {errors.how_to_continue}"
    return str(error)


def _leave(store: PrefixStore, size: int) -> None:
    """Count the processes that know of a failure; wait until there are ``size`` of them.

    The store ends with the processes of its node: the others have to read it first.
    """
    store.add("given_up", 1)
    deadline = time.monotonic() + END_SECONDS
    while store.add("given_up", 0) < size and time.monotonic() < deadline:
        time.sleep(0.05)


def _store_prefix() -> str:
    """Of the keys in the job's store for this start of the job."""
    # torchrun keeps its store when it starts the processes again. Otherwise the store is new, and
    # an agent that has just joined has counted fewer restarts than the others.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"start_{restarts if is_store_in_agent() else '0'}"


def is_store_in_agent() -> bool:
    """Whether torchrun has the job's store. Otherwise rank 0 has it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def missing_ranks(ranks: list[int], size: int, seconds: float) -> UserError:
    """The error when ``ranks`` of a job of ``size`` processes have not come in time."""
    who, have = ("rank", "has") if len(ranks) == 1 else ("ranks", "have")
    named = ", ".join(map(str, ranks[:MOST_NAMED])) + ", ..." * (len(ranks) > MOST_NAMED)
    text = f"{who} {named} of {size} {have} not joined the job within {seconds:g} s "
    text += "(--dist-timeout): look for the first error there, and whether its process is stopped"
    return UserError(text, on_every_rank=True, code=LOST_PEER)


def give_up(error: UserError) -> None:
    """End this process while its main thread waits for a peer, or a child for a disk."""
    last = threading.Timer(END_SECONDS, lambda: os._exit(LOST_PEER))
    last.daemon = True
    last.start()
    launch.exit_now(errors.report(error))


class Signs:
    """A place in the job's store for signs of life and errors, with a connection of its own:
    torch's is in use while it waits for an answer. Raises: OSError if the store is gone,
    RuntimeError."""

    def __init__(self, prefix: str, seconds: float):
        self.address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._look()
        self.store = PrefixStore(
            prefix, TCPStore(*self.address, timeout=timedelta(seconds=seconds))
        )

    def set(self, key: str, value: str) -> None:
        self._look()
        self.store.set(key, value)

    def _look(self) -> None:
        """If the server is gone, torch would print a trace of C++ functions."""
        socket.create_connection(self.address, timeout=2.0).close()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self.store.multi_get(keys)

    def find(self, key: str) -> str | None:
        """The value of a key, or None if it has none yet."""
        self._look()
        return self.store.get(key).decode() if self.store.check([key]) else None
