"""This module is the tenant's end of the transport: one long-lived bidirectional stream with many requests in flight.

The manifest and the bundle are fetched by gRPC. The stream runs on the provider's tensor port, or on gRPC if that port
cannot be reached.

Guarantees: replies are matched by request id in any order. Every request ends by its own deadline. A reply is checked
against its request before memory is allocated for the reply. A forked child is refused. After a broken stream the next
request opens a new one. Requests that were pending on the broken stream fail with one error and are never sent again
automatically, since that could reuse a mask. Only a request that the provider refused for a stated time is sent again,
later and as the same bytes (wire/transport/retry.py). No request is sent on a stream before this module has checked
that the provider still serves the weights of the first manifest.
"""

from __future__ import annotations

import logging
import math
import queue
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import grpc

from wire.errors import (
    REVOKED,
    DeadlineExceeded,
    MalformedFrame,
    NotPermitted,
    QuotaExceeded,
    TransportError,
    Unauthenticated,
    Unavailable,
    VeilbaseError,
    VersionMismatch,
)
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
from wire.transport import tls
from wire.transport.address import DEFAULT_PORT, is_loopback, read_address
from wire.transport.connection import MessageStream
from wire.transport.identity import TlsIdentity
from wire.transport.retry import with_jitter
from wire.transport.stream_connection import CROWDED_PAUSE_S, CROWDED_S, StreamConnection

STREAM_METHOD = "/veilbase.v1.Provider/Stream"
MANIFEST_METHOD = "/veilbase.v1.Provider/Manifest"
BUNDLE_METHOD = "/veilbase.v1.Provider/Bundle"
CONNECT_TIMEOUT_S = 20.0
_PROBE_S = 3.0
"""How long the connection may take that finds out why no provider was reached."""
_DROPPED = "Handshake read failed"
"""The part of gRPC's own text which says that the other side closed the connection before TLS had begun. gRPC gives
another text if a certificate is refused or the port has no TLS. If a later version of gRPC words this differently, the
connection is not tried a second time."""
_OTHER_PROVIDER = ("CERTIFICATE_VERIFY_FAILED",)
"""Words in gRPC's text if the provider's certificate is of another authority than this identity's."""
_MOST_DIGITS = 9
_LOGGER = logging.getLogger(__name__)


class _ConnectionDropped(Unavailable):
    """The other side closed the connection before TLS began. This was no refusal of the tenant's identity, which the
    tenant had not shown yet."""


def channel_options(host: str) -> list[tuple[str, Any]]:
    """Returns gRPC's options for the tenant's channel: the largest message in each direction, keepalive, no retries by
    gRPC, and no proxy for loopback."""
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
    if is_loopback(host):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def open_channel(url: str, identity: TlsIdentity | None) -> grpc.Channel:
    """Opens a channel for `grpcs://host[:port]` with mutual TLS, or for `grpc://` on loopback without TLS.

    Raises:
        ConfigurationError: the URL has another scheme or no host, an identity is missing, or plain text would go to
            another machine.
    """
    scheme, host, port = read_address(url, identity is not None)
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if scheme == "grpcs" and identity is not None:
        credentials = grpc.ssl_channel_credentials(identity.ca_pem, identity.key_pem, identity.cert_pem)
        return grpc.secure_channel(target, credentials, channel_options(host))
    return grpc.insecure_channel(target, channel_options(host))


def translate_status(exc: grpc.RpcError, connected: bool = False, accepted_before: bool = False) -> VeilbaseError:
    """Returns the error of wire/errors.py that stands for a gRPC status. It holds no text from the peer.

    Args:
        exc: the error that grpc raised.
        connected: whether the provider had accepted this identity on the same connection.
        accepted_before: whether the provider had accepted it on an earlier connection. A connection that ends in its
            handshake then says that the provider is going away or starting, not that it refuses the identity.
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
        return DeadlineExceeded("the provider did not answer in time: if it was just started, wait until it says ready")
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
    more = () if accepted_before else ("CERTIFICATE", "certificate", "SSL", "handshake", "Socket closed")
    if not connected and any(word in details for word in (*_OTHER_PROVIDER, *more)):
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
    """Returns the seconds after which the provider says that the tenant may try again, at most 3600; 0 if the provider
    names no time."""
    metadata = exc.trailing_metadata() if hasattr(exc, "trailing_metadata") else None
    text = next((value for key, value in metadata or () if key == RETRY_METADATA), "")
    if not (isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        return 0.0
    return min(int(text), MAX_DEADLINE_MS) / 1000


def _why_not(url: str) -> str:
    """Returns what keeps this machine from a provider, as far as a new connection tells: the name, the port, or the
    way to the host."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or DEFAULT_PORT
    try:
        socket.create_connection((host, port), _PROBE_S).close()
    except socket.gaierror:
        return f"the name {ascii(host)[1:-1][:100]} has no address (DNS): check its spelling, and the network"
    except ConnectionRefusedError:
        return f"the host answers, but nothing listens on port {port}: check the port, and that `provider serve` runs"
    except OSError as exc:  # A time-out is one, too.
        reason = "no answer" if isinstance(exc, TimeoutError) else exc.strerror or type(exc).__name__
        return f"the host or its port {port} cannot be reached ({reason}): check the address, the network and firewalls"
    return f"port {port} is open, but no provider answers there: check the URL and what runs there"


class GrpcStream:
    """Implements `MessageStream` on grpc's public interface."""

    def __init__(self, channel: grpc.Channel, method: str, accepted_before: bool = False) -> None:
        """Starts the RPC `method` on the channel; see `translate_status` for `accepted_before`."""
        self._accepted_before, self._has_received = accepted_before, False
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        rpc = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
        self._call = rpc(iter(self._outgoing.get, None), wait_for_ready=False)

    def send(self, message: bytes | memoryview) -> None:
        self._outgoing.put(bytes(message))

    @property
    def has_unsent(self) -> bool:
        """Returns False always, since grpc sends in a thread of its own."""
        return False

    def wait_to_send(self, seconds: float) -> None:
        """Returns at once, since grpc sends in a thread of its own."""

    def step(self) -> bytes | None:
        """Waits for a message; see `MessageStream.step`."""
        try:
            message: bytes | None = next(self._call, None)
        except grpc.RpcError as exc:
            # A provider that has sent a message, as a rule WELCOME, has accepted this identity.
            error = translate_status(exc, self._has_received, self._accepted_before)
        else:
            if message is None:
                raise EOFError
            self._has_received = True
            return message
        raise error  # Here it has no context, which would be gRPC's call, with a text of the peer's.

    def is_active(self) -> bool:
        return bool(self._call.is_active())

    def close(self) -> None:
        """Cancels the RPC, which ends the stream; see `MessageStream.close`."""
        self._outgoing.put(None)
        self._call.cancel()


class GrpcConnection(StreamConnection):
    """Implements `Connection` with gRPC and the tensor port. The connection opens at first use, so that a program may
    fork before that."""

    def __init__(self, url: str, identity: TlsIdentity | None = None) -> None:
        """Keeps the address of the provider, and does not connect yet.

        Args:
            url: the address, grpcs://host:port.
            identity: the tenant's certificate and key; None to connect without TLS.
        """
        super().__init__(url)
        self._identity = identity
        self._channel: grpc.Channel | None = None
        self._port: int | None = None
        """The tensor port that the newest stream is on; None if gRPC carries that stream, or if there is no stream
        yet."""

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

    def _open_channel(self) -> grpc.Channel:
        self._check_usable()
        if self._channel is None:
            self._channel = open_channel(self.url, self._identity)
        return self._channel

    def _fetch_manifest(self) -> Manifest:
        give_up_at = time.monotonic() + CROWDED_S
        while True:
            try:
                return self._try_to_fetch_manifest()
            except _ConnectionDropped:
                if time.monotonic() >= give_up_at:
                    raise
            time.sleep(with_jitter(CROWDED_PAUSE_S))

    def _try_to_fetch_manifest(self) -> Manifest:
        try:
            data = b"".join(self._unary_stream(MANIFEST_METHOD, b"", CONNECT_TIMEOUT_S, MAX_MANIFEST_BYTES))
        except Unavailable as exc:
            self._drop()
            if isinstance(exc, _ConnectionDropped) or exc.retry_s > 0:
                raise
            raise Unavailable(f"no provider can be reached at {self.url}: {_why_not(self.url)}") from None
        except TransportError:
            self._drop()
            raise
        return parse_manifest(data)

    def fetch(self, file_name: str) -> Iterator[bytes]:
        """Yields the chunks of one bundle file, never more bytes than the manifest announced. Raises ConfigurationError
        if the bundle has no such file."""
        size = self._announced_bytes(file_name)
        yield from self._unary_stream(BUNDLE_METHOD, file_name.encode(), deadline_s(size), size)

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
            # The text is the peer's.
            raise translate_status(exc, accepted_before=self._compared is not None) from None
        finally:
            call.cancel()

    def _open_raw_stream(self, begun_with: Manifest) -> MessageStream:
        """Opens a stream on the tensor port, or on gRPC if there is no such port or it cannot be reached. `begun_with`
        is the first manifest; a later stream uses the port in the provider's present manifest."""
        channel = self._open_channel()
        self._port = None
        if self._identity is not None:
            # A provider that was restarted may have another port.
            now = begun_with if self._stream is None else self._fetch_manifest()
            if now.tensor_port is not None:
                try:
                    raw = tls.connect(urlsplit(self.url).hostname or "", now.tensor_port, self._identity)
                    self._port = now.tensor_port
                    return raw
                except OSError as exc:
                    _LOGGER.info("the tensor port cannot be used (%s): gRPC carries the stream", type(exc).__name__)
        return GrpcStream(channel, STREAM_METHOD, accepted_before=self._compared is not None)

    def _check_place(self, now: Manifest) -> None:
        # A stream on a tensor port that the manifest no longer names may lead to another provider of the same CA.
        if self._port is not None and now.tensor_port != self._port:
            raise Unavailable("the provider was started anew just now, and nothing was sent to it: ask again")

    def _drop(self) -> None:
        """Closes the channel, at the end or after a failure. After a failure, gRPC would let the old channel wait for
        up to two minutes before it connects again."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
