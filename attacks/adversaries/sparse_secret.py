"""Implements `sparse-secret`, which recovers lattice secrets with few non-zero trits (numbers −1, 0 or 1), by a meet in
the middle.

At the shipped dimension a ternary secret has about 1,024 non-zero trits. The mask from a secret of weight w (w non-zero
trits) is a signed sum of w columns a_i of its row's equations: z = x̃ + e + Σ ±a_i, and x̃ + e is small. For each public
matrix, all sums of up to two columns (4.7 million at dimension 1536) are sorted once by the high bits of eight of their
numbers. The row minus each single column is looked up among these sums, which finds weights w ≤ 3. On a few rows, the
row minus each sum of two columns is looked up, too, which finds w ≤ 4. No plaintext is needed. A secret is missed on a
row if adding x̃ changes those high bits. This happens on about one row in eight, but a block has many rows.

A secret is accepted if the unmasked row on which it was found and a neighbouring row are small in all features. With 16
features, a wrong secret passes on one row with probability 2^-112. For each row 2^44 secrets are tried, so over 1,024
rows a wrong secret is accepted with probability 2^-58.

Source: Odlyzko's meet in the middle on NTRU, described in Howgrave-Graham, Silverman, Whyte, "A meet-in-the-middle
attack on an NTRU private key", NTRU report 004, 2003.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from attacks.adversaries.ring_lwe import SMALL, PublicMatrix, Stream, centred, public_seeds, ring_degrees, streams
from attacks.seen.adversary import Adversary, Claim
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View
from wire.ring.seeded_rows import SeededRows

LEAST_FEATURES = 16
MOST_DIMENSION = 2048
"""The largest dimension that is tried. At this dimension there are 8.4 million sums of two columns, whose sorted table
takes 170 MB."""
MOST_TABLES = 2
"""The most public matrices that are searched; each takes two seconds at dimension 1536."""
MOST_ROWS, MOST_ROWS_OF_FOUR = 1024, 2
"""The most rows that are looked up for weight 3, at 3 ms each, and the most for weight 4, at a second or two each."""
_STEP = 32
"""Every 32nd row of a group and direction is tried, which is 16 rows of a block of 512 rows."""
_COLUMNS, _HIGH_BITS = 8, 6
_CHUNK = 1 << 20

Numbers = npt.NDArray[np.uint32]
Keys = npt.NDArray[np.int64]
Terms = npt.NDArray[np.int32]


def attack(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Unmasks blocks (a block is the rows under one secret) whose secret has at most three non-zero trits, or four if
    it masks one of the first rows that are tried. If `opened` is given, it claims nothing."""
    if opened is not None:
        return []  # the attack needs no known rows, and has already run without them
    seeds = [seed for seed in public_seeds(view) if seed.num_rows <= MOST_DIMENSION]
    found = [stream for stream in streams(view) if stream.num_features >= LEAST_FEATURES] if seeds else []
    left, left_of_four = MOST_ROWS, MOST_ROWS_OF_FOUR
    for seed in seeds[:MOST_TABLES] if found else ():
        for degree in ring_degrees(seed.num_rows)[:1]:  # one row's equations are the same for every N, except for signs
            table = _Table(seed, degree)
            for stream in found:
                stream.restart()
                for row in _rows_to_try(stream):
                    if left <= 0:
                        break
                    if bool(stream.is_done[row]):
                        continue
                    left -= 1
                    if not table.open(stream, row, False) and left_of_four > 0:
                        left_of_four -= 1
                        table.open(stream, row, True)
    return [claim for stream in found for claim in stream.claims()]


def _rows_to_try(stream: Stream) -> Iterator[int]:
    """Yields the first row of each message and rows at regular distances, in the order of the stream."""
    firsts = {first for _, first, _ in stream.spans[:MOST_ROWS]}
    yield from sorted(firsts | set(range(0, len(stream.rows), _STEP)))


class _Table:
    """Holds the sums of at most two signed columns of a row's equations, sorted."""

    def __init__(self, seed: SeededRows, degree: int) -> None:
        """Computes the table. At dimension 1536 this takes two seconds and 150 MB of memory, of which the table keeps
        95 MB."""
        self._seed, self._degree = seed, degree
        equations = PublicMatrix.of(seed, degree, _COLUMNS).equations(0)
        plus = np.ascontiguousarray(equations.t().numpy().astype(np.uint32))  # (k·N, _COLUMNS), mod 2^32
        nothing = np.zeros((1, _COLUMNS), dtype=np.uint32)
        self._dimension = len(plus)
        self._singles = np.concatenate((nothing, plus, np.uint32(0) - plus))
        self._terms = _terms(self._dimension)
        keys = np.concatenate([_keys(self._sums(part)) for part in np.array_split(self._terms, 8)])
        order = np.argsort(keys, kind="stable").astype(np.int32)
        self._keys, self._order = keys[order], order

    def _sums(self, terms: Terms) -> Numbers:
        return np.asarray(self._singles[terms[:, 0]] + self._singles[terms[:, 1]])

    def open(self, stream: Stream, row: int, up_to_four: bool) -> bool:
        """Looks for a secret that fits a row. If one is found, unmasks the block around the row.

        Args:
            stream: the rows.
            row: the index of the row.
            up_to_four: whether to look for up to four non-zero trits, in place of up to three.

        Returns:
            Whether rows were unmasked.
        """
        public = PublicMatrix.of(self._seed, self._degree, stream.num_features)
        equations = public.equations(0)
        return any(
            stream.open_around(public, secret, row, 1)
            for secret in self._candidates(stream.rows[row, :_COLUMNS], up_to_four)
            if int(centred(stream.rows[row] - equations @ secret).abs().max()) < SMALL
        )

    def _candidates(self, numbers: torch.Tensor, up_to_four: bool) -> Iterator[torch.Tensor]:
        """Yields the secrets that agree with the row `numbers` in the bits by which the table is sorted: int64, shape
        (k·N,)."""
        target = numbers.numpy().astype(np.uint32)
        count = len(self._terms) if up_to_four else len(self._singles)
        for start in range(0, count, _CHUNK):
            rest = self._terms[start : min(start + _CHUNK, count)]
            wanted = _keys(target - self._sums(rest))
            order = np.argsort(wanted)  # sorted keys are looked up in a third of the time
            first = np.searchsorted(self._keys, wanted[order])
            is_there = self._keys[np.minimum(first, len(self._keys) - 1)] == wanted[order]
            for index in np.flatnonzero(is_there):
                place = int(first[index])
                while place < len(self._keys) and self._keys[place] == wanted[order[index]]:
                    yield self._secret([*rest[order[index]], *self._terms[self._order[place]]])
                    place += 1

    def _secret(self, terms: list[int]) -> torch.Tensor:
        secret = torch.zeros(self._dimension, dtype=torch.int64)
        for term in map(int, terms):
            if term:
                secret[(term - 1) % self._dimension] += 1 if term <= self._dimension else -1
        return secret


def _terms(dimension: int) -> Terms:
    """Returns pairs of signed columns; pairs that hold at most one column come first. In a pair, the number 0 stands
    for no column, i + 1 for column i, and i + 1 + dimension for minus column i."""
    singles = np.arange(2 * dimension + 1, dtype=np.int32)
    one, other = (places.astype(np.int32) + 1 for places in np.triu_indices(dimension, k=1))
    signs = [(a, b) for a in (0, dimension) for b in (0, dimension)]
    pairs = [np.stack((one + np.int32(a), other + np.int32(b)), axis=1) for a, b in signs]
    return np.concatenate((np.stack((singles, np.zeros_like(singles)), axis=1), *pairs))


def _keys(numbers: Numbers) -> Keys:
    """Returns one sort key for each row: the high bits of the row's numbers, joined into one integer."""
    keys = np.zeros(len(numbers), dtype=np.int64)
    for column in range(_COLUMNS):
        keys = (keys << _HIGH_BITS) | (numbers[:, column] >> np.uint32(32 - _HIGH_BITS)).astype(np.int64)
    return keys


SPARSE_SECRET = Adversary(
    "sparse-secret",
    "a lattice mask whose secrets have at most four trits: meets in the middle on any row; opens the block",
    attack,
    True,
)
