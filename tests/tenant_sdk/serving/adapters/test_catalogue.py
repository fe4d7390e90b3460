"""Tests adapters that are fetched: only those in the operator's catalogue, and only with the pinned digest."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import os
import shutil
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.catalogue import Entry, fetch, prepare_cache, read_catalogue
from tenant_sdk.serving.adapters.reader import CONFIG, WEIGHTS
from tests.support.identities import make_authority
from tests.support.saved_adapters import Bell, base_model, held, peft_logits, save_adapter, stepped
from tests.support.waiting import WAIT_S
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


def hub_headers(path: str) -> dict[str, str]:
    """Returns what the hub says about a file, whose place is REPOSITORY/resolve/REVISION/FILE: which commit it is of,
    and the tag by which copies are told apart."""
    return {"X-Repo-Commit": "1" * 40, "ETag": f'"{path.rpartition("/")[2]}"'}


@contextlib.contextmanager
def serving(made: Path, context: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[str]]]:
    """Runs a server on this machine's loopback, with TLS if there is a context. Yields its URL and a list of the paths
    that are requested."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(made.parent))

        def end_headers(self) -> None:
            if "/resolve/" in self.path:
                for name, value in hub_headers(self.path).items():
                    self.send_header(name, value)
            super().end_headers()

        def translate_path(self, path: str) -> str:
            return str(made / path.rpartition("/")[2]) if "/resolve/" in path else super().translate_path(path)

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
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"{'http' if context is None else 'https'}://localhost:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def web(made: Path) -> Iterator[tuple[str, list[str]]]:
    with serving(made) as found:
        yield found


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
    store = AdapterStore(model, None, catalogue=catalogue, on_ready=bell, cache=cache)
    assert asked == []
    loans = held(store, bell, "support", "support", "other")
    assert asked == [f"/good/{CONFIG}", f"/good/{WEIGHTS}"]
    assert {loan.digest for loan in loans} == {digest(made).removeprefix("sha256:")}
    assert len({loan.adapter_index for loan in loans}) == 1
    expected = peft_logits(base_model(), made, IDS)
    assert (
        stepped(store, model, [(loans[0].adapter_index, IDS)])[0] - expected
    ).abs().max() < 1e-5 * expected.abs().max()
    for unknown in ("nobody", f"{url}/good", "../good", "hf://acme/other"):
        with pytest.raises(ConfigurationError, match="names no adapter"):
            store.reserve(unknown)
    assert store.status().network_adapters == 2
    store.close()
    again = AdapterStore(model, None, catalogue=catalogue, on_ready=bell, cache=cache, preload=["other"])
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
    assert "localhost" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_s3_without_its_package_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise ImportError("Install s3fs to access S3", name="s3fs")

    monkeypatch.setattr(fsspec, "open", missing)
    with pytest.raises(ConfigurationError, match="needs a package to read s3://: install s3fs"):
        fetch("one", Entry(source="s3://bucket/one", digest=ZEROS), cache, MOST)


class Bucket(MemoryFileSystem):  # type: ignore[misc]
    """Stands in for S3 behind fsspec's own interface, since s3fs is not installed here."""

    protocol = "s3"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("s3://")))


def test_s3_is_read_by_fsspec(made: Path, cache: Path) -> None:
    fsspec.register_implementation("s3", Bucket, clobber=True)
    for file in (CONFIG, WEIGHTS):
        Bucket().pipe_file(f"/bucket/one/{file}", (made / file).read_bytes())
    fetch("one", Entry(source="s3://bucket/one/", digest=digest(made)), cache, MOST)
    (kept,) = cache.iterdir()
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == {
        file: (made / file).read_bytes() for file in (CONFIG, WEIGHTS)
    }
    with pytest.raises(ConfigurationError, match="two cannot be fetched"):
        fetch("two", Entry(source="s3://bucket/two", digest=ZEROS), cache, MOST)


_FETCH = """
import sys
from pathlib import Path
from tenant_sdk.serving.adapters.catalogue import Entry, fetch
from wire.errors import ConfigurationError
digest, *rest = sys.argv[1:]
for source, cache in zip(rest[::2], rest[1::2], strict=True):
    try:
        fetch("one", Entry(source=source, digest=digest), Path(cache), 1 << 20)
    except ConfigurationError as exc:
        sys.exit(str(exc))
"""


@dataclass
class Fetched:
    """Holds what was asked of a server of HTTPS and of a hub, and where the adapters of both were kept."""

    https: str
    asked_https: list[str]
    asked_hub: list[str]
    kept: dict[str, Path]


@pytest.fixture(scope="module")
def fetched(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fetched]:
    """Fetches an adapter from both in one process of its own, with variables that are read when libraries are
    imported."""
    root = tmp_path_factory.mktemp("fetched")
    authority = make_authority(root / "authority")
    ca, chain, key = authority.server
    files = {name: root / name for name in ("ca", "chain", "key")}
    for path, content in zip(files.values(), (ca, chain, key), strict=True):
        path.write_bytes(content)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["chain"], files["key"])
    kept = {name: root / f"kept-{name}" for name in ("https", "hub")}
    for folder in kept.values():
        prepare_cache(folder)
    with serving(made, context) as (https, asked_https), serving(made) as (hub, asked_hub):
        env = {"HF_ENDPOINT": hub, "HF_HOME": str(root / "hub"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        env = {**os.environ, **env, "SSL_CERT_FILE": str(files["ca"])}
        pairs = (f"{https}/good", str(kept["https"]), "hf://acme/support@v2", str(kept["hub"]))
        command = [sys.executable, "-c", _FETCH, digest(made), *pairs]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=WAIT_S)
        assert (done.returncode, done.stderr) == (0, "")
        yield Fetched(https, asked_https, asked_hub, kept)


def test_https_checks_the_certificate(fetched: Fetched, made: Path, cache: Path) -> None:
    assert fetched.asked_https == [f"/good/{CONFIG}", f"/good/{WEIGHTS}"]
    (kept,) = fetched.kept["https"].iterdir()
    assert (kept / WEIGHTS).read_bytes() == (made / WEIGHTS).read_bytes()
    with pytest.raises(ConfigurationError, match="two cannot be fetched"):
        fetch("two", Entry(source=f"{fetched.https}/good", digest=ZEROS), cache, MOST)
    assert len(fetched.asked_https) == 2, "nothing is asked of a server whose certificate nobody vouches for"


def test_the_hub_gives_the_named_revision(fetched: Fetched, made: Path) -> None:
    assert [path for path in fetched.asked_hub if "/resolve/" in path] == [
        f"/acme/support/resolve/v2/{file}" for file in (CONFIG, WEIGHTS)
    ]
    (kept,) = fetched.kept["hub"].iterdir()
    assert (kept / WEIGHTS).read_bytes() == (made / WEIGHTS).read_bytes()


def test_the_hub_offline_is_one_line_that_says_what_to_set(cache: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"one cannot be fetched: .*: set HF_HUB_OFFLINE=0$"):
        fetch("one", Entry(source="hf://acme/not-cached-here", digest=ZEROS), cache, MOST)


def test_a_copy_that_was_changed_is_refused(made: Path, cache: Path, tmp_path: Path) -> None:
    bell = Bell()
    fetch("one", Entry(source=f"file://{made}", digest=digest(made)), cache, MOST)
    (kept,) = cache.iterdir()
    with (kept / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x3c")
    store = AdapterStore(
        base_model(), None, catalogue=write(tmp_path, one=(f"file://{made}", digest(made))), on_ready=bell, cache=cache
    )
    loan = store.reserve("one")
    bell.wait_for(loan)
    assert "was changed after it was fetched" in str(loan.failure)
    store.close()


def test_a_failed_download_fails_all_that_wait_and_is_tried_again(made: Path, cache: Path, tmp_path: Path) -> None:
    bell, elsewhere = Bell(), tmp_path / "later"
    catalogue = write(tmp_path, one=(f"file://{elsewhere}", digest(made)))
    store = AdapterStore(base_model(), None, catalogue=catalogue, on_ready=bell, cache=cache)
    loans = [store.reserve("one"), store.reserve("one")]
    bell.wait_for(*loans)
    for loan in loans:
        assert "one cannot be fetched" in str(loan.failure)
    shutil.copytree(made, elsewhere)
    held(store, bell, "one")
    store.close()


def test_a_name_in_folder_and_catalogue(
    made: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only this name is refused: whoever could write it into the folder would otherwise keep a server from starting."""
    shutil.copytree(made, tmp_path / "adapters" / "good")
    shutil.copytree(made, tmp_path / "adapters" / "other")
    catalogue = write(tmp_path, good=("hf://acme/good", ZEROS), far=(f"file://{made}", digest(made)))
    store = AdapterStore(base_model(), tmp_path / "adapters", catalogue=catalogue, cache=cache)
    assert store.names() == ["far", "other"]
    assert not store.has("good")
    with pytest.raises(ConfigurationError, match="good was both in the folder and in the catalogue"):
        store.reserve("good")
    store.close()
    (line,) = caplog.messages
    assert "good was both in the folder and in the catalogue at the start: rename one of them" in line


def test_a_cache_that_others_may_write_is_refused(made: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigurationError, match="can be written by others"):
        AdapterStore(
            base_model(), None, catalogue=write(tmp_path, one=("hf://acme/good", ZEROS)), cache=tmp_path / "open"
        )


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
