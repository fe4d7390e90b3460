"""Implements what a provider does for the calls of its tenants, each with its access check: four gRPC methods (the
manifest, a file of the bundle, a group's weight, and a stream), the streams of the tensor port, and the calls of
tenants on the provider's own host.

A tenant on the provider's own host may ask for the manifest or a file in place of a stream, by its first frame
(wire/SPEC.md, section 3).

Guarantees: every call, every request inside a stream and every chunk of a weight is checked against the registry.
Messages above the frame limit are refused before they reach this code. Tensors pass through neither protobuf nor
pickle. If a tenant of this host does not read the manifest or the file that it asked for, its connection is ended after
a deadline. Only one chunk of the file at a time waits in this process's memory.
"""

from __future__ import annotations

import functools
import logging
import math
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import grpc

from provider.identity.revocations import RegistryUnreadable, RevocationList
from provider.model.served_model import ServedModel
from provider.net.admission import UNREADABLE, Access, AccessCheck, Admission, Calls
from provider.net.carrier import carry
from provider.net.ports import LINGER_S
from provider.net.session import HANDSHAKE_S, STOPPING, SWEEP_S, ServiceStatus, Session
from provider.net.windows import Given, Window, Windows
from provider.operations.logs import RefusalLog
from provider.operations.metrics import Meter
from provider.operations.usage import UsageBook
from provider.shards.router import Shard, ShardedExecutor
from wire.errors import (
    ConfigurationError,
    NotPermitted,
    ProtocolError,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    UnknownLayer,
    VeilbaseError,
    WireCode,
)
from wire.limits import CHUNK_BYTES, GROUP_BYTES, RETRY_METADATA, Limits, deadline_s
from wire.transport.busy_poll import MOST_S, BusyPoll
from wire.transport.ipc.clear_socket import ClearSocket
from wire.transport.ipc.fetch import asked_name, data_frames
from wire.transport.ipc.window import answer, asked_window
from wire.transport.message_socket import MessageSocket
from wire.usage import DAY_S


def _wanted_file(connection: MessageSocket) -> str | None:
    """Waits for a connection's first frame, and returns the name of the file that the frame asks for; "" stands for
    the manifest. Returns None if the connection is a stream; then the frame can still be received.

    Raises:
        MalformedFrame: the frame asks for a file that no bundle has, or is too long.
        EOFError, OSError: the connection ended, or nothing came in time.
    """
    return asked_name(connection.peek(time.monotonic() + HANDSHAKE_S))


def send_file(connection: MessageSocket, chunks: Iterable[bytes], total_bytes: int, linger_s: float) -> None:
    """Sends a file, and ends the connection.

    Args:
        connection: the tenant's connection.
        chunks: the file's bytes, in chunks of any size.
        total_bytes: how many bytes these are together.
        linger_s: the seconds that the tenant may take to close the connection.

    Raises:
        OSError: the tenant disconnected, or did not read everything in time.
    """
    give_up_at = time.monotonic() + deadline_s(total_bytes)
    for message in data_frames(chunks, total_bytes):
        connection.send(message)
        while connection.has_unsent:
            left = give_up_at - time.monotonic()
            if left <= 0:
                raise TimeoutError("the tenant did not read a file in time")
            connection.wait_to_send(left)
    connection.finish(linger_s)


def _carry_rpc(session: Session, messages: Iterator[bytes]) -> Iterator[bytes]:
    """Hands the received messages of a gRPC stream to a session, and yields the session's frames, until one side ends.
    A tenant that cannot reach the tensor port has such a stream. The calling thread, which is the RPC's own, sends.

    Args:
        session: a new session.
        messages: the RPC's received messages, which a new thread reads.

    Yields:
        The frames to send.
    """
    wake = threading.Event()
    session.notify = wake.set
    threading.Thread(target=_read, args=(session, messages), name="veilbase-requests", daemon=True).start()
    try:
        while not session.is_over:
            wake.wait()
            wake.clear()
            while (message := session.next_frame()) is not None:
                yield bytes(message)
    finally:
        session.stop_sending()


def _read(session: Session, messages: Iterator[bytes]) -> None:
    try:
        for message in messages:
            if not session.receive(message):
                return
        session.end_input()
    except grpc.RpcError:
        session.close()  # The tenant has disconnected.


SERVICE_NAME = "veilbase.v1.Provider"
MAX_THREADS = 256
"""The number of gRPC's threads; each open RPC occupies one. `Calls` takes the same number as the number of places for
calls at all ports together."""
_DRAIN_LOOK_S = 0.02
_DATES_S = 60.0
"""The seconds between two looks for certificates that have expired."""
_MOST_NAMES = 20
_TOO_MANY_CALLS = "it has too many calls open"
_NO_FILE = "it asked for a file that the bundle does not have"
_UNREADABLE_CALL = "its call cannot be read"
_NO_WEIGHTS = "it asked for weights, which it may not fetch (weight_bytes_per_day)"
_NO_MORE_WEIGHTS = "it asked for more weights than it may fetch in a day, or its usage cannot be read"
_NO_ROOM = "there is no room for what it asked for"
_STATUS = {
    Unauthenticated: (grpc.StatusCode.UNAUTHENTICATED, "not enrolled for this"),
    NotPermitted: (grpc.StatusCode.PERMISSION_DENIED, "revoked"),
    RegistryUnreadable: (grpc.StatusCode.UNAVAILABLE, "cannot tell who is enrolled"),
    Unavailable: (grpc.StatusCode.UNAVAILABLE, "shutting down"),
}
"""Maps a kind of refusal to the gRPC status and a fixed text, which tells the caller no details. The first kind that
matches counts."""
_LOGGER = logging.getLogger(__name__)


def _why_no_call(exc: VeilbaseError) -> str:
    """Returns the reason, in the log, why a call beside the streams is refused."""
    if isinstance(exc, UnknownLayer):
        return _NO_FILE
    return _UNREADABLE_CALL if isinstance(exc, ProtocolError) else _NO_ROOM


class ProviderService:
    """Implements the provider's network methods; `ServedModel` and `Session` do most of the work."""

    def __init__(
        self,
        model: ServedModel,
        revocations: RevocationList | None,
        shards: Sequence[Shard],
        admission: Admission,
        usage: UsageBook,
        tensor_port: int | None = None,
        busy_poll_s: float = MOST_S,
        windows: Windows | None = None,
        refusals: RefusalLog | None = None,
    ) -> None:
        """Starts the executor, and a thread that regularly checks all streams.

        Args:
            model: the model that is served.
            revocations: the registry; with None, every caller is the tenant `local`.
            shards: the shards, which hold all groups together. The service closes them; the caller ends any processes
                behind their replicas.
            admission: the tenants' quotas.
            usage: the tenants' usage.
            tensor_port: the number of the tensor port, for the manifest; the listener at this port calls `serve`.
            busy_poll_s: for how many seconds a stream's thread polls for the next request before it sleeps; see
                `wire.transport.busy_poll`.
            windows: makes memory of the device that tenants on this host share; None shares none.
            refusals: the log of refusals, which the ports share; None makes a new one.
        """
        self._windows, self._refusals = windows, refusals or RefusalLog()
        self._expired: set[str] = set()
        self.look_at_dates_at = 0.0
        self._model, self._admission, self.usage, self._tensor_port = model, admission, usage, tensor_port
        self._busy_poll_s = busy_poll_s
        self.meter = Meter()
        self._access_check, self._revocations = AccessCheck(revocations, self._refusals), revocations
        self._executor = ShardedExecutor(
            shards,
            model.record if model.is_recording else None,
            self.meter,
            lambda tenant, seconds: usage.of(tenant).computed(seconds),
        )
        self._is_draining = False
        self._manifest_of = functools.lru_cache(admission.num_limits + 1)(self._make_manifest)
        self._calls = Calls(MAX_THREADS)
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._stopped = threading.Event()
        threading.Thread(target=self._sweep, name="veilbase-sweep", daemon=True).start()

    @property
    def queue_depth(self) -> int:
        return len(self._executor)

    @property
    def num_replicas(self) -> list[tuple[int, int]]:
        """Returns two counts for each shard: the replicas that can compute now, and the replicas that are expected."""
        return self._executor.num_replicas

    @property
    def num_given_up(self) -> int:
        """Returns the number of shards that have lost all replicas for good."""
        return sum(one.is_given_up for one in self._executor.executors)

    @property
    def registry_seconds_left(self) -> float | None:
        """Returns the seconds for which a copy of the registry still admits tenants, 0 if it is too old; None if the
        registry is no copy, or cannot be read at present."""
        return None if self._revocations is None else self._revocations.seconds_left()

    @property
    def sessions(self) -> list[Session]:
        with self._lock:
            return list(self._sessions)

    def status(self) -> ServiceStatus:
        """Returns the present state of all streams: counts of streams, requests, rows, bytes and open calls."""
        sessions = self.sessions
        each, tenants = [session.status() for session in sessions], {session.tenant for session in sessions}
        return ServiceStatus(
            num_streams=len(each),
            num_tenants=len(tenants),
            num_unanswered=sum(not one.is_idle for one in each),
            num_requests=sum(one.num_requests for one in each),
            num_rows=sum(self._admission.of(tenant).in_flight().num_rows for tenant in tenants),
            held_bytes=sum(one.held_bytes for one in each),
            num_waiting=sum(one.num_waiting for one in each),
            calls=self._calls.counts(),
            is_draining=self._is_draining,
        )

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns the gRPC handler with all methods; its messages are raw bytes."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Manifest": grpc.unary_stream_rpc_method_handler(self._send_manifest),
                "Bundle": grpc.unary_stream_rpc_method_handler(self._send_file),
                "Weights": grpc.unary_stream_rpc_method_handler(self._send_weights),
                "Stream": grpc.stream_stream_rpc_method_handler(self._serve_stream),
            },
        )

    def _send_manifest(self, request: bytes, context: Any) -> Iterator[bytes]:
        manifest = self._manifest_for(self._enter(context))
        for start in range(0, len(manifest), CHUNK_BYTES):
            yield manifest[start : start + CHUNK_BYTES]

    def _manifest_for(self, tenant: str) -> bytes:
        return self._manifest_of(self._admission.of(tenant).announced(self._model.manifest().limits))

    def _make_manifest(self, limits: Limits) -> bytes:
        mine = {"limits": limits, "tensor_port": self._tensor_port}
        return self._model.manifest().model_copy(update=mine).to_bytes()

    def _send_file(self, request: bytes, context: Any) -> Iterator[bytes]:
        tenant = self._enter(context)
        try:
            chunks = self._model.read_file(request.decode("ascii", "replace"))
        except UnknownLayer:
            self._refusals.add(tenant, _NO_FILE)
            context.abort(grpc.StatusCode.NOT_FOUND, "no such file in the bundle")
        yield from chunks

    def _send_weights(self, request: bytes, context: Any) -> Iterator[bytes]:
        """Sends the weight of one group to a tenant that may fetch it, and counts each chunk as it is sent: gRPC drops
        this generator without a word if the tenant gives up. A tenant that is revoked meanwhile gets no more."""
        access = self._admit(context)
        self._occupy(access.tenant, context)
        usage = self.usage.of(access.tenant)
        for chunk in self._weights_for(access.tenant, request, context):
            self._check_still_admitted(access, context)
            usage.fetched(len(chunk))
            yield chunk

    def _check_still_admitted(self, access: Access, context: Any) -> None:
        """Ends the RPC of a caller that is no longer admitted."""
        try:
            code = access.refusal()
        except RegistryUnreadable as exc:
            self._refusals.add(access.tenant, UNREADABLE)
            self._end(exc, context)
        if code is not None:
            self._end(NotPermitted() if code is WireCode.NOT_PERMITTED else Unauthenticated(), context)

    def _weights_for(self, tenant: str, request: bytes, context: Any) -> Iterator[bytes]:
        """Returns the chunks of the weight that a tenant asks for; ends the RPC if the tenant may not have it."""
        groups, number = self._model.manifest().groups, int.from_bytes(request, "little")
        if len(request) != GROUP_BYTES or number >= len(groups):
            self._refusals.add(tenant, _UNREADABLE_CALL)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such group")
        day = int(time.time()) // DAY_S
        try:
            chunks = self._model.read_weights(number)
            self._admission.of(tenant).admit_weights(
                groups[number].weight_bytes, day, lambda: self.usage.weights_saved(tenant, day)
            )
        except (NotPermitted, UnknownLayer):
            self._refusals.add(tenant, _NO_WEIGHTS)
            context.abort(grpc.StatusCode.NOT_FOUND, "no weights for this tenant")
        except (QuotaExceeded, ConfigurationError):  # Without the usage file nobody knows what is left.
            self._refusals.add(tenant, _NO_MORE_WEIGHTS)
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "no more weights today")
        return chunks

    def _serve_stream(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        access = self._admit(context)
        # A refusal is sent as a gRPC status and not as a frame, since a tenant that reads no frames would keep this
        # thread waiting.
        self._occupy(access.tenant, context)
        session = self._open(access, context.cancel)
        if not context.add_callback(lambda: self._drop(session)):
            self._drop(session)
        try:
            yield from _carry_rpc(session, messages)
        finally:
            self._drop(session)

    def serve_ipc(self, connection: MessageSocket) -> VeilbaseError | None:
        """Serves a call of a tenant on this host until it ends: a stream, the manifest or a file of the bundle. See
        `serve`."""
        return self.serve(connection, takes_fetch=True)

    def serve(self, connection: MessageSocket, takes_fetch: bool = False) -> VeilbaseError | None:
        """Serves a stream until it ends.

        Args:
            connection: a new connection, for which TLS has verified the peer's certificate; the caller releases it.
            takes_fetch: whether the tenant may ask for the manifest or a file in place of a stream.

        Returns:
            None if the call was served, or the tenant disconnected; else the error with which the call is refused,
            which the caller must send.
        """
        cert_pem = ssl.DER_cert_to_PEM_cert(connection.peer_certificate()).encode()
        try:
            access = self._look_up(cert_pem)
            if not self._calls.take_place(access.tenant):
                self._refusals.add(access.tenant, _TOO_MANY_CALLS)
                raise QuotaExceeded("too many calls at once")
        except VeilbaseError as exc:  # What refused it has logged it.
            return exc
        try:
            return self._serve_call(access, connection, takes_fetch)
        finally:
            self._calls.leave(access.tenant)

    def _serve_call(self, access: Access, connection: MessageSocket, takes_fetch: bool) -> VeilbaseError | None:
        try:
            name = _wanted_file(connection) if takes_fetch else None
            if name is not None:
                send_file(connection, *self._file_for(access.tenant, name), LINGER_S)
                return None
            given = self._give_window(access.tenant, connection)
        except (EOFError, OSError):
            return None  # The tenant has disconnected, or was silent for too long.
        except VeilbaseError as exc:
            self._refusals.add(access.tenant, _why_no_call(exc))
            return exc
        try:
            self._carry(access, connection, given)
        finally:
            if given is not None and self._windows is not None:
                self._windows.close(given)
        return None

    def _give_window(self, tenant: str, connection: MessageSocket) -> Given | None:
        """Answers a tenant whose first message asks for a window; its stream follows. Returns the window, for the
        stream, or None. A connection that carries no descriptors has its first message left where it is."""
        if not isinstance(connection, ClearSocket):
            return None
        asked = asked_window(connection.peek(time.monotonic() + HANDSHAKE_S))
        if asked is None:
            return None
        connection.next_message()
        given = None if self._windows is None else self._windows.open(tenant, asked)
        if given is None or self._windows is None:
            answer(connection, 0, None)
            return None
        try:
            answer(connection, given.size, given.descriptor)
        except BaseException:
            self._windows.close(given)
            raise
        return given

    def _carry(self, access: Access, connection: MessageSocket, given: Given | None) -> None:
        session = self._open(access, connection.close, None if given is None else given.window)
        try:
            carry(session, connection, BusyPoll(self._busy_poll_s, self._executor.is_idle))
        finally:
            self._drop(session)

    def _file_for(self, tenant: str, name: str) -> tuple[Iterator[bytes], int]:
        """Returns the chunks of a bundle file, or of the manifest for the name "", and their number of bytes."""
        if not name:
            manifest = self._manifest_for(tenant)
            return iter((manifest,)), len(manifest)
        sizes = {file.name: file.size_bytes for file in self._model.manifest().bundle}
        return self._model.read_file(name), sizes.get(name, 0)

    def _open(self, access: Access, hang_up: Callable[[], object], window: Window | None = None) -> Session:
        session = Session(
            access.tenant,
            self._model.manifest().limits,
            self._admission.of(access.tenant),
            self.usage.of(access.tenant),
            self._model.check,
            self._executor,
            access.refusal,
            hang_up,
            window,
            self._refusals,
        )
        with self._lock:
            self._sessions.add(session)
        return session

    def _enter(self, context: Any) -> str:
        """Admits a tenant's RPC, counts it as open, and returns the tenant's name; ends a refused RPC."""
        access = self._admit(context)
        self._occupy(access.tenant, context)
        return access.tenant

    def _admit(self, context: Any) -> Access:
        """Checks the caller's certificate and returns the caller's `Access`; ends the RPC if the caller is refused."""
        chain = context.auth_context().get("x509_pem_cert")
        try:
            return self._look_up(chain[0] if chain else b"")
        except (Unauthenticated, NotPermitted, Unavailable) as exc:
            if isinstance(exc, Unavailable) and exc.retry_s > 0:
                context.set_trailing_metadata(((RETRY_METADATA, str(math.ceil(1000 * exc.retry_s))),))
            self._end(exc, context)

    def _end(self, exc: VeilbaseError, context: Any) -> NoReturn:
        """Ends an RPC with the status of `_STATUS` that stands for a refusal."""
        context.abort(*next(status for kind, status in _STATUS.items() if isinstance(exc, kind)))
        raise exc  # This is not reached: `abort` raises.

    def _look_up(self, cert_pem: bytes) -> Access:
        access = self._access_check.admit(cert_pem)
        if self._is_draining:
            self._refusals.add(access.tenant, STOPPING)
            raise Unavailable("shutting down")
        return access

    def _occupy(self, caller: str, context: Any) -> None:
        """Counts the RPC as open until either side ends it; ends the RPC at once if the caller has too many open."""
        if not self._calls.take_place(caller):
            self._refusals.add(caller, _TOO_MANY_CALLS)
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls at once")
        if not context.add_callback(lambda: self._calls.leave(caller)):
            self._calls.leave(caller)

    def _sweep(self) -> None:
        """Checks all streams regularly for revocations and deadlines, which an idle stream would not notice."""
        while not self._stopped.wait(SWEEP_S):
            self._executor.look()
            self._refusals.look()
            self.name_expired(time.monotonic())
            self._sweep_sessions()

    def _sweep_sessions(self) -> None:
        """Sweeps each stream once. This is apart from the loop, in which the last session would live on after its
        end."""
        for session in self.sessions:
            try:
                session.sweep(time.monotonic())
            except Exception as exc:  # noqa: BLE001 - the thread serves every tenant and must go on
                _LOGGER.error("a sweep of %s failed: %s", session.tenant, type(exc).__name__)

    def name_expired(self, now: float) -> None:
        """Logs each tenant whose certificate has expired, once. TLS refuses such a tenant before it has a name."""
        if self._revocations is None or now < self.look_at_dates_at:
            return
        self.look_at_dates_at = now + _DATES_S
        try:
            expired = self._revocations.expired_names()
        except RegistryUnreadable:
            return  # This has a line of its own.
        fresh = sorted(expired - self._expired)
        self._expired = expired
        if fresh:
            more = len(fresh) - _MOST_NAMES
            names = ", ".join(fresh[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
            _LOGGER.warning("refused since the certificate has expired, until they are enrolled again: %s", names)

    def _drop(self, session: Session) -> None:
        session.close()
        with self._lock:
            self._sessions.discard(session)

    def drain(self, seconds: float) -> bool:
        """Refuses new streams and requests, and waits for the requests in flight.

        Args:
            seconds: the longest time to wait.

        Returns:
            True if all requests in flight were finished in time.
        """
        self._is_draining = True
        now = self.status()
        _LOGGER.info(
            "draining for up to %.0f s: %d streams have requests that are not answered, of %d rows in all",
            seconds, now.num_unanswered, now.num_rows,
        )  # fmt: skip
        give_up_at = time.monotonic() + seconds
        while True:
            sessions = self.sessions  # A stream may have been opened just before the drain began.
            for session in sessions:
                session.drain()
            busy = [session for session in sessions if not session.is_idle]
            if not busy or time.monotonic() >= give_up_at:
                return not busy
            time.sleep(_DRAIN_LOOK_S)

    def close(self) -> None:
        """Ends every open stream with an error, and then closes the executor."""
        self._stopped.set()
        for session in self.sessions:
            session.end(WireCode.UNAVAILABLE)
        self._refusals.look(is_last=True)
        self._executor.close()
