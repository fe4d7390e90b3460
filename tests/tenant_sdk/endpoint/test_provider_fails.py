"""Tests an endpoint whose provider fails: a reply that fails its check ends the server for good, and while the
connection is lost, requests get a status 503."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tenant_sdk import TenantClient
from tenant_sdk.endpoint import command
from tenant_sdk.endpoint.command import FORGED_EXIT, serve_command
from tenant_sdk.endpoint.settings import EndpointSettings
from tenant_sdk.testing import Corrupt, Fail, ProviderCall, ScriptedProvider
from tests.support.endpoints import KEY, chat, endpoint_of, raw
from tests.support.waiting import until
from wire.errors import NotPermitted, QuotaExceeded, Unauthenticated, Unavailable, VeilbaseError, VerificationFailed

Verified = tuple[TenantClient, ScriptedProvider]


def lies(call: ProviderCall) -> Corrupt | None:
    return Corrupt() if call.purpose == "product" else None


def is_away(call: ProviderCall) -> Fail:
    return Fail(Unavailable)


@pytest.fixture
def verified(folder: Path) -> Iterator[Verified]:
    with ScriptedProvider(model=folder) as provider, provider.client(mask="off") as client:
        yield client, provider


def asked(http: httpx2.Client) -> httpx2.Response:
    return http.post("/v1/chat/completions", json=chat())


def test_a_forged_reply_ends_the_server_for_good(verified: Verified) -> None:
    client, provider = verified
    with endpoint_of(client) as endpoint, raw(endpoint) as http:
        url = endpoint.url
        assert asked(http).status_code == 200
        provider.handler = lies
        answer = asked(http)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "reply_forged")
        provider.handler = None
        until(lambda: not endpoint.is_serving, "the end of the server")
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{url}/models", headers={"authorization": f"Bearer {KEY}"})
    assert isinstance(endpoint.ended_by, VerificationFailed)
    with pytest.raises(VeilbaseError), endpoint_of(client):  # nor does it begin again on this session
        raise AssertionError


def test_a_forged_reply_to_a_job_ends_the_server_too(verified: Verified, tmp_path: Path) -> None:
    client, provider = verified
    (tmp_path / "adapters").mkdir()
    with endpoint_of(client, tmp_path / "adapters") as endpoint, raw(endpoint) as http:
        form: Any = {"files": {"file": ("x", b'{"prompt": "a", "completion": "b"}')}, "data": {"purpose": "fine-tune"}}
        file_id = http.post("/v1/files", **form).json()["id"]
        body = {"model": "llama", "training_file": file_id, "hyperparameters": {"max_steps": 100_000, "rank": 2}}
        job_id = http.post("/v1/fine_tuning/jobs", json=body).json()["id"]
        until(lambda: http.get(f"/v1/fine_tuning/jobs/{job_id}/losses").json()["num_steps"], "a step of the job")
        provider.handler = lies
        until(lambda: not endpoint.is_serving, "the end of the server")
    assert isinstance(endpoint.ended_by, VerificationFailed)


def test_the_command_ends_with_a_code_of_its_own(
    verified: Verified, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, provider = verified
    monkeypatch.setattr(command, "log_requests", lambda: None)  # which is for the whole process
    shown: list[str] = []

    def post(url: str) -> None:
        httpx2.post(f"{url}/chat/completions", json=chat(), headers={"authorization": f"Bearer {KEY}"})

    def ask_a_liar(line: str) -> None:
        shown.append(line)
        if line.startswith("ready "):
            provider.handler = lies
            threading.Thread(target=post, args=(line.split()[1],)).start()

    with pytest.raises(SystemExit) as ended:
        serve_command(client, None, EndpointSettings(port=0, key=KEY), ask_a_liar)
    assert ended.value.code == FORGED_EXIT == 3
    assert shown[0] == f"key {KEY}"
    costs, ended_by = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tenant: ")]
    assert costs.startswith("tenant: 1,000 tokens of answers: estimated ")
    assert ended_by.endswith("does not start again by itself")


def test_while_the_connection_is_lost_it_says_so(verified: Verified) -> None:
    client, provider = verified
    with endpoint_of(client) as endpoint, raw(endpoint) as http:
        for _ in range(2):
            provider.handler = is_away
            answer = asked(http)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "provider_lost")
            assert int(answer.headers["retry-after"]) >= 1
            provider.handler = None
            assert asked(http).status_code == 200
        assert http.get("/health").json() == {"status": "ok"}
        assert endpoint.ended_by is None


def test_a_provider_that_refuses_the_tenant_is_in_the_log_and_in_health(
    verified: Verified, caplog: pytest.LogCaptureFixture
) -> None:
    client, provider = verified
    caplog.set_level("INFO", "veilbase.endpoint")
    with endpoint_of(client) as endpoint, raw(endpoint) as http:
        for kind, reason in ((NotPermitted, "not_permitted"), (Unauthenticated, "unauthenticated")):
            provider.handler = lambda call, kind=kind: Fail(kind)
            assert [asked(http).status_code for _ in range(2)] == [502] * 2
            answer = http.get("/health")
            assert (answer.status_code, answer.json()) == (
                200, {"status": "ok", "provider": "refuses", "reason": reason}
            )  # fmt: skip
            (line,) = [
                each for each in caplog.messages if each.startswith(f"the provider refuses this tenant ({reason})")
            ]
            assert "\n" not in line
        for handler in (is_away, lambda _: Fail(QuotaExceeded)):  # which are no refusals, and no answers
            provider.handler = handler
            asked(http)
            assert http.get("/health").json()["reason"] == "unauthenticated"
        provider.handler = None
        assert asked(http).status_code == 200
        until(lambda: http.get("/health").json() == {"status": "ok"}, "the end of the refusal")
    assert "the provider answers this tenant again" in caplog.messages


def test_refusals_in_turn_with_answers_are_logged_once_a_minute(
    verified: Verified, caplog: pytest.LogCaptureFixture
) -> None:
    client, provider = verified
    caplog.set_level("INFO", "veilbase.endpoint")
    again = "the provider answers this tenant again"
    with endpoint_of(client) as endpoint, raw(endpoint) as http:
        now = [0.0]
        endpoint.service.clock = lambda: now[0]

        def refused(handler: Any) -> None:
            provider.handler = handler
            asked(http)

        def lines() -> int:
            return sum("(not_permitted)" in each for each in caplog.messages)

        for _ in range(2):
            refused(lambda _: Fail(NotPermitted))
            refused(None)
            refused(lambda _: Fail(QuotaExceeded))
            until(lambda: http.get("/health").json() == {"status": "ok"}, "the end of the refusal")
        assert (lines(), caplog.messages.count(again)) == (1, 1)
        refused(lambda _: Fail(NotPermitted))
        now[0] = 61.0
        refused(lambda _: Fail(NotPermitted))  # it has lasted, and the last line says that the provider answers
        assert lines() == 2


def test_a_refused_job_says_nothing_about_requests(verified: Verified, caplog: pytest.LogCaptureFixture) -> None:
    client, _ = verified
    with endpoint_of(client) as endpoint:
        service = endpoint.service
        for _ in range(2):
            service.note_job(NotPermitted("no training for this tenant"))
        service.note_job(QuotaExceeded("too much at once"))
        assert service.health() == {"status": "ok"}
    (line,) = caplog.messages
    assert line == "the provider refuses a job of this tenant (not_permitted): no training for this tenant"
