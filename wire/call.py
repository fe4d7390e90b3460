"""What a request asks for. Apart from frames, so that who only counts requests does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Direction(IntEnum):
    """Through the layer, or back through its transpose."""

    FORWARD = 0
    BACKWARD = 1


class Arithmetic(IntEnum):
    """RING: int32 rows times int8 weights mod 2^32. FLOAT: float32 rows times native or dequantised weights."""

    RING = 0
    FLOAT = 1


class Purpose(IntEnum):
    """PRODUCT: with bias where the arithmetic adds one. EFFECT: bias-free. HINT: ring only, rows from a seed."""

    PRODUCT = 0
    EFFECT = 1
    HINT = 2


@dataclass(frozen=True)
class Call:
    """Which product a request asks for: the unit of batching, masks and checks."""

    group: int
    direction: Direction
    arithmetic: Arithmetic
    purpose: Purpose = Purpose.PRODUCT
