"""Tests that adapters are loaded and unloaded by name, and that no request opens an adapter outside of the adapters'
folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from tenant_sdk import EndpointSettings, TenantClient
from tenant_sdk.endpoint.errors import HttpError
from tenant_sdk.endpoint.models import ModelNames
from tenant_sdk.serving.adapters import reader
from tests.support.endpoints import chat, endpoint_of, raw
from tests.support.saved_adapters import Openings, save_adapter, save_kind
from wire.errors import ConfigurationError

ESCAPES = [
    "../secret",
    "support/../../secret",
    "./support",
    "support/",
    "support//",
    "/etc",
    "/etc/passwd",
    "linked",
    "..",
    ".",
    "~/adapters",
    "https://example.com/adapter",
    "file:///etc",
    "s3://bucket/x",
    "support\x00",
    "support\n",
    "\U0001f600",
    "{root}/../secret",
    "{root}//support",
    "{root}",
    "{root}/",
    "{root}x/support",
    "hub/some-adapter",
    "%2e%2e/secret",
]


def test_each_adapter_is_shown_with_its_tier(
    client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "RACY_NS", 0)  # files that have just been written are read again for each request
    for name in ("used", "unused"):
        save_adapter(client.load_model(), tmp_path / "adapters" / name, 1)
    with endpoint_of(client, tmp_path / "adapters") as endpoint, raw(endpoint) as http:
        http.post("/v1/load_lora_adapter", json={"lora_name": "other", "lora_path": "used"})
        tiers = {each["name"]: each["tier"] for each in http.get("/v1/status").json()["adapters"]}
        metrics = http.get("/metrics").text
    assert tiers == {"used": "device", "other": "device", "unused": "disk"}
    assert "veilbase_endpoint_adapter_device_loads 1.0" in metrics
    assert "veilbase_endpoint_adapter_disk_reads 1.0" in metrics


def test_an_endpoint_opens_and_parses_an_adapter_once(
    client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "RACY_NS", -1)  # the files are new, and stay as they are
    save_adapter(client.load_model(), tmp_path / "adapters" / "support", 1)
    with endpoint_of(client, tmp_path / "adapters") as endpoint, raw(endpoint) as http:
        openings = Openings(monkeypatch)
        assert http.post("/v1/load_lora_adapter", json={"lora_name": "support"}).status_code == 200
        openings.assert_once()
        body = {"model": "support", "prompt": "who?", "max_tokens": 1}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert len(openings.parsed) == 2  # the request looks at the files' stamp only


@pytest.mark.parametrize("separate_calls", [True, False])
def test_adapters_that_change_inputs_need_separate_calls(
    client: TenantClient, tmp_path: Path, separate_calls: bool
) -> None:
    save_kind(client.load_model(), "llama", tmp_path / "adapters" / "turned", "HRA", 1)
    with endpoint_of(client, tmp_path / "adapters", separate_calls=separate_calls) as endpoint, raw(endpoint) as http:
        reply = http.post("/v1/completions", json={"model": "turned", "prompt": "who?", "max_tokens": 2})
    assert reply.status_code == (200 if separate_calls else 400)
    assert ("served with separate_calls=True" in reply.text) is not separate_calls


def test_an_endpoint_takes_what_the_store_takes(client: TenantClient, tmp_path: Path) -> None:
    save_adapter(client.load_model(), tmp_path / "adapters" / "support", 1)
    options: dict[str, Any] = {"device_slots": 3, "host_bytes": 1 << 20, "preload": ["support"]}
    with endpoint_of(client, tmp_path / "adapters", **options) as endpoint:
        store = endpoint.service.names.store
        assert store is not None
        status = store.status()
    assert (status.device_slots, status.host_budget_bytes, status.host_adapters) == (3, 1 << 20, 1)
    with pytest.raises(ConfigurationError, match="device_slots has no effect without adapters"):
        client.serve(settings=EndpointSettings(unverified=True), device_slots=3)


def test_an_endpoint_serves_a_catalogue_alone(client: TenantClient, tmp_path: Path) -> None:
    made = save_adapter(client.load_model(), tmp_path / "made", 1)
    both = b"".join((made / file).read_bytes() for file in (reader.CONFIG, reader.WEIGHTS))
    pinned = f"sha256:{hashlib.sha256(both).hexdigest()}"
    (tmp_path / "list.json").write_text(
        json.dumps({"adapters": {"far": {"source": f"file://{made}", "digest": pinned}}})
    )
    options = {"catalogue": tmp_path / "list.json", "cache": tmp_path / "cache"}
    with endpoint_of(client, None, **options) as endpoint, raw(endpoint) as http:
        reply = http.post("/v1/completions", json={"model": "far", "prompt": "who?", "max_tokens": 2})
        assert reply.status_code == 200, reply.text
        assert [each["id"] for each in http.get("/v1/models").json()["data"]][1:] == ["far"]


def make_root(client: TenantClient, place: Path) -> Path:
    """Makes a folder with one adapter in it and a link to another adapter outside of it, and returns the folder."""
    folder = place / "adapters"
    for seed, each in enumerate((folder / "support", place / "secret")):
        save_adapter(client.load_model(), each, seed)
    (folder / "linked").symlink_to(place / "secret")
    return folder


@pytest.fixture
def root(client: TenantClient, tmp_path: Path) -> Path:
    return make_root(client, tmp_path)


@pytest.fixture(scope="module")
def shared(client: TenantClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, httpx2.Client]]:
    """Provides a folder made by `make_root`, and a raw HTTP client of an endpoint that serves it."""
    folder = make_root(client, tmp_path_factory.mktemp("shared"))
    with endpoint_of(client, folder) as endpoint, raw(endpoint) as http:
        yield folder, http


def load(http: httpx2.Client, name: str, path: str | None = None) -> httpx2.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, **({} if path is None else {"lora_path": path})})


def status(http: httpx2.Client, model: str) -> int:
    return http.post("/v1/chat/completions", json=chat(model=model)).status_code


def names(http: httpx2.Client) -> list[str]:
    return [each["id"] for each in http.get("/v1/models").json()["data"]]


def test_load_and_unload(client: TenantClient, root: Path) -> None:
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        assert names(http) == ["llama", "support"]
        want = http.post("/v1/chat/completions", json=chat(model="support")).json()["choices"][0]["message"]
        for name, path in (("help", "support"), ("desk", f"{root.absolute()}/support"), ("support", None)):
            assert load(http, name, path).status_code == 200
            answer = http.post("/v1/chat/completions", json=chat(model=name))
            assert answer.json()["choices"][0]["message"] == want
        assert names(http) == ["llama", "desk", "help", "support"]
        for name in ("help", "support"):
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 404
            assert status(http, name) == 404
        assert load(http, "support").status_code == 200
        assert status(http, "support") == 200


def test_unloading_frees_the_memory_once_no_name_is_left(
    client: TenantClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "RACY_NS", 0)
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        store: Any = endpoint.service.names.store
        for name in ("support", "help"):
            assert load(http, name, "support").status_code == 200
        numbers = []
        for name in ("help", "support"):
            assert http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
            store.loader.submit(lambda: None).result()  # after what was to be done before
            now = store.status()
            numbers.append((now.device_adapters, now.host_adapters, now.host_bytes > 0))
        assert numbers == [(1, 1, True), (0, 0, False)]
        assert load(http, "support").status_code == 200
        assert status(http, "support") == 200


def test_an_adapter_that_is_saved_later_is_found(client: TenantClient, root: Path) -> None:
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        assert status(http, "later") == 404
        save_adapter(client.load_model(), root / "later", 5)
        assert status(http, "later") == 200


def test_a_name_leads_to_one_adapter(client: TenantClient, root: Path) -> None:
    save_adapter(client.load_model(), root / "sales", 5)
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        assert load(http, "help", "support").status_code == 200
        for name, path in (("help", "sales"), ("sales", "support"), ("llama", "support"), ("a b", "support")):
            answer = load(http, name, path)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name")
        assert load(http, "help", "support").status_code == 200


def test_an_adapter_that_appears_later_takes_its_name_from_another(client: TenantClient, root: Path) -> None:
    """A request gives the name `later` to the adapter `support`. Then an adapter is saved under this name, as a job may
    do, and the name means the new adapter."""
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        assert load(http, "later", "support").status_code == 200
        save_adapter(client.load_model(), root / "later", 5)
        assert endpoint.service.names.adapter_of("later") == "later"
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "later"}).status_code == 200
        assert status(http, "later") == 404


class TwoFolders:
    """Implements a store of two adapters that calls a function of the test while an adapter is loaded."""

    def __init__(self) -> None:
        self.while_loading: Callable[[], None] = lambda: None

    def names(self, most: int | None = None) -> list[str]:
        return ["sales", "support"][:most]

    def has(self, name: str) -> bool:
        return name in self.names()

    def drop(self, name: str) -> None:
        pass

    def tiers(self) -> dict[str, Any]:
        return {}

    def reserve(self, name: str) -> Any:
        act, self.while_loading = self.while_loading, lambda: None
        act()
        return SimpleNamespace(is_ready=lambda: True, failure=None, release=lambda: None)


def test_an_adapter_that_is_stored_again_is_no_longer_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TwoFolders()
    names = ModelNames("llama", store, None)
    names.unload("sales")
    with pytest.raises(HttpError):
        names.adapter_of("sales")
    with monkeypatch.context() as gone:
        gone.setattr(store, "names", lambda: ["support"])
        names.listed()
    assert names.adapter_of("sales") == "sales"


def test_of_two_that_want_a_name_at_once_one_gets_it() -> None:
    store = TwoFolders()
    names = ModelNames("llama", store, None)
    store.while_loading = lambda: names.load("help", "sales")
    with pytest.raises(HttpError) as refused:
        names.load("help", "support")
    assert refused.value.code == "name_taken"
    assert names.adapter_of("help") == "sales"


def test_a_request_looks_for_its_own_folder_only(
    client: TenantClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 10,000 subfolders, a list of them takes 14 ms, which requests must not pay."""
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        assert load(http, "help", "support").status_code == 200
        listed: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr("tenant_sdk.serving.adapters.reader.os.scandir", lambda *where: listed.append(where))
            assert [status(http, model) for model in ("support", "help", "llama")] == [200, 200, 200]
            assert http.get("/v1/models/support").status_code == 200
            assert load(http, "desk", "support").status_code == 200
            for name in ("desk", "help", "support"):
                assert http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
        assert listed == []


def test_an_unknown_name_costs_little_however_many_there_are(
    client: TenantClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenant_sdk.endpoint.models.MOST_COMPARED", 3)
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        assert [status(http, model) for model in ("nobody", "../x")] == [404, 404]
        said = http.get("/v1/models/suport").json()["error"]["message"]
        assert said == "there is no model 'suport' here: the nearest is support"
        for number in range(9):
            (root / f"one-of-{number}").mkdir()
        looked_at: list[str] = []
        is_of_a_run = reader.AdapterFolder.is_of_a_run
        monkeypatch.setattr(
            reader.AdapterFolder, "is_of_a_run", lambda own, name: looked_at.append(name) or is_of_a_run(own, name)
        )
        said = http.get("/v1/models/suport").json()["error"]["message"]
        assert said == "there is no model 'suport' here: see /v1/models"
        assert len(looked_at) <= 3 + 1  # one for the name itself


@pytest.mark.parametrize("path", ESCAPES)
def test_nothing_outside_the_folder_is_opened(shared: tuple[Path, httpx2.Client], path: str) -> None:
    root, http = shared
    shown = path.replace("{root}", str(root.absolute()))
    answer = load(http, "stolen", shown)
    assert answer.status_code == 400
    assert "stolen" not in names(http)
    for model in ("stolen", "linked", shown):
        assert status(http, model) == 404


def test_an_adapter_that_cannot_be_used(client: TenantClient, root: Path) -> None:
    (root / "empty").mkdir()
    (root / "broken").mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "broken" / file).write_text("{")
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        for name in ("empty", "broken"):
            for answer in (load(http, name), http.post("/v1/chat/completions", json=chat(model=name))):
                assert answer.status_code == 400
                assert "\n" not in answer.json()["error"]["message"]


def test_without_a_folder(client: TenantClient) -> None:
    with endpoint_of(client, separate_calls=False) as endpoint, raw(endpoint) as http:
        assert endpoint.service.names.store is None
        assert load(http, "support").status_code == 400
        assert names(http) == ["llama"]
        assert status(http, "support") == 404
