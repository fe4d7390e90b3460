"""Accepts the connections that carry tenants' streams, at the tensor port and at a Unix socket in a folder
(wire/SPEC.md, section 1).

`TensorPort` carries streams over TLS without gRPC; gRPC's `Stream` carries the same frames for tenants that cannot
reach this port. `IpcPort` is for tenants on the provider's own host. Both are a `StreamPort`: each connection has one
thread, which reads, computes small requests, and sends. Replies that other threads computed wake this thread.

If `IpcPort` makes the folder, its mode is 0711; the socket's mode is 0666. So every user of the host can connect, as at
a TCP port, but only enrolled tenants are admitted. To keep other users from connecting, an operator can make the folder
beforehand, for example with mode 0700.

Guarantees:
- the number of connections of a port is bounded. If there are too many, the oldest connection without a stream is
  closed to make room;
- a peer without a certificate of the provider's CA fails the handshake, and the handshake has a deadline. A connection
  whose handshake fails costs nothing but its thread, until this deadline;
- at the Unix socket, a peer whose statement of its process id and user id differs from what the kernel says fails the
  handshake, too;
- only this process's user and root can have made the files in the folder. A folder is used by one provider at a time.
  The socket of a provider that was killed is replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from provider.net.descriptors import MOST_STREAMS
from provider.net.requests import error_frame
from provider.operations.logs import RefusalLog
from wire.errors import ConfigurationError, MalformedFrame, VeilbaseError, WrongPeer
from wire.transport.ipc.folder import SOCKET_NAME, check_folder
from wire.transport.ipc.handshake import check_system, provider_handshake
from wire.transport.message_socket import MessageSocket
from wire.transport.tls import handshake

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

    def __init__(self, listener: socket.socket, most: int, refusals: RefusalLog | None = None) -> None:
        """Keeps a listening socket, on which connections wait until `accept` is called.

        Args:
            listener: the socket, which belongs to this port from now on.
            most: the largest number of open connections; `MAX_CONNECTIONS` if this is more.
            refusals: the log of refused connections; None makes a new one.
        """
        self._listener, self._refusals = listener, refusals or RefusalLog()
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
                if not self._has_stopped:
                    self._refusals.add(None, "no file descriptor is left for a connection")
                time.sleep(_PAUSE_S)
                continue
            if not self._find_place():
                self._refusals.add(None, "the port has no place left for a connection")
                plain.close()
                continue
            thread = threading.Thread(
                target=self._meet, args=(plain, greet, serve), name="veilbase-stream", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # The machine has no thread left.
                self._refusals.add(None, "the machine has no thread left for a connection")
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
        self._refusals.add(None, "its connection had no stream yet, and made room for another")
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
        except ssl.SSLEOFError:
            pass  # The peer has hung up, as a load balancer does that only looks whether the port is open.
        except ssl.SSLError as exc:
            if connection is None:
                self._refusals.add(None, _why_no_handshake(exc))
        except (OSError, MalformedFrame):
            pass  # The peer has disconnected, or was silent for too long.
        except WrongPeer:
            # Only who holds a tenant's certificate gets here, or who passes on what such a tenant says.
            self._refusals.add(None, "its connection came from another process than the tenant's")
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


_EXPIRED, _NOT_YET_VALID = 10, 9
"""Numbers of OpenSSL's errors about a certificate: X509_V_ERR_CERT_HAS_EXPIRED and X509_V_ERR_CERT_NOT_YET_VALID."""


def _why_no_handshake(error: ssl.SSLError) -> str:
    """Returns for the log why TLS refused a peer: one of a few fixed texts, since OpenSSL's own may quote the peer."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            return "its certificate has expired (TLS)"
        if error.verify_code == _NOT_YET_VALID:
            return "its certificate is not valid yet: do the clocks differ? (TLS)"
        return "its certificate is not of this provider's authority (TLS)"
    if getattr(error, "reason", None) == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has no certificate (TLS)"
    return "it does not speak TLS 1.3 with this protocol (TLS)"


def _shut(connection: socket.socket | MessageSocket) -> None:
    """Shuts a connection down, which wakes the thread that waits for it; that thread closes the connection."""
    if isinstance(connection, MessageSocket):
        connection.close()
    else:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class TensorPort(StreamPort):
    """Holds the bound tensor port; `start` begins to accept connections."""

    def __init__(
        self, host: str, port: int, most: int = MOST_STREAMS, refusals: RefusalLog | None = None
    ) -> None:  # fmt: skip
        """Binds the TCP port; connections then wait until `start` begins to accept them.

        Args:
            host: an address or a name of this machine.
            port: the port's number; 0 picks a free one.
            most: the largest number of open connections; fewer than `MAX_CONNECTIONS` if the process may open only a
                few files.
            refusals: the log of refused connections; None makes a new one.

        Raises:
            ConfigurationError: the port is in use, or the address is not an address of this machine.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # As with gRPC, "::" also accepts IPv4.
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            listener = socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except OSError as exc:
            raise ConfigurationError(
                f"cannot listen on {host}, port {port}, for tensors: is it in use, or not an address of this machine?"
            ) from exc
        super().__init__(listener, most, refusals)
        self.port: int = listener.getsockname()[1]

    def start(self, context: Callable[[], ssl.SSLContext], serve: Serve) -> None:
        """Starts a thread that accepts connections to the port.

        Args:
            context: returns the newest TLS context; called at each handshake.
            serve: see `StreamPort.accept`.
        """
        self.accept(lambda plain: handshake(plain, context()), serve, "veilbase-tensors")


_FOLDER_MODE, _SOCKET_MODE = 0o711, 0o666
_LOCK_NAME = "veilbase.lock"


class IpcPort(StreamPort):
    """Holds the bound socket of a folder; `start` begins to accept connections."""

    def __init__(self, folder: Path, most: int = MOST_STREAMS, refusals: RefusalLog | None = None) -> None:
        """Binds the socket; connections then wait until `start` begins to accept them.

        Args:
            folder: the folder, which is made if there is none; its parents must be there.
            most, refusals: see `StreamPort`.

        Raises:
            ConfigurationError: the system cannot tell which process connects, others can write to the folder or a
                parent, another provider uses the folder, or the socket cannot be made.
        """
        check_system()
        self.folder = Path(os.path.abspath(folder))
        try:
            self._make_folder()
            check_folder(self.folder, os.geteuid())
            self._lock_fd = self._take_lock()
        except OSError as exc:
            raise ConfigurationError(f"cannot make a socket in {self.folder}: {exc.strerror}") from exc
        try:
            listener = self._listen()
        except OSError as exc:
            os.close(self._lock_fd)
            raise ConfigurationError(f"cannot listen in {self.folder}: {exc.strerror}") from exc
        super().__init__(listener, most, refusals)

    def _make_folder(self) -> None:
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(0o700)
            self.folder.chmod(_FOLDER_MODE)  # `mkdir` alone would apply the umask.

    def _take_lock(self) -> int:
        """Locks a file in the folder and returns the file's descriptor. The kernel unlocks the file when this process
        ends, even if the process is killed."""
        fd = os.open(self.folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(fd)
            raise ConfigurationError(f"another provider serves in {self.folder}: name another folder") from exc
        return fd

    def _listen(self) -> socket.socket:
        path = self.folder / SOCKET_NAME
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise FileExistsError(None, f"{SOCKET_NAME} in it is no socket")
            path.unlink()  # It is left from a provider that ended, since this process has the lock.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(_SOCKET_MODE)  # Nobody can connect before `listen`.
            listener.listen(BACKLOG)
            self._inode = path.lstat().st_ino
        except BaseException:
            listener.close()
            raise
        return listener

    def start(self, context: Callable[[], ssl.SSLContext], serve: Serve) -> None:
        self.accept(lambda plain: provider_handshake(plain, context()), serve, "veilbase-ipc")

    def _refuse(self, connection: MessageSocket, error: VeilbaseError) -> None:
        # Until the tenant has sent a message, it may not have read the end of what is encrypted.
        with contextlib.suppress(OSError, EOFError, MalformedFrame):
            connection.peek(time.monotonic() + LINGER_S)
            super()._refuse(connection, error)

    def stop(self) -> None:
        """Stops accepting, closes every connection, removes the socket and unlocks the folder; see
        `StreamPort.stop`."""
        super().stop()
        path = self.folder / SOCKET_NAME
        with contextlib.suppress(OSError):
            if self._lock_fd >= 0 and path.lstat().st_ino == self._inode:
                path.unlink()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
