"""Runs `known-mask` on traffic under the mask `gaussian-pool`, and makes masked traffic for other controls."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attacks.adversaries.known_mask import ADVERSARY
from attacks.controls.control import ControlResult
from attacks.controls.tiny import tiny_manifest, tiny_model, tiny_public
from attacks.seen.adversary import Claim, StolenDifference, StolenRows
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View
from attacks.victim.synthetic import Exchange, write_recording
from noise.gaussian_pool import GaussianPool, NotPrivateWarning
from noise.scheme import GroupSpec
from wire.frame import Call, Direction
from wire.manifest import Manifest
from wire.payload import Payload
from wire.ring.seeded_rows import SeededRows


@dataclass(frozen=True)
class Traffic:
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


def exchange(kind: str, group: int, rows: torch.Tensor, **fields: str) -> Exchange:
    """Pairs a request with a reply of zeros, because the adversaries of float masks read requests only. `fields` may
    set the `direction` and the `purpose` of the Exchange."""
    reply = torch.zeros(rows.shape[0], manifest_of(kind).groups[group].out_features, dtype=rows.dtype)
    return Exchange(group, rows, reply, **fields)


def record(kind: str, folder: str, sent: Iterable[tuple[Exchange, torch.Tensor | None]]) -> Traffic:
    """Records exchanges in `folder`, each given with its unmasked rows, or with None if the exchange asks for an effect
    (a mask's product with the weight)."""
    both = list(sent)
    view = write_recording(Path(folder) / "recording", manifest_of(kind), [one for one, _ in both])
    truth = {seq: rows.to(torch.float64) for seq, (_, rows) in enumerate(both) if rows is not None}
    return Traffic(view, public_of(kind), truth)


def to_ring(rows: torch.Tensor) -> torch.Tensor:
    """Converts rows to fixed point, int32, with 16 bits after the point. Like encoded rows, the results are far below
    2^31."""
    return (rows * 2**16).round().to(torch.int32)


def uniform(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draws int32 numbers that are uniform over all 2^32 values."""
    return torch.randint(-(2**31), 2**31, tuple(shape), dtype=torch.int32, generator=generator)


def uniform_traffic(kind: str, folder: str, inputs: Iterable[Mapping[int, torch.Tensor]]) -> Traffic:
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


def pool_traffic(kind: str, folder: str, sigma: float, inputs: Iterable[Mapping[int, torch.Tensor]]) -> Traffic:
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


def control() -> ControlResult:
    """Computes the share of messages that the adversary unmasks. Messages hold whole prompts or single tokens. The
    adversary is not told σ, the strength of the noise."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = decode_steps(inputs_of("llama", 2, 12), 3)
        traffic = pool_traffic("llama", folder, 0.7, inputs)
        errors = row_errors(ADVERSARY.attack(traffic.view, traffic.public, None), traffic.truth)
    share = sum(errors.get(seq, 1.0) <= 1e-4 for seq in traffic.truth) / len(traffic.truth)
    return ControlResult(
        ADVERSARY.name, "gaussian-pool, K = 8, σ = 0.7, pools renewed", "messages with rows right to 1e-4",
        share, 0.9, smaller_wins=False,
    )  # fmt: skip
