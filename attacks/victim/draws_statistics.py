"""Tests whether a tenant's secrets and errors look like those that noise/ should draw. One bound limits all false
alarms.

Every test gives an upper bound on the probability that chance gives such a value (`attacks.victim.tails`, which uses no
limit theorem). A test raises an alarm if its bound is at most `FALSE_ALARM`/T, where T is the number of tests in a
report. Then an honest run raises any alarm with probability at most `FALSE_ALARM`, however the tests depend on each
other. Within a test, numbers that have to be independent are so: in a sum over pairs, a number and its weight come from
different draws.

The tests look at:
- numbers outside of the support;
- the number of non-zero trits and the sum of trits, for each secret, and for each position over all secrets;
- mean, mean square and distribution of errors, for each block, feature and row;
- correlation of errors with the next number, and with every other block, group, direction and piece;
- equal rows of errors and equal runs of trits, anywhere.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from attacks.victim import tails
from attacks.victim.check import FALSE_ALARM, Check
from attacks.victim.draws import CORNER_FEATURES, CORNER_ROWS, PREFIX, Errors, Place, Watch
from noise.params import NOMINAL_SIGMA, LatticeParameters
from wire.errors import ConfigurationError

ETA = 21
"""η of the centred binomial in docs/parameters.md, "Errors". It is repeated here so that a change of the sampler does
not change the distribution that the sampler is compared with."""
TRIT_SIGMA = math.sqrt(2 / 3)
_RUN = 64
"""The number of trits in a run that is compared as a whole. Two independent runs are equal with probability 2^-101."""
_HASH_BYTES = 16
_MOST_POLYNOMIALS, _MOST_UNITS = 6144, 4096
"""The most polynomials, and the most blocks or pieces, that are compared with each other. If there are more, only the
first ones are compared."""


@dataclass
class _Family:
    unit: str
    num_tests: int = 0
    value: float = 0.0
    log_p: float = 0.0


@dataclass
class _Sums:
    """Holds sums of squared errors and the number of errors in each sum. There is one sum for each feature of a
    `Place`, or one for each row over all blocks."""

    squares: torch.Tensor
    counts: torch.Tensor


@dataclass(eq=False)
class Statistics:
    """Adds up errors as they are made. The method `checks` adds the tests of secrets and of pairs."""

    parameters: LatticeParameters
    families: dict[str, _Family] = field(default_factory=dict)
    histogram: Counter[int] = field(default_factory=Counter)
    num_errors: int = 0

    def __post_init__(self) -> None:
        """Chooses the distribution that errors must have under the parameters.

        Raises:
            ConfigurationError: the parameters' sigma is not above 0.
        """
        if self.parameters.sigma == NOMINAL_SIGMA:
            self.sigma, self.distribution = math.sqrt(ETA / 2), tails.centred_binomial(ETA)
        elif self.parameters.sigma > 0:
            self.sigma = self.parameters.sigma
            self.distribution = tails.discrete_gaussian(self.sigma)
        else:
            raise ConfigurationError("errors of zero have no statistics: this looks at masks with sigma above 0")
        degree = self.parameters.ring_degree
        self._features: dict[Place, _Sums] = {}
        self._rows = _Sums(torch.zeros(degree, dtype=torch.float64), torch.zeros(degree, dtype=torch.float64))
        self._rows_seen, self._runs_seen = _Seen(), _Seen()
        self._least_features = CORNER_FEATURES

    # ---- errors, as they come ----------------------------------------------------------------------------------------

    def keep(self, errors: Errors) -> None:
        """Adds the errors of one block or piece; `Watch` calls this."""
        numbers, unit = errors.numbers, errors.unit
        most = max(self.distribution) + 1
        counts = numbers.clamp(-most, most).add(most).flatten().bincount(minlength=2 * most + 1)
        self.histogram.update(dict(zip(range(-most, most + 1), counts.tolist(), strict=True)))
        self.num_errors += numbers.numel()
        wide = numbers.to(torch.float64)
        self._test_unit(wide)
        squares = wide.square()
        num_rows, width = numbers.shape
        nothing = torch.zeros(width, dtype=torch.float64)
        here = self._features.setdefault(unit.place, _Sums(nothing, nothing.clone()))
        here.squares += squares.sum(0)
        here.counts += num_rows
        rows = slice(unit.first_row, unit.first_row + num_rows)
        self._rows.squares[rows] += squares.sum(1)
        self._rows.counts[rows] += width
        self._least_features = min(self._least_features, width)
        for row in numbers[:, :CORNER_FEATURES].contiguous().numpy():
            self._rows_seen.add(row.tobytes(), unit.place, unit.secret, unit.first_row)

    def _test_unit(self, wide: torch.Tensor) -> None:
        size = wide.numel()
        mean = float(wide.sum()) / (self.sigma * math.sqrt(size))
        self._distance("mean of a block's errors", 1, mean)
        ratio = float(wide.square().mean()) / self.sigma**2
        self._add("mean square of a block's errors", "of σ²", 1, ratio, tails.mean_square(ratio, size))
        for name, turned in (("feature", wide.t()), ("row", wide)):
            for one, other in _neighbours(turned):
                value = tails.correlation(one, other, self.sigma)
                self._distance(f"errors against those of the next {name}", 1, value)

    # ---- everything --------------------------------------------------------------------------------------------------

    def checks(self, watch: Watch) -> list[Check]:
        """Computes all tests of a watch that gave its errors to `keep`. Call this method only once, because it adds its
        tests to those that `keep` made."""
        self._test_coverage(watch)
        if watch.secrets and self.num_errors:
            self._test_distribution()
            self._test_sums()
            self._test_secrets(torch.stack(watch.secrets))
            self._test_pairs(watch)
            self._test_repeats(watch)
        total = sum(family.num_tests for family in self.families.values())
        limit = math.log(FALSE_ALARM / total)
        return [
            Check(
                name, one.num_tests, one.value, one.unit, one.log_p / math.log(10) if math.isfinite(one.log_p)
                else one.log_p, one.log_p <= limit,
            )
            for name, one in self.families.items()
        ]  # fmt: skip

    def _add(self, name: str, unit: str, num_tests: int, value: float, log_p: float) -> None:
        family = self.families.setdefault(name, _Family(unit))
        if log_p <= family.log_p or not family.num_tests:
            family.value, family.log_p = value, log_p
        family.num_tests += num_tests

    def _distance(self, name: str, num_tests: int, distance: float) -> None:
        self._add(name, "standard deviations", num_tests, distance, tails.sub_gaussian(distance))

    def _never(self, name: str, count: int) -> None:
        """Adds a test for something that an honest tenant never does. A count above zero is an alarm."""
        self._add(name, "times", 1, float(count), tails.NEVER if count else 0.0)

    def _test_coverage(self, watch: Watch) -> None:
        """Tests whether every number that was used was requested from the sampler, and whether the watch saw all of
        them."""
        trits = sum(secret.numel() for secret in watch.secrets)
        self._never("masks made where nobody looked", watch.num_unknown + (not watch.units))
        self._never("trits that the sampler was not asked for", max(0, trits - watch.trits_drawn))
        self._never("errors that the sampler was not asked for", max(0, self.num_errors - watch.errors_drawn))

    def _test_distribution(self) -> None:
        outside = sum(count for value, count in self.histogram.items() if value not in self.distribution)
        self._never("errors outside of their support", outside)
        for value, probability in self.distribution.items():
            count = self.histogram[value]
            log_p = tails.binomial(count, self.num_errors, probability)
            name, expected = "errors of each value", self.num_errors * probability
            self._add(name, "of what is expected", 1, count / expected, log_p)

    def _test_sums(self) -> None:
        by_row = [("mean square of the errors of a row of all blocks", self._rows)]
        by_feature = [("mean square of a feature's errors", one) for one in self._features.values()]
        for name, sums in by_row + by_feature:
            for total, count in zip(sums.squares.tolist(), sums.counts.tolist(), strict=True):
                if count:
                    ratio = total / count / self.sigma**2
                    self._add(name, "of σ²", 1, ratio, tails.mean_square(ratio, int(count)))

    def _test_secrets(self, secrets: torch.Tensor) -> None:
        """Adds the tests of secrets, int8, shape (num_secrets, rank, ring_degree)."""
        self._never("trits that are none", int((secrets.abs() > 1).sum()))
        flat = secrets.flatten(1).to(torch.float64)
        for name, rows in (("a secret", flat), ("one place in all secrets", flat.t())):
            size = rows.shape[1]
            for weight in (rows != 0).sum(1).tolist():
                log_p = tails.binomial(weight, size, 2 / 3)
                self._add(f"weight of {name}", "of what is expected", 1, weight / size * 1.5, log_p)
            balances = rows.sum(1) / (TRIT_SIGMA * math.sqrt(size))
            self._distance(f"balance of {name}", len(rows), _farthest(balances))
        for secret in secrets.to(torch.float64):
            for one, other in _neighbours(secret.t()):
                self._distance("trits against the next", 1, tails.correlation(one, other, TRIT_SIGMA))

    # ---- pairs -------------------------------------------------------------------------------------------------------

    def _test_pairs(self, watch: Watch) -> None:
        rank = self.parameters.rank
        polynomials = torch.stack(watch.secrets).flatten(0, 1)[:_MOST_POLYNOMIALS]
        owners = [(place, number) for number, place in enumerate(watch.places) for _ in range(rank)]
        self._correlate("secrets", polynomials, torch.ones_like(polynomials), owners, TRIT_SIGMA)
        units = watch.units[:_MOST_UNITS]
        owners = [(unit.place, unit.secret) for unit in units]
        for shape, parts in (
            ((CORNER_ROWS, CORNER_FEATURES), [unit.corner for unit in units]),
            ((PREFIX,), [unit.prefix for unit in units]),
        ):
            numbers, is_there = _padded(parts, shape)
            self._correlate("errors", numbers, is_there, owners, self.sigma)

    def _correlate(
        self,
        what: str,
        numbers: torch.Tensor,
        is_there: torch.Tensor,
        owners: Sequence[tuple[Place, int]],
        sigma: float,
    ) -> None:
        """Adds tests of the correlation of every pair of rows of `numbers`, one test for each relation between the
        owners of two rows.

        The correlation is the sum of products over the positions at which both rows have a number, in units of σ·‖b‖,
        where b holds the second row's numbers at these positions.

        Args:
            what: the name of the numbers, for the results.
            numbers: shape (num_rows, length); each row is a secret's polynomial, or errors of a block or piece.
            is_there: 1 where a row has a number and 0 in the padding; the same shape.
            owners: the place and the secret's index of each row.
            sigma: the standard deviation σ of the numbers.
        """
        wide, there = numbers.to(torch.float64), is_there.to(torch.float64)
        owners = owners[: len(wide)]
        lengths = (there @ wide.square().t()).sqrt()
        distances = ((wide @ wide.t()) / (sigma * lengths)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        relations = _relations(owners)
        for number, name in enumerate(_RELATIONS):
            chosen = torch.triu(relations == number, diagonal=1)
            count = int(chosen.sum())
            if count:
                self._distance(f"{what} of {name}", count, _farthest(distances[chosen]))

    def _test_repeats(self, watch: Watch) -> None:
        for number, (secret, place) in enumerate(zip(watch.secrets, watch.places, strict=True)):
            for run in secret.reshape(-1, min(_RUN, secret.shape[1])).numpy():
                self._runs_seen.add(run.tobytes(), place, number, 0)
        run_length = min(_RUN, self.parameters.ring_degree)
        equal = math.log(sum(each * each for each in self.distribution.values())) * self._least_features
        for what, seen, log_equal in (
            ("equal rows of errors", self._rows_seen, equal),
            (f"equal runs of {run_length} trits", self._runs_seen, -math.log(3) * run_length),
        ):
            chance = tails.collisions(seen.num_items, math.log(math.exp(log_equal) + 2.0 ** (-8 * _HASH_BYTES)))
            for name in (_SAME, *_RELATIONS):
                count = seen.repeats[name]
                self._add(f"{what} in {name}", "pairs", 1, float(count), chance if count else 0.0)


class _Seen:
    """Holds keyed hashes of the items that were added. It counts repetitions by their relation to the first
    occurrence."""

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._first: dict[bytes, tuple[Place, int, int]] = {}
        self.repeats: Counter[str] = Counter()
        self.num_items = 0

    def add(self, item: bytes, place: Place, secret: int, first_row: int) -> None:
        """Adds one item. The other arguments say to which mask, secret and row it belongs."""
        self.num_items += 1
        digest = hashlib.blake2b(item, key=self._key, digest_size=_HASH_BYTES).digest()
        before = self._first.setdefault(digest, (place, secret, first_row))
        if self.num_items > len(self._first) + self.repeats.total():
            is_same = before == (place, secret, first_row)
            self.repeats[_SAME if is_same else _RELATIONS[_relation(before[:2], (place, secret))]] += 1


_SAME = "one block or piece"
_RELATIONS = ("one block", "blocks of a group and direction", "directions of a group", "groups", "sessions")
"""Names for the relation between two polynomials, blocks or pieces. "one block" means that both belong to the same
block. Each other name says in what the two differ."""


def _relation(one: tuple[Place, int], other: tuple[Place, int]) -> int:
    (first, number), (second, other_number) = one, other
    if first.session != second.session:
        return 4
    if first.group != second.group:
        return 3
    if first.direction is not second.direction:
        return 2
    return int(number != other_number)


def _relations(owners: Sequence[tuple[Place, int]]) -> torch.Tensor:
    """Returns, for each pair of owners, the index in `_RELATIONS` of the relation between them; int64, shape (n, n)."""
    columns = [
        torch.tensor([(place.session, place.group, list(type(place.direction)).index(place.direction), number)[part]
                      for place, number in owners])
        for part in range(4)
    ]  # fmt: skip
    found = torch.zeros(len(owners), len(owners), dtype=torch.int64)
    for rank, column in ((1, columns[3]), (2, columns[2]), (3, columns[1]), (4, columns[0])):
        found[column[:, None] != column] = rank
    return found


def _neighbours(rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the odd rows, each with the row before it, and then the even rows in the same way. So no row is on both
    sides of one pair of tensors. Yields nothing for a single row."""
    for first in (0, 1):
        pairs = (len(rows) - first) // 2
        if pairs:
            both = rows[first : first + 2 * pairs].unflatten(0, (pairs, 2))
            yield both[:, 1], both[:, 0]


def _padded(parts: Sequence[torch.Tensor], shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads parts to rows of one length. Returns these rows, and a tensor that is 1 where a row has a number and 0 in
    the padding; both int16, shape (len(parts), length)."""
    numbers = torch.zeros(len(parts), *shape, dtype=torch.int16)
    is_there = torch.zeros_like(numbers)
    for index, part in enumerate(parts):
        for whole, value in ((numbers[index], part), (is_there[index], torch.ones_like(part))):
            for axis, size in enumerate(part.shape):
                whole = whole.narrow(axis, 0, size)
            whole.copy_(value)
    return numbers.flatten(1), is_there.flatten(1)


def _farthest(distances: torch.Tensor) -> float:
    return float(distances.flatten()[distances.abs().argmax()])
