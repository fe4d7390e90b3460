"""Implements the adversaries of additive masks that are known, drawn from a pool, used again, or too coarse.

| adversary | what the mask must be |
|---|---|
| `known-mask`, `which-of-K` | one of K noise vectors that the provider has seen, as in `gaussian-pool` |
| `sphere-fit` | one fixed vector, never seen, on rows that a norm layer made |
| `differencing` | the same for two messages; also in ring arithmetic |
| `averaging` | fresh and float, on a prompt that is repeated |
| `principal-components` | one that is used again, under fresh noise |
| `subspace-projection` | noise of few dimensions |
| `low-bits` | floats on a coarser grid than the rows |

None of them wins on a mask that is uniform mod 2^32 and used once.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import torch

from attacks.seen.adversary import Adversary, Claim, StolenDifference, StolenRows
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import Norm, PublicModel
from attacks.seen.view import Message, View

# ---- pooled noise: which vectors may mask a message, and how strongly -----------------------------------------------
#
# Finds which noise vectors may mask a message, and how strong each one would be, for the two adversaries of pooled
# noise (float_masks.py and float_masks.py).
#
# A message is Z = X + c·n, where n is one of the vectors that the provider has seen, and c = σ·rms(X) is an unknown
# strength.

_USUAL_SIGMA = 1.0
_POOLS_BEFORE = 2
"""The number of pools that are tried: the latest one and the one before. A pool is the noise vectors of one request for
effects. A message that was on its way when the pool was renewed may still use the previous pool."""
_FEW_MESSAGES = 32
"""The largest number of messages from which σ is estimated."""
_NONE = 1e30
"""This value stands for a strength that is not possible."""
_ROUND = 5e-3
"""The relative tolerance of σ; the eps of a norm layer, which is ignored, moves an estimate by some thousandths."""


@dataclass(frozen=True)
class _Masked:
    """Holds a message, and the vectors with which it may have been masked.

    Attributes:
        rows: float64, shape (num_rows, d).
        pool: the vectors, float64, shape (K, d).
        norm: the norm layer whose output the unmasked rows are; None if they come from no norm layer.
    """

    seq: int
    rows: torch.Tensor
    pool: torch.Tensor
    norm: Norm | None


def _masked_messages(view: View, public: PublicModel) -> list[_Masked]:
    """Returns every float message that came after noise effects (products of noise vectors with the weight) had been
    computed for its group and direction. Messages that are empty or not finite are left out."""
    norms = public.normed_inputs()
    effects: dict[tuple[int, str], list[Message]] = defaultdict(list)
    masked: list[_Masked] = []
    for message in view.with_tensors().messages:
        if message.arithmetic == "float" and message.purpose == "effect":
            effects[message.group, message.direction].append(message)
        elif message.arithmetic == "float" and message.purpose == "product":
            norm = norms.get(message.group) if message.direction == "forward" else None
            one = _with_pool(message, effects[message.group, message.direction], norm)
            masked += [] if one is None else [one]
    return masked


def _with_pool(message: Message, effects: Sequence[Message], norm: Norm | None) -> _Masked | None:
    """Returns the message with its pool; None if no vector of the message's width was seen before the message, or if
    the message is empty or not finite."""
    rows = message.request().to(torch.float64)
    vectors = [effect.request().to(torch.float64) for effect in effects[-_POOLS_BEFORE:]]
    vectors = [vector for vector in vectors if vector.shape[1] == rows.shape[1] and vector.shape[0] > 0]
    if not vectors or rows.shape[0] == 0 or not bool(torch.isfinite(rows).all()):
        return None
    return _Masked(message.seq, rows, torch.cat(vectors), norm)


def _usual_sigma(masked: Sequence[_Masked]) -> float:
    """Returns σ, the noise's strength relative to the rows, estimated from messages of several normed rows; 1 if there
    are none."""
    several = [one for one in masked if one.norm is not None and one.rows.shape[0] > 1]
    estimates = [sigma for one in several[:_FEW_MESSAGES] if (sigma := _sigma(one)) is not None]
    return _settled(statistics.median(estimates)) if estimates else _USUAL_SIGMA


def _take_off_normed(one: _Masked, norm: Norm, sigma: float) -> torch.Tensor:
    """Returns the message's rows minus a scaled noise vector. The vector and its scale are those that leave rows most
    like the output of `norm`, the norm layer that made the unmasked rows."""
    roots = _strengths(one.rows, one.pool, sigma)
    misfit = torch.stack([_misfit(norm, one.rows, one.pool, strength) for strength in roots])
    side, k = divmod(int(misfit.argmin()), one.pool.shape[0])
    return one.rows - roots[side, k] * one.pool[k]


def _strengths(rows: torch.Tensor, pool: torch.Tensor, sigma: float) -> torch.Tensor:
    """Returns both solutions c of ‖Z − c·n‖² = T·d·(c/σ)² for each vector n, shape (2, K); 1e30 stands for a solution
    that is not positive.

    T is the number of rows, d the number of features. The first solution is the true strength unless ⟨X, n⟩ < −‖X‖²/c,
    which means that the rows X point against the noise. (At the true c, the left side minus the right side has the
    slope −2(‖X‖²/c + ⟨X, n⟩). At the first solution the slope is negative.)
    """
    num_rows, d = rows.shape
    square = num_rows * (pool.pow(2).sum(1) - d / sigma**2)
    half, whole = pool @ rows.sum(0), rows.pow(2).sum()
    root = (half * half - square * whole).clamp_min(0).sqrt()
    both = torch.stack([whole / (half + root), (half + root) / square])
    return torch.where((both > 0) & (both < _NONE), both, _NONE)


def _sigma(one: _Masked) -> float | None:
    """Returns σ of a message of several normed rows, from the condition that a single strength c gives each row the
    norm of a normed row. Returns None if no norm layer made the rows."""
    if one.norm is None:
        return None
    scaled = one.norm.direction(one.rows)
    noise = one.pool / one.norm.weight
    square, half = noise.pow(2).sum(1), noise @ scaled.mean(0)
    rest = scaled.pow(2).sum(1).mean() - scaled.shape[1]
    root = (half * half - square * rest).clamp_min(0).sqrt()
    found = torch.stack([half - root, half + root]) / square  # (2, K)
    misfit = torch.stack([_misfit(one.norm, one.rows, one.pool, strength) for strength in found])
    side, k = divmod(int(misfit.argmin()), one.pool.shape[0])
    left = one.rows - found[side, k] * one.pool[k]
    return float(found[side, k] / left.pow(2).mean().sqrt().clamp_min(1e-30))


def _misfit(norm: Norm, rows: torch.Tensor, pool: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Returns, for each noise vector, how far the rows minus this vector times its strength are from normed rows, shape
    (K,); infinite for an impossible strength."""
    left = rows - (found[:, None] * pool)[:, None, :]  # (K, num_rows, d)
    left = norm.direction(left)
    misfit = (left.pow(2).mean(-1) - 1).pow(2).mean(-1)
    if norm.bias is not None:
        misfit = misfit + left.mean(-1).pow(2).mean(-1)
    return torch.where((found > 0) & (found < _NONE), misfit, torch.inf)


def _settled(sigma: float) -> float:
    """Rounds σ to two digits if the rounded value is within the error that the norm's eps causes, since users set round
    numbers."""
    near = float(f"{sigma:.2g}")
    return near if near > 0 and abs(sigma - near) <= _ROUND * near else max(sigma, 1e-6)


# ---- known-mask -----------------------------------------------------------------------------------------------------
#
# Recovers rows under pooled noise. The provider has seen every noise vector, so it can subtract the vector that the
# tenant added.
#
# The provider has seen the vectors because it computed their effects (their products with the weight) for the tenant. A
# masked message is z_t = x_t + c·n_k, with one k and one c = σ·rms(x) for all its rows. If σ is known, each vector
# gives its c by ‖Z − c·n‖² = T·d·(c/σ)², with the message Z of T rows z_t and d features. If a norm layer (weight γ,
# bias β) made x, the added vector is the one whose removal leaves rows with ‖(x_t − β)/γ‖² = d, which gives σ, too.
# Otherwise the attack chooses the vector with the largest correlation, which is the likeliest one for Gaussian rows. If
# many messages are single short rows under weak noise, the choice is wrong for a few of them.
# Source: our derivation; the scheme is that of Symbiosis (Multi-Adapter Inference and Fine-Tuning), section on privacy.


def attack_known_mask(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims unmasked rows of each message, if the provider has computed noise effects (products of noise vectors with
    the weight) for the message's group and direction; see `Adversary.attack`."""
    masked = _masked_messages(view, public)
    sigma = _usual_sigma(masked)
    return [StolenRows(one.seq, _unmask(one, sigma)) for one in masked]


def _unmask(one: _Masked, sigma: float) -> torch.Tensor:
    """Returns the message's rows minus a noise vector times its strength, for the pair that fits best."""
    if one.norm is not None:
        return _take_off_normed(one, one.norm, sigma)
    roots = _strengths(one.rows, one.pool, sigma)
    k = int(roots[0].argmin())  # the largest correlation, and the smallest rms of the remainder
    return one.rows - roots[0, k] * one.pool[k]


KNOWN_MASK = Adversary(
    "known-mask",
    "noise vectors whose effects the provider computed: takes the right one off every message",
    attack_known_mask,
    opens_masks=True,
)


# ---- which-of-K -----------------------------------------------------------------------------------------------------
#
# Finds which of K pooled noise vectors masks each message, by a test of norms alone, one layer at a time.
#
# The paper on the scheme argues that an attacker must try K^layers combinations, but this is not so. In each message by
# itself, the norms of the rows show which of the K vectors was added. Let z_t be a masked row of d features, n_k a
# noise vector, c its strength in this message, and γ and β the norm layer's weight and bias. The right vector satisfies
# ‖(z_t − c·n_k − β)/γ‖² = d for every row. With LayerNorm, (z_t − c·n_k − β)/γ also has a mean of 0. The test uses only
# the norms and means of rows, no correlation. Source: our derivation, against the argument in Symbiosis (Multi-Adapter
# Inference and Fine-Tuning), section on privacy.


def attack_which_of_k(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims unmasked rows of each forward message of a group whose input a norm layer computes, if the provider has
    computed noise effects (products of noise vectors with the weight) for that group."""
    masked = _masked_messages(view, public)
    sigma = _usual_sigma(masked)
    return [StolenRows(one.seq, _take_off_normed(one, one.norm, sigma)) for one in masked if one.norm is not None]


WHICH_OF_K = Adversary(
    "which-of-K",
    "pooled noise vectors told apart by the norm of a normed row alone, layer by layer: the rows of normed inputs",
    attack_which_of_k,
)


# ---- sphere-fit -----------------------------------------------------------------------------------------------------
#
# Recovers one fixed mask that the provider never sees. Normed rows lie on a sphere, and the mask is the sphere's
# centre.
#
# Each masked row is z_t = x_t + n with ‖(x_t − β)/γ‖² = d (γ, β: the norm's weight and bias; d: the number of
# features). So u_t = (z_t − β)/γ lies at distance √d from v = n/γ, and 2(u_t − u_s)ᵀ v = ‖u_t‖² − ‖u_s‖² is linear in
# v: d + 1 rows determine v. LayerNorm rows also have mean 0, which is one more equation. The attack fails if rows span
# too few directions, or if the mask changes. Source: Coope, "Circle fitting by linear and nonlinear least squares",
# 1993, for the linear form of a sphere fit.

_FEW_CLAIMED = 64
_ROWS_PER_FEATURE = 3
"""The most rows that are used, as a multiple of the number d of features. More than d + 1 rows average out the rounding
of float32, but still more rows would cost more than they gain."""


def attack_sphere_fit(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims unmasked rows of the first messages of every group whose input a norm layer computes. Groups with too few
    rows to fit a mask are left out."""
    norms = public.normed_inputs()
    claims: list[Claim] = []
    for group, norm in norms.items():
        messages = view.with_tensors().select("product", "forward", group)[:_FEW_CLAIMED]
        requests = {message.seq: message.request().to(torch.float64) for message in messages}
        if not requests:
            continue
        rows = torch.cat(list(requests.values()))
        if rows.shape[1] != norm.weight.shape[0] or not bool(torch.isfinite(rows).all()):
            continue
        mask = _fit_sphere(norm, rows[: _ROWS_PER_FEATURE * rows.shape[1]])
        if mask is not None:
            claims += [StolenRows(seq, request - mask) for seq, request in requests.items()]
    return claims


def _fit_sphere(norm: Norm, rows: torch.Tensor) -> torch.Tensor | None:
    """Returns the mask of the rows, shape (d,), which is the sphere's centre times the norm's weight. Returns None for
    fewer than d + 1 rows.

    Args:
        norm: the norm that made the unmasked rows; its eps is ignored.
        rows: float64, shape (num_rows, d).
    """
    num_rows, d = rows.shape
    if num_rows < d + 1:
        return None
    points = norm.direction(rows)
    middle = points.mean(0)
    centred = points - middle
    squares = centred.pow(2).sum(1)
    equations, values = 2 * (centred - centred.mean(0)), squares - squares.mean()
    if norm.bias is not None:  # rows have mean 0, so the centre has the same mean as all points
        equations = torch.cat([equations, equations.norm() / d * torch.ones(1, d, dtype=equations.dtype)])
        values = torch.cat([values, values.new_zeros(1)])
    # if rows do not span all directions, gelsd gives the smallest solution
    centre: torch.Tensor = torch.linalg.lstsq(equations, values[:, None], rcond=1e-9, driver="gelsd").solution[:, 0]
    mask: torch.Tensor = (centre + middle) * norm.weight
    return mask


SPHERE_FIT = Adversary(
    "sphere-fit",
    "one fixed mask that was never seen: normed rows lie on a sphere around it, d + 1 of them give it",
    attack_sphere_fit,
)


# ---- differencing ---------------------------------------------------------------------------------------------------
#
# Computes the difference of two messages. A mask that was used for both cancels in the difference.
#
# The adversary claims the difference z − z' for a few pairs of messages of one group (layers that read the same input)
# and direction. If both messages had the same mask, this is the difference x − x' of their contents. In ring arithmetic
# the difference is taken mod 2^32 and centred. Source: the two-time pad.

_FEW_GROUPS = 8
_FEW_PAIRS = 8


def _attack_differencing(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims the differences of a few pairs of messages in each of the largest sets that `_alike` returns."""
    claims: list[Claim] = []
    for messages in islice(_alike(view), _FEW_GROUPS):
        for one, other in islice(combinations(messages, 2), _FEW_PAIRS):
            difference = one.request() - other.request()  # int32 wraps mod 2^32, and its sign centres the result
            claims.append(StolenDifference(one.seq, other.seq, difference.to(torch.float64)))
    return claims


def _alike(view: View) -> list[list[Message]]:
    """Returns sets of at least two messages that have the same group, direction, arithmetic and number of rows, the
    largest sets first."""
    found: dict[tuple[int, str, str, int], list[Message]] = defaultdict(list)
    for message in view.with_tensors().select("product"):
        if message.num_rows > 0:
            found[message.group, message.direction, message.arithmetic, message.num_rows].append(message)
    return sorted((messages for messages in found.values() if len(messages) > 1), key=len, reverse=True)


DIFFERENCING = Adversary(
    "differencing",
    "a mask used for two messages: the difference of their unmasked rows",
    _attack_differencing,
)


# ---- averaging ------------------------------------------------------------------------------------------------------
#
# Averages the messages of a prompt that is repeated under fresh noise, and cleans the mean by principal components.
#
# Messages of one group (layers that read the same input), direction and number of rows are assumed to be repetitions of
# one prompt. The noise of the messages' mean falls with the square root of the number of messages. Principal components
# of the mean that lie below the edge of the noise's spectrum are left out. The attack fails if the noise is uniform mod
# 2^32, because the mean of such noise says nothing. The attack does not check whether messages are repetitions. If they
# are not, the claim is wrong (`principal-components` handles several prompts under one mask).
# Source: Marchenko and Pastur, 1967, for the edge √T + √d of the spectrum of a (T, d) noise matrix.

_FEW_SETS = 16
_FEW_MEANS = 4
_MOST_MESSAGES = 512


def _attack_averaging(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Computes the cleaned mean of each of the first few sets of messages that may be repetitions, and claims that this
    is the unmasked content of the set's first few messages."""
    sets: dict[tuple[int, str, int], list[Message]] = defaultdict(list)
    for message in view.with_tensors().select("product"):
        if message.num_rows > 0:
            sets[message.group, message.direction, message.num_rows].append(message)
    claims: list[Claim] = []
    for messages in [messages for messages in sets.values() if len(messages) > 1][:_FEW_SETS]:
        repeats = torch.stack([message.request().to(torch.float64) for message in messages[:_MOST_MESSAGES]])
        if bool(torch.isfinite(repeats).all()):
            mean = _clean_mean(repeats)
            claims += [StolenRows(message.seq, mean) for message in messages[:_FEW_MEANS]]
    return claims


def _clean_mean(repeats: torch.Tensor) -> torch.Tensor:
    """Returns the mean over repetitions without the principal components that noise alone would produce.

    Args:
        repeats: float64, shape (num_repeats, num_rows, d), at least two repetitions.

    Returns:
        The cleaned mean, shape (num_rows, d).
    """
    num_repeats, num_rows, d = repeats.shape
    mean = repeats.mean(0)
    noise = (float(repeats.var(0).mean()) / num_repeats) ** 0.5
    u, values, vt = torch.linalg.svd(mean, full_matrices=False)
    kept = values > noise * (num_rows**0.5 + d**0.5)  # the largest singular value of noise alone
    cleaned: torch.Tensor = (u * torch.where(kept, values, 0.0)) @ vt
    return cleaned


AVERAGING = Adversary(
    "averaging",
    "a prompt repeated under fresh noise: mean and principal components of its messages",
    _attack_averaging,
)


# ---- principal-components -------------------------------------------------------------------------------------------
#
# Recovers differences between messages under one mask that is used again, with fresh noise on top.
#
# Such messages differ only in their contents and in the fresh noise. Messages of one group (layers that read the same
# input), direction, arithmetic and number of rows are taken as points. A mask that they all share is part of their
# mean, and is removed with the mean. Changes between a few prompts that are repeated, in any order, lie along a few
# directions; fresh noise lies along all directions. So the principal components that exceed the noise give the
# differences between messages. The adversary claims nothing if no component stands out. This is so under noise that is
# uniform mod 2^32, which varies equally in all directions. Source: Gavish and Donoho, "The optimal hard threshold for
# singular values is 4/√3", 2014, for the threshold if the noise's strength is not known.

_FEWEST_MESSAGES = 16
_MOST_NUMBERS = 1 << 24
"""The most numbers in a set of messages: 128 MB in float64."""


def _attack_principal_components(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims differences between the first messages of a set, for each of the largest sets whose messages vary by more
    than noise. A set holds messages of one group, direction, arithmetic and number of rows."""
    sets: dict[tuple[int, str, str, int], list[Message]] = defaultdict(list)
    for message in view.with_tensors().select("product"):
        if message.num_rows > 0:
            sets[message.group, message.direction, message.arithmetic, message.num_rows].append(message)
    claims: list[Claim] = []
    for messages in sorted(sets.values(), key=len, reverse=True)[:_FEW_SETS]:
        chosen = messages[: min(_MOST_MESSAGES, _MOST_NUMBERS // (messages[0].num_rows * messages[0].widths[0]))]
        claims += _differences(chosen) if len(chosen) >= _FEWEST_MESSAGES else []
    return claims


def _differences(messages: list[Message]) -> list[StolenDifference]:
    first = messages[0].request()
    # int32 wraps mod 2^32, so that a ring mask that all messages share vanishes when the first message is subtracted
    points = torch.stack([(message.request() - first).to(torch.float64).flatten() for message in messages])
    found = components(points) if bool(torch.isfinite(points).all()) else None
    if found is None:
        return []
    shape = (messages[0].num_rows, -1)
    return [
        StolenDifference(messages[place].seq, messages[place + 1].seq, (found[place] - found[place + 1]).view(shape))
        for place in range(0, min(2 * _FEW_PAIRS, len(messages) - 1), 2)
    ]


def components(points: torch.Tensor) -> torch.Tensor | None:
    """Returns the part of the points' variation that is larger than noise alone would cause; None if there is none.

    Args:
        points: float64, shape (num_points, d).

    Returns:
        The points without their mean and without the noise outside of the components; the same shape.
    """
    centred = points - points.mean(0)
    u, values, vt = torch.linalg.svd(centred, full_matrices=False)
    flatness = min(points.shape) / max(points.shape)
    median = float(values[: min(points.shape[0] - 1, len(values))].median())  # centring removes one dimension
    kept = values > (0.56 * flatness**3 - 0.95 * flatness**2 + 1.82 * flatness + 1.43) * median
    if not bool(kept.any()):
        return None
    cleaned: torch.Tensor = (u[:, kept] * values[kept]) @ vt[kept]
    return cleaned


PRINCIPAL_COMPONENTS = Adversary(
    "principal-components",
    "a mask used again, or none, under fresh noise: what messages vary in stands out of it",
    _attack_principal_components,
)


# ---- subspace-projection --------------------------------------------------------------------------------------------
#
# Removes noise that lies in a small subspace: principal components find the subspace, and its part of the rows is
# removed.
#
# Strong noise of rank r makes the first r eigenvalues of the rows' second moment large. The rows without their part
# along the eigenvectors are the unmasked rows without their part in the subspace. Noise in all directions cannot be
# removed in this way; then the claim is as wrong as the message. Source: our derivation; principal component analysis.

_MOST_STREAMS = 24
"""The most groups and directions that are attacked. A tiny model has fewer. SmolLM2 has 240, and the
eigenvectors for 1,536 features take seconds each time."""
_LARGEST_SHARE = 4
"""A subspace counts as small if its number of dimensions is at most the number of features, and at most the number of
rows, divided by this."""


def _attack_subspace(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Removes the noise's subspace from the first messages of the first groups, and claims the rows that remain; see
    `Adversary.attack`."""
    claims: list[Claim] = []
    products = view.with_tensors().select("product")
    streams = list(dict.fromkeys((message.group, message.direction) for message in products))
    for group, direction in streams[:_MOST_STREAMS]:
        messages = [m for m in products if (m.group, m.direction) == (group, direction)][:_FEW_CLAIMED]
        requests = {message.seq: message.request().to(torch.float64) for message in messages}
        rows = torch.cat(list(requests.values()))
        span = _noise_span(rows) if bool(torch.isfinite(rows).all()) else None
        if span is not None:
            claims += [StolenRows(seq, request - request @ span @ span.t()) for seq, request in requests.items()]
    return claims


def _noise_span(rows: torch.Tensor) -> torch.Tensor | None:
    """Returns an orthonormal basis of the directions with the largest eigenvalues, shape (d, r). The rank r is where
    the eigenvalues fall most steeply; it is at most a quarter of num_rows and of d. Returns None for fewer than four
    rows or features.

    Args:
        rows: float64, shape (num_rows, d).
    """
    num_rows, d = rows.shape
    largest = min(d, num_rows) // _LARGEST_SHARE
    if largest < 1:
        return None
    values, vectors = torch.linalg.eigh(rows.t() @ rows)  # ascending
    values = values.flip(0).clamp_min(float(values[-1]) * 1e-15 + 1e-300)
    rank = 1 + int((values[:largest] / values[1 : largest + 1]).argmax())
    span: torch.Tensor = vectors[:, -rank:]
    return span


SUBSPACE = Adversary(
    "subspace-projection",
    "noise within a small span: principal components give the span, rows off it are bare",
    _attack_subspace,
)


# ---- low-bits -------------------------------------------------------------------------------------------------------
#
# Recovers the low bits of rows under a float mask that has a coarser grid than the data.
#
# A bfloat16 mask has 8 significant bits. If such a mask n is added to a float32 row x, the sum z = x + n still shows x
# modulo the mask's grid. The grid spacing of an element is 2^-7 times the power of two below |n|. If the mask is
# strong, this power of two is also the one below |z|, except for a few elements next to a power of two. The adversary
# claims the centred residue, which is x itself if |x| is below half the grid. The attack does not apply to ring
# arithmetic, in which rows and masks are integers on one grid. Source: the definition of bfloat16.

_BFLOAT16_STEPS = 2.0**-7
"""The spacing of bfloat16 numbers between 1 and 2."""


def _attack_low_bits(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims the centred residue of the first `_MOST_MESSAGES` messages modulo the grid of a bfloat16 mask."""
    claims: list[Claim] = []
    for message in view.with_tensors().select("product")[:_MOST_MESSAGES]:
        rows = message.request().to(torch.float64)
        claims.append(StolenRows(message.seq, _residue(rows, grid(rows))))
    return claims


def grid(rows: torch.Tensor) -> torch.Tensor:
    """Returns, for each element of the masked rows, the grid spacing of a bfloat16 mask that is much larger than the
    row."""
    exponent = torch.floor(torch.log2(rows.abs().clamp_min(1e-30)))
    return torch.exp2(exponent) * _BFLOAT16_STEPS


def _residue(rows: torch.Tensor, spacing: torch.Tensor) -> torch.Tensor:
    """Returns the rows modulo the spacing, as numbers between minus and plus half of the spacing."""
    return rows - torch.round(rows / spacing) * spacing


LOW_BITS = Adversary(
    "low-bits",
    "a float mask on a coarser grid than the data, such as bfloat16: the data modulo the grid",
    _attack_low_bits,
)
