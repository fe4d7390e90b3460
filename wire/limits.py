"""Sizes that both ends check before they allocate anything (wire/SPEC.md, section 4)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MIB = 1 << 20

CHUNK_BYTES = 1 * MIB
"""Most payload bytes in one frame, 1 MiB (docs/decisions/0001-raw-frames.md); 256 KiB was no faster on loopback
mTLS."""

MAX_FRAME_BYTES = CHUNK_BYTES + 4096
"""gRPC's message limit in bytes, set on both ends: a chunk, its header and room to spare."""

MAX_MANIFEST_BYTES = 64 * MIB
MAX_BUNDLE_BYTES = 64 << 30
MAX_BUNDLE_FILES = 32
MAX_TEXT_FILE_BYTES = 128 * MIB
"""Most bytes of a config or tokenizer file, 128 MiB, since these are read whole; safetensors files are not."""
MAX_FEATURES = 1 << 22
MAX_GROUPS = 1 << 16
MAX_DEADLINE_MS = 3_600_000
MAX_RETRY_S = 60.0
"""Longest wait in seconds that a refusal with QUOTA or UNAVAILABLE may name. A provider that names more is refusing
(wire/SPEC.md, section 6)."""
RETRY_METADATA = "veilbase-retry-ms"
"""Key of the trailing metadata that carries, with gRPC's status UNAVAILABLE, what retry_ms carries in a frame."""

KEEPALIVE_TIME_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000


class Limits(BaseModel):
    """What one stream may ask for. The manifest announces the limits, the provider enforces them and the tenant keeps
    them.

    Attributes:
        max_rows: the most rows in one request.
        max_tensor_bytes: the largest payload of one request, and of one reply.
        max_in_flight_bytes: the most payload bytes, together, of a stream's unanswered requests and of their replies.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_rows: int = Field(default=65_536, ge=1, le=1 << 24)
    max_tensor_bytes: int = Field(default=64 * MIB, ge=4096, le=1 << 32)
    max_in_flight_bytes: int = Field(default=256 * MIB, ge=8192, le=1 << 36)


def deadline_s(num_bytes: int) -> float:
    """Returns the seconds after which a request counts as lost: 30 s, plus its own and its reply's bytes at 1 MB/s."""
    return 30.0 + num_bytes / 1e6
