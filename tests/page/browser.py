"""A browser without a window, driven by what WebDriver says: chromium and its driver, and the standard library.

https://www.w3.org/TR/webdriver2/
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

from typing_extensions import Self

DRIVER = shutil.which("chromedriver")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = None if DRIVER and BROWSER else "no chromium and chromedriver here: apt-get install chromium chromium-driver"

_ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
_SECONDS_TO_START = 30
_NEXT_FRAME = "await new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {
    "Enter": "\ue007",
    "Escape": "\ue00c",
    "Left": "\ue012",
    "Up": "\ue013",
    "Right": "\ue014",
    "Down": "\ue015",
    "Tab": "\ue004",
    "Home": "\ue011",
    "End": "\ue010",
}


class Browser:
    """One session. Used in a ``with`` block: the driver and the browser end with it."""

    def __init__(self, profile: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._driver = subprocess.Popen(
            [str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        # Nothing between here and the driver: a proxy of the environment knows no machine of ours.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._session = ""
        try:
            self._wait_until_ready()
            options = {"binary": BROWSER, "args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
            always = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": always}})
            self._session = f"/session/{made['sessionId']}"
        except BaseException:
            self._driver.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(10)

    def open(self, path: Path) -> None:
        """Open a page, and wait until it says that it can be used."""
        self._ask("POST", f"{self._session}/url", {"url": path.as_uri()})
        self.wait("return document.documentElement.dataset.ready === 'true'")

    def wait(self, condition: str, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"never: {condition}; {self.console()}"
            time.sleep(0.02)

    def run(self, script: str, *arguments: object) -> Any:
        """Run a script in the page, and return what it returns, once that is there."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def settle(self) -> None:
        """Wait until what follows from the size of things is drawn, too: it comes with the next frame."""
        self.run(f"{_NEXT_FRAME}; {_NEXT_FRAME}")

    def console(self) -> list[str]:
        """Return what the console says since it was asked last."""
        return [entry["message"] for entry in self._ask("POST", f"{self._session}/se/log", {"type": "browser"})]

    def press(self, *keys: str) -> None:
        """Press keys, one after the other, wherever the focus is."""
        values = [KEYS.get(key, key) for key in keys]
        actions = [{"type": kind, "value": value} for value in values for kind in ("keyDown", "keyUp")]
        self._ask("POST", f"{self._session}/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def click(self, selector: str, x: float = 0, y: float = 0) -> None:
        """Click on an element, so far from its middle."""
        self._point(selector, x, y, ("pointerDown", "pointerUp"))

    def hover(self, selector: str, x: float = 0, y: float = 0) -> None:
        self._point(selector, x, y, ())

    def _point(self, selector: str, x: float, y: float, then: Sequence[str]) -> None:
        self.settle()
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'nearest'})", selector)
        self.settle()  # rows are drawn anew where there is more room, or other rows are seen
        found = self._ask("POST", f"{self._session}/element", {"using": "css selector", "value": selector})
        move = {"type": "pointerMove", "duration": 0, "origin": {_ELEMENT: found[_ELEMENT]}, "x": int(x), "y": int(y)}
        actions = [move, *({"type": kind, "button": 0} for kind in then)]
        source = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions}
        self._ask("POST", f"{self._session}/actions", {"actions": [source]})

    def resize(self, width: int, height: int) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def dark(self, *, on: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def command(self, name: str, **parameters: object) -> Any:
        """Give chromium a command of its own protocol."""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def milliseconds(self, script: str, *arguments: object) -> float:
        """Return how long the page's own thread works on a script, and on what follows from it, in processor time."""
        self.command("Performance.enable", timeDomain="threadTicks")
        before = self._worked()
        self.run(f"{script}; {_NEXT_FRAME}", *arguments)
        return self._worked() - before

    def milliseconds_to_open(self, path: Path) -> float:
        """Open a page, and return how long all processes of the browser work until it can be used."""
        before = _processor_time(self._driver.pid)
        self.open(path)
        return _processor_time(self._driver.pid) - before

    def _worked(self) -> float:
        metrics = self.command("Performance.getMetrics")["metrics"]
        return next(1000 * float(one["value"]) for one in metrics if one["name"] == "TaskDuration")

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + _SECONDS_TO_START
        while True:
            try:
                if self._ask("GET", "/status")["ready"]:
                    return
            except URLError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.05)

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with self._opener.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            raise AssertionError(error.read().decode()) from None


def _processor_time(root: int) -> float:
    """Return the milliseconds that a process, and all below it, have had of the processor: see proc(5)."""
    found: dict[int, tuple[int, int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        found[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {root}
    for _ in range(8):  # generations
        family |= {pid for pid, (parent, _) in found.items() if parent in family}
    ticks = sum(time for pid, (_, time) in found.items() if pid in family)
    return 1000 * ticks / os.sysconf("SC_CLK_TCK")
