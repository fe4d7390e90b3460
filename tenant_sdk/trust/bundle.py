"""This module downloads a provider's bundle and caches the bundle by its digest.

The bundle holds the config, the tokenizer and every tensor that is not a base layer's weight.

Guarantees: every byte is checked against the manifest's digests before a file is parsed. Only files with known names
are accepted, and none of them is a pickle or code. Config keys that would make transformers fetch or run something are
removed. A cached bundle is checked again and, if it is damaged, downloaded again; in the JSON files from which keys
were removed only the absence of such keys is checked. Not guaranteed: that the bundle belongs to the right model, which
only a comparison with a trusted checkpoint shows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noise.disk.private_files import make_private_folder
from runtime.files import locked_folder, nearest_there, why_not_writable
from tenant_sdk.report import Report, megabytes, unseen
from wire.errors import ConfigurationError, MalformedFrame
from wire.limits import CHUNK_BYTES
from wire.manifest import BundleFile, Manifest

if TYPE_CHECKING:
    from wire.transport.connection import Connection

FETCHING = "fetching config, tokenizer, small tensors"
"""What `fetch_bundle` reports."""
_UNSAFE_KEYS = frozenset({"auto_map", "custom_generate", "custom_pipelines", "quantization_config", "compile_config"})
_UNSAFE_WORDS = ("attn_implementation", "experts_implementation", "kernel", "trust_remote_code")
"""Words in config keys. A key with such a word, or a key of `_UNSAFE_KEYS`, makes transformers import a file, fetch a
kernel from a hub or load another weight format."""
_REWRITTEN = ("config.json", "generation_config.json", "tokenizer_config.json")
"""The files from which unsafe keys are removed."""


def default_cache() -> Path:
    """Returns $VEILBASE_CACHE, or ~/.cache/veilbase if the variable is not set."""
    return Path(os.environ.get("VEILBASE_CACHE") or Path.home() / ".cache" / "veilbase")


def check_cache() -> None:
    """Raises ConfigurationError if there is no cache folder and none can be made. One that is there may be read only,
    if all that a session needs is in it."""
    folder = default_cache()
    there = nearest_there(folder)
    reason = "" if folder.is_dir() else why_not_writable(there) if there.is_dir() else f"{str(there)!a} is no folder"
    if reason:
        raise ConfigurationError(
            f"the cache {str(folder)!a} cannot be made: {reason}; name another folder with VEILBASE_CACHE"
        )


def bundle_folder(manifest: Manifest, cache: Path | None = None) -> Path:
    """Returns the folder in which a provider's bundle is kept, whether it is there or not."""
    return (cache or default_cache()) / "bundles" / manifest.bundle_digest


def kept_beginning(manifest: Manifest, name: str, cache: Path | None = None) -> bytes:
    """Returns the beginning of a file of a bundle that is kept here, as long as a chunk; no bytes if it is not here, or
    cannot be read."""
    try:
        with (bundle_folder(manifest, cache) / name).open("rb") as kept:
            return kept.read(CHUNK_BYTES)
    except OSError:
        return b""


def fetch_bundle(
    connection: Connection, manifest: Manifest, cache: Path | None = None, report: Report = unseen
) -> Path:
    """Returns the folder of the bundle, which is downloaded only if the cache has no whole copy.

    Args:
        connection: a connection to the provider that gave the manifest.
        manifest: the manifest, which lists the files' names, sizes and digests.
        cache: the cache folder, of which the bundle is a subfolder; `default_cache()` by default.
        report: told how much of the bundle has come, if it is downloaded.

    Returns:
        A folder that `from_pretrained` can read.

    Raises:
        MalformedFrame: a file does not have the announced size or digest or is not the JSON object that it should be,
            or the manifest's own digest of the bundle is wrong.
        ConfigurationError: the cache folder cannot be written.
    """
    if bundle_digest(manifest.bundle) != manifest.bundle_digest:
        raise MalformedFrame("the manifest's bundle digest does not fit its list of files")
    folder = bundle_folder(manifest, cache)
    parent = folder.parent
    with _disk_errors(parent):
        if not _is_whole(folder, manifest):
            make_private_folder(parent)
            with locked_folder(parent):
                if not _is_whole(folder, manifest):  # another process may have filled it meanwhile
                    _fill(connection, manifest, folder, report)
    return folder


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


def _fill(connection: Connection, manifest: Manifest, folder: Path, report: Report) -> None:
    total, before = sum(file.size_bytes for file in manifest.bundle), 0
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".partial-") as scratch:
        filling = Path(scratch) / "bundle"
        filling.mkdir(0o700)
        for file in manifest.bundle:

            def came(num_bytes: int, before: int = before) -> None:
                report(FETCHING, megabytes(before + num_bytes), megabytes(total), "MB")

            _download(connection, file, filling / file.name, came)
            before += file.size_bytes
        _remove_unsafe_settings(filling)
        if folder.exists():
            folder.rename(Path(scratch) / "damaged")  # a process that has its files open can go on reading them
        filling.rename(folder)


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    """Returns whether there is a cached bundle and all its files are undamaged; a disk error or a crash may damage a
    file.

    Raises:
        OSError: there is a cached bundle, but it cannot be read.
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
    """Returns the digest of a bundle: SHA-256, in hex, over the sorted lines `name size sha256` of its files."""
    lines = sorted(f"{file.name} {file.size_bytes} {file.sha256}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _download(connection: Connection, file: BundleFile, path: Path, came: Callable[[int], None]) -> None:
    sha, received = hashlib.sha256(), 0
    with path.open("wb") as out:
        for chunk in connection.fetch(file.name):
            received += len(chunk)
            if received > file.size_bytes:
                break
            sha.update(chunk)
            out.write(chunk)
            came(received)
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
            except (ValueError, TypeError, RecursionError):  # `from None`: the cause holds the provider's text
                raise MalformedFrame(f"the bundle file {name} is not a JSON object") from None
            path.write_text(json.dumps(without_unsafe(content)), encoding="utf-8")


def without_unsafe(value: Any) -> Any:
    """Returns a JSON value from which keys that could make transformers load code are removed at every depth."""
    if isinstance(value, dict):
        return {
            key: without_unsafe(item)
            for key, item in value.items()
            if key not in _UNSAFE_KEYS and not any(word in key for word in _UNSAFE_WORDS)
        }
    if isinstance(value, list):
        return [without_unsafe(item) for item in value]
    return value
