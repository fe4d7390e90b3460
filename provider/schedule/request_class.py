"""Infers the class of each request from what the tenant sends, since a tenant could claim a false class."""

from __future__ import annotations

import functools
from enum import IntEnum

from wire.call import Call, Direction, Purpose

DECODE_ROWS = 16
"""The most rows of a forward request that counts as decode. Larger requests are prefill, or fine-tuning if the tenant
sends gradients."""
DECODE_IN_FLIGHT = 3
"""The most requests of one tenant that count as decode at a time, over all its streams. While a tenant decodes, it
calls one layer after the other. Further small requests are not decoding, and must not delay tenants that decode."""


class RequestClass(IntEnum):
    """Lists the classes of work, the most urgent first. The operator may forbid a tenant some classes."""

    DECODE = 0
    PREFILL = 1
    FINETUNE = 2


def class_of(call: Call, num_rows: int, num_decode: int, is_training: bool) -> RequestClass:
    """Returns the class of work (decode, prefill or fine-tuning) as which a request counts.

    Args:
        call: the call of the request.
        num_rows: the request's number of rows.
        num_decode: how many of the tenant's requests in flight count as decode.
        is_training: whether the tenant sent gradients within the last minute.
    """
    if call.direction is Direction.BACKWARD:
        return RequestClass.FINETUNE
    if num_rows <= DECODE_ROWS:
        return RequestClass.DECODE if num_decode < DECODE_IN_FLIGHT else RequestClass.PREFILL
    # A seed of few rows, handled above, is one of a decode step's two shares; a seed of many rows is for hints.
    return RequestClass.FINETUNE if is_training or call.purpose is Purpose.HINT else RequestClass.PREFILL


def allowed_by(call: Call, request_class: RequestClass, num_rows: int) -> frozenset[RequestClass]:
    """Returns the classes that permit a request; the tenant must be allowed at least one of them.

    Forward passes are part of fine-tuning, so a tenant that may fine-tune may send forward requests. The default mask
    needs hints for any work, so every class permits hints. A small request may count as prefill only because other
    requests are in flight, so a tenant that may decode may send small requests of class prefill.
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
