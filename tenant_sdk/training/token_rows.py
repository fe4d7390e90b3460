"""This module turns the data sets of a fine-tuning run into token rows: token ids with labels to train on, or the
tokens of preferences (a prompt with a chosen and a rejected answer) for TRL's DPOTrainer.

Only text to be learnt gets labels: a label is the token at the same position, or -100 for no loss. Rows keep their own
lengths, or all get one length, the bucket. The option `truncation` decides what becomes of rows that have too many
tokens: they are refused, cut to their first tokens, or left out. `Collator` makes batches of rows.

Guarantees:
- data sets are read and checked before anything is sent. Which rows of a data set are held back for evaluation depends
  on the number of rows and on the seed, and on nothing that a row says;
- no error shows a row's contents; an error about a row names the row. A warning says how many rows were cut or left
  out, never which text;
- every row of `tokenize` has at least one label that a causal model is trained on, unless an unverified provider's
  tokenizer made the row unusable. `tokenize` does not shuffle, pack or cut rows;
- a row that `truncation` cuts keeps its first tokens, as in TRL. If none of them is a label, the row stays and teaches
  nothing, so that the number of rows does not depend on where labels are;
- with a bucket, every training row has exactly the bucket's length; preferences get it in their batches
  (tenant_sdk/training/trainers.py), so that no number of tokens depends on a text. If the tokenizer is also an
  unverified provider's, rows that are too long or cannot be used are not refused, because the provider would see the
  refusal: they are cut (tenant_sdk/text/rows.py), or teach nothing;
- chat templates are rendered only in transformers' own sandbox. The tokens of a preference are those that TRL makes of
  the same row. They are made here, so that an unverified provider's chat template never sees a text.

Not guaranteed: that a special token in the user's text is treated as text; it becomes a special token, as in TRL.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from jinja2 import TemplateError, TemplateSyntaxError
from peft import PeftConfig, PeftType

from tenant_sdk.text.rows import CutWarning, check_fits, pad_token, padded_row
from tenant_sdk.text.source import TenantText, TokenizerFailed, surviving
from tenant_sdk.text.template import TemplateDoesNotFit, join, split, stripped
from tenant_sdk.training.dataset import (
    Completion,
    Conversation,
    Preference,
    Row,
    Text,
    UnusableRowWarning,
    are_preferences,
    check_alike,
    load_rows,
    num_held_back,
    source_of,
)
from tenant_sdk.training.settings import NO_TRL, REFUSE, TRUNCATE
from tenant_sdk.warn import warn_and_go_on
from wire.errors import ConfigurationError, DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_Tokens = TypeVar("_Tokens")


def _tokenizer_limit(truncation: str, max_length: int) -> int:
    """Returns the number of tokens above which a row is refused while it is turned into tokens."""
    return max_length if truncation == REFUSE else sys.maxsize


def fitted(
    rows: Sequence[_Tokens],
    max_length: int,
    truncation: str,
    length: Callable[[_Tokens], int],
    cut: Callable[[_Tokens, int], _Tokens],
) -> list[_Tokens]:
    """Returns the rows with at most `max_length` tokens each, and warns if rows were cut or left out.

    Args:
        rows: tokenised rows of any length.
        max_length: the most tokens that a row may have.
        truncation: `truncate` or `drop`; with `refuse`, rows that are too long have been refused before.
        length: returns the number of tokens of a row.
        cut: returns a row's first tokens, as many as its second argument says.

    Raises:
        DatasetError: every row is too long and would be left out.
    """
    num_long = sum(length(row) > max_length for row in rows)
    if not num_long:
        return list(rows)
    if truncation == TRUNCATE:
        longest = max(map(length, rows))
        what = f"were cut to their first {max_length} tokens; the longest has {longest}"
        warn_and_go_on(f"{num_long} of {len(rows)} rows {what}", CutWarning)
        return [cut(row, max_length) if length(row) > max_length else row for row in rows]
    if num_long == len(rows):
        raise DatasetError(f"expected a row of at most {max_length} tokens; truncation='drop' leaves no row")
    warn_and_go_on(f"{num_long} of {len(rows)} rows have more than {max_length} tokens and are left out", CutWarning)
    return [row for row in rows if length(row) <= max_length]


# The value is the default of torch.nn.CrossEntropyLoss's ignore_index; transformers' ForCausalLMLoss relies on it.
IGNORE_INDEX = -100

# Errors that a template may raise if it does not fit a conversation, jinja2's own errors included.
RENDER_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
# The most roles that an error lists about a conversation that does not fit the template.
_MAX_SHOWN_ROLES = 8
# A line is a place to cut a text if so many characters follow, and so many of the next tokens are the same.
LINE_CHARACTERS, _SAME_TOKENS = 512, 32
# The most messages of a conversation for which the text before and after each answer is rendered.
MOST_RENDERED = 24
BEFORE, OPENED, CLOSED = "before", "opened", "closed"
# The most characters of white space between a generation prompt and an answer that are passed over.
_MOST_SPACE = 64


def tokenize(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    add_eos: bool = True,
    num_virtual_tokens: int = 0,
    *,
    never_refuse: bool = False,
) -> list[dict[str, list[int]]]:
    """Turns rows into token ids and labels. Only the text that the model must learn to write gets labels.

    A conversation is rendered as a whole by the tokenizer's chat template. The labels of an assistant's message start
    after the tokens of the messages before it, rendered with `add_generation_prompt=True`. They end with the tokens of
    the messages up to and including that message, so that they contain the template's end marker. A prompt and a
    completion are joined as strings and tokenized together; the labels start at the first token that differs from the
    tokens of the prompt alone. In a `text` every token is a label.

    Args:
        rows: the result of `load_rows`.
        tokenizer: any transformers tokenizer; conversations need a chat template.
        max_length: the most tokens that a row may have, usually the model's context.
        add_eos: whether the end-of-sequence token is added to a `text` or a plain completion that does not end with it.
            Conversations never get this token, because their template has its own end marker.
        num_virtual_tokens: the tokens that a prompt-learning adapter adds to every row. They are already subtracted
            from `max_length`, and are named in the error about a row that is too long.
        never_refuse: whether rows that are too long or cannot be used are accepted. It is for a tokenizer that an
            unverified provider may have made to fail on some texts, since the provider would see a refusal. A row that
            cannot be used gets no labels; a row that is too long is not changed.

    Returns:
        One dict per row: `input_ids`, `labels` (IGNORE_INDEX at positions without a loss) and `attention_mask` (ones),
        each of the row's length.

    Raises:
        DatasetError: the template refuses or rewrites a row, or a row has no label or is too long.
        ConfigurationError: the tokenizer lacks the chat template or the end-of-sequence token that a row needs.

    Source: TRL 1.16, SFTTrainer._prepare_dataset (tokenize_fn, add_eos). Unlike TRL, this function never truncates a
        row, labels only the assistant's messages of a conversational completion, and refuses a template that renders
        earlier messages differently within the whole conversation.
    """
    if not never_refuse:
        return [_tokenize_row(row, tokenizer, max_length, add_eos, num_virtual_tokens) for row in rows]
    return [_tokenize_whatever_comes(row, tokenizer, add_eos) for row in rows]


class Collator:
    """Makes batches: pads rows on the right to the longest row of the batch.

    The attention mask follows the rows' lengths, not the padding token: many tokenizers pad with their end marker, and
    a row's own end marker must not be masked out.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Pads some rows to the length of the longest and returns them as one batch.

        Args:
            features: dicts as `tokenize` returns them, perhaps with a `position` each (`numbered`).

        Returns:
            `input_ids`, `labels` and `attention_mask`, each int64 on the CPU, shape (batch, longest row); `positions`,
            shape (batch,), if the rows have any.
        """
        padding = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX, "attention_mask": 0}
        num_tokens = max(len(row["input_ids"]) for row in features)
        batch = {
            key: torch.tensor(
                [[*row[key], *[pad] * (num_tokens - len(row[key]))] for row in features], dtype=torch.long
            )
            for key, pad in padding.items()
        }
        if "position" in features[0]:
            batch["positions"] = torch.tensor([row["position"] for row in features], dtype=torch.long)
        return batch


def numbered(rows: Sequence[Mapping[str, Any]], first: int) -> list[dict[str, Any]]:
    """Returns rows with their positions in a run's data, `first` for the first one."""
    return [{**row, "position": number} for number, row in enumerate(rows, first)]


def _tokenize_row(
    row: Row, tokenizer: PreTrainedTokenizerBase, max_length: int, add_eos: bool, num_virtual_tokens: int
) -> dict[str, list[int]]:
    with surviving(row.where):
        if isinstance(row.form, Conversation):
            input_ids, labels = _tokenize_conversation(row.where, row.form, tokenizer)
        elif isinstance(row.form, Text | Completion):
            input_ids, labels = _tokenize_plain(row.form, tokenizer, add_eos)
        else:
            raise DatasetError(f"{row.where}: expected a row to train on, a preference came")
    if len(input_ids) > max_length:
        beside = f" beside the adapter's {num_virtual_tokens} virtual ones" if num_virtual_tokens else ""
        raise DatasetError(
            f"{row.where}: expected at most {max_length} tokens{beside}, {len(input_ids)} came: shorten it, or choose "
            "another truncation (--truncation)"
        )
    # A causal model predicts token i from the tokens before it, so a label at position 0 trains nothing.
    if all(label == IGNORE_INDEX for label in labels[1:]):
        most = "" if max_length == sys.maxsize else f" (at most {max_length})"
        raise DatasetError(
            f"{row.where}: expected at least one label token after the first of the row's {len(input_ids)} tokens"
            f"{most}, none came"
        )
    return {"input_ids": input_ids, "labels": labels, "attention_mask": [1] * len(input_ids)}


def _tokenize_whatever_comes(row: Row, tokenizer: PreTrainedTokenizerBase, add_eos: bool) -> dict[str, list[int]]:
    """Tokenizes a row of any length; returns one token without a label if the row cannot be used."""
    try:
        return _tokenize_row(row, tokenizer, sys.maxsize, add_eos, 0)
    except (DatasetError, TokenizerFailed, TemplateDoesNotFit) as exc:
        warn_and_go_on(f"a row is left out of the training: {exc}", UnusableRowWarning, stacklevel=5)
        return {"input_ids": [0], "labels": [IGNORE_INDEX], "attention_mask": [1]}


def _tokenize_plain(
    form: Text | Completion, tokenizer: PreTrainedTokenizerBase, add_eos: bool
) -> tuple[list[int], list[int]]:
    """Returns token ids and labels of a row that needs no chat template."""
    start = 0
    if isinstance(form, Text):
        input_ids = list(tokenizer(form.text)["input_ids"])
    else:
        input_ids = list(tokenizer(form.prompt + form.completion)["input_ids"])
        # If a token spans the end of the prompt and the start of the completion, this token is a label, so that the
        # labels cover the whole completion.
        start = _common_prefix(list(tokenizer(form.prompt)["input_ids"]), input_ids)
    if add_eos:
        if tokenizer.eos_token_id is None:
            raise ConfigurationError("the tokenizer has no end-of-sequence token: set one, or choose add_eos=False")
        if input_ids[-1:] != [tokenizer.eos_token_id]:
            input_ids.append(tokenizer.eos_token_id)
    return input_ids, [IGNORE_INDEX] * start + input_ids[start:]


def _tokenize_conversation(
    where: str, form: Conversation, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]]:
    """Returns token ids and labels of a conversation."""
    whole = _Rendered(where, form.messages, tokenizer)
    labels = [IGNORE_INDEX] * len(whole.token_ids)
    for turn in form.trained_turns:
        span = whole.span(turn)
        labels[span] = whole.token_ids[span]
    return whole.token_ids, labels


class _Rendered:
    """Holds the tokens of a whole conversation, and finds the span of each of the assistant's messages in them.

    A conversation may have hundreds of turns, so the text before a message is not tokenized again from its beginning,
    but from the last token of the whole conversation that no text on either side can change: an added token, such as
    the mark of a turn, at which the tokenizers library cuts a text before it does anything else. Where a template
    writes no such token it is from the beginning of a line, if the next tokens are those of the whole conversation.
    """

    def __init__(self, where: str, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> None:
        self._where = where
        self._messages = messages
        self._tokenizer = tokenizer
        self._check_template()
        self._whole = self._text(len(messages))
        self._prefixes = _Prefixes(self._render, messages, self._whole) if len(messages) > MOST_RENDERED else None
        self.token_ids: list[int] = []
        self._cuts: list[tuple[int, int]] = []
        self._lines: list[tuple[int, int]] = []
        self._longest_mark = 0
        self._tokenize_whole()

    def _tokenize_whole(self) -> None:
        """Sets the tokens of the conversation, and the places at which its text may be cut."""
        if not self._tokenizer.is_fast:
            self.token_ids = self._ids(self._whole)
            return
        marks = {number: mark for number, mark in self._tokenizer.added_tokens_decoder.items() if not mark.normalized}
        self._longest_mark = max(
            (len(mark.content) for mark in self._tokenizer.added_tokens_decoder.values()), default=0
        )
        tokens = self._tokenizer(self._whole, add_special_tokens=False, return_offsets_mapping=True)
        self.token_ids = list(tokens["input_ids"])
        self._cuts = [
            (begin, index)
            for index, (number, (begin, end)) in enumerate(zip(self.token_ids, tokens["offset_mapping"], strict=True))
            if number in marks and marks[number].content in self._whole[begin:end]
        ]
        self._lines = [
            (begin, index)
            for index, (begin, end) in enumerate(tokens["offset_mapping"])
            if begin < end and self._whole[begin - 1 : begin] == "\n"
        ]

    def span(self, turn: int) -> slice:
        """Returns the token positions of message `turn`, from after the generation prompt to the message's end.

        The tokens of the messages before `turn` are usually a prefix of the whole conversation. A difference at the end
        of this prefix is accepted if the span still contains the whole answer. Such a difference arises if a token
        merges across the boundary, or if the generation prompt opens a thinking block that the answer does not keep.
        An answer that the template renders differently once the conversation goes on, for example without an empty
        thinking block, is accepted if the conversation has the whole answer after the generation prompt, and then what
        closes it. Any other difference is refused, because the template renders earlier messages differently: the
        labels would then contain the user's words or miss the assistant's.
        """
        opened, before = self._prefix(turn, OPENED), ""
        start, is_prefix = self._shared(opened)
        if not is_prefix:
            # Either prefix is enough: some templates (Phi-3) end every text without generation prompt by an end token.
            before = self._prefix(turn, BEFORE)
            if not self._whole.startswith((opened, before)):
                self._refuse(turn)
            start = max(start, self._shared(before)[0])
        closed = self._prefix(turn, CLOSED)
        end, is_closed = self._shared(closed)
        if not (is_prefix and is_closed) and not self._holds(slice(start, end), self._messages[turn]["content"]):
            prefix = opened if self._whole.startswith(opened) else before
            end = self._shared(self._whole[: self._end_of_rewritten(turn, len(prefix), closed)])[0]
        return slice(start, end)

    def _end_of_rewritten(self, turn: int, begin: int, closed: str) -> int:
        """Returns where an answer ends in the conversation's text, if it is rendered there as a whole.

        Args:
            turn: the number of the answer's message.
            begin: the number of characters before the answer.
            closed: the text of the conversation up to this message and no further.
        """
        content = self._messages[turn]["content"].strip()
        begin += len(self._whole[begin : begin + _MOST_SPACE]) - len(self._whole[begin : begin + _MOST_SPACE].lstrip())
        closing = closed.rpartition(content)[2] if content else ""
        end = begin + len(content)
        if not closing or not self._whole.startswith(content + closing, begin):
            self._refuse(turn)
        return end + len(closing)

    def _shared(self, text: str) -> tuple[int, bool]:
        """Returns how many tokens at its beginning a text shares with the whole conversation, and whether these are all
        of the text's."""
        same = _common_length(text, self._whole)
        # An added token that begins before this place is the same in both, since all that it could be is in `same`.
        begin, index = (
            last_place(self._cuts, same - self._longest_mark)
            if self._cuts
            else last_place(self._lines, same - LINE_CHARACTERS)
        )
        token_ids = self._ids(text[begin:])
        if not self._cuts and token_ids[:_SAME_TOKENS] != self.token_ids[index : index + _SAME_TOKENS]:
            index, token_ids = 0, self._ids(text)
        shared = _common_prefix(token_ids, self.token_ids[index : index + len(token_ids)])
        return index + shared, shared == len(token_ids)

    def _holds(self, span: slice, content: str) -> bool:
        # The content is stripped, because many templates trim what they render.
        text: str = self._tokenizer.decode(self.token_ids[span], clean_up_tokenization_spaces=False)
        return content.strip() in text

    def _refuse(self, turn: int) -> NoReturn:
        raise DatasetError(
            f"{self._where}: message {turn + 1}: the chat template renders this answer or what precedes it differently "
            "within the whole conversation: give one row per answer, or plain prompt and completion"
        )

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prefix(self, turn: int, which: str) -> str:
        """Returns the text before an answer (BEFORE), the same with the generation prompt (OPENED), or the text up to
        the answer's end (CLOSED)."""
        found = None if self._prefixes is None else self._prefixes.of(turn, which)
        return self._text(turn + (which == CLOSED), which == OPENED) if found is None else found

    def _text(self, num_messages: int, add_generation_prompt: bool = False) -> str:
        return self._render(self._messages[:num_messages], add_generation_prompt)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
        """Renders messages by `apply_chat_template`, so that a provider's template runs only in transformers' sandbox.

        Errors are raised `from None`, because a template can raise an error with any text, such as the messages.
        """
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=add_generation_prompt, tokenize=False
                )
            )
        except TemplateSyntaxError:
            raise ConfigurationError("the tokenizer's chat template does not compile") from None
        except RENDER_ERRORS:
            roles = ", ".join(message["role"] for message in messages[:_MAX_SHOWN_ROLES])
            raise DatasetError(
                f"{self._where}: the chat template refuses a conversation that begins with the roles {roles}"
            ) from None

    def _check_template(self) -> None:
        try:
            has_template = bool(self._tokenizer.get_chat_template())
        except ValueError:  # there is no template, or there are several without a default
            has_template = False
        if not has_template:
            raise ConfigurationError(
                f"{self._where}: the tokenizer has no chat template, which messages need: choose an instruct model, "
                "or plain prompt and completion"
            )


class _Prefixes:
    """Makes the texts before and up to the answers of a long conversation from a few renderings.

    Rendering each of them would take time that grows with the square of the turns. A template is rendered over
    placeholders (tenant_sdk/text/template.py), which shows what it writes between two contents. Answers with the same
    roles and the same text around them are taken to be opened and closed in the same way; the first of these answers is
    rendered as it is. Contents are at known places, so no label can hold a user's words, whatever the template does.
    """

    def __init__(self, render: Callable[..., str], messages: list[dict[str, str]], whole: str) -> None:
        self._render, self._messages, self._whole = render, messages, whole
        self._roles = [message["role"] for message in messages]
        self._contents = [message["content"] for message in messages]
        self._tails: dict[Any, tuple[str, str] | None] = {}
        self._between = self._split(len(messages), False)
        self._ends: list[int] = []
        if self._between is None or self._joined(self._between) != whole:
            self._between = None
            return
        end = 0
        for literal, (_, left, right), content in zip(
            self._between[::2], self._between[1::2], self._contents, strict=False
        ):
            end += len(literal) + len(stripped(content, left, right))
            self._ends.append(end)

    def of(self, turn: int, which: str) -> str | None:
        """Returns a text (BEFORE, OPENED or CLOSED) of an answer; None if it has to be rendered."""
        if self._between is None:
            return None
        around = (self._between[2 * turn], self._between[2 * turn + 2])
        key = (which, around, *self._roles[turn - 1 : turn + 2])
        if key not in self._tails:
            self._tails[key] = self._tail(turn, which)
        found = self._tails[key]
        if found is None:
            return None
        begin = self._whole[: self._ends[turn - 1]]
        if which != CLOSED:
            return begin + found[0]
        _, left, right = self._between[2 * turn + 1]
        return f"{begin}{found[0]}{stripped(self._contents[turn], left, right)}{found[1]}"

    def _tail(self, turn: int, which: str) -> tuple[str, str] | None:
        """Returns what the template writes after the message before an answer, and after the answer, by rendering; None
        if it does more than to put contents in their places."""
        num_messages = turn + (which == CLOSED)
        parts = self._split(num_messages, which == OPENED)
        text = self._render(self._messages[:num_messages], which == OPENED)
        if parts is None or self._joined(parts) != text or not text.startswith(self._whole[: self._ends[turn - 1]]):
            return None
        if which == CLOSED and parts[-2] != self._between[2 * turn + 1]:
            return None
        return (parts[-3], parts[-1]) if which == CLOSED else (parts[-1], "")

    def _split(self, num_messages: int, add_generation_prompt: bool) -> Any:
        """Returns (literal, place of the first content, literal, ... literal), or None if the contents are not in their
        order, or not in places at all."""
        try:
            parts = split(lambda messages: self._render(messages, add_generation_prompt), self._roles[:num_messages])
        except (TemplateDoesNotFit, DatasetError):
            return None
        numbers = [part[0] for part in parts if not isinstance(part, str)]
        return parts if numbers == list(range(num_messages)) else None

    def _joined(self, parts: Any) -> str:
        return join(parts, self._contents)


def _common_prefix(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """Returns the number of leading tokens that two sequences share."""
    for index, (left, right) in enumerate(zip(ids, other_ids, strict=False)):
        if left != right:
            return index
    return min(len(ids), len(other_ids))


def last_place(places: list[tuple[int, int]], most: int) -> tuple[int, int]:
    """Returns the last of some places, in order, that begins at `most` characters or before; (0, 0) if none does."""
    number = bisect_right(places, (most, sys.maxsize)) - 1
    return places[number] if number >= 0 else (0, 0)


def _common_length(text: str, other: str) -> int:
    """Returns the number of leading characters that two texts share, by halving, since comparing texts is fast."""
    low, high = 0, min(len(text), len(other))
    if text[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if text[low:middle] == other[low:middle] else (low, middle)
    return low


_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


TokenRow = dict[str, list[int]]
"""A row's `input_ids`, `labels` and `attention_mask`, each of the row's length."""


def training_rows(
    parsed: list[Row],
    text: TenantText,
    max_length: int,
    bucket: int | None,
    num_virtual: int,
    truncation: str = REFUSE,
) -> list[TokenRow]:
    """Returns the tokens of a data set.

    Args:
        parsed: the result of `load_rows`.
        text: the session's tokenizer and its source.
        max_length: the most tokens that a row may have.
        bucket: the number of tokens of every row; None if each row keeps its own length.
        num_virtual: the tokens that a prompt-learning adapter adds; they are already subtracted from `max_length`.
        truncation: what becomes of rows that are too long (tenant_sdk/training/token_rows.py).

    Returns:
        One dict per row, as `tenant_sdk.training.token_rows.tokenize` describes.

    Raises:
        DatasetError: a row is too long or cannot be used. With a bucket and an unverified provider's tokenizer, a row
            that is too long is cut instead, and a row that cannot be used gets no labels.
        ConfigurationError: the bucket is longer than `max_length`.
        TemplateDoesNotFit: see `_may_be_unusable`; only with a bucket.
    """
    limit = _tokenizer_limit(truncation, max_length if bucket is None else bucket)
    if bucket is None:
        rows = tokenize(parsed, text.tokenizer, limit, num_virtual_tokens=num_virtual)
        rows = fitted(rows, max_length, truncation, num_tokens_of, _first_tokens)
        _warn_of_idle_rows(rows, max_length)
        return rows
    check_fits(bucket, max_length, "")
    may_be_spoilt = _may_be_unusable(text)
    rows = tokenize(parsed, text.tokenizer, limit, num_virtual_tokens=num_virtual, never_refuse=may_be_spoilt)
    if truncation == TRUNCATE:
        rows = fitted(rows, bucket, truncation, num_tokens_of, _first_tokens)
        _warn_of_idle_rows(rows, bucket)
    num_too_long = sum(len(row["input_ids"]) > bucket for row in rows)
    if num_too_long:
        longest = max(len(row["input_ids"]) for row in rows)
        said = f"{num_too_long} of {len(rows)} rows were cut to their last {bucket} tokens; the longest has {longest}"
        warn_and_go_on(said, CutWarning)
    pad = pad_token(text.tokenizer)
    return [padded_row(row, bucket, pad, IGNORE_INDEX) for row in rows]


def _warn_of_idle_rows(rows: list[TokenRow], max_length: int) -> None:
    """Warns of rows that have no label left; they stay (tenant_sdk/training/token_rows.py)."""
    num_idle = sum(set(row["labels"][1:]) <= {IGNORE_INDEX} for row in rows)
    if num_idle:
        said = f"{num_idle} of {len(rows)} rows have nothing to learn in their first {max_length} tokens"
        warn_and_go_on(f"{said}: they are sent all the same, and teach nothing", CutWarning)


def _may_be_unusable(text: TenantText) -> bool:
    """Returns whether padded rows must be accepted even if the tokenizer fails on them: it is an unverified provider's.

    Raises:
        TemplateDoesNotFit: the tokenizer's chat template fits no conversation at all.
    """
    may_be_spoilt = text.origin == "provider"
    if may_be_spoilt and text.tokenizer.chat_template:
        with contextlib.suppress(*RENDER_ERRORS):  # of the template; each row then says that it cannot be used
            text.tokenizer.apply_chat_template(_PROBE, tokenize=False)  # raises if the template fits no conversation
    return may_be_spoilt


def num_tokens_of(row: TokenRow) -> int:
    """Returns the number of tokens of a row."""
    return len(row["input_ids"])


def _first_tokens(row: TokenRow, max_length: int) -> TokenRow:
    return {key: values[:max_length] for key, values in row.items()}


PreferenceRow = dict[str, list[int]]
"""The tokens `prompt_ids`, `chosen_ids` and `rejected_ids` of one preference, as TRL's collator takes them."""


def preference_rows(
    parsed: list[Row],
    text: TenantText,
    max_length: int,
    bucket: int | None,
    num_virtual: int,
    truncation: str = REFUSE,
) -> list[PreferenceRow]:
    """Returns the tokens of a data set of preferences.

    Args:
        parsed: the result of `load_rows`, with rows whose form is `Preference`.
        text, max_length, bucket, num_virtual, truncation: see `tenant_sdk.training.token_rows.training_rows`. The
            limits count the prompt and one answer; a row is too long if it is so with either answer.

    Raises:
        DatasetError: a row is too long or cannot be used; with a bucket and an unverified provider's tokenizer such a
            row is cut, or gets no answers and teaches nothing.
        ConfigurationError: the bucket is longer than `max_length`.
        TemplateDoesNotFit: see `tenant_sdk.training.token_rows.may_be_unusable`; only with a bucket.
    """
    never_refuse = False
    if bucket is not None:
        check_fits(bucket, max_length, "")
        max_length, never_refuse = bucket, _may_be_unusable(text)
    limit = _tokenizer_limit(truncation, max_length)
    sides = [
        tokenize(
            [replace(row, form=getattr(row.form, side)) for row in parsed if isinstance(row.form, Preference)],
            text.tokenizer, limit, num_virtual_tokens=num_virtual, never_refuse=never_refuse,
        )
        for side in ("chosen", "rejected")
    ]  # fmt: skip
    rows = [_pair(chosen, rejected) for chosen, rejected in zip(*sides, strict=True)]
    if never_refuse and truncation == REFUSE:
        return [_last_tokens(row, max_length) for row in rows]
    return fitted(rows, max_length, truncation, _longest_side, _first_prompt_tokens)


def _longest_side(row: PreferenceRow) -> int:
    """Returns the number of tokens of a row's prompt with the longer answer."""
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def _pair(chosen: TokenRow, rejected: TokenRow) -> PreferenceRow:
    """Returns a preference from its prompt with either answer. The prompt ends where the first answer begins, or
    earlier, where the two differ: a token may span the prompt's end."""
    starts = [_first_label(chosen), _first_label(rejected)]
    if None in starts:  # a row that could not be used
        return {"prompt_ids": [0], "chosen_ids": [], "rejected_ids": []}
    together = zip(chosen["input_ids"], rejected["input_ids"], strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], together))
    end = min(shared, *(start for start in starts if start is not None))
    return {
        "prompt_ids": chosen["input_ids"][:end],
        "chosen_ids": chosen["input_ids"][end:],
        "rejected_ids": rejected["input_ids"][end:],
    }


def _first_label(row: TokenRow) -> int | None:
    return next((place for place, label in enumerate(row["labels"]) if label != IGNORE_INDEX), None)


def _first_prompt_tokens(row: PreferenceRow, max_length: int) -> PreferenceRow:
    room = max(max_length - len(row["prompt_ids"]), 0)
    answers = {key: row[key][:room] for key in ("chosen_ids", "rejected_ids")}
    return {"prompt_ids": row["prompt_ids"][:max_length], **answers}


def _last_tokens(row: PreferenceRow, max_length: int) -> PreferenceRow:
    """Returns a row whose prompt and answers have lost their first tokens if they were too long."""
    room = max(max_length - max(len(row["chosen_ids"]), len(row["rejected_ids"])), 0)
    prompt = row["prompt_ids"]
    answers = {key: row[key][-max_length:] for key in ("chosen_ids", "rejected_ids")}
    return {"prompt_ids": prompt[len(prompt) - room :] if room < len(prompt) else prompt, **answers}


@dataclass(frozen=True)
class ParsedData:
    """Holds the checked rows of a run's data sets; `eval_rows` is empty without an evaluation."""

    rows: list[Row] = field(repr=False)
    eval_rows: list[Row] = field(repr=False)


@dataclass(frozen=True)
class RunData:
    """Holds the token rows of a run.

    Attributes:
        rows, eval_rows: token rows; `eval_rows` is empty without an evaluation.
        are_preferences: whether the rows are preferences (`PreferenceRow`), which DPO trains on.
    """

    rows: list[dict[str, list[int]]] = field(repr=False)
    eval_rows: list[dict[str, list[int]]] = field(repr=False)
    are_preferences: bool

    def longest_batch(self, batch_size: int, num_virtual: int) -> int:
        """Returns the tokens of the largest training batch, virtual tokens included; a preference is two sequences."""
        length = max(map(_longest_side if self.are_preferences else num_tokens_of, self.rows))
        return batch_size * (2 if self.are_preferences else 1) * (length + num_virtual)


def parse_data(data: Any, eval_data: Any, seed: int) -> ParsedData:
    """Reads and checks the data sets of a run.

    Args:
        data: a data set, as `load_rows` takes it.
        eval_data: another data set; a number between 0 and 1 for this part of `data`, which is then not trained on; or
            None.
        seed: the seed that chooses the rows held back.

    Raises:
        DatasetError: a data set cannot be used, or only one of the two holds preferences.
        ConfigurationError: `eval_data` is a number that is not between 0 and 1 or leaves no row to train on; or TRL,
            which preferences need, is not installed.
    """
    rows = load_rows(data)
    if are_preferences(rows):
        _check_trl()
    if eval_data is None:
        return ParsedData(rows, [])
    if isinstance(eval_data, int | float):
        return _split(rows, eval_data, seed)
    eval_rows = load_rows(eval_data)
    check_alike(rows, eval_rows)
    return ParsedData(rows, eval_rows)


def _check_trl() -> None:
    try:
        import_module("trl.trainer.dpo_trainer")
    except ImportError:
        raise ConfigurationError(NO_TRL) from None


def _split(rows: list[Row], part: float, seed: int) -> ParsedData:
    held_back_count = num_held_back(part, len(rows))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    held_back = set(order[:held_back_count])
    return ParsedData(
        [row for number, row in enumerate(rows) if number not in held_back],
        [row for number, row in enumerate(rows) if number in held_back],
    )


def check_kind(parsed: ParsedData, peft_config: PeftConfig) -> None:
    """Refuses an adapter that does not go with the kind of the rows, before rows are sent.

    Raises:
        ConfigurationError: preferences are to be trained on by prefix tuning.
    """
    if not are_preferences(parsed.rows):
        return
    if peft_config.peft_type == PeftType.PREFIX_TUNING:  # its vectors are a cache, which DPO's passes turn off
        raise ConfigurationError("prefix tuning is not possible with preferences: choose LoRA or prompt tuning")


def sources(
    parsed: ParsedData, text: TenantText, max_length: int, bucket: int | None, truncation: str
) -> dict[str, Any]:
    """Returns all that the token rows of a run are made from, but for the time: rows, tokenizer and chat template.

    A chat template may print the date, so that a run's tokens differ from day to day; it is the same run all the same.
    Arguments are those of `token_data`.
    """
    fitting = {} if bucket is None and truncation == REFUSE else {"max_length": max_length, "truncation": truncation}
    tokenizer = text.tokenizer
    return {
        "rows": [source_of(row) for row in parsed.rows],
        "eval_rows": [source_of(row) for row in parsed.eval_rows],
        "tokenizer": [
            _tokenizer_source(tokenizer),
            tokenizer.chat_template,
            sorted(tokenizer.special_tokens_map.items()),
        ],
        "bucket": bucket,
        **fitting,
    }


def _tokenizer_source(tokenizer: Any) -> Any:
    """Returns how a tokenizer cuts texts. What an earlier call has left in it, padding and truncation, is left out."""
    try:
        content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception:  # noqa: BLE001 - not a fast tokenizer, or one with a part in Python
        return sorted(tokenizer.get_vocab().items())
    kept = {key: value for key, value in content.items() if key not in ("padding", "truncation")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def token_data(
    parsed: ParsedData, text: TenantText, max_length: int, bucket: int | None, num_virtual: int, truncation: str
) -> RunData:
    """Returns the token rows of a run; `tenant_sdk.training.token_rows.training_rows` describes arguments and
    errors."""
    preferences = are_preferences(parsed.rows)
    make = preference_rows if preferences else training_rows
    rows, eval_rows = (
        make(rows, text, max_length, bucket, num_virtual, truncation) if rows else []
        for rows in (parsed.rows, parsed.eval_rows)
    )
    return RunData(rows, eval_rows, preferences)
