"""Implements the adversaries that solve linear equations in the secret of a lattice mask whose errors are faulty.

`no-error` needs errors that are zero, `tiny-error` needs errors that are 0 or 1, and `shared-error` needs errors that
several blocks or pieces share. Every secret is checked mod 2^32 before anything is claimed. None of them finds a secret
behind honest errors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

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
from wire.ring.seeded_rows import SeededRows

# ---- linear systems mod 2 -------------------------------------------------------------------------------------------
#
# Solves linear systems mod 2. One elimination serves many right-hand sides.
#
# Results are exact. A right-hand side that the matrix cannot produce is reported as inconsistent. A random right-hand
# side is consistent with probability 2^-(num_equations − rank).

Bits = npt.NDArray[np.uint8]


class BinarySystem:
    """Solves M·x = b mod 2 for one matrix M and many b. The matrix is reduced once.

    Attributes:
        rank: the rank of M; a solution x is unique if this equals the number of unknowns.
    """

    def __init__(self, matrix: Bits) -> None:
        """Reduces the matrix M by Gaussian elimination, so that each right-hand side is then solved quickly.

        Args:
            matrix: M, of 0 and 1, shape (num_equations, num_unknowns).
        """
        num_equations, self._num_unknowns = matrix.shape
        rows = _pack(np.concatenate((matrix, np.eye(num_equations, dtype=np.uint8)), axis=1))
        self.rank = _eliminate(rows, self._num_unknowns)
        wide = np.unpackbits(rows.view(np.uint8), axis=1, count=self._num_unknowns + num_equations)
        # Elimination multiplies a right-hand side by this matrix, shape (num_equations, num_equations). Its dtype
        # float32 is exact for sums below 2^24.
        self._transform = wide[:, self._num_unknowns :].astype(np.float32)

    @property
    def has_full_rank(self) -> bool:
        """Returns whether M has full column rank, so that M·x = b has at most one solution x for any b."""
        return bool(self.rank == self._num_unknowns)

    def consistent(self, sides: Bits) -> npt.NDArray[np.bool_]:
        """Returns, for each right-hand side, whether it has a solution.

        Args:
            sides: the right-hand sides, one per column; 0 and 1, shape (num_equations, count).

        Returns:
            bool, shape (count,).
        """
        left = self._transform[self.rank :] @ sides.astype(np.float32)
        return np.asarray(~np.any(left.astype(np.int64) & 1, axis=0))

    def solve(self, side: Bits) -> Bits | None:
        """Returns the solution x of M·x = side, shape (num_unknowns,); None if there is no solution or more than
        one."""
        if not self.has_full_rank or not self.consistent(side[:, None]).all():
            return None
        solution = self._transform[: self.rank] @ side.astype(np.float32)
        return np.asarray(solution.astype(np.int64) & 1, dtype=np.uint8)


def _pack(bits: Bits) -> npt.NDArray[np.uint64]:
    packed = np.packbits(bits, axis=1)
    padded = np.zeros((packed.shape[0], -(-packed.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view(np.uint64)


def _eliminate(rows: npt.NDArray[np.uint64], num_columns: int) -> int:
    """Reduces the first `num_columns` columns of the packed bits in place, moves the pivot rows to the front, and
    returns the rank."""
    octets, rank = rows.view(np.uint8), 0
    for column in range(num_columns):
        has_bit = (octets[:, column // 8] >> (7 - column % 8)) & 1
        below = np.flatnonzero(has_bit[rank:])
        if below.size == 0:
            continue
        pivot = rank + int(below[0])
        if pivot != rank:
            rows[[rank, pivot]] = rows[[pivot, rank]]
            has_bit[[rank, pivot]] = has_bit[[pivot, rank]]
        has_bit[rank] = 0
        rows[has_bit.astype(bool)] ^= rows[rank]
        rank += 1
    return rank


# ---- no-error -------------------------------------------------------------------------------------------------------
#
# Implements `no-error`, which recovers the secret of a lattice mask that has no error (σ = 0), by linear algebra.
#
# If the plaintext x̃ of some rows is known or guessed to be zero, these rows give exact equations z = M·s mod 2^32,
# with the mask's numbers z, a public matrix M and the secret s. Mod 2 they give s₀ = s mod 2, which shows which
# coefficients of s are not zero. (z − M·s₀)/2 mod 2 gives the next bit, which tells −1 = …11 from 1 = …01. The secret
# that results is checked mod 2^32. The elimination depends on the public matrix alone, so one elimination suffices to
# try every row of a view as zero.
#
# With an error, the least significant bits of z are wrong in about half of the equations. A wrong guess then satisfies
# the equations mod 2 with probability 2^-32, and practically never those mod 2^32.

SURPLUS = 32
"""The number of equations beyond the number of unknowns. A wrong guess is accepted only if it satisfies all of these by
chance."""
MOST_DIMENSION = 2048
"""The largest dimension that is tried; elimination takes 1 s at this dimension."""
BUDGET = 1 << 32
"""The work that all eliminations together may take. One elimination of n equations takes n³ units, so this is enough
for two at dimension 1536."""
MOST_WINDOWS = 1 << 15
MOST_WINDOW_ROWS = 64


def attack_no_error(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Unmasks blocks (a block is the rows under one secret) that were masked without an error and have enough rows of
    known or zero plaintext, for dimensions up to `MOST_DIMENSION` and within `BUDGET`."""
    systems: dict[tuple[bytes, int, int], ExactSystem] = {}
    left = BUDGET
    claims: list[Claim] = []
    seeds = [seed for seed in public_seeds(view) if seed.num_rows <= MOST_DIMENSION]
    for stream in streams(view, opened, only_whole=True) if seeds else ():
        for seed in seeds:
            num_features = min(stream.num_features, seed.num_rows + SURPLUS)  # all wider layers use the same system
            num_rows = -(-(seed.num_rows + SURPLUS) // num_features)
            for degree in ring_degrees(seed.num_rows):
                if num_rows > min(MOST_WINDOW_ROWS, degree):
                    continue
                key = seed.seed, degree, num_features
                if key not in systems and left > 0:
                    systems[key] = ExactSystem(seed, degree, num_features)
                    left -= (seed.num_rows + SURPLUS) ** 3
                if key in systems:
                    systems[key].open(stream)
        claims += stream.claims()
    return claims


class _Equations:
    """Holds the linear equations M·s = z mod 2^32 that the numbers z of a mask give for the mask's secret s. The
    equations come from as many rows as are needed to determine s. A difference of two masks gives the same equations
    for the difference of their secrets."""

    def __init__(self, seed: SeededRows, degree: int, num_features: int) -> None:
        self._seed, self._degree = seed, degree
        self.num_equations = seed.num_rows + SURPLUS
        self._num_rows = -(-self.num_equations // num_features)
        public = PublicMatrix.of(seed, degree, num_features)
        self._equations = public.stacked_equations(self._num_rows, self.num_equations)
        self._binary = BinarySystem(bits(self._equations))


class ExactSystem(_Equations):
    """Finds secrets of masks that were made without an error, one secret for each block."""

    def open(self, stream: Stream) -> None:
        """Tries runs of rows in `stream`, at most `MOST_WINDOWS`, as zero or known plaintext. If this gives a block's
        secret, the block's rows are unmasked in `stream`."""
        if not self._binary.has_full_rank:
            return
        stream.restart()
        starts = stream.windows(self._num_rows)[:MOST_WINDOWS]
        if not starts:
            return
        sides = torch.stack([stream.masks(start, self._num_rows, self.num_equations) for start in starts], dim=1)
        for index in np.flatnonzero(self._binary.consistent(bits(sides))):
            start, masks = starts[int(index)], sides[:, int(index)]
            if bool(stream.is_done[start]) or not bool(masks.any()):
                continue  # a row that was sent as zeros was not masked at all
            secret = self.secret(masks)
            if secret is not None:
                public = PublicMatrix.of(self._seed, self._degree, stream.num_features)
                stream.open_around(public, secret, start, self._num_rows)

    def secret(self, masks: torch.Tensor) -> torch.Tensor | None:
        """Returns the ternary s with M·s = masks mod 2^32: int64, shape (k·N,); None if there is not exactly one."""
        low = self._binary.solve(bits(masks))
        if low is None:
            return None
        secret = torch.from_numpy(low.astype(np.int64))
        rest = masks - self._equations @ secret  # even
        high = self._binary.solve(bits(rest >> 1))
        if high is None:
            return None
        secret = secret - 2 * torch.from_numpy(high.astype(np.int64))  # 3 = −1 mod 4, so two bits determine s
        exact = bool((centred(self._equations @ secret - masks) == 0).all())
        return secret if exact and int(secret.abs().max()) <= 1 else None


def bits(numbers: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Returns the least significant bit, 0 or 1, of each number, in the shape of `numbers`."""
    return np.asarray((numbers & 1).to(torch.uint8).numpy())


NO_ERROR = Adversary(
    "no-error",
    "a lattice mask without its error: linear equations in s from zero rows; opens the block",
    attack_no_error,
    True,
)


# ---- tiny-error -----------------------------------------------------------------------------------------------------
#
# Implements `tiny-error`, which recovers the secret of a lattice mask whose errors are all 0 or 1, by linearisation.
#
# Each number of a mask is z = ⟨m, s⟩ + e mod 2^32 with a public m, a secret s of n numbers and an error e. If e is 0 or
# 1, then e(e − 1) = 0 for e = z − ⟨m, s⟩. Modulo a power of two this equation is useful only after it is halved: e(e −
# 1)/2 = 0 mod 2. For a ternary s write s_i² = s_i + 2·w_i, with w_i = 1 if s_i = −1 and 0 otherwise, and p_ij =
# s_i·s_j. Then
#
#     (z² − z)/2 + Σ ((m_i + m_i²)/2 − z·m_i)·s_i + Σ m_i²·w_i + Σ_{i<j} m_i·m_j·p_ij = 0 mod 2.
#
# This is linear in n(n + 3)/2 unknown bits: s_i mod 2 says whether s_i is zero, and w_i gives its sign. Every secret
# that this yields is checked mod 2^32.
#
# Source: Arora, Ge, "New algorithms for learning with errors in presence of noise", ICALP 2011, section 3. If an error
# can have η values, the degree is η and there are about n^η/η! unknowns. This is out of reach for the shipped errors,
# whose standard deviation is σ = 3.2.

TINY_ERROR_MOST_DIMENSION = 32
"""The largest dimension (number n of coefficients of a secret) that is tried. At dimension 32 there are 560 unknowns,
and one guess takes tens of milliseconds."""
TINY_ERROR_BUDGET = 1 << 22
"""The work that all guesses together may take. One guess with u unknowns takes u² units, so this is enough for 13
guesses at dimension 32 and 2,000 at dimension 8."""


def _attack_tiny_error(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Unmasks blocks (a block is the rows under one secret) whose errors are all 0 or 1 and that have enough rows of
    known or zero plaintext, for dimensions up to `MOST_DIMENSION` and within `BUDGET`."""
    claims: list[Claim] = []
    left = TINY_ERROR_BUDGET
    seeds = [seed for seed in public_seeds(view) if seed.num_rows <= TINY_ERROR_MOST_DIMENSION]
    for stream in streams(view, opened, only_whole=True) if seeds and left > 0 else ():
        share = left // 2 + 1  # a stream gets half of what is left, so none uses it all
        for seed in seeds:
            for degree in ring_degrees(seed.num_rows):
                spent = _open_tiny_error(stream, PublicMatrix.of(seed, degree, stream.num_features), share)
                share, left = share - spent, left - spent
        claims += stream.claims()
    return claims


def _open_tiny_error(stream: Stream, public: PublicMatrix, budget: int) -> int:
    """Tries to find the secret of each run of rows in `stream`, and unmasks the rows whose secret is found. The work is
    limited to `budget`, in the units of `BUDGET`.

    Returns:
        The units of work that were used.
    """
    num_unknowns = public.dimension * (public.dimension + 3) // 2
    num_rows = -(-(num_unknowns + SURPLUS) // stream.num_features)
    if num_rows > min(public.degree, len(stream.rows)):
        return 0
    equations = public.stacked_equations(num_rows, num_unknowns + SURPLUS)
    stream.restart()
    spent = 0
    for start in stream.windows(num_rows):
        if bool(stream.is_done[start : start + num_rows].any()):
            continue
        if spent + num_unknowns**2 > budget:
            break
        spent += num_unknowns**2
        secret = _find_secret(equations, stream.masks(start, num_rows, len(equations)))
        if secret is not None:
            stream.open_around(public, secret, start, num_rows)
    return spent


def _find_secret(equations: torch.Tensor, masks: torch.Tensor) -> torch.Tensor | None:
    """Returns the ternary secret s for which every number of masks − M·s is 0 or 1 mod 2^32.

    Returns None if there is no such secret, if the linearised equations do not determine it, or if all of `masks` is
    zero.

    Args:
        equations: M, int64, shape (num_equations, n).
        masks: the mask's numbers for a guessed plaintext, int64, shape (num_equations,).

    Returns:
        The secret s, int64, shape (n,).
    """
    if not bool(masks.any()):
        return None  # rows that were sent as zeros were not masked at all
    n = equations.shape[1]
    m, z = equations.remainder(4).numpy(), masks.remainder(4).numpy()[:, None]
    first, second = _pairs(n)
    columns = np.concatenate(((m + m * m) // 2 - z * m, m * m, m[:, first] * m[:, second]), axis=1)
    side = (z[:, 0] ** 2 - z[:, 0]) // 2
    bits = BinarySystem((columns & 1).astype(np.uint8)).solve((side & 1).astype(np.uint8))
    if bits is None:
        return None
    support, is_negative = bits[:n].astype(np.int64), bits[n : 2 * n].astype(np.int64)
    secret = torch.from_numpy(support * (1 - 2 * is_negative))
    error = centred(masks - equations @ secret)
    return secret if bool(((error == 0) | (error == 1)).all()) else None


@functools.cache
def _pairs(n: int) -> tuple[list[int], list[int]]:
    """Returns all pairs (i, j) with i < j < n, as two lists: the first numbers and the second numbers of the pairs."""
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    return [i for i, _ in pairs], [j for _, j in pairs]


TINY_ERROR = Adversary(
    "tiny-error",
    "a lattice mask with errors 0 or 1 at toy size: linearisation; opens the block",
    _attack_tiny_error,
    True,
)


# ---- shared-error ---------------------------------------------------------------------------------------------------
#
# Implements `shared-error`, which recovers rows under lattice masks that use one error for several blocks or several
# pieces.
#
# A block is the rows that are masked under one secret, and a piece is a part of a block that is computed at once. Two
# rows at the same position of two blocks may hide the same plaintext x̃, such as that of a prompt that is sent again,
# or of a gradient of zero. (Known rows are subtracted first.) If the two rows also have the same error, plaintext and
# error cancel: z₁ − z₂ = A·(s₁ − s₂) mod 2^32, exactly. Enough such pairs give u = s₁ − s₂, whose numbers are −2 … 2.
# Its three low bits are solved for in turn, as in `no-error`. The default dimension needs 1,568 equations for 1,536
# unknowns, which are 49 rows of 32 features, or one row of 1,568. The result is checked mod 2^32 on 32 more equations
# than there are unknowns. A wrong result passes with probability below 2^-1000. Then every other pair of rows of the
# two blocks gives the difference of their activations. If one row of a pair is known, the difference gives the other
# row.
#
# In one block, row t + L has the secret X^-L·s if row t has the secret s. So two pieces of a block with the same error,
# L rows apart, give v = (1 − X^-L)·s by the same equations. With m = N/gcd(N, L) for blocks of N rows, the sum of
# X^-iL·v over i < m is (1 − X^-mL)·s = 2·s. This gives the secret s itself, and so all rows of the block.
#
# If all rows of a block are used in order, rows at the same position of different blocks are a multiple of N apart in
# the stream, which holds the rows of one group and direction in order. Blocks of different layers are not compared,
# because the inputs of different layers are not equal.

SHARED = "messages of blocks that share their errors"
MOST_SYSTEMS = 3
"""The most combinations of a seed, a ring degree and a layer width that are attacked. Each needs an elimination, which
takes a second at dimension 1536."""
MOST_WINDOW_PAIRS, MOST_IN_STREAM = 1 << 20, 1 << 17
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


def attack_shared_error(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Claims which blocks (a block is the rows under one secret) share an error, the differences of their messages, and
    the rows of blocks whose pieces share an error."""
    systems: dict[tuple[bytes, int, int], _System] = {}
    claims: list[Claim] = []
    left = MOST_WINDOW_PAIRS
    seeds = [seed for seed in public_seeds(view) if seed.num_rows <= MOST_DIMENSION]
    for stream in streams(view, opened, forward_first=True, only_whole=True) if seeds else ():
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


class _System(_Equations):
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


SHARED_ERROR = Adversary(
    "shared-error",
    "a lattice mask with one error for several blocks or pieces: differences of rows that repeat, solved mod 2^32",
    attack_shared_error,
    True,
)
