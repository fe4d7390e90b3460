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
import queue
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import grpc

from wire.errors import MalformedFrame, NotPermitted, QuotaExceeded, TransportError, Unavailable, VeilbaseError
from wire.limits import GROUP_BYTES, MAX_MANIFEST_BYTES, deadline_s
from wire.manifest import GroupInfo, Manifest, parse_manifest
from wire.transport import tls
from wire.transport.connection import NO_WEIGHTS, MessageStream
from wire.transport.grpc_channel import (
    BUNDLE_METHOD,
    MANIFEST_METHOD,
    STREAM_METHOD,
    WEIGHTS_METHOD,
    check_name,
    open_channel,
    translate_status,
    was_dropped,
    why_not,
)
from wire.transport.identity import TlsIdentity
from wire.transport.retry import with_jitter
from wire.transport.stream_connection import CROWDED_PAUSE_S, CROWDED_S, StreamConnection

CONNECT_TIMEOUT_S = 20.0
_NOT_GIVEN = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)
"""How a provider refuses weights: to this tenant, or to all since it is of an earlier release."""
_LOGGER = logging.getLogger(__name__)


def _no_weights(exc: grpc.RpcError) -> VeilbaseError | None:
    """Returns the error if a provider gives no weights, or no more today; None for another status."""
    code = exc.code() if hasattr(exc, "code") else None
    if code in _NOT_GIVEN:
        return NotPermitted(NO_WEIGHTS)
    if code == grpc.StatusCode.OUT_OF_RANGE:
        return QuotaExceeded(
            "the provider gives this tenant no more weights today: keep fewer layers, try again tomorrow (UTC), or ask "
            "its operator for more weight_bytes_per_day"
        )
    return None


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
            except Unavailable as exc:
                if not was_dropped(exc) or time.monotonic() >= give_up_at:
                    raise
            time.sleep(with_jitter(CROWDED_PAUSE_S))

    def _try_to_fetch_manifest(self) -> Manifest:
        try:
            data = b"".join(self._unary_stream(MANIFEST_METHOD, b"", CONNECT_TIMEOUT_S, MAX_MANIFEST_BYTES))
        except Unavailable as exc:
            self._drop()
            if was_dropped(exc) or exc.retry_s > 0:
                raise
            check_name(self.url, self._identity)
            raise Unavailable(f"no provider can be reached at {self.url}: {why_not(self.url)}") from None
        except TransportError:
            self._drop()
            raise
        return parse_manifest(data)

    def fetch(self, file_name: str) -> Iterator[bytes]:
        """Yields the chunks of one bundle file, never more bytes than the manifest announced. Raises ConfigurationError
        if the bundle has no such file."""
        size = self._announced_bytes(file_name)
        yield from self._unary_stream(BUNDLE_METHOD, file_name.encode(), deadline_s(size), size)

    def fetch_weights(self, group: GroupInfo) -> Iterator[bytes]:
        """Yields the chunks of a group's weight, never more bytes than the manifest announced, and counts them as used
        once all have come; see `Connection.fetch_weights`."""
        size = group.weight_bytes
        request, received = group.id.to_bytes(GROUP_BYTES, "little"), 0
        for chunk in self._unary_stream(WEIGHTS_METHOD, request, deadline_s(size), size, _no_weights):
            received += len(chunk)
            yield chunk
        self.traffic.usage.fetched(received)

    def _unary_stream(
        self, method: str, request: bytes, timeout_s: float, max_bytes: int,
        refusal: Callable[[grpc.RpcError], VeilbaseError | None] = lambda exc: None,
    ) -> Iterator[bytes]:  # fmt: skip
        """Yields the responses of an RPC, at most `max_bytes`.

        Args:
            refusal: returns the error that a status stands for if it is a refusal of this method's own; else None.
        """
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
            raise refusal(exc) or translate_status(exc, accepted_before=self._compared is not None) from None
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
