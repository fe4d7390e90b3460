"""This module packs and parses the frames of the tensor stream: a fixed 48-byte header followed by raw bytes
(wire/SPEC.md, section 3).

This module guarantees that `parse` and `Assembler` raise nothing but `wire.errors`, whatever bytes come, and that no
buffer is allocated before the caller has checked the header. Which peer sent a frame is guaranteed by the connection,
not here.
"""

from __future__ import annotations

import functools
import struct
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from wire.call import Arithmetic as Arithmetic
from wire.call import Call as Call
from wire.call import Direction as Direction
from wire.call import Purpose as Purpose
from wire.errors import InvalidTensor, LimitExceeded, MalformedFrame
from wire.limits import CHUNK_BYTES
from wire.limits import ITEM_BYTES as ITEM_BYTES
from wire.limits import PROTOCOL_VERSION as PROTOCOL_VERSION
from wire.ring import widths
from wire.ring.buffers import unwritten
from wire.ring.seeded_rows import PACKED_BYTES, Rows, SeededRows
from wire.ring.widths import FULL_BITS, REQUEST_BITS, SHORT_REPLY_BITS, row_bytes

MAGIC = b"VEIL"

_HEADER = struct.Struct("<BBBBIQIIQQIHBB")
HEADER_BYTES = _HEADER.size

with warnings.catch_warnings():
    # torch warns once per process that a bytes object is read-only. The views that are made here are never written to.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0\0\0\0", dtype=torch.int32)


class FrameType(IntEnum):
    """Lists the frame types of the protocol; the values are the numbers on the wire. FETCH and DATA, for the manifest
    and the bundle, cross sockets of one host only; gRPC has methods for these. WINDOW, which asks for memory of a GPU
    that both ends share and answers, crosses sockets of one host only, too."""

    HELLO = 1
    WELCOME = 2
    REQUEST = 3
    REPLY = 4
    ERROR = 5
    CANCEL = 6
    FETCH = 7
    DATA = 8
    WINDOW = 9


_NO_CALL = Call(0, Direction.FORWARD, Arithmetic.RING)
IN_WINDOW = 1 << 15
"""The `code` of a REQUEST or REPLY whose numbers are in memory that both ends share, and not in its payload."""
DTYPES = {Arithmetic.RING: torch.int32, Arithmetic.FLOAT: torch.float32}


@dataclass(slots=True)
class Header:
    """Holds the fixed part of every frame. Fields that a frame type does not use are zero.

    Attributes:
        call: the product that is requested (REQUEST) or sent (REPLY).
        rows, cols: the shape of the whole tensor, not of this chunk.
        offset, total_bytes: the position of this frame's payload in the tensor, or in the file (DATA), and how many
            bytes the whole has. In a HELLO, WELCOME or FETCH, total_bytes is the length of the payload.
        deadline_ms: in a REQUEST, how many milliseconds the tenant will wait, counted from the request's first frame;
            in an ERROR with code QUOTA or UNAVAILABLE, after how many milliseconds the tenant may try again, or 0 if
            the provider does not know.
        code: the protocol version (HELLO, WELCOME) or the error number (ERROR); in a REQUEST or REPLY the number of the
            model, which is 0, and `IN_WINDOW` where its numbers are in a window.
    """

    kind: FrameType
    request_id: int = 0
    call: Call = _NO_CALL
    rows: int = 0
    cols: int = 0
    offset: int = 0
    total_bytes: int = 0
    deadline_ms: int = 0
    code: int = 0

    def pack(self) -> bytes:
        """Returns the 48 header bytes, little-endian."""
        call = self.call
        return _HEADER.pack(
            self.kind, call.direction, call.arithmetic, call.purpose, call.group, self.request_id,
            self.rows, self.cols, self.offset, self.total_bytes, self.deadline_ms, self.code, FULL_BITS - call.bits,
            FULL_BITS - call.reply_bits,
        )  # fmt: skip


def parse(message: bytes | memoryview) -> tuple[Header, memoryview]:
    """Splits one stream message into its header and payload.

    Args:
        message: bytes from the peer, with any content.

    Returns:
        The header, and a view of the payload (no copy).

    Raises:
        MalformedFrame: the message is too short, a field holds an unknown number, the numbers have widths that do not
            exist or do not suit the call, or the payload runs past the end of the tensor.
    """
    if len(message) < HEADER_BYTES:
        raise MalformedFrame(f"a frame has at least {HEADER_BYTES} bytes, got {len(message)}")
    (
        kind,
        direction,
        arithmetic,
        purpose,
        group,
        request_id,
        rows,
        cols,
        offset,
        total,
        deadline_ms,
        code,
        *dropped,
    ) = _HEADER.unpack_from(message)
    frame_type = _FRAME_TYPES.get(kind)
    if frame_type is None:
        raise MalformedFrame("a header field holds an unknown number")
    call = _call(group, direction, arithmetic, purpose, *dropped)
    header = Header(frame_type, request_id, call, rows, cols, offset, total, deadline_ms, code)
    payload = memoryview(message)[HEADER_BYTES:]
    if offset + len(payload) > total:
        raise MalformedFrame("a frame's payload does not fit its header")
    return header, payload


_FRAME_TYPES = {int(kind): kind for kind in FrameType}


@functools.lru_cache(maxsize=4096)
def _call(group: int, direction: int, arithmetic: int, purpose: int, dropped: int, reply_dropped: int) -> Call:
    """Returns a `Call` from a cache, since the same few calls recur and new objects would slow each decode step. Raises
    MalformedFrame if direction, arithmetic or purpose is an unknown number, or the widths are none of this call."""
    bits, reply_bits = FULL_BITS - dropped, FULL_BITS - reply_dropped
    try:
        call = Call(group, Direction(direction), Arithmetic(arithmetic), Purpose(purpose), bits, reply_bits)
    except ValueError:
        raise MalformedFrame("a header field holds an unknown number") from None
    is_whole = call.arithmetic is Arithmetic.FLOAT or call.purpose is Purpose.HINT
    if bits not in ((FULL_BITS,) if is_whole else REQUEST_BITS):
        raise MalformedFrame("a request's numbers have a width that does not exist or does not suit it")
    if reply_bits != bits and (is_whole or reply_bits != SHORT_REPLY_BITS):
        raise MalformedFrame("a reply's numbers have a width that does not exist or does not suit it")
    return call


def hello(kind: FrameType) -> bytes:
    """Returns the first frame that each side sends: HELLO from the tenant, WELCOME from the provider."""
    return Header(kind, code=PROTOCOL_VERSION, total_bytes=len(MAGIC)).pack() + MAGIC


def reply_in_window(asked: Header, reply_cols: int) -> bytes:
    """Returns the frame that says that the reply to a request, `reply_cols` numbers a row, is in the window."""
    size = payload_bytes(FrameType.REPLY, asked.call, asked.rows, reply_cols)
    return Header(FrameType.REPLY, asked.request_id, asked.call, asked.rows, reply_cols, 0, size, code=IN_WINDOW).pack()


def check_rows(call: Call, rows: Rows) -> None:
    """Raises InvalidTensor unless the rows suit the call: a seed if the call's purpose is HINT, otherwise a matrix of
    the dtype of the call's arithmetic."""
    if isinstance(rows, SeededRows) != (call.purpose is Purpose.HINT):
        raise InvalidTensor("expected a seed with a call for a hint, and rows with any other")
    if isinstance(rows, torch.Tensor) and (rows.dim() != 2 or rows.dtype != DTYPES[call.arithmetic]):
        raise InvalidTensor(f"expected a matrix of {DTYPES[call.arithmetic]}, got {rows.dim()}-d {rows.dtype}")


def bits_of(kind: FrameType, call: Call) -> int:
    """Returns how many bits each number of a REQUEST or REPLY has."""
    return call.bits if kind is FrameType.REQUEST else call.reply_bits


def payload_bytes(kind: FrameType, call: Call, rows: int, cols: int) -> int:
    """Returns the byte count that the header of a REQUEST or REPLY must announce: that of rows whose numbers have the
    call's width, each with whole bytes, or 48 for a seed."""
    if kind is FrameType.REQUEST and call.purpose is Purpose.HINT:
        return PACKED_BYTES
    return rows * row_bytes(cols, bits_of(kind, call))


def held_bytes(call: Call, rows: int, cols: int, reply_cols: int) -> int:
    """Returns how many bytes a request and its reply count for in limits and deadlines: four for each number, whatever
    its width on the wire, and 48 for a seed."""
    sent = PACKED_BYTES if call.purpose is Purpose.HINT else rows * cols * ITEM_BYTES
    return sent + rows * reply_cols * ITEM_BYTES


def rows_bytes(rows: Rows, bits: int = FULL_BITS) -> memoryview:
    """Returns a payload: the bytes of rows whose numbers have `bits` bits (a view, if these are 32), or the 48 bytes of
    a seed."""
    if isinstance(rows, SeededRows):
        return memoryview(rows.pack())
    return tensor_bytes(rows) if bits == FULL_BITS else widths.pack(rows.detach(), bits)


def tensor_bytes(rows: torch.Tensor) -> memoryview:
    """Returns a flat byte view, without a copy, of a contiguous CPU tensor of four-byte numbers, shape (rows, cols)."""
    if not rows.numel():
        return memoryview(b"")
    plain = rows.detach() if rows.requires_grad else rows
    return plain.contiguous().numpy().data.cast("B")


def frames(header: Header, data: memoryview) -> Iterable[bytes | memoryview]:
    """Returns the frames of one tensor in order, each with at most CHUNK_BYTES of payload.

    The only frame of a small tensor is a `bytes` object, which gRPC can send without another copy.
    """
    if len(data) <= CHUNK_BYTES:
        return (b"".join((header.pack(), data)),)
    return _chunks(header, data)


def _chunks(header: Header, data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        message = unwritten(HEADER_BYTES + len(chunk))
        message[:HEADER_BYTES] = replace(header, offset=start).pack() if start else header.pack()
        message[HEADER_BYTES:] = chunk
        yield message


class Assembler:
    """Puts the chunks of one tensor together. Callers must first check the tensor's first header."""

    def __init__(self, header: Header) -> None:
        """Makes an assembler without chunks, from the tensor's first header, which the caller has checked."""
        self.header = header
        self._received = 0
        self._whole: memoryview | None = None
        self._buffer: memoryview | None = None

    def add(self, header: Header, payload: memoryview) -> bool:
        """Adds the next chunk of the tensor.

        Returns:
            Whether the tensor is complete.

        Raises:
            MalformedFrame: the chunk is not the next one of this tensor, or is empty although the tensor is not.
        """
        first = self.header
        if header.offset != self._received or (header.call, header.rows, header.cols, header.total_bytes) != (
            first.call, first.rows, first.cols, first.total_bytes,
        ):  # fmt: skip
            raise MalformedFrame("a chunk does not continue its tensor")
        if self._received == 0 and len(payload) == first.total_bytes:
            self._whole = payload  # The tensor came in one frame, so a view is enough.
        else:
            if not payload:
                raise MalformedFrame("an empty chunk")
            if self._buffer is None:
                self._buffer = unwritten(first.total_bytes)
            self._buffer[header.offset : header.offset + len(payload)] = payload
        self._received += len(payload)
        return self._received == first.total_bytes

    def rows(self) -> Rows:
        """Returns the content of a complete REQUEST: its tensor, or, if the request is for a hint, the seed from which
        the rows are made. The header says how many rows these are.

        Raises:
            InvalidTensor: the seed is for another number of rows than the header announces, or for rows beyond 2^40.
        """
        first = self.header
        if first.kind is not FrameType.REQUEST or first.call.purpose is not Purpose.HINT:
            return self.tensor()
        seeded = SeededRows.unpack(self._data())
        if seeded.num_rows != first.rows:
            raise InvalidTensor(f"expected a seed for the {first.rows} rows of its header, got {seeded.num_rows}")
        return seeded

    def _data(self) -> memoryview:
        data = self._whole if self._whole is not None else self._buffer
        return memoryview(b"") if data is None else data

    def tensor(self) -> torch.Tensor:
        """Returns the complete tensor, shape (rows, cols), in the dtype of its arithmetic. Callers must not write to
        the tensor, since it may be a view of the frame.

        Callers must use `rows` instead for a request, since a request may hold a seed in place of a tensor.
        """
        return tensor(self.header, self._data())


def tensor(header: Header, data: memoryview) -> torch.Tensor:
    """Returns the tensor that a header describes, shape (rows, cols), from all its bytes. Callers must not write to
    the tensor, since it may be a view of these bytes. Raises InvalidTensor if a packed row does not end with zeros."""
    dtype = DTYPES[header.call.arithmetic]
    if header.total_bytes == 0:
        return torch.empty(header.rows, header.cols, dtype=dtype, device="cpu")
    bits = bits_of(header.kind, header.call)
    if bits != FULL_BITS:
        return widths.unpack(data, header.rows, header.cols, bits)
    return torch.frombuffer(data, dtype=dtype).view(header.rows, header.cols)


def check_tensor_header(header: Header, max_rows: int, max_tensor_bytes: int) -> None:
    """Checks the sizes in a tensor's first header, before memory is allocated. The layer's own shape is not known here.

    Raises:
        LimitExceeded: the header announces more rows or bytes than the limits allow.
        MalformedFrame: the byte count is not that of `payload_bytes`.
    """
    if header.rows > max_rows or header.total_bytes > max_tensor_bytes:
        raise LimitExceeded(
            f"expected at most {max_rows} rows and {max_tensor_bytes} bytes, got {header.rows} and {header.total_bytes}"
        )
    expected = payload_bytes(header.kind, header.call, header.rows, header.cols)
    if header.total_bytes != expected:
        raise MalformedFrame(f"{header.rows} × {header.cols} numbers do not make {header.total_bytes} bytes")
    # Rows count as they are in memory: unpacked, or expanded from a seed of 48 bytes, which may stand for any number.
    if header.rows * header.cols * ITEM_BYTES > max_tensor_bytes:
        raise LimitExceeded(f"expected at most {max_tensor_bytes} bytes of rows in memory")
