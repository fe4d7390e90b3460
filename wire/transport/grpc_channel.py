"""This module opens gRPC channels to a provider, says what a failed call means, and waits for a provider that does not
answer yet. It loads gRPC and not torch, so that a command knows within a second whether its provider takes it, before
it loads what takes many.

Guarantees: an error holds no text from the peer, except the names in a certificate that the provider's CA has signed,
of which few are shown, cut and in ASCII; and a wait has an end.
"""

from __future__ import annotations

import ipaddress
import math
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc

from wire.errors import (
    REVOKED,
    AccessError,
    ConfigurationError,
    DeadlineExceeded,
    MalformedFrame,
    NotPermitted,
    ProtocolError,
    QuotaExceeded,
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
)
from wire.manifest import Manifest, parse_manifest
from wire.transport.address import DEFAULT_PORT, is_loopback, read_address
from wire.transport.identity import TlsIdentity

STREAM_METHOD = "/veilbase.v1.Provider/Stream"
MANIFEST_METHOD = "/veilbase.v1.Provider/Manifest"
BUNDLE_METHOD = "/veilbase.v1.Provider/Bundle"
WEIGHTS_METHOD = "/veilbase.v1.Provider/Weights"
_PROBE_S = 3.0
"""How long the connection may take that finds out why no provider was reached."""
NAMES_S = 1.0
"""How long a handshake may take that finds out whether the provider's certificate holds the host's name. A provider
that loads its model answers none."""
_WRONG_NAME = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH (openssl/x509_vfy.h)."""
_MOST_NAMES, _MOST_OF_A_NAME = 8, 100
"""The most names of a certificate that an error shows, and the most characters of each."""
_HANDSHAKE_BYTES = 1 << 16
_DROPPED = "Handshake read failed"
"""The part of gRPC's own text which says that the other side closed the connection before TLS had begun. gRPC gives
another text if a certificate is refused or the port has no TLS. If a later version of gRPC words this differently, the
connection is not tried a second time."""
_OTHER_PROVIDER = ("CERTIFICATE_VERIFY_FAILED",)
"""Words in gRPC's text if the provider's certificate is of another authority than this identity's."""
_MOST_DIGITS = 9


class _ConnectionDropped(Unavailable):
    """The other side closed the connection before TLS began. This was no refusal of the tenant's identity, which the
    tenant had not shown yet."""


def was_dropped(error: VeilbaseError) -> bool:
    """Tells whether the other side closed the connection before TLS began."""
    return isinstance(error, _ConnectionDropped)


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
            "of a provider with TLS is grpcs://..., and takes an identity; that of one without TLS is grpc://...)"
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


@dataclass(frozen=True)
class _Place:
    """Says how far a new connection to a provider's port comes.

    Attributes:
        why_not: the end of an error's text.
        waits_for: what a wait is for, in words; None if no wait would help.
        most_s: the most seconds of such a wait.
        is_open: whether the port takes connections.
    """

    why_not: str
    waits_for: str | None = None
    most_s: float = 0.0
    is_open: bool = False


STARTING_S, LOADING_S = 20.0, 600.0
"""The most seconds to wait for a port on which nothing listens yet, and for one that is open while nobody answers: a
provider with a large model may take minutes to load it."""
FIRST_CALL_S, _LATER_CALLS_S, _PAUSE_S = 1.5, 10.0, 0.25
"""The seconds for the first call, so that a user soon knows what is waited for, and for later ones, which a slow link
may need; and the pause between two calls."""
LAST_CALL_S = 20.0
"""The seconds for one more call if the first was silent and no direct connection comes through: gRPC takes the proxy of
`https_proxy`, which a direct connection does not, and a connection over it may take longer than the first call."""
_EARLY = 0.9
"""The share of a call's time before which a DEADLINE_EXCEEDED is not this side's: a provider that answers so is not
silent."""


def _look_at(url: str) -> _Place:
    """Returns how far a new connection comes: it fails at the name, the port or the way to the host, or is made."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or DEFAULT_PORT
    try:
        socket.create_connection((host, port), _PROBE_S).close()
    except socket.gaierror:
        return _Place(f"the name {_shown(host)} has no address (DNS): check its spelling, and the network")
    except ConnectionRefusedError:
        return _Place(
            f"the host answers, but nothing listens on port {port}: check the port, and that `provider serve` runs",
            "it is not listening yet; check the port, and that `provider serve` runs",
            STARTING_S,
        )
    except OSError as exc:  # A time-out is one, too.
        reason = "no answer" if isinstance(exc, TimeoutError) else exc.strerror or type(exc).__name__
        return _Place(
            f"the host or its port {port} cannot be reached ({reason}): check the address, the network and firewalls"
        )
    return _Place(
        f"port {port} is open, but no provider answers there: check the URL and what runs there",
        "its port is open, and nobody answers yet: it is still loading its model, or something else runs there",
        LOADING_S,
        is_open=True,
    )


def why_not(url: str) -> str:
    """Returns what keeps this machine from a provider, as far as a new connection tells: the name, the port, or the
    way to the host."""
    return _look_at(url).why_not


def check_name(url: str, identity: TlsIdentity | None) -> None:
    """Checks that the provider's certificate holds the host's name, as far as a handshake tells now. gRPC takes a
    provider with another name for one that is away. The handshake shows nothing of the tenant's identity.

    Raises:
        ConfigurationError: the certificate is of this identity's CA, and holds other names only.
    """
    parts = urlsplit(url)
    if identity is None or parts.scheme != "grpcs":
        return
    host, port = parts.hostname or "", parts.port or DEFAULT_PORT
    try:
        _certificate(host, port, identity.ca_pem, checks_name=True)
    except ssl.SSLCertVerificationError as exc:
        if exc.verify_code not in _WRONG_NAME:
            return
    except (OSError, ValueError):  # ValueError: `ssl` takes no such text for a name.
        return
    else:
        return
    try:
        holds = names_held(_certificate(host, port, identity.ca_pem, checks_name=False))
    except (OSError, ValueError):
        holds = ""
    of_which = f"it holds {holds}. Use one of these" if holds else "use one that it holds"
    raise ConfigurationError(
        f"the provider's certificate does not hold the name {_shown(host)}: {of_which}, or start the provider with "
        f"`provider serve --names {_shown(host)}`"
    )


def _certificate(host: str, port: int, ca_pem: bytes, checks_name: bool) -> dict[str, Any]:
    """Does a TLS handshake without a certificate of this side, and returns the provider's, which the CA has signed.

    Raises:
        ssl.SSLCertVerificationError: the certificate is another CA's, has expired, or does not hold the name.
        OSError: the handshake failed otherwise, or took longer than `NAMES_S`.
        ValueError: `host` cannot be a name in a certificate, or the CA's certificate is not ASCII.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # Before 1.3, the provider would ask for ours first.
    context.check_hostname = checks_name
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=ca_pem.decode("ascii"))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=host)
    give_up_at = time.monotonic() + NAMES_S
    with socket.create_connection((host, port), _PROBE_S) as plain:
        while True:
            try:
                tls.do_handshake()
                return tls.getpeercert() or {}
            except ssl.SSLWantReadError:
                left_s = give_up_at - time.monotonic()
                if left_s <= 0:  # A peer that sends a byte now and then gets no more time than a silent one.
                    raise TimeoutError from None
                plain.settimeout(left_s)
                plain.sendall(outgoing.read())
                data = plain.recv(_HANDSHAKE_BYTES)
                if not data:
                    raise ConnectionError("the peer closed the connection") from None
                incoming.write(data)


def names_held(certificate: dict[str, Any]) -> str:
    """Returns the names in a certificate, for an error's text."""
    held = [name for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    shown = [_shown(_short_address(name)) for name in held[:_MOST_NAMES]]
    more = [f"{len(held) - _MOST_NAMES} more"] if len(held) > _MOST_NAMES else []
    return ", ".join([*shown, *more])


def _short_address(name: str) -> str:
    """Returns an IPv6 address as users write it, which `ssl` writes out; other names as they are."""
    try:
        return str(ipaddress.ip_address(name.strip()))
    except ValueError:
        return name


def _shown(name: str) -> str:
    return ascii(name)[1:-1][:_MOST_OF_A_NAME]


def offered_at_once(url: str, identity: TlsIdentity | None) -> Manifest | None:
    """Returns the manifest of a provider that answers the first call; None if none came.

    Raises:
        ConfigurationError: see `open_channel`.
        AccessError: the provider refuses this tenant.
        ProtocolError: what answers is no provider of this version.
    """
    answer = ask(url, identity, FIRST_CALL_S)
    if isinstance(answer, VeilbaseError):
        if _is_final(answer):
            raise answer
        return None
    return parse_manifest(answer) if answer else None


def first_chunk(url: str, identity: TlsIdentity | None, name: str) -> bytes:
    """Returns the beginning of a file of a provider's bundle, on a channel of its own: a chunk, or the whole file if it
    is smaller; no bytes if nothing comes in the time of a first call."""
    channel = open_channel(url, identity)
    call = channel.unary_stream(BUNDLE_METHOD, request_serializer=None, response_deserializer=None)(
        name.encode(), timeout=FIRST_CALL_S
    )
    try:
        return bytes(next(call, b""))
    except grpc.RpcError:  # what it says is told by the session, if the provider still says it
        return b""
    finally:
        call.cancel()
        channel.close()


def _is_final(failure: VeilbaseError) -> bool:
    """Returns whether a failure is one that no wait would mend."""
    return isinstance(failure, AccessError | ProtocolError) and not isinstance(failure, QuotaExceeded)


def wait_for_provider(
    url: str,
    identity: TlsIdentity | None,
    say: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Manifest | None:
    """Waits until a provider answers this tenant, and returns its manifest, with which a command compares its options
    before it loads torch. The session asks again, and uses what it then gets.

    A failure that the connection itself can deal with, such as a provider that has as many connections as it takes, is
    left to the connection.

    Args:
        url: the address, as `open_channel` takes it.
        identity: the tenant's certificate and key; None to connect without TLS.
        say: called with one line when a wait begins, or is for something else.
        clock: returns the present time in seconds.
        pause: waits so many seconds.

    Returns:
        The manifest; None if the provider answers, but did not send the whole of it in the time of a call.

    Raises:
        ConfigurationError: see `open_channel`, or the provider's certificate does not hold the URL's host.
        AccessError: the provider refuses this tenant.
        ProtocolError: what answers is no provider of this version.
        Unavailable: the provider cannot be reached, or not in time.
    """
    _, host, port = read_address(url, identity is not None)
    began, told, call_s, is_last = clock(), "", FIRST_CALL_S, False
    while isinstance(failure := ask(url, identity, call_s), VeilbaseError):
        if _is_final(failure):
            raise failure
        is_silent = isinstance(failure, DeadlineExceeded)
        if not is_silent and (type(failure) is not Unavailable or failure.retry_s > 0):
            return None
        place = _look_at(url)
        if place.is_open:
            check_name(url, identity)
        if place.is_open and not is_silent:
            return None  # It has begun to answer meanwhile, or closes connections at once.
        if place.waits_for is None and is_silent and not is_last:
            say(f"waiting for the provider at {host}:{port}, for up to {LAST_CALL_S:.0f} s: it has not answered yet")
            call_s, is_last = LAST_CALL_S, True
            continue
        if place.waits_for is None or clock() - began >= place.most_s:
            raise Unavailable(f"no provider can be reached at {url}: {place.why_not}")
        if told != place.waits_for:
            told = place.waits_for
            say(f"waiting for the provider at {host}:{port}, for up to {place.most_s:.0f} s: {told}")
        pause(_PAUSE_S)
        call_s = _LATER_CALLS_S
    return parse_manifest(failure) if failure else None


def ask(url: str, identity: TlsIdentity | None, timeout_s: float) -> bytes | VeilbaseError:
    """Asks for the manifest on a channel of its own; returns it, or no bytes if its beginning came and not all of it,
    or what failed. This is a `DeadlineExceeded` only if nothing came for about `timeout_s` seconds."""
    channel, began = open_channel(url, identity), time.monotonic()
    call = channel.unary_stream(MANIFEST_METHOD, request_serializer=None, response_deserializer=None)(
        b"", timeout=timeout_s
    )
    received = bytearray()
    try:
        for chunk in call:
            received += chunk
            if len(received) > MAX_MANIFEST_BYTES:
                return MalformedFrame(f"expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, got more")
        return bytes(received)
    except grpc.RpcError as exc:
        if received:
            return b""
        failure = translate_status(exc)
        if isinstance(failure, DeadlineExceeded) and time.monotonic() - began < _EARLY * timeout_s:
            return Unavailable("the provider ended the call before its time was over: check what runs at its URL")
        return failure
    finally:
        call.cancel()
        channel.close()
