"""The whole adapter of a model whose activations are visible, block after block from the embedding upwards.

Tokens come from the first layer's input, residuals from `residual.py`, attention from `attention.py`, the MLP from
`mlp.py`. A layer that its public weights explain already is reported as unchanged. Where there are too few tokens for
a layer that was changed, the recursion ends and nothing is claimed above it. The last down_proj shows only where the
output head is a base layer: else no provider sees what comes after it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from attacks.adversaries import attention, mlp, residual
from attacks.adversaries.layer0_lookup import lookup
from attacks.adversary import Adversary, Claim, StolenDelta
from attacks.passes import Opened, Prompt, prompts
from attacks.public_model import Block, Layer, Norm, PublicModel
from attacks.view import View

_UNCHANGED = 1e-5
"""Relative error at which public weights explain what was seen: fp32 rounding of a layer leaves 1e-6 to 1e-7."""


_MEMBERS = 3
"""q, k and v."""
_EXPLAINED = 1e-4
_HOPELESS = 0.3
"""Relative misfit of a residual: rows that are what they seem leave 1e-4 and less, masked ones 0.6 and more."""


class _Stop(Exception):
    """The recursion cannot go on."""


def _attack(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    seen = [prompt for prompt in prompts(view.with_tensors(), opened) if model.blocks[0].q.group in prompt.rows]
    claims: list[Claim] = []
    if seen:
        try:
            for claim in _steal(model, seen):
                claims.append(claim)
        except (_Stop, LinAlgError):
            pass
    return claims


def _steal(model: PublicModel, seen: list[Prompt]) -> Iterator[Claim]:
    starts = [model.residual_start(lookup(prompt.rows[model.blocks[0].q.group], model)) for prompt in seen]
    stream = torch.cat(starts)
    for index, block in enumerate(model.blocks):
        transformed = _steal_transforms(block, seen, block.attention_norm(stream))
        if transformed:
            yield from transformed
        else:
            yield from _steal_attention(model, block, seen)
        fit = _fit(block.o, _rows(seen, block.o.group), stream, block.mlp_norm, _rows(seen, block.up[0].group))
        yield StolenDelta(block.o.name, fit.weight - block.mlp_norm.visible(block.o.weight))
        _check(fit)
        yield from _steal_mlp(model, block, seen)
        norm, group = _next(model, index)
        # of a prompt that is answered, the output head is given the last token alone: such prompts are left out
        whole = torch.cat([torch.full((one.num_tokens,), _is_whole(one, group)) for one in seen])
        given, before = _rows(seen, block.down.group)[whole], fit.after[whole]
        variants = _variants([one for one in seen if _is_whole(one, group)], group)
        fit = min((_fit(block.down, given, before, norm, rows) for rows in variants), key=lambda one: one.error)
        yield StolenDelta(block.down.name, fit.weight - norm.visible(block.down.weight))
        _check(fit)
        stream = fit.after
        if not bool(whole.all()):
            return


def _next(model: PublicModel, index: int) -> tuple[Norm, int]:
    """The norm after a block, and the group that is given its output."""
    if index + 1 < len(model.blocks):
        return model.blocks[index + 1].attention_norm, model.blocks[index + 1].q.group
    if model.head_group is None:
        raise _Stop
    return model.final_norm, model.head_group


def _variants(seen: list[Prompt], group: int) -> list[torch.Tensor]:
    """What a group was given, by each of its requests in a pass: of different inputs, one may be the plain one."""
    found = [_rows(seen, group)]
    for place in range(min(len(prompt.repeats.get(group, ())) for prompt in seen)):
        found.append(torch.cat([prompt.repeats[group][place] for prompt in seen]))
    return found


def _is_whole(prompt: Prompt, group: int) -> bool:
    return group in prompt.rows and prompt.rows[group].shape[0] == prompt.num_tokens


def _rows(seen: list[Prompt], group: int) -> torch.Tensor:
    if not seen or not all(_is_whole(prompt, group) for prompt in seen):
        raise _Stop  # not recorded
    return torch.cat([prompt.rows[group] for prompt in seen])


def _fit(layer: Layer, given: torch.Tensor, before: torch.Tensor, norm: Norm, normed: torch.Tensor) -> residual.Fit:
    predicted = before + layer(given)
    if _relative(norm(predicted), normed) < _UNCHANGED:
        return residual.Fit(norm.visible(layer.weight), norm.visible(predicted), 0.0)
    if not residual.has_enough_rows(layer, given.shape[0]):
        raise _Stop
    return residual.fit_layer(layer, given, before, norm, normed)


def _check(fit: residual.Fit) -> None:
    """Ends the recursion where the rows are not what a layer was given: what lies above would be noise from noise."""
    if not fit.error < _HOPELESS:
        raise _Stop


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def _steal_transforms(block: Block, seen: list[Prompt], normed: torch.Tensor) -> list[Claim]:
    """ΔW of methods that change a layer's input (IA3, OFT, BOFT): then q, k and v are asked for one by one.

    The input before the change is known, so the change is the linear map from it to what each member was given.
    """
    if not all(len(prompt.repeats.get(block.q.group, ())) == _MEMBERS - 1 for prompt in seen):
        return []
    if normed.shape[0] < normed.shape[1]:
        return []
    claims: list[Claim] = []
    for place, layer in enumerate((block.q, block.k, block.v)):
        given = [
            prompt.rows[block.q.group] if place == 0 else prompt.repeats[block.q.group][place - 1] for prompt in seen
        ]
        change = torch.linalg.lstsq(normed, torch.cat(given), driver="gelsd").solution
        claims.append(StolenDelta(layer.name, change @ layer.weight - layer.weight))
    return claims


def _steal_attention(model: PublicModel, block: Block, seen: list[Prompt]) -> Iterator[Claim]:
    _rows(seen, block.o.group)
    given = [prompt.rows[block.q.group] for prompt in seen]
    outputs = [prompt.rows[block.o.group] for prompt in seen]
    public = [layer.weight for layer in (block.q, block.k, block.v)]
    with torch.no_grad():
        unchanged = all(
            _relative(attention.attention(block, model, public, rows[None])[0], out) < _UNCHANGED
            for rows, out in zip(given, outputs, strict=True)
        )
    if unchanged:
        weights = public
    else:
        found = attention.fit_values(block, model, given, outputs)
        if found.error > _EXPLAINED:  # q or k was changed too
            first = torch.stack([rows[0] for rows in given]), torch.stack([rows[0] for rows in outputs])
            v = attention.fit_first_position(block, model, *first)
            found = attention.fit_all(block, model, given, outputs, v)
        weights = [found.q, found.k, found.v]
    for layer, weight in zip((block.q, block.k, block.v), weights, strict=True):
        yield StolenDelta(layer.name, weight - layer.weight)


def _steal_mlp(model: PublicModel, block: Block, seen: list[Prompt]) -> Iterator[Claim]:
    given, outputs = _rows(seen, block.up[0].group), _rows(seen, block.down.group)
    if not mlp.has_enough_rows(block.up, given.shape[0]):
        return
    if mlp.error_of(block.up, model.activation, given, outputs) < _UNCHANGED:
        for layer in block.up:
            yield StolenDelta(layer.name, torch.zeros_like(layer.weight))
        return
    found = mlp.fit_mlp(block.up, model.activation, given, outputs)
    if found is None:
        return
    for layer, weight in zip(block.up, found[0], strict=True):
        yield StolenDelta(layer.name, weight - layer.weight)


ADVERSARY = Adversary("closed-form", "every base layer's ΔW from plain activations, block after block", _attack)
