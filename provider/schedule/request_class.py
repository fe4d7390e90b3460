"""Kinds of work, told by what a tenant does: the provider is not told, and need not believe."""

from __future__ import annotations

import functools
from enum import IntEnum

from wire.call import Call, Direction, Purpose

DECODE_ROWS = 16
"""Forward requests of at most so many rows count as decode; larger ones are prefill, or fine-tuning of a tenant that
sends gradients."""
DECODE_IN_FLIGHT = 3
"""Who decodes asks for one layer after the other; a tenant's small requests beyond so many at a time, on all its
streams, are no decoding, and must not be in the way of who does."""


class RequestClass(IntEnum):
    """The most urgent first; the operator may forbid a tenant some of them."""

    DECODE = 0
    PREFILL = 1
    FINETUNE = 2


def class_of(call: Call, num_rows: int, num_decode: int, is_training: bool) -> RequestClass:
    """What a request counts as.

    Args:
        num_decode: of the tenant's requests in flight, those that count as decode.
        is_training: whether it sent gradients lately.
    """
    if call.direction is Direction.BACKWARD:
        return RequestClass.FINETUNE
    if num_rows <= DECODE_ROWS:
        return RequestClass.DECODE if num_decode < DECODE_IN_FLIGHT else RequestClass.PREFILL
    # a few rows of a seed are a share of somebody's decode step; many are the hints of a mask
    return RequestClass.FINETUNE if is_training or call.purpose is Purpose.HINT else RequestClass.PREFILL


def allowed_by(call: Call, request_class: RequestClass, num_rows: int) -> frozenset[RequestClass]:
    """The classes of which a tenant must have one to send such a request.

    Fine-tuning begins with forward passes, and the default mask of any work with hints: who may do the one may send
    the other; and who may decode, requests of as few rows that count as prefill beside others.
    """
    return _allowed_by(call.direction, call.purpose, request_class, num_rows <= DECODE_ROWS)


@functools.cache
def _allowed_by(
    direction: Direction, purpose: Purpose, request_class: RequestClass, is_few: bool
) -> frozenset[RequestClass]:
    if direction is Direction.BACKWARD:
        return frozenset({RequestClass.FINETUNE})
    if purpose is Purpose.HINT:
        return frozenset(RequestClass)
    decode = {RequestClass.DECODE} if is_few else set()
    return frozenset({request_class, RequestClass.FINETUNE, *decode})
