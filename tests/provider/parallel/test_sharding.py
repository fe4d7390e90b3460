"""Tests shares of weights without other processes: how columns are divided, what a rank keeps, and how commands are
encoded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from provider.engine import products
from provider.model.load import load, resolve
from provider.model.weights import PreparedModel, serve_model
from provider.parallel.dispatch import INLINE_NUMBERS, NUM_NUMBERS, Command, Operation
from provider.parallel.sharding import ColumnSlices, split, without_weights
from wire.errors import InvalidTensor
from wire.frame import DTYPES, Arithmetic, Call, Direction, Purpose
from wire.ring.seeded_rows import SeededRows

RING, FLOAT = Arithmetic.RING, Arithmetic.FLOAT


@pytest.fixture(scope="module")
def served(models: dict[str, Path]) -> PreparedModel:
    return serve_model(load(resolve(str(models["gpt2"]))), "native")


@pytest.mark.parametrize("length", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_split_is_tensor_split(length: int, parts: int) -> None:
    numbers = torch.arange(length)
    assert [list(part) for part in split(length, parts)] == [p.tolist() for p in numbers.tensor_split(parts)]


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("arithmetic", [RING, FLOAT])
def test_shares_of_any_number_of_ranks_make_the_product(
    served: PreparedModel, size: int, arithmetic: Arithmetic
) -> None:
    """The shares of all ranks together give the product, also with 40 ranks, which is more than the 32 columns of a
    group."""
    slices = [ColumnSlices(served, rank, size) for rank in range(size)]
    close = {"rtol": 0.0, "atol": 0.0} if arithmetic is RING else {"rtol": 1e-5, "atol": 1e-5}
    for group in served.groups:
        for direction in Direction:
            call = Call(group.info.id, direction, arithmetic)
            cols = group.info.in_features if direction is Direction.FORWARD else group.info.out_features
            rows = torch.randint(-(2**31), 2**31, (3, cols), dtype=torch.int32) if arithmetic is RING else None
            rows = torch.randn(3, cols) if rows is None else rows
            expected = products.compute(served, call, rows)
            joined = torch.zeros_like(expected)
            for one, block in zip(slices, slices[0].blocks(call, 3), strict=True):
                block.of(joined).add_(one.share(call, rows))
            torch.testing.assert_close(joined, expected, **close)


@pytest.mark.parametrize("direction", list(Direction))
def test_hints_are_made_in_pieces(served: PreparedModel, monkeypatch: pytest.MonkeyPatch, direction: Direction) -> None:
    call, seeded = Call(0, direction, RING, Purpose.HINT), SeededRows(bytes(32), 3, 75)
    monkeypatch.setattr("provider.engine.products.HINT_SCRATCH_BYTES", 10_000)
    slices = [ColumnSlices(served, rank, 3) for rank in range(3)]
    expected = products.compute(served, call, seeded)
    joined = torch.zeros_like(expected)
    for one, block in zip(slices, slices[0].blocks(call, 75), strict=True):
        block.of(joined).add_(one.share(call, seeded))
    assert torch.equal(joined, expected)


def test_a_rank_keeps_its_part_only(served: PreparedModel) -> None:
    sizes = []
    for rank in range(3):
        one = ColumnSlices(served, rank, 3)
        sizes.append(one.weight_bytes)
        for group in one._narrow.groups:
            for tensor in (group.quantised, group.alpha, group.bias, group.native):
                assert tensor is None or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert sum(sizes) == served.weight_bytes
    assert max(sizes) < 0.36 * served.weight_bytes


@pytest.mark.parametrize("arithmetic", [RING, FLOAT])
def test_nobody_multiplies_by_weights_that_are_elsewhere(served: PreparedModel, arithmetic: Arithmetic) -> None:
    described = without_weights(served)
    assert described.manifest is served.manifest
    for direction in Direction:
        call = Call(0, direction, arithmetic)
        info = served.groups[0].info
        cols = info.in_features if direction is Direction.FORWARD else info.out_features
        with pytest.raises((InvalidTensor, RuntimeError)):
            products.compute(described, call, torch.ones(1, cols, dtype=DTYPES[arithmetic]))


@pytest.mark.parametrize(
    "command",
    [
        Command(Operation.STOP),
        Command(Operation.HEARTBEAT),
        Command.product(Call(7, Direction.BACKWARD, FLOAT, Purpose.EFFECT), torch.randn(5, 9)),
        Command.product(Call(7, Direction.FORWARD, RING), torch.randint(-(2**31), 2**31, (9, 5), dtype=torch.int32)),
        Command.product(Call(7, Direction.FORWARD, RING), torch.ones(2, INLINE_NUMBERS // 2, dtype=torch.int32)),
        Command.product(Call(7, Direction.FORWARD, RING), torch.ones(1, INLINE_NUMBERS + 1, dtype=torch.int32)),
        Command.product(
            Call(1, Direction.BACKWARD, RING, Purpose.HINT), SeededRows(bytes([255, *range(31)]), 2**39, 8)
        ),
    ],
)
def test_commands_come_back(command: Command) -> None:
    numbers = command.pack()
    assert (numbers.shape, numbers.dtype) == ((NUM_NUMBERS,), torch.int32)
    back = Command.unpack(numbers)
    assert replace(back, rows=None) == replace(command, rows=None)
    if isinstance(command.rows, torch.Tensor):
        assert isinstance(back.rows, torch.Tensor)
        assert back.rows.dtype == command.rows.dtype
        assert torch.equal(back.rows, command.rows)
    elif command.operation is Operation.PRODUCT:
        assert back.rows == command.rows


def test_numbers_that_are_no_command() -> None:
    with pytest.raises(ValueError, match="is not a valid"):
        Command.unpack(torch.full((NUM_NUMBERS,), 9, dtype=torch.int32))
