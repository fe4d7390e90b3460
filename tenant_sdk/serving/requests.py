"""This module holds the state of one request inside the engine: its tokens, its keys and values (KV) and its text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tenant_sdk.fixed_length import bounded_logits
from tenant_sdk.serving.adapter_slots import NO_ADAPTER, Ticket
from tenant_sdk.serving.answer import Answer, FinishReason
from tenant_sdk.serving.attention.pieces import Piece
from tenant_sdk.serving.kv import RequestKv
from tenant_sdk.serving.prefix_cache import CallerPrefixes, Hit
from tenant_sdk.serving.sampling import Sampler
from tenant_sdk.serving.scheduler import Segment
from tenant_sdk.serving.speculation.acceptance import take_accepted
from tenant_sdk.serving.text_stream import TextStream
from tenant_sdk.text.failures import SafeDecoding
from wire.errors import NotFinite, VeilbaseError

LOST = (
    "a value of this request was NaN or infinite, so nothing came of it: its adapter overflows, or the provider "
    "answers wrongly, which verify= (--verify) would tell"
)


@dataclass(frozen=True)
class Prompt:
    """Holds a prompt's tokens. Before them come `num_padding` padding tokens with the id `pad`; no token attends to the
    padding."""

    token_ids: list[int] = field(repr=False)
    num_padding: int
    pad: int

    @property
    def num_rows(self) -> int:
        """Returns the number of the prompt's rows, padding included; the provider sees this number."""
        return self.num_padding + len(self.token_ids)


@dataclass(frozen=True)
class Ending:
    """Describes when an answer ends.

    Attributes:
        max_new_tokens: the length limit.
        stop_ids: tokens at which the text ends.
        stops: strings at which the text ends.
        fixed_length: whether the rows go on to the length limit after the text has ended.
        special: the texts of the tokenizer's special tokens by id, of which `stops` may hold some.
    """

    max_new_tokens: int
    stop_ids: Collection[int]
    stops: tuple[str, ...]
    fixed_length: bool
    special: Mapping[int, str] = field(default_factory=dict)


@dataclass(eq=False)
class Request:
    """Holds the state of a request. Only the engine's thread changes this state.

    This class also implements the protocol `scheduler.Adapter`.

    Attributes:
        drafted: the tokens that a drafter expects after the known ones; their rows go into the next step.
        draft_state: the drafter's own data about this request; None before the first draft.
        pools: whether the mean of the last hidden states of the prompt's rows is computed.
        is_lost: whether the request was given up; see `lose`.
        failure: the error of the user's code because of which the request was given up; None if there was none.
        reason: how the text ended; None while it goes on.
    """

    number: int
    prompt: Prompt
    ending: Ending
    sampler: Sampler
    ticket: Ticket
    answer: Answer
    decoding: SafeDecoding
    on_text: Callable[[str], None] | None = None
    prefixes: CallerPrefixes | None = None
    kv: RequestKv | None = None
    is_lost: bool = False
    failure: VeilbaseError | None = None
    reason: FinishReason | None = None
    drafted: list[int] = field(default_factory=list, repr=False)
    draft_state: Any = field(default=None, repr=False)
    pools: bool = False

    def __post_init__(self) -> None:
        """Sets the request's tokens to the prompt's tokens, and starts with an empty text."""
        self._stream = TextStream(self.decoding, self.ending.stops, self.ending.special)
        self._num_new = 0
        self._token_ids = list(self.prompt.token_ids)
        self._hit: Hit | None = None
        self.answer.token_ends = self._stream.token_ends
        self._hidden_sum: torch.Tensor | None = None

    def is_ready(self) -> bool:
        """Returns whether the request's adapter is on the device."""
        return self.ticket.is_ready()

    @property
    def slot(self) -> int:
        """Returns the number of the adapter's slot on the device; 0, which means no adapter, if the request was
        lost."""
        return NO_ADAPTER if self.is_lost else self.ticket.slot

    @property
    def num_tokens(self) -> int:
        """Returns the number of rows of the prompt and the longest allowed answer together. An answer's last token
        needs no row."""
        return self.prompt.num_rows + self.ending.max_new_tokens - 1

    def kv_tokens(self, segment: Segment) -> int:
        """Returns the number of tokens for which the request has room for keys and values (KV) in a segment's step."""
        return self.num_tokens if segment.kv_tokens is None else min(segment.kv_tokens, self.num_tokens)

    @property
    def known_ids(self) -> Sequence[int]:
        """Returns the tokens of the prompt, without padding, and of the answer so far."""
        return self._token_ids

    @property
    def num_draftable(self) -> int:
        """Returns the most tokens that may be drafted now; 0 if the request was lost. A step adds the drafted tokens
        that are accepted and one more, so one of the tokens up to the length limit is not drafted."""
        return 0 if self.is_lost else self.ending.max_new_tokens - self._num_new - 1

    @property
    def is_over(self) -> bool:
        """Returns whether no more rows of the request go through the model."""
        is_full = self._num_new >= self.ending.max_new_tokens
        return is_full or (self.reason is not None and not self.ending.fixed_length)

    def start(self) -> int:
        """Looks for kept keys and values of the prompt's first tokens, and returns the number of these tokens. The
        scheduler calls this whenever it admits the request."""
        if self.prefixes is not None:
            self._hit = self.prefixes.find(self.ticket.digest, self.prompt.token_ids)
        num_reused = 0 if self._hit is None else self._hit.num_tokens
        self.answer.num_reused_tokens = num_reused
        return num_reused

    def piece(self, segment: Segment, make_kv: Callable[[int], RequestKv]) -> Piece:
        """Returns the description of a segment's rows for the model. At the first segment, allocates keys and values
        (KV), and copies those into them that were kept from an earlier prompt. At later ones, lets the KV grow to what
        is reserved.

        Args:
            segment: a segment of this request.
            make_kv: a function that allocates KV for a given number of tokens.
        """
        if self.kv is None:
            self.kv = make_kv(self.kv_tokens(segment))
            if self._hit is not None:
                self._hit.copy_to(self.kv)
                self._hit = None
        else:
            self.kv.grow(self.kv_tokens(segment))
        padding = self.prompt.num_padding
        num_unseen = min(max(padding - segment.start, 0), segment.num_rows) + self._num_dummies(segment)
        return Piece(self.kv, max(segment.start - padding, 0), segment.num_rows, num_unseen)

    def rows(self, segment: Segment) -> tuple[list[int], list[int]]:
        """Returns the token ids and positions of a segment, which is the request's rows in a step.

        Padding before the prompt has position 0. If fewer tokens were drafted than there are rows for drafted tokens,
        the remaining rows are padding with position 0 and come first. If the request was lost, all its tokens are
        replaced by padding, which keeps their positions.
        """
        begin, end = segment.start - self.prompt.num_padding, segment.stop - self.prompt.num_padding
        ids = [self.prompt.pad if place < 0 or self.is_lost else self._token_ids[place] for place in range(begin, end)]
        positions = [max(place, 0) for place in range(begin, end + len(self.drafted))]
        num_dummies = self._num_dummies(segment)
        return [self.prompt.pad] * num_dummies + ids + self.drafted, [0] * num_dummies + positions

    def _num_dummies(self, segment: Segment) -> int:
        return segment.num_drafted - len(self.drafted)

    def pool(self, segment: Segment, hidden: torch.Tensor) -> None:
        """Adds the last hidden states of the prompt's rows in a segment, without padding, to their sum.

        Args:
            segment: a segment of this request.
            hidden: the last hidden states of the segment's rows, shape (num_rows, hidden_size).
        """
        if not self.pools or segment.start >= self.prompt.num_rows:
            return
        own = hidden[max(self.prompt.num_padding - segment.start, 0) : self.prompt.num_rows - segment.start]
        total = own.sum(dim=0, dtype=torch.float32)
        self._hidden_sum = total if self._hidden_sum is None else self._hidden_sum + total

    def take(self, logits: torch.Tensor) -> int:
        """Chooses the next tokens, and hands out the text that they complete. These are the drafted tokens that are
        accepted (see speculation/acceptance.py) and one more, or fewer if the answer ends before.

        Args:
            logits: float32, shape (num_wanted, vocab_size); the last row belongs to the last drafted token, or, without
                drafted tokens, to the last known token. The logits are ignored if the request was lost.

        Returns:
            The number of tokens that were chosen.

        Raises:
            Exception: whatever a logits processor or `on_text` of the request raises.
        """
        drafted, self.drafted = self.drafted, []
        return take_accepted(drafted, logits[len(logits) - 1 - len(drafted) :], self._take_one)

    def _take_one(self, logits: torch.Tensor) -> int | None:
        """Chooses the next token from logits of shape (vocab_size,); returns its id, or None if the request is over."""
        token_id = self.prompt.pad if self.is_lost else self._choose(logits)
        self._token_ids.append(token_id)
        self._num_new += 1
        if self.reason is None and not self.is_lost:
            self._give(token_id)
        if self.reason is None and self._num_new >= self.ending.max_new_tokens:
            self.reason = "length"
        return None if self.is_over else token_id

    def _choose(self, logits: torch.Tensor) -> int:
        if self.ending.fixed_length:
            logits = bounded_logits(logits)
        return self.sampler.next_token(self._token_ids, logits)

    def _give(self, token_id: int) -> None:
        self.answer.token_ids.append(token_id)
        self._hand_out(self._stream.put(token_id))
        if token_id in self.ending.stop_ids or self._stream.is_stopped:
            self.reason = "stop"
            self._hand_out(self._stream.end())

    def _hand_out(self, text: str) -> None:
        if text:
            self.answer.put(text)
            if self.on_text is not None:
                self.on_text(text)

    def preempt(self) -> None:
        """Gives up the keys and values (KV), as the scheduler decided. The tokens are kept, and so is the state of the
        sampler, so that the answer goes on as it would have when all tokens have been computed again."""
        self.kv = self.draft_state = self._hit = self._hidden_sum = None
        self.drafted = []

    def lose(self) -> None:
        """Gives up the request, after a value that was not finite or a failure of the user's code: replaces its tokens
        by padding, and clears its keys and values. `finish` then ends the answer with an error."""
        self.is_lost = True
        self._token_ids = [self.prompt.pad] * len(self._token_ids)
        self.drafted, self.draft_state = [], None
        if self.kv is not None:
            self.kv.clear()

    def give_up(self, error: VeilbaseError, num_known: int) -> None:
        """Gives up a request with `fixed_length` whose logits processor or `on_text` raised an exception in `take`. Its
        rows go on as padding, since the provider would otherwise see the failure, which may depend on the text.

        Args:
            error: the error with which the answer ends at its length limit.
            num_known: the number of known tokens before `take`, which may have failed before it chose a token.
        """
        self.failure = error
        if len(self._token_ids) == num_known:
            self._token_ids.append(self.prompt.pad)
            self._num_new += 1
        self.lose()

    def finish(self) -> None:
        """Ends the answer with the rest of its text, and keeps the prompt's keys and values for later requests, if the
        engine keeps prompts. Ends the answer with an error if the request was lost, or its tokenizer failed."""
        if self.is_lost:
            self.fail(self.failure or NotFinite(LOST))
            return
        self._hand_out(self._stream.end() if self.reason != "stop" else "")
        if self.decoding.failed is not None:
            self.fail(self.decoding.failed)
            return
        if self.prefixes is not None and self.kv is not None:
            self.prefixes.keep(self.ticket.digest, self.prompt.token_ids, self.kv)
        if self._hidden_sum is not None:
            self.answer.mean_hidden = (self._hidden_sum / len(self.prompt.token_ids)).cpu()
        self._release()
        self.answer.finish(self.reason)

    def fail(self, error: VeilbaseError) -> None:
        """Ends the answer with an error."""
        self._release()
        self.answer.finish(None, error)

    def cancel(self) -> None:
        """Ends the answer after the text that it has so far."""
        self.reason = "cancelled"
        self._release()
        self.answer.finish("cancelled")

    def _release(self) -> None:
        self.kv = self.draft_state = self._hit = None
        self.ticket.release()
