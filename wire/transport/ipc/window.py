"""This module lets a tenant ask for a window, GPU memory that both ends share, before its stream begins; and answers
for the provider (wire/SPEC.md, section 3).

Guarantees: a window is asked for and given on the connection whose stream then uses it, after the handshake has proved
who is at both ends. A tenant maps no more than it asked for, and only memory of the GPU that it named. Which bytes go
into a window is decided by `TenantWindow.take`: masked rows alone.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from dataclasses import dataclass

import torch

from wire import frame
from wire.call import Arithmetic, Call, Purpose
from wire.errors import MalformedFrame, TransportError, Unavailable, error_from_code
from wire.frame import ITEM_BYTES, FrameType, Header
from wire.gpu_window.memory import UUID_BYTES, Area, Areas, Driver, DriverError, SharedMemory, import_
from wire.payload import Payload
from wire.transport.ipc.clear_socket import ClearSocket

WANTED_BYTES = 256 << 20
"""The size of the window that a tenant asks for: the default limit on a stream's requests and replies in flight."""
LEAST_BYTES = 256 << 10
"""The least bytes of rows and reply together that go through a window. Starting copies to and from a GPU takes longer
than sending a few rows."""
ANSWER_S = 20.0
"""The longest wait for the answer, in seconds: that of the handshake of a stream."""
_ASKED, _GIVEN = struct.Struct(f"<{UUID_BYTES}sQ"), struct.Struct("<Q")
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """Holds what a tenant asks for.

    Attributes:
        uuid: the GPU that the tenant uses, 16 bytes.
        num_bytes: the largest window that it maps.
    """

    uuid: bytes
    num_bytes: int


class TenantWindow:
    """Holds the tenant's end of a window."""

    def __init__(self, memory: SharedMemory) -> None:
        """Takes memory that `ask` has mapped; all of it is free."""
        self.memory, self.areas = memory, Areas(memory.size)
        self._stays: set[int] = set()
        """Where the replies begin that are copied on the device, since their rows came from there."""
        self.is_lost = False
        """True once the GPU has failed: the window is not used any more."""

    def take(self, call: Call, payload: Payload, reply_cols: int) -> Area | None:
        """Copies the rows of a request into the window.

        Returns:
            The request's area; None if the request has to go by the socket: it is small, its rows are not masked or
            no ring numbers, or there is no room.
        """
        rows = payload.masked_rows
        row_bytes, reply_bytes = (payload.num_rows * cols * ITEM_BYTES for cols in (payload.cols, reply_cols))
        if rows is None or row_bytes + reply_bytes < LEAST_BYTES or self.is_lost:
            return None
        if (call.arithmetic, call.purpose) != (Arithmetic.RING, Purpose.PRODUCT):
            return None
        area = self.areas.take(row_bytes, reply_bytes)
        if area is None:
            return None
        try:
            if not rows.is_cpu:
                torch.cuda.current_stream(rows.device).synchronize()  # The rows are complete before they are copied.
                self._stays.add(area.reply_at)
            self.memory.write(area.rows_at, rows)
        except RuntimeError as exc:  # The GPU is lost: the socket carries what is left.
            self.is_lost = True
            _LOGGER.warning("the window is given up: %s", type(exc).__name__)
            return None
        return area

    def reply(self, area: Area, num_rows: int, cols: int) -> torch.Tensor:
        """Returns a copy of a reply, shape (num_rows, cols), int32, in the CPU's memory, or on the device if the rows
        came from there; the area is still taken. What is checked later is this copy, which the provider cannot change.

        Raises:
            TransportError: the GPU is lost.
        """
        try:
            return self.memory.read(area.reply_at, num_rows, cols, stays=area.reply_at in self._stays)
        except RuntimeError as exc:
            self.is_lost = True
            raise TransportError(f"a reply could not be read from the window: {type(exc).__name__}") from None

    def give_back(self, area: Area) -> None:
        """Frees a request's area: the provider will not write there for this request any more."""
        self._stays.discard(area.reply_at)
        self.areas.give_back(area)

    def lose(self, area: Area) -> None:
        """Keeps a request's area from further use, since the provider may still write there for this request."""
        _LOGGER.warning("%d bytes of the window are lost to a request whose deadline passed", area.num_bytes)

    @property
    def num_bytes(self) -> int:
        return self.memory.size

    @property
    def free_bytes(self) -> int:
        return self.areas.free_bytes


def ask(connection: ClearSocket, driver: Driver, device: torch.device) -> TenantWindow | None:
    """Asks a provider for a window, on a connection on which nothing was sent yet.

    Args:
        connection: the connection of the stream that is about to begin.
        driver, device: the tenant's GPU, which has to be the provider's.

    Returns:
        The window; None if the provider gives none, because it computes elsewhere, offers none or has no memory left,
        or if what it sent cannot be mapped.

    Raises:
        MalformedFrame: the answer is none, as that of a provider that does not know windows.
        VeilbaseError: the provider refused the tenant.
        Unavailable: the connection broke, or no answer came in time.
    """
    payload = _ASKED.pack(driver.uuid(), WANTED_BYTES)
    try:
        connection.send(Header(FrameType.WINDOW, total_bytes=len(payload)).pack() + payload)
        message, descriptor = connection.receive_with_descriptor(time.monotonic() + ANSWER_S)
    except TimeoutError:
        raise Unavailable("the provider did not answer in time") from None
    except OSError:
        raise Unavailable("the connection to the provider broke: check that it runs") from None
    try:
        size = _given(*frame.parse(message))
        if descriptor is None or not size:
            return None
        return TenantWindow(import_(driver, device, descriptor, size))
    except (RuntimeError, OSError) as exc:
        why = exc if isinstance(exc, DriverError) else type(exc).__name__
        _LOGGER.warning("the provider's window cannot be mapped: %s", why)
        return None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _given(header: Header, payload: memoryview) -> int:
    """Returns the size of the window that the provider gives, 0 for none."""
    if header.kind is FrameType.ERROR:
        raise error_from_code(header.code, 0, header.deadline_ms)
    if header.kind is not FrameType.WINDOW or len(payload) != _GIVEN.size:
        raise MalformedFrame("the provider did not answer a WINDOW with one")
    (size,) = _GIVEN.unpack(payload)
    if size > WANTED_BYTES:
        raise MalformedFrame(f"expected a window of at most {WANTED_BYTES} bytes, got {size}")
    return int(size)


def asked_window(message: bytes | memoryview) -> Asked | None:
    """Returns what a tenant's first message asks for, or None if it is another frame.

    Raises:
        MalformedFrame: it is no valid WINDOW.
    """
    if not len(message) or message[0] != FrameType.WINDOW:
        return None
    _, payload = frame.parse(message)
    if len(payload) != _ASKED.size:
        raise MalformedFrame("a WINDOW names a GPU and a size")
    return Asked(*_ASKED.unpack(payload))


def answer(connection: ClearSocket, size: int, descriptor: int | None) -> None:
    """Answers a tenant that asked for a window.

    Args:
        connection: the tenant's connection.
        size, descriptor: the bytes of the window, and what stands for its memory; 0 and None for no window.

    Raises:
        OSError: the tenant has disconnected.
    """
    message = Header(FrameType.WINDOW, total_bytes=_GIVEN.size).pack() + _GIVEN.pack(size)
    if descriptor is None:
        connection.send(message)
    else:
        connection.send_with_descriptor(message, descriptor)
