"""Tests an endpoint whose provider fails: a reply that fails its check ends the server for good, and while the
connection is lost, requests get a status 503."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from attacks.programs.providers import HonestOffer
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient, embedded
from tenant_sdk.endpoint import command
from tenant_sdk.endpoint.command import FORGED_EXIT, serve_command
from tenant_sdk.endpoint.settings import EndpointSettings
from tests.support.endpoints import KEY, chat, endpoint_of, raw
from tests.support.serving import make_served_model
from tests.support.waiting import until
from wire.errors import Unavailable, VeilbaseError, VerificationFailed
from wire.frame import Call
from wire.ring.seeded_rows import Rows
from wire.transport.inproc import InprocConnection


class Provider(HonestOffer):
    """Serves honestly until the test sets `lies`, which makes replies wrong, or `is_away`, which makes requests
    fail."""

    def __init__(self, served_model: ServedModel) -> None:
        super().__init__(served_model)
        self.lies = self.is_away = False

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        if self.is_away:
            raise Unavailable("the provider is away")
        reply = self.served_model.compute(call, rows)
        return reply + 1 if self.lies and call.purpose.name == "PRODUCT" else reply


@pytest.fixture(scope="module")
def served(folder: Path) -> ServedModel:
    return make_served_model(folder, "int8")


@pytest.fixture
def verified(
    folder: Path, served: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TenantClient, Provider]]:
    provider = Provider(served)
    monkeypatch.setattr(embedded, "connect_inproc", lambda *_: InprocConnection(provider))
    options = {"mask": "off", "verify": str(folder), "cache": tmp_path / "cache", "progress": False}
    with TenantClient("inproc:x", **options) as client:  # type: ignore[arg-type]
        yield client, provider


def asked(http: httpx2.Client) -> httpx2.Response:
    return http.post("/v1/chat/completions", json=chat())


def test_a_forged_reply_ends_the_server_for_good(verified: tuple[TenantClient, Provider]) -> None:
    client, provider = verified
    with endpoint_of(client) as endpoint, raw(endpoint) as http:
        url = endpoint.url
        assert asked(http).status_code == 200
        provider.lies = True
        answer = asked(http)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "reply_forged")
        provider.lies = False
        until(lambda: not endpoint.is_serving, "the end of the server")
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{url}/models", headers={"authorization": f"Bearer {KEY}"})
    assert isinstance(endpoint.ended_by, VerificationFailed)
    with pytest.raises(VeilbaseError), endpoint_of(client):  # nor does it begin again on this session
        raise AssertionError


def test_a_forged_reply_to_a_job_ends_the_server_too(verified: tuple[TenantClient, Provider], tmp_path: Path) -> None:
    client, provider = verified
    (tmp_path / "adapters").mkdir()
    with endpoint_of(client, tmp_path / "adapters") as endpoint, raw(endpoint) as http:
        form: Any = {"files": {"file": ("x", b'{"prompt": "a", "completion": "b"}')}, "data": {"purpose": "fine-tune"}}
        file_id = http.post("/v1/files", **form).json()["id"]
        body = {"model": "llama", "training_file": file_id, "hyperparameters": {"max_steps": 100_000, "rank": 2}}
        job_id = http.post("/v1/fine_tuning/jobs", json=body).json()["id"]
        until(lambda: http.get(f"/v1/fine_tuning/jobs/{job_id}/losses").json()["num_steps"], "a step of the job")
        provider.lies = True
        until(lambda: not endpoint.is_serving, "the end of the server")
    assert isinstance(endpoint.ended_by, VerificationFailed)


def test_the_command_ends_with_a_code_of_its_own(
    verified: tuple[TenantClient, Provider], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, provider = verified
    monkeypatch.setattr(command, "log_requests", lambda: None)  # which is for the whole process
    shown: list[str] = []

    def post(url: str) -> None:
        httpx2.post(f"{url}/chat/completions", json=chat(), headers={"authorization": f"Bearer {KEY}"})

    def ask_a_liar(line: str) -> None:
        shown.append(line)
        if line.startswith("ready "):
            provider.lies = True
            threading.Thread(target=post, args=(line.split()[1],)).start()

    with pytest.raises(SystemExit) as ended:
        serve_command(client, None, EndpointSettings(port=0, key=KEY), ask_a_liar)
    assert ended.value.code == FORGED_EXIT == 3
    assert shown[0] == f"key {KEY}"
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tenant: ")]
    assert line.endswith("does not start again by itself")


def test_while_the_connection_is_lost_it_says_so(verified: tuple[TenantClient, Provider]) -> None:
    client, provider = verified
    with endpoint_of(client) as endpoint, raw(endpoint) as http:
        for _ in range(2):
            provider.is_away = True
            answer = asked(http)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "provider_lost")
            assert int(answer.headers["retry-after"]) >= 1
            provider.is_away = False
            assert asked(http).status_code == 200
        assert http.get("/health").json() == {"status": "ok"}
        assert endpoint.ended_by is None
