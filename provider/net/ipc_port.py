"""Listens at a socket in a folder, for tenants on the provider's own host (wire/SPEC.md, section 1).

Guarantees: a peer without a certificate of the provider's CA fails the handshake, as at the tensor port. So does a peer
whose statement of its process id and user id differs from what the kernel says. Only this process's user and root can
have made the files in the folder. A folder is used by one provider at a time. The socket of a provider that was killed
is replaced. Connections are bounded as `provider.net.stream_port` says.

If this module makes the folder, its mode is 0711; the socket's mode is 0666. So every user of the host can connect, as
at a TCP port, but only enrolled tenants are admitted. To keep other users from connecting, an operator can make the
folder beforehand, for example with mode 0700.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import ssl
import stat
import time
from collections.abc import Callable
from pathlib import Path

from provider.net.descriptors import MOST_STREAMS
from provider.net.stream_port import BACKLOG, LINGER_S, Serve, StreamPort
from wire.errors import ConfigurationError, MalformedFrame, VeilbaseError
from wire.transport.ipc.credentials import check_system
from wire.transport.ipc.folder import SOCKET_NAME, check_folder
from wire.transport.ipc.handshake import provider_handshake
from wire.transport.message_socket import MessageSocket

_FOLDER_MODE, _SOCKET_MODE = 0o711, 0o666
_LOCK_NAME = "veilbase.lock"


class IpcPort(StreamPort):
    """Holds the bound socket of a folder; `start` begins to accept connections."""

    def __init__(self, folder: Path, most: int = MOST_STREAMS) -> None:
        """Binds the socket; connections then wait until `start` begins to accept them.

        Args:
            folder: the folder, which is made if there is none; its parents must be there.
            most: the largest number of open connections; see `StreamPort`.

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
        super().__init__(listener, most)

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
        """Starts a thread that accepts connections; see `TensorPort.start`."""
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
