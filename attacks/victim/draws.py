"""Observes the secrets and errors of a tenant's lattice masks from inside the tenant's own process.

This finds weaknesses that no recording shows. For example, at the shipped dimension a provider cannot tell errors in
{0, 1} from others. The observed secret s is the one with which the mask was computed. The observed error is what
remains of a finished mask after A·s is subtracted, where A is the public matrix. So both are those of the masks that
are sent, however and wherever they were drawn. Whole blocks, pieces of blocks and the compiled arithmetic are all
covered, because all of them run inside the functions that are wrapped. The wrapping uses unittest.mock, because noise/
has no interface for this.

Only statistics are written, and never a sample. Samples and their keyed hashes stay in the memory of this process until
the `Watch` is dropped. A watch observes only the process in which it runs.

`Statistics` tests whether a tenant's secrets and errors look like those that noise/ should draw. One bound limits all
false alarms.

Every test gives an upper bound on the probability that chance gives such a value (`attacks.victim.tails`, which uses no
limit theorem). Of K kinds of tests, each gets an equal share of `FALSE_ALARM`, and so does each of the T tests of one
kind: a test raises an alarm if its bound is at most `FALSE_ALARM`/(K·T). Then an honest run raises any alarm with
probability at most `FALSE_ALARM`, however the tests depend on each other. Within a test, numbers that have to be
independent are so: in a sum over pairs, a number and its weight come from different draws.

The tests look at:
- numbers outside of the support;
- the number of non-zero trits and the sum of trits, for each secret, and for each position over all secrets;
- mean, mean square and distribution of errors, for each block, feature and row;
- correlation of the errors of a block or piece with each other, at every distance and mirrored about every centre, by
  rows, by features and in both orders of all numbers; the same for the trits of each polynomial;
- correlation of errors with every other block, group, direction and piece, and of polynomials with every other one; for
  those that were made soon after each other also at every distance and mirrored;
- equal rows of errors and equal runs of trits, anywhere, also with the sign or the order turned round.

What depends on other numbers without correlation at a distance or mirrored is not seen: for example, errors that are
others in a permuted order, or a function of others that is not correlated with them. Between blocks and pieces only the
first errors are compared at every distance, and equal rows are found by their ends.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch

from attacks.victim import tails
from noise import sampling
from noise.blocks.pool import Block
from noise.masks.lattice import Lattice
from noise.params import NOMINAL_SIGMA, PARAMETERS, LatticeParameters
from noise.polynomial import negacyclic
from noise.scheme import GroupSpec
from wire.errors import ConfigurationError
from wire.frame import Direction

# ---- results --------------------------------------------------------------------------------------------------------

FALSE_ALARM = 1e-6
"""The largest probability that a whole report raises any alarm by chance."""


@dataclass(frozen=True)
class Check:
    """Holds the most extreme result among the tests of one kind.

    Attributes:
        name: what was tested.
        num_tests: the number of tests of this kind.
        value: the most extreme test's value, in the unit that `unit` names.
        log10_chance: log10 of an upper bound on the probability that one test has such a value by chance; minus
            infinity for a value that is impossible.
        is_alarm: whether that bound is so small that chance does not explain it, given the number of all tests.
    """

    name: str
    num_tests: int
    value: float
    unit: str
    log10_chance: float
    is_alarm: bool


def checks_to_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Converts checks to values for JSON. JSON has no infinity, so null stands for the logarithm of probability
    zero."""
    return [
        asdict(one) | {"log10_chance": one.log10_chance if math.isfinite(one.log10_chance) else None} for one in checks
    ]


def checks_from_json(said: Sequence[dict[str, Any]]) -> list[Check]:
    """Returns the checks that `to_json` turned into JSON values."""
    return [Check(**(one | {"log10_chance": -math.inf if one["log10_chance"] is None else one["log10_chance"]}))
            for one in said]  # fmt: skip


def alarms(checks: Sequence[Check]) -> list[str]:
    """Returns a line of text for each alarm, the most extreme first."""
    return [
        f"{one.name}: {one.value:.4g} {one.unit}, chance below 10^{one.log10_chance:.0f}"
        if math.isfinite(one.log10_chance) else f"{one.name}: {one.value:.4g} {one.unit}, which cannot be"
        for one in sorted(checks, key=lambda each: each.log10_chance)
        if one.is_alarm
    ]  # fmt: skip


def total_tests(checks: Sequence[Check]) -> int:
    """Returns the number of all tests of a report, over all kinds."""
    return sum(one.num_tests for one in checks)


# ---- watching -------------------------------------------------------------------------------------------------------

DEFAULT = PARAMETERS["default"]
CORNER_ROWS, CORNER_FEATURES, PREFIX = 16, 32, 2048
"""These sizes say which errors of a block, or of a piece of a block, are kept for comparison with those of all others.
They are the first `CORNER_FEATURES` features of the first `CORNER_ROWS` rows, and the first `PREFIX` numbers in memory
order. The first `CORNER_FEATURES` numbers of each row are hashed."""


@dataclass(frozen=True)
class _Place:
    """Identifies what a mask was made for.

    Attributes:
        session: the number of the mask scheme among those that the watch has seen, from 0.
        group: the group's id.
    """

    session: int
    group: int
    direction: Direction


@dataclass(frozen=True)
class _Unit:
    """Describes one block of mask rows, or one piece of a block, that was made at once.

    Attributes:
        secret: the index, in `Watch.secrets`, of the secret with which the unit was made.
        first_row: the position of the unit's first row in its block.
        corner: the errors of the first rows and features, int16, shape (CORNER_ROWS, CORNER_FEATURES) at most.
        prefix: the first errors in memory order, int16, shape (PREFIX,) at most.
    """

    place: _Place
    secret: int
    first_row: int
    corner: torch.Tensor = field(repr=False)
    prefix: torch.Tensor = field(repr=False)


@dataclass
class Errors:
    """Holds the errors of one block or piece until they are added to the statistics; then they are dropped."""

    unit: _Unit
    numbers: torch.Tensor = field(repr=False)


class Watch:
    """Collects secrets and errors in the order in which masks are made. The class is thread-safe.

    Attributes:
        secrets: the secrets from which masks were made, each int8, shape (rank, ring_degree).
        places: for each secret, what the mask was made for.
        units: all blocks and pieces.
        trits_drawn, errors_drawn: how many trits and errors were requested from noise.sampling.
        num_unknown: the number of calls, blocks and pieces whose masks were made in a way that the watch does not
            understand, so that their errors were not observed.
    """

    def __init__(self, parameters: LatticeParameters, keep: Callable[[Errors], None]) -> None:
        """Makes a watch that has not seen any mask yet.

        Args:
            parameters: the parameters of the masks.
            keep: a function that is called with the errors of each unit, by one thread at a time.
        """
        self.parameters = parameters
        self.secrets: list[torch.Tensor] = []
        self.places: list[_Place] = []
        self.units: list[_Unit] = []
        self.trits_drawn = self.errors_drawn = self.num_unknown = 0
        self._keep = keep
        self._lock = threading.RLock()
        self._here = threading.local()
        self._known: dict[int, _Transformed] = {}
        self._sessions: dict[int, tuple[int, Lattice]] = {}
        self._combine = negacyclic.combine

    # ---- what is wrapped --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Watch]:
        """Returns a context manager, within whose block every lattice mask that this process makes is watched.
        Functions that are already patched are wrapped, too."""
        self._combine = negacyclic.combine
        with contextlib.ExitStack() as patches:
            for owner, name, spy in (
                (sampling, "ternary", self._ternary),
                (sampling, "error", self._error),
                (negacyclic, "secret_transform", self._secret_transform),
                (negacyclic, "combine", self._combined),
                (negacyclic, "masks_and_effects", self._combined),
                (Lattice, "_make_blocks", functools.partial(self._made, False)),
                (Lattice, "_make_pieces", functools.partial(self._made, True)),
            ):
                patches.enter_context(mock.patch.object(owner, name, _wrapped(getattr(owner, name), spy)))
            yield self

    def _ternary(self, original: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        drawn = original(*arguments)
        with self._lock:
            self.trits_drawn += drawn.numel()
        return drawn

    def _error(self, original: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        drawn = original(*arguments)
        with self._lock:
            self.errors_drawn += drawn.numel()
        return drawn

    def _secret_transform(self, original: Callable[..., torch.Tensor], secrets: torch.Tensor) -> torch.Tensor:
        made = original(secrets)
        with self._lock:  # the transforms are kept, so that no other object gets their id
            self._known[id(made)] = _Transformed(made, secrets.clone())
        return made

    def _combined(
        self,
        original: Callable[..., Sequence[torch.Tensor]],
        matrix: Any,
        secrets_hat: torch.Tensor,
        *others: Any,
        **named: Any,
    ) -> Sequence[torch.Tensor]:
        self._here.last = matrix, secrets_hat
        return original(matrix, secrets_hat, *others, **named)

    def _made(
        self,
        in_pieces: bool,
        original: Callable[..., list[Block]],
        scheme: Lattice,
        group: GroupSpec,
        direction: Direction,
        count: int,
    ) -> list[Block]:
        self._here.last = None
        blocks = original(scheme, group, direction, count)
        with self._lock:
            number, _ = self._sessions.setdefault(id(scheme), (len(self._sessions), scheme))
            self._look_at(_Place(number, group.id, direction), blocks, in_pieces)
        return blocks

    # ---- what was made ----------------------------------------------------------------------------------------------

    def _look_at(self, place: _Place, blocks: Sequence[Block], in_pieces: bool) -> None:
        """Subtracts A·s from the masks that a thread has just made, and keeps the errors that remain."""
        last: tuple[negacyclic.Transforms, torch.Tensor] | None = self._here.last
        known = self._known.get(id(last[1])) if last is not None else None
        if last is None or known is None:
            self.num_unknown += 1
            return
        if not known.numbers or not in_pieces or self.places[known.numbers[0]] != place:  # else the same block goes on
            known.numbers = range(len(self.secrets), len(self.secrets) + len(known.secrets))
            self.secrets += known.secrets.unbind()
            self.places += [place] * len(known.secrets)
        pure = self._combine(*last)  # for each block int32, (N, features)
        starts = [(index, 0) for index in range(len(blocks))]
        if in_pieces:
            starts = [(0, first) for first in known.next_rows([len(block.mask) for block in blocks])]
        for block, (index, first) in zip(blocks, starts, strict=True):
            without = pure[index][first : first + len(block.mask)]
            if without.shape == block.mask.shape:
                self._note(place, known.numbers[index], first, block.mask - without)  # mod 2^32
            else:
                self.num_unknown += 1

    def _note(self, place: _Place, secret: int, first_row: int, error: torch.Tensor) -> None:
        corner = error[:CORNER_ROWS, :CORNER_FEATURES].clamp(-(2**15), 2**15 - 1).to(torch.int16)
        prefix = error.flatten()[:PREFIX].clamp(-(2**15), 2**15 - 1).to(torch.int16)
        unit = _Unit(place, secret, first_row, corner, prefix)
        self.units.append(unit)
        self._keep(Errors(unit, error))


@dataclass
class _Transformed:
    """Holds secrets, and the transforms that were computed from them.

    Attributes:
        numbers: the indices of the secrets in `Watch.secrets`; empty before the first mask is made from them.
        num_rows: the number of rows of the block that were made so far, if blocks are made in pieces.
    """

    transforms: torch.Tensor = field(repr=False)
    secrets: torch.Tensor = field(repr=False)
    numbers: range = range(0)
    num_rows: int = 0

    def next_rows(self, counts: Sequence[int]) -> list[int]:
        """Returns the first row of each piece, from the sizes of the pieces. The pieces of a block are made in
        order."""
        starts = []
        for count in counts:
            starts.append(self.num_rows)
            self.num_rows += count
        return starts


def _wrapped(original: Callable[..., Any], spy: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return spy(original, *arguments, **named)

    return wrapper


# ---- statistics -----------------------------------------------------------------------------------------------------

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
_MOST_IN_ORDER = 2**17
"""The most errors of a block or piece that are correlated with each other in one order of all its numbers. The
correlations of whole rows and of whole features have no such limit."""
_MOST_LAGGED = 2**23
"""The size of all Fourier transforms for the correlations of pairs at every distance, for each kind of numbers, which
bounds their time. If they would be larger, each one is compared with fewer of those that were made after it."""
_TURNED = 8
"""The number of ways in which two rows, or two runs of trits, count as equal: the start or the reversed end of the one,
with either sign, against the start or the reversed end of the other."""


@dataclass
class _Family:
    unit: str
    num_tests: int = 0
    value: float = 0.0
    log_p: float = 0.0


@dataclass
class _Sums:
    """Holds sums of squared errors and the number of errors in each sum. There is one sum for each feature of a
    `_Place`, or one for each row over all blocks."""

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
        self._features: dict[_Place, _Sums] = {}
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
        for item in _items(numbers, CORNER_FEATURES):
            self._rows_seen.add(item, unit.place, unit.secret, unit.first_row)

    def _test_unit(self, wide: torch.Tensor) -> None:
        size = wide.numel()
        mean = float(wide.sum()) / (self.sigma * math.sqrt(size))
        self._distance("mean of a block's errors", 1, mean)
        ratio = float(wide.square().mean()) / self.sigma**2
        self._add("mean square of a block's errors", "of σ²", 1, ratio, tails.mean_square(ratio, size))
        by_row, by_feature = wide.reshape(1, -1), wide.t().reshape(1, -1)
        for order, sequence in (
            ("rows", wide.t()), ("features", wide),
            ("numbers, row by row", by_row[:, :_MOST_IN_ORDER]),
            ("numbers, feature by feature", by_feature[:, :_MOST_IN_ORDER]),
        ):  # fmt: skip
            self._lagged("errors", f"other {order}", sequence_lags(sequence), self.sigma)

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
        share = math.log(FALSE_ALARM / len(self.families))
        return [
            Check(
                name, one.num_tests, one.value, one.unit, one.log_p / math.log(10) if math.isfinite(one.log_p)
                else one.log_p, one.log_p <= share - math.log(one.num_tests),
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

    def _lagged(self, what: str, others: str, lags: Iterator[Lags], sigma: float) -> None:
        """Adds a test for each sum of products."""
        for one in lags:
            if one.totals.numel():
                log_p = tails.products(one.totals, one.squares, one.counts, sigma).flatten()
                at = int(log_p.argmin())
                distance = float((one.totals / (sigma**2 * one.counts.to(torch.float64).sqrt())).flatten()[at])
                name = f"{what} against {others}{', mirrored' if one.is_mirrored else ', at every distance'}"
                self._add(name, "standard deviations", log_p.numel(), distance, float(log_p[at]))

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
        for polynomial in secrets.flatten(0, 1).to(torch.float64):
            self._lagged("trits", "others of a polynomial", sequence_lags(polynomial[None]), TRIT_SIGMA)

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
        owners: Sequence[tuple[_Place, int]],
        sigma: float,
    ) -> None:
        """Adds tests of the correlation of every pair of rows of `numbers`, one test for each relation between the
        owners of two rows. Adds tests of correlations at every distance, and mirrored, for rows that are near.

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
        self._lagged(what, "those made soon after", pair_lags(wide), sigma)
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
            run_length = min(_RUN, secret.shape[1])
            for item in _items(secret.reshape(-1, run_length), run_length):
                self._runs_seen.add(item, place, number, 0)
        run_length = min(_RUN, self.parameters.ring_degree)
        equal = math.log(sum(each * each for each in self.distribution.values())) * self._least_features
        for what, seen, log_equal in (
            ("equal rows of errors", self._rows_seen, equal),
            (f"equal runs of {run_length} trits", self._runs_seen, -math.log(3) * run_length),
        ):
            log_equal = math.log(_TURNED * math.exp(log_equal) + 2.0 ** (-8 * _HASH_BYTES))
            chance = tails.collisions(seen.num_items, log_equal)
            for name in (_SAME, *_RELATIONS):
                count = seen.repeats[name]
                self._add(f"{what} in {name}", "pairs", 1, float(count), chance if count else 0.0)


class _Seen:
    """Holds keyed hashes of the items that were added. It counts repetitions by their relation to the first
    occurrence."""

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._first: dict[bytes, tuple[_Place, int, int]] = {}
        self.repeats: Counter[str] = Counter()
        self.num_items = 0

    def add(self, item: bytes, place: _Place, secret: int, first_row: int) -> None:
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


def _relation(one: tuple[_Place, int], other: tuple[_Place, int]) -> int:
    (first, number), (second, other_number) = one, other
    if first.session != second.session:
        return 4
    if first.group != second.group:
        return 3
    if first.direction is not second.direction:
        return 2
    return int(number != other_number)


def _relations(owners: Sequence[tuple[_Place, int]]) -> torch.Tensor:
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


def _items(rows: torch.Tensor, most: int) -> Iterator[bytes]:
    """Yields an item for each row, from the first `most` numbers of the row or of its reverse. A row has the same item
    as its negative, its reverse, and its reverse's negative."""
    starts = rows[:, :most], rows.flip(1)[:, :most]
    turned = [one.contiguous().numpy() for start in starts for one in (start, -start)]
    for each in zip(*turned, strict=True):
        yield min(one.tobytes() for one in each)


@dataclass(frozen=True)
class Lags:
    """Holds sums of products of numbers at many distances, or mirrored about many centres.

    Attributes:
        totals: the sums, float64.
        squares: bounds on the sums of the squared weights, as `tails.products` takes them; the same shape.
        counts: the number of products of each sum; a shape that broadcasts to that of `totals`.
    """

    totals: torch.Tensor
    squares: torch.Tensor
    counts: torch.Tensor
    is_mirrored: bool


def sequence_lags(sequence: torch.Tensor) -> Iterator[Lags]:
    """Computes the correlations of a sequence with itself, at each distance above 0 and mirrored about each centre.

    Args:
        sequence: float64, shape (channels, length); the sums run over all channels.
    """
    channels, length = sequence.shape
    size = _transform_size(length)
    transform = torch.fft.rfft(sequence, size)
    squares = sequence.square().sum(0)
    shifted = torch.fft.irfft(transform.abs().square().sum(0), size)[1:length]
    counts = torch.arange(length - 1, 0, -1) * channels
    yield Lags(shifted, squares.cumsum(0)[: length - 1].flip(0), counts, False)
    mirrored = torch.fft.irfft(transform.square().sum(0), size)[: 2 * length - 1]
    sums, counts = _mirrored_sums(squares[None])[0], _mirrored_sums(torch.full((1, length), channels))[0]
    # the number in the centre is its own image; the products of all other ones are there twice
    for each, centre in ((mirrored, squares), (sums, squares), (counts, channels)):
        each[::2] -= centre
    yield Lags(mirrored[1:-1] / 2, sums[1:-1] / 2, counts[1:-1] / 2, True)


def pair_lags(rows: torch.Tensor) -> Iterator[Lags]:
    """Computes the correlations of pairs of rows, at each distance and mirrored about each centre. A row is paired with
    those after it, with as many of them as `_MOST_LAGGED` allows.

    Args:
        rows: float64, shape (num_rows, length).
    """
    num_rows, length = rows.shape
    size = _transform_size(length)
    transforms = torch.fft.rfft(rows, size)
    squares, ones = rows.square(), torch.ones(1, length)
    # the places of a later row that a row has at a distance are the mirrored ones, with the row turned round
    behind, before = _mirrored_sums(squares.flip(1)), _mirrored_sums(squares)
    counts = _mirrored_sums(ones)
    for gap in range(1, min(num_rows, 1 + max(1, _MOST_LAGGED // (num_rows * size)))):
        one, other = transforms[:-gap], transforms[gap:]
        shifted = torch.fft.irfft(one.conj() * other, size).roll(length - 1, 1)[:, : 2 * length - 1]
        yield Lags(shifted, behind[:-gap], counts, False)
        yield Lags(torch.fft.irfft(one * other, size)[:, : 2 * length - 1], before[:-gap], counts, True)


def _mirrored_sums(numbers: torch.Tensor) -> torch.Tensor:
    """Returns, for each c from 0, the sum of the numbers that have an image if place i is mirrored to place c − i.

    Args:
        numbers: shape (num_rows, length).

    Returns:
        float64, shape (num_rows, 2·length − 1).
    """
    sums = numbers.to(torch.float64).cumsum(1)
    return torch.cat([sums, sums[:, -1:] - sums[:, :-1]], 1)


def _transform_size(length: int) -> int:
    """Returns a size of at least 2·length that has no large prime factor, so that a Fourier transform is fast."""
    step = 1 << max(0, (2 * length).bit_length() - 4)
    return -(-2 * length // step) * step


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
