"""This module defines what the engine needs from a store of adapters, and a store that has no adapters.

The engine reserves an adapter when a request comes in and holds the loan until the request ends. Each adapter that is
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
"""The slot number of requests that are answered by the base model alone."""


class Loan(Protocol):
    """Stands for one request's hold on one adapter. A held adapter keeps its slot (its numbered place on the
    device)."""

    def is_ready(self) -> bool:
        """Returns whether the adapter is on the device, so that `slot` is valid."""

    @property
    def failure(self) -> VeilbaseError | None:
        """Returns the reason why the adapter will never be ready; None while the adapter may become ready."""

    @property
    def slot(self) -> int:
        """Returns the number of the adapter's slot on the device, valid from when the adapter is ready until
        `release`."""

    @property
    def digest(self) -> str:
        """Returns the digest of the adapter's contents, valid from when the adapter is ready. Adapters with other
        contents have other digests."""

    def release(self) -> None:
        """Ends the hold on the adapter; a second call does nothing."""


class AdapterSlots(Protocol):
    """Defines what the engine needs from a store of adapters. Only the engine's thread calls `in_step`.

    A store that loads adapters is made with a function that wakes the engine (`engine.MakeSlots`). The store calls this
    function, from any thread, whenever a loan becomes ready or fails.
    """

    def reserve(self, name: str) -> Loan:
        """Returns a loan that holds an adapter for one request. If the adapter is not on the device, begins to load
        it.

        Raises:
            ConfigurationError: there is no adapter of this name, or the adapter cannot be used with this model.
        """

    def in_step(self, slot_of_row: list[int]) -> AbstractContextManager[None]:
        """Returns a context in which remote layers add to each row's output the change that the row's own adapter
        makes.

        Args:
            slot_of_row: the slot of each row of the step, in ascending order.
        """

    def describe(self) -> str:
        """Returns a line that states how many adapters each tier has room for, for `Engine.explain`; "" for none."""

    def close(self) -> None:
        """Detaches the store from the model. The engine calls this method when the engine is closed."""


class BaseModelLoan:
    """Implements the loan of a request without an adapter: it is always ready, in slot 0."""

    failure: VeilbaseError | None = None
    slot: int = NO_ADAPTER
    digest: str = ""

    def is_ready(self) -> bool:
        """Returns True, since the base model is always on the device."""
        return True

    def release(self) -> None:
        """Does nothing, since nothing is held."""


class NoAdapters:
    """Implements a store that has no adapters, for an engine that serves only the base model."""

    def reserve(self, name: str) -> Loan:
        """Raises ConfigurationError for every name, since the store has no adapters."""
        raise ConfigurationError(f"there is no adapter {ascii(name)[:80]}: this engine serves the base model alone")

    @contextlib.contextmanager
    def in_step(self, slot_of_row: list[int]) -> Iterator[None]:
        """Returns a context that changes nothing in the model's layers."""
        yield

    def describe(self) -> str:
        """Returns an empty line, since there are no adapters to state."""
        return ""

    def close(self) -> None:
        """Does nothing, since the store holds nothing."""
