"""Tests what a shard's process answers when its device has no memory left, or is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from provider.engine.replica import RETRY_S, ReplicaLost
from provider.shards import messages
from provider.shards.messages import SharedRows
from provider.shards.worker import Worker
from wire.errors import Unavailable, error_from_code
from wire.frame import Arithmetic, Call, Direction, FrameType, Header
from wire.ring.seeded_rows import Rows

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)


@pytest.fixture
def shared() -> Iterator[tuple[SharedRows, SharedRows]]:
    both = SharedRows.create(4096), SharedRows.create(4096)
    yield both
    for each in both:
        each.close()


def worker(shared: tuple[SharedRows, SharedRows], error: Exception) -> Worker:
    def fail(call: Call, rows: Rows) -> torch.Tensor:
        raise error

    return Worker(fail, *shared)


def request(shared: tuple[SharedRows, SharedRows]) -> list[bytes]:
    return messages.request(Header(FrameType.REQUEST, 7, CALL, 1, 4), *(each.num_bytes for each in shared))


def test_without_memory_the_front_refuses_with_a_time(shared: tuple[SharedRows, SharedRows]) -> None:
    answer = messages.read_reply(worker(shared, Unavailable("no memory", RETRY_S)).answer(request(shared)))
    assert (answer.kind, answer.request_id) == (FrameType.ERROR, 7)
    error = error_from_code(answer.code, 7, int(1000 * RETRY_S))  # as `ShardProcess` does
    assert isinstance(error, Unavailable)
    assert error.retry_s == RETRY_S


def test_a_lost_device_ends_the_process(shared: tuple[SharedRows, SharedRows]) -> None:
    """An answer would say that the request failed; without one, the front gives the batch to another replica."""
    with pytest.raises(ReplicaLost):
        worker(shared, ReplicaLost()).answer(request(shared))
