"""Runs the code blocks of docs/endpoint.md in order. Its curl and Python examples ask a server that runs as the page
describes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.server import Endpoint
from tests.support import waiting
from tests.support.commands import ServeCommand
from tests.support.endpoints import endpoint_of
from tests.support.repository import ROOT
from tests.support.saved_adapters import save_adapter

PAGE = (ROOT / "docs" / "endpoint.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def adapters(tiny_chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    with TenantClient(f"inproc:{tiny_chat}", mask="off", cache=root.with_name("cache"), progress=False) as client:
        save_adapter(client.load_model(), root / "support", 1)
    return root


@pytest.fixture(scope="module")
def endpoint(tiny_chat: Path, adapters: Path) -> Iterator[Endpoint]:
    given = TenantClient(f"inproc:{tiny_chat}", mask="off", cache=adapters.with_name("cache"), progress=False)
    with given as client, endpoint_of(client, adapters) as serving:
        yield serving


def test_curl(endpoint: Endpoint, tiny_chat: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (script,) = blocks("bash")
    script = script.replace("smollm2-135m", tiny_chat.name).replace("curl -s", "curl --fail-with-body -s")
    env = {**os.environ, "OPENAI_BASE_URL": endpoint.url, "OPENAI_API_KEY": endpoint.key}
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, timeout=waiting.limit_s, env=env)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count('"object":"model"') == 2
    assert done.stdout.count('"object":"chat.completion"') == 1
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_python(
    endpoint: Endpoint, tiny_chat: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    monkeypatch.setenv("OPENAI_API_KEY", endpoint.key)
    asking, training = blocks("python")
    for code in (asking, training):
        exec(compile(code.replace("smollm2-135m", tiny_chat.name), "endpoint.md", "exec"), {})  # noqa: S102 - our page
    assert re.search(r'\{"open":(true|false)\}\n(queued|running) ', capsys.readouterr().out)


@pytest.mark.slow
def test_the_command_prints_a_key_and_its_address(tiny_chat: Path, adapters: Path, env: dict[str, str]) -> None:
    with ServeCommand(tiny_chat, adapters, env) as serving:
        headers = {"authorization": f"Bearer {serving.key}"}
        found = httpx2.get(f"{serving.url}/models", headers=headers).json()["data"]
        names = [each["id"] for each in found]
        assert names[0] == tiny_chat.name
        assert "support" in names  # beside it may be what the page's job has trained
        assert any(line.startswith("released") and "refused" in line for line in serving.printed)
        (fitting,) = [line for line in serving.printed if line.startswith("adapters that fit")]
        assert re.search(r"of rank 16 on \d+ layers: device 16 \(.* disk [12] found", fitting)
        err = serving.end(signal.SIGINT)
        assert serving.process.returncode == 0
    assert "/v1/models 200 ok" in err
    assert serving.key not in err


@pytest.mark.slow
def test_the_command_refuses_in_one_line(tiny_chat: Path, env: dict[str, str]) -> None:
    for options, said in (
        (["--host", "0.0.0.0", "--verify", "x"], "needs TLS"),  # noqa: S104
        ([], "--unverified"),
        (["--unverified", "--adapters", "nowhere"], "is not a folder"),
        (["--unverified", "--api-key-file", "nowhere"], "there is no file nowhere"),
    ):
        command = [sys.executable, "-m", "tenant_sdk", "serve", "--url", f"inproc:{tiny_chat}", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=waiting.limit_s, env=env)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("tenant: ")
        assert said in line
