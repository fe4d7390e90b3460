"""Tests an identity folder whose files have wrong contents: one line names the file, before any connection is made."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from tenant_sdk.identity import issuer_of, read_endpoint
from wire.errors import ConfigurationError
from wire.transport.identity import load_identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return enrolled(tmp_path, "acme")


def enrolled(tmp_path: Path, name: str, state: str = "state") -> Path:
    enroll(StateDir(tmp_path / state), name, tmp_path / name, "grpcs://127.0.0.1:1")
    return tmp_path / name


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (write("ca.pem", b"garbage"), "ca.pem is not a certificate"),
        (write("cert.pem", b""), "cert.pem is not a certificate"),
        (
            write("key.pem", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"),
            "key.pem is not a private",
        ),
        (write("key.pem", b"\xff\xfe"), "key.pem is not a private"),
        (
            lambda folder: shutil.copy(folder.parent / "other" / "key.pem", folder),
            "key.pem does not belong to cert.pem",
        ),
    ],
)
def test_which_file_it_is(folder: Path, tmp_path: Path, damage: Callable[[Path], object], sentence: str) -> None:
    enrolled(tmp_path, "other")
    load_identity(folder)
    damage(folder)
    with pytest.raises(ConfigurationError, match=sentence) as failure:
        load_identity(folder)
    assert "\n" not in str(failure.value)


def test_an_endpoint_that_is_no_text(folder: Path) -> None:
    (folder / "endpoint").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="names no endpoint"):
        read_endpoint(folder)


def test_whose_identities_are_of_one_provider(folder: Path, tmp_path: Path) -> None:
    same, another = enrolled(tmp_path, "other"), enrolled(tmp_path, "third", "another-state")
    mine = issuer_of(load_identity(folder))
    assert issuer_of(load_identity(same)) == mine
    assert issuer_of(load_identity(another)) != mine
