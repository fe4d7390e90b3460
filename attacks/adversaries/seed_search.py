"""Recovers rows whose masks come from a generator with a guessable seed, by trying likely seeds until rows look like
data.

Three kinds of masks are tried. The first two are those of a careless tenant that seeds a torch.Generator anew for each
message: float rows plus `torch.randn` of their shape, and int32 rows plus `torch.randint` over the whole ring. The
third is a lattice mask whose ternary secret comes from `torch.randint`; its errors may come from any source. Each
candidate for such a secret is tried on the first row of every group and direction, which begins a block (the rows under
one secret).

The seeds that are tried are small numbers, and the seconds before the first message arrived. (These come from the
recorder's file times, which a copy of a recording may have lost.) A float candidate must correlate with the rows and
leave rows of the norm that a norm layer gives. In the ring a candidate must leave small numbers. If one generator masks
many messages, only the first of these messages is found. The generator of torch on the CPU keeps only the low 32 bits
of a seed, so a seed of 64 bits is no harder to find. Source: our derivation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from attacks.adversaries.ring_lwe import SMALL, PublicMatrix, centred, public_seeds, ring_degrees, streams
from attacks.seen.adversary import Adversary, Claim, StolenRows
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import Norm, PublicModel
from attacks.seen.view import Message, View

SMALL_SEEDS = range(4096)
_SECONDS_BEFORE = 300
_NEAR = 8
"""Seeds within this distance of one of the last `_NEAR` found seeds are tried first, because a tenant that reseeds for
each message mostly counts up."""
_FULL_SEARCHES = 4
"""The number of messages for which all candidate seeds are tried; one hit is enough to continue from."""
_MOST_MESSAGES = 64
_SIZES = range(256, 1 << 16)
"""The allowed number of numbers in a message. Shorter messages give hits by chance, and longer ones take too long to
draw for each of the 4,397 candidate seeds."""
_SIGNIFICANT = 5.0
"""The standard deviations above chance that count as a hit. By chance, one of 4,397 candidate seeds reaches this in one
of a thousand searches."""
_NORM_TOLERANCE = 1e-2
"""Relative tolerance of a row's squared norm, which leaves room for the eps of a norm layer."""
_TRIED_COLUMNS, _MOST_MATRICES = 8, 8
"""Each secret is tried on `_TRIED_COLUMNS` numbers of a row, which are all small by chance once in 2^56. At most
`_MOST_MATRICES` pairs of a public matrix and a ring degree are tried."""
_SMALL = 2.0**28
"""Int32 rows count as data if the mean magnitude of their first 256 numbers is at most this. Data are far below 2^31,
while uniform numbers have a mean magnitude of 2^30."""

Guess = Callable[[torch.Generator], torch.Tensor | None]
"""A guess maps a seeded generator to unmasked rows, or to None if they do not look like data."""


def attack(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims rows of messages whose mask comes from a seed that is a small number or a time. Unless `opened` is given,
    it also claims the rows of blocks whose lattice secret comes from such a seed."""
    seeds = [*SMALL_SEEDS, *_arrival_seconds(view)]
    return [*search(view, public, seeds), *(secrets(view, seeds) if opened is None else ())]


def secrets(view: View, seeds: Sequence[int]) -> list[Claim]:
    """Claims the rows of the first block (the rows under one secret) of each group and direction, if the block's
    secret comes from one of these seeds."""
    claims: list[Claim] = []
    matrices = [(seed, degree) for seed in public_seeds(view) for degree in ring_degrees(seed.num_rows)]
    found = list(streams(view)) if matrices else []
    for seed, degree in matrices[:_MOST_MATRICES]:
        generator = torch.Generator()
        shape = seed.num_rows // degree, degree
        tried = [torch.randint(-1, 2, shape, generator=generator.manual_seed(one)).flatten() for one in seeds]
        candidates = torch.stack(tried, dim=1)  # (k·N, num_seeds)
        masks = PublicMatrix.of(seed, degree, _TRIED_COLUMNS).equations(0) @ candidates
        for stream in found:
            if stream.num_features < _TRIED_COLUMNS:
                continue
            rest = centred(stream.rows[0, :_TRIED_COLUMNS, None] - masks).abs().amax(0)
            for place in (rest < SMALL).nonzero()[:, 0].tolist():
                public = PublicMatrix.of(seed, degree, stream.num_features)
                stream.open_around(public, candidates[:, place], 0, 1)
    for stream in found:
        claims += stream.claims()
    return claims


def _arrival_seconds(view: View) -> range:
    """Returns the Unix seconds at which a tenant may have seeded a generator: those from `_SECONDS_BEFORE` before the
    first message arrived. The range is empty if no message has tensors."""
    times = [message.file.stat().st_mtime for message in view.with_tensors().messages[:1] if message.file is not None]
    return range(int(times[0]) - _SECONDS_BEFORE, int(times[0]) + 1) if times else range(0)


def search(view: View, public: PublicModel, seeds: Sequence[int]) -> list[Claim]:
    """Claims rows of messages whose mask comes from one of these seeds, or from one near a seed that was found."""
    norms = public.normed_inputs()
    claims: list[Claim] = []
    found: list[int] = []
    left = _FULL_SEARCHES
    for message, guess in _testable(view, norms):
        near = [seed + step for seed in reversed(found[-_NEAR:]) for step in range(-_NEAR, _NEAR + 1)]
        hit = _first_hit(guess, [seed for seed in dict.fromkeys(near) if seed >= 0])
        if hit is None and left > 0:
            left -= 1
            hit = _first_hit(guess, seeds)
        if hit is not None:
            found.append(hit[0])
            claims.append(StolenRows(message.seq, hit[1]))
    return claims


def _testable(view: View, norms: Mapping[int, Norm]) -> Iterable[tuple[Message, Guess]]:
    """Yields the first messages whose unmasked rows can be told from noise, each with the `Guess` that tries a seeded
    generator on it."""
    num_messages = 0
    for message in view.with_tensors().select("product"):
        norm = norms.get(message.group) if message.direction == "forward" else None
        if num_messages == _MOST_MESSAGES or (message.arithmetic == "float" and norm is None):
            continue
        request = message.request()
        if request.numel() not in _SIZES:
            continue
        num_messages += 1
        if message.arithmetic == "ring":
            yield message, _ring_guess(request)
        elif norm is not None and request.shape[1] == norm.weight.shape[0] and 0 < float(request.norm()) < math.inf:
            yield message, _float_guess(request, norm)


def _first_hit(guess: Guess, seeds: Iterable[int]) -> tuple[int, torch.Tensor] | None:
    generator = torch.Generator()
    for seed in seeds:
        rows = guess(generator.manual_seed(seed))
        if rows is not None:
            return seed, rows
    return None


def _ring_guess(request: torch.Tensor) -> Guess:
    """Returns a guess for int32 rows under a mask that is uniform mod 2^32."""

    def guess(generator: torch.Generator) -> torch.Tensor | None:
        mask = torch.randint(-(2**31), 2**31, request.shape, dtype=torch.int32, generator=generator)
        rows = request - mask  # wraps mod 2^32
        if float(rows.flatten()[: _SIZES.start].to(torch.float64).abs().mean()) > _SMALL:
            return None
        return rows.to(torch.float64)

    return guess


def _float_guess(request: torch.Tensor, norm: Norm) -> Guess:
    """Returns a guess for float32 rows that a norm made, under a Gaussian mask of strength 1 or of one strength per
    message."""
    length = float(request.norm())
    needed = _SIGNIFICANT * length  # with a wrong seed, ⟨Z, N⟩ is Gaussian with deviation ‖Z‖

    def guess(generator: torch.Generator) -> torch.Tensor | None:
        mask = torch.randn(request.shape, generator=generator)
        if float(torch.dot(request.flatten(), mask.flatten())) < needed:
            return None
        return _with_norms(norm, request.to(torch.float64), mask.to(torch.float64))

    return guess


def _with_norms(norm: Norm, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    """Returns the rows minus the mask times a strength, if one strength gives all rows the norm of normed rows,
    otherwise None."""
    scaled = norm.direction(rows)
    noise = mask / norm.weight
    square, half = noise.pow(2).sum(), (scaled * noise).sum()
    rest = scaled.pow(2).sum() - scaled.numel()
    root = (half * half - square * rest).clamp_min(0).sqrt()
    for strength in (1.0, float((half - root) / square), float((half + root) / square)):
        misfit = ((scaled - strength * noise).pow(2).mean(1) - 1).abs().mean()
        if strength > 0 and float(misfit) < _NORM_TOLERANCE:
            return rows - strength * mask
    return None


SEED_SEARCH = Adversary(
    "seed-search",
    "masks, or a lattice mask's secrets, from a torch.Generator with a small or time-like seed: tries them all",
    attack,
    opens_masks=True,
)
