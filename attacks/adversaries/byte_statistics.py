"""Tests whether int32 messages look uniform and independent. Masked messages do, and unmasked messages hardly ever do.

There are two tests for each group (layers that read the same input) and direction. A number that has fewer than 32 bits
on the wire has three bytes, its upper ones, and if it has more than 24 bits a fourth, its lowest eight. Chi-square
compares each byte with the uniform distribution (255 degrees of freedom). Serial correlation compares each number, as
int32, and each of its lower bytes with four neighbours: the next feature of the same row, and in the next row the same
feature, the feature before it and the feature after it. (The top byte needs no test of its own, since it equals the
number up to one part in 256.) With n independent pairs the correlation has standard deviation 1/√n. The bound grows
with the number of correlations that are tested. The mean of uniform numbers is subtracted, not the mean of the data, so
that numbers with a shifted mean correlate, too.

The tests need not know what a mask hides. They show whether the mask is missing on a group or in a direction, too
narrow, scaled wrongly, or shared by neighbouring rows or features. These are faults of scaling and encoding. Passing
the tests is no evidence of security: the output of any generator passes, even if its seed is public. The tests do not
find a mask that is used again for distant rows (`slot-reuse` does). Nor do they find low bits that were left unmasked,
if activations fill these bits and so make them look uniform.

Source: Knuth, The Art of Computer Programming, volume 2, 3.3.1 (chi-square) and 3.3.2, J (serial correlation).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import torch

from attacks.seen.adversary import Adversary, Claim, StolenFact
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import Message, View
from wire.ring.widths import FULL_BITS

_DEVIATIONS = 12.0
"""The excess of chi-square over its mean, in standard deviations, beyond which a byte counts as faulty. By chance this
happens less than once in 2^66 (Wilson and Hilferty's approximation), hence less than once in 2^46 over a million
tests."""
FALSE_POSITIVE_BITS = 40
"""The number b that sets the bound on correlations: the probability that at least one correlation of a view exceeds the
bound by chance is at most 2^-b."""
FEWEST = 4096
"""The fewest numbers of a group and direction that are tested. With fewer, chi-square is not close to its limit."""
_FEWEST_PAIRS = 1024
"""The fewest pairs of neighbours for which a correlation is tested. With this many pairs, the tail of a correlation is
that of a normal distribution, to within a twentieth, at 8 standard deviations (products of uniform numbers have an
excess kurtosis of 0.24)."""
_MOST_MESSAGES, _RUN = 256, 8
"""At most about `_MOST_MESSAGES` messages of a group and direction are tested. They come in runs of `_RUN` consecutive
messages, because neighbouring rows may be in two messages. The runs are spread over the recording."""
STEPS = {"along rows": (0, 1), "along columns": (1, 0), "one place on": (1, 1), "one place back": (1, -1)}
"""Maps the name of a step to the distance between a number and its neighbour, as (rows, features)."""
FACT = "groups whose numbers are not uniform, or not independent"
SUMMARY = "how uniform numbers are"
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Figures:
    """Holds the test values of one group and direction.

    Attributes:
        num_numbers: how many numbers were tested.
        chi_square: excess of each byte's chi-square over its mean, in standard deviations; float64, shape (bytes,).
        serial: correlations of the number and of its lower bytes, in standard deviations; float64, shape (parts,
            steps); NaN if there are too few neighbours.
    """

    group: int
    direction: str
    num_numbers: int
    chi_square: torch.Tensor = field(repr=False)
    serial: torch.Tensor = field(repr=False)

    def faults(self, bound: float) -> list[str]:
        """Returns the names of the tests whose values chance does not explain. `bound` is the limit for correlations,
        in standard deviations."""
        worst = self.serial.abs().nan_to_num(0.0).amax(dim=0).tolist()
        names = [name for name, z in zip(STEPS, worst, strict=True) if z > bound]
        return ["bytes", *names] if float(self.chi_square.max()) > _DEVIATIONS else names


@dataclass(frozen=True)
class Uniformity:
    """Holds the test values of a view.

    Attributes:
        looked_at: the test values of the groups and directions that have enough numbers.
        skipped: for each of the other groups and directions, how many numbers it has.
    """

    looked_at: tuple[Figures, ...]
    skipped: tuple[int, ...]

    @property
    def num_serial(self) -> int:
        """Returns the number of correlations that were tested."""
        return sum(int((~one.serial.isnan()).sum()) for one in self.looked_at)

    @property
    def worst_chi_square(self) -> float:
        """Returns the largest excess of a chi-square over its mean, in standard deviations; 0 if nothing was tested."""
        return max((float(one.chi_square.max()) for one in self.looked_at), default=0.0)

    @property
    def worst_serial(self) -> float:
        """Returns the largest absolute value of a correlation, in standard deviations; 0 if nothing was tested."""
        return max((float(one.serial.abs().nan_to_num(0.0).max()) for one in self.looked_at), default=0.0)

    @property
    def bound(self) -> float:
        """Returns the bound on correlations, in standard deviations; see `FALSE_POSITIVE_BITS`."""
        return -_NORMAL.inv_cdf(2.0**-FALSE_POSITIVE_BITS / (2 * max(self.num_serial, 1)))

    def faults(self) -> list[str]:
        """Returns a text for each group and direction with values that chance does not explain; it names the tests."""
        found = {f"{one.group} {one.direction}": one.faults(self.bound) for one in self.looked_at}
        return [f"{place} ({', '.join(words)})" for place, words in found.items() if words]

    def in_words(self) -> str:
        """Returns a line of text: the largest values, the ranges in which chance would put them, and how many numbers
        were not tested."""
        count = sum(one.chi_square.numel() for one in self.looked_at)
        few = f"fewer than {FEWEST:,} numbers"
        low, high = largest_chi_squares(count)
        low_z, high_z = largest_correlations(self.num_serial)
        numbers = sum(one.num_numbers for one in self.looked_at)
        return (
            f"largest of {count:,} chi-squares {self.worst_chi_square:.2f} sd (chance {low:.2f} to {high:.2f}), of "
            f"{self.num_serial:,} serial correlations {self.worst_serial:.2f} sd ({low_z:.2f} to {high_z:.2f}; fault "
            f"from {self.bound:.1f}); {len(self.looked_at)} groups and directions, {numbers:,} numbers; "
            f"{len(self.skipped)} skipped for {few} ({sum(self.skipped):,} together)"
        )


def largest_correlations(count: int) -> tuple[float, float]:
    """Returns the 99% interval, by chance, of the largest absolute value of `count` correlations, in standard
    deviations."""
    low, high = (-_NORMAL.inv_cdf(_tail(count, share) / 2) for share in (0.005, 0.995))
    return low, high


def largest_chi_squares(count: int) -> tuple[float, float]:
    """Returns the 99% interval, by chance, of the largest of `count` chi-squares of 255 degrees of freedom, as an
    excess over the mean in standard deviations.

    Source: Wilson and Hilferty, "The distribution of chi-square", PNAS 17, 1931.
    """
    spread = 2 / (9 * 255)
    roots = (1 - spread - _NORMAL.inv_cdf(_tail(count, share)) * spread**0.5 for share in (0.005, 0.995))
    low, high = ((255 * root**3 - 255) / (2 * 255) ** 0.5 for root in roots)
    return low, high


def _tail(count: int, share: float) -> float:
    """Returns the probability that one value exceeds a bound. The bound is the one below which the largest of `count`
    independent values stays with probability `share`."""
    return -math.expm1(math.log(share) / max(count, 1))


class _Tally:
    """Adds up the counts and products that the tests need. The messages of one group and direction are added in the
    order of the recording."""

    def __init__(self, bits: int) -> None:
        """Begins with no messages; their numbers have `bits` bits."""
        self.num_numbers = 0
        self._places = _byte_places(bits)
        count = len(self._places)
        self._counts = torch.zeros(count, 256, dtype=torch.float64)
        self._squares = torch.zeros(count, 1, dtype=torch.float64)
        self._products = torch.zeros(count, len(STEPS), dtype=torch.float64)
        self._pairs = torch.zeros(len(STEPS), dtype=torch.float64)
        self._last: torch.Tensor | None = None

    def add(self, rows: torch.Tensor) -> None:
        """Adds a message's rows, int32, shape (num_rows, features). A repetition of the last message is left out."""
        if rows.numel() == 0 or (self._last is not None and torch.equal(rows, self._last)):
            return  # a retry sends the same bytes again, which is no fault of the mask
        joined = rows if self._last is None else torch.cat((self._last[-1:], rows))
        self.num_numbers += rows.numel()
        self._counts += torch.stack([_byte_counts(rows, place) for place in self._places])
        for part, values in enumerate(_parts(joined, self._places)):
            own = values[-len(rows) :]
            self._squares[part] += own.square().sum()
            for place, step in enumerate(STEPS.values()):
                one, other = _neighbours(values if step[0] else own, *step)
                self._products[part, place] += (one * other).sum()
                self._pairs[place] += one.numel() if part == 0 else 0
        self._last = rows

    def figures(self, group: int, direction: str) -> Figures:
        """Returns the test values of all messages that were added."""
        expected = self.num_numbers / 256
        chi_square = ((self._counts - expected) ** 2 / expected).sum(dim=1)
        serial = self._products / (self._squares / self.num_numbers) / self._pairs.sqrt()
        serial[:, self._pairs < _FEWEST_PAIRS] = math.nan
        return Figures(group, direction, self.num_numbers, (chi_square - 255) / (2 * 255) ** 0.5, serial)


def _byte_places(bits: int) -> list[int]:
    """Returns the places, in bits from the lowest of an int32, of the bytes of a number whose upper `bits` bits were
    sent: the lowest byte first, the top byte last. Where `bits` is no multiple of eight, the lowest two share some
    bits."""
    return sorted({FULL_BITS - bits, *(place for place in (8, 16, 24) if place >= FULL_BITS - bits)})


def _byte(rows: torch.Tensor, place: int) -> torch.Tensor:
    """Returns one byte of each number, 0 to 255, int32, shape of `rows`."""
    return (rows >> place) & 0xFF


def _byte_counts(rows: torch.Tensor, place: int) -> torch.Tensor:
    """Returns how often one byte has each value, float64, shape (256,)."""
    return torch.bincount(_byte(rows, place).flatten(), minlength=256).to(torch.float64)


def _parts(rows: torch.Tensor, places: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yields the numbers, then each of their lower bytes, each minus the mean of uniform values; float32, shape of
    `rows`.

    No number that results is zero, so that even rows of zeros have a correlation.
    """
    yield rows.to(torch.float32) + 0.5
    for place in places[:-1]:
        yield _byte(rows, place).to(torch.float32) - 127.5


def _neighbours(values: torch.Tensor, down: int, right: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each number that has a neighbour `down` rows and `right` features away, and the neighbours in the same
    order."""
    height, width = values.shape[0] - down, values.shape[1] - abs(right)
    from_left, to_left = max(-right, 0), max(right, 0)
    return values[:height, from_left : from_left + width], values[down:, to_left : to_left + width]


def look(view: View) -> Uniformity:
    """Computes chi-square and serial correlation for each group and direction of a view, from its ring messages."""
    streams: dict[tuple[int, str], list[Message]] = {}
    for message in view.with_tensors().select("product"):
        if message.arithmetic == "ring":
            streams.setdefault((message.group, message.direction), []).append(message)
    found, skipped = [], []
    for (group, direction), messages in sorted(streams.items()):
        tally = _Tally(max(message.bits for message in messages))
        for message in _spread(messages):
            tally.add(message.request())
        if tally.num_numbers < FEWEST:
            skipped.append(tally.num_numbers)
        else:
            found.append(tally.figures(group, direction))
    return Uniformity(tuple(found), tuple(skipped))


def _spread(messages: list[Message]) -> Iterator[Message]:
    """Yields at most about `_MOST_MESSAGES` messages, in runs that are spread over the recording."""
    step = -(-len(messages) // _MOST_MESSAGES)
    return (message for place, message in enumerate(messages) if place // _RUN % step == 0)


def _attack(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    found = look(view)
    if not found.looked_at and not found.skipped:
        return []
    claims: list[Claim] = [StolenFact(SUMMARY, found.in_words())]
    faults = found.faults()
    return [StolenFact(FACT, ", ".join(faults)), *claims] if faults else claims


BYTE_STATISTICS = Adversary(
    "byte-statistics",
    "ring rows that are not uniform, or neighbours that correlate: a mask that is missing, too narrow or used again",
    _attack,
)
