"""A headless Chromium, driven over its own pipe by the DevTools protocol: no library, no port, no network.

Messages are JSON, each ended by a zero byte: commands go to the browser's file 3, answers and events come from file 4.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 60.0


def browser_path() -> str | None:
    """Return where a browser of the Chromium kind is, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page.

    Attributes:
        errors: what its script raised or wrote to the console as an error, and what the browser refused.
        requests: addresses that were asked for.
    """

    def __init__(self, send: int, receive: int) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._send = send
        self._receive = receive
        self._numbers = itertools.count(1)
        self._rest = b""
        self._loaded = False
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """Load a file and wait until it is complete."""
        self._loaded = False
        self._call("Page.navigate", url=path.absolute().as_uri())
        self._until(lambda: self._loaded)

    def run(self, expression: str) -> Any:
        """Return what JavaScript gives, as JSON holds it."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Click in the middle of an element, as a mouse does."""
        x, y = self.place(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y)

    def place(self, selector: str) -> tuple[float, float]:
        """Scroll an element into view and return its middle."""
        x, y = self.run(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)}); "
            "found.scrollIntoView({block: 'center', behavior: 'instant'}); const box = found.getBoundingClientRect(); "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        return x, y

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send one event of the mouse: mousePressed, mouseMoved, mouseReleased, mouseWheel."""
        button = {} if kind in ("mouseWheel",) else {"button": "left", "clickCount": 1}
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **{**button, **more})

    def press(self, key: str, shift: bool = False) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 * shift, **text)

    def emulate(self, width: int, height: int, scheme: str = "light", media: str = "", scale: float = 1.0) -> None:
        """Take another size, and the colours or medium that a reader may have."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", media=media, features=features)

    def scripts(self, allowed: bool) -> None:
        """Allow scripts of pages that are opened from now on, or not."""
        self._call("Emulation.setScriptExecutionDisabled", value=not allowed)

    def picture(self, path: Path, whole: bool = False) -> bytes:
        """Write a PNG file of what is in view, or of the whole page, and return its content."""
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        content = base64.b64decode(found["data"])
        path.write_bytes(content)
        return content

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._send, json.dumps(command).encode() + b"\0")
        answer: dict[str, Any] = {}

        def answered() -> bool:
            return answer.get("id") == number

        self._until(answered, answer)
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def _until(self, done: Callable[[], bool], answer: dict[str, Any] | None = None) -> None:
        end = time.monotonic() + PATIENCE_S
        while not done():
            for message in self._messages(end):
                if "id" in message and answer is not None:
                    answer.update(message)
                self._note(message)

    def _messages(self, end: float) -> Iterator[dict[str, Any]]:
        ready, _, _ = select.select([self._receive], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"the browser has not answered for {PATIENCE_S:.0f} s")
        more = os.read(self._receive, 1 << 20)
        if not more:
            raise ConnectionError("the browser has ended")
        *whole, self._rest = (self._rest + more).split(b"\0")
        for text in whole:
            yield json.loads(text)

    def _note(self, message: dict[str, Any]) -> None:
        given = message.get("params", {})
        method = message.get("method")
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(given["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.errors.append(str(given["args"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(given["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])


@contextmanager
def opened(binary: str, folder: Path) -> Iterator[Page]:
    """Start a browser that keeps everything in a folder, and end it afterwards."""
    from_here, to_there = os.pipe()
    from_there, to_here = os.pipe()

    def give() -> None:
        # First away from 3 and 4, which may be among the pipes' own numbers.
        reading, writing = os.dup(from_here), os.dup(to_here)
        spare = [os.dup(reading), os.dup(writing)]
        os.dup2(spare[0], 3)
        os.dup2(spare[1], 4)

    flags = ["--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []  # it refuses to run as root with one
    process = subprocess.Popen(
        [binary, *flags, f"--user-data-dir={folder}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=give,
    )
    os.close(from_here)
    os.close(to_here)
    try:
        yield Page(to_there, from_there)
    finally:
        process.terminate()
        process.wait(10)
        os.close(to_there)
        os.close(from_there)
