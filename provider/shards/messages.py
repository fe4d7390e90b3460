"""Defines the messages between a shard on another host and the provider before the first product.

The shard opens the stream and names the shard that it wants to be (Join). The provider sends the ids of the groups and
the digests of their weights (Assignment). Once the shard has loaded these groups, the shard sends the digests of its
own weights (Ready), and the provider accepts (JOINED). After that the provider sends REQUEST frames, and the shard
replies to each with REPLY or ERROR frames, as in wire/SPEC.md, section 3.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wire.errors import MalformedFrame, VersionMismatch
from wire.frame import PROTOCOL_VERSION
from wire.limits import MAX_GROUPS

SHARD_METHOD = "/veilbase.v1.Provider/Shard"
JOINED = b"joined"
"""The provider's last message before the first request."""
MAX_MESSAGE_BYTES = 1 << 20
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Digests = Annotated[dict[Annotated[int, Field(ge=0, lt=MAX_GROUPS)], _Digest], Field(max_length=MAX_GROUPS)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Join(_Message):
    """Names the shard of which a host wants to be a replica; this is the host's first message."""

    protocol: int
    shard: int = Field(ge=0, lt=1024)


class Assignment(_Message):
    """Assigns layer groups to a joining host; `digests` holds each group's `ServedGroup.fingerprint`, by group id."""

    model_id: str = Field(max_length=512)
    weights: str = Field(max_length=32)
    digests: _Digests


class Ready(_Message):
    """Says that the host holds the assigned groups; `digests` holds the digest of the host's own weights for each group
    id."""

    digests: _Digests


_AnyMessage = TypeVar("_AnyMessage", Join, Assignment, Ready)


def pack(message: Join | Assignment | Ready) -> bytes:
    """Encodes a message as JSON in UTF-8."""
    return message.model_dump_json().encode()


def unpack(kind: type[_AnyMessage], data: bytes) -> _AnyMessage:
    """Decodes and checks a message from a peer.

    Args:
        kind: the expected type of message.
        data: the bytes from the peer, which may be anything.

    Raises:
        MalformedFrame: the data is too large, or is not a message of this type.
        VersionMismatch: the peer uses another protocol version.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedFrame(f"expected a message of at most {MAX_MESSAGE_BYTES} bytes, got {len(data)}")
    try:
        message = kind.model_validate_json(data)
    except ValidationError:
        raise MalformedFrame(f"expected {kind.__name__.lower()} as JSON") from None  # quotes what the peer sent
    if isinstance(message, Join) and message.protocol != PROTOCOL_VERSION:
        raise VersionMismatch(f"this end speaks protocol {PROTOCOL_VERSION}, the other {message.protocol}")
    return message
