"""This module expands a seed into rows. The expansion is normative (wire/SPEC.md, section 5). The public matrix A and
the rows of the masks `pad` and `shares` are expanded from seeds.

Guarantees: the same seed and row number give the same numbers on every machine, which tests/vectors/expand.json checks.
Every row is a stream of its own, so that any range of rows can be expanded alone, and a layer with fewer features uses
the first columns of the same rows. This module does not guarantee that a seed is fresh or kept secret: the seed's owner
must see to that. Source: wire/SPEC.md, section 5; AES-CTR: NIST SP 800-38A, section 6.5.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from wire.errors import InvalidTensor, MalformedFrame
from wire.limits import MAX_FEATURES

DOMAIN = b"veilbase expand v1\0"
"""Bytes that are hashed in front of the seed. A seed that is also used elsewhere thus gives another key here."""
SEED_BYTES = 32
MAX_ROWS = 1 << 40
"""Row numbers are below this bound. It is far below 2^64, at which row numbers would wrap, and exact in float64 and
JSON."""
_PACKED = struct.Struct("<32sQQ")
PACKED_BYTES = _PACKED.size
_BLOCK_BYTES = 16
_BLOCK_NUMBERS = 4
_STEP_BYTES = 1 << 18
"""How many bytes of counter blocks are made at a time. Making all counter blocks at once would double the memory.
Steps of 128 KiB to 4 MiB were equally fast (5.6 GB/s)."""


@dataclass(frozen=True)
class SeededRows:
    """Names a range of the rows that a seed expands to. `repr` hides the seed and pickling is refused, since a seed may
    be secret.

    Attributes:
        seed: 32 bytes.
        first_row, num_rows: the range; both are at least 0, and its end is at most 2^40.
    """

    seed: bytes = field(repr=False)
    first_row: int
    num_rows: int

    def __post_init__(self) -> None:
        """Raises InvalidTensor if the seed does not have 32 bytes, or if the range is not within 0 to 2^40."""
        if not isinstance(self.seed, bytes) or len(self.seed) != SEED_BYTES:
            raise InvalidTensor(f"expected a seed of {SEED_BYTES} bytes")
        if self.first_row < 0 or self.num_rows < 0 or self.first_row + self.num_rows > MAX_ROWS:
            raise InvalidTensor("expected seeded rows within 0 and 2^40")

    def __reduce__(self) -> NoReturn:
        """Refuses pickling and copying, since a seed may stand for a mask, and masks are never serialised."""
        raise TypeError("seeded rows are not pickled or copied")

    def pack(self) -> bytes:
        """Returns the 48 payload bytes of a request: seed, first_row and num_rows, little-endian."""
        return _PACKED.pack(self.seed, self.first_row, self.num_rows)

    @classmethod
    def unpack(cls, payload: bytes | bytearray | memoryview) -> SeededRows:
        """Returns the seed and range in a payload that `pack` has made.

        Args:
            payload: bytes from the peer, with any content.

        Raises:
            MalformedFrame: the payload does not have 48 bytes.
            InvalidTensor: the rows go beyond 2^40.
        """
        if len(payload) != PACKED_BYTES:
            raise MalformedFrame(f"a seed with its rows has {PACKED_BYTES} bytes, got {len(payload)}")
        return cls(*_PACKED.unpack(payload))

    def split(self, max_rows: int) -> Iterator[SeededRows]:
        """Yields ranges of at most `max_rows` rows, in order, which together are this range."""
        end = self.first_row + self.num_rows
        for first in range(self.first_row, end, max_rows):
            yield SeededRows(self.seed, first, min(max_rows, end - first))

    def expand(self, features: int) -> torch.Tensor:
        """Returns the numbers of the rows: row r is the AES-256-CTR key stream from counter block (r, 0), read as
        little-endian int32.

        Args:
            features: how many numbers a row has, 0 to 2^22.

        Returns:
            int32, shape (num_rows, features), CPU, contiguous.

        Raises:
            InvalidTensor: `features` is out of range.
        """
        if not 0 <= features <= MAX_FEATURES:
            raise InvalidTensor(f"expected 0 to {MAX_FEATURES} features, got {features}")
        row_blocks = -(-features // _BLOCK_NUMBERS)
        row_numbers = row_blocks * _BLOCK_NUMBERS
        # There is one block more than is needed: some versions of `update_into` ask for room beyond what they write.
        num_numbers = self.num_rows * row_numbers + _BLOCK_NUMBERS
        flat = torch.empty(num_numbers, dtype=torch.int32, device="cpu")  # The user may have set other defaults.
        if row_blocks:
            self._fill(flat.numpy().data.cast("B"), row_blocks)
        rows = flat[: self.num_rows * row_numbers].view(self.num_rows, row_numbers)
        return rows[:, :features].contiguous()  # This copies only if `features` ends inside a block.

    def _fill(self, out: memoryview, row_blocks: int) -> None:
        """Writes the key streams to the beginning of `out`, with `row_blocks` AES blocks for each row."""
        encryptor = _encryptor(self.seed)
        row_bytes = row_blocks * _BLOCK_BYTES
        counters = np.empty((max(1, min(self.num_rows, _STEP_BYTES // row_bytes)), row_blocks, 2), dtype=">u8")
        counters[:, :, 1] = np.arange(row_blocks)
        start = 0
        for part in self.split(len(counters)):
            counters[: part.num_rows, :, 0] = np.arange(part.first_row, part.first_row + part.num_rows)[:, None]
            size = part.num_rows * row_bytes
            encryptor.update_into(counters.data.cast("B")[:size], out[start : start + size + _BLOCK_BYTES])
            start += size


def _encryptor(seed: bytes) -> CipherContext:
    """Returns the block cipher under a seed's key, with which the caller encrypts counter blocks.

    CTR mode encrypts each counter block by itself. The caller writes the counters, so that one call encrypts many rows;
    a CTR context for each row cost 5 µs (1.2 GB/s at 1536 features, instead of 5.6). ECB mode is safe here, since no
    block occurs twice under a key.
    """
    key = hashlib.sha256(DOMAIN + seed).digest()
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305


Rows = torch.Tensor | SeededRows
"""The content of a request: the rows themselves or, for a hint, the seed that the rows are expanded from."""


def count_rows(rows: Rows) -> int:
    """Returns how many rows a request holds, or how many rows the provider expands from the request's seed."""
    return rows.num_rows if isinstance(rows, SeededRows) else rows.shape[0]
