"""The gRPC face of a provider: three methods and one for shards, mutual TLS, and who may call them.

Guarantees: every RPC, and every request inside a stream, is checked against the registry; messages above the frame
limit are refused by gRPC before they reach Python; the tensor path uses no protobuf and unpickles nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc

from provider.admission import Admission
from provider.core import ProviderCore
from provider.identity import Role, StateDir, issue_server_certificate, peer_identity
from provider.operations.meter import Meter
from provider.operations.usage import UsageBook
from provider.profile import make_scheduler
from provider.replica import Here
from provider.schedule.policy import Policy
from provider.schedule.quota import LOCAL_TENANT
from provider.schedule.scheduler import Scheduler
from provider.session import SWEEP_S, Session
from provider.shards.door import ShardDoor
from provider.shards.router import Shard, ShardedExecutor
from provider.stream import attach
from provider.tenants import RevocationList
from wire.errors import ConfigurationError, Unauthenticated, UnknownLayer, VeilbaseError, WireCode
from wire.limits import CHUNK_BYTES, KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, MAX_FRAME_BYTES, Limits

SERVICE_NAME = "veilbase.v1.Provider"
MAX_CALLS_PER_TENANT = 8
"""Streams and downloads of one tenant at a time. Each holds a thread, and threads are for everybody."""
_CALLS_OF_EACH = 2
"""The same while half of all threads or more are taken, so that no few dozen tenants shut others out."""
_MAX_THREADS = 256
_STOP_GRACE_S = 2.0
_DRAIN_LOOK_S = 0.02
_TRY_AGAIN_S = 60.0
_RENEW_S = 30 * 86_400.0
"""Age of the server's certificate at which the next handshake gets a new one; it would live for 397 days."""
_LOGGER = logging.getLogger(__name__)


def server_options() -> list[tuple[str, Any]]:
    """gRPC options of the server: message limits, keepalive both ways, one process per port."""
    return [
        ("grpc.max_send_message_length", MAX_FRAME_BYTES),
        ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Tenants ping every 20 s; gRPC's own default would call that abuse and hang up.
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_retries", 0),
    ]


@dataclass(frozen=True)
class Access:
    """Who calls; `refusal` is asked again on every request."""

    tenant: str
    refusal: Callable[[], WireCode | None]


class _Gate:
    """Tells who calls from the certificate that TLS has verified."""

    def __init__(self, revocations: RevocationList | None) -> None:
        """Args: revocations: None on a loopback port without TLS, where everybody is the local tenant."""
        self._revocations = revocations

    def admit(self, context: Any, role: Role = "tenant") -> Access:
        """The caller; ends the RPC where it is nobody this provider knows."""
        if self._revocations is None:
            return Access(LOCAL_TENANT, lambda: None)
        chain = context.auth_context().get("x509_pem_cert")
        try:
            peer = peer_identity(chain[0] if chain else b"", role)
        except Unauthenticated:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, f"not a {role}'s certificate")
        access = Access(peer.name, lambda: self._refusal(peer.serial))
        code = access.refusal()
        if code is WireCode.NOT_PERMITTED:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "revoked")
        if code is not None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "not enrolled")
        return access

    def _refusal(self, serial: int) -> WireCode | None:
        if self._revocations is None or self._revocations.is_enrolled(serial):
            return None
        revoked = self._revocations.is_revoked(serial)
        return WireCode.NOT_PERMITTED if revoked else WireCode.UNAUTHENTICATED


class ProviderService:
    """The methods of the gRPC service; thin, since `ProviderCore` and `Session` do the work."""

    def __init__(
        self,
        core: ProviderCore,
        revocations: RevocationList | None,
        shards: Sequence[Shard],
        admission: Admission,
        usage: UsageBook,
    ) -> None:
        """Args.

        revocations: None serves everybody as the local tenant.
        shards: of all groups; this service's, but not their replicas' ends.
        admission, usage: this service's, too.
        """
        self._core, self._admission, self.usage = core, admission, usage
        self.meter = Meter()
        self._gate = _Gate(revocations)
        self._executor = ShardedExecutor(
            shards,
            core.record,
            self.meter,
            lambda tenant, seconds: usage.of(tenant).computed(seconds),
        )
        plan = [tuple(shard.groups) for shard in shards]
        self._door = None if revocations is None else ShardDoor(core, plan, self._executor.executors)
        self._is_draining = False
        self._manifest_of = functools.lru_cache(admission.num_limits + 1)(self._make_manifest)
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._sessions: set[Session] = set()
        self._stopped = threading.Event()
        threading.Thread(target=self._sweep, name="veilbase-sweep", daemon=True).start()

    @property
    def queue_depth(self) -> int:
        """Requests that wait for the executor."""
        return len(self._executor)

    @property
    def num_replicas(self) -> list[tuple[int, int]]:
        """Per shard, replicas that can compute, and all."""
        return self._executor.num_replicas

    @property
    def num_given_up(self) -> int:
        """Shards that nobody will hold again."""
        return sum(one.is_given_up for one in self._executor.executors)

    @property
    def num_streams(self) -> int:
        """Streams that are open."""
        with self._lock:
            return len(self._sessions)

    def handler(self) -> grpc.GenericRpcHandler:
        """Raw bytes in, raw bytes out."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Manifest": grpc.unary_stream_rpc_method_handler(self._send_manifest),
                "Bundle": grpc.unary_stream_rpc_method_handler(self._send_file),
                "Stream": grpc.stream_stream_rpc_method_handler(self._serve_stream),
                "Shard": grpc.stream_stream_rpc_method_handler(self._serve_shard),
            },
        )

    def _send_manifest(self, request: bytes, context: Any) -> Iterator[bytes]:
        admission = self._admission.of(self._enter(context))
        manifest = self._manifest_of(admission.announced(self._core.manifest().limits))
        for start in range(0, len(manifest), CHUNK_BYTES):
            yield manifest[start : start + CHUNK_BYTES]

    def _make_manifest(self, limits: Limits) -> bytes:
        return self._core.manifest().model_copy(update={"limits": limits}).to_bytes()

    def _send_file(self, request: bytes, context: Any) -> Iterator[bytes]:
        self._enter(context)
        try:
            chunks = self._core.read_file(request.decode("ascii", "replace"))
        except UnknownLayer:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such file in the bundle")
        yield from chunks

    def _serve_stream(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        access = self._admit(context)
        if not self._occupy(access.tenant, context):
            # A status, not a frame: a tenant that never reads could hold this thread with a frame it does not take.
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at once")
        admission = self._admission.of(access.tenant)
        session = Session(
            access.tenant,
            self._core.manifest().limits,
            admission,
            self.usage.of(access.tenant),
            self._core.check,
            self._executor,
            access.refusal,
            context.cancel,
        )
        with self._lock:
            self._sessions.add(session)
        if not context.add_callback(lambda: self._drop(session)):
            self._drop(session)
        try:
            yield from attach(session, messages, context).carry()
        finally:
            self._drop(session)

    def _serve_shard(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        if self._door is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "shards join over TLS only")
            return
        access = self._admit(context, "shard")
        if not self._occupy(f"shard {access.tenant}", context):  # no tenant can be called so
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at once")
        yield from self._door.serve(access.tenant, messages, context, lambda: access.refusal() is not None)

    def _enter(self, context: Any) -> str:
        """The tenant that calls; ends the RPC where it may not."""
        access = self._admit(context)
        if not self._occupy(access.tenant, context):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at once")
        return access.tenant

    def _admit(self, context: Any, role: Role = "tenant") -> Access:
        access = self._gate.admit(context, role)
        if self._is_draining:
            context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down")
        return access

    def _occupy(self, tenant: str, context: Any) -> bool:
        """Counts the call until it ends, whoever ends it."""
        with self._lock:
            is_crowded = 2 * self._calls.total() >= _MAX_THREADS
            if self._calls[tenant] >= (_CALLS_OF_EACH if is_crowded else MAX_CALLS_PER_TENANT):
                return False
            self._calls[tenant] += 1
        if not context.add_callback(lambda: self._leave(tenant)):
            self._leave(tenant)
        return True

    def _leave(self, tenant: str) -> None:
        with self._lock:
            self._calls[tenant] -= 1
            if self._calls[tenant] <= 0:
                del self._calls[tenant]

    def _sweep(self) -> None:
        """Looks at every stream from outside: one that only waits for messages would not see a revocation."""
        while not self._stopped.wait(SWEEP_S):
            self._executor.look()
            if self._door is not None:
                self._door.sweep(time.monotonic())
            with self._lock:
                sessions = list(self._sessions)
            for session in sessions:
                try:
                    session.sweep(time.monotonic())
                except Exception as exc:  # noqa: BLE001 - the thread looks after every tenant and must go on
                    _LOGGER.error("a sweep of %s failed: %s", session.tenant, type(exc).__name__)

    def _drop(self, session: Session) -> None:
        session.close()
        with self._lock:
            self._sessions.discard(session)

    def drain(self, seconds: float) -> bool:
        """Refuses new work, and waits for what is in flight.

        Returns:
            Whether all of it was answered in time.
        """
        self._is_draining = True
        with self._lock:
            num_open = sum(not session.is_idle for session in self._sessions)
        _LOGGER.info("draining for up to %.0f s: %d streams have requests that are not answered", seconds, num_open)
        give_up_at = time.monotonic() + seconds
        while True:
            with self._lock:
                sessions = list(self._sessions)  # anew each time: one may have come in just before
            for session in sessions:
                session.drain()
            busy = [session for session in sessions if not session.is_idle]
            if not busy or time.monotonic() >= give_up_at:
                return not busy
            time.sleep(_DRAIN_LOOK_S)

    def close(self) -> None:
        """Tells every open stream, then ends the compute threads."""
        self._stopped.set()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.end(WireCode.UNAVAILABLE)
        self._executor.close()


class Server:
    """A bound port, which a service can be put behind."""

    def __init__(self, host: str, port: int, state: StateDir | None, names: Sequence[str] = ()) -> None:
        """Binds, before a model is loaded: a port that is taken shows at once.

        Args:
            host: address to bind; with TLS also a name in the server's certificate.
            port: 0 picks one.
            state: the CA and the registry; None serves plain text.
            names: further ones for the certificate.

        Raises:
            ConfigurationError: the port is taken, or the address is not this machine's.
        """
        self._state = state
        self._service: ProviderService | None = None
        self._certificates: _Certificates | None = None
        threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="veilbase-rpc")
        self._server = grpc.server(threads, options=server_options(), maximum_concurrent_rpcs=_MAX_THREADS)
        self.port = self._bind(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", host, names)

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
        core: ProviderCore,
        shards: Sequence[Shard] | None = None,
        admission: Admission | None = None,
        usage: UsageBook | None = None,
    ) -> ProviderService:
        """Begins to answer.

        Args:
            core: what is served.
            shards: None computes in this process, with a scheduler of the default policy, without a profile.
            admission: None limits no tenant.
            usage: None keeps no account.

        Returns:
            What answers, for who wants to watch it.
        """
        if shards is None:
            shards = [whole(core, make_scheduler(core.served, Policy(), profiled=False))]
        revocations = None if self._state is None else RevocationList(self._state)
        service = ProviderService(core, revocations, shards, admission or Admission(), usage or UsageBook())
        self._service = service
        self._server.add_generic_rpc_handlers((service.handler(),))
        self._server.start()
        return service

    def renew_certificate(self) -> None:
        """The next handshake gets a certificate made then; open connections keep theirs."""
        if self._certificates is not None:
            self._certificates.renew()

    def stop(self, drain_s: float = 0.0) -> None:
        """Ends every call and waits until they have.

        Args:
            drain_s: before that, so long, new work is refused while what is in flight is answered.
        """
        if self._service is not None:
            if drain_s > 0 and not self._service.drain(drain_s):
                _LOGGER.warning("some requests were not answered within the %.0f s of the drain", drain_s)
            self._service.close()
        self._server.stop(_STOP_GRACE_S).wait()


def whole(core: ProviderCore, scheduler: Scheduler) -> Shard:
    """All groups, computed in this process."""
    return Shard(
        range(len(core.manifest().groups)), [Here(core.compute, core.compute_together, core.can_share)], scheduler
    )


class _Certificates:
    """The server's own certificate, made anew before it runs out and when it is asked for."""

    def __init__(self, state: StateDir, host: str, names: Sequence[str]) -> None:
        self._state, self._host, self._names = state, host, names
        self._lock = threading.Lock()
        self._is_stale = self._has_failed = False
        self._made_at = self._tried_at = time.monotonic()

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(self._make(), self._fetch, require_client_authentication=True)

    def renew(self) -> None:
        self._is_stale = True

    def _make(self) -> Any:
        key, chain, ca = issue_server_certificate(self._state, self._host, self._names)
        self._made_at, self._is_stale = time.monotonic(), False
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=ca)

    def _fetch(self) -> Any:
        """Asked at every handshake; None keeps what there is."""
        with self._lock:
            now = time.monotonic()
            if not self._is_stale and now - self._made_at < _RENEW_S:
                return None
            if self._has_failed and now - self._tried_at < _TRY_AGAIN_S:
                return None  # anybody can begin a handshake: that must not fill the log
            self._tried_at, self._has_failed = now, False
            try:
                return self._make()
            except (VeilbaseError, OSError) as exc:
                _LOGGER.error("the certificate could not be renewed: %s", type(exc).__name__)
                self._has_failed = True
                return None
