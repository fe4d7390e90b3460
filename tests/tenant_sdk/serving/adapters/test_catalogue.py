"""Tests adapters that are fetched: only those in the operator's catalogue, and only with the pinned digest."""

from __future__ import annotations

import hashlib
import http.server
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.catalogue import Entry, fetch, prepare_cache, read_catalogue
from tenant_sdk.serving.adapters.folder import CONFIG, WEIGHTS
from tests.support.saved_adapters import Bell, base_model, held, peft_logits, save_adapter, stepped
from wire.errors import ConfigurationError

MOST = 1 << 20
ZEROS = f"sha256:{'0' * 64}"
IDS = torch.randint(3, 128, (5,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(base_model(), tmp_path_factory.mktemp("elsewhere") / "good", seed=1)


def digest(folder: Path) -> str:
    return "sha256:" + hashlib.sha256((folder / CONFIG).read_bytes() + (folder / WEIGHTS).read_bytes()).hexdigest()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    prepare_cache(tmp_path / "downloads")
    return tmp_path / "downloads"


@pytest.fixture
def web(made: Path) -> Iterator[tuple[str, list[str]]]:
    """Runs a server on this machine's loopback, and provides its URL and a list of the paths that are requested."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(made.parent))

        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path.startswith("/elsewhere/"):
                self.send_response(302)
                self.send_header("Location", "http://127.0.0.1:1/")
                self.end_headers()
                return
            super().do_GET()

        def log_message(self, *args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def write(folder: Path, **entries: tuple[str, str]) -> Path:
    lines = [f'  {name}: {{source: "{source}", digest: "{pinned}"}}' for name, (source, pinned) in entries.items()]
    path = folder / "catalogue.yaml"
    path.write_text("\n".join(["adapters:", *lines]))
    return path


def test_a_request_fetches_what_the_catalogue_names_once(
    made: Path, web: tuple[str, list[str]], cache: Path, tmp_path: Path
) -> None:
    model, bell, (url, asked) = base_model(), Bell(), web
    catalogue = write(tmp_path, support=(f"{url}/good", digest(made)), other=(f"{url}/good/", digest(made)))
    store = AdapterStore(model, None, catalogue, on_ready=bell, cache=cache)
    assert asked == []
    tickets = held(store, bell, "support", "support", "other")
    assert asked == [f"/good/{CONFIG}", f"/good/{WEIGHTS}"]
    assert {ticket.digest for ticket in tickets} == {digest(made).removeprefix("sha256:")}
    assert len({ticket.slot for ticket in tickets}) == 1
    expected = peft_logits(base_model(), made, IDS)
    assert (stepped(store, model, [(tickets[0].slot, IDS)])[0] - expected).abs().max() < 1e-5 * expected.abs().max()
    for unknown in ("nobody", f"{url}/good", "../good", "hf://acme/other"):
        with pytest.raises(ConfigurationError, match="names no adapter"):
            store.reserve(unknown)
    assert store.status().network_adapters == 2
    store.close()
    again = AdapterStore(model, None, catalogue, on_ready=bell, cache=cache, preload=["other"])
    assert again.reserve("support").is_ready()
    assert len(asked) == 2
    again.close()


def test_downloads_are_for_their_owner_alone(made: Path, cache: Path) -> None:
    fetch("one", Entry(source=f"file://{made}", digest=digest(made)), cache, MOST)
    (kept,) = cache.iterdir()
    assert kept.name == digest(made).removeprefix("sha256:")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, kept)] == [0o700, 0o700]
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept.iterdir()} == {0o600}
    assert sorted(path.name for path in kept.iterdir()) == [CONFIG, WEIGHTS]


def test_another_digest_is_not_kept(made: Path, cache: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"not what the catalogue pins: its digest is {digest(made)}"):
        fetch("one", Entry(source=f"file://{made}", digest=ZEROS), cache, MOST)
    assert list(cache.iterdir()) == []


def test_too_large_a_file_ends_the_download(made: Path, cache: Path) -> None:
    with pytest.raises(ConfigurationError, match="larger than 100 bytes"):
        fetch("one", Entry(source=f"file://{made}", digest=digest(made)), cache, 100)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("where", ["/nothing", "/elsewhere"])
def test_what_is_not_there_is_one_line_without_the_address(where: str, web: tuple[str, list[str]], cache: Path) -> None:
    """One file does not exist, and the other leads by a redirect to an address without https."""
    with pytest.raises(ConfigurationError, match=f"one cannot be fetched: its {CONFIG} is not to be had") as caught:
        fetch("one", Entry(source=f"{web[0]}{where}", digest=ZEROS), cache, MOST)
    assert "127.0.0.1" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_s3_without_its_package_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise ImportError("Install s3fs to access S3", name="s3fs")

    monkeypatch.setattr(fsspec, "open", missing)
    with pytest.raises(ConfigurationError, match="needs a package to read s3://: install s3fs"):
        fetch("one", Entry(source="s3://bucket/one", digest=ZEROS), cache, MOST)


def test_s3_is_read_by_fsspec(made: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_here(path: str, mode: str) -> Any:
        opened.append(path)
        return (made / path.rpartition("/")[2]).open(mode)

    monkeypatch.setattr(fsspec, "open", open_here)
    fetch("one", Entry(source="s3://bucket/one/", digest=digest(made)), cache, MOST)
    assert opened == [f"s3://bucket/one/{CONFIG}", f"s3://bucket/one/{WEIGHTS}"]


def test_the_hub_gives_the_named_revision(made: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, str | None]] = []

    def download(repo_id: str, file: str, revision: str | None) -> str:
        asked.append((repo_id, file, revision))
        return str(made / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    fetch("one", Entry(source="hf://acme/support@v2", digest=digest(made)), cache, MOST)
    assert asked == [("acme/support", CONFIG, "v2"), ("acme/support", WEIGHTS, "v2")]


def test_the_hub_offline_is_one_line(cache: Path) -> None:
    with pytest.raises(ConfigurationError, match="one cannot be fetched"):
        fetch("one", Entry(source="hf://acme/not-cached-here", digest=ZEROS), cache, MOST)


def test_a_copy_that_was_changed_is_refused(made: Path, cache: Path, tmp_path: Path) -> None:
    bell = Bell()
    fetch("one", Entry(source=f"file://{made}", digest=digest(made)), cache, MOST)
    (kept,) = cache.iterdir()
    with (kept / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x3c")
    store = AdapterStore(
        base_model(), None, write(tmp_path, one=(f"file://{made}", digest(made))), on_ready=bell, cache=cache
    )
    ticket = store.reserve("one")
    bell.wait_for(ticket)
    assert "was changed after it was fetched" in str(ticket.failure)
    store.close()


def test_a_failed_download_fails_all_that_wait_and_is_tried_again(made: Path, cache: Path, tmp_path: Path) -> None:
    bell, elsewhere = Bell(), tmp_path / "later"
    catalogue = write(tmp_path, one=(f"file://{elsewhere}", digest(made)))
    store = AdapterStore(base_model(), None, catalogue, on_ready=bell, cache=cache)
    tickets = [store.reserve("one"), store.reserve("one")]
    bell.wait_for(*tickets)
    for ticket in tickets:
        assert "one cannot be fetched" in str(ticket.failure)
    shutil.copytree(made, elsewhere)
    held(store, bell, "one")
    store.close()


def test_a_name_in_folder_and_catalogue(made: Path, cache: Path, tmp_path: Path) -> None:
    catalogue = write(tmp_path, good=("hf://acme/good", ZEROS))
    with pytest.raises(ConfigurationError, match="good is both in the folder and in the catalogue"):
        AdapterStore(base_model(), made.parent, catalogue, cache=cache)


def test_a_cache_that_others_may_write_is_refused(made: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigurationError, match="can be written by others"):
        AdapterStore(base_model(), None, write(tmp_path, one=("hf://acme/good", ZEROS)), cache=tmp_path / "open")


def test_yaml_and_json_are_read(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(f'{{"adapters": {{"one": {{"source": "s3://b/one", "digest": "{ZEROS}"}}}}}}')
    assert read_catalogue(tmp_path / "c.json").adapters["one"].source == "s3://b/one"
    assert read_catalogue(write(tmp_path, one=("hf://a/b@main", ZEROS))).adapters["one"].sha256 == "0" * 64


ENTRY = f'{{source: "https://h/SECRET", digest: "{ZEROS}"}}'


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (f"adapters:\n  one: {ENTRY}\n  one: {ENTRY}", "'one' stands in it twice"),
        (f"adapters:\n  ../one: {ENTRY}", "adapters"),
        ('adapters:\n  one: {source: "https://h/SECRET"}', "adapters.one.digest"),
        ('adapters:\n  one: {source: "https://h/SECRET", digest: "sha256:00"}', "adapters.one.digest"),
        (f'adapters:\n  one: {{source: "http://h/SECRET", digest: "{ZEROS}"}}', "expected hf://"),
        (f'adapters:\n  one: {{source: "ftp://h/SECRET", digest: "{ZEROS}"}}', "expected hf://"),
        (f'adapters:\n  one: {{source: "hf://SECRET", digest: "{ZEROS}"}}', "expected hf://"),
        (f'adapters:\n  one: {{source: "https://h/x?key=SECRET", digest: "{ZEROS}"}}', "address of a folder, without"),
        (f'adapters:\n  one: {{source: "https://u:SECRET@h/x", digest: "{ZEROS}"}}', "a password does not belong"),
        (f'adapters:\n  one: {{source: "https://h/SECRET", digest: "{ZEROS}", more: 1}}', "adapters.one.more"),
        ("adapters: [SECRET", "neither YAML nor JSON"),
        ("!!python/object/apply:os.system [SECRET]", "neither YAML nor JSON"),
        ("SECRET", "the catalogue of adapters"),
        ("[" * 1500, "the catalogue of adapters"),
    ],
)
def test_a_bad_catalogue_is_one_line(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=match) as caught:
        read_catalogue(tmp_path / "c.yaml")
    assert "\n" not in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_no_catalogue(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        read_catalogue(tmp_path / "none.yaml")
