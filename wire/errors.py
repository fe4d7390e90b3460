"""Every error a user of Veilbase can meet, in one tree.

    VeilbaseError
    ├── RequestError            the request itself is wrong; sending it again will not help
    │   ├── InvalidTensor       shape, dtype, byte count or a non-finite value
    │   │   └── NotFinite       of the tenant's own rows, gradients or logits
    │   ├── UnknownLayer        no such group, direction or arithmetic at this provider
    │   └── LimitExceeded       larger than the limits in the manifest
    ├── AccessError             who is asking
    │   ├── Unauthenticated     no certificate, or one this provider cannot accept
    │   ├── NotPermitted        revoked, or not allowed to do this
    │   └── QuotaExceeded       too much at once: in flight, or in a second
    ├── TransportError          the road between the two
    │   ├── DeadlineExceeded    no complete answer in time
    │   ├── Unavailable         the provider cannot be reached or went away
    │   └── ForkedConnection    a connection used in a forked child
    ├── ProtocolError           the peer broke wire/SPEC.md
    │   ├── VersionMismatch     the two ends speak different versions
    │   ├── MalformedFrame      bytes that are no frame
    │   ├── ProviderChanged     the bundle is not the one pinned at first use (tenant_sdk/trust/pins.py)
    │   └── RemoteFault         the provider failed and says no more than that
    ├── MaskError               the privacy mask
    │   ├── MaskReused          a slot was about to be used twice
    │   ├── MaskOverflow        the no-wrap bound would not hold
    │   ├── SlotsExhausted      a block has fewer unused rows than were asked for (noise/blocks/slots.py)
    │   ├── SeedExhausted       a seed has no room for so many more secrets (noise/ledger/ledger.py)
    │   ├── WeakParameters      parameters below the accepted table
    │   └── VerificationFailed  a reply or a file is not what the trusted checkpoint gives
    ├── ConfigurationError      a setting, a model name, a file that the user named
    └── DatasetError            a row of the user's data set, named by its line

Guarantees: a message says what was expected and what came, in one line, and never holds a tensor value, a secret or
another tenant's name. Only `WireCode` and its fixed text cross the wire, never `str(exc)` (SPEC.md, section 6).

Causes: an operating system's error, a file that cannot be parsed or an option that a library refuses is kept as
`__cause__` (`raise ... from exc`), so that a traceback shows it. `from None` leaves it out on the way of a row
(`noise/`, the transports, replies, the provider's engine), and wherever the cause may quote texts, tensor values, a
secret, a peer or a file that names tenants (tests/security/test_causes.py).
"""

from __future__ import annotations

from enum import IntEnum


class VeilbaseError(Exception):
    """Root of the tree."""


class RequestError(VeilbaseError):
    """The request is wrong; sending it again will not help."""


class InvalidTensor(RequestError):
    """Shape, dtype, byte count or a non-finite value."""


class NotFinite(InvalidTensor):
    """A value of the tenant's own is NaN or infinite; raised on the tenant's side only."""


class UnknownLayer(RequestError):
    """No such group, direction or arithmetic at this provider."""


class LimitExceeded(RequestError):
    """Larger than the limits that the manifest announces."""


class AccessError(VeilbaseError):
    """Who is asking."""


class Unauthenticated(AccessError):
    """No certificate, or one that this provider cannot accept."""


class NotPermitted(AccessError):
    """Revoked, or not allowed to do this."""


class QuotaExceeded(AccessError):
    """Too much at once for one tenant."""

    def __init__(self, text: str, retry_s: float = 0.0) -> None:
        """Args: retry_s: after so many seconds the same request may pass; 0 where nobody can say."""
        super().__init__(text)
        self.retry_s = retry_s


class TransportError(VeilbaseError):
    """The road between tenant and provider."""


class DeadlineExceeded(TransportError):
    """No complete answer before the request's own deadline."""


class Unavailable(TransportError):
    """The provider cannot be reached, went away, or has lost what one layer needs."""

    def __init__(self, text: str, retry_s: float = 0.0) -> None:
        """Args: retry_s: after so many seconds the same request may pass; 0 where it will not on this stream."""
        super().__init__(text)
        self.retry_s = retry_s


class ForkedConnection(TransportError):
    """A connection opened before a fork was used in the child."""


class ProtocolError(VeilbaseError):
    """The peer broke wire/SPEC.md."""


class VersionMismatch(ProtocolError):
    """The two ends speak different protocol versions."""


class MalformedFrame(ProtocolError):
    """Bytes that are no frame, or a frame that does not fit the one before it."""


class ProviderChanged(ProtocolError):
    """The provider's tokenizer, template or config is not what it was when the tenant first used it."""


class RemoteFault(ProtocolError):
    """The provider failed inside and says no more than that."""


class MaskError(VeilbaseError):
    """The privacy mask."""


class MaskReused(MaskError):
    """A slot was about to be used twice."""


class MaskOverflow(MaskError):
    """The no-wrap bound of DESIGN.md section 3 would not hold."""


class WeakParameters(MaskError):
    """Parameters below the accepted table, or a scheme that does not fit the arithmetic."""


class VerificationFailed(MaskError):
    """A reply or a file is not what the trusted checkpoint gives."""


class ConfigurationError(VeilbaseError):
    """A setting, a model name or a file that the user named."""


class DatasetError(VeilbaseError):
    """A row of the user's data set, named by its line."""


class WireCode(IntEnum):
    """The only thing that an error reply carries besides the request id (SPEC.md, section 6)."""

    INVALID_TENSOR = 1
    UNKNOWN_LAYER = 2
    LIMIT = 3
    UNAUTHENTICATED = 4
    NOT_PERMITTED = 5
    QUOTA = 6
    DEADLINE = 7
    UNAVAILABLE = 8
    VERSION = 9
    MALFORMED = 10
    INTERNAL = 11


REVOKED = "the provider has revoked this identity: ask its operator for a new one"
_TABLE: dict[WireCode, tuple[type[VeilbaseError], str]] = {
    WireCode.INVALID_TENSOR: (InvalidTensor, "the tensor does not have the shape, type or byte count of this layer"),
    WireCode.UNKNOWN_LAYER: (UnknownLayer, "this provider serves no such layer, direction or arithmetic"),
    WireCode.LIMIT: (LimitExceeded, "the request is larger than the limits in the manifest"),
    WireCode.UNAUTHENTICATED: (Unauthenticated, "the provider does not accept this certificate: enrol again"),
    WireCode.NOT_PERMITTED: (
        NotPermitted,
        "the provider does not allow this identity this kind of work: ask its operator",
    ),
    WireCode.QUOTA: (
        QuotaExceeded,
        "more at once than this tenant may send: send less, or later",
    ),
    WireCode.DEADLINE: (DeadlineExceeded, "the provider dropped the request: its deadline had passed"),
    WireCode.UNAVAILABLE: (
        Unavailable,
        "the provider cannot answer: it is shutting down, cannot read who is enrolled, or has lost what this layer "
        "needs; its operator knows more",
    ),
    WireCode.VERSION: (VersionMismatch, "the provider speaks another protocol version: install matching releases"),
    WireCode.MALFORMED: (MalformedFrame, "the provider could not read what it received"),
    WireCode.INTERNAL: (RemoteFault, "the provider failed while computing: its log names this request"),
}


def os_cause(exc: BaseException) -> OSError | None:
    """The cause that may be shown where one `except` catches the operating system's errors and a parser's.

    Returns:
        `exc` where it is the operating system's, whose text names a path and a reason; None, for `raise ... from None`,
        where it is a parser's, whose text may quote the file.
    """
    return exc if isinstance(exc, OSError) else None


def error_from_code(code: int, request_id: int, retry_ms: int = 0) -> VeilbaseError:
    """The local exception for an error frame.

    Args:
        code: the peer's number; an unknown one becomes `RemoteFault`.
        request_id: shown to the user, so that an operator can find the request in the provider's log.
        retry_ms: of a frame with QUOTA or UNAVAILABLE.

    Returns:
        An exception of the tree above with this side's own text; nothing of the text comes from the peer.
    """
    if code == WireCode.NOT_PERMITTED and request_id == 0:  # about the stream, and so about who opened it
        return NotPermitted(REVOKED)
    known = code in WireCode._value2member_map_
    kind, text = _TABLE[WireCode(code) if known else WireCode.INTERNAL]
    shown = f"{text} (request {request_id})"
    if kind is QuotaExceeded or kind is Unavailable:
        return kind(shown, retry_ms / 1000)  # type: ignore[call-arg]
    return kind(shown)


def code_of(exc: BaseException) -> WireCode:
    """The number that stands for `exc` on the wire; anything outside the table is INTERNAL."""
    for code, (kind, _) in _TABLE.items():
        if isinstance(exc, kind):
            return code
    if isinstance(exc, ProtocolError):
        return WireCode.MALFORMED
    return WireCode.INTERNAL
