"""What the engine asks of a store of adapters, and the store that has none.

The engine reserves an adapter when a request comes in and holds the ticket until the request ends. Each adapter that is
ready has a slot on the device, which is a number above 0; slot 0 stands for the base model alone. The rows of a step
are sorted by slot, so that a store can multiply the rows of each adapter in one piece.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from wire.errors import ConfigurationError, VeilbaseError

NO_ADAPTER = 0
"""The slot of requests that are answered by the base model alone."""


class Ticket(Protocol):
    """One request's hold on one adapter."""

    def is_ready(self) -> bool:
        """Whether the adapter is on the device, so that `slot` is valid."""

    @property
    def failure(self) -> VeilbaseError | None:
        """The reason why the adapter will never be ready; None while it may be."""

    @property
    def slot(self) -> int:
        """The adapter's place on the device; valid from the time that the adapter is ready until `release`."""

    @property
    def digest(self) -> str:
        """The digest of the adapter's contents: KV of another digest is never used for a request with this one."""

    def release(self) -> None:
        """Gives the hold back; a second call does nothing."""


class AdapterSlots(Protocol):
    """Adapters on the device, as the engine uses them; the engine's thread alone calls `in_step`.

    Whoever makes one gives its constructor a function that wakes the engine: the store calls it, from any thread,
    whenever a ticket becomes ready or fails.
    """

    def reserve(self, name: str) -> Ticket:
        """Holds an adapter for one request and begins to load it where it is not on the device.

        Raises:
            ConfigurationError: there is no adapter of this name, or it cannot be used with this model.
        """

    def in_step(self, slot_of_row: list[int]) -> AbstractContextManager[None]:
        """Inside the context, remote layers add to each row what the row's own adapter adds.

        Args:
            slot_of_row: the slot of each row of the step, in ascending order.
        """

    def close(self) -> None:
        """Lets the model and the memory go; the engine calls it when it is closed."""


class BaseModelTicket:
    """The ticket of a request without an adapter: always ready, in slot 0."""

    failure: VeilbaseError | None = None
    slot: int = NO_ADAPTER
    digest: str = ""

    def is_ready(self) -> bool:
        """Returns True."""
        return True

    def release(self) -> None:
        """Does nothing, since nothing is held."""


class NoAdapters:
    """A store without adapters."""

    def reserve(self, name: str) -> Ticket:
        """Refuses every name."""
        raise ConfigurationError(f"there is no adapter {ascii(name)[:80]}: this engine serves the base model alone")

    @contextlib.contextmanager
    def in_step(self, slot_of_row: list[int]) -> Iterator[None]:
        """Changes nothing."""
        yield

    def close(self) -> None:
        """Does nothing."""
