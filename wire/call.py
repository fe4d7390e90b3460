"""This module defines what a request asks for. It is apart from wire/frame.py, so that code that only counts requests
does not load torch."""

from __future__ import annotations

import functools
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
    HINT is for RING only and multiplies rows that the provider expands from a seed. WEIGHTS is reserved, and is
    answered as a layer that is not there: weights are fetched by a call of their own (wire/SPEC.md, section 2)."""

    PRODUCT = 0
    EFFECT = 1
    HINT = 2
    WEIGHTS = 3


@dataclass(frozen=True)
class Call:
    """Identifies the product that a request asks for, by layer group, direction, arithmetic and purpose, and the widths
    of the numbers that cross.

    Attributes:
        bits: how many bits each number of the request has, 24, 26, 28 or 32; 32 if the arithmetic is FLOAT or the
            purpose is HINT.
        reply_bits: how many bits each number of the reply has: `bits`, or 16.
    """

    group: int
    direction: Direction
    arithmetic: Arithmetic
    purpose: Purpose = Purpose.PRODUCT
    bits: int = 32
    reply_bits: int = 32

    @property
    def product(self) -> Call:
        """Returns this call with numbers of 32 bits. Rows are multiplied alike whatever their widths, so requests of
        several widths can share a product."""
        return self if self.bits == self.reply_bits == 32 else self._whole

    @functools.cached_property
    def _whole(self) -> Call:
        return Call(self.group, self.direction, self.arithmetic, self.purpose)
