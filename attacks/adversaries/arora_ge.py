"""Implements `tiny-error`, which recovers the secret of a lattice mask whose errors are all 0 or 1, by linearisation.

Each number of a mask is z = ⟨m, s⟩ + e mod 2^32 with a public m, a secret s of n numbers and an error e. If e is 0 or
1, then e(e − 1) = 0 for e = z − ⟨m, s⟩. Modulo a power of two this equation is useful only after it is halved:
e(e − 1)/2 = 0 mod 2. For a ternary s write s_i² = s_i + 2·w_i, with w_i = 1 if s_i = −1 and 0 otherwise, and
p_ij = s_i·s_j. Then

    (z² − z)/2 + Σ ((m_i + m_i²)/2 − z·m_i)·s_i + Σ m_i²·w_i + Σ_{i<j} m_i·m_j·p_ij = 0 mod 2.

This is linear in n(n + 3)/2 unknown bits: s_i mod 2 says whether s_i is zero, and w_i gives its sign. Every secret that
this yields is checked mod 2^32.

Source: Arora, Ge, "New algorithms for learning with errors in presence of noise", ICALP 2011, section 3. If an error
can have η values, the degree is η and there are about n^η/η! unknowns. This is out of reach for the shipped
errors, whose standard deviation is σ = 3.2.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from attacks.adversaries.binary_system import BinarySystem
from attacks.adversaries.ring_lwe import PublicMatrix, Stream, centred, public_seeds, ring_degrees, streams
from attacks.seen.adversary import Adversary, Claim
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View

MOST_DIMENSION = 32
"""The largest dimension (number n of coefficients of a secret) that is tried. At dimension 32 there are 560 unknowns,
and one guess takes tens of milliseconds."""
SURPLUS = 32
BUDGET = 1 << 22
"""The work that all guesses together may take. One guess with u unknowns takes u² units, so this is enough for 13
guesses at dimension 32 and 2,000 at dimension 8."""


def attack(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Unmasks blocks (a block is the rows under one secret) whose errors are all 0 or 1 and that have enough rows of
    known or zero plaintext, for dimensions up to `MOST_DIMENSION` and within `BUDGET`."""
    claims: list[Claim] = []
    left = BUDGET
    seeds = [seed for seed in public_seeds(view) if seed.num_rows <= MOST_DIMENSION]
    for stream in streams(view, opened) if seeds and left > 0 else ():
        share = left // 2 + 1  # a stream gets half of what is left, so none uses it all
        for seed in seeds:
            for degree in ring_degrees(seed.num_rows):
                spent = _open(stream, PublicMatrix.of(seed, degree, stream.num_features), share)
                share, left = share - spent, left - spent
        claims += stream.claims()
    return claims


def _open(stream: Stream, public: PublicMatrix, budget: int) -> int:
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
        secret = find_secret(equations, stream.masks(start, num_rows, len(equations)))
        if secret is not None:
            stream.open_around(public, secret, start, num_rows)
    return spent


def find_secret(equations: torch.Tensor, masks: torch.Tensor) -> torch.Tensor | None:
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


ADVERSARY = Adversary(
    "tiny-error", "a lattice mask with errors 0 or 1 at toy size: linearisation; opens the block", attack, True
)
