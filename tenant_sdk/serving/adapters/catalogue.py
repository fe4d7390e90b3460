"""This module implements the network tier, which fetches adapters that the operator lists, with their digests, in a
catalogue.

Guarantees: only sources from the catalogue are fetched, never an address from a request. A fetched adapter is kept only
if its SHA-256 is the pinned one. An adapter appears in the cache whole or not at all, and only its owner may read it.
No more bytes than the limit are written. An error names the adapter and never its address, since an address may contain
a secret key. Not guaranteed: an eavesdropper on the network may see which adapter is fetched, and from where.

    adapters:
      support: {source: "hf://acme/support-lora@v2", digest: "sha256:…"}
      legal: {source: "https://files.example/legal", digest: "sha256:…"}
      sales: {source: "s3://bucket/sales", digest: "sha256:…"}

A source is a folder that holds both of PEFT's files. Its digest is the SHA-256 of the two files, one after the other:
`cat adapter_config.json adapter_model.safetensors | sha256sum`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from noise.disk.private_files import FILE_MODE, make_private_folder
from tenant_sdk.adapter_checks import CONFIG, MAX_CONFIG_BYTES, NAME, WEIGHTS
from wire.errors import ConfigurationError

MAX_CATALOGUE_BYTES = 8 << 20
"""The longest catalogue that is read, 8 MiB, which is enough for more than 10,000 adapters."""
TIMEOUT_S = 60.0
"""The seconds after which a silent https source counts as failed."""
_CHUNK_BYTES = 1 << 20
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w.-]+(?:/[\w.-]+)*))?")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
Name = Annotated[str, StringConstraints(pattern=rf"^{NAME.pattern}$")]


class Entry(BaseModel):
    """Describes one adapter of the catalogue.

    Attributes:
        source: the address of the adapter's folder.
        digest: the adapter's pinned SHA-256, as "sha256:" and 64 hex digits.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    source: str = Field(repr=False)
    digest: Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]

    @property
    def sha256(self) -> str:
        """Returns the pinned SHA-256 as 64 hex digits."""
        return self.digest.removeprefix("sha256:")

    @field_validator("source")
    @classmethod
    def _can_be_fetched(cls, source: str) -> str:
        parts = urlsplit(source)
        if parts.scheme == "hf" and _HUB_ID.fullmatch(source.removeprefix("hf://")):
            return source
        if "@" in parts.netloc:
            raise ValueError("a password does not belong into an address")
        if parts.query or parts.fragment:
            raise ValueError("expected the address of a folder, without ? and #")
        if parts.scheme in ("https", "s3", "file") or (parts.scheme == "http" and parts.hostname in _LOOPBACK):
            return source
        raise ValueError("expected hf://owner/name@revision, https://, s3:// or file://")


class Catalogue(BaseModel):
    """Holds the operator's list of adapters, by name."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    adapters: Mapping[Name, Entry]


def read_catalogue(path: Path) -> Catalogue:
    """Reads a catalogue, in YAML or JSON.

    Raises:
        ConfigurationError: the file cannot be read, names an adapter twice, or has an invalid entry.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CATALOGUE_BYTES + 1)
    except OSError as exc:
        raise ConfigurationError(f"the catalogue of adapters cannot be read: {exc.strerror}") from exc
    if len(content) > MAX_CATALOGUE_BYTES:
        raise ConfigurationError(f"the catalogue of adapters is longer than {MAX_CATALOGUE_BYTES} bytes")
    try:
        return Catalogue.model_validate(yaml.load(content, _StrictLoader))  # noqa: S506 - a SafeLoader
    except ValidationError as exc:  # `from None` here and below: addresses may hold keys
        first = exc.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part)[:128] for part in first["loc"])
        raise ConfigurationError(
            f"the catalogue of adapters, at {where!a}: {first['msg'].removeprefix('Value error, ')[:200]}"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        reason = str(exc) if isinstance(exc, _NamedTwice) else "it is neither YAML nor JSON"
        raise ConfigurationError(f"the catalogue of adapters cannot be used: {reason}") from None


class _NamedTwice(ValueError):
    """Says that a table of the catalogue has the same name twice."""


class _StrictLoader(yaml.SafeLoader):
    """Reads plain YAML values, and refuses a table that has the same key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Returns the table of a node; raises `_NamedTwice` if two of its keys are equal."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if isinstance(key, str) and key in seen:
                raise _NamedTwice(f"{ascii(key)[:130]} stands in it twice")
            seen.add(str(key))
        return super().construct_mapping(node, deep)


def fetch(name: str, entry: Entry, cache: Path, max_file_bytes: int) -> None:
    """Downloads an adapter into a subfolder of `cache` that is named by the adapter's digest; does nothing if this
    subfolder exists.

    Args:
        name: the adapter's name, for error messages.
        entry: the adapter's source and pinned digest.
        cache: the folder of downloads, private to its owner.
        max_file_bytes: the largest weights file that is accepted.

    Raises:
        ConfigurationError: the adapter cannot be fetched, is too large, or has another digest than the pinned one.
    """
    if (cache / entry.sha256).is_dir():
        return
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=cache))  # mode 0700
    try:
        found = _download(name, entry.source, part, max_file_bytes)
        if found != entry.sha256:
            raise ConfigurationError(f"the adapter {name} is not what the catalogue pins: its digest is sha256:{found}")
        with contextlib.suppress(OSError):  # Another process has already put the same contents there.
            part.rename(cache / entry.sha256)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if not (cache / entry.sha256).is_dir():
        raise ConfigurationError(f"the adapter {name} cannot be kept in the folder of downloads")


def prepare_cache(cache: Path) -> None:
    """Makes the folder of downloads, private to its owner.

    Raises:
        ConfigurationError: the folder cannot be made, belongs to another user, or can be written by others.
    """
    try:
        make_private_folder(cache)
        status = cache.stat()
    except OSError as exc:
        raise ConfigurationError(f"the folder of downloaded adapters cannot be made: {exc.strerror}") from exc
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigurationError("the folder of downloaded adapters can be written by others: give it the mode 0700")


def _download(name: str, source: str, folder: Path, max_file_bytes: int) -> str:
    """Downloads both files of an adapter into a folder, and returns the SHA-256 of the two files together, in hex."""
    digest = hashlib.sha256()
    for file, most in ((CONFIG, MAX_CONFIG_BYTES), (WEIGHTS, max_file_bytes)):
        try:
            with _reading(source, file) as stream:
                _copy(name, stream, folder / file, most, digest)
        except ConfigurationError:
            raise
        except ImportError as exc:
            raise ConfigurationError(
                f"the adapter {name} needs a package to read {urlsplit(source).scheme}://: install {exc.name}"
            ) from None
        except Exception as exc:  # noqa: BLE001 - each file system raises errors of its own, which may quote a key
            if source.startswith("hf://") and _is_offline():
                raise ConfigurationError(
                    f"the adapter {name} cannot be fetched: its {file} is not cached here, and HF_HUB_OFFLINE=1, which "
                    "the commands set by default, forbids downloads from the hub: set HF_HUB_OFFLINE=0"
                ) from None
            raise ConfigurationError(
                f"the adapter {name} cannot be fetched: its {file} is not to be had ({type(exc).__name__})"
            ) from None
    return digest.hexdigest()


def _copy(name: str, stream: IO[bytes], path: Path, most: int, digest: Any) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(fd, "wb") as out:
        written = 0
        while chunk := stream.read(_CHUNK_BYTES):
            written += len(chunk)
            if written > most:
                raise ConfigurationError(f"the adapter {name} is larger than {most} bytes, which do not fit this store")
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())


@contextlib.contextmanager
def _reading(source: str, file: str) -> Iterator[IO[bytes]]:
    scheme = urlsplit(source).scheme
    if scheme == "hf":
        with _from_hub(source, file).open("rb") as stream:
            yield stream
    elif scheme in ("https", "http"):
        with _opener.open(f"{source.rstrip('/')}/{file}", timeout=TIMEOUT_S) as stream:
            yield stream
    else:
        import fsspec

        with fsspec.open(f"{source.rstrip('/')}/{file}", "rb") as stream:
            yield stream


def _from_hub(source: str, file: str) -> Path:
    """Returns the path of a hub repository's file in the hub's own cache, and downloads the file if it is not there."""
    from huggingface_hub import hf_hub_download

    found = _HUB_ID.fullmatch(source.removeprefix("hf://"))
    if found is None:
        raise ValueError("no hub id")
    return Path(hf_hub_download(found[1], file, revision=found[2]))


def _is_offline() -> bool:
    from huggingface_hub.constants import is_offline_mode

    return is_offline_mode()


class _NoDowngrade(urllib.request.HTTPRedirectHandler):
    """Follows only redirects to https. An eavesdropper could read an adapter that is sent over unencrypted http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """Returns the redirected request; raises ValueError if its address is not https."""
        if urlsplit(newurl).scheme != "https":
            raise ValueError("a redirect away from https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


_opener = urllib.request.build_opener(_NoDowngrade)
