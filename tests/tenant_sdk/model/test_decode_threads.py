"""Tests that the tenant's layers of a decode step run on one core, and that everything else uses all cores."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from noise.blocks.pool import Block, MaskPool
from noise.blocks.slots import Slots
from noise.scheme import GroupSpec
from runtime.threads import all_cores, return_cores, spare_cores
from tenant_sdk.model import build
from tenant_sdk.model.build import watch
from tests.support.waiting import end
from wire.frame import Arithmetic, Call, Direction
from wire.payload import RowsPayload
from wire.transport.inproc import InprocConnection

WIDTH = 64


class Decoder(nn.Module):
    """Notes how many cores its own operations may use."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=WIDTH)
        self.seen: list[int] = []
        self.within: list[int] = []
        watch(self)

    def forward(self, input_ids: torch.Tensor | None = None, **options: object) -> int:
        self.seen.append(torch.get_num_threads())
        with all_cores():
            self.within.append(torch.get_num_threads())
        if options.get("interrupts"):
            raise KeyboardInterrupt
        if options.get("breaks"):
            raise RuntimeError("broken")
        return 0


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def cache_of(length: int) -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, length, 2), torch.zeros(1, 1, length, 2), 0)
    return cache


class Strange:
    """Implements a cache that cannot say how many tokens it holds."""

    def get_seq_length(self) -> int:
        raise NotImplementedError


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.int64)


def test_a_decode_step_has_one_core_and_its_thread_all_of_them_afterwards() -> None:
    decoder = Decoder()
    with torch.no_grad():
        decoder(input_ids=tokens(1, 1), past_key_values=cache_of(10))
        decoder(tokens(1, 1), past_key_values=cache_of(10))
        decoder(inputs_embeds=torch.zeros(2, 4, WIDTH), past_key_values=cache_of(10))
    assert decoder.seen == [1, 1, 1]
    assert decoder.within == [3, 3, 3]
    assert torch.get_num_threads() == 3


def test_two_clients_in_threads_do_not_change_each_other_s_cores() -> None:
    """One client begins and ends a step while the other client's step is running."""
    mine, theirs = Decoder(), Decoder()
    after: list[int] = []

    def step() -> None:
        with torch.no_grad():
            theirs(tokens(1, 1), past_key_values=cache_of(10))
        after.append(torch.get_num_threads())

    def between(*arguments: object) -> None:
        thread = threading.Thread(target=step)
        thread.start()
        end(thread)
        after.append(torch.get_num_threads())

    mine.register_forward_pre_hook(between)  # after the one that spares cores
    with torch.no_grad():
        mine(tokens(1, 1), past_key_values=cache_of(10))
    assert (theirs.seen, mine.seen) == ([1], [1])
    assert after == [3, 1]
    assert torch.get_num_threads() == 3


def test_masks_and_a_provider_in_this_process_have_all_cores_in_a_step() -> None:
    seen: list[int] = []

    def note(*arguments: object) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return torch.zeros(1, 5, dtype=torch.int32)

    def make(spec: GroupSpec, direction: Direction, num_rows: int) -> list[Block]:
        InprocConnection(SimpleNamespace(compute=note)).submit(
            call, RowsPayload(torch.zeros(1, 3, dtype=torch.int32)), 5
        )
        note()
        return [Block(torch.zeros(4, 3, dtype=torch.int32), torch.zeros(4, 5, dtype=torch.int32), Slots(4))]

    call = Call(0, Direction.FORWARD, Arithmetic.RING)
    pool = MaskPool(make, 4, background=False)
    spare_cores()
    pool.take(GroupSpec(0, 3, 5, 1.0, 1.0, torch.ones(5)), Direction.FORWARD, 1)
    assert torch.get_num_threads() == 1
    return_cores()
    assert seen == [3, 3]
    assert torch.get_num_threads() == 3


def test_after_ctrl_c_the_next_step_finds_all_cores_again() -> None:
    decoder = Decoder()
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            decoder(tokens(1, 1), past_key_values=cache_of(10), interrupts=True)
        decoder(tokens(1, build.MOST_TOKENS + 1), past_key_values=cache_of(10))
        decoder(tokens(1, 1), past_key_values=cache_of(10))
    assert decoder.seen == [1, 3, 1]
    assert torch.get_num_threads() == 3


def test_a_step_that_fails_gives_the_cores_back() -> None:
    decoder = Decoder()
    with torch.no_grad(), pytest.raises(RuntimeError, match="broken"):
        decoder(tokens(1, 1), past_key_values=cache_of(10), breaks=True)
    assert decoder.seen == [1]
    assert torch.get_num_threads() == 3


def test_large_steps_training_and_what_cannot_be_seen_are_left_alone() -> None:
    decoder = Decoder()
    longest = build.MOST_CACHED // WIDTH
    with torch.no_grad():
        decoder(tokens(1, build.MOST_TOKENS + 1), past_key_values=cache_of(10))
        decoder(tokens(build.MOST_TOKENS + 1, 1), past_key_values=cache_of(10))
        decoder(tokens(1, 1), past_key_values=cache_of(longest))
        decoder(tokens(1, 1))  # no cache: a whole sequence, whatever its length
        decoder(past_key_values=cache_of(10))
        decoder(tokens(1, 1), past_key_values=Strange())
        decoder(tokens(1, 1).to("meta"), past_key_values=cache_of(10))
        decoder.config = SimpleNamespace()
        decoder(tokens(1, 1), past_key_values=cache_of(10))
        decoder.config = SimpleNamespace(hidden_size=WIDTH)
        decoder(tokens(1, 1), past_key_values=cache_of(longest - 1))
    decoder(tokens(1, 1), past_key_values=cache_of(10))  # with gradients
    assert decoder.seen == [3] * 8 + [1, 3]
