"""Recovers the whole adapter of a model whose activations are visible, block by block from the embedding upwards.

Tokens come from the first layer's input, residuals from `residual.py`, attention from `attention.py` and the MLP from
`mlp.py`. A layer is reported as unchanged if its public weights already explain its rows. If there are too few tokens
for an o_proj or down_proj that was changed, the recursion ends and nothing is claimed above that layer. If there are
too few for other layers, only these are not claimed. The last down_proj can be read if the output head is a base layer.
Otherwise no provider sees what comes after that layer, and only the gradients of a training step of the same adapter
reveal it (`gradient_equations`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from attacks.adversaries import attention, gradients, mlp, residual, ring_scales
from attacks.adversaries.prompt_inversion import lookup
from attacks.seen.adversary import Adversary, Claim, StolenDelta
from attacks.seen.forward_passes import Opened, Prompt, prompts
from attacks.seen.public_model import Block, Layer, Norm, PublicModel
from attacks.seen.view import View

_UNCHANGED = 1e-5
"""The relative error up to which public weights explain the rows; fp32 rounding of a layer leaves 1e-6 to 1e-7."""


_ROUNDED, _ROUNDED_TWICE = 1e-4, 2e-3
"""In ring arithmetic `_ROUNDED` replaces `_UNCHANGED`, because rows were rounded to the ring's integers.
`_ROUNDED_TWICE` is the bound for fits of attention and MLPs, whose inputs and outputs were both rounded. This leaves
errors of 3e-4 on SmolLM2."""
_MAX_DESCENT_S = 60.0
"""The seconds of this thread's own time, from the start of the attack, after which nothing is claimed about layers that
need a descent. On SmolLM2 rounding accumulates, so that a descent is needed, and it takes minutes for each block."""
_THROUGH_MLP = 10.0
"""In ring arithmetic, the factor by which the error of an MLP with public weights may exceed that of the residual
stream, from which the MLP's input is computed."""
_MEMBERS = 3
"""The number of members of an attention group: q, k and v."""
_EXPLAINED = 1e-4
_HOPELESS = 0.3
"""The relative misfit of a residual beyond which rows count as masked: unmasked rows leave 1e-4 or less, masked rows
0.6 or more."""


class _Stop(Exception):
    """Ends the recursion over blocks; it is raised if the recursion cannot go on."""


def _attack(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    seen = [prompt for prompt in prompts(view.with_tensors(), opened) if _is_readable(prompt, model)]
    scaled = any(message.arithmetic == "ring" for message in view.select("product"))
    seen = [_to_size(prompt, model) for prompt in seen] if scaled else seen
    claims: list[Claim] = []
    if seen:
        try:
            for claim in _steal(model, seen, scaled):
                claims.append(claim)
        except (_Stop, LinAlgError):
            pass
        stolen = {claim.layer: claim.delta for claim in claims if isinstance(claim, StolenDelta)}
        last = gradients.last_down(view, model, opened, stolen)
        claims += [] if last is None else [last]
    return claims


def _is_readable(prompt: Prompt, model: PublicModel) -> bool:
    """Returns whether a prompt's tokens can be read.

    All rows of the first layer must be recorded, and the model must have a position for each of them.
    """
    longest = prompt.num_tokens if model.positions is None else model.positions.shape[0]
    return _is_whole(prompt, model.blocks[0].q.group) and 0 < prompt.num_tokens <= longest


def _to_size(prompt: Prompt, model: PublicModel) -> Prompt:
    """Returns the prompt with the output rows of norm layers scaled to their true size, since ring arithmetic shows
    each row only up to a factor."""
    norms = {**model.normed_inputs(), **({} if model.head_group is None else {model.head_group: model.final_norm})}
    rows = {
        group: ring_scales.rescaled(norms[group], rows) if group in norms else rows
        for group, rows in prompt.rows.items()
    }
    return replace(prompt, rows=rows)


def _steal(model: PublicModel, seen: list[Prompt], scaled: bool) -> Iterator[Claim]:
    """Yields claims about the adapter's change of each layer, block by block from the first.

    Args:
        model: the public model.
        seen: the prompts of the view.
        scaled: whether each row is known only up to a secret factor, as in ring arithmetic.

    Raises:
        _Stop: rows that the next claims need were not recorded.
    """
    starts = [model.residual_start(lookup(prompt.rows[model.blocks[0].q.group], model)) for prompt in seen]
    stream = torch.cat(starts)
    sound = torch.ones(stream.shape[0], dtype=torch.bool)
    deadline = time.thread_time() + _MAX_DESCENT_S
    for index, block in enumerate(model.blocks):
        # o_proj and down_proj are fitted first: this shows the factors of rows, and which rows were unmasked wrongly
        after_o = _fit_o(block, seen, stream, sound, scaled)
        if after_o is not None:
            sound = after_o.sound
        normed = block.attention_norm(stream)
        if scaled and after_o is not None:
            seen = _put(seen, block.o.group, _rows(seen, block.o.group) * after_o.scales[:, None])
            seen = _put(seen, block.up[0].group, block.mlp_norm(after_o.after))
        transformed = _steal_transforms(model, block, seen, normed, sound, scaled)
        if transformed:
            yield from transformed
        elif after_o is not None or not scaled:
            given = _put(seen, block.q.group, normed) if scaled else seen
            yield from _steal_attention(model, block, given, sound, scaled, deadline)
        if after_o is None or not math.isfinite(after_o.error):
            return
        yield StolenDelta(block.o.name, after_o.weight - block.mlp_norm.visible(block.o.weight))
        if not after_o.error < _HOPELESS:
            return
        after_down = _fit_down(model, index, seen, after_o, scaled)
        if after_down is not None and (scaled or index + 1 < len(model.blocks)):
            sound = after_down.sound
        if scaled and after_down is not None:
            seen = _put(seen, block.down.group, _rows(seen, block.down.group) * after_down.scales[:, None])
        if not scaled or after_down is not None:
            rounded = max(_ROUNDED_TWICE, _THROUGH_MLP * after_o.error)
            yield from _steal_mlp(model, block, seen, sound, rounded if scaled else _UNCHANGED, deadline)
        if after_down is None or not math.isfinite(after_down.error):
            return
        norm, _ = _next(model, index)
        yield StolenDelta(block.down.name, after_down.weight - norm.visible(block.down.weight))
        if not after_down.error < _HOPELESS:
            return
        stream = after_down.after


def _put(seen: list[Prompt], group: int, rows: torch.Tensor) -> list[Prompt]:
    """Returns the prompts with the rows of one group replaced; `rows` holds the new rows of all prompts, one prompt
    after another."""
    parts = rows.split([prompt.num_tokens for prompt in seen])
    return [replace(prompt, rows={**prompt.rows, group: part}) for prompt, part in zip(seen, parts, strict=True)]


def _next(model: PublicModel, index: int) -> tuple[Norm, int]:
    """Returns the norm after a block, and the id of the group (layers that read the same input) that receives the
    norm's output.

    Raises:
        _Stop: the norm is the last one, and the output head stays with the tenant.
    """
    if index + 1 < len(model.blocks):
        return model.blocks[index + 1].attention_norm, model.blocks[index + 1].q.group
    if model.head_group is None:
        raise _Stop
    return model.final_norm, model.head_group


def _variants(seen: list[Prompt], group: int) -> list[torch.Tensor]:
    """Returns a group's inputs, one tensor for each request of the group in a pass. If the inputs differ, the adapter
    changed some of them, and one may be the unchanged input."""
    found = [_rows(seen, group)]
    for place in range(min(len(prompt.repeats.get(group, ())) for prompt in seen)):
        found.append(torch.cat([prompt.repeats[group][place] for prompt in seen]))
    return found


def _is_whole(prompt: Prompt, group: int) -> bool:
    return group in prompt.rows and prompt.rows[group].shape[0] == prompt.num_tokens


def _rows(seen: list[Prompt], group: int) -> torch.Tensor:
    if not seen or not all(_is_whole(prompt, group) for prompt in seen):
        raise _Stop  # the rows were not recorded
    return torch.cat([prompt.rows[group] for prompt in seen])


def _fit_o(
    block: Block, seen: list[Prompt], stream: torch.Tensor, sound: torch.Tensor, scaled: bool
) -> residual.Fit | None:
    """Fits o_proj, which lies between the residual stream `stream` and the MLP's norm. Returns None if rows were not
    recorded or are too few. `sound` marks the tokens that no earlier fit showed to be wrong."""
    try:
        given, normed = _rows(seen, block.o.group), _rows(seen, block.up[0].group)
        return _fit(block.o, given, stream, block.mlp_norm, normed, sound, scaled)
    except _Stop:
        return None


def _fit_down(
    model: PublicModel, index: int, seen: list[Prompt], before: residual.Fit, scaled: bool
) -> residual.Fit | None:
    """Fits down_proj, which lies between the residual stream `before.after` and the norm of the next block or of the
    head. Returns None if rows are too few or were not recorded, as for the last norm if the head stays with the
    tenant."""
    down = model.blocks[index].down
    try:
        norm, group = _next(model, index)
        given = _rows(seen, down.group)
        # if generation follows a prompt, the output head gets only the last token of the prompt, so the prompt is left
        # out
        whole = torch.cat([torch.full((one.num_tokens,), _is_whole(one, group)) for one in seen])
        fits = []
        for rows in _variants([one for one in seen if _is_whole(one, group)], group):
            normed = torch.zeros(whole.shape[0], rows.shape[1], dtype=rows.dtype)
            normed[whole] = rows
            fits.append(_fit(down, given, before.after, norm, normed, before.sound & whole, scaled))
    except _Stop:
        return None
    return min(fits, key=lambda one: one.error)


def _fit(
    layer: Layer,
    given: torch.Tensor,
    before: torch.Tensor,
    norm: Norm,
    normed: torch.Tensor,
    sound: torch.Tensor,
    scaled: bool,
) -> residual.Fit:
    """Fits the layer from the sound tokens, which are those that no earlier fit showed to be wrong. Every tensor has
    one row for each token, sound or not.

    Raises:
        _Stop: there are too few sound tokens.
    """
    if not bool(sound.any()):
        raise _Stop
    given, before, normed = given[sound], before[sound], normed[sound]
    how = ring_scales if scaled else residual
    fit: residual.Fit
    missed, fit = how.explained(layer, given, before, norm, normed)
    fits = missed < (_ROUNDED if scaled else _UNCHANGED)
    if int(fits.sum()) >= residual.FEWEST * fits.shape[0]:
        fit = replace(fit, sound=fits)
    elif how.has_enough_rows(layer, given.shape[0]):
        fit = how.fit_layer(layer, given, before, norm, normed)
    else:
        raise _Stop
    after = torch.zeros(sound.shape[0], fit.after.shape[1], dtype=fit.after.dtype)
    scales, all_sound = torch.zeros(sound.shape[0], dtype=fit.scales.dtype), sound.clone()
    after[sound], scales[sound], all_sound[sound] = fit.after, fit.scales, fit.sound
    return replace(fit, after=after, scales=scales, sound=all_sound)


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def _steal_transforms(
    model: PublicModel, block: Block, seen: list[Prompt], normed: torch.Tensor, sound: torch.Tensor, scaled: bool
) -> list[Claim]:
    """Returns claims of ΔW of q, k and v, for adapters that change a layer's input (IA3, OFT, BOFT) and so request q, k
    and v one by one. Returns an empty list if they were not requested so, or if there are too few tokens.

    The input before the change is known, so the change is the linear map from this input to the recorded input of q, k
    or v. Rows that are known only up to a factor are assumed to be as large as before the change, because OFT and BOFT
    rotate them. BOFT's factors of outputs are taken from the attention's output if such factors explain that output.
    """
    if not all(len(prompt.repeats.get(block.q.group, ())) == _MEMBERS - 1 for prompt in seen):
        return []
    if int(sound.sum()) < normed.shape[1]:
        return []
    layers, weights = (block.q, block.k, block.v), []
    for place, layer in enumerate(layers):
        rows = torch.cat(
            [prompt.rows[block.q.group] if place == 0 else prompt.repeats[block.q.group][place - 1] for prompt in seen]
        )
        if scaled:
            rows = rows * (normed.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True).clamp_min(1e-300))
        change = torch.linalg.lstsq(normed[sound], rows[sound], driver="gelsd").solution
        weights.append(change @ layer.weight)
    if all(_is_whole(prompt, block.o.group) for prompt in seen):
        given = list(normed.split([prompt.num_tokens for prompt in seen]))
        found = attention.fit_scales(block, model, weights, given, [prompt.rows[block.o.group] for prompt in seen])
        if found.error < _EXPLAINED:
            weights = [found.q, found.k, found.v]
    return [StolenDelta(layer.name, weight - layer.weight) for layer, weight in zip(layers, weights, strict=True)]


def _steal_attention(
    model: PublicModel, block: Block, seen: list[Prompt], sound: torch.Tensor, scaled: bool, deadline: float
) -> Iterator[Claim]:
    _rows(seen, block.o.group)
    whole = torch.tensor([bool(part.all()) for part in sound.split([prompt.num_tokens for prompt in seen])])
    if int(whole.sum()) < residual.FEWEST / 2 * len(seen):
        return
    used = [prompt for prompt, is_sound in zip(seen, whole.tolist(), strict=True) if is_sound]
    given = [prompt.rows[block.q.group] for prompt in used]
    outputs = [prompt.rows[block.o.group] for prompt in used]
    public = [layer.weight for layer in (block.q, block.k, block.v)]
    tolerance, explained = (_ROUNDED, _ROUNDED_TWICE) if scaled else (_UNCHANGED, _EXPLAINED)
    with torch.no_grad():
        unchanged = all(
            _relative(attention.attention(block, model, public, rows[None])[0], out) < tolerance
            for rows, out in zip(given, outputs, strict=True)
        )
    if unchanged:
        weights = public
    else:
        found = attention.fit_values(block, model, given, outputs)
        if found.error > explained:  # the adapter changed q or k, too
            v = _first_values(block, model, given, outputs, tolerance)
            found = _fit_scores(block, model, v, given, outputs)
            if found.error > explained:
                if time.thread_time() >= deadline:
                    return  # there is no time to search, so nothing is claimed
                found = attention.fit_all(block, model, given, outputs, v)
        weights = [found.q, found.k, found.v]
    for layer, weight in zip((block.q, block.k, block.v), weights, strict=True):
        yield StolenDelta(layer.name, weight - layer.weight)


def _first_values(
    block: Block, model: PublicModel, given: list[torch.Tensor], outputs: list[torch.Tensor], tolerance: float
) -> torch.Tensor | None:
    """Returns W_v + ΔW_v from position 0: the public W_v if it explains that position, otherwise the result of
    `attention.fit_first_position`, which is None if the prompts do not suffice."""
    rows, seen = torch.stack([one[:1] for one in given]), torch.stack([one[:1] for one in outputs])
    public = [layer.weight for layer in (block.q, block.k, block.v)]
    if _relative(attention.attention(block, model, public, rows), seen) < tolerance:
        return block.v.weight
    return attention.fit_first_position(block, model, rows[:, 0], seen[:, 0])


def _fit_scores(
    block: Block, model: PublicModel, v: torch.Tensor | None, given: list[torch.Tensor], outputs: list[torch.Tensor]
) -> attention.Heads:
    """Fits q and k from the probabilities of the softmax; the returned error is infinite if that is not possible."""
    solved = None if v is None else attention.solve_scores(block, model, v, given, outputs)
    if v is None or solved is None:
        return attention.Heads(block.q.weight, block.k.weight, block.v.weight, float("inf"))
    return attention.tried(block, model, (*solved, v), given, outputs)


def _steal_mlp(
    model: PublicModel, block: Block, seen: list[Prompt], sound: torch.Tensor, tolerance: float, deadline: float
) -> Iterator[Claim]:
    given, outputs = _rows(seen, block.up[0].group)[sound], _rows(seen, block.down.group)[sound]
    if not mlp.has_enough_rows(block.up, given.shape[0]):
        return
    if mlp.error_of(block.up, model.activation, given, outputs) < tolerance:
        for layer in block.up:
            yield StolenDelta(layer.name, torch.zeros_like(layer.weight))
        return
    found = mlp.fit_mlp(block.up, model.activation, given, outputs, deadline)
    if found is None:
        return
    for layer, weight in zip(block.up, found[0], strict=True):
        yield StolenDelta(layer.name, weight - layer.weight)


CLOSED_FORM = Adversary("closed-form", "every base layer's ΔW from plain activations, block after block", _attack)
