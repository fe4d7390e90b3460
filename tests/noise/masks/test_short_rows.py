"""Tests that rows are rounded after they are masked, by widths that follow from norms alone, that results stay within
what rounding implies, and that verification stays exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from noise import sampling
from noise import scheme as schemes
from noise.masks.pad import Pad
from noise.masks.shares import Shares
from noise.scheme import GroupSpec, Masked, MaskScheme, encode_rows, error_bounds, number_bits, product_call
from noise.verify import Verifier
from tests.support.compiled_kernels import needs_products
from tests.support.lattice import BACKWARD, DEFAULT, ETA, FORWARD, FP32, TOY, Provider, rows_of, sent, wide
from wire.errors import VerificationFailed
from wire.frame import Call, Direction
from wire.payload import MessagePayload
from wire.ring import coding
from wire.ring.seeded_rows import SeededRows
from wire.ring.widths import rounded

HINT_SLACK = float(2**7 * DEFAULT.dimension)
"""What the rounding of hints to 24 bits adds to a product, at most."""
both_ways = pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
all_widths = pytest.mark.parametrize(
    ("bits", "precision"), [(24, "balanced"), (26, "balanced"), (28, "balanced"), (24, "short"), (28, "short")]
)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[GroupSpec, Direction, int], None]:
    """Returns a function that sets τ so that a group's rows get a width: the groups of these tests are so small that
    they would all have 24 bits."""

    def run(group: GroupSpec, direction: Direction, bits: int) -> None:
        norm = group.column_norm if direction is FORWARD else group.row_norm
        share = 2.0 ** (32 - bits) * math.sqrt(group.widths(direction)[0]) * norm / (math.sqrt(12) * 2.0**31)
        monkeypatch.setattr(schemes, "TOLERANCE", 1.001 * share)

    return run


def answer(provider: Provider, masked: Masked) -> torch.Tensor:
    """Returns the product after unmasking, by a provider that gives as many bits as the call says."""
    replies = []
    for message in masked.messages:
        rows = message.rows
        if isinstance(rows, SeededRows):
            rows = rows.expand(message.payload.cols)
        reply = coding.product(rows, provider.matrix(message.call))
        replies.append(rounded(reply, message.call.reply_bits))
    return masked.unmask(replies)


def bounds(
    group: GroupSpec, direction: Direction, weight: torch.Tensor, rows: torch.Tensor, call: Call, error: float,
    slack: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the exact product and the largest distance of a masked one from it; see `tests.support.lattice.bounds`.
    Rounding moves each number of a row by at most 2^(31 − bits), and a number of a short reply by as much at its own
    width."""
    matrix = wide(weight if direction is FORWARD else weight.t())
    given = wide(rows) * (1.0 if direction is FORWARD else wide(group.alpha))
    out = wide(group.alpha) if direction is FORWARD else torch.ones(matrix.shape[1], dtype=torch.float64)
    moved = 2.0 ** (31 - call.bits) if call.bits < 32 else 0.0
    reply_moved = 2.0 ** (31 - call.reply_bits) if call.reply_bits < call.bits else 0.0
    d = rows.shape[1]
    _, beta = encode_rows(group, direction, rows, (error + moved) * math.sqrt(d), slack + reply_moved)
    scale = wide(beta)
    reach = scale * math.sqrt(d) * (0.5 + error + moved) + FP32 * given.norm(dim=1, keepdim=True)
    exact = (given @ matrix) * out
    bound = out * (reach * matrix.norm(dim=0) + scale * (slack + reply_moved))
    return exact, bound + FP32 * exact.abs()


# ---- what is sent ---------------------------------------------------------------------------------------------------


@both_ways
@all_widths
def test_what_is_sent_is_the_masked_row_rounded(
    make: Any, provider: Provider, choose: Any, direction: Direction, bits: int, precision: str
) -> None:
    group = provider.groups[0]
    choose(group, direction, bits)
    scheme, rows = make(precision=precision), rows_of(7, group.widths(direction)[0])
    taken: list[torch.Tensor] = []
    take = scheme.pool.take

    def spy(*given: Any) -> Any:
        mask, effect = take(*given)
        taken.append(mask.clone())
        return mask, effect

    scheme.pool.take = spy
    masked = scheme.mask(group, direction, rows)
    (message,) = masked.messages
    assert (message.call.bits, message.call.reply_bits) == (bits, 16 if precision == "short" else bits)
    encoded, _ = encode_rows(group, direction, rows, *error_bounds(message.call, rows.shape[1], ETA, HINT_SLACK))
    (mask,) = taken
    assert torch.equal(sent(masked), rounded(mask + encoded, bits))
    assert not bool((sent(masked) & (2 ** (32 - bits) - 1)).any())


@needs_products
@both_ways
@all_widths
def test_one_row_is_sent_as_many_are(
    make: Any, provider: Provider, choose: Any, direction: Direction, bits: int, precision: str
) -> None:
    group, weight = provider.groups[0], provider.weights[0]
    choose(group, direction, bits)
    scheme, rows = make(precision=precision), rows_of(1, group.widths(direction)[0])
    masked = scheme.mask(group, direction, rows)
    (message,) = masked.messages
    assert isinstance(message.payload, MessagePayload)
    assert message.call == product_call(group, direction, precision)
    assert not bool((sent(masked) & (2 ** (32 - bits) - 1)).any())
    exact, bound = bounds(group, direction, weight, rows, message.call, ETA, HINT_SLACK)
    assert bool(((wide(answer(provider, masked)) - exact).abs() <= bound).all())


def test_a_slot_is_never_sent_at_two_widths(make: Any, provider: Provider) -> None:
    """Neither the number of rows nor their contents change the width of a group and direction."""
    scheme = make(precision="balanced")
    for group in provider.groups:
        for direction in (FORWARD, BACKWARD):
            calls = {
                scheme.mask(group, direction, rows_of(count, group.widths(direction)[0], seed) * scale).messages[0].call
                for seed, (count, scale) in enumerate([(1, 1.0), (1, 1e-20), (3, 1e20), (600, 1.0), (1, 0.0)])
            }
            assert calls == {product_call(group, direction, "balanced")}


def test_the_widths_follow_from_norms_alone() -> None:
    assert number_bits(576, 1100.0, "exact") == (32, 32)
    assert number_bits(576, 1100.0, "balanced") == (24, 24)
    assert number_bits(576, 1100.0, "short") == (24, 16)
    assert number_bits(1536, 2500.0, "balanced") == (26, 26)
    assert number_bits(4096, 127 * 64.0, "balanced") == (28, 28)
    assert number_bits(1 << 20, 127 * 1024.0, "balanced") == (32, 32)


# ---- results --------------------------------------------------------------------------------------------------------


@both_ways
@all_widths
def test_results_stay_within_what_rounding_implies(
    make: Any, provider: Provider, choose: Any, direction: Direction, bits: int, precision: str
) -> None:
    group, weight = provider.groups[0], provider.weights[0]
    choose(group, direction, bits)
    scheme, rows = make(precision=precision), rows_of(40, group.widths(direction)[0])
    rows[0] = 0.0
    rows[1] *= 1e20
    rows[2] *= 1e-20
    masked = scheme.mask(group, direction, rows)
    exact, bound = bounds(group, direction, weight, rows, masked.messages[0].call, ETA, HINT_SLACK)
    got = wide(answer(provider, masked))
    assert bool(((got - exact).abs() <= bound + 1e-37).all())


@both_ways
@pytest.mark.parametrize(("precision", "error"), [("balanced", 2**16 / 12), ("short", 2**16 / 12)])
def test_what_is_left_has_the_size_of_rounding(
    make: Any, provider: Provider, direction: Direction, precision: str, error: float
) -> None:
    """Rounding to 24 bits adds an error of variance 2^16 / 12 to each number of a row. A short reply's own rounding
    adds 2^32 / 12 to a number of the product. If less were left, something would not be rounded; of more, too much."""
    group, weight = provider.groups[0], provider.weights[0]
    rows = rows_of(1000, group.widths(direction)[0])
    masked = make(bits=32, precision=precision).mask(group, direction, rows)
    call = masked.messages[0].call
    assert call.bits == 24
    exact, _ = bounds(group, direction, weight, rows, call, ETA, 0.0)
    _, beta = encode_rows(group, direction, rows, *error_bounds(call, rows.shape[1], ETA, 0.0))
    matrix = wide(weight if direction is FORWARD else weight.t())
    out = wide(group.alpha) if direction is FORWARD else 1.0
    variance = matrix.square().sum(dim=0) * (error + ETA / 2) + (2**32 / 12 if precision == "short" else 0.0)
    ratio = (wide(answer(provider, masked)) - exact) / (wide(beta) * out * variance.sqrt())
    assert float(ratio.square().mean().sqrt()) == pytest.approx(1.0, abs=0.05)


@both_ways
@pytest.mark.parametrize("precision", ["exact", "balanced", "short"])
def test_the_worst_error_along_the_largest_column_does_not_wrap(
    make: Any, provider: Provider, monkeypatch: pytest.MonkeyPatch, precision: str, direction: Direction
) -> None:
    """If a result wrapped, it would be wrong by 2^32·β·α."""
    group, weight = provider.groups[0], provider.weights[0]
    matrix = weight if direction is FORWARD else weight.t()
    column = matrix[:, int(wide(matrix).norm(dim=0).argmax())]
    worst = (column.sign().to(torch.int8) * ETA).expand(1, TOY.ring_degree, -1)
    monkeypatch.setattr(sampling, "error", lambda rng, shape, parameters: worst.expand(tuple(shape)).contiguous())
    rows = column.to(torch.float32).expand(TOY.ring_degree, -1) / (1.0 if direction is FORWARD else group.alpha)
    masked = make(TOY, bits=32, precision=precision).mask(group, direction, rows.contiguous())
    exact, bound = bounds(group, direction, weight, rows, masked.messages[0].call, ETA, 0.0)
    assert bool(((wide(answer(provider, masked)) - exact).abs() <= bound).all())


# ---- the other masks on integers ------------------------------------------------------------------------------------


def pad(provider: Provider, precision: str) -> MaskScheme:
    seeds = iter(range(1, 200))
    return Pad(
        lambda group: provider.weights[group], lambda: bytes([next(seeds)]) * 32, background=False, precision=precision
    )


def shares(provider: Provider, precision: str) -> MaskScheme:
    seeds = iter(range(1, 200))
    return Shares(lambda: bytes([next(seeds)]) * 32, precision=precision)


@both_ways
@pytest.mark.parametrize("mask", [pad, shares])
@pytest.mark.parametrize("precision", ["exact", "balanced", "short"])
def test_pads_and_shares_round_alike(
    provider: Provider, mask: Callable[[Provider, str], MaskScheme], precision: str, direction: Direction
) -> None:
    scheme = mask(provider, precision)
    group, weight = provider.groups[0], provider.weights[0]
    for count in (1, 9):
        rows = rows_of(count, group.widths(direction)[0])
        masked = scheme.mask(group, direction, rows)
        first, *others = masked.messages
        assert first.call == product_call(group, direction, precision)
        assert all((other.call.bits, other.call.reply_bits) == (32, 32) for other in others)
        assert not bool((sent(masked) & (2 ** (32 - first.call.bits) - 1)).any())
        exact, bound = bounds(group, direction, weight, rows, first.call, 0.0, 0.0)
        assert bool(((wide(answer(provider, masked)) - exact).abs() <= bound).all())
    scheme.close()


# ---- verification ---------------------------------------------------------------------------------------------------


@both_ways
@pytest.mark.parametrize("count", [1, 5, 200])
def test_checks_of_short_replies_are_exact(make: Any, provider: Provider, direction: Direction, count: int) -> None:
    """An honest reply passes, and the smallest difference that can be sent does not."""
    group = provider.groups[0]
    masked = make(precision="balanced").mask(group, direction, rows_of(count, group.widths(direction)[0]))
    call = masked.messages[0].call
    reply = coding.product(sent(masked), provider.matrix(call))

    def check(changes: Sequence[tuple[int, int, int]]) -> None:
        verifier = Verifier()
        verifier.add_group(0, provider.weights[0])
        changed = reply.clone()
        for row, column, change in changes:
            changed[row, column] += change
        verifier.check(0, direction, sent(masked), changed)

    check([])
    smallest = 2 ** (32 - call.bits)
    for changes in ([(0, 0, smallest)], [(count - 1, 3, -smallest)], [(0, 1, smallest), (count - 1, 2, -smallest)]):
        with pytest.raises(VerificationFailed):
            check(changes)
