"""Tests messages over one connected socket, unencrypted and over TLS: they arrive whole and in order, however they are
cut. Also tests ends and floods."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.identities import Authority, make_authority
from tests.support.raw_peers import raw_tenant, receive, send_all, tls_ends
from tests.support.threads import in_child, in_thread
from tests.support.waiting import WAIT_S, end
from wire.errors import ForkedConnection, MalformedFrame
from wire.limits import MAX_FRAME_BYTES
from wire.transport import message_socket
from wire.transport.ipc.clear_socket import ClearSocket
from wire.transport.message_socket import MessageSocket

LENGTH = struct.Struct("<I")
SMALL_BUFFER, RECORD = 1 << 15, 1 << 14
SIZES = [
    0, 1, RECORD - 4, RECORD - 1, RECORD, RECORD + 1, SMALL_BUFFER - 4, SMALL_BUFFER - 3, SMALL_BUFFER + 1, 1 << 18,
    MAX_FRAME_BYTES,
]  # fmt: skip
"""Sizes of messages around those of TLS records, and of the memory that small messages share."""
Ends = tuple[MessageSocket, MessageSocket]
Raw = tuple[Callable[[bytes], object], MessageSocket]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("messages"))


@pytest.fixture(params=["clear", "tls"])
def ends(request: pytest.FixtureRequest, authority: Authority) -> Iterator[Ends]:
    near: MessageSocket
    far: MessageSocket
    if request.param == "tls":
        near, far = tls_ends(authority)
    else:
        near, far = (ClearSocket(plain, b"") for plain in socket.socketpair())
    yield near, far
    near.release()
    far.release()


@pytest.fixture(params=["clear", "tls"])
def raw(request: pytest.FixtureRequest, authority: Authority) -> Iterator[Raw]:
    """Yields a function that sends arbitrary bytes, over TLS in a record of their own, and the end that gets them."""
    if request.param == "tls":
        peer, far = raw_tenant(authority)
        yield peer.send, far
        peer.plain.close()
        far.release()
    else:
        near, plain = socket.socketpair()
        clear = ClearSocket(plain, b"certificate")
        yield near.sendall, clear
        near.close()
        clear.release()


@pytest.mark.parametrize("size", SIZES)
def test_a_message_arrives_as_it_was_both_ways(ends: Ends, size: int) -> None:
    message = os.urandom(size)
    for source, sink in (ends, ends[::-1]):
        sender = in_thread(lambda source=source: send_all(source, message, b"after"))
        assert receive(sink) == message
        assert receive(sink) == b"after"
        end(sender)


def test_many_small_messages_at_once(raw: Raw) -> None:
    send, far = raw
    messages = [bytes([number % 256]) * (number % 7) for number in range(2000)]
    send(b"".join(LENGTH.pack(len(one)) + one for one in messages))
    assert [receive(far) for _ in messages] == messages


@pytest.mark.parametrize("size", [0, 1, 9])
def test_a_message_cut_at_every_byte(raw: Raw, size: int) -> None:
    send, far = raw
    message = os.urandom(size)
    plain = 2 * (LENGTH.pack(size) + message)
    for cut in range(len(plain) + 1):
        for part in filter(None, (plain[:cut], plain[cut:])):
            send(part)
            far.receive()
        assert [receive(far), receive(far)] == [message, message]


def test_a_length_above_the_limit_takes_no_memory(raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    send, far = raw
    monkeypatch.setattr(message_socket, "unwritten", lambda _size: pytest.fail("memory was taken"))
    send(LENGTH.pack(2) + b"ok" + LENGTH.pack(MAX_FRAME_BYTES + 1) + b"rest")
    with pytest.raises(MalformedFrame, match=str(MAX_FRAME_BYTES)):
        far.wait()
    assert far.next_message() == b"ok"
    assert far.next_message() is None
    for _ in range(2):  # the connection stays broken: what follows is no message
        with pytest.raises(MalformedFrame):
            far.wait()
        assert far.next_message() is None


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_a_peer_that_ends_in_order(ends: Ends) -> None:
    near, far = ends
    send_all(near, b"last")
    near.end_sending()
    assert receive(far) == b"last"
    for _ in range(2):
        with pytest.raises(EOFError):
            receive(far)
    send_all(far, b"the other way is open")
    assert receive(near) == b"the other way is open"


def test_a_peer_that_ends_without_a_word(ends: Ends) -> None:
    """If the peer is killed and so does not announce its end, reading raises an error, once all messages were
    received."""
    near, far = ends
    send_all(near, b"last")
    near.release()
    assert receive(far) == b"last"
    with pytest.raises(ConnectionError):
        receive(far)


@pytest.mark.parametrize("begun", [b"", LENGTH.pack(1 << 20) + bytes(1 << 16)], ids=["idle", "in a message"])
def test_close_wakes_who_receives(raw: Raw, begun: bytes) -> None:
    send, far = raw
    ended: list[BaseException] = []

    def read() -> None:
        try:
            receive(far)
        except OSError as exc:
            ended.append(exc)

    if begun:
        send(begun)
    reader = in_thread(read)
    far.close()
    far.close()
    end(reader)
    assert isinstance(ended[0], ConnectionError)
    for use in (lambda: far.send(b"late"), far.wait, far.flush, lambda: far.wait_to_send(0.1)):
        with pytest.raises(ConnectionError):
            use()
    far.release()
    far.release()
    far.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_neither_sends_nor_ends_its_parents_connection(ends: Ends) -> None:
    """A forked child gets an error if it uses its parent's connection. Otherwise it would continue the counters of TLS
    under the same keys as its parent."""
    near, far = ends

    def child() -> str:
        for use in (lambda: near.send(b"child's"), near.wait, near.end_sending):
            with pytest.raises(ForkedConnection):
                use()
        near.close()
        near.release()
        return "refused, closed"

    assert in_child(child) == "refused, closed"
    send_all(near, b"parent's")
    assert receive(far) == b"parent's"


# ---- slow peers -----------------------------------------------------------------------------------------------------


def test_a_peer_that_does_not_read_holds_up_nobody(ends: Ends) -> None:
    near, far = ends
    message, count = os.urandom(1 << 20), 0
    began = time.monotonic()
    assert near.blocked_s() == 0
    while not near.has_unsent:
        near.send(message)
        count += 1
    near.send(message)
    near.wait_to_send(0.01)
    assert time.monotonic() - began < WAIT_S / 2
    assert near.has_unsent
    assert near.blocked_s() > 0
    got: list[bytes] = []
    reader = in_thread(lambda: got.extend(receive(far) for _ in range(count + 1)))
    while near.has_unsent:
        near.wait_to_send(WAIT_S)
    assert near.blocked_s() == 0
    end(reader)
    assert len(got) == count + 1
    assert all(one == message for one in got)


def test_two_floods_against_each_other_end(ends: Ends) -> None:
    """Both ends send much data at the same time, and each has only one thread to send and receive. Neither may wait for
    the other to read first."""
    message, count = os.urandom(1 << 20), 24

    def both(mine: MessageSocket, got: list[bytes]) -> None:
        for _ in range(count):
            mine.send(message)
        while len(got) < count or mine.has_unsent:
            mine.wait()
            while (one := mine.next_message()) is not None:
                got.append(bytes(one))

    received: tuple[list[bytes], list[bytes]] = ([], [])
    threads = [in_thread(lambda k=k: both(ends[k], received[k])) for k in (0, 1)]
    # A thread that has everything may wait for a message that never comes. The other thread's end wakes it.
    give_up_at = time.monotonic() + 2 * WAIT_S
    while any(len(got) < count for got in received) and time.monotonic() < give_up_at:
        threading.Event().wait(0.01)
    assert [len(got) for got in received] == [count, count]
    assert all(one == message for got in received for one in got)
    for one in ends:
        one.close()
    end(threads)
