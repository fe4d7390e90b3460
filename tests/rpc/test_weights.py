"""Tests over real mutual TLS that a tenant fetches the weights of layers that it keeps, if its provider's operator
allows it, within a quota, and that both sides count the same bytes."""

from __future__ import annotations

import csv
import hashlib
import io
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wire.transport.grpc_connection as grpc_connection
from provider.config import load_settings
from provider.identity.registry import revoke
from provider.model.served_model import ServedModel
from provider.model.weight_file import WeightFile
from provider.net.admission import MAX_CALLS_PER_TENANT, Admission
from provider.net.server import Server
from provider.operations.usage import UsageBook, report
from provider.schedule.quota import DailyBytes, TenantLimits
from provider.serve import serve
from tenant_sdk import TenantClient
from tenant_sdk.session import AcceptedChangeWarning
from tenant_sdk.usage import status_of, status_text
from tests.support.providers import Provider, WrappedModel, make_served_model
from tests.support.raw_peers import RawStream
from tests.support.tiny_models import make_chat_model
from wire.errors import (
    ConfigurationError,
    MalformedFrame,
    NotPermitted,
    ProviderChanged,
    QuotaExceeded,
    UnknownLayer,
)
from wire.manifest import GroupInfo
from wire.transport.ipc.connection import IpcConnection
from wire.usage import Usage, read_usage_file

IDS = torch.arange(3, 14)[None]
LARGE = TenantLimits(weight_bytes_per_day=1 << 20)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("weights") / "tiny")


@pytest.fixture(scope="module")
def served(chat: Path) -> ServedModel:
    return make_served_model(chat, "int8")


def client_of(provider: Provider, cache: Path, name: str = "acme", **options: Any) -> TenantClient:
    provider.identity(name)
    given = {"mask": "off", "keep": "attention", "cache": cache, "progress": False, **options}
    return TenantClient(provider.url, provider.folder / name, **given)


def logits_of(client: TenantClient) -> torch.Tensor:
    model: Any = client.load_model()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


def theirs(provider: Provider, name: str = "acme") -> Usage:
    return provider.service.usage.of(name).total()


def kept_groups(served: ServedModel) -> list[GroupInfo]:
    """Returns the groups that "attention" keeps."""
    return [group for group in served.manifest().groups if "self_attn" in group.layers[0].name]


def fetched(provider: Provider, group: int = 0, name: str = "acme") -> bytes:
    connection = provider.connect(name)
    return b"".join(connection.fetch_weights(connection.manifest().groups[group]))


def test_kept_layers_are_computed_with_fetched_weights(
    start: Callable[..., Provider], served: ServedModel, tmp_path: Path
) -> None:
    """Results are those of a session that keeps nothing. What was fetched is kept, and counts once, to the byte."""
    provider, kept = start(served, Admission({"acme": LARGE})), kept_groups(served)
    with client_of(provider, tmp_path / "cache", keep=None) as client:
        expected = logits_of(client)
    before = theirs(provider)
    for _ in range(2):
        with client_of(provider, tmp_path / "cache") as client:
            assert torch.equal(logits_of(client), expected)
            said = client.explain()
    assert "from weights that the provider chose" in said
    assert "their weights are asked for once" in said
    assert theirs(provider).weight_bytes == sum(group.weight_bytes for group in kept) > 0
    known = status_of(provider.folder / "acme")
    own = known["total"]
    assert "weight bytes" in status_text([known], as_json=False)
    assert own["weight_bytes"] == theirs(provider).weight_bytes
    assert (own["bytes_up"], own["bytes_down"]) == (theirs(provider).bytes_up, theirs(provider).bytes_down)
    num_asked = len(served.manifest().groups) - len(kept)
    assert theirs(provider).requests["decode"] - before.requests["decode"] == 2 * num_asked
    stores = list((tmp_path / "cache" / "weights").iterdir())
    assert len(stores) == len(kept)
    assert {path.stat().st_mode & 0o777 for path in (*stores, stores[0].parent)} == {0o600, 0o700}


def test_the_groups_and_their_order_do_not_depend_on_the_weights(
    start: Callable[..., Provider], served: ServedModel, tmp_path: Path
) -> None:
    asked: list[list[int]] = []
    for number, seed in enumerate((0, 1)):
        other = WrappedModel(make_served_model(make_chat_model(tmp_path / f"{number}" / "tiny", seed=seed), "int8"))
        asked.append([])
        other.read_weights = lambda group, other=other, seen=asked[-1]: (  # type: ignore[attr-defined]
            seen.append(group) or other.served_model.read_weights(group)
        )
        with client_of(start(other, Admission({"*": LARGE})), tmp_path / f"cache{number}") as client:
            client.connect()
    assert asked == [[group.id for group in kept_groups(served)]] * 2


@pytest.mark.parametrize("reason", ["off by default", "an earlier release", "another tenant's permission"])
def test_without_permission_one_line_says_what_is_missing(
    start: Callable[..., Provider], served: ServedModel, tmp_path: Path, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"globex": LARGE} if reason == "another tenant's permission" else {}
    if reason == "an earlier release":
        limits = {"*": LARGE}
        monkeypatch.setattr(grpc_connection, "WEIGHTS_METHOD", "/veilbase.v1.Provider/Unheard")
    provider = start(served, Admission(limits))
    with pytest.raises(NotPermitted) as caught, client_of(provider, tmp_path / "cache"):
        pass
    assert "name a checkpoint of your own (verify=, --verify), or ask the provider's operator" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert theirs(provider).is_zero


def test_with_verify_no_weights_are_fetched(
    start: Callable[..., Provider], served: ServedModel, chat: Path, tmp_path: Path
) -> None:
    provider = start(served, Admission({"*": LARGE}))
    with client_of(provider, tmp_path / "cache", verify=chat) as client:
        logits_of(client)
    assert theirs(provider).weight_bytes == 0 < theirs(provider).bytes_down


# ---- the quota -------------------------------------------------------------------------------------------------------


def test_each_tenant_has_a_quota_of_its_own(
    start: Callable[..., Provider], served: ServedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exact = sum(group.weight_bytes for group in kept_groups(served))
    provider = start(served, Admission({"acme": TenantLimits(weight_bytes_per_day=exact), "globex": LARGE}))
    with client_of(provider, tmp_path / "cache") as client:
        client.connect()
    with pytest.raises(QuotaExceeded) as caught, client_of(provider, tmp_path / "other"):
        pass
    assert "no more weights today" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert theirs(provider).weight_bytes == exact
    assert "more weights than it may fetch in a day" in caplog.text
    with client_of(provider, tmp_path / "third", "globex") as client:
        client.connect()


def test_too_many_calls_are_not_told_as_a_quota_of_a_day(
    start: Callable[..., Provider], served: ServedModel, tmp_path: Path
) -> None:
    """Whoever waits until tomorrow for that waits in vain."""
    provider = start(served, Admission({"acme": LARGE}))
    streams = [RawStream(provider, "acme") for _ in range(MAX_CALLS_PER_TENANT)]
    connection = provider.connect()
    with pytest.raises(QuotaExceeded, match="too many calls open") as caught:
        b"".join(connection.fetch_weights(served.manifest().groups[0]))
    assert "today" not in str(caught.value)
    for stream in streams:
        stream.close()


def test_a_transfer_that_is_given_up_takes_all_its_bytes_from_the_quota(
    start: Callable[..., Provider], served: ServedModel
) -> None:
    group = served.manifest().groups[0]
    provider = start(served, Admission({"acme": TenantLimits(weight_bytes_per_day=group.weight_bytes)}))
    chunks = provider.connect().fetch_weights(group)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    with pytest.raises(QuotaExceeded):
        fetched(provider)


def in_two_parts(served: ServedModel, goes_on: threading.Event) -> WrappedModel:
    """Returns a model that gives 100 bytes of a weight, and 50 more after an event."""

    def read(group: int) -> Iterator[bytes]:
        yield bytes(100)
        assert goes_on.wait(30)
        yield bytes(50)

    slow = WrappedModel(served)
    slow.read_weights = read  # type: ignore[attr-defined]
    return slow


def test_the_part_of_a_weight_that_was_sent_is_counted(start: Callable[..., Provider], served: ServedModel) -> None:
    """The tenant gives up after the first part, which only the provider counts."""
    gone = threading.Event()
    provider = start(in_two_parts(served, gone), Admission({"acme": LARGE}))
    connection = provider.connect()
    chunks = connection.fetch_weights(connection.manifest().groups[0])
    assert next(chunks) == bytes(100)
    assert theirs(provider).weight_bytes == 100
    chunks.close()  # type: ignore[attr-defined]
    gone.set()
    assert connection.traffic.usage.total().is_zero


def test_a_tenant_that_is_revoked_meanwhile_gets_no_more(
    start: Callable[..., Provider], served: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    is_revoked = threading.Event()
    provider = start(in_two_parts(served, is_revoked), Admission({"acme": LARGE}))
    connection = provider.connect()
    chunks = connection.fetch_weights(connection.manifest().groups[0])
    assert next(chunks) == bytes(100)
    revoke(provider.state, "acme")
    is_revoked.set()
    with pytest.raises(NotPermitted, match="revoked"):
        next(chunks)
    assert theirs(provider).weight_bytes == 100
    assert "its certificate was revoked" in caplog.text


def test_a_provider_that_was_restarted_goes_on_with_the_quota(
    start: Callable[..., Provider], served: ServedModel, tmp_path: Path
) -> None:
    group = served.manifest().groups[0]
    provider = start(served)
    provider.identity()
    for number in (1, 2):
        provider.server.stop()
        book = UsageBook(tmp_path / "usage.json")
        server = provider.server = Server("127.0.0.1", 0, provider.state)
        server.start(
            served, None, Admission({"acme": TenantLimits(weight_bytes_per_day=2 * group.weight_bytes - 1)}), book
        )
        if number == 1:
            assert len(fetched(provider)) == group.weight_bytes
        else:
            with pytest.raises(QuotaExceeded):
                fetched(provider)
        assert book.save()
    shown = report(read_usage_file(tmp_path / "usage.json"))
    (row,) = csv.DictReader(io.StringIO(shown.csv()))
    assert (row["weight_bytes"], row["bytes_down"]) == (str(group.weight_bytes),) * 2
    assert shown.table().splitlines()[0].split()[-2:] == ["weight", "bytes"]


def test_a_day_has_a_quota_of_its_own() -> None:
    daily, asked = DailyBytes(10), []

    def before() -> int:
        asked.append(1)
        return 4

    assert [daily.take(num_bytes, 7, before) for num_bytes in (7, 6, 1)] == [False, True, False]
    assert [daily.take(num_bytes, 8, before) for num_bytes in (11, 10, 1)] == [False, True, False]
    assert len(asked) == 1
    assert not DailyBytes(0).take(1, 7, int)


def test_a_call_that_comes_late_around_midnight_begins_no_day_anew() -> None:
    daily = DailyBytes(10)
    assert [daily.take(10, day, int) for day in (7, 8, 7, 8, 7)] == [True, True, False, False, False]
    assert daily.take(10, 9, int)
    assert daily.take(10, 2, int)  # The clock was wrong, and is set back.


# ---- what the provider refuses and gives -----------------------------------------------------------------------------


@pytest.mark.parametrize("request_bytes", [b"", b"\0\0\0", b"\xff\xff\xff\xff", b"\x09\0\0\0", bytes(5)])
def test_a_call_for_a_group_that_is_not_there_is_refused(
    start: Callable[..., Provider], served: ServedModel, request_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = start(served, Admission({"*": LARGE}))
    manifest = provider.connect().manifest()

    class Asked:
        weight_bytes = 100
        id = type("Id", (), {"to_bytes": lambda self, *order: request_bytes})()

    with pytest.raises(MalformedFrame):
        b"".join(provider.connect().fetch_weights(Asked()))  # type: ignore[arg-type]
    assert len(manifest.groups) == 9
    assert theirs(provider).weight_bytes == 0


def test_what_is_given_is_what_the_digest_is_of(start: Callable[..., Provider], chat: Path) -> None:
    """The file has the weights also after this process has let go of its own."""
    served = make_served_model(chat, "int8")
    served.weight_file = WeightFile(served.served.groups, None)
    own = [b"".join(make_served_model(chat, "int8").read_weights(group.id)) for group in served.manifest().groups]
    served.let_weights_go()
    for group in served.manifest().groups:
        data = b"".join(served.read_weights(group.id))
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (group.digest, group.weight_bytes)
        assert data == own[group.id]
    served.weight_file = None
    with pytest.raises(UnknownLayer):
        served.read_weights(0)
    provider = start(served, Admission({"*": LARGE}))
    with pytest.raises(NotPermitted):
        fetched(provider)


@pytest.mark.parametrize("limit", [0, 1000])
def test_a_provider_of_several_processes_gives_weights_too(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The settings say whether weights are written down; the processes that compute have their own."""

    class Started(Exception):
        """Is raised when the server has started, since the test needs no more."""

    def started(server: Server, model: ServedModel, *others: object) -> None:
        given.extend(b"".join(model.read_weights(group.id)) for group in model.manifest().groups if limit)
        assert (model.weight_file is None) == (limit == 0)
        assert model.served.groups == ()
        digests.extend(group.digest for group in model.manifest().groups if limit)
        raise Started

    given: list[bytes] = []
    digests: list[str] = []
    monkeypatch.setattr(Server, "start", started)
    config = tmp_path / "provider.yaml"
    config.write_text(f"tenant_limits: {{'*': {{weight_bytes_per_day: {limit}}}}}\nshards: 2\n")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        with pytest.raises(Started):
            serve(load_settings({"port": 0, "model": str(chat)}, config))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert [hashlib.sha256(data).hexdigest() for data in given] == digests
    assert len(given) == (9 if limit else 0)


def test_a_full_disk_of_the_provider_is_one_line(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("provider.model.weight_file.tempfile.TemporaryFile", full)
    with pytest.raises(ConfigurationError, match="No space left on device; free some space") as caught:
        WeightFile(served.served.groups, None)
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_up_meanwhile_leaves_no_open_file(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter writes what is left of an open file when it is collected, and says that this failed."""

    class Full(io.RawIOBase):
        readable = writable = seekable = lambda self: True

        def seek(self, *where: int) -> int:
            return 0

        def write(self, data: object) -> int:
            raise OSError(28, "No space left on device")

    file = io.BufferedRandom(Full())
    monkeypatch.setattr("provider.model.weight_file.tempfile.TemporaryFile", lambda **options: file)
    with pytest.raises(ConfigurationError, match="No space left on device; free some space"):
        WeightFile(served.served.groups, None)
    assert file.closed


# ---- what the tenant refuses -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", ["a bit", "short", "long", "silent"])
def test_other_bytes_than_were_announced_are_refused(
    start: Callable[..., Provider], served: ServedModel, tmp_path: Path, lie: str
) -> None:
    liar = WrappedModel(served)

    def read(group: int) -> Any:
        data = bytearray(b"".join(served.read_weights(group)))
        data[3] ^= lie == "a bit"
        yield {"short": bytes(data[:-1]), "long": bytes(data) + b"\0", "silent": b""}.get(lie, bytes(data))

    liar.read_weights = read  # type: ignore[attr-defined]
    provider = start(liar, Admission({"*": LARGE}))
    with pytest.raises(MalformedFrame) as caught, client_of(provider, tmp_path / "cache"):
        pass
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache" / "weights").exists()
    assert theirs(provider).requests == {"decode": 0, "prefill": 0, "finetune": 0}


def test_weights_that_changed_since_first_use_are_refused(
    start: Callable[..., Provider], served: ServedModel, tmp_path: Path
) -> None:
    provider = start(served, Admission({"*": LARGE}))
    for keep in ("attention", "lower:1"):
        with client_of(provider, tmp_path / "cache", keep=keep) as client:
            client.connect()
    provider.server.stop()
    provider.server = Server("127.0.0.1", provider.server.port, provider.state)
    other = make_served_model(make_chat_model(tmp_path / "other" / "tiny", seed=1), "int8")
    service = provider.server.start(other, None, Admission({"*": LARGE}))
    with pytest.raises(ProviderChanged) as caught, client_of(provider, tmp_path / "cache"):
        pass
    assert "the provider's weights changed since first use, and nothing was sent" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert service.usage.totals() == {}
    with (
        pytest.warns(AcceptedChangeWarning, match="weights changed"),
        client_of(provider, tmp_path / "cache", accept_changes="weights"),
    ):
        pass


def test_the_socket_of_one_host_carries_no_weights(
    start: Callable[..., Provider], served: ServedModel, tmp_path: Path
) -> None:
    provider = start(served, Admission({"*": LARGE}), ipc=True)
    provider.identity()
    with pytest.raises(ConfigurationError, match="an ipc: URL carries none"):
        TenantClient(provider.ipc_url, provider.folder / "acme", keep="attention", cache=tmp_path)
    with pytest.raises(ConfigurationError, match="by grpcs:// only"):
        IpcConnection(provider.ipc_url, provider.identity()).fetch_weights(served.manifest().groups[0])
