"""Tests over real mutual TLS that a tenant's own count of a run is its provider's, to the byte, and that the tenant can
see it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.net.server import Server
from provider.operations.usage import UsageBook
from tenant_sdk import TenantClient
from tenant_sdk.cli import app
from tenant_sdk.usage import UsageNotKeptWarning, status_of
from tests.support.lattice import TOY_OPTIONS
from tests.support.providers import Provider, make_served_model
from tests.support.spies import opened_sessions
from tests.support.tiny_models import make_chat_model
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError, QuotaExceeded
from wire.usage import FILE_NAME, Usage, read_usage_file

BALANCED = TOY_OPTIONS | {"precision": "balanced", "hints": "fetched"}
SHORT = TOY_OPTIONS | {"precision": "short", "hints": "stream"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("usage") / "tiny")


@pytest.fixture
def provider(start: Callable[..., Provider], chat: Path) -> Provider:
    return start(make_served_model(chat, "int8"), ipc=True)


def counted(usage: Usage) -> dict[str, int]:
    """Returns the numbers on which both sides have to agree."""
    return {
        "requests": sum(usage.requests.values()), "rows": sum(usage.rows.values()),
        "tokens": sum(usage.tokens.values()), "bytes_up": usage.bytes_up, "bytes_down": usage.bytes_down,
        "weight_bytes": usage.weight_bytes,
    }  # fmt: skip


def own(folder: Path) -> dict[str, int]:
    """Returns what `tenant status` says of all that was used with an identity."""
    done = CliRunner().invoke(app, ["status", "--identity", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    (known,) = json.loads(done.stdout)
    assert known["today"] == known["this_month"] == known["total"]
    return {name: number for name, number in known["total"].items() if name != "by_kind"}


@pytest.mark.parametrize(
    ("mask", "mask_options", "carrier", "is_verified"),
    [
        ("lattice", BALANCED, "tensor port", False),
        ("lattice", BALANCED, "ipc", True),
        ("lattice", SHORT, "gRPC", False),
        ("off", None, "tensor port", False),
        ("pad", None, "ipc", True),
    ],
    ids=lambda given: given if isinstance(given, str) else None,
)
def test_both_sides_count_the_same(
    start: Callable[..., Provider], chat: Path, tmp_path: Path,
    mask: str, mask_options: dict[str, Any] | None, carrier: str, is_verified: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    provider = start(make_served_model(chat, "int8"), None, None if carrier == "gRPC" else 0, ipc=carrier == "ipc")
    provider.identity()
    folder, url = provider.folder / "acme", provider.ipc_url if carrier == "ipc" else provider.url
    cache = tmp_path / "cache"
    verify, sessions = chat if is_verified else None, opened_sessions(monkeypatch)
    for number in (1, 2):  # a second process of the tenant adds to the count of the first
        with TenantClient(url, folder, mask, verify, mask_options=mask_options, cache=cache, progress=False) as client:
            result = client.finetune(ROWS, lora(), tmp_path / f"adapter{number}", **(QUICK | {"max_steps": 2}))
            client.generate("who?", result.adapter_dir, max_new_tokens=3)
        assert [carrier in str(getattr(each.connections[0], "carrier", "")) for each in sessions] == [True] * number
        theirs = counted(provider.service.usage.of("acme").total())
        assert own(folder) == theirs
        assert min(number for name, number in theirs.items() if name != "weight_bytes") > 0 == theirs["weight_bytes"]
    assert theirs["tokens"] < theirs["rows"]
    assert (folder / FILE_NAME).stat().st_mode & 0o777 == 0o600
    by_kind = status_of(folder)["total"]["by_kind"]
    assert by_kind["forward"]["requests"] > by_kind["backward"]["requests"] > 0
    assert (by_kind["hint"]["requests"] > 0) == (mask == "lattice")


def test_each_of_two_providers_is_counted_apart(start: Callable[..., Provider], chat: Path, tmp_path: Path) -> None:
    """One gets shares as rows, and the other as seeds, which are smaller: only rows can be told to be tokens."""
    providers = [start(make_served_model(chat, "int8")) for _ in range(2)]
    for each in providers:
        each.identity()
    folders = [each.folder / "acme" for each in providers]
    urls = [each.url for each in providers]
    with TenantClient(urls, folders, "shares", cache=tmp_path / "cache", progress=False) as client:
        client.generate("who?", max_new_tokens=2)
    first, second = (counted(each.service.usage.of("acme").total()) for each in providers)
    assert [own(folder) for folder in folders] == [first, second]
    assert first["rows"] == second["rows"] > first["tokens"] > second["tokens"] == 0
    assert first["bytes_up"] > second["bytes_up"] == 48 * second["requests"]


def test_saved_counts_agree_too(chat: Path, tmp_path: Path) -> None:
    """The provider's file is compared, as it is what a bill is made from."""
    state, folder, book = StateDir(tmp_path / "state"), tmp_path / "acme", UsageBook(tmp_path / "theirs.json")
    server = Server("127.0.0.1", 0, state)
    server.start(make_served_model(chat, "int8"), usage=book)
    enroll(state, "acme", folder, f"grpcs://127.0.0.1:{server.port}")
    with TenantClient(identity=folder, mask="off", cache=tmp_path / "cache", progress=False) as client:
        client.generate("who?", max_new_tokens=4)
    server.stop()
    assert book.save()
    saved = read_usage_file(tmp_path / "theirs.json").tenants["acme"]
    assert own(folder) == counted(saved.total())
    assert [str(day) for day in saved.days] == [status_of(folder)["day"]]


def test_tokens_are_counted_whatever_groups_a_tenant_keeps(provider: Provider, chat: Path, tmp_path: Path) -> None:
    """The second session asks for other groups than the first, also while the provider's process goes on."""
    provider.identity()
    folder = provider.folder / "acme"
    for number, keep in enumerate(("attention", "*.mlp.*", None), 1):
        with TenantClient(
            provider.url, folder, "off", chat, keep=keep, cache=tmp_path / "cache", progress=False
        ) as client:
            model = client.load_model()
            with torch.no_grad():
                model(torch.arange(11)[None])
        assert own(folder)["tokens"] == 11 * number
        theirs = provider.service.usage.of("acme").total()
        assert theirs.tokens == {"decode": 11 * number, "prefill": 0, "finetune": 0}
        assert own(folder) == counted(theirs)


def test_refused_requests_and_the_bundle_are_not_counted(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is refused once, and is sent again: it counts once on both sides."""
    from provider.net.requests import RequestTable

    provider.identity()
    folder, admit, refused = provider.folder / "acme", RequestTable.admit, set()

    def refusing(self: RequestTable, header: Any, *arguments: Any) -> None:
        if header.request_id % 2 and header.request_id not in refused:
            refused.add(header.request_id)
            raise QuotaExceeded("a test", 0.001)
        admit(self, header, *arguments)

    monkeypatch.setattr(RequestTable, "admit", refusing)
    with TenantClient(provider.url, folder, "off", cache=tmp_path / "cache", progress=False) as client:
        client.generate("who?", max_new_tokens=3)
        traffic = client.traffic
    theirs = provider.service.usage.of("acme").total()
    assert theirs.errors["QUOTA"] == len(refused) > 10
    assert own(folder) == counted(theirs)
    assert traffic.bytes_up > theirs.bytes_up
    assert traffic.calls == sum(theirs.requests.values()) + len(refused)


def test_a_folder_that_cannot_be_written_ends_no_run(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.identity()
    folder, cache = provider.folder / "acme", tmp_path / "cache"

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    client = TenantClient(provider.url, folder, "off", cache=cache, progress=False)
    client.generate("who?", max_new_tokens=2)
    with monkeypatch.context() as patched:
        patched.setattr("wire.usage.create_file", full)
        with pytest.warns(UsageNotKeptWarning, match="No space left"):
            client.close()
    assert own(folder)["requests"] == 0
    monkeypatch.setattr("os.access", lambda *arguments, **named: False)
    with pytest.warns(UsageNotKeptWarning, match="cannot be written to"):
        TenantClient(provider.url, folder, "off", cache=cache, progress=False).connect()


def test_a_damaged_count_is_said_before_anything_is_sent(provider: Provider, tmp_path: Path) -> None:
    provider.identity()
    folder = provider.folder / "acme"
    (folder / FILE_NAME).write_text("{")
    with pytest.raises(ConfigurationError, match=r"usage\.json"):
        TenantClient(provider.url, folder, "off", cache=tmp_path / "cache", progress=False).connect()
    for words in (["status"], ["generate", "who?"]):
        done = CliRunner().invoke(app, [*words, "--identity", str(folder)])
        assert done.exit_code == 1
        assert "move it away" in str(done.exception)
    assert provider.service.usage.totals() == {}


def test_status_needs_no_provider_and_does_not_load_torch(provider: Provider, tmp_path: Path) -> None:
    provider.identity()
    provider.server.stop()
    program = (
        "import sys; from tenant_sdk.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: assert not {'torch', 'transformers', 'grpc'} & set(sys.modules)"
    )
    words = [sys.executable, "-c", program, "status", "--identity", str(provider.folder / "acme")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert first.split() == ["provider", provider.url]
    assert second.startswith("tenant    acme of authority ")
    assert "nothing is counted yet" in third
    done = CliRunner().invoke(app, ["status"])
    assert "give --identity" in str(done.exception)
