"""Spot instances: asks EC2's metadata service (IMDSv2) whether this node will be reclaimed."""

import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import datetime, timezone

log = logging.getLogger(__name__)

SERVICE = "http://169.254.169.254"
INTERVAL = 5.0  # seconds between two questions; AWS advises this
_TIMEOUT = 2.0  # seconds for an answer; the service is on the same host
_TOKEN_SECONDS = 21600  # the longest life that a token can have
_TOKEN = "/latest/api/token"
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
# The service is never behind the proxy that the environment may name.
_OPEN = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class SpotWatch:
    """A thread that polls the service at ``url`` and calls ``on_notice()`` once, at the notice.

    A service that does not answer is reported once, and polled on silently.
    """

    def __init__(self, url: str, on_notice: Callable[[], None]):
        self.url, self.on_notice = url.rstrip("/"), on_notice
        self.token: str | None = None
        self.reported = False  # of a service that does not answer
        self.rebalance: str | None = None  # the last recommendation
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._work, name="spot", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop asking."""
        self.ended.set()

    def _work(self) -> None:
        while not self.ended.is_set():
            try:
                if self._poll():
                    return
            except Exception as fault:  # OSError, HTTPException, nonsense: none may end the thread
                if not self.reported:
                    self.reported = True
                    log.warning(
                        f"{self.url} did not answer "
                        f"({getattr(fault, 'reason', None) or fault}): will keep polling silently"
                    )
            self.ended.wait(INTERVAL)

    def _poll(self) -> bool:
        """Whether there is a notice. Raises OSError when the service does not answer as it must."""
        notice = self._get(_ACTION)
        if notice is not None and not self.ended.is_set():
            log.info(f"spot notice: {_describe(notice)}: stopping with a snapshot")
            self.on_notice()
            return True
        advice = self._get(_REBALANCE)
        if advice is not None and advice != self.rebalance:
            self.rebalance = advice
            log.info("note: EC2 says that this node is at an elevated risk of a spot interruption")
        return False

    def _get(self, path: str) -> str | None:
        """The text at ``path``; None if there is none (404). Gets a new token when it is due."""
        for _ in range(2):
            if self.token is None:
                ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
                self.token = self._ask(_TOKEN, "PUT", ttl)
            try:
                return self._ask(path, "GET", {"X-aws-ec2-metadata-token": self.token})
            except urllib.error.HTTPError as fault:
                fault.close()
                if fault.code == 404:
                    return None
                if fault.code != 401:
                    raise
                self.token = None  # expired
        raise OSError("it refuses its own token")

    def _ask(self, path: str, method: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(self.url + path, method=method, headers=headers)
        with _OPEN(request, timeout=_TIMEOUT) as answer:
            return answer.read().decode()


def _describe(notice: str) -> str:
    """What a notice, {"action": "terminate", "time": "2026-11-21T08:22:00Z"}, announces."""
    try:
        content = json.loads(notice)
        when = datetime.strptime(content["time"], "%Y-%m-%dT%H:%M:%SZ")
        left = (when.replace(tzinfo=timezone.utc) - datetime.now(timezone.utc)).total_seconds()
        return f"this node gets {content['action']!r} at {content['time']}, in {left:.0f} s"
    except (ValueError, KeyError, TypeError):
        return f"this node is taken back ({notice[:100]!r})"
