"""Decides which frame a stream sends next: short frames in their order, and large replies in turns, one chunk each.

Guarantees: once a request is dropped from the table, for example by a cancel, no further chunk of its reply is sent. A
request is dropped just before the last chunk of its reply is sent, so that its bytes are no longer in flight when the
tenant has the chunk. A small reply never waits for more than one chunk of a large reply. The number of waiting
frames is not bounded here: callers must check `is_full`.

Threads: any thread may add frames. Only the thread that sends may call `next_frame` and `stop_sending`, and only
this thread uses replies that are partly sent. There is no lock, since adding to a `deque` and taking from it are safe.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator

import torch

from provider.net.request_table import MAX_REQUESTS, Request, RequestTable
from provider.operations.usage import TenantUsage
from wire import frame
from wire.errors import QuotaExceeded, Unavailable, VeilbaseError, code_of
from wire.frame import FrameType, Header
from wire.limits import CHUNK_BYTES, MAX_DEADLINE_MS


def error_frame(request_id: int, error: VeilbaseError) -> bytes:
    """Returns the frame that reports an error by its code and, if known, the time after which to retry. With id 0
    the error is about the whole stream."""
    retry_s = error.retry_s if isinstance(error, QuotaExceeded | Unavailable) else 0.0
    retry_ms = min(math.ceil(retry_s * 1000), MAX_DEADLINE_MS)
    return Header(FrameType.ERROR, request_id, deadline_ms=retry_ms, code=code_of(error)).pack()


class Outbox:
    """Holds the frames and replies that wait to be sent on one stream."""

    def __init__(self, table: RequestTable, usage: TenantUsage, most_waiting: int = MAX_REQUESTS) -> None:
        """Makes an outbox in which nothing waits to be sent.

        Args:
            table: the stream's requests in flight; a request is dropped from the table when its reply is sent.
            usage: counts the tenant's replies.
            most_waiting: the number of waiting frames and replies beyond which `is_full` is true.
        """
        self._table, self._usage, self._most_waiting = table, usage, most_waiting
        self.notify: Callable[[], None] = lambda: None
        """A function that is called, in any thread, when there may be a new frame to send."""
        self._waiting: deque[bytes | memoryview | Request | None] = deque()
        """The queue of what to send: frames, requests whose replies are ready, and None to mark the end."""
        self._turns: deque[tuple[Request, Iterator[bytes | memoryview]]] = deque()
        """Large replies that are partly sent, each with its remaining chunks, in the order of their turns."""
        self._has_input_ended = False
        self.is_over = False
        """True once `next_frame` will never return another frame."""

    # ---- putting ----------------------------------------------------------------------------------------------------

    def append(self, message: bytes | memoryview) -> None:
        """Adds a frame without calling `notify`; callers must call `notify` themselves."""
        self._waiting.append(message)

    def put(self, message: bytes | memoryview) -> None:
        """Adds a frame and calls `notify`."""
        self._waiting.append(message)
        self.notify()

    def put_reply(self, request: Request, reply: torch.Tensor) -> None:
        """Adds the reply to a request; drops the reply if the request is no longer in flight.

        The reply is stored in the request, so that the reply's memory is freed if the request is dropped.
        """
        request.reply = reply
        # The table is asked after the reply was stored: a thread that forgets the request takes it out of the table
        # first and then drops its reply, so that one of the two threads drops the reply in every order.
        if not self._table.has(request):
            request.reply = None
            return
        self._waiting.append(request)
        self.notify()

    def end_input(self) -> None:
        """Ends the outbox after every request in flight has a reply or an error and all replies and errors are sent."""
        self._has_input_ended = True
        self.notify()

    def end(self) -> None:
        """Ends the outbox after the frames that wait now are sent; a large reply that is partly sent is cut off."""
        self._waiting.append(None)
        self.notify()

    # ---- what waits -------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Returns whether no frame or reply waits and no reply is partly sent."""
        return not self._waiting and not self._turns

    @property
    def is_full(self) -> bool:
        """Returns whether more than `most_waiting` frames and replies wait, since the tenant does not read them."""
        return len(self._waiting) > self._most_waiting

    @property
    def num_waiting(self) -> int:
        """Returns the number of frames and replies that wait, including replies to requests that were dropped."""
        return len(self._waiting)

    @property
    def num_half_sent(self) -> int:
        """Returns the number of large replies of which some chunks have been sent."""
        return len(self._turns)

    # ---- sending ----------------------------------------------------------------------------------------------------

    def next_frame(self) -> bytes | memoryview | None:
        """Returns the frame to send next, or None if there is none at present. If `is_over` is true, there will never
        be another."""
        while not self.is_over:
            # This is checked before the queues, so that a frame which is added in between is found in the next call.
            is_done = self._has_input_ended and self._table.is_idle
            if self._waiting:
                item = self._waiting.popleft()
                if isinstance(item, Request):
                    if item.reply_bytes <= CHUNK_BYTES:
                        if (only := self._small_reply(item)) is not None:
                            return only
                        continue
                    self._turns.append((item, self._chunks(item)))
                elif item is not None:
                    return item
                else:
                    self.stop_sending()
                    break
            elif not self._turns:
                self.is_over = is_done
                return None
            if (chunk := self._next_chunk()) is not None:
                return chunk
        return None

    def stop_sending(self) -> None:
        """Drops replies that are partly sent, and ends the outbox. Only the thread that sends may call this."""
        self.is_over = True
        self._turns.clear()

    def _next_chunk(self) -> bytes | memoryview | None:
        """Returns the next chunk of the large reply whose turn it is, or None if the request was dropped."""
        request, chunks = self._turns.popleft()
        chunk = next(chunks, None)
        if chunk is not None and self._table.has(request):  # Otherwise this chunk is the last.
            self._turns.append((request, chunks))
        return chunk

    def _small_reply(self, request: Request) -> bytes | memoryview | None:
        """Returns a small reply as one frame, or None if its request was cancelled or has expired meanwhile."""
        reply = request.reply
        if reply is None:
            return None
        (message,) = frame.frames(self._answered(request), frame.tensor_bytes(reply))
        return message if self._table.forget(request.header.request_id) else None

    def _chunks(self, request: Request) -> Iterator[bytes | memoryview]:
        """Yields the frames of a large reply, and stops early if the request is no longer in flight."""
        reply, left = request.reply, request.reply_bytes
        if reply is None:
            return  # The request was cancelled or has expired.
        for message in frame.frames(self._answered(request), frame.tensor_bytes(reply)):
            left -= len(message) - frame.HEADER_BYTES
            if not self._table.has(request):
                return
            if left == 0:
                # The request is forgotten before the last chunk is sent, so that the tenant can send another request as
                # soon as it has that chunk.
                self._table.forget(request.header.request_id)
            yield message

    def _answered(self, request: Request) -> Header:
        """Returns the header of a reply, counts the reply as sent, and removes the reply's tensor from the request.
        Callers must keep their own reference to the tensor."""
        asked, size = request.header, request.reply_bytes
        self._usage.answered(request.request_class, asked.rows, asked.total_bytes, size)
        request.reply = None
        return Header(FrameType.REPLY, asked.request_id, asked.call, asked.rows, request.reply_cols, 0, size)
