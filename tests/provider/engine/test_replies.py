"""Tests what a tenant is told if a reply cannot be put together."""

from __future__ import annotations

import time

import pytest
import torch

from provider.engine.executor import FAILED, Job, Outcome, Replies
from provider.engine.replica import RETRY_S
from provider.schedule.ticket import Piece, RequestClass
from tests.support.ring_rows import ring_rows
from wire.errors import Unavailable, VeilbaseError
from wire.frame import Arithmetic, Call, Direction


@pytest.mark.parametrize(
    ("error", "kind", "retry_s"),
    [(torch.OutOfMemoryError("CUDA out of memory: 123"), Unavailable, RETRY_S), (RuntimeError("123"), type(FAILED), 0)],
)
def test_a_piece_for_whose_reply_there_is_no_memory_is_refused_with_a_time(
    error: RuntimeError, kind: type[VeilbaseError], retry_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may have room for the product of a piece, and none for the whole reply."""
    told: list[Outcome] = []
    call = Call(0, Direction.FORWARD, Arithmetic.RING)
    job = Job(call, ring_rows(6), "acme", RequestClass.PREFILL, time.monotonic() + 60, told.append, 4)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(job, "place", fail)
    Replies(None, lambda ticket: None).deliver(Piece(job.ticket, 0, 3), torch.zeros(3, 4, dtype=torch.int32))
    (found,) = told
    assert isinstance(found, kind)
    assert getattr(found, "retry_s", 0) == retry_s
    assert "123" not in str(found)
