"""Tests what a tenant is told if a reply cannot be put together."""

from __future__ import annotations

import pytest
import torch

from provider.engine.executor import FAILED, Replies
from provider.engine.replica import RETRY_S
from provider.schedule.ticket import Piece
from tests.support.executors import Answer
from tests.support.ring_products import ring_rows
from wire.errors import Unavailable, VeilbaseError


@pytest.mark.parametrize(
    ("error", "kind", "retry_s"),
    [(torch.OutOfMemoryError("CUDA out of memory: 123"), Unavailable, RETRY_S), (RuntimeError("123"), type(FAILED), 0)],
)
def test_a_piece_for_whose_reply_there_is_no_memory_is_refused_with_a_time(
    error: RuntimeError, kind: type[VeilbaseError], retry_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may have room for the product of a piece, and none for the whole reply."""
    answer = Answer(ring_rows(6))

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(answer.request, "place", fail)
    Replies(None, lambda ticket: None).deliver(Piece(answer.request.ticket, 0, 3), torch.zeros(3, 4, dtype=torch.int32))
    found = answer.get()
    assert isinstance(found, kind)
    assert getattr(found, "retry_s", 0) == retry_s
    assert "123" not in str(found)
