"""This module drafts with a small model at the tenant, a draft model, for all requests of a step at once.

The draft model computes the same tokens as the remote model, with keys and values of its own, in ragged passes (see
tenant_sdk/serving/ragged.py). It computes prompts piece by piece as the remote model does, and one pass drafts one
token of each request that is being answered. It draws as the request itself will draw, without the user's logits
processors.

Guarantees: nothing more is drafted for a request in three cases: the draft model gives a number that is not finite for
the request, the request's settings cannot draw from the draft model's logits, or the request's tokens do not fit into
the draft model's context. The request's answer stays the same, and so do all other requests. The user's model is not
changed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional

from tenant_sdk.serving.attention.few_rows import RequestRows
from tenant_sdk.serving.kv import KvLayout, RequestKv, kv_layout
from tenant_sdk.serving.ragged import RaggedModel
from tenant_sdk.serving.requests import Request
from tenant_sdk.serving.sampling import Sampler
from tenant_sdk.serving.scheduler import Segment
from tenant_sdk.serving.speculation.drafter import most_drafted


@dataclass(eq=False)
class _Read:
    """Holds the state of a request in the draft model, which has computed the request's first `num_tokens` tokens."""

    kv: RequestKv
    num_tokens: int = 0


@dataclass(eq=False)
class _Line:
    """Holds the tokens of one request while tokens are drafted for it."""

    read: _Read
    token_ids: list[int] = field(repr=False)
    num_wanted: int
    sampler: Sampler

    def __post_init__(self) -> None:
        self.num_known = len(self.token_ids)
        # The model computed the last known token never, and those before it as they are.
        self.read.num_tokens = min(self.read.num_tokens, self.num_known - 1)

    @property
    def drafted(self) -> list[int]:
        return self.token_ids[self.num_known :]

    @property
    def num_unread(self) -> int:
        """Returns the number of tokens to compute next; 0 if nothing more is to be done."""
        is_done = self.num_wanted and len(self.drafted) >= self.num_wanted
        return 0 if is_done else len(self.token_ids) - self.read.num_tokens

    def put(self, logits: torch.Tensor) -> None:
        """Drafts the next token from logits of shape (vocab_size,); gives up if no token can be chosen from them."""
        try:
            if torch.isfinite(logits.amax()):
                self.token_ids.append(self.sampler.next_token(self.token_ids, logits))
                return
        except RuntimeError:  # A request's own temperature may be too small for the draft's logits.
            pass
        self.num_wanted = len(self.drafted)


class DraftModel:
    """Drafts tokens with a local model."""

    def __init__(
        self, model: Any, num_drafted: int, kv_dtype: str, step_tokens: int, vocab_size: int, device: torch.device
    ) -> None:
        """Prepares a copy of the model, which has the same parameters in the same memory, and tries it once.

        Args:
            model: a local transformers model.
            num_drafted: the most tokens that are drafted for a request at a time.
            kv_dtype: the type in which the draft model's keys and values are kept.
            step_tokens: the most rows of a pass.
            vocab_size: the number of logits of the remote model.
            device: the device of the remote model's logits.

        Raises:
            ConfigurationError: the model cannot compute rows of several requests in one pass.
            Exception: whatever the model raises when it is tried on one token.
        """
        shared = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        self.layout: KvLayout = replace(kv_layout(shared, kv_dtype, step_tokens), num_rewound=num_drafted)
        self._ragged = RaggedModel(shared.eval())
        self._step_tokens, self._vocab_size, self._device = step_tokens, vocab_size, device
        self._num_embeddings = model.get_input_embeddings().weight.shape[0]
        config = model.config.get_text_config(decoder=True)
        self._context: int = getattr(config, "max_position_embeddings", None) or step_tokens
        with torch.no_grad():
            self._forward([RequestRows(self._make_kv(1), 0, 1)], [0], [0], [0])

    def draft(self, segments: Sequence[Segment], requests: Sequence[Request]) -> None:
        """Sets the drafted tokens of each request; see `Drafter.draft`."""
        lines = {
            request: line
            for segment, request in zip(segments, requests, strict=True)
            if (line := self._line(segment, request)) is not None
        }
        while active := [line for line in lines.values() if line.num_unread]:
            self._pass(active)
        for request in requests:
            request.drafted = lines[request].drafted if request in lines else []

    def _line(self, segment: Segment, request: Request) -> _Line | None:
        """Returns the tokens to compute for a segment's request; None if nothing can be drafted for it now."""
        num_wanted = most_drafted(segment, request)
        known = list(request.known_ids[: max(segment.stop - request.prompt.num_padding, 0)])
        if not known or request.num_draftable < 1 or len(known) + num_wanted > self._context:
            return None
        if request.draft_state is None:
            request.draft_state = _Read(self._make_kv(request.kv_tokens(segment)))
        else:
            request.draft_state.kv.grow(request.kv_tokens(segment))
        return _Line(request.draft_state, known, num_wanted, request.sampler.fork() if num_wanted else request.sampler)

    def _pass(self, lines: Sequence[_Line]) -> None:
        """Runs one pass over tokens of several requests (`lines`), at most `step_tokens` in all. Drafts the next token
        of each request whose tokens are then all computed."""
        parts, token_ids, positions, ends, ready = (
            list[RequestRows](),
            list[int](),
            list[int](),
            list[int](),
            list[_Line](),
        )
        for line in lines:
            begin = line.read.num_tokens
            num_rows = min(line.num_unread, self._step_tokens - len(token_ids))
            if num_rows < 1:
                break
            parts.append(RequestRows(line.read.kv, begin, num_rows))
            token_ids += line.token_ids[begin : begin + num_rows]
            positions += range(begin, begin + num_rows)
            line.read.num_tokens += num_rows
            if line.num_wanted and line.read.num_tokens == len(line.token_ids):
                ready.append(line)
                ends.append(len(token_ids) - 1)
        for line, logits in zip(ready, self._forward(parts, token_ids, positions, ends), strict=True):
            line.put(logits)

    def _forward(
        self, parts: Sequence[RequestRows], token_ids: list[int], positions: list[int], wanted: list[int]
    ) -> torch.Tensor:
        """Returns the logits of the wanted rows for the remote model's vocabulary, shape (num_wanted, vocab_size).

        Tokens that the draft model does not have get minus infinity. Tokens that only the draft model has are left out.
        In `token_ids`, a token that the draft model does not have is replaced by its last one.
        """
        known = [min(token_id, self._num_embeddings - 1) for token_id in token_ids]
        numbers = [torch.tensor(each, device=self._ragged.model.device) for each in (known, positions, wanted)]
        logits, _ = self._ragged.forward(parts, numbers[0], numbers[1], numbers[2].long())
        num_missing = self._vocab_size - logits.shape[1]
        return functional.pad(logits.to(self._device), (0, num_missing), value=-torch.inf)

    def _make_kv(self, num_tokens: int) -> RequestKv:
        return RequestKv(self.layout, num_tokens, self._ragged.model.device)
