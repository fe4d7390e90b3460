"""Defines the messages between the provider's process and a shard's process, which are sent over ZeroMQ.

A request's message holds the call, the shape of the rows and the size of the shared memory. The rows and the reply are
in the shared memory (`shared_rows`). Only the 48 bytes of a hint's seed are in the message itself.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from wire.errors import MalformedFrame
from wire.frame import FrameType, Header, parse

_SIZES = struct.Struct("<QQ")
READY = [b"ready"]


def request(header: Header, request_bytes: int, reply_bytes: int, seed: bytes = b"") -> list[bytes]:
    """Returns the parts of the message for a request.

    Args:
        header: a REQUEST header with the number of the request, the call, and the numbers of rows and columns.
        request_bytes, reply_bytes: the sizes of the shared memory for the rows and for the reply.
        seed: the seed of the rows if the request is for a hint (the product of a public matrix and the weight), else
            empty.
    """
    return [header.pack(), _SIZES.pack(request_bytes, reply_bytes), seed]


def read_request(parts: Sequence[bytes]) -> tuple[Header, int, int, bytes]:
    """Reads a message that `request` made; returns the arguments that `request` was called with.

    Raises:
        MalformedFrame: the parts are not a message of `request`.
    """
    if len(parts) != 3 or len(parts[1]) != _SIZES.size:
        raise MalformedFrame("a message to a shard has three parts")
    request_bytes, reply_bytes = _SIZES.unpack(parts[1])
    return _header(parts[0]), request_bytes, reply_bytes, parts[2]


def reply(number: int, code: int = 0) -> list[bytes]:
    """Returns the message by which the shard's process replies to the provider's process. The message says that the
    product of request `number` is in shared memory or, if `code` is not 0, that the request failed with this error
    code."""
    return [Header(FrameType.ERROR if code else FrameType.REPLY, number, code=code).pack()]


def read_reply(parts: Sequence[bytes]) -> Header:
    """Reads a message that `reply` made; returns its header, which has the number of the request and the error code.

    Raises:
        MalformedFrame: the parts are not a message of `reply`.
    """
    if len(parts) != 1:
        raise MalformedFrame("a message of a shard has one part")
    return _header(parts[0])


def _header(part: bytes) -> Header:
    header, payload = parse(part)
    if payload:
        raise MalformedFrame("a header with a payload")
    return header
