"""Tests the pins of an unverified provider's bundle over real mutual TLS: a change since first use is refused until it
is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from provider.net.server import Server
from tenant_sdk import TenantClient
from tenant_sdk.cli import app
from tenant_sdk.session import AcceptedChangeWarning
from tests.support.providers import Provider, make_served_model
from tests.support.tiny_models import make_chat_model
from wire.errors import ProviderChanged

OTHER = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"


@pytest.fixture
def provider(start: Callable[..., Provider], tmp_path: Path) -> Provider:
    return start(make_served_model(make_chat_model(tmp_path / "one" / "tiny"), "int8"))


def serve_again(provider: Provider, folder: Path) -> None:
    """Starts the same provider again, with the same authority and port, but with another bundle under the same model's
    name."""
    port = provider.server.port
    provider.server.stop()
    provider.server = Server("127.0.0.1", port, provider.state)
    provider.server.start(make_served_model(folder, "int8"))


def client(provider: Provider, tmp_path: Path, **options: Any) -> TenantClient:
    provider.identity()
    return TenantClient(
        provider.url, provider.folder / "acme", mask="off", cache=tmp_path / "cache", progress=False, **options
    )


def test_a_changed_template_is_refused_until_it_is_accepted_by_name(provider: Provider, tmp_path: Path) -> None:
    with client(provider, tmp_path) as first:
        answer = first.generate("who?", max_new_tokens=2)
    pins = json.loads((provider.folder / "acme" / "pins.json").read_text())
    assert sorted(key.split(" ")[1:] for key in pins) == [["acme", "at", provider.url], ["acme", "serving", "tiny"]]
    serve_again(provider, make_chat_model(tmp_path / "two" / "tiny", template=OTHER))
    calls = 0
    for accepted in ([], ["tokenizer", "config", "model"]):
        with client(provider, tmp_path, accept_changes=accepted) as again:
            with pytest.raises(ProviderChanged, match="chat template changed since first use") as failure:
                again.generate("who?", max_new_tokens=2)
            with pytest.raises(ProviderChanged):
                again.load_model()
            calls += again.traffic.calls
        assert "\n" not in str(failure.value)
    assert calls == 0, "something was sent before the tenant accepted"
    with client(provider, tmp_path, tokenizer=tmp_path / "one" / "tiny") as named:
        assert named.generate("who?", max_new_tokens=2) == answer, "a template that is not used was in the way"
    with pytest.warns(AcceptedChangeWarning, match="chat template changed since first use"):
        shell = CliRunner().invoke(
            app, ["generate", "who?", "--identity", str(provider.folder / "acme"), "--mask", "off", "--accept-change",
                  "template", "--max-new-tokens", "2"],
        )  # fmt: skip
    assert shell.exit_code == 0, shell.output
    with client(provider, tmp_path) as after:
        after.generate("who?", max_new_tokens=2)


def test_a_model_under_another_name_is_a_change_too(provider: Provider, tmp_path: Path) -> None:
    """The model's name is pinned as well. Otherwise another name would count as a first use, for which nothing is
    pinned."""
    with client(provider, tmp_path) as first:
        first.generate("who?", max_new_tokens=2)
    serve_again(provider, make_chat_model(tmp_path / "two" / "renamed", template=OTHER))
    with client(provider, tmp_path) as again, pytest.raises(ProviderChanged, match="model's name and chat template"):
        again.generate("who?", max_new_tokens=2)
    with client(provider, tmp_path, accept_changes=["model"]) as half, pytest.raises(ProviderChanged) as failure:
        half.generate("who?", max_new_tokens=2)
    assert "chat template changed" in str(failure.value), "a new name let a new template in"
    said = pytest.warns(AcceptedChangeWarning, match="model's name and chat template")
    with client(provider, tmp_path, accept_changes=["model", "template"]) as accepted, said:
        accepted.generate("who?", max_new_tokens=2)


def test_another_spelling_of_the_url_is_the_same_provider(provider: Provider, tmp_path: Path) -> None:
    with client(provider, tmp_path) as first:
        first.generate("who?", max_new_tokens=2)
    serve_again(provider, make_chat_model(tmp_path / "two" / "renamed", template=OTHER))
    url = provider.url.replace("grpcs://", "GRPCS://") + "/"
    refused = pytest.raises(ProviderChanged, match="model's name")
    with TenantClient(url, provider.folder / "acme", mask="off", progress=False) as again, refused:
        again.generate("who?", max_new_tokens=2)


def test_another_tenant_of_the_same_provider_has_pins_of_its_own(provider: Provider, tmp_path: Path) -> None:
    with client(provider, tmp_path) as first:
        assert first.tokenizer is not None
    serve_again(provider, make_chat_model(tmp_path / "two" / "tiny", template=OTHER))
    provider.identity("globex")
    with TenantClient(provider.url, provider.folder / "globex", mask="off", progress=False) as other:
        assert other.generate("who?", max_new_tokens=2) is not None


def test_a_verified_session_needs_no_pins(provider: Provider, tmp_path: Path) -> None:
    with client(provider, tmp_path, verify=tmp_path / "one" / "tiny") as checked:
        checked.generate("who?", max_new_tokens=2)
    assert not (provider.folder / "acme" / "pins.json").exists()
