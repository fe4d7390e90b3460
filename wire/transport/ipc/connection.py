"""This module connects a tenant to a provider on the same host that listens at a socket in a folder (`provider serve
--ipc DIR`). No TCP is used: the manifest and each file of the bundle come on short connections of their own, and
requests go on one long-lived stream.

Guarantees: those of `stream_connection`. The folder, and the user at the socket's other end, are checked before
anything is sent. TLS, and a check of the process at the other end, follow before any frame (`handshake`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Iterator

import torch

from wire.errors import ConfigurationError, MalformedFrame, Unauthenticated, Unavailable, WrongPeer
from wire.gpu_window.memory import LIBRARY, Driver
from wire.limits import MAX_MANIFEST_BYTES, deadline_s
from wire.manifest import GroupInfo, Manifest, parse_manifest
from wire.transport.busy_poll import tenants_most_s
from wire.transport.connection import MessageStream
from wire.transport.identity import TlsIdentity
from wire.transport.ipc import handshake
from wire.transport.ipc.clear_socket import ClearSocket
from wire.transport.ipc.fetch import MANIFEST, fetch
from wire.transport.ipc.folder import SCHEME, check_folder, check_socket, connect, folder_of
from wire.transport.ipc.handshake import tenant_handshake
from wire.transport.ipc.window import TenantWindow, ask
from wire.transport.retry import with_jitter
from wire.transport.stream_connection import CROWDED_PAUSE_S, CROWDED_S, StreamConnection
from wire.transport.tls import IPC_ALPN, TensorStream, client_context

_MANIFEST_TIMEOUT_S = 20.0
NO_WEIGHTS_BY_IPC = (
    "weights are fetched by grpcs:// only: use that URL, or name a checkpoint of your own (verify=, --verify)"
)
_LOGGER = logging.getLogger(__name__)


class IpcConnection(StreamConnection):
    """Implements `Connection` over a socket of this host."""

    def __init__(
        self,
        url: str,
        identity: TlsIdentity | None,
        peer_uid: int | None = None,
        gpu: torch.device | None = None,
        driver: str = LIBRARY,
    ) -> None:
        """Keeps the address of the provider, and does not connect yet.

        Args:
            url: ipc:DIR.
            identity: the tenant's certificate and key.
            peer_uid: the user id that the provider must have; None takes that of the folder's owner.
            gpu: the GPU on which masked rows may lie in memory that the provider shares, if it computes there too; None
                sends all rows by the socket.
            driver: the file of the CUDA driver, which is loaded for `gpu` alone; tests name a stand-in.

        Raises:
            ConfigurationError: there is no identity, or the URL names no folder.
        """
        if identity is None:
            raise ConfigurationError("an ipc: URL needs an identity, the folder that `provider enroll` made")
        self._folder = folder_of(url)
        super().__init__(f"{SCHEME}{self._folder}")
        self._identity, self._peer_uid = identity, peer_uid
        self._gpu, self._library = gpu, driver
        self._window: TenantWindow | None = None

    @property
    def carrier(self) -> str | None:
        """Returns "ipc" or "ipc and a window on the GPU" once there is a stream; see `StreamConnection.carrier`."""
        if self._stream is None:
            return None
        window = self._window
        return "ipc" if window is None or window.is_lost else "ipc and a window on the GPU"

    def _fetch_manifest(self) -> Manifest:
        return parse_manifest(b"".join(self._fetch(MANIFEST, MAX_MANIFEST_BYTES, _MANIFEST_TIMEOUT_S)))

    def fetch(self, file_name: str) -> Iterator[bytes]:
        """Yields the chunks of one bundle file, never more bytes than the manifest announced. Raises ConfigurationError
        if the bundle has no such file."""
        size = self._announced_bytes(file_name)
        yield from self._fetch(file_name, size, deadline_s(size))

    def fetch_weights(self, group: GroupInfo) -> Iterator[bytes]:
        """Raises ConfigurationError: the socket of one host carries no weights."""
        raise ConfigurationError(NO_WEIGHTS_BY_IPC)

    def _fetch(self, name: str, most_bytes: int, timeout_s: float) -> Iterator[bytes]:
        self._check_usable()
        connection = self._dial()
        try:
            for chunk in fetch(connection, name, most_bytes, timeout_s):
                self.traffic.add(down=len(chunk))
                yield chunk
        finally:
            connection.release()

    def _open_raw_stream(self, begun_with: Manifest) -> MessageStream:
        connection = self._dial(tenants_most_s())
        self._window = None
        if self._gpu is not None:
            try:
                self._window = ask(connection, Driver(self._gpu.index or 0, self._library), self._gpu)
            except BaseException as exc:
                connection.release()
                if not isinstance(exc, MalformedFrame | RuntimeError | OSError):
                    raise
                # The provider is of a release without windows, or this machine's driver cannot share memory.
                _LOGGER.warning("no window on the GPU: %s", exc)
                self._gpu = None
                return self._open_raw_stream(begun_with)
        return TensorStream(connection)

    @property
    def window(self) -> TenantWindow | None:
        return self._window

    def _take_window(self) -> TenantWindow | None:
        return self._window

    def _drop(self) -> None:
        self._window = None

    # ---- connecting -------------------------------------------------------------------------------------------------

    def _dial(self, busy_poll_s: float = 0.0) -> ClearSocket:
        """Returns a connection after its handshake. While the provider takes no more connections, this tries again.

        Raises:
            VeilbaseError: no connection could be made; nothing was sent unless TLS had begun.
        """
        context = self._context()
        give_up_at_s = time.monotonic() + CROWDED_S
        while True:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                return self._try_to_dial(context, busy_poll_s)
            if time.monotonic() >= give_up_at_s:
                raise Unavailable(
                    f"the provider in {self._folder} takes no further connection: it has as many as it takes, or hangs"
                )
            time.sleep(with_jitter(CROWDED_PAUSE_S))

    def _context(self) -> ssl.SSLContext:
        identity = self._identity
        try:
            return client_context(identity.ca_pem, identity.cert_pem, identity.key_pem, IPC_ALPN)
        except (ssl.SSLError, ValueError):  # `from None`: the original may be about the key.
            raise ConfigurationError("OpenSSL does not accept this identity: enrol again") from None

    def _try_to_dial(self, context: ssl.SSLContext, busy_poll_s: float) -> ClearSocket:
        handshake.check_system()
        if self._manifest is not None and not os.path.lexists(self._folder):
            # systemd removes a RuntimeDirectory while its service is stopped
            raise Unavailable(f"there is no folder {self._folder} at the moment: the provider went away")
        owner = check_folder(self._folder, self._peer_uid)
        path = check_socket(self._folder, owner)
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            plain.setblocking(False)  # A full backlog is then an error at once, and not a wait without an end.
            connect(plain, path, self._folder)
            peer = handshake.of_peer(plain)
            if peer.uid != owner:
                raise WrongPeer(f"expected a provider of user {owner} at {path}, got one of user {peer.uid}")
        except BaseException:
            plain.close()
            raise
        return self._shake_hands(plain, context, busy_poll_s)

    def _shake_hands(self, plain: socket.socket, context: ssl.SSLContext, busy_poll_s: float) -> ClearSocket:
        try:
            return tenant_handshake(plain, context, busy_poll_s)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            raise ConnectionError("the provider ended the handshake") from None
        except ssl.SSLError:
            raise Unauthenticated(
                "the certificates do not fit: this identity belongs to another provider, or has expired"
            ) from None
        except TimeoutError:
            raise Unavailable(f"the provider in {self._folder} did not answer the handshake in time") from None
