"""This module holds the loan of an adapter, which a request has from its submission to its end, and `Lender`, what the
engine needs from a store of adapters.

The engine reserves an adapter when a request comes in and holds the loan until the request ends. An adapter that is
ready has a place on the device. The number of the place is its adapter index, above 0; the index 0 stands for the base
model alone. The rows of a step are sorted by adapter index, so that a store can multiply the rows of each adapter in
one piece. `AdapterLoan` is the loan of an `AdapterStore`. `NoAdapters` is a lender that has no adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from wire.errors import ConfigurationError, VeilbaseError

NO_ADAPTER = 0
"""The adapter index of requests that are answered by the base model alone."""


class Loan(Protocol):
    """Stands for one request's hold on one adapter. A held adapter keeps its place on the device."""

    def is_ready(self) -> bool:
        """Returns whether the adapter is on the device, so that `adapter_index` is valid."""

    @property
    def failure(self) -> VeilbaseError | None:
        """Returns the reason why the adapter will never be ready; None while the adapter may become ready."""

    @property
    def adapter_index(self) -> int:
        """Returns the number of the adapter's place on the device, valid from when the adapter is ready until
        `release`."""

    @property
    def digest(self) -> str:
        """Returns the digest of the adapter's contents, valid from when the adapter is ready. Adapters with other
        contents have other digests."""

    def release(self) -> None:
        """Ends the hold on the adapter; a second call does nothing."""


class Lender(Protocol):
    """Defines what the engine needs from a store of adapters. Only the engine's thread calls `in_step`.

    A store that loads adapters is made with a function that wakes the engine (`engine.MakeStore`). The store calls this
    function, from any thread, whenever a loan becomes ready or fails.
    """

    def reserve(self, name: str) -> Loan:
        """Returns a loan that holds an adapter for one request. If the adapter is not on the device, begins to load
        it.

        Raises:
            ConfigurationError: there is no adapter of this name, or the adapter cannot be used with this model.
        """

    def in_step(self, index_of_row: list[int]) -> AbstractContextManager[None]:
        """Returns a context in which remote layers add to each row's output the change that the row's own adapter
        makes.

        Args:
            index_of_row: the adapter index of each row of the step, in ascending order.
        """

    def describe(self) -> str:
        """Returns a line that states how many adapters each tier has room for, for `Engine.explain`; "" for none."""

    def close(self) -> None:
        """Detaches the store from the model. The engine calls this method when the engine is closed."""


class AdapterLoan:
    """Holds an adapter for one request. Callers must release every loan."""

    def __init__(self, name: str, release: Callable[[AdapterLoan], None]) -> None:
        """Makes a loan without a place. Only `AdapterStore.reserve` calls this, and only the store may change the
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
        """Returns whether the adapter is in its place and the loan is not released."""
        return self.placed is not None and not self.released

    @property
    def adapter_index(self) -> int:
        """Returns the number of the adapter's place on the device.

        Raises:
            ConfigurationError: the loan is not ready; or it was released, so that another adapter may have the place.
        """
        if self.placed is None or self.released:
            raise ConfigurationError(
                f"the adapter {self.name} is not in a place: wait until its loan is ready, and use it before release"
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


class BaseModelLoan:
    """Implements the loan of a request without an adapter: it is always ready."""

    failure: VeilbaseError | None = None
    adapter_index: int = NO_ADAPTER
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
    def in_step(self, index_of_row: list[int]) -> Iterator[None]:
        """Returns a context that changes nothing in the model's layers."""
        yield

    def describe(self) -> str:
        """Returns an empty line, since there are no adapters to state."""
        return ""

    def close(self) -> None:
        """Does nothing, since the store holds nothing."""
