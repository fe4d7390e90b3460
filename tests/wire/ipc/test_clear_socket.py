"""Tests unencrypted messages over a Unix socket: they arrive whole and in order, however they are cut. Also tests ends
and floods."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.threads import in_child
from tests.support.waiting import WAIT_S, end
from wire.errors import ForkedConnection, MalformedFrame
from wire.limits import MAX_FRAME_BYTES
from wire.transport import message_socket
from wire.transport.ipc.clear_socket import END_OF_MESSAGES, ClearSocket

LENGTH = struct.Struct("<I")
SMALL_BUFFER = 1 << 15
SIZES = [0, 1, SMALL_BUFFER - 4, SMALL_BUFFER - 3, SMALL_BUFFER + 1, 1 << 18, MAX_FRAME_BYTES]


@pytest.fixture
def ends() -> Iterator[tuple[ClearSocket, ClearSocket]]:
    near, far = (ClearSocket(plain, b"") for plain in socket.socketpair())
    yield near, far
    near.release()
    far.release()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, ClearSocket]]:
    """Yields a plain socket, for a peer that sends arbitrary bytes, and the `ClearSocket` at the other end."""
    near, far = socket.socketpair()
    end = ClearSocket(far, b"certificate")
    yield near, end
    near.close()
    end.release()


def receive(connection: ClearSocket) -> bytes:
    while (message := connection.next_message()) is None:
        try:
            connection.wait()
        except EOFError:  # it may have come with the last message
            if (message := connection.next_message()) is None:
                raise
            break
    return bytes(message)


def send_all(connection: ClearSocket, *messages: bytes) -> None:
    for message in messages:
        connection.send(message)
        while connection.has_unsent:
            connection.wait_to_send(0.1)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("size", SIZES)
def test_a_message_arrives_as_it_was_both_ways(ends: tuple[ClearSocket, ClearSocket], size: int) -> None:
    message = os.urandom(size)
    for source, sink in (ends, ends[::-1]):
        sender = in_thread(lambda source=source: send_all(source, message, b"after"))
        assert receive(sink) == message
        assert receive(sink) == b"after"
        end(sender)


def test_what_crosses_is_the_length_and_the_message(raw: tuple[socket.socket, ClearSocket]) -> None:
    """The bytes sent are the message's length and the message, unencrypted. This is the control of tests that look for
    plain text in recorded bytes."""
    near, far = raw
    far.send(b"VEIL")
    assert near.recv(100) == LENGTH.pack(4) + b"VEIL"
    assert far.peer_certificate() == b"certificate"


@pytest.mark.parametrize("size", [0, 1, 9])
def test_a_message_cut_at_every_byte(raw: tuple[socket.socket, ClearSocket], size: int) -> None:
    near, far = raw
    message = os.urandom(size)
    plain = 2 * (LENGTH.pack(size) + message)
    for cut in range(len(plain) + 1):
        near.sendall(plain[:cut])
        far.receive()
        near.sendall(plain[cut:])
        assert [receive(far), receive(far)] == [message, message]


def test_many_small_messages_at_once(raw: tuple[socket.socket, ClearSocket]) -> None:
    near, far = raw
    messages = [bytes([number % 256]) * (number % 7) for number in range(2000)]
    near.sendall(b"".join(LENGTH.pack(len(one)) + one for one in messages))
    assert [receive(far) for _ in messages] == messages


def test_a_large_message_is_received_into_its_own_memory(
    raw: tuple[socket.socket, ClearSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[memoryview] = []

    def unwritten(size: int) -> memoryview:
        made.append(memoryview(bytearray(size)))
        return made[-1]

    monkeypatch.setattr(message_socket, "unwritten", unwritten)
    near, far = raw
    body = os.urandom(1 << 20)
    sender = in_thread(lambda: near.sendall(LENGTH.pack(len(body)) + body))
    while (message := far.next_message()) is None:
        far.wait()
    assert message is made[0]
    assert message == body
    end(sender)


def test_a_length_above_the_limit_takes_no_memory(
    raw: tuple[socket.socket, ClearSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = raw
    monkeypatch.setattr(message_socket, "unwritten", lambda _size: pytest.fail("memory was taken"))
    near.sendall(LENGTH.pack(2) + b"ok" + LENGTH.pack(MAX_FRAME_BYTES + 1) + b"rest")
    with pytest.raises(MalformedFrame, match=str(MAX_FRAME_BYTES)):
        far.wait()
    assert far.next_message() == b"ok"
    for _ in range(2):  # and it stays so
        with pytest.raises(MalformedFrame):
            far.wait()
        assert far.next_message() is None


def test_a_peer_that_ends_in_order(ends: tuple[ClearSocket, ClearSocket]) -> None:
    near, far = ends
    send_all(near, b"last")
    near.end_sending()
    assert receive(far) == b"last"
    for _ in range(2):
        with pytest.raises(EOFError):
            receive(far)
    send_all(far, b"the other way is open")
    assert receive(near) == b"the other way is open"


def test_a_peer_that_ends_without_a_word(ends: tuple[ClearSocket, ClearSocket]) -> None:
    """If the peer is killed and so does not announce its end, reading raises an error, once all messages were
    received."""
    near, far = ends
    send_all(near, b"last")
    near.release()
    assert receive(far) == b"last"
    with pytest.raises(ConnectionError):
        receive(far)


@pytest.mark.parametrize("size", [100, 1 << 17])
def test_an_end_in_the_middle_of_a_message_is_no_message(raw: tuple[socket.socket, ClearSocket], size: int) -> None:
    near, far = raw
    near.sendall(LENGTH.pack(size) + b"half")
    near.close()
    with pytest.raises(ConnectionError):
        receive(far)
    assert far.next_message() is None


def test_what_follows_an_end_is_no_message(raw: tuple[socket.socket, ClearSocket]) -> None:
    near, far = raw
    near.sendall(LENGTH.pack(1) + b"a" + LENGTH.pack(END_OF_MESSAGES) + LENGTH.pack(1) + b"b")
    assert receive(far) == b"a"
    for _ in range(2):
        with pytest.raises(EOFError):
            receive(far)


def test_close_wakes_who_receives_the_middle_of_a_message(raw: tuple[socket.socket, ClearSocket]) -> None:
    near, far = raw
    ended: list[BaseException] = []

    def read() -> None:
        try:
            receive(far)
        except OSError as exc:
            ended.append(exc)

    near.sendall(LENGTH.pack(1 << 20) + bytes(1 << 16))
    reader = in_thread(read)
    far.close()
    end(reader)
    assert isinstance(ended[0], ConnectionError)
    for use in (lambda: far.send(b"late"), far.wait, far.flush):
        with pytest.raises(ConnectionError):
            use()


def test_waiting_for_a_message_ends(raw: tuple[socket.socket, ClearSocket]) -> None:
    near, far = raw
    with pytest.raises(TimeoutError):
        far.peek(time.monotonic() + 0.01)
    near.sendall(LENGTH.pack(2) + b"ok" + LENGTH.pack(END_OF_MESSAGES))
    give_up_at = time.monotonic() + WAIT_S
    assert far.peek(give_up_at) == far.peek(give_up_at) == far.next_message() == b"ok"
    with pytest.raises(EOFError):
        far.peek(give_up_at)


def test_a_peer_that_does_not_read_holds_up_nobody(ends: tuple[ClearSocket, ClearSocket]) -> None:
    near, far = ends
    message, count = os.urandom(1 << 20), 0
    assert near.blocked_s() == 0
    while not near.has_unsent:
        near.send(message)
        count += 1
    near.send(message)
    near.wait_to_send(0.01)
    assert near.has_unsent
    assert near.blocked_s() > 0
    got: list[bytes] = []
    reader = in_thread(lambda: got.extend(receive(far) for _ in range(count + 1)))
    while near.has_unsent:
        near.wait_to_send(WAIT_S)
    assert near.blocked_s() == 0
    end(reader)
    assert all(one == message for one in got)


def test_two_floods_against_each_other_end(ends: tuple[ClearSocket, ClearSocket]) -> None:
    message, got = os.urandom(1 << 20), ([], [])

    def both(mine: ClearSocket, into: list[bytes]) -> None:
        for _ in range(8):
            mine.send(message)
        while len(into) < 8 or mine.has_unsent:
            mine.wait()
            while (one := mine.next_message()) is not None:
                into.append(bytes(one))

    end([in_thread(lambda pair=pair: both(*pair)) for pair in zip(ends, got, strict=True)])
    assert all(one == message for into in got for one in into)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_neither_sends_nor_ends_its_parents_connection(ends: tuple[ClearSocket, ClearSocket]) -> None:
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
