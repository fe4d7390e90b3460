"""Implements the honest part of the providers that the programs of this package play: the manifest and the bundle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from provider.model.served_model import ServedModel
from wire.manifest import Manifest


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
