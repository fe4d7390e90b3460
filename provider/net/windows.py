"""Gives tenants on the provider's own GPU windows: memory that both share, so that large requests and replies need not
cross a socket (wire/SPEC.md, section 3).

Guarantees: every window is an allocation of its own, made for one stream and filled with zeros, so a tenant sees
neither another tenant's rows nor the provider's weights. All windows together stay within a budget, and no tenant has
more than half of it. What a tenant says about places in a window is checked against the window. The rows are read while
the tenant may still write there, which changes no reply but its own: in ring arithmetic any number is valid.

A tenant that keeps the descriptor of a window keeps the memory from being freed, whatever this process does. So the
window of a stream that has ended stays in the budget, and the tenant's next stream gets the same memory. It is let go
only if other tenants need the budget.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass

import torch

from wire.call import Arithmetic, Purpose
from wire.errors import ConfigurationError, InvalidTensor
from wire.frame import Header
from wire.gpu_window.memory import LIBRARY, Area, Driver, DriverError, SharedMemory, allocate
from wire.transport.ipc.window import Asked

LEAST_BYTES = 4 << 20
"""The smallest window that is given, in bytes: a few requests of half a megabyte and their replies."""
_LOGGER = logging.getLogger(__name__)


class Window:
    """Holds the provider's end of one stream's window."""

    def __init__(self, memory: SharedMemory) -> None:
        """Takes memory that `Windows.open` has made."""
        self._memory, self._lock, self._has_ended = memory, threading.Lock(), False

    def end(self) -> None:
        """Ends the use of the window: `put` writes nothing any more, since another stream may get the memory."""
        with self._lock:
            self._has_ended = True

    def area_of(self, header: Header, payload: memoryview, reply_cols: int) -> Area:
        """Returns where the rows and the reply of a request are.

        Args:
            header: the request's header, whose shape is checked.
            payload: the request's payload.
            reply_cols: the number of columns of the reply.

        Raises:
            MalformedFrame: the payload does not name two places.
            InvalidTensor: a place is not in the window, or the request asks for something else than a ring product.
        """
        if (header.call.arithmetic, header.call.purpose) != (Arithmetic.RING, Purpose.PRODUCT):
            raise InvalidTensor("only rows of ring products go through a window")
        area = Area.unpack(payload)
        try:
            self._memory.matrix(area.rows_at, header.rows, header.cols)
            self._memory.matrix(area.reply_at, header.rows, reply_cols)
        except ValueError:
            raise InvalidTensor("a place that is not in the window") from None
        return area

    def rows(self, header: Header, area: Area) -> torch.Tensor:
        """Returns a request's rows, int32, shape (rows, cols), on the device, not copied."""
        return self._memory.matrix(area.rows_at, header.rows, header.cols)

    def put(self, area: Area, reply: torch.Tensor) -> None:
        """Writes a reply, whose product is done, and waits until it is written; does nothing after `end`. Raises
        RuntimeError if the device is lost."""
        with self._lock:
            if not self._has_ended:
                self._memory.write(area.reply_at, reply)


@dataclass(frozen=True)
class Given:
    """Holds a window of a tenant's stream, its memory, and the file descriptor to send, which `Windows` closes."""

    tenant: str
    window: Window
    memory: SharedMemory
    descriptor: int

    @property
    def size(self) -> int:
        """Returns the window's bytes."""
        return self.memory.size


class Windows:
    """Makes windows on the device that computes."""

    def __init__(self, device: torch.device, budget_bytes: int, library: str = LIBRARY) -> None:
        """Loads the driver, and makes no window yet.

        Args:
            device: the device that computes.
            budget_bytes: the most bytes of all windows together.
            library: the driver's file; tests name a stand-in.

        Raises:
            ConfigurationError: the device cannot share memory.
        """
        try:
            self._driver = Driver(device.index or 0, library)
            self._uuid, self._unit = self._driver.uuid(), self._driver.rounded(1)
        except (DriverError, OSError):
            raise ConfigurationError(f"{device} cannot share memory with tenants: leave --gpu-windows out") from None
        self._device, self._budget = device, budget_bytes
        self._lock = threading.Lock()
        self._has_ended, self._open = False, set[Given]()
        self._kept: list[Given] = []
        """Windows of streams that have ended, the oldest first."""

    def open(self, tenant: str, asked: Asked) -> Given | None:
        """Returns a window for a stream of a tenant: one that an earlier stream of the tenant had, or a new one, of the
        size that the tenant asks for or of what is left of the budget.

        Returns:
            The window, for `close`; None if the tenant uses another GPU, too little of the budget is left, or the
            device has no memory.
        """
        if asked.uuid != self._uuid:
            return None
        with self._lock:
            try:
                given = self._kept_for(tenant, asked.num_bytes) or self._new(tenant, asked.num_bytes)
            except RuntimeError as exc:
                why = exc if isinstance(exc, DriverError) else type(exc).__name__
                _LOGGER.warning("no window could be made: %s", why)
                return None
            if given is not None:
                self._open.add(given)
            return given

    def _kept_for(self, tenant: str, most_bytes: int) -> Given | None:
        for number, kept in enumerate(self._kept):
            if kept.tenant == tenant and kept.size <= most_bytes:
                del self._kept[number]
                try:
                    kept.memory.fill_with_zeros()
                except RuntimeError:  # The device is lost, and the memory with it.
                    os.close(kept.descriptor)
                    raise
                return Given(tenant, Window(kept.memory), kept.memory, kept.descriptor)
        return None

    def _new(self, tenant: str, most_bytes: int) -> Given | None:
        mine = sum(one.size for one in (*self._open, *self._kept) if one.tenant == tenant)
        in_use = sum(one.size for one in self._open)
        size = min(most_bytes, self._budget // 2 - mine, self._budget - in_use)
        size -= size % self._unit
        if size < max(LEAST_BYTES, self._unit):
            return None
        while self._total() + size > self._budget:
            os.close(self._kept.pop(0).descriptor)
        memory, descriptor = allocate(self._driver, self._device, size)
        return Given(tenant, Window(memory), memory, descriptor)

    def _total(self) -> int:
        return sum(one.size for one in (*self._open, *self._kept))

    def close(self, given: Given) -> None:
        """Takes the window of a stream that has ended. It is kept for the tenant's next stream."""
        given.window.end()
        with self._lock:
            self._open.discard(given)
            self._kept.append(given)
            if self._has_ended:
                self._drop_kept()

    @property
    def num_open(self) -> int:
        with self._lock:
            return len(self._open)

    @property
    def taken_bytes(self) -> int:
        """Returns the bytes of all windows, of open streams and kept ones."""
        with self._lock:
            return self._total()

    def drop(self) -> None:
        """Lets all kept windows go, and the others with their streams, when the provider ends."""
        with self._lock:
            self._has_ended = True
            self._drop_kept()

    def _drop_kept(self) -> None:
        while self._kept:
            os.close(self._kept.pop(0).descriptor)
