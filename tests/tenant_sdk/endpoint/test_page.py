"""Tests the page at `/`: it has three files, uses nothing from other hosts, and has a strict content security policy.
If the machine has a browser, the test also chats in it."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import pytest

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.server import Endpoint
from tests.support.endpoints import KEY, endpoint_of, raw
from tests.support.false_providers import MASKS
from tests.support.waiting import until

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
"""Names of commands that start a browser; the first two are Debian's."""
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--window-size=1200,800", "--remote-debugging-pipe",
)  # fmt: skip
FILES = {"/": "text/html", "/page.js": "text/javascript", "/page.css": "text/css"}


class Browser:
    """Runs a headless browser with one page, over its debugging pipe (Chrome DevTools Protocol: JSON messages that end
    in a zero)."""

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


def test_files_are_given_without_a_key_and_name_nothing_outside(endpoint: Endpoint) -> None:
    with raw(endpoint) as http:
        for path, kind in FILES.items():
            answer = http.get(path, headers={"authorization": ""})
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(kind)
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
            assert policy.pop("default-src") == "'none'"
            assert set(policy.values()) == {"'none'", "'self'"}
            assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
            text = answer.text.replace("http://www.w3.org/2000/svg", "")  # a name, which nobody fetches
            assert not re.search(r"https?:|//(?! )\w|@import|url\(|\beval\b|innerHTML|<script>|<style|\son\w+=", text)
            assert http.post(path, json={}).status_code == 404
        page = http.get("/").text
        assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == {"/page.js", "/page.css"}


def test_status_needs_a_key_and_says_what_is_in_force(endpoint: Endpoint) -> None:
    with raw(endpoint) as http:
        assert http.get("/v1/status", headers={"authorization": ""}).status_code == 401
        status = http.get("/v1/status").json()
    assert {each["name"] for each in status["adapters"]} == {"sales", "support"}
    assert {each["tier"] for each in status["adapters"]} <= {"device", "host", "disk"}
    names = [name for name, _ in status["privacy"]]
    assert all(text == text.strip() for _, text in status["privacy"])
    assert {"scheme", "visible", "requests at a time", "released"} <= set(names)


@pytest.mark.parametrize("mask", ["off", "gaussian-pool", "lattice"])
def test_the_page_says_first_that_rows_go_readable(folder: Path, tmp_path: Path, mask: str) -> None:
    options: dict[str, Any] = {"mask_options": MASKS["lattice"]["mask_options"]} if mask == "lattice" else {}
    given = TenantClient(f"inproc:{folder}", mask=mask, cache=tmp_path / "cache", progress=False, **options)
    with given as client, endpoint_of(client) as endpoint, raw(endpoint) as http:
        status = http.get("/v1/status").json()
        page, script = http.get("/").text, http.get("/page.js").text
    if mask == "lattice":
        assert status["warning"] is None
    else:
        assert status["warning"].startswith(f"ROWS GO READABLE: mask={mask!r} ")
        assert status["privacy"][0][0] == "ROWS GO READABLE"
    assert page.index('id="warning" role="alert" hidden') < page.index('id="chat"')
    assert 'at("warning").textContent = status.warning' in script


def train(endpoint: Endpoint) -> None:
    """Starts a short fine-tuning job."""
    row = {"prompt": "a", "completion": "b"}
    with raw(endpoint) as http:
        form: Any = {"files": {"file": ("x.jsonl", json.dumps(row).encode())}, "data": {"purpose": "fine-tune"}}
        file_id = http.post("/v1/files", **form).json()["id"]
        steps = {"max_steps": 12, "rank": 2}
        body = {"model": "llama", "training_file": file_id, "suffix": "seen", "hyperparameters": steps}
        assert http.post("/v1/fine_tuning/jobs", json=body).status_code == 200


@pytest.mark.slow
def test_a_chat_in_a_browser(client: TenantClient, adapters: Path, tmp_path: Path) -> None:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser is installed ({', '.join(BROWSERS)})")
    root = shutil.copytree(adapters, tmp_path / "adapters", ignore=shutil.ignore_patterns(".jobs"))
    with endpoint_of(client, root) as endpoint, Browser(found, tmp_path) as browser:
        train(endpoint)
        browser.open(endpoint.url.removesuffix("/v1") + "/")
        browser.run(f"document.getElementById('key').value = {json.dumps(KEY)}")
        browser.run("document.getElementById('access').requestSubmit()")
        browser.until("document.getElementById('model').options.length >= 3")
        browser.until("document.getElementById('privacy').textContent.includes('visible')")
        for number, model in enumerate(("llama", "sales", "support") * 2, 1):
            browser.run(f"document.getElementById('model').value = '{model}'")
            browser.run(f"document.getElementById('prompt').value = 'who is {number}?'")
            browser.run("document.getElementById('ask').requestSubmit()")
            browser.until(f"document.querySelectorAll('.assistant').length === {number}")
            browser.until("!document.getElementById('send').disabled")
        browser.until("document.querySelectorAll('.job polyline').length === 1")
        browser.until("document.getElementById('jobs').textContent.includes('seen: succeeded, loss')")
        browser.until("document.getElementById('adapters').textContent.includes('seen')")
        browser.until("document.getElementById('adapters').textContent.includes('saleson the device')")
        texts = browser.run("[...document.querySelectorAll('.assistant')].map(each => each.textContent)")
        assert any(texts)  # a random model may also end at once
        assert "tokens/s" in browser.run("document.getElementById('speed').textContent")
        assert browser.run("document.querySelectorAll('.error').length") == 0
        assert browser.refused == []
        picture = browser.screenshot()
        assert picture.startswith(b"\x89PNG")
        assert browser.hosts <= {urlsplit(endpoint.url).netloc}


def test_the_script_is_javascript(endpoint: Endpoint, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    with raw(endpoint) as http:
        (tmp_path / "page.js").write_text(http.get("/page.js").text)
    subprocess.run([node, "--check", tmp_path / "page.js"], check=True, timeout=60)
