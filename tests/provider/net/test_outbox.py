"""Tests the order of what a stream sends: short frames in their order, large replies in turns, nothing of dropped
requests, and then the end."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from provider.engine.request import Request
from provider.net.admission import Admission
from provider.net.requests import Outbox, RequestTable, count_reply
from provider.operations.usage import CLASSES, UsageCounter
from provider.schedule.ticket import RequestClass
from wire import frame
from wire.frame import Arithmetic, Call, Direction, FrameType, Header
from wire.limits import CHUNK_BYTES
from wire.usage import StreamTokens

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)
REPLY_COLS = 1024
CHUNK_ROWS = CHUNK_BYTES // (4 * REPLY_COLS)
"""The number of rows of a reply that fills one frame."""
NOW = 1000.0


class Stream:
    """Holds an outbox with its request table, and counts its notifications."""

    def __init__(self) -> None:
        self.usage = UsageCounter(CLASSES)
        count = partial(count_reply, self.usage, StreamTokens())
        self.table = RequestTable(1 << 30, Admission().of("acme"), lambda request: None, given_up=count)
        self.outbox = Outbox(self.table, count, most_waiting=4)
        self.num_notices = 0
        self.outbox.notify = self._note

    def _note(self) -> None:
        self.num_notices += 1

    def request(self, number: int, rows: int) -> Request:
        """Makes a request and puts it into the table."""
        header = Header(FrameType.REQUEST, number, CALL, rows, 1, 0, 4 * rows, 30_000)
        request = Request("acme", header, REPLY_COLS, RequestClass.DECODE, NOW, lambda request, outcome: None)
        self.table.admit(header, request.request_class, request.held_bytes, NOW, request)
        return request

    def answer(self, number: int, rows: int) -> torch.Tensor:
        """Puts the reply to a new request into the outbox."""
        reply = torch.full((rows, REPLY_COLS), number, dtype=torch.int32)
        self.outbox.put_reply(self.request(number, rows), reply)
        return reply

    def take(self) -> tuple[Header, torch.Tensor]:
        """Returns the header of the next frame, which must be there, and the numbers in the frame."""
        message = self.outbox.next_frame()
        assert message is not None
        header, payload = frame.parse(message)
        return header, torch.tensor(payload.cast("i").tolist(), dtype=torch.int32)

    def taken(self) -> list[tuple[int, int]]:
        """Returns the request id and the offset of each frame until none is left at present."""
        found = []
        while (message := self.outbox.next_frame()) is not None:
            header, _ = frame.parse(message)
            found.append((header.request_id, header.offset))
        return found


@pytest.fixture
def stream() -> Stream:
    return Stream()


def test_frames_are_sent_in_their_order(stream: Stream) -> None:
    for message in (b"first", memoryview(b"second"), b"third"):
        stream.outbox.put(message)
    assert [stream.outbox.next_frame() for _ in range(4)] == [b"first", b"second", b"third", None]
    assert not stream.outbox.is_over


def test_a_small_reply_is_one_frame_and_frees_its_place(stream: Stream) -> None:
    reply = stream.answer(7, 2)
    assert (stream.table.in_flight()[0], stream.outbox.num_waiting) == (1, 1)
    header, numbers = stream.take()
    assert (header.kind, header.request_id, header.call) == (FrameType.REPLY, 7, CALL)
    assert (header.rows, header.cols, header.offset, header.total_bytes) == (2, REPLY_COLS, 0, 8 * REPLY_COLS)
    assert torch.equal(numbers, reply.flatten())
    assert stream.table.in_flight() == (0, 0)
    total = stream.usage.total()
    assert (total.requests["decode"], total.rows["decode"]) == (1, 2)
    assert (total.bytes_up, total.bytes_down) == (8, 8 * REPLY_COLS)


def test_a_reply_without_rows(stream: Stream) -> None:
    stream.answer(1, 0)
    header, numbers = stream.take()
    assert (header.kind, header.rows, header.cols, len(numbers)) == (FrameType.REPLY, 0, REPLY_COLS, 0)


def test_large_replies_take_turns_and_small_ones_wait_for_one_chunk(stream: Stream) -> None:
    replies = {number: stream.answer(number, 3 * CHUNK_ROWS) for number in (1, 2)}
    parts: dict[int, list[torch.Tensor]] = {1: [], 2: []}
    order = []
    for turn in range(6):
        if turn == 3:
            stream.outbox.put(frame.hello(FrameType.WELCOME))
            assert stream.take()[0].kind is FrameType.WELCOME
        header, numbers = stream.take()
        order.append(header.request_id)
        parts[header.request_id].append(numbers)
    assert order == [1, 1, 2, 1, 2, 2]  # the second reply's first chunk comes after the first reply's second chunk
    for number, reply in replies.items():
        assert torch.equal(torch.cat(parts[number]), reply.flatten())
    assert stream.outbox.next_frame() is None
    assert stream.outbox.is_empty


def test_the_room_of_a_large_reply_is_free_before_its_last_chunk(stream: Stream) -> None:
    stream.answer(1, 2 * CHUNK_ROWS)
    stream.take()
    assert (stream.table.in_flight()[0], stream.outbox.num_half_sent) == (1, 1)
    assert stream.usage.total().requests["decode"] == 0
    assert stream.take()[0].offset == CHUNK_BYTES
    assert stream.usage.total().requests["decode"] == 1
    assert (stream.table.in_flight()[0], stream.outbox.num_half_sent) == (0, 0)


@pytest.mark.parametrize("rows", [1, 3 * CHUNK_ROWS])
def test_what_is_forgotten_before_its_turn_is_not_sent(stream: Stream, rows: int) -> None:
    stream.answer(1, rows)
    stream.table.forget(1)
    stream.answer(2, 1)
    assert stream.taken() == [(2, 0)]
    assert stream.usage.total().requests["decode"] == 1


def test_the_reply_to_what_is_forgotten_already_is_dropped(stream: Stream) -> None:
    """A worker thread may look up a request just before another thread drops it. The reply's bytes then no longer count
    against the quota, and the replies to a tenant that does not read would pile up in memory."""
    request = stream.request(1, 1)
    stream.table.forget(1)
    stream.outbox.put_reply(request, torch.zeros(1, REPLY_COLS, dtype=torch.int32))
    assert request.reply is None
    assert (stream.outbox.num_waiting, stream.num_notices) == (0, 0)
    assert stream.usage.total().requests["decode"] == 0


def test_what_is_forgotten_half_sent_stops_there(stream: Stream) -> None:
    stream.answer(1, 3 * CHUNK_ROWS)
    assert stream.take()[0].offset == 0
    stream.table.forget(1)
    assert stream.taken() == []
    assert stream.outbox.is_empty
    assert stream.usage.total().bytes_down == 0  # the provider dropped it, so the tenant must not pay for it


@pytest.mark.parametrize("give_up", ["cancel", "end of the stream"])
@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_what_the_tenant_gives_up_counts_once_a_chunk_has_gone_out(
    stream: Stream, num_chunks: int, give_up: str
) -> None:
    """Otherwise a tenant could read all but the last chunk of each reply and owe nothing."""
    stream.answer(1, 3 * CHUNK_ROWS)
    for _ in range(num_chunks):
        stream.take()
    for _ in range(2):
        if give_up == "cancel":
            stream.table.forget(1, by_tenant=True)
        else:
            stream.table.close()
    assert stream.taken() == []
    total, is_counted = stream.usage.total(), bool(num_chunks)
    assert (total.requests["decode"], total.rows["decode"]) == (is_counted, is_counted * 3 * CHUNK_ROWS)
    assert total.bytes_down == is_counted * 3 * CHUNK_BYTES


def test_what_the_provider_ends_does_not_count(stream: Stream) -> None:
    stream.answer(1, 3 * CHUNK_ROWS)
    stream.take()
    stream.table.close(by_tenant=False)
    stream.table.close()  # the carrier closes the session once more
    assert stream.usage.total().requests["decode"] == 0


def test_a_complete_reply_counts_once(stream: Stream) -> None:
    stream.answer(1, 3 * CHUNK_ROWS)
    assert len(stream.taken()) == 3
    stream.table.forget(1, by_tenant=True)
    stream.table.close()
    assert stream.usage.total().requests["decode"] == 1


def test_too_many_that_wait_are_noticed(stream: Stream) -> None:
    for number in range(1, 5):
        stream.answer(number, 1)
        stream.table.forget(number)  # the request's reply is dropped, and its turn remains
        assert not stream.outbox.is_full
    stream.outbox.append(b"one more")
    assert stream.outbox.is_full
    assert stream.outbox.num_waiting == 5


def test_everything_but_append_is_noticed(stream: Stream) -> None:
    stream.outbox.append(b"frame")
    assert stream.num_notices == 0
    stream.outbox.put(b"frame")
    assert stream.num_notices == 1
    stream.answer(1, 1)
    assert stream.num_notices == 2
    stream.outbox.end_input()
    assert stream.num_notices == 3
    stream.outbox.end()
    assert stream.num_notices == 4


def test_the_end_comes_after_what_waits(stream: Stream) -> None:
    stream.outbox.put(b"last")
    stream.outbox.end()
    stream.outbox.put(b"too late")
    assert stream.outbox.next_frame() == b"last"
    assert not stream.outbox.is_over
    assert stream.outbox.next_frame() is None
    assert stream.outbox.is_over
    assert stream.outbox.next_frame() is None


def test_the_end_does_not_finish_what_is_half_sent(stream: Stream) -> None:
    stream.answer(1, 3 * CHUNK_ROWS)
    stream.take()
    stream.outbox.end()
    assert stream.outbox.next_frame() is None
    assert stream.outbox.is_over
    assert stream.outbox.num_half_sent == 0


def test_the_end_of_the_input_is_the_end_once_all_is_answered_and_sent(stream: Stream) -> None:
    request = stream.request(1, 3 * CHUNK_ROWS)
    stream.outbox.end_input()
    assert stream.outbox.next_frame() is None
    assert not stream.outbox.is_over  # the request is still in flight
    stream.outbox.put_reply(request, torch.zeros(3 * CHUNK_ROWS, REPLY_COLS, dtype=torch.int32))
    assert [offset for _, offset in stream.taken()] == [0, CHUNK_BYTES, 2 * CHUNK_BYTES]
    assert stream.outbox.is_over


def test_an_error_that_takes_a_requests_place_is_sent_before_the_end(stream: Stream) -> None:
    stream.request(1, 1)
    stream.outbox.end_input()
    stream.table.forget(1, then=lambda: stream.outbox.append(b"error"))
    assert stream.outbox.next_frame() == b"error"
    assert stream.outbox.next_frame() is None
    assert stream.outbox.is_over


def test_who_takes_no_more_gets_no_more(stream: Stream) -> None:
    stream.answer(1, 3 * CHUNK_ROWS)
    stream.take()
    stream.outbox.put(b"another")
    stream.outbox.stop_sending()
    assert stream.outbox.is_over
    assert (stream.outbox.next_frame(), stream.outbox.num_half_sent) == (None, 0)
