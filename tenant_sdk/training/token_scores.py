"""This module scores next tokens in chunks of rows: log-probability, entropy, mean logit, and whether
the label is the likeliest token.

Evaluation and DPO need numbers for each token and not one loss for a batch. As in chunked_loss.py, the logits of a
whole batch never exist at once, and a chunk's gradient is taken with the chunk: a row's log-probability depends on this
row of the head's input alone, so its gradient only has to be scaled later.

Guarantees: scores equal those of the model's own logits, except for the order of sums. The head gets the rows that
`chunk_loss` would give it: where the provider holds it, all rows of each position at which some row has a label, or
every row. Not guaranteed: gradients of the head's own parameters; there are none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.training.chunked_loss import LOCAL_CHUNK_BYTES, REMOTE_CHUNK_BYTES, Finish, HeadInput, probe
from tenant_sdk.training.labelled_tokens import IGNORE_INDEX

_LogitsOf = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Scores:
    """Holds the scores of the next tokens of a batch, each of shape (batch, positions - 1) and zero without a label.

    The names are those of TRL's FusedCausalLMOutput, so that TRL's trainers can read them.

    Attributes:
        log_probs: natural logarithm of the label's probability, float32; the only score with a gradient.
        entropy: entropy of the next token, in nats.
        mean_logits: mean of the logits over the vocabulary.
        is_top1: whether no token is likelier than the label.
        label_mask: whether there is a label.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    mean_logits: torch.Tensor
    is_top1: torch.Tensor
    label_mask: torch.Tensor


def score_tokens(model: Any, *, every_position: bool = False) -> None:
    """Lets a model score tokens: a pass with `labels` and `fused_lm_head=True` returns `Scores` from now on.

    Args:
        model: a model of `TenantClient.load_model`, with or without PEFT adapters.
        every_position: whether the head computes every position, so that a provider that holds the head does not see
            how many positions have a label.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.forward = _ScoredForward(base, every_position).as_forward()


class _ScoredForward:
    """Replaces the forward method of one model; see `score_tokens`."""

    def __init__(self, base: Any, every_position: bool) -> None:
        self._base, self._every_position = base, every_position
        self._finish: Finish | None = probe(base)
        self._stock = base.forward
        self._takes_positions = "logits_to_keep" in inspect.signature(self._stock).parameters

    def as_forward(self) -> Callable[..., Any]:
        """Returns the function to use as the model's forward, with the signature of the replaced one."""

        @functools.wraps(self._stock)
        def forward(*args: Any, fused_lm_head: bool = False, **options: Any) -> Any:
            return self._scores(*args, **options) if fused_lm_head else self._stock(*args, **options)

        return forward

    def _scores(self, *args: Any, labels: torch.Tensor, **options: Any) -> Scores:
        targets = functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]  # position p predicts token p + 1
        places = torch.arange(targets.shape[1], device=targets.device)
        if self._takes_positions and not self._every_position:
            places = (targets != IGNORE_INDEX).any(dim=0).nonzero().squeeze(1)
            options["logits_to_keep"] = places
        head = self._base.get_output_embeddings()
        if self._finish is None:  # logits that cannot be computed in chunks are computed at once
            outputs, hidden = self._stock(*args, **options), None
        else:
            with HeadInput(head) as seen:
                outputs = self._stock(*args, **options)
            hidden = seen.hidden
        wanted = targets[:, places].flatten()
        if hidden is None:
            scores = _of_logits(outputs.logits.flatten(0, 1), wanted)
        else:
            scores = self._in_chunks(head, hidden.flatten(0, 1), wanted.to(hidden.device))
        log_probs, entropy, mean, is_top1 = (_spread(each, places, targets) for each in scores)
        return Scores(log_probs, entropy, mean, is_top1, targets[:, :-1] != IGNORE_INDEX)

    def _in_chunks(self, head: Any, rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        is_remote = any(isinstance(part, RemoteLinear | RemoteConv1D) for part in head.modules())
        chunk_bytes = REMOTE_CHUNK_BYTES if is_remote else LOCAL_CHUNK_BYTES
        size = max(1, chunk_bytes // (4 * int(self._base.config.get_text_config().vocab_size)))
        labelled = torch.ones_like(targets, dtype=torch.bool)
        if not is_remote and not self._every_position:
            labelled = targets != IGNORE_INDEX
        found = _ChunkedScores.apply(  # type: ignore[no-untyped-call]
            rows[labelled], functools.partial(self._logits, head), targets[labelled], size
        )
        made = [each.new_zeros(targets.shape).masked_scatter(labelled, each) for each in found]
        return tuple(each.masked_fill(targets == IGNORE_INDEX, 0) for each in made)

    def _logits(self, head: Any, rows: torch.Tensor) -> torch.Tensor:
        """Returns the logits of some rows of the head's input, in the model's own precision also under autocast: DPO
        compares sums of log-probabilities, and logits rounded to bfloat16 would drown their difference."""
        with torch.autocast(rows.device.type, enabled=False):
            logits = head(rows.to(self._base.dtype))
            return self._finish(logits) if self._finish else logits


def _spread(scores: torch.Tensor, places: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the scores of some positions as scores of all positions but the last, shape (batch, positions - 1)."""
    batch, num_positions = targets.shape
    whole = scores.new_zeros((batch, num_positions))
    return whole.index_copy(1, places.to(scores.device), scores.view(batch, -1))[:, :-1]


def _of_logits(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns log-probabilities, entropies, mean logits and hits of some rows; zero where there is no label.

    Args:
        logits: shape (num_rows, vocabulary).
        targets: token ids or IGNORE_INDEX, shape (num_rows,).
    """
    logits = logits.float()
    log_probs = logits.log_softmax(dim=-1)
    wanted = targets.clamp(min=0)[:, None]
    found = log_probs.gather(1, wanted).squeeze(1)
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        is_top1 = logits.argmax(dim=-1) == wanted.squeeze(1)
        mean = logits.mean(dim=-1)
    has_none = targets == IGNORE_INDEX
    return tuple(each.masked_fill(has_none, 0) for each in (found, entropy, mean, is_top1))


class _ChunkedScores(torch.autograd.Function):
    """Computes scores and, in the same pass, the gradient of each row's log-probability."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, logits_of: _LogitsOf, targets: torch.Tensor, size: int
    ) -> tuple[torch.Tensor, ...]:
        """Returns log-probabilities, entropies, mean logits and hits, each of shape (num_rows,).

        Args:
            ctx: autograd's context.
            rows: the head's input, shape (num_rows, hidden size).
            logits_of: a function from some rows to their logits, which treats every row alone.
            targets: token ids or IGNORE_INDEX, shape (num_rows,).
            size: the most rows of a chunk.
        """
        needs_grad = ctx.needs_input_grad[0]
        row_grad = torch.empty_like(rows) if needs_grad else None
        parts = []
        for start in range(0, max(rows.shape[0], 1), size):  # a batch without labels makes one call, too
            part = slice(start, start + size)
            with torch.set_grad_enabled(needs_grad):
                given = rows[part].detach().requires_grad_(needs_grad)
                scores = _of_logits(logits_of(given), targets[part])
                total = scores[0].sum()
            if row_grad is not None:
                row_grad[part] = torch.autograd.grad(total, given)[0]
            parts.append([each.detach() for each in scores])
        found = tuple(torch.cat(each) for each in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*found[1:])
        ctx.save_for_backward(*([] if row_grad is None else [row_grad]))
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        """Returns the gradient of `rows`: each row's own, times the gradient of its log-probability."""
        row_grad = ctx.saved_tensors[0] if ctx.saved_tensors else None
        return (None if row_grad is None else row_grad * grad[:, None].to(row_grad.dtype), None, None, None)
