"""Implements `no-error`, which recovers the secret of a lattice mask that has no error (σ = 0), by linear algebra.

If the plaintext x̃ of some rows is known or guessed to be zero, these rows give exact equations z = M·s mod 2^32, with
the mask's numbers z, a public matrix M and the secret s. Mod 2 they give s₀ = s mod 2, which shows which coefficients
of s are not zero. (z − M·s₀)/2 mod 2 gives the next bit, which tells −1 = …11 from 1 = …01. The secret that results is
checked mod 2^32. The elimination depends on the public matrix alone, so one elimination suffices to try every row of a
view as zero.

With an error, the least significant bits of z are wrong in about half of the equations. A wrong guess then satisfies
the equations mod 2 with probability 2^-32, and practically never those mod 2^32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from attacks.adversaries.binary_system import BinarySystem
from attacks.adversaries.ring_lwe import PublicMatrix, Stream, centred, public_seeds, ring_degrees, streams
from attacks.seen.adversary import Adversary, Claim
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View
from wire.ring.seeded_rows import SeededRows

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


def attack(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Unmasks blocks (a block is the rows under one secret) that were masked without an error and have enough rows of
    known or zero plaintext, for dimensions up to `MOST_DIMENSION` and within `BUDGET`."""
    systems: dict[tuple[bytes, int, int], ExactSystem] = {}
    left = BUDGET
    claims: list[Claim] = []
    seeds = [seed for seed in public_seeds(view) if seed.num_rows <= MOST_DIMENSION]
    for stream in streams(view, opened) if seeds else ():
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


class Equations:
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


class ExactSystem(Equations):
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


ADVERSARY = Adversary(
    "no-error", "a lattice mask without its error: linear equations in s from zero rows; opens the block", attack, True
)
