"""Trains a functional copy of the adapter, by fitting the public model plus low-rank factors to the recorded rows.

Tokens come from the first layer's input. Then each block is trained in turn, with a low-rank ΔW in every base layer,
until the inputs of the block's layers and of the next block have the directions of the recorded inputs. Only directions
of rows are compared, so that the secret scale of a row in ring arithmetic does not matter. If only the direction of a
layer's output is known, the layer's scale follows from the low rank of ΔW. Rows that do not fit are left out, such as
those that another adversary unmasked wrongly.

The adversary claims nothing if the first layer's rows are not those of tokens, if nothing fits because there is a mask,
or if there are fewer tokens than the factors need. The training need not reach a minimum: it ends after 300 steps for
each block, or after `_MAX_S` seconds in all. On SmolLM2, 90 s were enough for two of 30 blocks and gave no useful copy.
The cosines with ΔW were 0.5 for v_proj, 0.25 for o_proj and 0.03 for down_proj (192 tokens, one core). So a low value
on a real model shows only that the training was short. A ΔW of higher rank than `_RANK` is approximated. Methods that
change a layer's input (OFT, BOFT) do not have this form. They request a group several times in a pass, which ends the
attack.
Source: substitute models of Papernot et al., "Practical black-box attacks" (AsiaCCS 2017), here taught by hidden
states; the rest is ours.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import normalize

from attacks.adversaries import attention, mlp
from attacks.adversaries.prompt_inversion import lookup
from attacks.seen.adversary import Adversary, Claim, StolenDelta
from attacks.seen.forward_passes import Opened, forward_passes, places
from attacks.seen.public_model import Layer, PublicModel
from attacks.seen.view import View

_RANK = 8
"""The rank of the factors. It is the rank of the full profile's adapter, and twice the rank of the quick profile's
adapter."""
_STEPS, _CHUNK = (40, 60, 200), 10
"""The numbers of steps in the three parts of a block's training. The clock is checked after every `_CHUNK` steps."""
_HISTORY = 50
"""The number of past steps that L-BFGS keeps, as in attention.py."""
_MAX_S = 30.0
"""The most seconds of training in all, which is a chosen budget and not a measured need. They are this thread's own, so
that what else the machine does changes no result."""
_MAX_NUMBERS = 1 << 17
"""The most numbers of the first layer's rows that are used. These are 227 tokens of SmolLM2, or 4,096 tokens of a model
with hidden size 32."""
_WIDE = 256
"""If the hidden size is at least this, training uses float32 instead of float64."""
_HOPELESS = 0.5
"""A fit is given up if the distance between unit rows is at least this. An unrelated row has a distance of 1.4, and the
nearest of 1,000 tokens one of 0.9 (at hidden size 32)."""
_UNCHANGED = 1e-5
"""The distance up to which public weights explain the rows; float32 and ring rounding leave 1e-6."""
_FAR, _MOST_LEFT_OUT = 6.0, 0.25
"""After the first steps, a row counts as wrong if its distance is more than `_FAR` times the median distance of its
group's rows. If a share of `_MOST_LEFT_OUT` or more would count as wrong, no row does."""
_DAMPING = 1e-2
"""The damping, as a share of the mean variance of a layer's inputs. It limits how much directions with less variance
than this are amplified."""
_START = 0.05
"""The first guess of the singular values of ΔW, as a share of those of W. It keeps both factors of ΔW at similar sizes,
since factors of very different sizes train slowly."""


@dataclass(frozen=True)
class _Batch:
    """Holds prompts of one length for which the same groups were recorded.

    Attributes:
        stream: the residual before the block, shape (num_prompts, num_tokens, hidden).
        seen: maps a group id to rows scaled to unit length, or zeros for rows that are left out; shape (num_prompts,
            num_tokens, in_features).
    """

    stream: torch.Tensor
    seen: Mapping[int, torch.Tensor]


def _attack(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    if not mlp.is_known(model.activation):
        return []
    batches = _read(view.with_tensors(), model, opened)
    num_tokens = sum(batch.stream.shape[:2].numel() for batch in batches)
    claims: list[Claim] = []
    if not all(_has_enough_rows(layer, num_tokens) for layer in model.layers().values()):
        return claims
    deadline = time.thread_time() + _MAX_S
    for index in range(len(model.blocks)):
        substitute = _Substitute(model, index, batches)
        if time.thread_time() > deadline or not substitute.train(deadline):
            break
        claims += substitute.claims()
        if not substitute.is_closed:
            break
        batches = substitute.advance()
    return claims


def _has_enough_rows(layer: Layer, num_tokens: int) -> bool:
    """Returns whether there are enough tokens: the layer's outputs must have at least twice as many numbers as the
    factors of its ΔW."""
    return num_tokens * layer.weight.shape[1] >= 2 * _RANK * sum(layer.weight.shape)


def _read(view: View, model: PublicModel, opened: Opened | None) -> list[_Batch]:
    """Returns, in batches, the prompts whose tokens can be read from the first layer's rows, up to `_MAX_NUMBERS`
    numbers in all. Returns none if a group was requested several times in one pass."""
    if any(one.repeats for one in forward_passes(view) if not one.is_training):
        return []
    first, norm = model.blocks[0].q.group, model.blocks[0].attention_norm
    starts: dict[int, torch.Tensor] = {}
    left = _MAX_NUMBERS
    for number, groups in _rows(view, opened, {first}).items():
        rows = normalize(groups[first], dim=1)
        if not 0 < rows.numel() <= left or (model.positions is not None and rows.shape[0] > model.positions.shape[0]):
            continue
        start = model.residual_start(lookup(rows, model))
        if float((normalize(norm(start), dim=1) - rows).norm(dim=1).max()) < _HOPELESS:
            starts[number] = start
            left -= rows.numel()
    dtype = torch.float32 if model.embedding.shape[1] >= _WIDE else torch.float64
    alike: dict[tuple[int, ...], list[tuple[torch.Tensor, Mapping[int, torch.Tensor]]]] = {}
    for number, groups in _rows(view, opened, None, starts).items():
        start = starts[number].to(dtype)
        seen = {
            group: normalize(rows, dim=1).nan_to_num().to(dtype)
            for group, rows in groups.items()
            if rows.shape[0] == start.shape[0]
        }
        alike.setdefault((start.shape[0], *sorted(seen)), []).append((start, seen))
    return [
        _Batch(torch.stack([start for start, _ in some]), {g: torch.stack([seen[g] for _, seen in some]) for g in key})
        for (_, *key), some in alike.items()
    ]


def _rows(
    view: View, opened: Opened | None, only: Collection[int] | None, numbers: Collection[int] | None = None
) -> dict[int, dict[int, torch.Tensor]]:
    """Returns rows of some groups and prompts, float64, as a mapping from the prompt's number in
    `forward_passes.prompts` to a mapping from group id to rows.

    Args:
        view: the view of one tenant.
        opened: rows to use in place of the recorded ones.
        only: the groups; None means all.
        numbers: the prompts; None means all.
    """
    at = places(view)
    parts: dict[int, dict[int, list[torch.Tensor]]] = {}
    for message in view.select("product", "forward"):
        if message.seq not in at or (only is not None and message.group not in only):
            continue
        number = at[message.seq][0]
        if (numbers is None or number in numbers) and (opened is None or message.seq in opened):
            rows = message.request() if opened is None else opened[message.seq]
            parts.setdefault(number, {}).setdefault(message.group, []).append(rows.to(torch.float64))
    return {
        number: {group: torch.cat(several) for group, several in groups.items()} for number, groups in parts.items()
    }


class _Substitute:
    """Trains low-rank factors of ΔW for every layer of one block. The norm after the block is part of the fit."""

    def __init__(self, model: PublicModel, index: int, batches: Sequence[_Batch]) -> None:
        dtype = batches[0].stream.dtype
        last = index + 1 == len(model.blocks)
        norm = model.final_norm if last else model.blocks[index + 1].attention_norm
        group = model.head_group if last else model.blocks[index + 1].q.group
        self._model, self._block, self._batches = model, model.blocks[index].to(dtype), list(batches)
        self._next_norm, self._next = norm.to(dtype), -1 if group is None else group
        block = self._block
        self._layers = (block.q, block.k, block.v, block.o, *block.up, block.down)
        self._factors: list[torch.Tensor] = []
        self._stretch: list[torch.Tensor] = []

    def train(self, until: float) -> bool:
        """Trains the block, and returns whether it explains the recorded rows.

        Args:
            until: the deadline on the clock of time.thread_time(); what was reached by then is kept.
        """
        changes = [torch.zeros_like(layer.weight, requires_grad=True) for layer in self._layers]
        loss = self._loss([layer.weight + change for layer, change in zip(self._layers, changes, strict=True)])
        if not loss.requires_grad:  # no row of this block was recorded
            return False
        slopes = torch.autograd.grad(loss, changes, allow_unused=True)
        self._start([torch.zeros_like(c) if s is None else s for c, s in zip(changes, slopes, strict=True)])
        if float(loss.detach()) > _UNCHANGED**2:
            self._descend(until)
        with torch.no_grad():
            return float(self._loss(self._weights())) < _HOPELESS**2

    def claims(self) -> Iterator[StolenDelta]:
        """Yields ΔW of every layer whose output influences rows that were recorded."""
        block = self._block
        after = [block.o.group] * 3 + [block.up[0].group] + [block.down.group] * len(block.up) + [self._next]
        end = max(place for place, group in enumerate(after) if self._is_seen(group)) + 1
        for layer, weight in list(zip(self._layers, self._weights(), strict=True))[:end]:
            yield StolenDelta(layer.name, (weight - layer.weight).detach().to(torch.float64))

    @property
    def is_closed(self) -> bool:
        """Returns whether the output of the norm after the block was recorded. Only then is the next block trained."""
        return self._is_seen(self._next)

    def _is_seen(self, group: int) -> bool:
        return any(group in batch.seen for batch in self._batches)

    def advance(self) -> list[_Batch]:
        """Returns the batches with the residual stream after the block. Where the next norm's output was recorded, a
        row of the stream gets its exact direction from that output."""
        batches = []
        for batch in self._batches:
            with torch.no_grad():
                predicted, stream = self._run(batch, self._weights())
            seen = batch.seen.get(self._next)
            if seen is not None:
                scale = (predicted[self._next] * seen).sum(-1, keepdim=True)
                way = normalize(self._next_norm.direction(scale * seen), dim=-1)
                size = (self._next_norm.visible(stream) * way).sum(-1, keepdim=True)
                stream = torch.where(_is_known(seen)[..., None], size * way, stream)
            batches.append(_Batch(stream, batch.seen))
        return batches

    def _start(self, slopes: Sequence[torch.Tensor]) -> None:
        """Sets the first factors of every layer's change ΔW = S·A·B.

        S whitens the layer's inputs, and A holds the directions of steepest descent. B is zero, so that ΔW is zero at
        the start. The seed of the random numbers is fixed, since nothing secret depends on them.

        Args:
            slopes: for each layer, the gradient of the loss by the layer's weight, in the shape of the weight.

        Source: the initialisation of LoRA-GA (NeurIPS 2024).
        """
        generator = torch.Generator().manual_seed(0)
        for layer, slope, square in zip(self._layers, slopes, self._squares(), strict=True):
            root, _ = torch.linalg.cholesky_ex(square)
            unit = torch.eye(square.shape[0], dtype=square.dtype)
            stretch = torch.linalg.solve_triangular(root.T, unit, upper=True)
            rank = min(_RANK, *layer.weight.shape)
            steep = stretch.T @ slope
            sketch = steep @ torch.randn(slope.shape[1], rank, generator=generator, dtype=slope.dtype)
            sketch = torch.linalg.qr(steep @ (steep.T @ sketch)).Q.contiguous()
            size = (root.T @ layer.weight).norm() / min(layer.weight.shape) ** 0.5
            self._stretch.append(stretch)
            self._factors.append((sketch * (_START * size) ** 0.5).requires_grad_())
            self._factors.append(torch.zeros(rank, slope.shape[1], dtype=slope.dtype, requires_grad=True))

    def _squares(self) -> list[torch.Tensor]:
        """Returns, for each layer, XᵀX of the layer's inputs X in the public model, as a mean over tokens, plus
        damping."""
        block = self._block
        groups = (block.q.group, block.o.group, block.up[0].group, block.down.group)
        sums = {group: torch.zeros(()) for group in groups}
        with torch.no_grad():
            for batch in self._batches:
                given, _ = self._run(batch, [layer.weight for layer in self._layers])
                given[block.q.group] = block.attention_norm(batch.stream)
                for group in groups:
                    rows = given[group].flatten(0, 1)
                    sums[group] = sums[group] + rows.T @ rows
        num_tokens = sum(batch.stream.shape[:2].numel() for batch in self._batches)
        for group, total in sums.items():
            size = total.diagonal().mean()
            sums[group] = (total + _DAMPING * size * torch.eye(total.shape[0], dtype=total.dtype)) / num_tokens
        return [sums[layer.group] for layer in self._layers]

    def _descend(self, until: float) -> None:
        """Trains in three parts, and ends early if the distance does not fall below `_HOPELESS` or if time is up. After
        each of the first two parts, rows that do not fit are left out. Two such rounds are needed, because wrong rows
        distort the first fit and so hide other wrong rows."""
        for num_steps in _STEPS:
            if not self._improve(num_steps, until) < _HOPELESS**2:
                return
            if num_steps != _STEPS[-1]:
                self._leave_out()

    def _improve(self, num_steps: int, until: float) -> float:
        """Runs the optimizer for a number of steps or until a deadline. Returns the loss before the last `_CHUNK`
        steps; infinite if there was no time."""
        optimizer = torch.optim.LBFGS(
            self._factors, max_iter=_CHUNK, max_eval=2 * _CHUNK, history_size=_HISTORY,
            tolerance_grad=1e-14, tolerance_change=1e-16, line_search_fn="strong_wolfe",
        )  # fmt: skip

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            total = self._loss(self._weights())
            total.backward()  # type: ignore[no-untyped-call]
            return total.detach()

        before = torch.inf
        for _ in range(0, num_steps, _CHUNK):
            if time.thread_time() < until:
                before = float(optimizer.step(loss))  # type: ignore[no-untyped-call]
        return before

    def _leave_out(self) -> None:
        """Leaves out rows whose distance is far above the median of their group. If this would leave out many rows,
        none is left out, because wrong rows should be the exception."""
        with torch.no_grad():
            missed = [self._missed(batch, self._weights()) for batch in self._batches]
        for group in {group for each in missed for group in each}:
            distances = torch.cat([each[group].flatten() for each in missed if group in each]).sqrt()
            bound = float(_FAR * distances.quantile(0.5))
            if not 0 < int((distances > bound).sum()) < _MOST_LEFT_OUT * distances.numel():
                continue
            for place, (batch, each) in enumerate(zip(self._batches, missed, strict=True)):
                if group in each:
                    kept = batch.seen[group] * (each[group].sqrt() <= bound)[..., None]
                    self._batches[place] = _Batch(batch.stream, {**batch.seen, group: kept})

    def _weights(self) -> list[torch.Tensor]:
        pairs = zip(self._factors[::2], self._factors[1::2], strict=True)
        return [
            layer.weight + stretch @ a @ b
            for layer, stretch, (a, b) in zip(self._layers, self._stretch, pairs, strict=True)
        ]

    def _loss(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the mean squared distance between predicted and recorded unit rows. The mean is over the rows of each
        group, and then over groups."""
        sums: dict[int, torch.Tensor] = {}
        counts: dict[int, int] = {}
        for batch in self._batches:
            for group, missed in self._missed(batch, weights).items():
                sums[group] = sums.get(group, torch.zeros(())) + missed.sum()
                counts[group] = counts.get(group, 0) + int(_is_known(batch.seen[group]).sum())
        return sum((total / max(counts[g], 1) for g, total in sums.items()), torch.zeros(())) / max(len(sums), 1)

    def _missed(self, batch: _Batch, weights: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Returns the squared distance of each row's direction from the recorded one, shape (num_prompts, num_tokens);
        zero for rows that are left out."""
        predicted, _ = self._run(batch, weights)
        return {
            group: (normalize(rows, dim=-1) - batch.seen[group]).pow(2).sum(-1) * _is_known(batch.seen[group])
            for group, rows in predicted.items()
            if group in batch.seen
        }

    def _run(self, batch: _Batch, weights: Sequence[torch.Tensor]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """Runs the block. Returns the predicted inputs, by group id, of all groups after that of q, k and v up to the
        first group of the next block, and the residual after the block."""
        block, (q, k, v, *others) = self._block, weights
        o, *up, down = (replace(one, weight=w) for one, w in zip(self._layers[3:], others, strict=True))
        mixed = attention.attention(block, self._model, (q, k, v), block.attention_norm(batch.stream))
        stream = batch.stream + o(mixed)
        normed = block.mlp_norm(stream)
        inner = mlp.predict(self._model.activation, [layer(normed) for layer in up])
        stream = stream + down(inner)
        given = {block.o.group: mixed, block.up[0].group: normed, block.down.group: inner}
        return given | {self._next: self._next_norm(stream)}, stream


def _is_known(seen: torch.Tensor) -> torch.Tensor:
    """Returns which rows of `seen` were recorded and not left out: bool, shape (num_prompts, num_tokens)."""
    return seen.any(-1)


SUBSTITUTE = Adversary("substitute", "a copy of the adapter by training, from the directions of rows alone", _attack)
