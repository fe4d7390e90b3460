"""The honest part of a provider that these programs play: its manifest and its bundle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from provider.model.served_model import ServedModel
from wire.manifest import Manifest


@dataclass
class HonestOffer:
    """A provider that offers what an honest one offers; what it computes is for a subclass to say.

    Attributes:
        served_model: the honest provider's model.
    """

    served_model: ServedModel

    def manifest(self) -> Manifest:
        """Returns the honest manifest."""
        return self.served_model.manifest()

    def read_file(self, file_name: str) -> Iterator[bytes]:
        """Returns a file of the honest bundle."""
        return self.served_model.read_file(file_name)
