"""Tests what a stream copies: rows of the CPU by way of its staging buffers, and no rows that are on the device."""

from __future__ import annotations

import itertools

import pytest
import torch

from provider.device.on_device import DeviceStream
from tests.support.ring_products import ring_rows
from wire.ring import coding

CPU = torch.device("cpu")
UNTOUCHED = 77
COLS, REPLY_COLS = 24, 40


@pytest.mark.parametrize("on_device", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize("num_padded", [0, 64])
def test_only_what_is_on_the_cpu_is_staged(on_device: tuple[bool, ...], num_padded: int) -> None:
    """All memory here is the CPU's, so the test says which tensors count as the device's."""
    weight = torch.randint(-127, 128, (COLS, REPLY_COLS), dtype=torch.int8)
    block = [(ring_rows(count, COLS), torch.zeros(count, REPLY_COLS, dtype=torch.int32)) for count in (3, 1, 7)]
    there = {id(one) for pair, is_there in zip(block, on_device, strict=True) for one in pair if is_there}
    stream = DeviceStream(CPU, is_here=lambda one: id(one) not in there)
    height = max(11, num_padded)
    staged = stream.rows.view(11, COLS, torch.int32).fill_(UNTOUCHED)
    back = stream.reply.view(11, REPLY_COLS, torch.int32).fill_(UNTOUCHED)
    seen: list[torch.Tensor] = []
    stream.start(block, lambda rows: (seen.append(rows.clone()), coding.product(rows, weight))[1], num_padded)
    stream.finish()
    assert seen[0].shape == (height, COLS)
    assert not seen[0][11:].any()
    for rows, reply in block:
        assert torch.equal(reply, coding.product(rows, weight))
    for buffer, at in ((staged, 0), (back, 1)):
        crossed = [pair[at] for pair, is_there in zip(block, on_device, strict=True) if not is_there]
        count = sum(one.shape[0] for one in crossed)
        assert torch.equal(buffer[:count], torch.cat([torch.empty(0, buffer.shape[1], dtype=torch.int32), *crossed]))
        assert bool((buffer[count:] == UNTOUCHED).all())


def test_memory_is_let_go_after_the_device_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a block that is given up stay until the device is done, since they may be memory that is unmapped
    with its last reference."""
    stream, held = DeviceStream(CPU), []
    rows = ring_rows(2, COLS)
    stream.start([(rows, torch.empty(2, COLS, dtype=torch.int32))], lambda given: given)
    monkeypatch.setattr(stream, "synchronize", lambda: held.append(len(stream.block)))
    stream.drop()
    assert held == [1]
    assert len(stream.block) == 0
