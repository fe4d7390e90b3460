"""Gives tenants on the provider's own GPU windows: memory that both share, so that large requests and replies need not
cross a socket (wire/SPEC.md, section 3).

Guarantees: every window is an allocation of its own, made for one stream and filled with zeros, so a tenant sees
neither another tenant's rows nor the provider's weights. All windows together stay within a budget, and no tenant has
more than half of it. What a tenant says about places in a window is checked against the window. The rows are read while
the tenant may still write there, which changes no reply but its own: in ring arithmetic any number is valid.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass

import torch

from provider.net.request_table import Request
from wire.call import Arithmetic, Purpose
from wire.errors import ConfigurationError, InvalidTensor
from wire.frame import Header
from wire.gpu_window.areas import Area
from wire.gpu_window.driver import LIBRARY, Driver, DriverError
from wire.gpu_window.memory import SharedMemory, allocate
from wire.transport.ipc.window import Asked

LEAST_BYTES = 4 << 20
"""The smallest window that is given, in bytes: a few requests of half a megabyte and their replies."""
_LOGGER = logging.getLogger(__name__)


class Window:
    """Holds the provider's end of one stream's window."""

    def __init__(self, memory: SharedMemory) -> None:
        """Takes memory that `Windows.open` has made."""
        self._memory = memory

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

    def put(self, request: Request, area: Area, reply: torch.Tensor) -> None:
        """Writes a reply, and waits until it is written. Raises RuntimeError if the device is lost."""
        self._memory.matrix(area.reply_at, request.header.rows, request.reply_cols).copy_(reply)
        self._memory.synchronize()


@dataclass(frozen=True)
class Given:
    """Holds a window that was made for a tenant, and the file descriptor to send, which `Windows.close` does not
    close."""

    tenant: str
    window: Window
    size: int
    descriptor: int


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
            self._uuid = self._driver.uuid()
        except (DriverError, OSError, AttributeError) as exc:
            raise ConfigurationError(f"{device} cannot share memory with tenants: leave --gpu-windows out") from exc
        self._device, self._budget = device, budget_bytes
        self._lock = threading.Lock()
        self._taken: Counter[str] = Counter()

    def open(self, tenant: str, asked: Asked) -> Given | None:
        """Makes a window for a stream of a tenant, of the size that it asks for or of what is left of the budget.

        Returns:
            The window, for `close`; None if the tenant uses another GPU, too little of the budget is left, or the
            device has no memory.
        """
        if asked.uuid != self._uuid:
            return None
        with self._lock:
            left = min(self._budget - self._taken.total(), self._budget // 2 - self._taken[tenant])
            size = min(asked.num_bytes, left)
            unit = self._driver.rounded(1)
            size -= size % unit
            if size < max(LEAST_BYTES, unit):
                return None
            self._taken[tenant] += size
        try:
            memory, descriptor = allocate(self._driver, self._device, size)
        except RuntimeError as exc:
            _LOGGER.warning("no window could be made: %s", exc if isinstance(exc, DriverError) else type(exc).__name__)
            self._release(tenant, size)
            return None
        return Given(tenant, Window(memory), size, descriptor)

    def close(self, given: Given) -> None:
        """Takes a window back from the budget when its stream has ended. The memory is freed once no product uses it
        and the tenant has unmapped it."""
        self._release(given.tenant, given.size)

    @property
    def taken_bytes(self) -> int:
        """Returns the bytes of all open windows."""
        with self._lock:
            return self._taken.total()

    def _release(self, tenant: str, size: int) -> None:
        with self._lock:
            self._taken[tenant] -= size
            if not self._taken[tenant]:
                del self._taken[tenant]
