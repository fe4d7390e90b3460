"""Tests that honest replies always pass, that forged ones pass as often as 2^-κ says, and that a failure is
permanent."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from noise import verify
from noise.verify import FAILED, Verifier
from tests.support.lattice import weight_of
from tests.support.reachable import reachable
from tests.support.ring_products import ring_rows
from tests.support.threads import in_child
from wire.errors import ConfigurationError, InvalidTensor, VerificationFailed
from wire.frame import Direction
from wire.ring import coding
from wire.ring.product import int_mm_is_exact

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
FOLDED, FOLDED_TOGETHER = 160, 1024
"""From FOLDED rows on, a check combines (folds) rows, at most FOLDED_TOGETHER at once. Tests use numbers of rows on
both sides of these limits."""


@pytest.fixture(autouse=True)
def _folds_wherever_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns folding on wherever it is exact, even on machines on which it is slow and therefore not used."""
    monkeypatch.setattr(verify, "int_mm_is_fast", int_mm_is_exact)


def exact(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes the result in a slow and obvious way with Python integers."""
    columns = list(zip(*weight.tolist(), strict=True))
    table = [
        [sum(a * b for a, b in zip(row, column, strict=True)) % 2**32 for column in columns] for row in rows.tolist()
    ]
    return torch.tensor(table, dtype=torch.int64).sub(2**32 * (torch.tensor(table) >= 2**31)).to(torch.int32)


def verifier_of(weight: torch.Tensor, made: type[Verifier] = Verifier, kappa: int = 40) -> Verifier:
    verifier = made(kappa)
    verifier.add_group(0, weight)
    return verifier


def secrets_of(verifier: Verifier) -> list[weakref.ref[torch.Tensor]]:
    found = [weakref.ref(each) for each in reachable(verifier, torch.Tensor)]
    assert len(found) == 5, "R and V for each direction, and the secrets for folding"
    return found


def alive(secrets: list[weakref.ref[torch.Tensor]]) -> int:
    gc.collect()
    return sum(each() is not None for each in secrets)


def product(rows: torch.Tensor, weight: torch.Tensor, direction: Direction) -> torch.Tensor:
    return coding.product(rows, weight if direction is FORWARD else weight.t())


SHAPES = [(1, 1), (1, 7), (7, 1), (2, 3), (13, 5), (31, 33), (64, 40), (129, 257), (1500, 3)]


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_honest_replies_pass(shape: tuple[int, int], direction: Direction) -> None:
    weight = weight_of(*shape)
    verifier = verifier_of(weight)
    features = shape[0] if direction is FORWARD else shape[1]
    for num_rows in (0, 1, 2, 3, FOLDED - 1, FOLDED, FOLDED + 1, 1024, 1025, 1024 + FOLDED):
        rows = ring_rows(num_rows, features, num_rows)
        verifier.check(0, direction, rows, product(rows, weight, direction))
    assert not verifier.failed


@pytest.mark.parametrize("value", [-127, -1, 0, 127])
@pytest.mark.parametrize("extreme", [-(2**31), -1, 0, 2**31 - 1])
def test_extreme_numbers_pass(value: int, extreme: int) -> None:
    weight = torch.full((300, 400), value, dtype=torch.int8)
    verifier = verifier_of(weight)
    for num_rows in (1, FOLDED):
        rows = torch.full((num_rows, 300), extreme, dtype=torch.int32)
        verifier.check(0, FORWARD, rows, product(rows, weight, FORWARD))


def test_the_relation_is_over_whole_numbers() -> None:
    """Replies computed with Python integers pass the check, so the check does not depend on the kernel that it is meant
    to check."""
    weight = weight_of(6, 5)
    rows = ring_rows(FOLDED + 3, 6)
    verifier_of(weight).check(0, FORWARD, rows, exact(rows, weight))
    verifier_of(weight).check(0, FORWARD, rows[:4], exact(rows[:4], weight))


def test_rows_that_are_not_contiguous() -> None:
    weight = weight_of(12, 8)
    for num_rows in (3, FOLDED):
        rows = ring_rows(12, num_rows).t()
        reply = coding.product(rows, weight).t().contiguous().t()
        verifier_of(weight).check(0, FORWARD, rows, reply)


def changed(reply: torch.Tensor, row: int, column: int, by: int) -> torch.Tensor:
    forged = reply.clone()
    forged[row, column] = coding.to_int32(forged[row, column].to(torch.int64) + by)
    return forged


FORGERIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "+1": lambda reply: changed(reply, 1, 2, 1),
    "-1 in the last": lambda reply: changed(reply, reply.shape[0] - 1, reply.shape[1] - 1, -1),
    "+2^31": lambda reply: changed(reply, 0, 0, 2**31),
    "+2^30 in a middle row": lambda reply: changed(reply, reply.shape[0] // 2, 1, 2**30),
    "random": lambda reply: changed(reply, 1, 1, 123_456_789),
    "a forged row": lambda reply: torch.cat((ring_rows(1, reply.shape[1], 9), reply[1:])),
    "all forged": lambda reply: ring_rows(*reply.shape, 9),
    "zeros": torch.zeros_like,
    "two rows swapped": lambda reply: reply[[1, 0, *range(2, reply.shape[0])]],
    "two columns swapped": lambda reply: reply[:, [1, 0, *range(2, reply.shape[1])]],
    "opposite changes": lambda reply: changed(changed(reply, 0, 0, 5), 1, 0, -5),
    "2^31 twice in a row": lambda reply: changed(changed(reply, 0, 0, 2**31), 0, 1, 2**31),
    "2^31 twice in a column": lambda reply: changed(changed(reply, 0, 0, 2**31), 1, 0, 2**31),
    "2^31 everywhere": lambda reply: coding.to_int32(reply.to(torch.int64) + 2**31),
    "doubled": lambda reply: reply * 2,
}


def projected(verifier: Verifier, rows: torch.Tensor, reply: torch.Tensor) -> list[int]:
    """Returns, for each random projection of a check, how many rows it is computed for. This is κ + 1 if the rows were
    combined (folded) before."""
    seen: list[int] = []
    multiply = coding.product

    def spy(given: torch.Tensor, secret: torch.Tensor) -> torch.Tensor:
        seen.append(given.shape[0])
        return multiply(given, secret)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coding, "product", spy)
        verifier.check(0, FORWARD, rows, reply)
    assert seen[::2] == seen[1::2], "rows and replies are projected alike"
    return seen[::2]


@pytest.mark.skipif(not int_mm_is_exact(), reason="rows are never folded on this machine")
def test_many_rows_are_folded_before_they_are_projected() -> None:
    weight = weight_of(33, 17)
    for num_rows, expected in [
        (FOLDED - 1, [FOLDED - 1]),
        (FOLDED, [41]),
        (FOLDED_TOGETHER, [41]),
        (FOLDED_TOGETHER + 1, [41, 1]),
        (FOLDED_TOGETHER + FOLDED, [41, 41]),
    ]:
        rows = ring_rows(num_rows, 33)
        assert projected(verifier_of(weight), rows, coding.product(rows, weight)) == expected


@pytest.mark.parametrize(("num_rows", "parts"), [(FOLDED, [FOLDED]), (1024 + FOLDED, [1024, FOLDED])])
def test_without_a_fast_kernel_nothing_is_folded(
    num_rows: int, parts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "int_mm_is_fast", lambda: False)
    weight, rows = weight_of(33, 17), ring_rows(num_rows, 33)
    reply = exact(rows, weight)
    assert projected(verifier_of(weight), rows, reply) == parts
    for forge in FORGERIES.values():
        with pytest.raises(VerificationFailed):
            verifier_of(weight).check(0, FORWARD, rows, forge(reply))


@pytest.mark.parametrize("num_rows", [4, FOLDED, 1024 + FOLDED])
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_forged_replies_fail(
    forge: Callable[[torch.Tensor], torch.Tensor], direction: Direction, num_rows: int
) -> None:
    weight = weight_of(24, 15)
    rows = ring_rows(num_rows, 24 if direction is FORWARD else 15)
    reply = product(rows, weight, direction)
    forged = forge(reply)
    assert not torch.equal(forged, reply)
    with pytest.raises(VerificationFailed):
        verifier_of(weight).check(0, direction, rows, forged)


def test_every_single_number_counts() -> None:
    weight = weight_of(5, 6)
    for num_rows in (3, FOLDED):
        rows = ring_rows(num_rows, 5)
        reply = coding.product(rows, weight)
        places = [(row, column) for row in (0, 1, num_rows - 1) for column in range(6)]
        for row, column in places:
            with pytest.raises(VerificationFailed):
                verifier_of(weight).check(0, FORWARD, rows, changed(reply, row, column, 2**31))


def test_every_row_of_a_long_reply_counts() -> None:
    """Rows that are folded in different blocks must not cancel either."""
    weight = weight_of(3, 4)
    rows = ring_rows(2 * FOLDED_TOGETHER + 5, 3)
    reply = coding.product(rows, weight)
    for row in (0, 1023, 1024, 2047, 2048, 2052):
        with pytest.raises(VerificationFailed):
            verifier_of(weight).check(0, FORWARD, rows, changed(reply, row, 1, 2**31))
    opposite = changed(changed(reply, 7, 1, 11), 7 + FOLDED_TOGETHER, 1, -11)
    with pytest.raises(VerificationFailed):
        verifier_of(weight).check(0, FORWARD, rows, opposite)


@pytest.mark.parametrize("num_rows", [4, FOLDED])
def test_replies_that_belong_elsewhere(num_rows: int) -> None:
    """A correct reply to something else is refused: one of the transposed layer, of another group, of other rows, or of
    the other direction."""
    one, other = weight_of(16, 16, 1), weight_of(16, 16, 2)
    rows, others = ring_rows(num_rows, 16, 1), ring_rows(num_rows, 16, 2)
    right = coding.product(rows, one)
    for forged in (coding.product(rows, one.t()), coding.product(rows, other), coding.product(others, one)):
        verifier = verifier_of(one)
        verifier.add_group(1, other)
        verifier.check(0, FORWARD, rows, right)
        with pytest.raises(VerificationFailed):
            verifier.check(0, FORWARD, rows, forged)
    with pytest.raises(VerificationFailed):
        verifier_of(one).check(0, BACKWARD, rows, right)


BAD = {
    "rows too narrow": (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)),
    "reply too narrow": (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)),
    "too few rows": (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)),
    "too many rows": (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(3, 3, dtype=torch.int32)),
    "float reply": (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 3)),
    "long reply": (torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64)),
    "float rows": (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int32)),
    "one dimension": (torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)),
    "three dimensions": (torch.zeros(1, 2, 4, dtype=torch.int32), torch.zeros(1, 2, 3, dtype=torch.int32)),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_wrong_shapes_and_types_fail_the_same_way(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    verifier = verifier_of(weight_of(4, 3))
    with pytest.raises(VerificationFailed) as failure:
        verifier.check(0, FORWARD, *case)
    assert str(failure.value) == FAILED
    assert verifier.failed


def test_a_group_that_was_never_added_fails() -> None:
    zeros = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(VerificationFailed, match=FAILED):
        verifier_of(weight_of(4, 4)).check(7, FORWARD, zeros, zeros)


def test_a_failure_is_for_good_and_says_nothing() -> None:
    weight = weight_of(4, 3)
    verifier = verifier_of(weight)
    secrets = secrets_of(verifier)
    rows = ring_rows(5, 4)
    right = coding.product(rows, weight)
    verifier.check(0, FORWARD, rows, right)
    texts = set()
    for reply in (changed(right, 0, 0, 77_777), right, right[:1]):
        with pytest.raises(VerificationFailed) as failure:
            verifier.check(0, FORWARD, rows, reply)
        texts.add(str(failure.value))
        assert failure.value.__cause__ is None
        assert failure.value.__context__ is None
    assert texts == {FAILED}
    with pytest.raises(VerificationFailed):
        verifier.add_group(1, weight)
    assert alive(secrets) == 0
    verifier.close()
    with pytest.raises(VerificationFailed):
        verifier.check(0, FORWARD, rows, right)


def test_closing_drops_the_secrets_and_accuses_nobody() -> None:
    weight, rows = weight_of(4, 3), ring_rows(2, 4)
    verifier = verifier_of(weight)
    secrets = secrets_of(verifier)
    verifier.close()
    assert alive(secrets) == 0
    assert not verifier.failed
    with pytest.raises(ConfigurationError):
        verifier.check(0, FORWARD, rows, coding.product(rows, weight))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_the_lock_is_held_can_check_and_close() -> None:
    weight, rows = weight_of(4, 3), ring_rows(2, 4)
    verifier = verifier_of(weight)
    secrets = secrets_of(verifier)

    def child() -> str:
        verifier.check(0, FORWARD, rows, coding.product(rows, weight))
        verifier.add_group(1, weight)
        verifier.close()
        return f"{alive(secrets)} secrets"

    with verifier._lock:  # the lock is held, as if by a thread that the child does not have
        assert in_child(child) == "0 secrets"
    verifier.check(0, FORWARD, rows, coding.product(rows, weight))


def test_nothing_can_be_pickled_copied_or_printed() -> None:
    verifier = verifier_of(weight_of(4, 3))
    for refused in (pickle.dumps, copy.deepcopy, copy.copy):
        with pytest.raises(TypeError, match="secrets"):
            refused(verifier)
    kept = [each for each in reachable(verifier, object) if type(each).__module__.startswith("noise.")]
    assert len(kept) == 3, "the verifier, and the secrets of two directions"
    assert "tensor" not in "".join(map(repr, kept))


def test_the_weight_is_not_kept() -> None:
    weight, rows = weight_of(40, 30), ring_rows(3, 40)
    reply = coding.product(rows, weight)
    verifier = verifier_of(weight)
    weight.zero_()
    verifier.check(0, FORWARD, rows, reply)
    kept = reachable(verifier, torch.Tensor)
    assert all(each.data_ptr() != weight.data_ptr() for each in kept)
    # The secrets for folding, and for each direction R, and V in two limbs.
    assert sum(each.numel() for each in kept) <= 41 * FOLDED_TOGETHER + (40 + 30) * 3 * 41


@pytest.mark.parametrize("kappa", [0, 39, 65, -1, 40.5, "40"])
def test_kappa_out_of_range(kappa: int) -> None:
    with pytest.raises(ConfigurationError, match="40 to 64"):
        Verifier(kappa)


def test_weights_that_are_none() -> None:
    verifier = Verifier(64)
    for weight in (torch.zeros(4, 3), torch.zeros(4, dtype=torch.int8), torch.zeros(0, 3, dtype=torch.int8)):
        with pytest.raises(InvalidTensor):
            verifier.add_group(0, weight)
    verifier.add_group(0, weight_of(4, 3))
    with pytest.raises(ConfigurationError, match="added"):
        verifier.add_group(0, weight_of(4, 3))


def test_secrets_differ_between_groups_directions_and_verifiers() -> None:
    weight = weight_of(16, 16)
    one, other = verifier_of(weight), verifier_of(weight)
    one.add_group(1, weight)
    kept = [each for made in (one, other) for each in reachable(made, torch.Tensor)]
    outer = [each for each in kept if (each.dtype, each.shape) == (torch.int8, (16, 41))]  # V has two limbs.
    assert len({each.numpy().tobytes() for each in outer}) == len(outer) == 6
    for each in outer:
        assert set(each.unique().tolist()) == {0, 1}


class Weak(Verifier):
    """Allows so few columns that forgeries pass often enough to be counted."""

    _kappas: ClassVar[range] = range(1, 65)


def binomial_bounds(trials: int, chance: float, doubt: float = 1e-9) -> tuple[int, int]:
    """Returns the smallest and the largest plausible count of successes. A smaller count has a probability below
    `doubt`, and so has a larger one.

    Args:
        trials: the number of independent trials.
        chance: the probability of success in each trial.
        doubt: the bound on both probabilities.
    """
    log_weights = [
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        + k * math.log(chance) + (trials - k) * math.log1p(-chance)
        for k in range(trials + 1)
    ]  # fmt: skip
    weights = [math.exp(value) for value in log_weights]
    low, tail = 0, weights[0]
    while tail < doubt:
        low += 1
        tail += weights[low]
    high, tail = trials, weights[trials]
    while tail < doubt:
        high -= 1
        tail += weights[high]
    return low, high


TRIALS = 3000


def acceptances(kappa: int, num_rows: int, by: int) -> int:
    """Returns how many of TRIALS new verifiers accept a reply with one changed number."""
    weight = weight_of(3, 3)
    rows = ring_rows(num_rows, 3)
    forged = changed(coding.product(rows, weight), num_rows // 2, 1, by)
    accepted = 0
    for _ in range(TRIALS):
        verifier = verifier_of(weight, Weak, kappa)
        try:
            verifier.check(0, FORWARD, rows, forged)
        except VerificationFailed:
            continue
        accepted += 1
    return accepted


@pytest.mark.slow
@pytest.mark.parametrize("by", [1, 2**31], ids=["+1", "+2^31"])
@pytest.mark.parametrize("kappa", [1, 3])
def test_a_forgery_passes_as_often_as_the_law_says(kappa: int, by: int) -> None:
    """With κ+1 columns the probability is 2^-(κ+1), also for a change of 2^31. A single column that is uniform mod 2^32
    would let this change pass half the time."""
    low, high = binomial_bounds(TRIALS, 2.0 ** -(kappa + 1))
    assert 0 < low <= acceptances(kappa, 1, by) <= high


@pytest.mark.slow
@pytest.mark.skipif(not int_mm_is_exact(), reason="rows are never folded on this machine")
def test_folding_misses_as_often_as_the_law_says() -> None:
    """With folding there are two random secrets, each of which misses a wrong number with probability 2^-4. Together
    they miss it with 1 − (1 − 2^-4)², which is below 2^-3 = 2^-κ."""
    miss = 2.0**-4
    low, high = binomial_bounds(TRIALS, 1 - (1 - miss) ** 2)
    assert 0 < low <= acceptances(3, FOLDED, 2**31) <= high


def test_one_uniform_column_would_miss_half() -> None:
    """This is the control of `test_a_forgery_passes_as_often_as_the_law_says`. A single column that is uniform mod
    2^32, in place of binary columns, misses the error 2^31 half the time (docs/decisions/0005-verification.md)."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randint(0, 2**32, (TRIALS,), generator=generator)
    missed = int(((columns * 2**31) % 2**32 == 0).sum())
    low, high = binomial_bounds(TRIALS, 0.5)
    assert low <= missed <= high
