"""The client bundle: config, tokenizer and every tensor that is not a base layer, cached by digest.

Guarantees: every byte is checked against the manifest's digests before any of it is parsed; only files with known names
are accepted; no pickle and no code: config keys that would make transformers fetch or run something are removed. A
bundle that is found in the cache is checked again, except for the few files from which such keys were removed, and
downloaded again where it was damaged. It does not guarantee that the bundle is the right model: that is what
verification is for.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from noise.disk.private_files import make_private_folder
from wire.errors import ConfigurationError, MalformedFrame
from wire.manifest import BundleFile, Manifest
from wire.transport.connection import Connection

_UNSAFE_KEYS = frozenset({"auto_map", "custom_generate", "custom_pipelines", "quantization_config", "compile_config"})
_UNSAFE_WORDS = ("attn_implementation", "experts_implementation", "kernel", "trust_remote_code")
"""Config keys that make transformers import a file, fetch a hub kernel or load another weight format."""
_REWRITTEN = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files from which such keys are removed."""


def default_cache() -> Path:
    """Returns $VEILBASE_CACHE, or ~/.cache/veilbase where it is not set."""
    return Path(os.environ.get("VEILBASE_CACHE") or Path.home() / ".cache" / "veilbase")


def fetch_bundle(connection: Connection, manifest: Manifest, cache: Path | None = None) -> Path:
    """Returns the bundle's folder; the bundle is downloaded at most once.

    Args:
        connection: a connection to the provider that gave the manifest.
        manifest: gives the files' names, sizes and digests.
        cache: the parent folder; `default_cache()` by default.

    Returns:
        A folder that `from_pretrained` can read.

    Raises:
        MalformedFrame: a file does not have the announced size or digest.
        ConfigurationError: the cache folder cannot be written.
    """
    if bundle_digest(manifest.bundle) != manifest.bundle_digest:
        raise MalformedFrame("the manifest's bundle digest does not fit its list of files")
    parent = (cache or default_cache()) / "bundles"
    folder = parent / manifest.bundle_digest
    with _disk_errors(parent):
        if not _is_whole(folder, manifest):
            make_private_folder(parent)
            with _locked(parent):
                if not _is_whole(folder, manifest):  # another process may have filled it
                    _fill(connection, manifest, folder)
    return folder


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lets one process or thread at a time add to a folder or repair what is in it."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)  # the lock is released when the descriptor is closed
        yield
    finally:
        os.close(held)


@contextlib.contextmanager
def _disk_errors(parent: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        why = exc.strerror or "what is there is none of ours"
        raise ConfigurationError(
            f"cannot keep the provider's bundle in {parent}: {why}; free some space, or name another folder with "
            "cache= or VEILBASE_CACHE"
        ) from exc


def _fill(connection: Connection, manifest: Manifest, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as scratch:
        filling = Path(scratch) / "bundle"
        filling.mkdir(0o700)
        for file in manifest.bundle:
            _download(connection, file, filling / file.name)
        _remove_unsafe_settings(filling)
        if folder.exists():
            folder.rename(Path(scratch) / "damaged")  # a process that has its files open keeps them
        filling.rename(folder)


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether a cached bundle is there and still whole: a disk may lose bytes, and a crash the end of a file.

    Raises:
        OSError: the bundle is there and cannot be read.
    """
    try:
        names = {path.name for path in folder.iterdir()}
        return names == {file.name for file in manifest.bundle} and all(_fits(folder, file) for file in manifest.bundle)
    except FileNotFoundError:
        return False


def _fits(folder: Path, file: BundleFile) -> bool:
    path = folder / file.name
    if file.name not in _REWRITTEN:
        with path.open("rb") as stored:
            return hashlib.file_digest(stored, "sha256").hexdigest() == file.sha256
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and bool(without_unsafe(content) == content)


def bundle_digest(files: tuple[BundleFile, ...]) -> str:
    """Returns SHA-256 over the sorted lines `name size sha256`."""
    lines = sorted(f"{file.name} {file.size_bytes} {file.sha256}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _download(connection: Connection, file: BundleFile, path: Path) -> None:
    sha, received = hashlib.sha256(), 0
    with path.open("wb") as out:
        for chunk in connection.fetch(file.name):
            received += len(chunk)
            if received > file.size_bytes:
                break
            sha.update(chunk)
            out.write(chunk)
    if received != file.size_bytes or sha.hexdigest() != file.sha256:
        raise MalformedFrame(f"the bundle file {file.name} is not the one that the manifest announced")


def _remove_unsafe_settings(folder: Path) -> None:
    for name in _REWRITTEN:
        path = folder / name
        if path.exists():
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                if not isinstance(content, dict):
                    raise TypeError
            except (ValueError, TypeError, RecursionError):  # `from None`: the original holds the provider's text
                raise MalformedFrame(f"the bundle file {name} is not a JSON object") from None
            path.write_text(json.dumps(without_unsafe(content)), encoding="utf-8")


def without_unsafe(value: Any) -> Any:
    """Returns the same JSON value without the keys that could load code, at any depth."""
    if isinstance(value, dict):
        return {
            key: without_unsafe(item)
            for key, item in value.items()
            if key not in _UNSAFE_KEYS and not any(word in key for word in _UNSAFE_WORDS)
        }
    if isinstance(value, list):
        return [without_unsafe(item) for item in value]
    return value
