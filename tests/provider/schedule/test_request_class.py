"""Tests which class a request counts as, depending on what its tenant does."""

from __future__ import annotations

import pytest

from provider.schedule.ticket import DECODE_IN_FLIGHT, DECODE_ROWS, RequestClass, allowed_by, class_of
from wire.frame import Arithmetic, Call, Direction, Purpose

FORWARD = Call(0, Direction.FORWARD, Arithmetic.RING)
BACKWARD = Call(0, Direction.BACKWARD, Arithmetic.RING)
HINT = Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.HINT)
SEVERAL = DECODE_IN_FLIGHT


@pytest.mark.parametrize(
    ("call", "num_rows", "num_decode", "is_training", "expected"),
    [
        (FORWARD, 1, 0, False, RequestClass.DECODE),
        (FORWARD, DECODE_ROWS, 0, True, RequestClass.DECODE),
        (FORWARD, 1, SEVERAL, True, RequestClass.PREFILL),
        (FORWARD, DECODE_ROWS + 1, 0, False, RequestClass.PREFILL),
        (FORWARD, DECODE_ROWS + 1, 0, True, RequestClass.FINETUNE),
        (BACKWARD, 1, 0, False, RequestClass.FINETUNE),
        (HINT, 1, 0, False, RequestClass.DECODE),
        (HINT, DECODE_ROWS + 1, 0, False, RequestClass.FINETUNE),
    ],
)
def test_class_of(call: Call, num_rows: int, num_decode: int, is_training: bool, expected: RequestClass) -> None:
    assert class_of(call, num_rows, num_decode, is_training) is expected


def test_who_may_decode_may_send_what_counts_as_prefill_beside_others() -> None:
    crowded = class_of(FORWARD, 1, SEVERAL, False)
    assert RequestClass.DECODE in allowed_by(FORWARD, crowded, 1)
    assert RequestClass.DECODE not in allowed_by(FORWARD, RequestClass.PREFILL, DECODE_ROWS + 1)
    assert allowed_by(BACKWARD, RequestClass.FINETUNE, 1) == {RequestClass.FINETUNE}
