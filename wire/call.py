"""What a request asks for. This is apart from frames, so that code which only counts requests does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Direction(IntEnum):
    """Whether rows go through the layer, or back through its transpose."""

    FORWARD = 0
    BACKWARD = 1


class Arithmetic(IntEnum):
    """RING multiplies int32 rows by int8 weights mod 2^32; FLOAT multiplies float32 rows by native or dequantised
    weights."""

    RING = 0
    FLOAT = 1


class Purpose(IntEnum):
    """PRODUCT adds the bias where the arithmetic has one, EFFECT is bias-free, HINT is for the ring only and takes a
    seed."""

    PRODUCT = 0
    EFFECT = 1
    HINT = 2


@dataclass(frozen=True)
class Call:
    """Names the product that a request asks for. It is the unit of batching, masks and checks."""

    group: int
    direction: Direction
    arithmetic: Arithmetic
    purpose: Purpose = Purpose.PRODUCT
