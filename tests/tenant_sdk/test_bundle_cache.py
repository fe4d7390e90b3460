"""Tests the bundle on the tenant's disk: it is checked when it is found, downloaded again if it is damaged, and a full
disk gives one line."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from provider.model.served_model import ServedModel
from tenant_sdk.trust.bundle import fetch_bundle
from tests.support.files import flip
from tests.support.providers import make_served_model
from tests.support.threads import in_child
from wire.errors import ConfigurationError
from wire.transport.inproc import InprocConnection


class Counting(InprocConnection):
    def __init__(self, served_model: ServedModel) -> None:
        super().__init__(served_model)
        self.fetched: list[str] = []

    def fetch(self, file_name: str) -> Any:
        self.fetched.append(file_name)
        return super().fetch(file_name)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *[(name, how) for name in ("model.safetensors", "tokenizer.json") for how in (flip, cut, Path.unlink)],
        *[("config.json", how) for how in (cut, Path.unlink)],  # rewritten by us, so without a digest
    ],
)
def test_a_damaged_bundle_is_downloaded_again(
    served_model: ServedModel, tmp_path: Path, name: str, damage: Any
) -> None:
    connection = Counting(served_model)
    manifest = served_model.manifest()
    folder = fetch_bundle(connection, manifest, tmp_path)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    connection.fetched.clear()
    assert fetch_bundle(connection, manifest, tmp_path) == folder
    assert connection.fetched == []
    damage(folder / name)
    assert fetch_bundle(connection, manifest, tmp_path) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert sorted(connection.fetched) == sorted(file.name for file in manifest.bundle)


def loosen(path: Path) -> None:
    """Adds an unsafe key to a cached file. An older release that did not know this key as unsafe may have left such a
    file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoModelForCausalLM": "x.Y"}}))


def add(path: Path) -> None:
    (path.parent / "modeling_x.py").write_text("")


@pytest.mark.parametrize("damage", [loosen, add])
def test_what_is_not_of_the_bundle_goes(served_model: ServedModel, tmp_path: Path, damage: Any) -> None:
    folder = fetch_bundle(Counting(served_model), served_model.manifest(), tmp_path)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder / "config.json")
    assert fetch_bundle(Counting(served_model), served_model.manifest(), tmp_path) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_who_waited_for_another_to_mend_it_leaves_it_alone(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process finds a damaged bundle and waits for the lock, while another process downloads the bundle again. The
    first one checks once more, and downloads nothing."""
    folder = fetch_bundle(Counting(served_model), served_model.manifest(), tmp_path)
    flip(folder / "model.safetensors")
    flock, mine, another = fcntl.flock, Counting(served_model), Counting(served_model)
    waited: list[int] = []

    def wait(held: int, operation: int) -> None:
        if not waited:
            waited.append(held)
            fetch_bundle(another, served_model.manifest(), tmp_path)  # between this process's look and its lock
        flock(held, operation)

    monkeypatch.setattr(fcntl, "flock", wait)
    assert fetch_bundle(mine, served_model.manifest(), tmp_path) == folder
    assert waited, "only a look that found damage asks for the lock"
    assert (len(another.fetched), mine.fetched) == (len(served_model.manifest().bundle), [])


def test_what_cannot_be_read_is_not_thrown_away(
    served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_bundle(Counting(served_model), served_model.manifest(), tmp_path)

    def fails(*arguments: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(hashlib, "file_digest", fails)
    connection = Counting(served_model)
    with pytest.raises(ConfigurationError, match="Too many open files"):
        fetch_bundle(connection, served_model.manifest(), tmp_path)
    assert connection.fetched == []
    monkeypatch.undo()
    assert fetch_bundle(connection, served_model.manifest(), tmp_path) == folder
    assert connection.fetched == []


def test_a_cache_that_cannot_be_written_is_one_line(served_model: ServedModel, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="VEILBASE_CACHE") as failure:
        fetch_bundle(Counting(served_model), served_model.manifest(), tmp_path / "file")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("is_tenant", [True, False])
def test_a_full_disk_of_the_tenant_or_the_provider_is_one_line(
    chat_folder: Path, tmp_path: Path, is_tenant: bool
) -> None:
    """If the tenant's or the provider's disk is full, the error is one line. The test runs in a child process, whose
    files may not grow beyond 2 KB."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    def fetched() -> str:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if not is_tenant:
            limit()
        try:
            served_model = make_served_model(chat_folder, "int8")
            limit()
            fetch_bundle(InprocConnection(served_model), served_model.manifest(), tmp_path / "cache")
        except ConfigurationError as exc:
            return str(exc)
        return "nothing failed"

    said = in_child(fetched)
    expected = "cannot keep the provider's bundle" if is_tenant else "cannot write the client bundle"
    assert said.startswith(expected)
    assert "\n" not in said
