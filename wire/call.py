"""This module defines what a request asks for. It is apart from wire/frame.py, so that code that only counts requests
does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Direction(IntEnum):
    """Says what a request multiplies. FORWARD multiplies rows by the layer's weight; BACKWARD multiplies gradients by
    the transposed weight."""

    FORWARD = 0
    BACKWARD = 1


class Arithmetic(IntEnum):
    """Says how rows are multiplied. RING multiplies int32 rows by int8 weights mod 2^32; FLOAT multiplies float32 rows
    by native or dequantised weights."""

    RING = 0
    FLOAT = 1


class Purpose(IntEnum):
    """Says which product is requested. PRODUCT adds the bias if the arithmetic is FLOAT; EFFECT leaves the bias out;
    HINT is for RING only and multiplies rows that the provider expands from a seed."""

    PRODUCT = 0
    EFFECT = 1
    HINT = 2


@dataclass(frozen=True)
class Call:
    """Identifies the product that a request asks for, by layer group, direction, arithmetic and purpose."""

    group: int
    direction: Direction
    arithmetic: Arithmetic
    purpose: Purpose = Purpose.PRODUCT
