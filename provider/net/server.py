"""Binds a provider's ports, keeps the server's certificate, and starts and stops the service behind the ports."""

from __future__ import annotations

import contextlib
import logging
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from provider.engine.profile import make_scheduler
from provider.engine.replica import Here
from provider.identity.authority import StateDir, issue_server_certificate
from provider.identity.front import FrontIdentity
from provider.identity.revocations import RevocationList
from provider.model.served_model import ServedModel
from provider.net.admission import Admission
from provider.net.descriptors import MOST_RPC_CONNECTIONS, file_limit, shares
from provider.net.ports import IpcPort, TensorPort
from provider.net.service import MAX_THREADS, ProviderService
from provider.net.windows import Windows
from provider.operations.logs import RefusalLog
from provider.operations.usage import UsageBook
from provider.schedule.fairness import Policy
from provider.schedule.scheduler import Scheduler
from provider.shards.router import Shard
from wire.errors import ConfigurationError, VeilbaseError
from wire.limits import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, MAX_FRAME_BYTES
from wire.transport.busy_poll import MOST_S
from wire.transport.tls import IPC_ALPN, server_context

_STOP_GRACE_S = 2.0
_TRY_AGAIN_S = 60.0
_RENEW_S = 30 * 86_400.0
"""The age of the server's certificate, in seconds, from which the next handshake gets a new certificate. A certificate
is valid for 397 days."""
_HANDSHAKE_MS = 3000
"""The milliseconds for the TLS handshake and HTTP/2's first frame. These take one round trip, so the time is enough for
a slow link and a lost packet. The time is short, so that connections of peers that send nothing are soon closed."""
_LOGGER = logging.getLogger(__name__)


def server_options(most_connections: int = MOST_RPC_CONNECTIONS) -> list[tuple[str, Any]]:
    """Returns gRPC's options for the server: limits on messages and connections, keepalive, and one process per port.

    Args:
        most_connections: the largest number of open connections; every further connection is closed at once.
    """
    return [
        # Any peer can connect and stay silent. Without the first option, silent connections would stay for two minutes
        # and keep tenants out. Without the second, they could take every file descriptor of the process.
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", most_connections),
        ("grpc.max_send_message_length", MAX_FRAME_BYTES),
        ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Tenants ping every 20 s; by default, gRPC counts this as abuse and closes the connection.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_retries", 0),
    ]


class Server:
    """Holds the bound ports and, after `start`, the service behind the ports."""

    def __init__(
        self,
        host: str,
        port: int,
        state: StateDir | FrontIdentity | None,
        names: Sequence[str] = (),
        tensor_port: int | None = 0,
        ipc: Path | None = None,
    ) -> None:
        """Binds the ports before a model is loaded, so that the operator learns at once if a port is in use.

        Args:
            host: the address to bind; with TLS also a name in the server's certificate.
            port: the number of the gRPC port; 0 picks a free one.
            state: the state directory with the CA and the registry, or what takes its place without a CA's key; None
                serves without TLS and without a tensor port.
            names: further names for the certificate.
            tensor_port: the number of the tensor port; 0 picks a free one. With None there is no tensor port, and
                streams use gRPC.
            ipc: the folder of a socket for tenants on this host; None makes no such socket. It needs `state`.

        Raises:
            ConfigurationError: a port or the folder is in use, the address is not an address of this machine, or the
                folder cannot be used.
        """
        self._state, self._refusals = state, RefusalLog()
        self._service: ProviderService | None = None
        self._certificates: _Certificates | None = None
        threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="veilbase-rpc")
        num_ports = 0 if state is None else (tensor_port is not None) + (ipc is not None)
        share = shares(file_limit(), num_ports)
        options = server_options(share.rpc_connections)
        self._server = grpc.server(threads, options=options, maximum_concurrent_rpcs=MAX_THREADS)
        self.port = self._bind(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", host, names)
        has_tensor_port = self._certificates is not None and tensor_port is not None
        self._tensors = TensorPort(host, tensor_port or 0, share.streams, self._refusals) if has_tensor_port else None
        self._ipc = None if ipc is None or state is None else IpcPort(ipc, share.streams, self._refusals)

    @property
    def tensors(self) -> TensorPort | None:
        """Returns the tensor port, which counts its connections, or None if there is none."""
        return self._tensors

    @property
    def ipc(self) -> IpcPort | None:
        """Returns the port for tenants on this host, or None if there is none."""
        return self._ipc

    @property
    def tensor_port(self) -> int | None:
        """Returns the number of the tensor port, or None if there is none."""
        return None if self._tensors is None else self._tensors.port

    def _bind(self, address: str, host: str, names: Sequence[str]) -> int:
        bound = 0
        with contextlib.suppress(RuntimeError):
            if self._state is None:
                bound = self._server.add_insecure_port(address)
            else:
                self._certificates = _Certificates(self._state, host, names)
                bound = self._server.add_secure_port(address, self._certificates.credentials())
        if not bound:
            raise ConfigurationError(f"cannot listen on {address}: is it in use, or not an address of this machine?")
        return bound

    def start(
        self,
        model: ServedModel,
        shards: Sequence[Shard] | None = None,
        admission: Admission | None = None,
        usage: UsageBook | None = None,
        busy_poll_s: float = MOST_S,
        windows: Windows | None = None,
    ) -> ProviderService:
        """Starts the service behind the ports.

        Args:
            model: the model that is served.
            shards: the shards that compute; None makes one shard in this process, which measures no products beforehand
                and has the default scheduling policy.
            admission: the tenants' quotas; None means that the operator sets no limits.
            usage: counts and saves the tenants' usage; None saves no usage.
            busy_poll_s: for how many seconds a stream's thread polls for the next request before it sleeps; see
                `wire.transport.busy_poll`.
            windows: makes memory of the device that tenants on this host share; None shares none.

        Returns:
            The service, whose counts the caller may read.
        """
        if shards is None:
            shards = [whole(model, make_scheduler(model.served, Policy(), profiled=False))]
        revocations = None if self._state is None else _revocations(self._state)
        service = ProviderService(
            model, revocations, shards, admission or Admission(), usage or UsageBook(), self.tensor_port, busy_poll_s,
            windows, self._refusals,
        )  # fmt: skip
        self._service = service
        if self._tensors is not None and self._certificates is not None:
            self._tensors.start(self._certificates.tls_context, service.serve)
        if self._ipc is not None and self._certificates is not None:
            self._ipc.start(self._certificates.ipc_context, service.serve_ipc)
        self._server.add_generic_rpc_handlers((service.handler(),))
        self._server.start()
        return service

    def renew_certificate(self) -> None:
        """Makes the next handshake use a new certificate; open connections keep the old one."""
        if self._certificates is not None:
            self._certificates.renew()

    def stop(self, drain_s: float = 0.0) -> None:
        """Ends every call, and waits until all calls have ended.

        Args:
            drain_s: the most seconds to wait for requests in flight before the calls are ended; new requests are
                refused meanwhile. With 0, the calls are ended at once.
        """
        if self._service is not None:
            if drain_s > 0 and not self._service.drain(drain_s):
                left = self._service.status().num_unanswered
                _LOGGER.warning(
                    "requests of %d streams were not answered within the %.0f s of the drain", left, drain_s
                )
            self._service.close()
        ending = self._server.stop(_STOP_GRACE_S)
        for port in (self._tensors, self._ipc):
            if port is not None:
                port.stop()
        ending.wait()


def _revocations(state: StateDir | FrontIdentity) -> RevocationList:
    if isinstance(state, FrontIdentity):
        return RevocationList(state, read=state.read_registry)
    return RevocationList(state)


def whole(model: ServedModel, scheduler: Scheduler) -> Shard:
    """Returns a shard that holds all groups and computes in this process."""
    here = Here(model.compute, model.compute_together, model.can_share, model.row_product)
    return Shard(range(len(model.manifest().groups)), [here], scheduler)


class _Certificates:
    """Holds the server's certificate, and replaces the certificate before it expires and after `renew`."""

    def __init__(self, state: StateDir | FrontIdentity, host: str, names: Sequence[str]) -> None:
        """Issues or reads the server's first certificate."""
        self._state, self._host, self._names = state, host, names
        self._lock = threading.Lock()
        self._is_stale = self._has_failed = False
        self._tried_at, self._number = time.monotonic(), 0
        self._make()
        self._given = self._number

    def _make(self) -> None:
        if isinstance(self._state, FrontIdentity):
            self._material = self._state.server_material()
        else:
            self._material = issue_server_certificate(self._state, self._host, self._names)
        key, chain, ca = self._material
        self._context = server_context(ca, chain, key)
        self._ipc_context = server_context(ca, chain, key, IPC_ALPN)
        self._made_at, self._is_stale = time.monotonic(), False
        self._number += 1

    def renew(self) -> None:
        """Makes the next handshake use a new certificate: one that is issued then, or is read from its file again."""
        self._is_stale = True

    def credentials(self) -> grpc.ServerCredentials:
        """Returns the credentials for gRPC, which calls `_fetch` at every handshake."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(), self._fetch, require_client_authentication=True
        )

    def _configuration(self) -> Any:
        key, chain, ca = self._material
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=ca)

    def _fetch(self) -> Any:
        """Returns gRPC's configuration with the newest certificate, or None if gRPC already has it."""
        with self._lock:
            self._look()
            if self._given == self._number:
                return None
            self._given = self._number
            return self._configuration()

    def tls_context(self) -> ssl.SSLContext:
        """Returns the TLS context with the newest certificate; the tensor port calls this at each handshake."""
        with self._lock:
            self._look()
            return self._context

    def ipc_context(self) -> ssl.SSLContext:
        """Returns the TLS context of handshakes on this host, with the newest certificate."""
        with self._lock:
            self._look()
            return self._ipc_context

    def _look(self) -> None:
        now = time.monotonic()
        if not self._is_stale and now - self._made_at < _RENEW_S:
            return
        if self._has_failed and now - self._tried_at < _TRY_AGAIN_S:
            return  # Handshakes, which any peer can begin, must not fill the log.
        self._tried_at, self._has_failed = now, False
        try:
            self._make()
        except (VeilbaseError, OSError) as exc:
            _LOGGER.error("the certificate could not be renewed: %s", type(exc).__name__)
            self._has_failed = True
