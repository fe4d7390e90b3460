"""Implements `shared-error`, which recovers rows under lattice masks that use one error for several blocks or several
pieces.

A block is the rows that are masked under one secret, and a piece is a part of a block that is computed at once. Two
rows at the same position of two blocks may hide the same plaintext x̃, such as that of a prompt that is sent again, or
of a gradient of zero. (Known rows are subtracted first.) If the two rows also have the same error, plaintext and error
cancel: z₁ − z₂ = A·(s₁ − s₂) mod 2^32, exactly. Enough such pairs give u = s₁ − s₂, whose numbers are −2 … 2. Its three
low bits are solved for in turn, as in `no-error`. The default dimension needs 1,568 equations for 1,536 unknowns, which
are 49 rows of 32 features, or one row of 1,568. The result is checked mod 2^32 on 32 more equations than there are
unknowns. A wrong result passes with probability below 2^-1000. Then every other pair of rows of the two blocks gives
the difference of their activations. If one row of a pair is known, the difference gives the other row.

In one block, row t + L has the secret X^-L·s if row t has the secret s. So two pieces of a block with the same error, L
rows apart, give v = (1 − X^-L)·s by the same equations. With m = N/gcd(N, L) for blocks of N rows, the sum of X^-iL·v
over i < m is (1 − X^-mL)·s = 2·s. This gives the secret s itself, and so all rows of the block.

If all rows of a block are used in order, rows at the same position of different blocks are a multiple of N apart in the
stream, which holds the rows of one group and direction in order. Blocks of different layers are not compared, because
the inputs of different layers are not equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from attacks.adversaries.no_error import MOST_DIMENSION, MOST_WINDOW_ROWS, SURPLUS, Equations, bits
from attacks.adversaries.ring_lwe import (
    SMALL,
    PublicMatrix,
    Stream,
    centred,
    public_seeds,
    ring_degrees,
    streams,
    turned,
)
from attacks.seen.adversary import Adversary, Claim, StolenDifference, StolenFact
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View

SHARED = "messages of blocks that share their errors"
MOST_SYSTEMS = 3
"""The most combinations of a seed, a ring degree and a layer width that are attacked. Each needs an elimination, which
takes a second at dimension 1536."""
MOST_WINDOWS, MOST_IN_STREAM = 1 << 20, 1 << 17
"""The most pairs of windows (window: a run of rows) that are tried in a view, and in the rows of one group and
direction. One pair takes 10 µs."""
MOST_BLOCKS, MOST_PIECES = 8, 8
"""Two compared blocks may be up to `MOST_BLOCKS` blocks apart, and a block may be cut into up to `MOST_PIECES`
pieces."""
MOST_CLAIMS = 256
_CHUNK = 1024
MOST_DISTANCES = 36
"""An upper bound on the number of distances that `distances` returns: 8 for blocks, and 1 + 2 + … + 7 for pieces."""
_BITS = 3
"""The number of bits that are needed to tell the numbers from −2 to 2 apart."""


def attack(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Claims which blocks (a block is the rows under one secret) share an error, the differences of their messages, and
    the rows of blocks whose pieces share an error."""
    systems: dict[tuple[bytes, int, int], _System] = {}
    claims: list[Claim] = []
    left = MOST_WINDOWS
    seeds = [seed for seed in public_seeds(view) if seed.num_rows <= MOST_DIMENSION]
    for stream in streams(view, opened, forward_first=True) if seeds else ():
        for seed in seeds:
            num_features = min(stream.num_features, seed.num_rows + SURPLUS)
            num_rows = -(-(seed.num_rows + SURPLUS) // num_features)
            for degree in ring_degrees(seed.num_rows):
                key = seed.seed, degree, num_features
                if num_rows > min(MOST_WINDOW_ROWS, degree) or len(stream.rows) <= num_rows:
                    continue
                if key not in systems and len(systems) < MOST_SYSTEMS:
                    systems[key] = _System(seed, degree, num_features)
                if key in systems and len(claims) < MOST_CLAIMS and left > 0:
                    left -= MOST_DISTANCES * min(len(stream.rows), MOST_IN_STREAM // MOST_DISTANCES)
                    claims += systems[key].open(stream)
        claims += stream.claims()
    return claims


def distances(degree: int, num_rows: int) -> list[int]:
    """Returns the possible distances in a stream between two rows at the same position of two blocks, or of two pieces
    of a block with at least `num_rows` rows each."""
    blocks = [degree * number for number in range(1, MOST_BLOCKS + 1)]
    sizes = sorted({-(-degree // number) for number in range(2, MOST_PIECES + 1)}, reverse=True)
    pieces = {size * number for size in sizes for number in range(1, -(-degree // size)) if size >= num_rows}
    return blocks + sorted(distance for distance in pieces if distance < degree)


class _System(Equations):
    """Finds the difference of the secrets of two blocks, or of two pieces of one block, that share an error."""

    def open(self, stream: Stream) -> list[Claim]:
        """Tries pairs of windows (window: a run of rows) of a stream. Returns the claims about pairs of blocks. If two
        pieces of a block share an error, the block's rows are unmasked in the stream."""
        if not self._binary.has_full_rank:
            return []
        stream.restart()
        public = PublicMatrix.of(self._seed, self._degree, stream.num_features)
        said: list[Claim] = []
        for distance in distances(self._degree, self._num_rows):
            starts = self._starts(stream, distance)
            pairs = _Differences(stream, distance)
            for start, found in self._solved(stream, starts, distance, pairs.rows):
                if distance >= self._degree:
                    pairs.extend(public, found, start)
                    continue
                secret = undone(found, distance, self._degree)
                if secret is not None:
                    stream.open_around(public, secret, start, self._num_rows)
            said += pairs.claims()
        return said

    def _starts(self, stream: Stream, distance: int) -> list[int]:
        """Returns the index of the first row of each window (a run of rows) that has another window at this distance
        after it. If any rows are known, both windows must consist of known rows. The number of windows is limited."""
        starts = range(len(stream.rows) - distance - self._num_rows + 1)
        if not stream.known:
            return list(starts[: MOST_IN_STREAM // MOST_DISTANCES])
        run = range(self._num_rows)
        return [
            start for start in starts
            if all(start + row in stream.known and start + distance + row in stream.known for row in run)
        ][: MOST_IN_STREAM // MOST_DISTANCES]  # fmt: skip

    def _solved(
        self, stream: Stream, starts: Sequence[int], distance: int, known: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Finds the pairs of windows (window: a run of rows) whose masks differ by exactly M·u mod 2^32, with the
        equations M of a window and numbers u from −2 to 2. Masks with the same error differ in this way. Known
        plaintext is subtracted first.

        A pair is skipped if its windows are equal, or if the first row of its first window is done in the stream or is
        a key of `known`. Callers may mark rows as done, and add rows to `known`, between two yields.

        Args:
            stream: the rows.
            starts: for each window to try, the index of the window's first row.
            distance: how many rows after a window the other window of the pair begins.
            known: maps the index of a row to the difference of a pair of rows that was found already.

        Yields:
            The index of the first row of the first window, and u, the difference of the two secrets.
        """
        differences = stream.rows[:-distance] - stream.rows[distance:] if starts else stream.rows[:0]
        for row, plain in stream.known.items() if starts else ():
            for place, sign in ((row, -1), (row - distance, 1)):
                if 0 <= place < len(differences):
                    differences[place] += sign * plain
        flat, width = differences.flatten(), stream.num_features
        low = bits(flat)
        for first in range(0, len(starts), _CHUNK):
            chunk = starts[first : first + _CHUNK]
            sides = np.stack([low[start * width : start * width + self.num_equations] for start in chunk], axis=1)
            for index in np.flatnonzero(self._binary.consistent(sides)):
                start = chunk[int(index)]
                if start in known or bool(stream.is_done[start]):
                    continue
                side = centred(flat[start * width : start * width + self.num_equations])
                found = self._solve(side) if bool(side.any()) else None  # a retry repeats the same masked rows
                if found is not None:
                    yield start, found

    def _solve(self, side: torch.Tensor) -> torch.Tensor | None:
        """Returns the numbers u from −2 to 2 with M·u = side mod 2^32, int64, shape (k·N,); None if there are none."""
        total = torch.zeros(self._equations.shape[1], dtype=torch.int64)
        rest = side
        for place in range(_BITS):
            bit = self._binary.solve(bits(rest))
            if bit is None:
                return None
            found = torch.from_numpy(bit.astype(np.int64))
            total += found << place
            rest = (rest - self._equations @ found) >> 1  # even; exact, as it is far from 2^63
        total = total - (total >= 1 << (_BITS - 1)).to(torch.int64) * (1 << _BITS)
        is_exact = bool((centred(self._equations @ total - side) == 0).all())
        return total if is_exact and int(total.abs().max()) <= 2 else None


def undone(found: torch.Tensor, distance: int, degree: int) -> torch.Tensor | None:
    """Returns the ternary s with (1 − X^-distance)·s = found, int64, in the shape (k·N,) of `found`; None if there is
    no such s. `degree` is N, the ring degree."""
    term = total = found.view(-1, degree)
    for _ in range(degree // math.gcd(degree, distance) - 1):
        term = turned(term, distance)
        total = total + term
    secret = total.div(2, rounding_mode="floor")
    right = bool((2 * secret == total).all()) and int(secret.abs().max()) <= 1
    right = right and torch.equal(secret - turned(secret, distance), found.view_as(secret))
    return secret.flatten() if right else None


class _Differences:
    """Collects differences between the plaintexts of two rows of a stream that are `distance` rows apart. `rows` maps
    the index of the first row of such a pair to the pair's difference."""

    def __init__(self, stream: Stream, distance: int) -> None:
        self._stream, self._distance = stream, distance
        self.rows: dict[int, torch.Tensor] = {}
        self._starts: list[int] = []

    def extend(self, public: PublicMatrix, found: torch.Tensor, start: int) -> None:
        """Computes the plaintext differences of the pairs of rows in and around a pair of windows (window: a run of
        rows), and adds these differences to `rows`.

        Pairs are added from row `start` forwards and then backwards. Each direction ends before a difference that is
        not small, which shows that the rows belong to other blocks. If the plaintext of one row of a pair is known, the
        other row is unmasked.

        Args:
            public: the public matrix A.
            found: the difference of the two secrets, in the form in which it gives the difference of the masks at
                `start`.
            start: the index of the first row of the first window.
        """
        self._starts.append(start)
        stream = self._stream
        for step in (1, -1):
            offset = 0 if step == 1 else -1
            while abs(offset) < public.degree and 0 <= start + offset < len(stream.rows) - self._distance:
                row = start + offset
                both = stream.rows[row] - stream.rows[row + self._distance]
                difference = centred(both - public.mask(found, offset))
                if int(difference.abs().max()) >= SMALL:
                    break
                self.rows[row] = difference
                self._open(row, difference)
                offset += step

    def _open(self, row: int, difference: torch.Tensor) -> None:
        stream, other = self._stream, row + self._distance
        for place, partner, sign in ((row, other, 1), (other, row, -1)):
            if partner in stream.known and place not in stream.known:
                stream.opened[place] = stream.known[partner] + sign * difference
                stream.is_open[place] = True

    def claims(self) -> list[Claim]:
        """Claims each pair of blocks that share an error, and the differences between messages at the same position in
        the two blocks."""
        spans = self._stream.spans
        begins = {first: (seq, stop) for seq, first, stop in spans}
        owner = {row: seq for seq, first, stop in spans for row in range(first, stop)}
        said: list[Claim] = [
            StolenFact(SHARED, f"{owner[start]}, {owner[start + self._distance]}") for start in self._starts
        ]
        for seq, first, stop in spans:
            other_seq, other_stop = begins.get(first + self._distance, (-1, 0))
            count = min(stop - first, other_stop - first - self._distance)
            if count > 0 and all(row in self.rows for row in range(first, first + count)):
                rows = torch.stack([self.rows[row] for row in range(first, first + count)])
                if bool(rows.any()):
                    said.append(StolenDifference(seq, other_seq, rows.to(torch.float64)))
        return said


ADVERSARY = Adversary(
    "shared-error",
    "a lattice mask with one error for several blocks or pieces: differences of rows that repeat, solved mod 2^32",
    attack,
    True,
)
