"""This module is the tenant's end of the transport: one long-lived bidirectional stream with many requests in flight.

The manifest and the bundle are fetched by gRPC. The stream runs on the provider's tensor port, or on gRPC if that port
cannot be reached.

Guarantees: replies are matched by request id in any order. Every request ends by its own deadline. A reply is checked
against its request before memory is allocated for the reply. A forked child is refused. After a broken stream the next
request opens a new one. Requests that were pending on the broken stream fail with one error and are never sent again
automatically, since that could reuse a mask. Only a request that was refused because it came too early is sent again,
later and as the same bytes (wire/transport/retry.py). Nothing is sent on a stream before its provider has been seen to
serve the weights of the first manifest.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import grpc

from wire.errors import (
    REVOKED,
    ConfigurationError,
    DeadlineExceeded,
    ForkedConnection,
    MalformedFrame,
    NotPermitted,
    QuotaExceeded,
    TransportError,
    Unauthenticated,
    Unavailable,
    VeilbaseError,
    VersionMismatch,
)
from wire.frame import Call
from wire.limits import (
    KEEPALIVE_TIME_MS,
    KEEPALIVE_TIMEOUT_MS,
    MAX_DEADLINE_MS,
    MAX_FRAME_BYTES,
    MAX_MANIFEST_BYTES,
    RETRY_METADATA,
    deadline_s,
)
from wire.manifest import Manifest, parse_manifest
from wire.payload import Payload
from wire.transport import tls_stream
from wire.transport.connection import Pending, Traffic
from wire.transport.grpc_stream import GrpcStream, MessageStream
from wire.transport.identity import TlsIdentity
from wire.transport.multiplexer import Multiplexer
from wire.transport.retry import RetriedRequest, with_jitter

STREAM_METHOD = "/veilbase.v1.Provider/Stream"
MANIFEST_METHOD = "/veilbase.v1.Provider/Manifest"
BUNDLE_METHOD = "/veilbase.v1.Provider/Bundle"
CONNECT_TIMEOUT_S = 20.0
_CROWDED_S = 15.0
"""Seconds for which a tenant retries if a provider closes new connections at once. A provider that is flooded with
connections accepts another one as soon as a connection has timed out."""
_CROWDED_PAUSE_S = 0.01
"""The pause in seconds before the next try. It is short because a free place at a flooded port is taken within
milliseconds: with pauses of up to half a second a new tenant was not accepted within 15 s (tests/rpc/test_flood.py)."""
_DROPPED = "Handshake read failed"
"""The part of gRPC's own text which says that the other side closed the connection before TLS had begun. The text is
another if a certificate is refused or the port has no TLS. If a later gRPC words this differently, there is no second
try."""
_MOST_DIGITS = 9
DEFAULT_PORT = 8443
_LOGGER = logging.getLogger(__name__)


class _ConnectionDropped(Unavailable):
    """The other side closed the connection before TLS began. This was no refusal of the tenant's identity, which the
    tenant had not shown yet."""


def channel_options(host: str) -> list[tuple[str, Any]]:
    """Returns gRPC's options for the tenant's channel: limits on both sides, keepalive, and no proxy for loopback."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_send_message_length", MAX_FRAME_BYTES),
        ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 0),  # A transparent re-send must never happen to a request under a one-time mask.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if host in ("localhost", "::1") or host.startswith("127."):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def open_channel(url: str, identity: TlsIdentity | None) -> grpc.Channel:
    """Opens a channel for `grpcs://host[:port]` with mutual TLS, or for `grpc://` on loopback without TLS.

    Raises:
        ConfigurationError: the URL has another scheme or no host, an identity is missing, or plain text would go to
            another machine.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORT
    except ValueError as exc:  # The port is no number, or a bracket was left open.
        raise ConfigurationError(f"expected grpcs://host:port, got {url!r}") from exc
    if parts.scheme not in ("grpc", "grpcs") or not host:
        raise ConfigurationError(f"expected grpcs://host:port, got {url!r}")
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if parts.scheme == "grpcs":
        if identity is None:
            raise ConfigurationError("a grpcs:// URL needs an identity, the folder that `provider enroll` made")
        credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.cert_pem)
        return grpc.secure_channel(target, credentials, channel_options(host))
    if not (host in ("localhost", "::1") or host.startswith("127.")):
        raise ConfigurationError("grpc:// without TLS is for loopback only: use grpcs://")
    return grpc.insecure_channel(target, channel_options(host))


def translate_status(exc: grpc.RpcError, connected: bool = False) -> VeilbaseError:
    """Returns the error of wire/errors.py that stands for a gRPC status. It holds no text from the peer.

    Args:
        exc: the error that grpc raised.
        connected: whether the provider had accepted this identity on the same connection.
    """
    code = exc.code() if hasattr(exc, "code") else None
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return Unauthenticated("the provider does not accept this certificate: enrol again")
    if code == grpc.StatusCode.PERMISSION_DENIED:
        return NotPermitted(REVOKED)
    if code == grpc.StatusCode.FAILED_PRECONDITION:
        return VersionMismatch("the provider speaks another protocol version: install matching releases")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        return QuotaExceeded("the provider has too many calls open, or refused the size of one: try again later")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the provider did not answer in time")
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
        return MalformedFrame("the two ends do not understand each other: is the URL a Veilbase provider?")
    retry_s = _named_retry_s(exc)
    if retry_s > 0:
        when = f"try again in {math.ceil(retry_s)} s"
        return Unavailable(f"the provider takes nothing new at the moment: {when}", retry_s)
    details = str(exc.details() or "") if hasattr(exc, "details") else ""
    if not connected and _DROPPED in details:
        return _ConnectionDropped(
            "the provider closed the connection at once: it has as many as it takes, or the URL is of something else; "
            "try again later"
        )
    if not connected and any(
        word in details for word in ("CERTIFICATE", "certificate", "SSL", "handshake", "Socket closed")
    ):
        # A provider that refuses the certificate closes the socket, and gRPC calls that UNAVAILABLE.
        return Unauthenticated(
            "the connection was closed: this identity belongs to another provider, has expired, or is missing (the URL "
            "of a provider with TLS is grpcs://..., and takes an identity)"
        )
    return Unavailable(
        "the provider cannot be reached or went away: check its URL and that it runs; "
        "a fine-tuning run that broke goes on from its last checkpoint when it is started again"
    )


def _named_retry_s(exc: grpc.RpcError) -> float:
    """Returns the seconds after which the provider says that the tenant may try again; 0 if it names no time."""
    metadata = exc.trailing_metadata() if hasattr(exc, "trailing_metadata") else None
    text = next((value for key, value in metadata or () if key == RETRY_METADATA), "")
    if not (isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        return 0.0
    return min(int(text), MAX_DEADLINE_MS) / 1000


class GrpcConnection:
    """Implements `Connection` with gRPC and the tensor port. The connection opens at first use, so that a program may
    fork before that."""

    def __init__(self, url: str, identity: TlsIdentity | None = None) -> None:
        """Keeps the address of the provider, and does not connect yet.

        Args:
            url: the address, grpcs://host:port.
            identity: the tenant's certificate and key; None to connect without TLS.
        """
        self.url = url
        self.traffic = Traffic()
        self._identity = identity
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._stream: Multiplexer | None = None
        self._compared: Multiplexer | None = None
        """The stream on which `_check_same_weights` has passed. Requests are sent on no other stream."""
        self._port: int | None = None
        """The tensor port that the newest stream is on; None if gRPC carries that stream."""
        self._manifest: Manifest | None = None
        self._pid = os.getpid()
        self._closed = False

    @property
    def carrier(self) -> str | None:
        """Returns how the newest stream is carried: "gRPC", or "tensor port" and the port's number; None before the
        first stream.

        gRPC takes several times as long as the tensor port for a small message (docs/decisions/0007-tensor-port.md).
        gRPC carries the stream, without an error, if the tensor port cannot be reached.
        """
        if self._stream is None:
            return None
        return "gRPC" if self._port is None else f"tensor port {self._port}"

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
        """Returns the provider's manifest. Only the first call fetches it."""
        with self._lock:
            if self._manifest is None:
                self._manifest = self._fetch_manifest()
            return self._manifest

    def _fetch_manifest(self) -> Manifest:
        give_up_at = time.monotonic() + _CROWDED_S
        while True:
            try:
                return self._try_to_fetch_manifest()
            except _ConnectionDropped:
                if time.monotonic() >= give_up_at:
                    raise
            time.sleep(with_jitter(_CROWDED_PAUSE_S))

    def _try_to_fetch_manifest(self) -> Manifest:
        try:
            data = b"".join(self._unary_stream(MANIFEST_METHOD, b"", CONNECT_TIMEOUT_S, MAX_MANIFEST_BYTES))
        except Unavailable as exc:
            self._drop_channel()
            if isinstance(exc, _ConnectionDropped) or exc.retry_s > 0:
                raise
            raise Unavailable(f"no provider can be reached at {self.url}: check the URL and that it runs") from None
        except TransportError:
            self._drop_channel()
            raise
        return parse_manifest(data)

    def fetch(self, file_name: str) -> Iterator[bytes]:
        """Yields the chunks of one bundle file, never more than the manifest announced."""
        sizes = {file.name: file.size_bytes for file in self.manifest().bundle}
        if file_name not in sizes:
            raise ConfigurationError(f"the provider's bundle has no file {file_name!r}")
        yield from self._unary_stream(BUNDLE_METHOD, file_name.encode(), deadline_s(sizes[file_name]), sizes[file_name])

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
            raise translate_status(exc) from None  # The text is the peer's.
        finally:
            call.cancel()

    def submit(self, call: Call, payload: Payload, reply_cols: int) -> Pending:
        """Sends one request on the stream; see `Connection.submit`."""
        self._check_usable()
        payload.check(call)
        stream = self._compared
        if stream is None or not stream.is_usable():
            stream = self._open_stream()
        return RetriedRequest(stream, call, payload, reply_cols)

    def _open_stream(self) -> Multiplexer:
        begun_with = self.manifest()
        with self._lock:
            if self._compared is None or not self._compared.is_usable():
                if self._stream is not None:
                    self._drop_channel()
                raw = self._open_raw_stream(begun_with)
                self._stream = stream = Multiplexer(raw, begun_with.limits, self.traffic, translate_status)
                try:
                    stream.wait_welcome()
                    self._check_same_weights(begun_with)
                except BaseException:
                    stream.close()
                    raise
                self._compared = stream
                _LOGGER.info("a stream is open, carried by %s", self.carrier)
            return self._compared

    def _open_raw_stream(self, begun_with: Manifest) -> MessageStream:
        """Opens a stream on the tensor port, or on gRPC if there is no such port or it cannot be reached."""
        channel = self._open_channel()
        self._port = None
        if self._identity is not None:
            # A provider that was restarted may have another port.
            now = begun_with if self._stream is None else self._fetch_manifest()
            if now.tensor_port is not None:
                try:
                    raw = tls_stream.connect(urlsplit(self.url).hostname or "", now.tensor_port, self._identity)
                    self._port = now.tensor_port
                    return raw
                except OSError as exc:
                    _LOGGER.info("the tensor port cannot be used (%s): gRPC carries the stream", type(exc).__name__)
        return GrpcStream(channel, STREAM_METHOD)

    def _check_same_weights(self, begun_with: Manifest) -> None:
        """Checks that the provider still serves the weights of the first manifest. A provider that was restarted with
        another model must not compute on rows that were meant for the first model.

        This is called after WELCOME: if the provider is replaced between this manifest and the first request, the
        stream breaks. A stream on a tensor port that the manifest no longer names may lead to another provider of the
        same CA. This check is no defence against a provider that lies; verification is.
        """
        now = self._fetch_manifest()
        if self._port is not None and now.tensor_port != self._port:
            raise Unavailable("the provider was started anew just now, and nothing was sent to it: ask again")
        if (now.weights, now.groups) != (begun_with.weights, begun_with.groups):
            raise ConfigurationError(
                "the provider serves other weights than when this session began, and nothing was sent to it: "
                "ask its operator for the first ones, or begin a new session"
            )

    def _drop_channel(self) -> None:
        """Closes the channel after a failure, since gRPC would let the old channel wait for up to two minutes before it
        tries again."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def close(self) -> None:
        """Ends the stream and the channel."""
        if os.getpid() != self._pid:
            return  # The parent's sockets are not the child's to close.
        self._closed = True
        if self._stream is not None:
            self._stream.close()
        self._drop_channel()
