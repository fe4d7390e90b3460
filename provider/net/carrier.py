"""Carries the frames of one session over one connection of the tensor port or of this host, in the connection's own
thread, until one side ends. (provider/net/service.py carries those of gRPC streams.)

Guarantees: a tenant that disconnects or does not read its replies does not slow other tenants down. A tenant
that reads nothing for five minutes while bytes wait to be sent to it is disconnected.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading

from provider.net.ports import LINGER_S
from provider.net.session import Session
from wire.errors import MalformedFrame, WireCode
from wire.frame import FrameType
from wire.transport.busy_poll import BusyPoll
from wire.transport.message_socket import MessageSocket
from wire.transport.tls import UNREAD_TIMEOUT_MS

_WAKE = (1).to_bytes(8, sys.byteorder)
"""Bytes that are written to wake a waiting thread. An eventfd needs eight bytes that hold a number; a pipe takes any
bytes."""


def carry(session: Session, connection: MessageSocket, busy_poll: BusyPoll) -> None:
    """Carries the frames of a session over a connection, in the caller's thread, until one side ends.

    Args:
        session: a new session.
        connection: the session's new connection; the caller releases it.
        busy_poll: decides how long this connection's thread polls before it sleeps.
    """
    _Carrier(session, connection, busy_poll).run()


def _wake_ends() -> tuple[int, int]:
    """Returns two descriptors: one that a thread waits for, and one to which another thread writes `_WAKE`.

    If the system has eventfd, both are the same, since descriptors are scarce (provider/net/descriptors.py).
    """
    if hasattr(os, "eventfd"):
        both = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return both, both
    wake_end, waker = os.pipe()  # pragma: no cover - not Linux
    os.set_blocking(waker, False)  # pragma: no cover
    return wake_end, waker  # pragma: no cover


_NEWS = [(-1, 0)]
"""The result of `_look` if only a frame of another thread is ready to be sent: no descriptor and no event of `poll`."""


class _Carrier:
    def __init__(self, session: Session, connection: MessageSocket, busy_poll: BusyPoll) -> None:
        self._session, self._connection, self._busy_poll = session, connection, busy_poll
        self._is_reading = True
        self._has_news = self._is_waiting = self._has_replied = False
        self._wake_end, self._waker = _wake_ends()
        self._poll = select.poll()
        self._poll.register(self._wake_end, select.POLLIN)
        self._wanted = -1
        """The events of the connection that `_poll` is registered for; -1 before the first time."""
        self._lock = threading.Lock()
        session.notify = self._notify

    def _notify(self) -> None:
        """Tells the connection's thread that there may be a frame to send, and wakes it. Any thread may call this."""
        self._has_news = True
        if self._is_waiting:
            with self._lock, contextlib.suppress(BlockingIOError):
                if self._waker >= 0:
                    os.write(self._waker, _WAKE)

    def run(self) -> None:
        try:
            self._take(select.POLLIN)  # Data may have arrived together with the handshake.
            while self._send():
                self._take(self._wait())
            self._connection.finish(LINGER_S)
        except (OSError, EOFError):  # The tenant has disconnected.
            self._session.close()
        finally:
            self._session.stop_sending()
            self._session.notify = lambda: None  # This breaks a cycle of references.
            with self._lock:
                for one in {self._waker, self._wake_end}:
                    os.close(one)
                self._waker = -1

    def _send(self) -> bool:
        """Sends frames until none is ready or the connection is full; returns False if no frame will ever follow."""
        self._has_news = False  # This is cleared first, so that a frame which is added from here on sets it again.
        while not self._connection.has_unsent:
            message = self._session.next_frame()
            if message is None:
                return not self._session.is_over
            self._connection.send(message)
            self._has_replied |= message[0] == FrameType.REPLY
        return True

    def _wait(self) -> int:
        """Waits until the connection is ready or there is a frame to send; returns the connection's poll events."""
        must_send = self._connection.has_unsent
        wanted = (select.POLLIN if self._is_reading else 0) | (select.POLLOUT if must_send else 0)
        if wanted != self._wanted:
            self._poll.register(self._connection, wanted)
            self._wanted = wanted
        # There is no busy polling while the peer must read first, which may take long, nor if the peer was sent no
        # reply, since it then does not decode.
        is_likely = self._has_replied and not must_send and self._connection.took_little
        self._has_replied = False
        ready = self._busy_poll.look(self._look, is_likely)
        if not ready:
            self._is_waiting = True
            ready = self._poll.poll(0 if self._has_news and not must_send else self._most_ms(must_send))
            self._is_waiting = False
        self._busy_poll.woke()
        events = 0
        for descriptor, found in ready:
            if descriptor == self._wake_end:
                os.read(descriptor, 4096)
            else:
                events = found
        return events

    def _most_ms(self, must_send: bool) -> float | None:
        """Returns for how many milliseconds to wait at most; None if there is no limit.

        There is a limit only if bytes wait to be sent (`must_send`): it is how long a tenant may still read nothing.
        TCP has such a limit of its own; a Unix socket has none. Raises ConnectionError if that time is over.
        """
        if not must_send:
            return None
        left_ms = UNREAD_TIMEOUT_MS - 1000 * self._connection.blocked_s()
        if left_ms <= 0:
            raise ConnectionError("the tenant does not read")
        return left_ms

    def _look(self) -> list[tuple[int, int]] | None:
        """Returns the descriptors that are ready now, with their events; otherwise `_NEWS` if there may be a frame to
        send, and None if there is not."""
        return self._poll.poll(0) or (_NEWS if self._has_news else None)

    def _take(self, events: int) -> None:
        if events & select.POLLOUT:
            self._connection.flush()
        if not events & ~select.POLLOUT:
            return
        if not self._is_reading:
            raise ConnectionError("the peer is gone")
        try:
            self._connection.receive()
        except EOFError:
            self._hand_in()
            self._is_reading = False
            self._session.end_input()
        except MalformedFrame:
            self._hand_in()
            self._is_reading = False
            self._session.end(WireCode.MALFORMED)
        else:
            self._hand_in()

    def _hand_in(self) -> None:
        while self._is_reading and (message := self._connection.next_message()) is not None:
            self._is_reading = self._session.receive(message)
            self._send()
