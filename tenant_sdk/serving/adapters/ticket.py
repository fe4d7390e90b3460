"""A request's hold on an adapter, and what is needed to load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tenant_sdk.serving.adapters.catalogue import Entry
from tenant_sdk.serving.adapters.folder import AdapterFolder
from wire.errors import ConfigurationError, VeilbaseError


class AdapterTicket:
    """A request's hold on an adapter; it has to be released."""

    def __init__(self, name: str, release: Callable[[AdapterTicket], None]) -> None:
        """Made by `AdapterStore.reserve`; the attributes are the store's to change, under its lock."""
        self.name = name
        self.failure: VeilbaseError | None = None
        self.placed: tuple[int, str] | None = None
        self.released = False
        self.passed = 0
        self._release = release

    def is_ready(self) -> bool:
        """Whether the adapter is in its slot."""
        return self.placed is not None and not self.released

    @property
    def slot(self) -> int:
        """The adapter's slot on the device.

        Raises:
            ConfigurationError: the ticket is not ready, or it was released, and another adapter may be there.
        """
        if self.placed is None or self.released:
            raise ConfigurationError(f"the adapter {self.name} is not in a slot: a ticket is ready first, and held")
        return self.placed[0]

    @property
    def digest(self) -> str:
        """SHA-256 of the adapter's settings and weights, in hex.

        Raises:
            ConfigurationError: the ticket was never ready.
        """
        if self.placed is None:
            raise ConfigurationError(f"the adapter {self.name} is not loaded yet, so its digest is not known")
        return self.placed[1]

    def release(self) -> None:
        """Lets go of the adapter, or no longer waits for it; a second time does nothing."""
        self._release(self)


@dataclass(frozen=True)
class Origin:
    """Where an adapter is.

    Attributes:
        name: by which requests ask for it.
        folder, subfolder: where its files are, or will be once they are fetched.
        entry: what the catalogue says; None for an adapter of the operator's folder.
    """

    name: str
    folder: AdapterFolder
    subfolder: str
    entry: Entry | None = None


@dataclass(frozen=True)
class Job:
    """A ticket whose adapter is to be loaded; `digest` is what it had when it was last read, if that is known."""

    ticket: AdapterTicket
    origin: Origin
    digest: str | None
