"""The tenant's end of the gRPC transport: one long-lived bidirectional stream, many requests in flight.

Guarantees: replies are matched by request id in any order; every request ends by its own deadline; a reply is checked
against what was asked before it is allocated; a forked child is refused. After a broken stream the next request opens
a new one; what was pending fails with one error and is never re-sent by itself (a re-send could reuse a mask).
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc
import torch

from wire import frame
from wire.errors import (
    ConfigurationError,
    DeadlineExceeded,
    ForkedConnection,
    LimitExceeded,
    MalformedFrame,
    NotPermitted,
    QuotaExceeded,
    TransportError,
    Unauthenticated,
    Unavailable,
    VeilbaseError,
    VersionMismatch,
    error_from_code,
)
from wire.frame import Arithmetic, Assembler, Call, Direction, FrameType, Header
from wire.limits import (
    KEEPALIVE_TIME_MS,
    KEEPALIVE_TIMEOUT_MS,
    MAX_DEADLINE_MS,
    MAX_FRAME_BYTES,
    MAX_MANIFEST_BYTES,
    Limits,
    deadline_s,
)
from wire.manifest import Manifest, parse_manifest
from wire.transport.base import Pending, Traffic

STREAM_METHOD = "/veilbase.v1.Provider/Stream"
MANIFEST_METHOD = "/veilbase.v1.Provider/Manifest"
BUNDLE_METHOD = "/veilbase.v1.Provider/Bundle"
CONNECT_TIMEOUT_S = 20.0
DEFAULT_PORT = 8443
WATCH_S = 0.5
"""How often deadlines are looked at; they are tens of seconds."""


@dataclass(frozen=True)
class TlsIdentity:
    """PEM bytes of a tenant's identity; the key never leaves this object and is not shown by repr."""

    ca_pem: bytes
    cert_pem: bytes
    key_pem: bytes

    def __repr__(self) -> str:
        """Hides the key."""
        return "TlsIdentity(...)"


def channel_options(host: str) -> list[tuple[str, Any]]:
    """gRPC options of the tenant's channel: limits on both sides, keepalive, and no proxy for loopback."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", MAX_FRAME_BYTES),
        ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 0),  # a transparent re-send is the one thing a one-time mask must never see
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if host in ("localhost", "::1") or host.startswith("127."):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def open_channel(url: str, identity: TlsIdentity | None) -> grpc.Channel:
    """A channel for `grpcs://host[:port]` with mutual TLS, or `grpc://` on loopback without it.

    Raises:
        ConfigurationError: another scheme, no host, no identity, or plain text to another machine.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORT
    except ValueError:  # a port that is no number, an open bracket
        raise ConfigurationError(f"expected grpcs://host:port, got {url!r}") from None
    if parts.scheme not in ("grpc", "grpcs") or not host:
        raise ConfigurationError(f"expected grpcs://host:port, got {url!r}")
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if parts.scheme == "grpcs":
        if identity is None:
            raise ConfigurationError("a grpcs:// URL needs identity=<folder made by `provider enroll`>")
        credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.cert_pem)
        return grpc.secure_channel(target, credentials, channel_options(host))
    if not (host in ("localhost", "::1") or host.startswith("127.")):
        raise ConfigurationError("grpc:// without TLS is for loopback only: use grpcs://")
    return grpc.insecure_channel(target, channel_options(host))


def _translate(exc: grpc.RpcError, connected: bool = False) -> VeilbaseError:
    """This side's error for a gRPC status; the peer's details are not passed on.

    Args:
        connected: the provider had accepted this identity on the same connection.
    """
    code = exc.code() if hasattr(exc, "code") else None
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return Unauthenticated("the provider does not accept this certificate: enrol again")
    if code == grpc.StatusCode.PERMISSION_DENIED:
        return NotPermitted("the provider has revoked this identity: ask its operator for a new one")
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return VersionMismatch("the provider speaks another protocol version: install matching releases")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return QuotaExceeded("the provider has too many calls open, or refused the size of one: try again later")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the provider did not answer in time")
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
        return MalformedFrame("the two ends do not understand each other: is the URL a Veilbase provider?")
    details = str(exc.details() or "") if hasattr(exc, "details") else ""
    if not connected and any(
        word in details for word in ("CERTIFICATE", "certificate", "SSL", "handshake", "Socket closed")
    ):
        # A provider that refuses the certificate closes the socket, and gRPC calls that UNAVAILABLE.
        return Unauthenticated(
            "the TLS connection was closed: this identity belongs to another provider, has expired, or is missing"
        )
    return Unavailable(
        "the provider cannot be reached or went away: check its URL and that it runs; "
        "a fine-tuning run that broke goes on from its last checkpoint when it is started again"
    )


class _Request:
    """A request on its way, and its outcome once there is one."""

    def __init__(self, owner: _Stream, request_id: int, call: Call, rows: int, cols: int, held: int) -> None:
        self.request_id = request_id
        self.call = call
        self.rows, self.cols, self.held_bytes = rows, cols, held
        self.expires_at = time.monotonic() + deadline_s(held)
        self.reply: Assembler | None = None
        self.outcome: torch.Tensor | VeilbaseError | None = None
        self.nudged: threading.Event | None = None
        self._owner = owner

    def settle(self, outcome: torch.Tensor | VeilbaseError) -> None:
        """Keeps the outcome and wakes whoever waits for it."""
        if self.outcome is None:
            self.outcome = outcome
            if self.nudged is not None:
                self.nudged.set()

    def result(self) -> torch.Tensor:
        """The reply, or this request's one error."""
        if self.outcome is None:
            self._owner.wait_for(self)
        if isinstance(self.outcome, torch.Tensor):
            return self.outcome
        raise self.outcome if self.outcome is not None else Unavailable("the connection was closed")


class _Stream:
    """One bidirectional stream: a queue of frames out; frames are read in by whoever waits for a reply.

    Whoever waits first reads for all (leader and followers): a reader thread of its own would cost every decode step a
    thread switch a call. A watchdog ends requests whose deadline has passed.
    """

    def __init__(self, channel: grpc.Channel, limits: Limits, traffic: Traffic) -> None:
        self._limits, self._traffic = limits, traffic
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._requests: dict[int, _Request] = {}
        self._state = threading.Condition()
        self._reading = threading.Lock()
        self._waiting: dict[int, _Request] = {}
        self._leader: _Request | None = None
        self._makes_room = False
        self._held_bytes = 0
        self._ids = itertools.count(1)
        self.failure: VeilbaseError | None = None
        self._ended = threading.Event()
        self._outgoing.put(frame.hello(FrameType.HELLO))
        call = channel.stream_stream(STREAM_METHOD, request_serializer=None, response_deserializer=None)
        # The handshake has a deadline of its own; gRPC has none for a stream that is meant to live long.
        self._welcome = _Request(self, 0, Call(0, Direction.FORWARD, Arithmetic.RING), 0, 0, 0)
        self._welcome.expires_at = time.monotonic() + CONNECT_TIMEOUT_S
        self._requests[0] = self._welcome
        self._call = call(iter(self._outgoing.get, None), wait_for_ready=False)
        threading.Thread(target=self._watch, name="veilbase-watchdog", daemon=True).start()

    def wait_welcome(self) -> None:
        """Waits for the handshake."""
        self._welcome.result()

    def is_usable(self) -> bool:
        """Whether a request could go out; notices a provider that went away while nobody was reading."""
        if self.failure is None and not self._call.is_active():
            self.fail(Unavailable("the provider ended the stream; the run can go on from its last checkpoint"))
        return self.failure is None

    def wait_for(self, request: _Request) -> None:
        """Returns once the request has an outcome; reads for everybody if nobody else does."""
        if self._reading.acquire(blocking=False):
            self._lead(request)
            return
        nudged = request.nudged = threading.Event()  # before `outcome` is looked at, so that `settle` sees it
        self._waiting[request.request_id] = request  # before trying again to lead: a leader who stops looks here
        try:
            while request.outcome is None:
                if self._reading.acquire(blocking=False):
                    self._lead(request)
                else:
                    nudged.wait()
                    nudged.clear()
        finally:
            self._waiting.pop(request.request_id, None)

    def _lead(self, request: _Request) -> None:
        self._leader = request
        try:
            while request.outcome is None:
                self._read_one()
        finally:
            self._stop_leading(request)

    def _stop_leading(self, request: _Request | None) -> None:
        self._leader = None
        self._reading.release()
        for other in list(self._waiting.values()):
            if other is not request and other.nudged is not None:
                other.nudged.set()  # all of them: one that has just been answered would not lead

    def _read_one(self) -> None:
        try:
            message = next(self._call)
            self._traffic.add(down=len(message))
            self._take(*frame.parse(message))
        except StopIteration:
            self.fail(Unavailable("the provider ended the stream; the run can go on from its last checkpoint"))
        except grpc.RpcError as exc:
            self.fail(_translate(exc, connected=isinstance(self._welcome.outcome, torch.Tensor)))
        except VeilbaseError as exc:
            self.fail(exc)
            self._call.cancel()
        except (KeyboardInterrupt, SystemExit):
            self.fail(Unavailable("the reading thread was interrupted"))
            self._call.cancel()
            raise
        except Exception as exc:  # noqa: BLE001 - whoever else waits must not be left waiting
            self.fail(TransportError(f"reading replies failed: {type(exc).__name__}"))
            self._call.cancel()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_S):
            now = time.monotonic()
            for request in [r for r in list(self._requests.values()) if now >= r.expires_at]:
                self._expire(request)

    def _expire(self, request: _Request) -> None:
        if self._forget(request.request_id) is None:
            return
        if request.request_id == 0:
            error = Unavailable(f"the provider did not answer the handshake within {CONNECT_TIMEOUT_S:.0f} s")
            request.settle(error)
            self.fail(error)
        else:
            request.settle(DeadlineExceeded(f"no complete answer to request {request.request_id} within its deadline"))
            self._outgoing.put(Header(FrameType.CANCEL, request.request_id).pack())
        # Looked at after `settle`, so that whoever begins to lead now sees the outcome. A reader is inside gRPC's read,
        # which has no timeout: only the end of the stream frees it.
        if self._leader is request or self._makes_room:
            self._call.cancel()

    def submit(self, call: Call, rows: torch.Tensor, reply_cols: int) -> _Request:
        """Queues the frames of one request; waits while too many bytes are in flight."""
        num_rows, cols = rows.shape
        size = num_rows * cols * frame.ITEM_BYTES
        request = self._admit(call, num_rows, reply_cols, size)
        deadline_ms = min(MAX_DEADLINE_MS, int(1000 * deadline_s(request.held_bytes)))
        header = Header(FrameType.REQUEST, request.request_id, call, num_rows, cols, 0, size, deadline_ms)
        sent = 0
        for message in frame.frames(header, frame.tensor_bytes(rows)):
            self._outgoing.put(message)
            sent += len(message)
        self._traffic.add(up=sent, calls=1)
        return request

    def _admit(self, call: Call, num_rows: int, reply_cols: int, size: int) -> _Request:
        held = size + num_rows * reply_cols * frame.ITEM_BYTES
        if held > self._limits.max_in_flight_bytes:
            raise LimitExceeded(f"a request of {held} bytes is above {self._limits.max_in_flight_bytes} in flight")
        give_up_at = time.monotonic() + deadline_s(self._limits.max_in_flight_bytes)
        while True:
            with self._state:
                if self.failure is not None:
                    raise self.failure
                if self._held_bytes + held <= self._limits.max_in_flight_bytes:
                    request = _Request(self, next(self._ids), call, num_rows, reply_cols, held)
                    self._requests[request.request_id] = request
                    self._held_bytes += held
                    return request
            if time.monotonic() >= give_up_at:
                raise DeadlineExceeded("earlier requests of this stream were not answered in time")
            self._make_room()

    def _make_room(self) -> None:
        """Reads a frame, or waits a moment for whoever is reading: a caller that only sends must read as well."""
        if self._reading.acquire(blocking=False):
            self._makes_room = True
            try:
                if self._requests:  # nothing to read, and nothing that could expire, where the last one just did
                    self._read_one()
            finally:
                self._makes_room = False
                self._stop_leading(None)
        else:
            with self._state:
                self._state.wait(0.05)

    def _forget(self, request_id: int) -> _Request | None:
        with self._state:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._held_bytes -= request.held_bytes
                self._state.notify_all()
        return request

    def _take(self, header: Header, payload: memoryview) -> None:
        if header.kind is FrameType.WELCOME:
            if bytes(payload) != frame.MAGIC or header.code != frame.PROTOCOL_VERSION:
                raise VersionMismatch(f"this tenant speaks protocol {frame.PROTOCOL_VERSION}, not {header.code}")
            self._forget(0)
            self._welcome.settle(torch.empty(0))
        elif header.kind is FrameType.ERROR:
            self._take_error(header)
        elif header.kind is FrameType.REPLY:
            self._take_reply(header, payload)
        else:
            raise MalformedFrame("the provider sent a frame that only tenants send")

    def _take_error(self, header: Header) -> None:
        error = error_from_code(header.code, header.request_id)
        if header.request_id == 0:  # about the stream, not about one request
            raise error
        request = self._forget(header.request_id)
        if request is not None:
            request.settle(error)

    def _take_reply(self, header: Header, payload: memoryview) -> None:
        request = self._requests.get(header.request_id)
        if request is None:
            return  # cancelled in the meantime
        if request.reply is None:
            size = request.rows * request.cols * frame.ITEM_BYTES
            expected = (request.call, request.rows, request.cols, size)
            if (header.call, header.rows, header.cols, header.total_bytes) != expected:
                raise MalformedFrame("a reply does not have the shape of its request")
            request.reply = Assembler(header)
        if request.reply.add(header, payload) and self._forget(header.request_id) is not None:
            request.settle(request.reply.tensor())

    def fail(self, error: VeilbaseError) -> None:
        """Ends the stream; every pending request gets `error`."""
        with self._state:
            if self.failure is None:
                self.failure = error
            pending = list(self._requests.values())
            self._requests.clear()
            self._held_bytes = 0
            self._state.notify_all()
        self._ended.set()
        self._outgoing.put(None)
        for request in pending:
            request.settle(error)

    def close(self) -> None:
        """Half-closes, then cancels."""
        self.fail(Unavailable("the connection was closed"))
        self._call.cancel()


class GrpcConnection:
    """A `Connection` over gRPC; opened at first use, so that a program may fork before it."""

    def __init__(self, url: str, identity: TlsIdentity | None = None) -> None:
        """Args: url: grpcs://host:port; identity: from a folder made by `provider enroll`."""
        self.url = url
        self.traffic = Traffic()
        self._identity = identity
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stream: _Stream | None = None
        self._manifest: Manifest | None = None
        self._pid = os.getpid()
        self._closed = False

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedConnection(
                "this connection was opened before a fork: make a new TenantClient in the child, "
                "or start workers with the spawn method (dataloader_num_workers=0)"
            )
        if self._closed:
            raise Unavailable("the connection was closed")

    def _open_channel(self) -> grpc.Channel:
        self._check_usable()
        if self._channel is None:
            self._channel = open_channel(self.url, self._identity)
        return self._channel

    def manifest(self) -> Manifest:
        """The provider's manifest, fetched once."""
        with self._lock:
            if self._manifest is None:
                try:
                    data = b"".join(self._unary_stream(MANIFEST_METHOD, b"", CONNECT_TIMEOUT_S, MAX_MANIFEST_BYTES))
                except TransportError:
                    self._drop_channel()
                    raise
                self._manifest = parse_manifest(data)
            return self._manifest

    def fetch(self, file_name: str) -> Iterator[bytes]:
        """The chunks of one bundle file, never more than the manifest announced."""
        sizes = {file.name: file.size_bytes for file in self.manifest().bundle}
        if file_name not in sizes:
            raise ConfigurationError(f"the provider's bundle has no file {file_name!r}")
        yield from self._unary_stream(
            BUNDLE_METHOD, file_name.encode(), deadline_s(sizes[file_name]), sizes[file_name]
        )

    def _unary_stream(self, method: str, request: bytes, timeout_s: float, max_bytes: int) -> Iterator[bytes]:
        channel = self._open_channel()
        rpc = channel.unary_stream(method, request_serializer=None, response_deserializer=None)
        call = rpc(request, timeout=timeout_s)
        received = 0
        try:
            for chunk in call:
                received += len(chunk)
                self.traffic.add(down=len(chunk))
                if received > max_bytes:
                    raise MalformedFrame(f"expected at most {max_bytes} bytes, got more")
                yield chunk
        except grpc.RpcError as exc:
            raise _translate(exc) from None
        finally:
            call.cancel()

    def submit(self, call: Call, rows: torch.Tensor, reply_cols: int) -> Pending:
        """Sends one request on the stream; see `Connection.submit`."""
        self._check_usable()
        stream = self._stream
        if stream is None or not stream.is_usable():
            stream = self._open_stream()
        return stream.submit(call, rows, reply_cols)

    def _open_stream(self) -> _Stream:
        limits = self.manifest().limits
        with self._lock:
            if self._stream is None or not self._stream.is_usable():
                if self._stream is not None:
                    self._drop_channel()
                stream = _Stream(self._open_channel(), limits, self.traffic)
                self._stream = stream
                stream.wait_welcome()
            return self._stream

    def _drop_channel(self) -> None:
        """After a failure: gRPC would let the old channel wait for up to two minutes before it tries again."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def close(self) -> None:
        """Ends the stream and the channel."""
        if os.getpid() != self._pid:
            return  # the parent's sockets are not ours to end
        self._closed = True
        if self._stream is not None:
            self._stream.close()
        self._drop_channel()
