"""What one stream sends next: short frames in their order, and large replies that take turns, a chunk each.

Guarantees: a reply that is forgotten before its turn is not sent, and one that is forgotten half sent stops there; a
reply gives up its place among the requests before its last chunk is handed out, so that the tenant may use the room as
soon as it has that chunk; a large reply keeps no small one waiting for longer than a chunk. How much waits here is not
bounded by itself: whoever puts something asks `is_full`.

Threads: any thread puts. One thread at a time, which sends, calls `next_frame` and `stop_sending`, and it alone looks
at replies that are half sent. There is no lock: `deque` makes appending and taking safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch

from provider.net.request_table import MAX_REQUESTS, Request, RequestTable
from provider.operations.usage import TenantUsage
from wire import frame
from wire.frame import FrameType, Header
from wire.limits import CHUNK_BYTES


class Outbox:
    """The frames of one stream that wait to be sent."""

    def __init__(self, table: RequestTable, usage: TenantUsage, most_waiting: int = MAX_REQUESTS) -> None:
        """Starts empty.

        Args:
            table: what is in flight; a reply that is sent is forgotten there.
            usage: the tenant's account.
            most_waiting: how many answers may wait.
        """
        self._table, self._usage, self._most_waiting = table, usage, most_waiting
        self.notify: Callable[[], None] = lambda: None
        """Called, in any thread, when there may be a frame to send."""
        self._waiting: deque[bytes | memoryview | Request | None] = deque()
        """Frames, requests whose replies wait, and None for the end."""
        self._turns: deque[tuple[Request, Iterator[bytes | memoryview]]] = deque()
        """Large replies that are being sent."""
        self._has_input_ended = False
        self.is_over = False
        """Whether `next_frame` will never return another frame."""

    # ---- putting ----------------------------------------------------------------------------------------------------

    def append(self, message: bytes | memoryview) -> None:
        """Adds a frame, and leaves it to the caller to call `notify`."""
        self._waiting.append(message)

    def put(self, message: bytes | memoryview) -> None:
        """Adds a frame."""
        self._waiting.append(message)
        self.notify()

    def put_reply(self, request: Request, reply: torch.Tensor) -> None:
        """Adds the reply to a request in flight.

        The request keeps it, so that a request that is forgotten takes its reply with it.
        """
        request.reply = reply
        self._waiting.append(request)
        self.notify()

    def end_input(self) -> None:
        """Makes this the end once everything in flight has been answered and sent."""
        self._has_input_ended = True
        self.notify()

    def end(self) -> None:
        """Makes this the end once what waits here has been sent; replies that are half sent are not finished."""
        self._waiting.append(None)
        self.notify()

    # ---- what waits -------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Tells whether nothing waits and no reply is half sent."""
        return not self._waiting and not self._turns

    @property
    def is_full(self) -> bool:
        """Tells whether more answers wait than may: the tenant asks and does not read."""
        return len(self._waiting) > self._most_waiting

    @property
    def num_waiting(self) -> int:
        """Returns how many frames and replies wait for their turn; replies that were forgotten count until then."""
        return len(self._waiting)

    @property
    def num_half_sent(self) -> int:
        """Returns how many large replies are being sent."""
        return len(self._turns)

    # ---- sending ----------------------------------------------------------------------------------------------------

    def next_frame(self) -> bytes | memoryview | None:
        """Returns the frame to send next, or None where there is none now, or ever: see `is_over`."""
        while not self.is_over:
            # This is asked before anything is seen to be empty: what is queued in between is found the next time.
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
        """Drops replies that are half sent; called by the thread that takes frames, which will take no more."""
        self.is_over = True
        self._turns.clear()

    def _next_chunk(self) -> bytes | memoryview | None:
        """Returns the next chunk of the large reply whose turn it is; None where that was forgotten."""
        request, chunks = self._turns.popleft()
        chunk = next(chunks, None)
        if chunk is not None and self._table.has(request):  # Otherwise that was the last chunk.
            self._turns.append((request, chunks))
        return chunk

    def _small_reply(self, request: Request) -> bytes | memoryview | None:
        """Returns the one frame of a reply; None where the request was cancelled or expired before its turn."""
        reply = request.reply
        if reply is None:
            return None
        (message,) = frame.frames(self._answered(request), frame.tensor_bytes(reply))
        return message if self._table.forget(request.header.request_id) else None

    def _chunks(self, request: Request) -> Iterator[bytes | memoryview]:
        """Yields the frames of a large reply, for as long as its request is in flight."""
        reply, left = request.reply, request.reply_bytes
        if reply is None:
            return  # The request was cancelled, or expired before its turn.
        for message in frame.frames(self._answered(request), frame.tensor_bytes(reply)):
            left -= len(message) - frame.HEADER_BYTES
            if not self._table.has(request):
                return
            if left == 0:
                # It is released before the last chunk is sent: the tenant may use the room as soon as it has that
                # chunk.
                self._table.forget(request.header.request_id)
            yield message

    def _answered(self, request: Request) -> Header:
        """Returns the header of the reply, and counts it; from here on the caller holds the reply."""
        asked, size = request.header, request.reply_bytes
        self._usage.answered(request.request_class, asked.rows, asked.total_bytes, size)
        request.reply = None
        return Header(FrameType.REPLY, asked.request_id, asked.call, asked.rows, request.reply_cols, 0, size)
