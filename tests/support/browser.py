"""Drives a headless Chromium over its debugging pipe (Chrome DevTools Protocol: JSON messages that end in a zero)."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests.support.waiting import until

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
"""Names of commands that start a browser; the first two are Debian's."""
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--window-size=1200,800", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """Runs one browser with one page."""

    def __init__(self, command: str, folder: Path) -> None:
        """Starts the browser with a profile of its own in `folder`."""
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser reads descriptor 3 and writes descriptor 4, which a shell puts into place.
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        options = [*_OPTIONS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, command, *options], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._held, self._session = 0, b"", ""
        self.hosts: set[str] = set()
        """The hosts to which the page sent requests."""
        self.refused: list[str] = []
        """The errors that the browser logged, such as breaches of the page's content security policy."""

    def open(self, url: str) -> None:
        """Loads a page, and waits until it is loaded."""
        (target,) = [each for each in self._call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self._call(f"{domain}.enable")
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Runs a script in the page and returns its value."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Waits until a script's value is true."""
        until(lambda: self.run(script), script)

    def screenshot(self) -> bytes:
        """Returns a picture of the page, PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            self._note(answer.get("method", ""), answer.get("params", {}))
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            data = os.read(self._read, 1 << 16)
            assert data, "the browser has ended"
            self._held += data
        data, _, self._held = self._held.partition(b"\0")
        message: dict[str, Any] = json.loads(data)
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.hosts.add(urlsplit(params["request"]["url"]).netloc)
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.refused.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.exceptionThrown":
            self.refused.append(str(params["exceptionDetails"]["text"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)
