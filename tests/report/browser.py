"""A headless browser for tests, by its own protocol through two pipes: no package is needed."""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find() -> str | None:
    """The browser of this machine; ``BROWSER_BINARY`` names another."""
    named = os.environ.get("BROWSER_BINARY")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, binary: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="browser-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        words = [
            binary,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--use-gl=disabled",
            "--disable-extensions",
            f"--user-data-dir={self._profile}",
            "about:blank",
        ]
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_read, to_write)]

        def as_three_and_four() -> None:  # where the protocol's pipes are looked for
            for number, end in enumerate(high, 3):
                os.dup2(end, number)

        self._process = subprocess.Popen(
            words, close_fds=False, preexec_fn=as_three_and_four, stderr=subprocess.DEVNULL
        )
        for end in high:
            os.close(end)
        os.close(to_read)
        os.close(to_write)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command; what comes meanwhile is kept in ``events``."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has gone"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def wait_for(self, method: str) -> dict[str, Any]:
        """The next event of a kind, from now on."""
        while True:
            event = self._next()
            self.events.append(event)
            if event.get("method") == method:
                return event

    def open(
        self, path: Path, *, width: int = 1280, dark: bool = False, phone: bool = False
    ) -> None:
        """Open a page from disk."""
        self.resize(width, phone=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        if not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.wait_for("Page.loadEventFired")

    def resize(self, width: int, *, phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=phone,
        )

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        answer = self.call(
            "Runtime.evaluate",
            expression=script,
            returnByValue=True,
            awaitPromise=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **text)

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path: Path, *, clip: dict[str, float] | None = None) -> None:
        """A screenshot of the whole page, or of a part of it."""
        more = {} if clip is None else {"clip": {**clip, "scale": 1}}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, **more)
        path.write_bytes(base64.b64decode(shot["data"]))

    def downloads_to(self, folder: Path) -> None:
        session, self._session = self._session, None
        self.call(
            "Browser.setDownloadBehavior",
            behavior="allow",
            downloadPath=str(folder),
            eventsEnabled=True,
        )
        self._session = session

    def problems(self) -> list[str]:
        """What the page complained of: errors of scripts, and whatever its policy refused."""
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded":
                found.append(event["params"]["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Addresses that were asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)
