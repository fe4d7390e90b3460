"""This module holds the sizes that both ends check before they allocate anything (wire/SPEC.md, section 4)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MIB = 1 << 20

ITEM_BYTES = 4
"""How many bytes one number takes in memory: int32 in the ring, float32 otherwise. On the wire a ring number may take
fewer bits (`Call.bits`)."""
PROTOCOL_VERSION = 2
"""The version of the protocol, which both ends compare before anything else of a manifest or a greeting."""
INT8_MAX = 127
"""The largest magnitude of a number of the int8 weights."""

CHUNK_BYTES = 1 * MIB
"""The most payload bytes in one frame, 1 MiB (docs/decisions/0001-raw-frames.md). Chunks of 256 KiB were no faster over
TLS on loopback."""

MAX_FRAME_BYTES = CHUNK_BYTES + 4096
"""The largest gRPC message in bytes that either end accepts: a chunk, its header and room to spare."""

MAX_MANIFEST_BYTES = 64 * MIB
MAX_BUNDLE_BYTES = 64 << 30
MAX_BUNDLE_FILES = 32
MAX_TEXT_FILE_BYTES = 128 * MIB
"""The most bytes of a config or tokenizer file, 128 MiB. Such a file is read into memory whole; a safetensors file is
not."""
GROUP_BYTES = 4
"""The bytes of a group's number in a request for its weight (wire/SPEC.md, section 2)."""
MAX_FEATURES = 1 << 22
MAX_GROUPS = 1 << 16
MAX_DEADLINE_MS = 3_600_000
MAX_RETRY_S = 60.0
"""The longest wait in seconds that a provider may name when it refuses a request with QUOTA or UNAVAILABLE. A refusal
that names a longer wait is final (wire/SPEC.md, section 6)."""
RETRY_METADATA = "veilbase-retry-ms"
"""The key, in gRPC's trailing metadata, of the number of milliseconds after which the tenant may try again. It comes
with a status UNAVAILABLE. An ERROR frame has this number in its header."""

KEEPALIVE_TIME_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000


class Limits(BaseModel):
    """Holds what one stream may ask for. The manifest announces the limits, the provider enforces them and the tenant
    keeps to them.

    Attributes:
        max_rows: the most rows in one request.
        max_tensor_bytes: the largest payload, in bytes, of one request and of one reply. A seed counts as the rows
            that it stands for.
        max_in_flight_bytes: the largest sum of the payload bytes of a stream's unanswered requests and of the replies
            to them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_rows: int = Field(default=65_536, ge=1, le=1 << 24)
    max_tensor_bytes: int = Field(default=64 * MIB, ge=4096, le=1 << 32)
    max_in_flight_bytes: int = Field(default=256 * MIB, ge=8192, le=1 << 36)


def deadline_s(num_bytes: int) -> float:
    """Returns the seconds after which a request counts as lost: 30 s, plus 1 s for each megabyte to transfer.

    Args:
        num_bytes: the bytes to transfer, such as those of a request and its reply together.
    """
    return 30.0 + num_bytes / 1e6
