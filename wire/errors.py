"""This module defines the errors that a user of Veilbase can meet, in one tree. Some modules define subclasses of
these where they raise them; of those, the tree shows SlotsExhausted, SeedExhausted and PromptsFailed.

    VeilbaseError
    ├── RequestError            the request itself is wrong; sending it again will not help
    │   ├── InvalidTensor       a wrong shape, dtype or byte count, or a non-finite value
    │   │   └── NotFinite       the tenant's own rows, gradients, weights or logits hold NaN or infinity
    │   ├── UnknownLayer        this provider has no such group, direction or arithmetic
    │   └── LimitExceeded       the request is larger than the limits in the manifest
    ├── AccessError             the provider refuses this identity, or accepts no more from it now
    │   ├── Unauthenticated     the tenant has no certificate that this provider accepts
    │   ├── NotPermitted        the identity is revoked, or not allowed to do this
    │   └── QuotaExceeded       the tenant has too much in flight, sends too much in a second, or has too many calls
    ├── TransportError          the connection between the two ends failed
    │   ├── DeadlineExceeded    a reply, a file or an answer was not complete in time
    │   ├── Unavailable         the provider cannot be reached or went away
    │   └── ForkedConnection    a connection was used in a forked child
    ├── ProtocolError           the peer broke wire/SPEC.md
    │   ├── VersionMismatch     the two ends speak different versions
    │   ├── MalformedFrame      the peer sent a frame, manifest or bundle file that is not valid
    │   ├── ProviderChanged     the bundle is not the one pinned at first use (tenant_sdk/trust/pins.py)
    │   ├── WrongPeer           the process behind a socket of this host is not the one that it should be
    │   └── RemoteFault         the provider failed and says no more than that
    ├── MaskError               the privacy mask cannot be used
    │   ├── MaskReused          a slot (one row of a mask) was about to be used twice
    │   ├── MaskOverflow        the no-wrap bound would not hold
    │   ├── SlotsExhausted      a block of mask rows has too few unused rows left (noise/blocks/slots.py)
    │   ├── SeedExhausted       the requested secrets would exceed a seed's budget (noise/ledger/ledger.py)
    │   ├── WeakParameters      the parameters are weaker than the accepted sets
    │   └── VerificationFailed  a reply or a file does not match the trusted checkpoint
    ├── StorageError            the tenant's own disk is full, or gives back other bytes than were written to it
    ├── ConfigurationError      a setting, a model name or a file that the user named cannot be used
    ├── DatasetError            a row of the user's data set, named by its line, cannot be used
    └── PromptsFailed           some prompts failed; it holds the others' answers (tenant_sdk/serving/many.py)

The message of an error is one line, which says what was expected and what was received, or what the user should do.
A message never holds a tensor value, a secret or another tenant's name. What crosses the wire is a `WireCode` or a gRPC
status with a fixed text, never `str(exc)` (wire/SPEC.md, section 6).

Causes: an error is raised with its cause (`raise ... from exc`) if the cause is an operating system's error, a parser's
error about a file or a library's refusal of an option, so that a traceback shows the cause. An error is raised with
`from None` in all code that handles rows (`noise/`, the transports, replies, the provider's engine), and wherever the
cause may quote texts, tensor values, a secret, a peer or a file that names tenants (tests/security/test_causes.py).

Whatever is written to a terminal goes through `printable`, errors and a model's answers alike: a model's vocabulary, a
file's name or an adapter's settings may hold escape sequences.
"""

from __future__ import annotations

import re
from enum import IntEnum

_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""The characters that a terminal may obey, or that change where others are shown: control characters but tab and line
feed, line and paragraph separators, embeddings and overrides of the direction of writing, and halves of surrogates."""


def printable(text: str, *, one_line: bool = False) -> str:
    """Returns a text for a terminal: each character that a terminal may obey becomes its escape in Python, as `\\x1b`.

    Args:
        text: the text, or a part of one: whether a character is replaced does not depend on those beside it.
        one_line: whether line feeds and tabs are replaced too.
    """
    found = _COMMANDS.sub(lambda match: ascii(match[0])[1:-1], text)
    return found.replace("\n", "\\n").replace("\t", "\\t") if one_line else found


class VeilbaseError(Exception):
    """All errors of Veilbase derive from this class."""


class RequestError(VeilbaseError):
    """The request is wrong; sending it again will not help."""


class InvalidTensor(RequestError):
    """A tensor has a wrong shape, dtype or byte count, or holds NaN or infinity."""


class NotFinite(InvalidTensor):
    """One of the tenant's own values is NaN or infinite. Only the tenant's side raises this error."""


class UnknownLayer(RequestError):
    """This provider has no such group, direction or arithmetic."""


class LimitExceeded(RequestError):
    """The request is larger than the limits that the manifest announces."""


class AccessError(VeilbaseError):
    """The provider refuses this identity, or accepts no further requests from this identity at the moment."""


class Unauthenticated(AccessError):
    """The tenant has no certificate, or the provider does not accept the tenant's certificate."""


class NotPermitted(AccessError):
    """The identity is revoked, or is not allowed to send this kind of work."""


class QuotaExceeded(AccessError):
    """The tenant has too many requests or bytes in flight, sends too much in a second, or opens too many calls at
    once."""

    def __init__(self, text: str, retry_s: float = 0.0) -> None:
        """Makes the error with the message `text`. `retry_s` is the number of seconds after which the same request may
        pass; 0 if this is not known."""
        super().__init__(text)
        self.retry_s = retry_s


class TransportError(VeilbaseError):
    """The connection between tenant and provider failed."""


class DeadlineExceeded(TransportError):
    """A reply, a file of the bundle or an answer was not complete before its deadline."""


class Unavailable(TransportError):
    """The provider cannot be reached, has ended, or lacks what the request needs, such as a lost shard or memory of its
    device; or this side has closed the connection."""

    def __init__(self, text: str, retry_s: float = 0.0) -> None:
        """Makes the error with the message `text`. `retry_s` is the number of seconds after which the same request, or
        a new stream, may be accepted; 0 if this is not known."""
        super().__init__(text)
        self.retry_s = retry_s


class ForkedConnection(TransportError):
    """A forked child used a connection that was opened before the fork."""


class ProtocolError(VeilbaseError):
    """The peer did not follow the protocol in wire/SPEC.md."""


class VersionMismatch(ProtocolError):
    """The two ends speak different protocol versions."""


class MalformedFrame(ProtocolError):
    """The peer sent a frame that is not valid or does not continue the previous one, or a manifest or bundle file that
    is not valid."""


class ProviderChanged(ProtocolError):
    """The provider's tokenizer, template or config differs from the one that the tenant recorded at first use."""


class WrongPeer(ProtocolError):
    """The process at the other end of a socket of this host is not the one that holds the certificate, or belongs to
    another user than expected (wire/SPEC.md, section 1)."""


class RemoteFault(ProtocolError):
    """The provider had an internal failure and says no more than that."""


class MaskError(VeilbaseError):
    """The privacy mask cannot be made or used."""


class MaskReused(MaskError):
    """A slot (one row of a mask) was about to be used twice."""


class MaskOverflow(MaskError):
    """The bound that keeps unmasked results from wrapping would not hold (wire/SPEC.md, section 5)."""


class WeakParameters(MaskError):
    """The lattice parameters are weaker than every set in docs/parameters.md, or are a toy, which only attacks and
    tests may use."""


class VerificationFailed(MaskError):
    """A reply or a file does not match the trusted checkpoint."""


class StorageError(VeilbaseError):
    """The tenant's own disk is full, or gives back other bytes than were written to it."""


class ConfigurationError(VeilbaseError):
    """A setting, a model name or a file that the user named cannot be used."""


class DatasetError(VeilbaseError):
    """A row of the user's data set cannot be used; the message names its line."""


class WireCode(IntEnum):
    """Lists the numbers that an error reply may carry. Besides the number, such a reply holds only a request id and,
    for QUOTA and UNAVAILABLE, a waiting time (wire/SPEC.md, section 6)."""

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
    """Returns the cause for `raise ... from os_cause(exc)` in an `except` clause that catches both operating system
    errors and a parser's errors.

    Returns:
        `exc` if the operating system raised it, since its text names a path and a reason; None if a parser raised it,
        since its text may quote the file.
    """
    return exc if isinstance(exc, OSError) else None


def error_from_code(code: int, request_id: int, retry_ms: int = 0) -> VeilbaseError:
    """Returns the exception that this side raises for an error frame.

    Args:
        code: the number that the peer sent; an unknown number gives `RemoteFault`.
        request_id: the request's id, shown to the user, so that an operator can find the request in the provider's log.
        retry_ms: the milliseconds that a frame with QUOTA or UNAVAILABLE names, after which the same request may pass.

    Returns:
        An exception of the tree above with this side's own text; nothing of the text comes from the peer.
    """
    # An error with request id 0 is about the stream, and so about the identity that opened the stream.
    if code == WireCode.NOT_PERMITTED and request_id == 0:
        return NotPermitted(REVOKED)
    known = code in WireCode._value2member_map_
    kind, text = _TABLE[WireCode(code) if known else WireCode.INTERNAL]
    shown = f"{text} (request {request_id})"
    if kind is QuotaExceeded or kind is Unavailable:
        return kind(shown, retry_ms / 1000)  # type: ignore[call-arg]
    return kind(shown)


def code_of(exc: BaseException) -> WireCode:
    """Returns the number that stands for `exc` on the wire. An exception without a number of its own gives MALFORMED if
    it is a `ProtocolError`, and otherwise INTERNAL."""
    for code, (kind, _) in _TABLE.items():
        if isinstance(exc, kind):
            return code
    if isinstance(exc, ProtocolError):
        return WireCode.MALFORMED
    return WireCode.INTERNAL
