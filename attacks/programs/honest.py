"""Implements the honest part of a provider that these programs play: its manifest and its bundle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from provider.model.served_model import ServedModel
from wire.manifest import Manifest


@dataclass
class HonestOffer:
    """Announces the same model, files and settings to a tenant as an honest provider does. A subclass decides which
    products a tenant gets.

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
