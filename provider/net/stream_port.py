"""Accepts connections that carry tenants' streams, at any kind of socket: the tensor port and the Unix socket in a
folder are both built on this.

Each connection has one thread, which reads, computes small requests, and sends. Replies that other threads computed
wake this thread.

Guarantees: the number of connections is bounded. If there are too many, the oldest connection without a stream is
closed to make room. A connection whose handshake fails costs nothing but its thread, until the handshake's deadline.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from provider.net.descriptors import MOST_STREAMS
from provider.net.outbox import error_frame
from wire.errors import MalformedFrame, VeilbaseError, WrongPeer
from wire.transport.message_socket import MessageSocket

MAX_CONNECTIONS = MOST_STREAMS
"""The most connections, including connections whose handshake is not finished. Each of them occupies a thread."""
BACKLOG = 64
"""The most connections that the kernel keeps waiting until they are accepted."""
LINGER_S = 2.0
"""The longest time in seconds that a tenant may take to read the last frame, and in which a tenant that is refused on a
Unix socket must send its first message, before its connection is closed."""
_STOP_S = 2.0
_PAUSE_S = 0.1
_LOGGER = logging.getLogger(__name__)
Greet = Callable[[socket.socket], MessageSocket]
Serve = Callable[[MessageSocket], VeilbaseError | None]


@dataclass(frozen=True)
class PortStatus:
    """Counts the connections of a port at one time.

    Attributes:
        num_connections: number of open connections, each of which occupies a thread.
        num_guests: number of open connections without a stream, because the handshake is not finished or the peer
            was refused. If nearly all connections are guests, peers without access are flooding the port.
    """

    num_connections: int
    num_guests: int


class StreamPort:
    """Holds a listening socket; `accept` begins to accept connections."""

    def __init__(self, listener: socket.socket, most: int) -> None:
        """Keeps a listening socket, on which connections wait until `accept` is called.

        Args:
            listener: the socket, which belongs to this port from now on.
            most: the largest number of open connections; `MAX_CONNECTIONS` if this is more.
        """
        self._listener = listener
        self._places = threading.BoundedSemaphore(min(most, MAX_CONNECTIONS))
        self._lock = threading.Lock()
        self._open: dict[socket.socket | MessageSocket, threading.Thread] = {}
        self._guests: dict[socket.socket | MessageSocket, None] = {}
        """Open connections without a stream, the oldest first; see `PortStatus.num_guests`."""
        self._has_stopped = False

    def status(self) -> PortStatus:
        """Returns how many connections are open; any thread may call this."""
        with self._lock:
            # Threads are counted, since a connection is in `_open` twice for a short time after its handshake.
            return PortStatus(len({*self._open.values()}), len(self._guests))

    def accept(self, greet: Greet, serve: Serve, name: str) -> None:
        """Starts a thread that accepts connections to the port.

        Args:
            greet: does the provider's part of the handshake on a new connection. If it raises, it has closed the
                connection.
            serve: called for each connection in a thread of its own. When `serve` returns, the connection is
                closed; an error that it returns is sent first.
            name: the name of the thread.
        """
        threading.Thread(target=self._accept, args=(greet, serve), name=name, daemon=True).start()

    def _accept(self, greet: Greet, serve: Serve) -> None:
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
                target=self._meet, args=(plain, greet, serve), name="veilbase-stream", daemon=True
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

    def _meet(self, plain: socket.socket, greet: Greet, serve: Serve) -> None:
        connection: MessageSocket | None = None
        try:
            if not self._note(plain, is_guest=True):
                return
            connection = greet(plain)
            is_welcome = self._note(connection, is_guest=False)
            self._forget(plain)
            refusal = serve(connection) if is_welcome else None
            if refusal is not None and self._note(connection, is_guest=True):
                self._refuse(connection, refusal)
        except (OSError, MalformedFrame):
            pass  # The handshake failed, or the peer has disconnected.
        except WrongPeer:
            # Only who holds a tenant's certificate gets here, or who passes on what such a tenant says.
            _LOGGER.warning("a connection was ended: it came from another process than the tenant's")
        except Exception as exc:  # noqa: BLE001 - a failed connection must not affect others
            _LOGGER.error("a connection failed: %s", type(exc).__name__)
        finally:
            self._forget(plain)
            plain.close()
            if connection is not None:
                self._forget(connection)
                connection.release()
            self._places.release()

    def _refuse(self, connection: MessageSocket, error: VeilbaseError) -> None:
        """Sends an error about the whole stream, and ends the connection."""
        with contextlib.suppress(OSError):
            connection.send(error_frame(0, error))
            connection.finish(LINGER_S)

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
