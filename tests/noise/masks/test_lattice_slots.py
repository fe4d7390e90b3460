"""Tests that the lattice mask uses nothing twice: rows, pieces of blocks, secrets, also with threads and forks."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from noise import sampling
from noise.polynomial import negacyclic
from tests.support.lattice import (
    BACKWARD,
    DEFAULT,
    FORWARD,
    Provider,
    bounds,
    reference_product,
    rows_of,
    sent,
    weight_of,
    whole,
    wide,
)
from tests.support.threads import in_child
from wire.errors import InvalidTensor, MaskError, MaskReused, Unavailable
from wire.frame import Arithmetic, Call, Direction
from wire.ring import coding
from wire.ring.seeded_rows import SeededRows

# ---- nothing twice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_costs_nothing(make: Any, provider: Provider, counted: Any, bad: float) -> None:
    scheme, spec = make(), provider.groups[0]
    rows = rows_of(3, spec.in_features)
    rows[1, 2] = bad
    for given in (rows, rows[1:2]):
        with pytest.raises(InvalidTensor, match="nothing was sent"):
            scheme.mask(spec, FORWARD, given)
    assert (provider.hints, counted()) == ([], [])
    scheme.mask(spec, FORWARD, rows[:1])
    left = scheme.pool.ready_rows()
    assert left.keys() == {(0, FORWARD)}
    with pytest.raises(InvalidTensor):
        scheme.mask(spec, FORWARD, rows)
    assert scheme.pool.ready_rows() == left
    huge = torch.full((1, spec.out_features), 3e38)
    spec.alpha.mul_(1e4)
    with pytest.raises(InvalidTensor):  # g ⊙ α overflows
        scheme.mask(spec, BACKWARD, huge)
    assert scheme.pool.ready_rows() == left


WIDE: dict[str, Any] = {"pool_bytes": (4 + 3) * 32 * 200, "features": 64}
"""The settings of a pool of 200 rows of the first group, whose effects are packed. One piece takes less than half of
it. A block of 512 rows gives pieces of 86 rows, and a last one of 82."""


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("bits", [32, 24])
def test_pieces_of_a_block_are_rows_of_one_sample(
    make: Any, provider: Provider, drawn: Any, live_secrets: Any, direction: Direction, bits: int
) -> None:
    """By the schoolbook product, row t of the joined pieces is row t of A·s plus an error of its own. One secret is
    counted."""
    budget = 4 * 64 * 200 if bits == 32 else WIDE["pool_bytes"]
    scheme, spec = make(bits=bits, **{**WIDE, "pool_bytes": budget}), provider.groups[0]
    parts = [scheme.pool.take(spec, direction, 1) for _ in range(DEFAULT.ring_degree - 82)]
    assert live_secrets() == 1
    parts += [scheme.pool.take(spec, direction, 1) for _ in range(82)]
    mask, effect = (torch.cat(each) for each in zip(*parts, strict=True))
    (secret,) = drawn["secret"]
    error = torch.cat([each.to(torch.int32) for each in drawn["error"]])
    assert [len(each) for each in drawn["error"]] == [86, 86, 86, 86, 86, 82]
    matrix = provider.matrix(Call(0, direction, Arithmetic.RING))
    public = SeededRows(provider.hints[0][1].seed, 0, DEFAULT.dimension).expand(matrix.shape[0])
    assert torch.equal(mask - error, reference_product(public, secret)[0])
    off = whole(effect) - reference_product(coding.product(public, matrix), secret)[0]
    assert int(off.abs().max()) <= (0 if bits == 32 else 2**7 * int(secret.abs().sum()))
    assert live_secrets() == 0, "a secret is dropped with its last row"
    scheme.pool.take(spec, direction, 1)
    assert len(drawn["secret"]) == 2


@pytest.mark.parametrize("name", ["combine", "product"])
def test_rows_without_an_error_do_not_stay_in_memory(
    make: Any, provider: Provider, monkeypatch: Any, name: str
) -> None:
    """A piece is made from a whole block without errors, whose rows together give the secret away."""
    made: list[torch.Tensor] = []
    original = getattr(negacyclic, name)

    def noted(*arguments: Any) -> Any:
        made.extend(original(*arguments))
        return made[-1:]

    monkeypatch.setattr(negacyclic, name, noted)
    scheme, spec = make(**WIDE), provider.groups[0]
    mask, effect = scheme.pool.take(spec, FORWARD, 1)
    assert mask.any()
    assert effect.any()
    assert len(made) == 1
    assert not made[0].any()


def test_results_of_pieces_and_whole_blocks(make: Any, provider: Provider) -> None:
    """A prompt that is longer than a block is followed by single tokens, and the result of each call is correct."""
    scheme, spec = make(**WIDE), provider.groups[0]
    for num_rows in (DEFAULT.ring_degree + 100, *[1] * 90, 120):
        rows = rows_of(num_rows, spec.in_features)
        masked = scheme.mask(spec, FORWARD, rows)
        exact, bound, _ = bounds(spec, FORWARD, provider.weights[0], rows, DEFAULT, 128)
        assert bool(((wide(provider.answer(masked)) - exact).abs() <= bound).all())


def test_no_row_of_a_sample_is_in_two_pieces(make: Any, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """All mask rows differ, over whole blocks and pieces. The masks have no error in this test, since errors would hide
    that a row of A·s is used twice."""
    monkeypatch.setattr(sampling, "error", lambda rng, shape, parameters: torch.zeros(tuple(shape), dtype=torch.int8))
    scheme, seen, total = make(**WIDE), set[bytes](), 0
    for num_rows in (DEFAULT.ring_degree + 100, *[1] * 90, 120):
        mask, _ = scheme.pool.take(provider.groups[0], FORWARD, num_rows)
        seen.update(row.numpy().tobytes() for row in mask)
        total += num_rows
    assert len(seen) == total


def test_closing_while_a_block_is_opened_for_pieces_leaves_no_secret(
    make: Any, provider: Provider, live_secrets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = make(**WIDE)
    transform = negacyclic.secret_transform

    def closing(secrets: torch.Tensor) -> torch.Tensor:
        scheme.close()
        return transform(secrets)

    monkeypatch.setattr(negacyclic, "secret_transform", closing)
    with pytest.raises(MaskError, match="closed"):
        scheme.pool.take(provider.groups[0], FORWARD, 1)
    assert live_secrets() == 0


def test_streamed_hints_are_fetched_once_for_a_block(make: Any, provider: Provider) -> None:
    """If hints are streamed and not stored, blocks are made whole: each piece of a block would fetch the hint again."""
    scheme = make(folder=None, **WIDE)
    for _ in range(DEFAULT.ring_degree):
        scheme.pool.take(provider.groups[0], FORWARD, 1)
    assert sum(rows.num_rows for _, rows in provider.hints) == DEFAULT.dimension


def test_pieces_under_an_old_seed_are_abandoned(make: Any, provider: Provider, drawn: Any, live_secrets: Any) -> None:
    """After the seed is renewed, a block that was begun in pieces is not continued. A new secret is drawn instead,
    since a secret is used with the matrix and the hint of one seed only."""
    two_a_seed = replace(DEFAULT, bits=129)
    scheme, (first, second) = make(two_a_seed, **WIDE), provider.groups
    scheme.pool.take(first, FORWARD, 1)
    scheme.pool.take(second, FORWARD, 1)
    assert live_secrets() == 2
    scheme.pool.take(second, BACKWARD, 1)  # this is the third secret, under the next seed
    assert (len(drawn["secret"]), live_secrets()) == (3, 3)
    rows = rows_of(86, 40)  # this is more than is left of the first piece
    masked = scheme.mask(first, FORWARD, rows)
    assert (len(drawn["secret"]), live_secrets()) == (4, 3)
    fetched = [hint.seed for call, hint in provider.hints if (call.group, call.direction) == (0, FORWARD)]
    assert len(set(fetched)) == 2
    exact, bound, _ = bounds(first, FORWARD, provider.weights[0], rows, two_a_seed, 128)
    assert bool(((wide(provider.answer(masked)) - exact).abs() <= bound).all())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_secrets_of_pieces_go_with_the_pool(make: Any, provider: Provider, live_secrets: Any) -> None:
    closed, forked = make(**WIDE), make(**WIDE)
    for scheme in (closed, forked):
        scheme.pool.take(provider.groups[0], FORWARD, 1)
    assert live_secrets() == 2
    closed.close()
    assert live_secrets() == 1
    assert in_child(lambda: f"{live_secrets()} secrets") == "0 secrets"
    assert live_secrets() == 1


@pytest.mark.parametrize("is_cutting", [False, True])
def test_a_hint_that_fails_costs_no_rows(make: Any, provider: Provider, is_cutting: bool) -> None:
    scheme = make(folder=None, **(WIDE if is_cutting else {}))

    def fail() -> None:
        raise Unavailable("gone")

    provider.fail = fail
    with pytest.raises(Unavailable, match="gone"):
        scheme.pool.take(provider.groups[0], FORWARD, 1)
    provider.fail = lambda: None
    mask, _ = scheme.pool.take(provider.groups[0], FORWARD, 1)
    assert mask.shape == (1, 40)


def test_every_group_direction_and_block_has_a_secret_of_its_own(
    make: Any, provider: Provider, drawn: Any, counted: Any
) -> None:
    """No two secrets are equal, and no two errors are. If two layers with the same A had one secret, the difference of
    their activations would show."""
    scheme = make()
    for spec in provider.groups:
        for direction in Direction:
            scheme.mask(spec, direction, rows_of(1100, spec.widths(direction)[0]))
    secrets = [tuple(secret.flatten().tolist()) for batch in drawn["secret"] for secret in batch]
    errors = [tuple(error.flatten().tolist()) for batch in drawn["error"] for error in batch]
    assert len(secrets) == len(set(secrets)) == 2 * 2 * 3
    assert len(errors) == len(set(errors)) == 2 * 2 * 3
    assert counted()[0].used >= len(secrets)


def test_the_same_rows_never_look_the_same(make: Any, provider: Provider) -> None:
    """The same rows are sent in two calls, groups, directions and processes, both as zeros and as data. No two rows of
    the messages are equal."""
    seen: list[bytes] = []
    square = Provider([weight_of(32, 32, 5), weight_of(32, 32, 5)])
    for _ in range(2):  # the second round is a restart with the same ledger, seed and stored hints
        scheme = make()
        scheme.bind(square.effect)
        for spec in square.groups:
            for direction in Direction:
                for rows in (rows_of(3, 32), rows_of(3, 32), torch.zeros(3, 32)):
                    seen += [bytes(row.numpy()) for row in sent(scheme.mask(spec, direction, rows))]
    assert len(seen) == len(set(seen)) == 2 * 2 * 2 * 3 * 3
    assert len({rows.seed for _, rows in square.hints}) == 1


@pytest.mark.parametrize("first_inside", [True, False])
def test_masks_made_in_inference_mode_can_be_used_outside(make: Any, provider: Provider, first_inside: bool) -> None:
    scheme, spec = make(), provider.groups[0]
    for inside in (first_inside, not first_inside):  # the second call uses rows of the first call's block
        with torch.inference_mode(inside):
            masked = scheme.mask(spec, FORWARD, rows_of(3, 40))
            masked.unmask([torch.zeros(3, 24, dtype=torch.int32)])


def test_zeros_cannot_be_told_from_data(make: Any, provider: Provider) -> None:
    """The bytes of masked zeros are uniform. Chi-square of 256 bins has 255 degrees of freedom, a mean of 255 and a
    variance of 510.

    The bound 450 is 8.6 standard deviations from the mean. Its probability is below 1e-11 by the bound of Laurent and
    Massart (2000), lemma 1: P(χ² > k + 2√(k·t) + 2t) ≤ e^-t, where t = 26 gives 450.
    """
    rows = sent(make().mask(provider.groups[0], FORWARD, torch.zeros(1024, 40)))
    counts = torch.bincount(rows.contiguous().view(torch.uint8).flatten().to(torch.int64), minlength=256)
    expected = rows.numel() * 4 / 256
    assert float((counts - expected).square().sum() / expected) < 450


def test_eight_threads_and_a_worker(make: Any, provider: Provider) -> None:
    scheme = make(background=True)
    limits = {
        (spec.id, direction): bounds(
            spec, direction, provider.weights[spec.id], rows_of(7, spec.widths(direction)[0]), DEFAULT, 128
        )
        for spec in provider.groups
        for direction in Direction
    }

    def work(number: int) -> list[bytes]:
        mine = []
        for turn in range(60):
            spec, direction = provider.groups[(number + turn) % 2], Direction((number // 2 + turn // 2) % 2)
            masked = scheme.mask(spec, direction, rows_of(7, spec.widths(direction)[0]))
            exact, bound, _ = limits[spec.id, direction]
            assert bool(((wide(provider.answer(masked)) - exact).abs() <= bound).all())
            mine += [bytes(row.numpy()) for row in sent(masked)]
        return mine

    with ThreadPoolExecutor(8) as threads:
        seen = [row for mine in threads.map(work, range(8)) for row in mine]
    assert len(seen) == len(set(seen)) == 8 * 60 * 7
    assert sorted((call.group, call.direction) for call, rows in provider.hints if rows.first_row == 0) == sorted(
        limits
    )


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_goes_on(make: Any, provider: Provider) -> None:
    scheme, spec, rows = make(background=True), provider.groups[0], rows_of(2, 40)
    scheme.mask(spec, FORWARD, rows)

    def child() -> str:
        for use in (lambda: scheme.mask(spec, FORWARD, rows), lambda: scheme.prepare(spec, FORWARD, 9000)):
            with pytest.raises(MaskReused):
                use()
        return "refused twice"

    assert in_child(child) == "refused twice"
    exact, bound, _ = bounds(spec, FORWARD, provider.weights[0], rows, DEFAULT, 128)
    assert bool(((wide(provider.answer(scheme.mask(spec, FORWARD, rows))) - exact).abs() <= bound).all())
