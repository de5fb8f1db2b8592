"""A page in Chromium without a window, by the browser's DevTools protocol over two pipes."""

import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from conftest import TIMEOUT

CHROMIUM = shutil.which("chromium")


class Page:
    """A file in the browser, 1250 pixels wide. ``errors``: what its console reported;
    ``requests``: what it loaded."""

    def __init__(self, file: Path, dark: bool = False):
        if CHROMIUM is None:
            pytest.skip("no chromium here")
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.count, self.unread, self.session = 0, b"", None
        commands, replies = os.pipe(), os.pipe()
        # The browser reads commands from its file 3, and writes replies to 4.
        line = f'exec "$0" "$@" 3<&{commands[0]} 4>&{replies[1]}'
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--window-size=1250,900",
        )
        self.process = subprocess.Popen(
            ["bash", "-c", line, CHROMIUM, *options, f"--user-data-dir={self.folder.name}"],
            pass_fds=(commands[0], replies[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands[0])
        os.close(replies[1])
        self.commands, self.replies = commands[1], replies[0]
        target = self.call("Target.createTarget", url="about:blank")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.run("new Promise(done => document.readyState === 'complete' ? done() : onload = done)")

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.commands)
        os.close(self.replies)
        self.folder.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol, and note what is reported meanwhile."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self.count:
                assert "result" in reply, reply
                return reply["result"]
            kind, facts = reply.get("method"), reply.get("params", {})
            if kind == "Network.requestWillBeSent":
                self.requests.append(facts["request"]["url"])
            if kind == "Runtime.exceptionThrown" or facts.get("type") == "error":
                self.errors.append(json.dumps(facts))
            if kind == "Log.entryAdded" and facts["entry"]["level"] == "error":
                self.errors.append(facts["entry"]["text"])

    def _read(self) -> Any:
        while b"\0" not in self.unread:
            ready, _, _ = select.select([self.replies], [], [], TIMEOUT)
            part = os.read(self.replies, 1 << 16) if ready else b""
            assert part, "the browser does not answer"
            self.unread += part
        message, _, self.unread = self.unread.partition(b"\0")
        return json.loads(message)

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float) -> None:
        """The mouse is "Moved" to a place of the window, "Pressed" or "Released" there."""
        button = "none" if kind == "Moved" else "left"
        place = {"x": x, "y": y, "button": button, "clickCount": int(kind != "Moved")}
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", **place)

    def picture(self, file: Path) -> None:
        """Write what the window shows as PNG."""
        import base64

        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))
