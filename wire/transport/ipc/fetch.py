"""This module requests the manifest or a file of the bundle by frames, on a connection of its own. For the provider's
end, it reads such a request and makes the frames of the file (wire/SPEC.md, section 3).

Guarantees: at most the announced bytes are accepted, in order, within one deadline. Nothing is parsed here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from wire import frame
from wire.errors import DeadlineExceeded, MalformedFrame, Unavailable, error_from_code
from wire.frame import FrameType, Header
from wire.limits import CHUNK_BYTES
from wire.manifest import BUNDLE_FILE_NAMES
from wire.transport.message_socket import MessageSocket

MANIFEST = ""
"""The name in a FETCH that stands for the manifest."""


def fetch(connection: MessageSocket, file_name: str, most_bytes: int, timeout_s: float) -> Iterator[bytes]:
    """Asks for the manifest or a file, and yields its chunks.

    Args:
        connection: a new connection; the caller releases it.
        file_name: the file's name, or `MANIFEST`.
        most_bytes: the most bytes that may come.
        timeout_s: the seconds within which everything must come.

    Raises:
        VeilbaseError: the provider refused, its answer is malformed or too large, or the connection broke.
    """
    give_up_at_s, received, total = time.monotonic() + timeout_s, 0, most_bytes + 1
    name = file_name.encode("ascii")
    try:
        connection.send(Header(FrameType.FETCH, total_bytes=len(name)).pack() + name)
        while received < total:
            connection.peek(give_up_at_s)
            header, payload = frame.parse(connection.next_message() or b"")
            _check(header, payload, received, total, most_bytes)
            total, received = header.total_bytes, received + len(payload)
            yield bytes(payload)
    except TimeoutError:
        raise DeadlineExceeded("the provider did not answer in time") from None
    except (EOFError, OSError):
        raise Unavailable("the connection to the provider broke: check that it runs") from None


def _check(header: Header, payload: memoryview, received: int, total: int, most_bytes: int) -> None:
    if header.kind is FrameType.ERROR:
        raise error_from_code(header.code, 0, header.deadline_ms)
    if header.kind is not FrameType.DATA:
        raise MalformedFrame("the provider did not answer a FETCH with DATA")
    if header.total_bytes > most_bytes:
        raise MalformedFrame(f"expected at most {most_bytes} bytes, got more")
    if header.offset != received or (received and header.total_bytes != total) or (header.total_bytes and not payload):
        raise MalformedFrame("a chunk does not continue its file")


def asked_name(message: bytes | memoryview) -> str | None:
    """Returns the name in a FETCH, or None if the message is another frame or none at all.

    Raises:
        MalformedFrame: no bundle may have a file of this name, or the FETCH is not a valid frame.
    """
    if not len(message) or message[0] != FrameType.FETCH:
        return None
    _, payload = frame.parse(message)
    name = bytes(payload).decode("ascii", "replace")
    if name != MANIFEST and name not in BUNDLE_FILE_NAMES:
        raise MalformedFrame("expected the name of a bundle's file in a FETCH")
    return name


def data_frames(chunks: Iterable[bytes], total_bytes: int) -> Iterator[bytes]:
    """Yields the frames of a file.

    Args:
        chunks: the file's bytes, in chunks of any size.
        total_bytes: how many bytes these are together.
    """
    offset = 0
    for chunk in chunks:
        for start in range(0, len(chunk), CHUNK_BYTES):
            part = chunk[start : start + CHUNK_BYTES]
            yield Header(FrameType.DATA, offset=offset, total_bytes=total_bytes).pack() + part
            offset += len(part)
    if not total_bytes:
        yield Header(FrameType.DATA).pack()
