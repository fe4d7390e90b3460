"""This module holds the loan of a request for an adapter."""

from __future__ import annotations

from collections.abc import Callable

from wire.errors import ConfigurationError, VeilbaseError


class AdapterLoan:
    """Holds an adapter for one request. Callers must release every loan."""

    def __init__(self, name: str, release: Callable[[AdapterLoan], None]) -> None:
        """Makes a loan without a slot. Only `AdapterStore.reserve` calls this, and only the store may change the
        attributes, under its lock.

        Args:
            name: the adapter's name.
            release: a function that is called when the loan is released.
        """
        self.name = name
        self.failure: VeilbaseError | None = None
        self.placed: tuple[int, str] | None = None
        self.released = False
        self.passed = 0
        self._release = release

    def is_ready(self) -> bool:
        """Returns whether the adapter is in its slot and the loan is not released."""
        return self.placed is not None and not self.released

    @property
    def slot(self) -> int:
        """Returns the number of the adapter's slot on the device.

        Raises:
            ConfigurationError: the loan is not ready; or it was released, so that another adapter may have the slot.
        """
        if self.placed is None or self.released:
            raise ConfigurationError(
                f"the adapter {self.name} is not in a slot: wait until its loan is ready, and use it before release"
            )
        return self.placed[0]

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of the adapter's two files, in hex.

        Raises:
            ConfigurationError: the loan was never ready.
        """
        if self.placed is None:
            raise ConfigurationError(f"the adapter {self.name} is not loaded yet, so its digest is not known")
        return self.placed[1]

    def release(self) -> None:
        """Ends the hold on the adapter, or stops waiting for the adapter; a second call does nothing."""
        self._release(self)
