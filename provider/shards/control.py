"""What the provider's process and a shard's say to each other over ZeroMQ: which product, how large the shared memory
is.

Rows and replies are in shared memory (`shared_rows`); a hint's 48 bytes of seed are the only thing that is not.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from wire.errors import MalformedFrame
from wire.frame import FrameType, Header, parse

_SIZES = struct.Struct("<QQ")
READY = [b"ready"]


def request(header: Header, request_bytes: int, reply_bytes: int, seed: bytes = b"") -> list[bytes]:
    """Returns the parts of a request.

    Args:
        header: a REQUEST with a number, call, rows and cols.
        request_bytes, reply_bytes: the sizes of the two shared memories.
        seed: a hint's seed; else empty.
    """
    return [header.pack(), _SIZES.pack(request_bytes, reply_bytes), seed]


def read_request(parts: Sequence[bytes]) -> tuple[Header, int, int, bytes]:
    """Returns what `request` was given.

    Raises:
        MalformedFrame: it was not made by `request`.
    """
    if len(parts) != 3 or len(parts[1]) != _SIZES.size:
        raise MalformedFrame("a message to a shard has three parts")
    request_bytes, reply_bytes = _SIZES.unpack(parts[1])
    return _header(parts[0]), request_bytes, reply_bytes, parts[2]


def reply(number: int, code: int = 0) -> list[bytes]:
    """Returns the message that a product is in shared memory; with a code, that there is none."""
    return [Header(FrameType.ERROR if code else FrameType.REPLY, number, code=code).pack()]


def read_reply(parts: Sequence[bytes]) -> Header:
    """Returns what `reply` was given.

    Raises:
        MalformedFrame: it was not made by `reply`.
    """
    if len(parts) != 1:
        raise MalformedFrame("a message of a shard has one part")
    return _header(parts[0])


def _header(part: bytes) -> Header:
    header, payload = parse(part)
    if payload:
        raise MalformedFrame("a header with a payload")
    return header
