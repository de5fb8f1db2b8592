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
OPTIONS = "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --window-size=1250,900"


class Page:
    """A file in the browser, 1250 pixels wide. ``errors``: what its console reported;
    ``requests``: what it loaded."""

    def __init__(self, file: Path):
        if CHROMIUM is None:
            pytest.skip("no chromium here")
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.count, self.unread, self.session = 0, b"", {}
        (commands, self.commands), (self.replies, replies) = os.pipe(), os.pipe()
        # The browser reads commands from its file 3, and writes replies to 4.
        line = f"exec {CHROMIUM} {OPTIONS} --user-data-dir={self.folder.name}"
        self.process = subprocess.Popen(
            ["bash", "-c", f"{line} 3<&{commands} 4>&{replies} >/dev/null 2>&1"],
            pass_fds=(commands, replies),
        )
        os.close(commands)
        os.close(replies)
        target = self.call("Target.createTarget", url="about:blank")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
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
        message = {"id": self.count, "method": method, "params": params, **self.session}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.unread:
                ready, _, _ = select.select([self.replies], [], [], TIMEOUT)
                part = os.read(self.replies, 1 << 16) if ready else b""
                assert part, "the browser does not answer"
                self.unread += part
            text, _, self.unread = self.unread.partition(b"\0")
            reply = json.loads(text)
            if reply.get("id") == self.count:
                assert "result" in reply, reply
                return reply["result"]
            kind, facts = reply.get("method"), reply.get("params", {})
            if kind == "Network.requestWillBeSent":
                self.requests.append(facts["request"]["url"])
            is_error = facts.get("type", facts.get("entry", {}).get("level")) == "error"
            if kind == "Runtime.exceptionThrown" or is_error:
                self.errors.append(json.dumps(facts))

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        more = {"returnByValue": True, "awaitPromise": True}
        return self.call("Runtime.evaluate", expression=script, **more)["result"].get("value")

    def key(self, key: str) -> None:
        """A key is pressed and released, where the focus is."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("rawKeyDown", *(["char"] if text else []), "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **text)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """The mouse is "Moved" to a place of the window, "Pressed" or "Released" there."""
        button = "none" if kind == "Moved" else "left"
        place = {"x": x, "y": y, "button": button, "clickCount": int(kind != "Moved")}
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", **place)
