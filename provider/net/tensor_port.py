"""Listens at the tensor port, which carries the tenants' streams over TLS without gRPC (wire/SPEC.md, section 1).

Each connection has one thread, which reads, computes small requests, and sends. Replies that other threads computed
wake this thread. gRPC's `Stream` carries the same frames for tenants that cannot reach this port.

Guarantees: a peer without a certificate of the provider's CA fails the handshake, and the handshake has a deadline. The
number of connections is bounded. If there are too many, the oldest connection without a stream is closed to make room.
A tenant that disconnects or does not read its replies does not slow other tenants down.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from provider.net.descriptors import MOST_STREAMS
from provider.net.session import Session, error_frame
from wire.errors import ConfigurationError, MalformedFrame, VeilbaseError, WireCode
from wire.frame import FrameType
from wire.transport.busy_poll import BusyPoll
from wire.transport.message_socket import MessageSocket
from wire.transport.tls_socket import handshake

MAX_CONNECTIONS = MOST_STREAMS
"""Most connections, including connections whose handshake is not finished. Each of them occupies a thread."""
_BACKLOG = 64
_LINGER_S = 2.0
"""Longest time in seconds that a tenant may take to read the last frame before its connection is closed."""
_STOP_S = 2.0
_PAUSE_S = 0.1
_WAKE = (1).to_bytes(8, sys.byteorder)
"""Bytes that are written to wake a waiting thread. An eventfd needs eight bytes that hold a number; a pipe takes any
bytes."""
_LOGGER = logging.getLogger(__name__)
Serve = Callable[[MessageSocket], VeilbaseError | None]


@dataclass(frozen=True)
class TensorPortStatus:
    """Counts the connections of a tensor port at one time.

    Attributes:
        num_connections: number of open connections, each of which occupies a thread.
        num_guests: number of open connections without a stream, because the handshake is not finished or the peer
            was refused. If nearly all connections are guests, peers without access are flooding the port.
    """

    num_connections: int
    num_guests: int


class TensorPort:
    """Holds the bound tensor port; `start` begins to accept connections."""

    def __init__(self, host: str, port: int, most: int = MOST_STREAMS) -> None:
        """Binds the TCP port; connections then wait until `start` begins to accept them.

        Args:
            host: an address or a name of this machine.
            port: the port's number; 0 picks a free one.
            most: most open connections; fewer than `MAX_CONNECTIONS` if the process may open only a few files.

        Raises:
            ConfigurationError: the port is in use, or the address is not an address of this machine.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # As with gRPC, "::" also accepts IPv4.
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            self._listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as exc:
            raise ConfigurationError(
                f"cannot listen on {host}, port {port}, for tensors: is it in use, or not an address of this machine?"
            ) from exc
        self.port: int = self._listener.getsockname()[1]
        self._places = threading.BoundedSemaphore(min(most, MAX_CONNECTIONS))
        self._lock = threading.Lock()
        self._open: dict[socket.socket | MessageSocket, threading.Thread] = {}
        self._guests: dict[socket.socket | MessageSocket, None] = {}
        """Open connections without a stream, the oldest first; see `TensorPortStatus.num_guests`."""
        self._has_stopped = False

    def status(self) -> TensorPortStatus:
        """Returns how many connections are open; any thread may call this."""
        with self._lock:
            # Threads are counted, since a connection is in `_open` twice for a short time after its handshake.
            return TensorPortStatus(len({*self._open.values()}), len(self._guests))

    def start(self, context: Callable[[], ssl.SSLContext], serve: Serve) -> None:
        """Starts a thread that accepts connections to the port.

        Args:
            context: returns the newest TLS context; called at each handshake.
            serve: called for each connection in a thread of its own. When `serve` returns, the connection is
                closed; an error that it returns is sent first.
        """
        threading.Thread(target=self._accept, args=(context, serve), name="veilbase-tensors", daemon=True).start()

    def _accept(self, context: Callable[[], ssl.SSLContext], serve: Serve) -> None:
        while not self._has_stopped:
            try:
                plain, _ = self._listener.accept()
            except OSError:  # The port was stopped, or no file descriptor is left for the connection.
                time.sleep(_PAUSE_S)
                continue
            if not self._find_place():
                plain.close()
                continue
            thread = threading.Thread(
                target=self._meet, args=(plain, context, serve), name="veilbase-stream", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # The machine has no thread left.
                plain.close()
                self._places.release()
                time.sleep(_PAUSE_S)

    def _find_place(self) -> bool:
        """Reserves one of the `most` places for a new connection; returns False if no place becomes free. If the port
        is full, this closes the oldest connection without a stream, since else any peer could keep the port full."""
        if self._places.acquire(blocking=False):
            return True
        with self._lock:
            oldest = next(iter(self._guests), None)
            if oldest is None:
                return False
            del self._guests[oldest]
            _shut(oldest)
        return self._places.acquire(timeout=_PAUSE_S)

    def _note(self, connection: socket.socket | MessageSocket, is_guest: bool) -> bool:
        with self._lock:
            if not self._has_stopped:
                self._open[connection] = threading.current_thread()
                if is_guest:
                    self._guests[connection] = None
            return not self._has_stopped

    def _meet(self, plain: socket.socket, context: Callable[[], ssl.SSLContext], serve: Serve) -> None:
        connection: MessageSocket | None = None
        try:
            if not self._note(plain, is_guest=True):
                return
            connection = handshake(plain, context())
            is_welcome = self._note(connection, is_guest=False)
            self._forget(plain)
            refusal = serve(connection) if is_welcome else None
            if refusal is not None and self._note(connection, is_guest=True):
                _refuse(connection, refusal)
        except OSError:
            pass  # The handshake failed, or the peer has disconnected.
        except Exception as exc:  # noqa: BLE001 - a failed connection must not affect others
            _LOGGER.error("a connection failed: %s", type(exc).__name__)
        finally:
            self._forget(plain)
            plain.close()
            if connection is not None:
                self._forget(connection)
                connection.release()
            self._places.release()

    def _forget(self, connection: socket.socket | MessageSocket) -> None:
        with self._lock:
            self._open.pop(connection, None)
            self._guests.pop(connection, None)

    def stop(self) -> None:
        """Stops accepting, waits up to `_STOP_S` seconds for the connections' threads, and closes every connection."""
        with self._lock:
            self._has_stopped = True
            ending = dict(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # This wakes `accept`.
        self._listener.close()
        for connection in ending:
            if not isinstance(connection, MessageSocket):
                _shut(connection)
        give_up_at = time.monotonic() + _STOP_S
        for connection, thread in ending.items():
            thread.join(max(0.0, give_up_at - time.monotonic()))  # The service has already ended each stream.
            if isinstance(connection, MessageSocket):
                connection.close()


def _shut(connection: socket.socket | MessageSocket) -> None:
    """Shuts a connection down, which wakes the thread that waits for it; that thread closes the connection."""
    if isinstance(connection, MessageSocket):
        connection.close()
    else:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _refuse(connection: MessageSocket, error: VeilbaseError) -> None:
    """Sends an error about the whole stream, and ends the connection."""
    with contextlib.suppress(OSError):
        connection.send(error_frame(0, error))
        connection.finish(_LINGER_S)


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


class _Carrier:
    def __init__(self, session: Session, connection: MessageSocket, busy_poll: BusyPoll) -> None:
        self._session, self._connection, self._busy_poll = session, connection, busy_poll
        self._is_reading = True
        self._has_news = self._is_waiting = self._has_replied = False
        self._wake_end, self._waker = _wake_ends()
        self._poll = select.poll()
        self._poll.register(self._wake_end, select.POLLIN)
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
            self._connection.finish(_LINGER_S)
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
        self._poll.register(self._connection, wanted)
        # There is no busy polling while the peer must read first, which may take long, nor if the peer was sent no
        # reply, since it then does not decode.
        self._busy_poll.look(self._is_wanted, self._has_replied and not must_send and self._connection.took_little)
        self._has_replied = False
        self._is_waiting = True
        ready = dict(self._poll.poll(0 if self._has_news and not must_send else None))
        self._is_waiting = False
        self._busy_poll.woke()
        if self._wake_end in ready:
            os.read(self._wake_end, 4096)
        return ready.get(self._connection.fileno(), 0)

    def _is_wanted(self) -> object:
        return self._has_news or self._poll.poll(0)

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
