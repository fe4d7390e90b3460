"""Kinds of work."""

from __future__ import annotations

from enum import IntEnum

from wire.frame import Call, Direction, Purpose


class RequestClass(IntEnum):
    """The most urgent first; the operator may forbid a tenant some of them."""

    DECODE = 0
    PREFILL = 1
    FINETUNE = 2


def allowed_by(call: Call, request_class: RequestClass, is_small: bool) -> frozenset[RequestClass]:
    """The classes of which a tenant must have one to send such a request.

    Fine-tuning begins with forward passes, and the default mask of any work with hints: who may do the one may send
    the other.

    Args:
        is_small: whether it has no more rows than decode has: beside others it may count as prefill.
    """
    if call.direction is Direction.BACKWARD:
        return frozenset({RequestClass.FINETUNE})
    if call.purpose is Purpose.HINT:
        return frozenset(RequestClass)
    decode = {RequestClass.DECODE} if is_small else set()
    return frozenset({request_class, RequestClass.FINETUNE, *decode})
