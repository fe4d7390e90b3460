"""This module holds what an engine knows about one request: its state inside the engine (`Request`), which is its
tokens, its keys and values (KV) and its text, and the handle that the caller gets (`Answer`).

The handle gives the answer piece by piece, waits for the end and can cancel the request; any thread may use it.
`TextStream` decodes the tokens of the answer into text, token by token, and finds stop strings.

Guarantees:
- the pieces together are the text that the tokenizer decodes from all tokens at once, without special tokens, up to the
  first stop string, which is left out. This holds for tokenizers with which further tokens do not change complete
  earlier characters;
- a piece never ends inside a character of several tokens, up to 16; such a character decodes to U+FFFD until it is
  complete;
- a piece never ends with the beginning of a stop string that may still be completed: such text is held back;
- a stop string may be, begin with, hold or end with special tokens: it is looked for in the text with them.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch

from tenant_sdk.fixed_length import bounded_logits
from tenant_sdk.serving.adapters.loan import NO_ADAPTER, Loan
from tenant_sdk.serving.attention.few_rows import RequestRows
from tenant_sdk.serving.kv import RequestKv
from tenant_sdk.serving.prefix_cache import CallerPrefixes, Hit
from tenant_sdk.serving.sampling import Sampler
from tenant_sdk.serving.scheduler import Segment
from tenant_sdk.serving.speculation.acceptance import take_accepted
from tenant_sdk.text.source import SafeDecoding
from wire.errors import DeadlineExceeded, NotFinite, VeilbaseError

_UNFINISHED = "�"
_MOST_WAITING = 16
"""The most tokens that are held back for an incomplete character. A character has up to 4 bytes, and a token has at
least one byte."""


_NONE: Mapping[int, str] = MappingProxyType({})


class TextStream:
    """Decodes the text of one answer."""

    def __init__(self, decoding: SafeDecoding, stops: Sequence[str] = (), special: Mapping[int, str] = _NONE) -> None:
        """Makes a stream without text.

        Args:
            decoding: the tokenizer; after a failure, the tokenizer gives no more text.
            stops: strings at which the answer ends.
            special: the texts of the special tokens by id. They are no text of the answer, but stop strings see them.
        """
        self._decoding, self._stops = decoding, tuple(stops)
        self._special = special if self._stops else _NONE
        self._marks: list[tuple[int, str]] = []
        """The special tokens in the text that is held back, in order: the characters of it before each, and its text or
        the end of it."""
        self._token_ids: list[int] = []
        # The tokens before `_read` are in the text. New tokens are decoded together with the tokens from `_begin` on.
        self._begin = self._read = 0
        self._held = ""
        self.is_stopped = False
        self.text = ""
        """The text that was handed out so far."""
        self.token_ends: list[int] = []
        """For each token whose text is known, the number of characters of the text up to its end, as if there were no
        stop strings. Tokens that make a character together have the same number. So have tokens without text and the
        next one with text; at the end of an answer they have none."""

    def put(self, token_id: int) -> str:
        """Adds a token and returns the text that is now complete; returns an empty string after a stop string."""
        if self.is_stopped:
            return ""
        self._token_ids.append(token_id)
        if token_id in self._special:
            self._marks.append((len(self._held), self._special[token_id]))
            return self._hand_out("", is_end=False)
        before = self._decode(self._begin, self._read)
        now = self._decode(self._begin, len(self._token_ids))
        is_waiting = now.endswith(_UNFINISHED) and len(self._token_ids) - self._read < _MOST_WAITING
        if is_waiting or not now.startswith(before) or len(now) == len(before):
            return ""
        self._begin, self._read = self._read, len(self._token_ids)
        return self._hand_out(now[len(before) :], is_end=False)

    def end(self) -> str:
        """Returns the rest of the text, which was held back for a character or a stop string that was never completed;
        returns an empty string after a stop string."""
        if self.is_stopped:
            return ""
        whole = self._decode(0, len(self._token_ids))
        given = self.text + self._held
        rest = whole[len(given) :] if whole.startswith(given) else self._left_over()
        return self._hand_out(rest, is_end=True)

    def _left_over(self) -> str:
        before, now = self._decode(self._begin, self._read), self._decode(self._begin, len(self._token_ids))
        return now[len(before) :]

    def _decode(self, start: int, stop: int) -> str:
        if start == stop:
            return ""
        return self._decoding.decode(self._token_ids[start:stop], skip_special_tokens=True)

    def _hand_out(self, more: str, is_end: bool) -> str:
        ready = self._held + more
        if more:
            self.token_ends += [len(self.text) + len(ready)] * (len(self._token_ids) - len(self.token_ends))
        marked = self._marked(ready)
        found = [place for place in map(marked.find, self._stops) if place >= 0]
        if found:
            ready, self._held, self.is_stopped = ready[: self._pass(min(found))], "", True
        else:
            num_held = 0 if is_end else max((_overlap(marked, stop) for stop in self._stops), default=0)
            num_ready = self._pass(len(marked) - num_held)
            ready, self._held = ready[:num_ready], ready[num_ready:]
        self.text += ready
        return ready

    def _marked(self, text: str) -> str:
        """Returns the text that is held back with its special tokens, as stop strings see it."""
        places = [0, *(place for place, _ in self._marks), len(text)]
        parts = [text[begin:end] for begin, end in itertools.pairwise(places)]
        return "".join(part + mark for part, (_, mark) in zip(parts, [*self._marks, (0, "")], strict=True))

    def _pass(self, size: int) -> int:
        """Takes the first `size` characters off the marked text. Returns how many of them are no special tokens."""
        num_before = num_marked = 0
        left: list[tuple[int, str]] = []
        for place, mark in self._marks:
            begin = place + num_marked  # in the marked text
            num_marked += len(mark)
            passed = min(max(size - begin, 0), len(mark))
            num_before += passed
            if passed < len(mark):
                left.append((place, mark[passed:]))
        num_text = size - num_before
        self._marks = [(max(0, place - num_text), mark) for place, mark in left]
        return num_text


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of the text that is a prefix of the stop string and shorter than it."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


FinishReason = Literal["stop", "length", "cancelled"]
"""How an answer ended: at a stop token or stop string, at its length limit, or because it was cancelled."""


class Answer:
    """Holds the answer to one request. The engine's thread writes the answer; all other threads read it."""

    def __init__(self, num_prompt_tokens: int, cancel: Callable[[], None]) -> None:
        """Makes an answer that has no text yet.

        Args:
            num_prompt_tokens: the number of tokens of the prompt, without padding.
            cancel: a function that asks the engine to end the request.
        """
        self.num_prompt_tokens = num_prompt_tokens
        self.num_reused_tokens = 0
        """The number of the prompt's first tokens whose keys and values were kept from an earlier request
        (`prefix_bytes`)."""
        self.token_ids: list[int] = []
        """The tokens of the answer so far. The list grows until the answer is done."""
        self.token_ends: list[int] = []
        """For each token whose text is known, the number of characters of the text up to its end (requests.py)."""
        self.mean_hidden: torch.Tensor | None = None
        """The mean of the last hidden states of the prompt's tokens, float32, shape (hidden_size,), on the CPU. It is
        None until the answer is done, if the request failed or was cancelled, and for a request without `pools`. A mask
        such as `lattice` leaves a small error in it, which anyone who knows the prompt and the model can compute."""
        self.finish_reason: FinishReason | None = None
        self._cancel = cancel
        self._changed = threading.Condition()
        self._pieces: list[str] = []
        self._error: VeilbaseError | None = None
        self._is_done = False
        self._callbacks: list[Callable[[Answer], None]] = []

    @property
    def is_done(self) -> bool:
        """Returns whether the answer has ended, so that no more text will come."""
        return self._is_done

    @property
    def error(self) -> VeilbaseError | None:
        """Returns the reason why the request failed; None if the request did not fail."""
        return self._error

    def cancel(self) -> None:
        """Ends the request after the step that is being computed; does nothing if the answer is done."""
        if not self._is_done:
            self._cancel()

    def __iter__(self) -> Iterator[str]:
        """Yields the pieces of text, starting with the first. Each piece is yielded as soon as it is complete.

        Raises:
            VeilbaseError: the request failed; the text before the failure was yielded.
        """
        num_given = 0
        while fresh := self._pieces_after(num_given):
            num_given += len(fresh)
            yield from fresh
        self._raise_error()

    def _pieces_after(self, num_given: int) -> list[str]:
        """Waits for text after the first `num_given` pieces and returns the new pieces; returns an empty list if the
        answer has ended without more text."""
        with self._changed:
            self._changed.wait_for(lambda: num_given < len(self._pieces) or self._is_done)
            return self._pieces[num_given:]

    def result(self, timeout_s: float | None = None) -> str:
        """Waits for the end of the answer and returns its whole text. For a cancelled request, the text ends at the
        cancellation.

        Args:
            timeout_s: seconds to wait; None waits without a limit.

        Raises:
            DeadlineExceeded: the answer was not complete in this time; the engine goes on with it.
            VeilbaseError: the request failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_done, timeout_s):
                raise DeadlineExceeded(f"the answer was expected within {timeout_s} s, and is not complete")
        self._raise_error()
        return "".join(self._pieces)

    def add_done_callback(self, callback: Callable[[Answer], None]) -> None:
        """Registers a function that is called when the answer is done.

        The engine's thread calls the function, so it must return quickly. An exception that the function raises there
        is logged by its type only, and changes nothing. If the answer is already done, the function is called at once
        in the calling thread.
        """
        with self._changed:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise copy.copy(self._error) from None  # Each thread that raises the error has its own traceback.

    def num_tokens_within(self, num_characters: int) -> int:
        """Returns how many of the answer's first tokens have their text within the first characters of its text. Tokens
        without text at its end, and those of a stop string, are in none."""
        return bisect_right(self.token_ends, num_characters)

    def put(self, text: str) -> None:
        """Adds a piece of text. Only the engine calls this method."""
        if text:
            with self._changed:
                self._pieces.append(text)
                self._changed.notify_all()

    def finish(self, reason: FinishReason | None, error: VeilbaseError | None = None) -> None:
        """Ends the answer, with an error if the request failed. Only the engine calls this method, and only the first
        call counts."""
        with self._changed:
            if self._is_done:
                return
            # The copy has no traceback, whose frames would keep the rows, keys and values of all requests of the step.
            self.finish_reason, self._error, self._is_done = reason, copy.copy(error), True
            self._changed.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except BaseException as exc:  # noqa: BLE001 - a function of the user's; its text may show the answer
                logging.getLogger(__name__).error("a callback of an answer failed (%s)", type(exc).__name__)


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
    loan: Loan
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
        return self.loan.is_ready()

    @property
    def adapter_index(self) -> int:
        """Returns the number of the adapter's place on the device; `NO_ADAPTER` if the request was lost."""
        return NO_ADAPTER if self.is_lost else self.loan.adapter_index

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
            self._hit = self.prefixes.find(self.loan.digest, self.prompt.token_ids)
        num_reused = 0 if self._hit is None else self._hit.num_tokens
        self.answer.num_reused_tokens = num_reused
        return num_reused

    def rows_of(self, segment: Segment, make_kv: Callable[[int], RequestKv]) -> RequestRows:
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
        return RequestRows(self.kv, max(segment.start - padding, 0), segment.num_rows, num_unseen)

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
            self.prefixes.keep(self.loan.digest, self.prompt.token_ids, self.kv)
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
        self.loan.release()
