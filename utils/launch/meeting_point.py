"""The meeting point of an elastic job: kept open on its node, and watched from all others.

    python -m utils.launch.meeting_point --master IP --port P --again LINE -- TORCHRUN ...

torchrun is started below this process. Without its meeting point it would wait for many minutes,
and may be deaf to Ctrl-C meanwhile. So it is ended when the meeting point is gone, and a sentence
says how to continue. Standard library only, but for the store on the meeting point's own node.
"""

import argparse
import contextlib
import errno
import ipaddress
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Any

from utils.errors import UserError
from utils.launch import network, rollcall, supervise
from utils.option_types import amount, positive

LOOK_SECONDS = 5.0  # between two looks at the meeting point
GONE_SECONDS = 40.0  # of looks in vain after which it is gone: a link may be down for a while
GRACE_SECONDS = 10.0  # for torchrun to end then
BACKLOG = 4096  # connections that the kernel accepts while the store is busy
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # that torchrun handles


def accompany(command: list[str], folder: str, master: tuple[str, int], again: str) -> int:
    """Run ``command``, a torchrun with c10d rendezvous at ``master``, in ``folder``.

    ``master`` is host and port of the meeting point. If the host is this node, the store is kept
    here: torchrun needs ``is_host=false`` on every node. Signals are passed on; a second SIGINT
    kills. Nothing that this starts is left.

    Returns: torchrun's exit code, or 128 + the signal that killed it. Raises: `UserError` when the
    port is taken or the meeting point gone; ``again`` is the line that the sentence then asks for.
    """
    before = supervise.adopt_orphans()
    door = _open(*master) if network.is_own(master[0]) else None
    torchrun = _Torchrun(command, folder)
    try:
        if not door:
            return _wait_and_watch(torchrun, master, again)
        # After the start of torchrun, as a process with threads had better not fork. What connects
        # meanwhile waits at the port, which is open already.
        store = _keep_store(door, *master)
        code = torchrun.wait()
        del store
        return code
    finally:
        supervise.end_all_below(but=before)


def _open(host: str, port: int) -> socket.socket:
    """Listen at the address ``host`` of this node alone; for a name, at all of its addresses.

    A node's own name often stands for 127.0.1.1 there. Raises: `UserError` if that is impossible.
    """
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        host, version = "", 6 if socket.has_dualstack_ipv6() else 4
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=not host and version == 6
        )
    except OSError as fault:
        where = f"port {port} of {host or 'this node'}"
        if fault.errno == errno.EADDRINUSE:
            where += (
                " is taken by another program (scripts/cleanup.sh ends the left-overs of trainings)"
            )
        else:
            where += f" cannot be opened ({fault.strerror})"
        raise UserError(f"{where}: choose another MASTER_PORT on every node") from None


def _keep_store(door: socket.socket, host: str, port: int) -> Any:
    """Serve torch's store at ``door`` as long as the returned object lives.

    torch itself would listen at all addresses; and its store ends with the torchrun that holds it.
    """
    from torch.distributed import TCPStore

    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach()
    )


def _wait_and_watch(torchrun: "_Torchrun", master: tuple[str, int], again: str) -> int:
    """Wait for torchrun while the meeting point, on another node, is there."""
    point = _Point(*master)
    code = torchrun.wait(point.look)
    # At the end of a training the meeting point goes as well: all is well, or was asked for.
    if code == 0 or torchrun.signals or (not torchrun.given_up and point.answers()):
        return code
    raise UserError(
        f"the meeting point {point.name} is gone ({point.reason}): to continue from the last "
        "snapshot without that node, type on every node that is left: "
        f"MASTER_ADDR=<IP of one of them> {again}"
    )


class _Point:
    """The meeting point, as seen from another node."""

    def __init__(self, host: str, port: int):
        self.address, self.name = (host, port), f"{host}:{port}"
        self.reason = ""
        self.seen = self.looked = time.monotonic()

    def answers(self) -> bool:
        """Whether it accepts a connection now."""
        try:
            socket.create_connection(self.address, timeout=LOOK_SECONDS).close()
        except OSError as fault:
            self.reason = (fault.strerror or str(fault)).lower()
            return False
        return True

    def look(self) -> bool:
        """Whether it may still be there; looks every `LOOK_SECONDS`, and says that it is silent.

        A busy node answers, as its kernel does that; a packet or a link may be lost for a while.
        """
        now = time.monotonic()
        if now - self.looked < LOOK_SECONDS:
            return True
        self.looked = now
        if self.answers():
            self.seen = now
        elif now - self.seen < 2 * LOOK_SECONDS:
            print(
                f"the meeting point {self.name} does not answer ({self.reason}); if that lasts "
                f"{GONE_SECONDS:g} s, this node ends",
                flush=True,
            )
        return now - self.seen < GONE_SECONDS


class _Torchrun:
    """torchrun in a session of its own, so that a Ctrl-C reaches it once: from here."""

    def __init__(self, command: list[str], folder: str):
        parent = os.getpid()
        self.signals: list[int] = []  # that came
        self.given_up = False  # whether it was ended because of what it needs
        self.process: subprocess.Popen[bytes] | None = None
        for signum in _SIGNALS:
            signal.signal(signum, self._pass_on)
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            start_new_session=True,
            preexec_fn=lambda: supervise.die_with_parent(parent),  # noqa: PLW1509 (no threads yet)
        )
        for signum in self.signals:  # came before there was a process
            self._send(signum)

    def _pass_on(self, signum: int, frame: Any) -> None:
        self.signals.append(signum)
        if self.signals.count(signal.SIGINT) > 1:
            signum = signal.SIGKILL
        elif signum == signal.SIGINT:  # print() must not be called in the middle of another one
            os.write(2, b"interrupted: ending with a snapshot; Ctrl-C again ends at once\n")
        self._send(signum)

    def _send(self, signum: int) -> None:
        if self.process and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signum)

    def wait(self, needed: Callable[[], bool] = lambda: True) -> int:
        """Wait for its end, and cause it once what it needs is not ``needed()`` any more."""
        deadline = None
        while (code := self._collect()) is None:
            if deadline is None and not needed():
                self.given_up = True
                self._send(signal.SIGTERM)
                deadline = time.monotonic() + GRACE_SECONDS
            elif deadline is not None and time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            time.sleep(0.2)
        return code

    def _collect(self) -> int | None:
        """Its exit code, if it has ended. Collects adopted orphans as well."""
        with contextlib.suppress(ChildProcessError):
            while True:
                ended, status = os.waitpid(-1, os.WNOHANG)
                if ended == self.process.pid:
                    code = self.process.returncode = os.waitstatus_to_exitcode(status)
                    return code if code >= 0 else 128 - code
                if not ended:
                    break
        return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add: Callable[..., Any] = parser.add_argument
    add("--master", required=True, metavar="IP")
    add("--port", type=positive, required=True)
    add("--wait", type=amount, default=rollcall.WAIT, metavar="SECONDS", help="for the others")
    add("--folder", default=".", metavar="DIR", help="where to start torchrun")
    add("--again", default="the same line", metavar="LINE", help="that starts this node")
    add("command", nargs="+", metavar="TORCHRUN ...", help="after --")
    args = parser.parse_args(argv)
    master = (args.master, args.port)
    rollcall.find_master(master, args.wait)
    return accompany(args.command, args.folder, master, args.again)


if __name__ == "__main__":
    supervise.run_main(main)
