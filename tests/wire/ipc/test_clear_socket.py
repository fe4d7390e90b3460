"""Tests what is special about unencrypted messages over a Unix socket: which bytes cross, and how a peer ends.
tests/wire/test_message_socket.py tests what they have in common with messages over TLS."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from tests.support.raw_peers import receive
from tests.support.threads import in_thread
from tests.support.waiting import WAIT_S, end
from wire.transport import message_socket
from wire.transport.ipc.clear_socket import END_OF_MESSAGES, ClearSocket

LENGTH = struct.Struct("<I")


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, ClearSocket]]:
    """Yields a plain socket, for a peer that sends arbitrary bytes, and the `ClearSocket` at the other end."""
    near, far = socket.socketpair()
    end = ClearSocket(far, b"certificate")
    yield near, end
    near.close()
    end.release()


def test_what_crosses_is_the_length_and_the_message(raw: tuple[socket.socket, ClearSocket]) -> None:
    """The bytes sent are the message's length and the message, unencrypted. This is the control of tests that look for
    plain text in recorded bytes."""
    near, far = raw
    far.send(b"VEIL")
    assert near.recv(100) == LENGTH.pack(4) + b"VEIL"
    assert far.peer_certificate() == b"certificate"


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


def test_waiting_for_a_message_ends(raw: tuple[socket.socket, ClearSocket]) -> None:
    near, far = raw
    with pytest.raises(TimeoutError):
        far.peek(time.monotonic() + 0.01)
    near.sendall(LENGTH.pack(2) + b"ok" + LENGTH.pack(END_OF_MESSAGES))
    give_up_at = time.monotonic() + WAIT_S
    assert far.peek(give_up_at) == far.peek(give_up_at) == far.next_message() == b"ok"
    with pytest.raises(EOFError):
        far.peek(give_up_at)
