"""``--spot-notice``: stop with a snapshot when EC2 reclaims a spot instance.

Interface: a thread polls the metadata service and calls `utils.run.stopping.StopRequest.ask`.
"""

import logging
import threading
import urllib.error
import urllib.request

from utils.run.console import EVERY_NODE
from utils.run.stopping import Reason, StopRequest

INTERVAL = 5.0  # seconds between two requests, as AWS recommends
# Reach the service (IMDSv2) directly, even if the environment names a proxy.
_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

log = logging.getLogger(__name__)


def poll(url: str, stop: StopRequest) -> None:
    """Start a thread that polls the metadata service at ``url`` until ``stop`` is closed.

    If the service does not answer, this is reported once; polling continues silently.
    """
    threading.Thread(target=_poll, args=(url.rstrip("/"), stop), daemon=True).start()


def _poll(url: str, stop: StopRequest) -> None:
    reported = False
    while not stop.closed.is_set():
        try:
            if (notice := _notice(url)) is not None:
                text = f"spot notice: {notice[:100]}: stopping with a snapshot"
                log.info(text, extra=EVERY_NODE)
                stop.ask(Reason.INTERRUPTED)
                return
        except Exception as error:  # OSError, HTTPException, bad data: none may end the thread
            if not reported:
                reason = getattr(error, "reason", None) or error
                log.warning(f"{url} did not answer ({reason}): will keep polling silently")
            reported = True
        stop.closed.wait(INTERVAL)


def _notice(url: str) -> str | None:
    """Return the interruption notice, or None. Raises: OSError if the service does not answer."""

    def ask(method: str, path: str, name: str, value: str) -> str:
        headers = {f"X-aws-ec2-metadata-{name}": value}
        request = urllib.request.Request(url + path, method=method, headers=headers)
        with _open(request, timeout=2.0) as answer:  # the service is on the same host
            return answer.read().decode()

    token = ask("PUT", "/latest/api/token", "token-ttl-seconds", "60")
    try:
        return ask("GET", "/latest/meta-data/spot/instance-action", "token", token)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 404:
            raise
        return None
