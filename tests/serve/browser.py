"""Chromium without a window, driven over its DevTools protocol by a pair of pipes.

Messages are JSON with a zero byte at the end, so nothing but the browser itself is needed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

from tests.serve.conftest import SOON_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
ARGUMENTS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--hide-scrollbars", "--mute-audio"),
    # Whoever runs tests in a container is root there, for whom the sandbox does not work.
    *("--no-sandbox", "--disable-background-networking", "--disable-component-update"),
)

CONTRAST = """(() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((each) => each / 255)
    .map((each) => (each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, at) => sum + each * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = numbers(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const node of document.querySelectorAll('body *')) {
    const says = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!says || !node.getClientRects().length) continue;
    const isSvg = node instanceof SVGElement, style = getComputedStyle(node);
    const pair = [light(numbers(isSvg ? style.fill : style.color)), light(behind(node))].sort();
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (ratio < 4.5) poor.push([ratio, node.textContent.slice(0, 40)]);
  }
  return poor;
})()"""
"""Texts with less contrast than WCAG asks for."""


class BrowserPage:
    """One tab."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._held = b""
        self._number = 0
        self._session = ""
        self._loaded = False
        self.errors: list[str] = []
        """What the page wrote to its console as an error, and exceptions that nobody caught."""
        self.requests: list[str] = []
        """The addresses that it asked for."""

        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Opens an address, and waits until the page is loaded."""
        self._loaded = False
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + SOON_S
        while not self._loaded:
            self._note(self._receive(deadline))

    def call(self, method: str, **params: Any) -> Any:
        """One command, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SOON_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Waits until an expression is true in the page."""
        deadline = time.monotonic() + SOON_S
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"{script} is not true"
            select.select([], [], [], 0.05)

    def show(
        self, *, width: int, height: int = 900, scheme: str = "light", motion: str = "no-preference"
    ) -> None:
        """Sets the size of the screen, light or dark, and `reduce` for those who want no motion."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def fits(self, width: int) -> None:
        """Waits until nothing of the page is beside a screen of this width.

        A phone that shows a page which is too wide makes it smaller: there, `innerWidth` is always
        as large as the page.
        """
        self.wait(f"document.documentElement.scrollWidth <= {width}")

    def unreadable(self) -> list[Any]:
        """Texts with less contrast than WCAG asks for, with their ratios."""
        found: list[Any] = self.run(CONTRAST)
        return found

    def suits_every_screen(self) -> None:
        """Looks at it on a phone, a tablet and a wide screen: it fits, and can be read."""
        for width, scheme in ((390, "dark"), (1024, "light"), (1920, "dark")):
            self.show(width=width, scheme=scheme)
            self.fits(width)
            assert self.unreadable() == [], (width, scheme)
            assert self.picture().startswith(b"\x89PNG")

    def press(self, key: str) -> None:
        """Presses and releases a key that has no character: `Tab`, `Enter`, `Escape`."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            named = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", **named, **(text if kind == "keyDown" else {}))

    def picture(self) -> bytes:
        """The whole page as PNG."""
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._from], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser ended"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in {"error", "warning", "assert"}:
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in {"error", "warning"}:
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[BrowserPage]:
    """A browser with an empty profile, gone at the end of the `with`."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    # The browser reads from 3 and writes to 4. The shell puts them there: what Python passes on
    # keeps its number.
    script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    arguments = [PROGRAM, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", script, *arguments],
        pass_fds=(theirs_in, theirs_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield BrowserPage(ours_out, ours_in)
    finally:
        process.kill()
        process.wait(timeout=SOON_S)
        os.close(ours_in)
        os.close(ours_out)
