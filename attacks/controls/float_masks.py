"""Runs the adversaries of additive masks, and `seed-search`, on traffic of the tiny model under weak masks."""

from __future__ import annotations

import functools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attacks.adversaries.float_masks import (
    AVERAGING,
    DIFFERENCING,
    KNOWN_MASK,
    LOW_BITS,
    PRINCIPAL_COMPONENTS,
    SPHERE_FIT,
    SUBSPACE,
    WHICH_OF_K,
)
from attacks.adversaries.seed_search import SEED_SEARCH
from attacks.controls import ControlResult, lattice
from attacks.seen.adversary import Claim, StolenDifference, StolenRows
from attacks.seen.public_model import PublicModel
from attacks.seen.view import Exchange, View, write_recording
from attacks.victim.models import tiny_manifest, tiny_model, tiny_public
from noise.masks.gaussian_pool import GaussianPool, NotPrivateWarning
from noise.params import PARAMETERS
from noise.scheme import GroupSpec
from wire.frame import Call, Direction
from wire.manifest import Manifest
from wire.payload import Payload
from wire.ring.seeded_rows import SeededRows

# ---- traffic under masks on the tiny model, known-mask --------------------------------------------------------------


@dataclass(frozen=True)
class MaskedTraffic:
    """Holds the view of a recording, the public model, and the true rows of the recorded messages.

    Attributes:
        truth: the true unmasked rows of each message that requests a product, by message number (seq), in the units
            of the request.
    """

    view: View
    public: PublicModel
    truth: Mapping[int, torch.Tensor]


@functools.cache
def manifest_of(kind: str) -> Manifest:
    """Returns the manifest that a provider of the tiny model announces if it serves the weights unquantized."""
    with tempfile.TemporaryDirectory() as folder:
        return tiny_manifest(kind, "native", Path(folder) / "model")


@functools.cache
def public_of(kind: str) -> PublicModel:
    """Returns what adversaries know of the tiny model: its public weights and structure."""
    return tiny_public(kind, manifest_of(kind))


def normed_groups(public: PublicModel) -> set[int]:
    """Returns the ids of the groups (layers that read the same input) whose input is the output of a block's norm
    layer."""
    return {layer.group for block in public.blocks for layer in (block.q, block.up[0])}


@functools.cache
def inputs_of(kind: str, num_prompts: int, num_tokens: int, seed: int = 0) -> list[dict[int, torch.Tensor]]:
    """Returns, for each of several random prompts, the inputs of the tiny model's layers: group id → float32, shape
    (num_tokens, in_features)."""
    model = tiny_model(kind)
    modules = dict(model.named_modules())
    seen: dict[int, torch.Tensor] = {}

    def keep(group: int) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
        def hook(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            seen[group] = args[0].detach().reshape(-1, args[0].shape[-1]).clone()

        return hook

    groups = manifest_of(kind).groups
    hooks = [modules[group.layers[0].name].register_forward_pre_hook(keep(group.id)) for group in groups]
    tokens = torch.randint(0, 64, (num_prompts, num_tokens), generator=torch.Generator().manual_seed(seed))
    passes = []
    with torch.no_grad():
        for prompt in tokens:
            model(input_ids=prompt[None])
            passes.append(dict(seen))
    for hook in hooks:
        hook.remove()
    return passes


def exchange(
    kind: str, group: int, rows: torch.Tensor, direction: str = "forward", purpose: str = "product"
) -> Exchange:
    """Pairs a request with a reply of zeros, because the adversaries of float masks read requests only."""
    reply = torch.zeros(rows.shape[0], manifest_of(kind).groups[group].out_features, dtype=rows.dtype)
    return Exchange(group, rows, reply, direction, purpose)


def record(kind: str, folder: str, sent: Iterable[tuple[Exchange, torch.Tensor | None]]) -> MaskedTraffic:
    """Records exchanges in `folder`, each given with its unmasked rows, or with None if the exchange asks for an effect
    (a mask's product with the weight)."""
    both = list(sent)
    view = write_recording(Path(folder) / "recording", manifest_of(kind), [one for one, _ in both])
    truth = {seq: rows.to(torch.float64) for seq, (_, rows) in enumerate(both) if rows is not None}
    return MaskedTraffic(view, public_of(kind), truth)


def to_ring(rows: torch.Tensor) -> torch.Tensor:
    """Converts rows to fixed point, int32, with 16 bits after the point. Like encoded rows, the results are far below
    2^31."""
    return (rows * 2**16).round().to(torch.int32)


def uniform(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draws int32 numbers that are uniform over all 2^32 values."""
    return torch.randint(-(2**31), 2**31, tuple(shape), dtype=torch.int32, generator=generator)


def uniform_traffic(kind: str, folder: str, inputs: Iterable[Mapping[int, torch.Tensor]]) -> MaskedTraffic:
    """Makes traffic in ring arithmetic. Each row has a fresh mask that is uniform mod 2^32."""
    generator = torch.Generator().manual_seed(0x5EED0001)
    sent: list[tuple[Exchange, torch.Tensor | None]] = []
    for one in inputs:
        for group, rows in one.items():
            encoded = to_ring(rows)
            sent.append((exchange(kind, group, encoded + uniform(rows.shape, generator)), encoded))
    return record(kind, folder, sent)


def row_errors(claims: Iterable[Claim], truth: Mapping[int, torch.Tensor]) -> dict[int, float]:
    """Returns the relative error ‖X̂ − X‖_F / ‖X‖_F of every claim X̂ about rows X, by message number (seq)."""
    return {
        claim.seq: float((claim.rows - truth[claim.seq]).norm() / truth[claim.seq].norm())
        for claim in claims
        if isinstance(claim, StolenRows)
    }


def difference_errors(claims: Iterable[Claim], truth: Mapping[int, torch.Tensor]) -> list[float]:
    """Returns the relative error ‖X̂ − X‖_F / ‖X‖_F of every claim X̂ about a difference X of two messages' rows. Where
    the two messages have the same rows, ‖X‖_F counts as 1e-30, so that any wrong claim has a huge error."""
    errors = []
    for claim in claims:
        if isinstance(claim, StolenDifference):
            wanted = truth[claim.seq] - truth[claim.other_seq]
            errors.append(float((claim.rows - wanted).norm() / wanted.norm().clamp_min(1e-30)))
    return errors


def pool_traffic(kind: str, folder: str, sigma: float, inputs: Iterable[Mapping[int, torch.Tensor]]) -> MaskedTraffic:
    """Makes the traffic that a tenant with `mask='gaussian-pool'` sends for these inputs. A group has 8 noise vectors,
    which are drawn afresh after 6 messages.

    Args:
        kind: the kind of model, as in `tiny_model`.
        folder: a folder for the recording.
        sigma: the standard deviation of the noise, in units of the rows' root mean square.
        inputs: the unmasked rows of each forward pass, by group id.
    """
    sent: list[tuple[Exchange, torch.Tensor | None]] = []

    def effect_path(call: Call, payload: Payload, reply_cols: int) -> Future[torch.Tensor]:
        rows = payload.rows(call)
        if isinstance(rows, SeededRows):
            raise TypeError("gaussian-pool sends its vectors")
        answer: Future[torch.Tensor] = Future()
        answer.set_result(torch.zeros(rows.shape[0], reply_cols))
        sent.append((exchange(kind, call.group, rows, purpose="effect"), None))
        return answer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPrivateWarning)
        scheme = GaussianPool(pool_size=8, sigma=sigma, renew_every=6)
    scheme.bind(effect_path)
    for one in inputs:
        for group, rows in one.items():
            info = manifest_of(kind).groups[group]
            spec = GroupSpec(group, info.in_features, info.out_features, 1.0, 1.0, torch.ones(info.out_features))
            masked = scheme.mask(spec, Direction.FORWARD, rows).messages[0].rows
            if isinstance(masked, torch.Tensor):
                sent.append((exchange(kind, group, masked), rows))
    return record(kind, folder, sent)


def decode_steps(inputs: Iterable[Mapping[int, torch.Tensor]], num_steps: int) -> list[dict[int, torch.Tensor]]:
    """Splits each prompt's inputs into a prefill and `num_steps` single rows, as a tenant with a KV cache sends
    them."""
    split = []
    for one in inputs:
        num_tokens = next(iter(one.values())).shape[0] - num_steps
        split.append({group: rows[:num_tokens] for group, rows in one.items()})
        for step in range(num_tokens, num_tokens + num_steps):
            split.append({group: rows[step : step + 1] for group, rows in one.items()})
    return split


def known_mask_control() -> ControlResult:
    """Computes the share of messages that the adversary unmasks. Messages hold whole prompts or single tokens. The
    adversary is not told σ, the strength of the noise."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = decode_steps(inputs_of("llama", 2, 12), 3)
        traffic = pool_traffic("llama", folder, 0.7, inputs)
        errors = row_errors(KNOWN_MASK.attack(traffic.view, traffic.public, None), traffic.truth)
    share = sum(errors.get(seq, 1.0) <= 1e-4 for seq in traffic.truth) / len(traffic.truth)
    return ControlResult(
        KNOWN_MASK.name, "gaussian-pool, K = 8, σ = 0.7, pools renewed", "messages with rows right to 1e-4",
        share, 0.9, smaller_wins=False,
    )  # fmt: skip


# ---- which-of-K -----------------------------------------------------------------------------------------------------
#
# Runs `which-of-K` on messages whose rows are a norm layer's output, under the mask `gaussian-pool`.


def which_of_k_control() -> ControlResult:
    """Computes the largest relative error of a message's unmasked rows, over 32 messages. Each message is masked with
    one of its group's 8 noise vectors, which are drawn afresh after 6 messages."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = pool_traffic("llama", folder, 1.0, decode_steps(inputs_of("llama", 2, 12), 3))
        errors = row_errors(WHICH_OF_K.attack(traffic.view, traffic.public, None), traffic.truth)
        groups = normed_groups(traffic.public)
        wanted = [message.seq for message in traffic.view.select("product") if message.group in groups]
    return ControlResult(
        WHICH_OF_K.name, "gaussian-pool, K = 8, no correlation used", "worst relative error of a message's rows",
        max(errors.get(seq, 1.0) for seq in wanted), 1e-4, smaller_wins=True,
    )  # fmt: skip


# ---- sphere-fit -----------------------------------------------------------------------------------------------------
#
# Runs `sphere-fit` on traffic in which each group has one fixed Gaussian mask, thirty times stronger than the rows.

FIXED_STRENGTH = 30.0


def fixed_mask_traffic(kind: str, folder: str, public: PublicModel, num_prompts: int) -> MaskedTraffic:
    """Makes the traffic of prompts of 12 tokens, for the groups (layers that read the same input) whose input is a norm
    layer's output. All rows of a group have the same Gaussian mask row."""
    generator = torch.Generator().manual_seed(0x5EED0002)
    inputs = inputs_of(kind, num_prompts, 12)
    masks = {group: FIXED_STRENGTH * torch.randn(inputs[0][group].shape[1], generator=generator) for group in inputs[0]}
    groups = normed_groups(public)
    sent = [(exchange(kind, g, rows + masks[g]), rows) for one in inputs for g, rows in one.items() if g in groups]
    return record(kind, folder, sent)


def sphere_fit_control(kind: str = "llama") -> ControlResult:
    """Computes the largest relative error of the claimed rows, over four groups whose inputs come from a norm layer."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = fixed_mask_traffic(kind, folder, public_of(kind), 10)
        errors = row_errors(SPHERE_FIT.attack(traffic.view, traffic.public, None), traffic.truth)
    return ControlResult(
        SPHERE_FIT.name, "one fixed mask of strength 30 a group, 120 tokens",
        "worst relative error of a message's rows", max(errors.get(seq, 1.0) for seq in traffic.truth), 1e-4,
        smaller_wins=True,
    )  # fmt: skip


# ---- differencing ---------------------------------------------------------------------------------------------------
#
# Runs `differencing` on prompts that share one mask, which is Gaussian on float rows and uniform on int32 rows.

NUM_DIFFERENCED = 3


def differencing_control() -> ControlResult:
    """Computes the largest relative error of the claimed differences between two prompts' rows, in float and ring
    arithmetic. The result is 1 if the number of claims is not one for each pair of prompts in each group."""
    generator = torch.Generator().manual_seed(0x5EED0003)
    sent: list[tuple[Exchange, torch.Tensor | None]] = []
    inputs = inputs_of("llama", NUM_DIFFERENCED, 12)
    for group in inputs[0]:
        shape = inputs[0][group].shape
        noise, pad = torch.randn(shape, generator=generator), uniform(shape, generator)
        for one in inputs:
            if group < 4:
                sent.append((exchange("llama", group, one[group] + noise), one[group]))
            else:
                encoded = to_ring(one[group])
                sent.append((exchange("llama", group, encoded + pad), encoded))
    with tempfile.TemporaryDirectory() as folder:
        traffic = record("llama", folder, sent)
        errors = difference_errors(DIFFERENCING.attack(traffic.view, traffic.public, None), traffic.truth)
    complete = len(errors) == len(inputs[0]) * NUM_DIFFERENCED
    return ControlResult(
        DIFFERENCING.name, "one mask used for three prompts, float and ring", "worst relative error of a difference",
        max(errors) if complete else 1.0, 1e-5, smaller_wins=True,
    )  # fmt: skip


# ---- averaging ------------------------------------------------------------------------------------------------------
#
# Runs `averaging` on a prompt that is sent 256 times under fresh Gaussian noise as strong as its rows.

NUM_REPEATS = 256


def averaging_control() -> ControlResult:
    """Computes the largest relative error of the claimed rows; 1 without a claim. The error is not zero, because the
    mean of 256 messages still has 1/16 of the noise."""
    generator = torch.Generator().manual_seed(0x5EED0004)
    rows = inputs_of("llama", 1, 12)[0][4]
    strength = float(rows.pow(2).mean().sqrt())
    noisy = [rows + strength * torch.randn(rows.shape, generator=generator) for _ in range(NUM_REPEATS)]
    with tempfile.TemporaryDirectory() as folder:
        traffic = record("llama", folder, [(exchange("llama", 4, masked), rows) for masked in noisy])
        errors = row_errors(AVERAGING.attack(traffic.view, traffic.public, None), traffic.truth)
    return ControlResult(
        AVERAGING.name, "one prompt 256 times, fresh Gaussian noise of strength 1", "relative error of the rows",
        max(errors.values(), default=1.0), 0.07, smaller_wins=True,
    )  # fmt: skip


# ---- principal-components -------------------------------------------------------------------------------------------
#
# Runs `principal-components` on a few prompts that are sent many times under one strong mask and fresh noise.
#
# The mean of such messages is the mask plus the mean prompt, and the difference of two messages is mostly noise.
# Therefore the adversaries `averaging` and `differencing` must fail on this traffic, which
# tests/attacks/test_float_masks.py checks.

NUM_PROMPTS, NUM_MESSAGES, NUM_TOKENS = 4, 512, 40
MASK_STRENGTH, NOISE_STRENGTH = 30.0, 2.0
GROUP = 4


def traffic_under_one_mask(folder: str) -> MaskedTraffic:
    """Makes the traffic of NUM_PROMPTS prompts. Each prompt is sent many times, in random order, and all messages have
    one mask. The fresh noise of each message is twice as strong as the prompts' deviation from their mean."""
    generator = torch.Generator().manual_seed(0x5EED0007)
    prompts = torch.stack([one[GROUP] for one in inputs_of("llama", NUM_PROMPTS, NUM_TOKENS)])
    strength = float((prompts - prompts.mean(0)).pow(2).mean().sqrt())
    mask = MASK_STRENGTH * torch.randn(prompts.shape[1:], generator=generator)
    order = torch.randint(NUM_PROMPTS, (NUM_MESSAGES,), generator=generator).tolist()
    order[:NUM_PROMPTS] = range(NUM_PROMPTS)
    sent = []
    for which in order:
        noise = NOISE_STRENGTH * strength * torch.randn(prompts.shape[1:], generator=generator)
        sent.append((exchange("llama", GROUP, prompts[which] + mask + noise), prompts[which]))
    return record("llama", folder, sent)


def principal_components_control() -> ControlResult:
    """Computes the largest relative error of the claimed differences between messages of different prompts; 1 without
    a claim."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = traffic_under_one_mask(folder)
        claims = PRINCIPAL_COMPONENTS.attack(traffic.view, traffic.public, None)
        # an error above 1e6 means that both messages hold the same prompt, so there is no difference to find
        errors = [error for error in difference_errors(claims, traffic.truth) if error < 1e6]
    setting = f"{NUM_PROMPTS} prompts in {NUM_MESSAGES} messages, one mask of strength 30, fresh noise of strength 2"
    worst = max(errors, default=1.0)
    return ControlResult(
        PRINCIPAL_COMPONENTS.name, setting, "worst relative error of a difference", worst, 0.25, smaller_wins=True
    )


# ---- subspace-projection --------------------------------------------------------------------------------------------
#
# Runs `subspace-projection` on noise that is a thousand times stronger than the rows, but spans 3 of 32 dimensions.

SPAN_RANK = 3
SPAN_STRENGTH = 1000.0


def subspace_control() -> ControlResult:
    """Computes the cosine of the claimed rows with the part of the true rows that is orthogonal to the noise. Each
    row has fresh noise in the same 3-dimensional subspace."""
    generator = torch.Generator().manual_seed(0x5EED0005)
    inputs = [one[4] for one in inputs_of("llama", 30, 12)]
    span = torch.linalg.qr(torch.randn(inputs[0].shape[1], SPAN_RANK, generator=generator)).Q
    noise = [SPAN_STRENGTH * torch.randn(rows.shape[0], SPAN_RANK, generator=generator) @ span.t() for rows in inputs]
    with tempfile.TemporaryDirectory() as folder:
        sent = [(exchange("llama", 4, rows + mask), rows) for rows, mask in zip(inputs, noise, strict=True)]
        traffic = record("llama", folder, sent)
        claims = SUBSPACE.attack(traffic.view, traffic.public, None)
    stolen = {claim.seq: claim.rows for claim in claims if isinstance(claim, StolenRows)}
    wide = span.to(torch.float64)
    truth = torch.cat([rows - rows @ wide @ wide.t() for rows in traffic.truth.values()])
    guess = torch.cat([stolen.get(seq, torch.zeros_like(rows)) for seq, rows in traffic.truth.items()])
    alike = torch.nn.functional.cosine_similarity(guess.flatten(), truth.flatten(), dim=0)
    return ControlResult(
        SUBSPACE.name, "noise of strength 1000 in 3 of 32 dimensions, 360 rows", "correlation with rows off the span",
        float(alike), 0.99, smaller_wins=False,
    )  # fmt: skip


# ---- low-bits -------------------------------------------------------------------------------------------------------
#
# Runs `low-bits` on a bfloat16 mask over float32 rows.

COARSE_STRENGTH = 1000.0
_FLOAT32_HALF_STEP = 2.0**-24
"""The largest relative rounding error of the float32 sum of row and mask."""


def _right_residues(guess: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns True for each element of a guess that equals the row's element modulo the spacing of bfloat16 numbers at
    the mask's element, up to the rounding of the sum; bool, the shape of `rows`.

    A random guess is right for at most about one element in 2^14, because the tolerance, which is the rounding of the
    sum, is at most about 2^-14 of half that spacing.
    """
    spacing = torch.exp2(torch.floor(torch.log2(mask.abs()))) * 2.0**-7
    off = guess - rows
    off = off - torch.round(off / spacing) * spacing
    return off.abs() <= 2 * _FLOAT32_HALF_STEP * (rows + mask).abs()


def low_bits_control() -> ControlResult:
    """Computes the share of elements that `_right_residues` accepts, over the inputs of all groups. A few in a thousand
    are wrong, because a power of two lies between the sum and its mask."""
    generator = torch.Generator().manual_seed(0x5EED0006)
    sent, masks = [], []
    for group, rows in inputs_of("llama", 1, 12)[0].items():
        strength = COARSE_STRENGTH * rows.pow(2).mean().sqrt()
        mask = (strength * torch.randn(rows.shape, generator=generator)).to(torch.bfloat16).to(torch.float32)
        masks.append(mask.to(torch.float64))
        sent.append((exchange("llama", group, rows + mask), rows))
    with tempfile.TemporaryDirectory() as folder:
        traffic = record("llama", folder, sent)
        claims = LOW_BITS.attack(traffic.view, traffic.public, None)
    right = [
        _right_residues(claim.rows, traffic.truth[claim.seq], masks[claim.seq]).flatten()
        for claim in claims
        if isinstance(claim, StolenRows)
    ]
    return ControlResult(
        LOW_BITS.name, "bfloat16 Gaussian mask of strength 1000", "elements right modulo the mask's grid",
        float(torch.cat(right).to(torch.float64).mean()) if len(right) == len(sent) else 0.0, 0.99, smaller_wins=False,
    )  # fmt: skip


# ---- seed-search ----------------------------------------------------------------------------------------------------
#
# Runs `seed-search` on masks and a lattice secret from a generator whose seed is a small number or the time.

SMALL_SEED = 977


def seeded_traffic(folder: str, ring: bool, first_seed: int) -> MaskedTraffic:
    """Makes the traffic of two prompts. The mask of message i comes from a generator with seed `first_seed` + i."""
    sent: list[tuple[Exchange, torch.Tensor | None]] = []
    for one in inputs_of("llama", 2, 12):
        for group in (0, 2, 4, 6):
            generator = torch.Generator().manual_seed(first_seed + len(sent))
            rows = to_ring(one[group]) if ring else one[group]
            mask = uniform(rows.shape, generator) if ring else torch.randn(rows.shape, generator=generator)
            sent.append((exchange("llama", group, rows + mask), rows))
    return record("llama", folder, sent)


def _seeded_secret_error() -> float:
    """Returns the relative error of the claimed rows under a lattice mask of shipped size whose secret comes from a
    small seed."""
    traffic = lattice.LatticeTraffic(PARAMETERS["default"], 32)
    generator = torch.Generator().manual_seed(SMALL_SEED)
    shape = 1, traffic.parameters.rank, traffic.parameters.ring_degree
    mask = traffic.block(torch.randint(-1, 2, shape, generator=generator).to(torch.int8))
    for rows in (slice(0, 5), slice(5, 12)):
        traffic.send(traffic.activations(rows.stop - rows.start), mask[rows])
    return traffic.relative_error(traffic.attacked(SEED_SEARCH.attack))


def seed_search_control() -> ControlResult:
    """Computes the largest relative error of a message's unmasked rows, over three kinds of masks: float masks from a
    small seed, int32 masks from the time as a seed, and a lattice mask whose secret comes from a seed."""
    worst = 0.0
    for ring, first_seed in ((False, SMALL_SEED), (True, int(time.time()) - 60)):
        with tempfile.TemporaryDirectory() as folder:
            traffic = seeded_traffic(folder, ring, first_seed)
            errors = row_errors(SEED_SEARCH.attack(traffic.view, traffic.public, None), traffic.truth)
        worst = max(worst, *(errors.get(seq, 1.0) for seq in traffic.truth))
    worst = max(worst, _seeded_secret_error())
    return ControlResult(
        SEED_SEARCH.name, "seed 977 in float, the clock in the ring, a lattice secret of seed 977",
        "worst relative error of a message's rows", worst, 1e-4, smaller_wins=True,
    )  # fmt: skip
