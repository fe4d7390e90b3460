"""Implements what the lying providers of this package share: an honest offer, a bundle with changed files, and a tenant
that connects to such a provider."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from noise.masks.gaussian_pool import NotPrivateWarning
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient, embedded
from tenant_sdk.session import NotVerifiedWarning
from wire.frame import Call
from wire.manifest import BundleFile, Manifest
from wire.ring.seeded_rows import Rows, count_rows
from wire.transport.inproc import Handler, InprocConnection


@contextlib.contextmanager
def tenant_of(provider: Handler, cache: Path, **options: Any) -> Iterator[TenantClient]:
    """Opens a tenant of the public SDK, and connects it to a provider in this process, which may lie.

    Args:
        provider: the provider. The SDK's own way to an embedded provider takes a model, not a handler.
        cache: the tenant's folder of downloads.
        options: further options of `TenantClient`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotVerifiedWarning)
        warnings.simplefilter("ignore", NotPrivateWarning)  # otherwise for each session, between lines of the stages
        with mock.patch.object(embedded, "connect_inproc", return_value=InprocConnection(provider)):
            client = TenantClient("inproc:provider", cache=cache, progress=False, **options)
            client.connect()
    with contextlib.closing(client):
        yield client


@dataclass
class HonestOffer:
    """Gives a tenant the manifest and the files of an honest provider. A subclass decides which products the tenant
    gets.

    Attributes:
        served_model: the honest provider's model.
    """

    served_model: ServedModel

    def manifest(self) -> Manifest:
        """Returns the manifest that the honest provider offers."""
        return self.served_model.manifest()

    def read_file(self, file_name: str) -> Iterator[bytes]:
        """Returns a file of the honest bundle, in chunks."""
        return self.served_model.read_file(file_name)

    def read_weights(self, group: int) -> Iterator[bytes]:
        """Returns the honest weight of a group, in chunks."""
        return self.served_model.read_weights(group)


class HostileBundle:
    """Plays a provider that is honest except for its bundle, and notes the number of rows of every request.

    It is a `wire.transport.inproc.Handler`.
    """

    def __init__(self, honest: Handler) -> None:
        """Copies the files of the honest provider's bundle into `files`, which callers may change.

        Args:
            honest: the honest provider.
        """
        self._honest = honest
        self.files = {file.name: b"".join(honest.read_file(file.name)) for file in honest.manifest().bundle}
        self.announced: Manifest | None = None
        self.num_rows: list[int] = []
        """The number of rows of each request so far, in order."""

    def announce(self, **changes: Any) -> None:
        """Makes a manifest for the files as they are now, and then applies `changes` to the manifest. The manifest's
        config is that of config.json, or the honest one if config.json holds no JSON object."""
        files = tuple(
            BundleFile(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            for name, data in self.files.items()
        )
        lines = sorted(f"{file.name} {file.size_bytes} {file.sha256}\n" for file in files)
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        content = self._honest.manifest().model_dump() | {"bundle": files, "bundle_digest": digest}
        with contextlib.suppress(ValueError, KeyError, RecursionError):
            config = json.loads(self.files["config.json"])
            content |= {"config": config} if isinstance(config, dict) else {}
        self.announced = Manifest.model_validate({**content, **changes})

    def change_json(self, name: str, **changes: Any) -> None:
        """Changes entries of one JSON file of the bundle."""
        self.files[name] = json.dumps(json.loads(self.files[name]) | changes).encode()

    def manifest(self) -> Manifest:
        """Returns the announced manifest, or the honest one if none was announced."""
        return self.announced or self._honest.manifest()

    def read_file(self, file_name: str) -> Iterator[bytes]:
        """Returns a bundle file as it is now, in one chunk."""
        yield self.files[file_name]

    def read_weights(self, group: int) -> Iterator[bytes]:
        """Returns the honest weight of a group, in chunks."""
        return self._honest.read_weights(group)

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Returns the honest product, and notes how many rows the request has."""
        self.num_rows.append(count_rows(rows))
        return self._honest.compute(call, rows)
