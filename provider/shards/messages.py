"""What a shard on another host and the provider say to each other before the first product.

The shard opens the stream and says which shard it wants to be; the provider names the groups and the digests of their
weights; the shard, once it holds them, names the digests that it has, and the provider accepts. From then on the
provider sends REQUEST frames and the shard answers each with REPLY or ERROR frames, as in wire/SPEC.md, section 3.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wire.errors import MalformedFrame, VersionMismatch
from wire.frame import PROTOCOL_VERSION
from wire.limits import MAX_GROUPS

SHARD_METHOD = "/veilbase.v1.Provider/Shard"
JOINED = b"joined"
"""The provider's last word before the first request."""
MAX_MESSAGE_BYTES = 1 << 20
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Digests = Annotated[dict[Annotated[int, Field(ge=0, lt=MAX_GROUPS)], _Digest], Field(max_length=MAX_GROUPS)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Join(_Message):
    """The shard's first word."""

    protocol: int
    shard: int = Field(ge=0, lt=1024)


class Assignment(_Message):
    """The provider's answer: by group id, `ServedGroup.fingerprint`."""

    model_id: str = Field(max_length=512)
    weights: str = Field(max_length=32)
    digests: _Digests


class Ready(_Message):
    """The shard holds these."""

    digests: _Digests


_AnyMessage = TypeVar("_AnyMessage", Join, Assignment, Ready)


def pack(message: Join | Assignment | Ready) -> bytes:
    """As JSON."""
    return message.model_dump_json().encode()


def unpack(kind: type[_AnyMessage], data: bytes) -> _AnyMessage:
    """Reads one.

    Args:
        data: from the peer, any content.

    Raises:
        MalformedFrame: too large, or not such a message.
        VersionMismatch: another protocol version.
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
