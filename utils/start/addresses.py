"""The address at which the processes of a job meet: host names and ports. Without torch."""

import contextlib
import os
import re
import socket
from urllib.parse import urlsplit

from utils.start.errors import BAD_INPUT, LOST_PEER, UserError

PLACEHOLDERS = ("MASTER_IP", "MASTER_ADDR", "MASTER_PORT", "HOST", "IP", "PORT")  # in documents


def parse_tcp_url(url: str, name: str = "--dist-url") -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``, the value of ``name``. Raises: `UserError`."""
    if words := [word for word in re.split("[/:]", url) if word in PLACEHOLDERS]:
        numbers = f"put numbers in place of {' and '.join(words)}, such as tcp://172.31.0.10:8888"
        raise UserError(f"{name} {url}: {numbers}")
    with contextlib.suppress(ValueError):  # of .port, if that is not a valid number
        parts = urlsplit(url)
        if parts.scheme == "tcp" and parts.hostname and parts.port and parts.path in ("", "/"):
            return parts.hostname, parts.port
    raise UserError(f"{name} {url} is not of the form tcp://HOST:PORT")


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def port_in_use(host: str, port: int, name: str = "port") -> UserError:
    """The error for a port in use; ``name`` is what the user can change.

    torchrun's elastic agents choose another port when they restart, so the exit code then allows
    a restart.
    """
    text = f"port {port} of {host} is taken by another program: choose another {name} on every node"
    return UserError(text, code=LOST_PEER if is_elastic() else BAD_INPUT)


def is_elastic() -> bool:
    """Whether torchrun restarts this job's processes when one of them fails."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
