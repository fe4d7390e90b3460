"""This module turns checked rows into token ids and labels, and makes batches. Only text to be learnt gets labels.

Guarantees: a label is the token at the same position, or -100 for no loss. Every row has at least one label that a
causal model is trained on, unless an unverified provider's tokenizer made the row unusable. An error never shows a
row's contents. Chat templates are rendered only in transformers' own sandbox. Rows are not shuffled, packed or
truncated here; `pad_rows` may cut them (tenant_sdk/text/rows.py). Not guaranteed: that a special token in the user's
text is treated as text; it becomes a special token, as in TRL.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from jinja2 import TemplateError, TemplateSyntaxError

from tenant_sdk.text.failures import TokenizerFailed, surviving
from tenant_sdk.text.template import TemplateDoesNotFit
from tenant_sdk.training.dataset import Completion, Conversation, Row, Text, UnusableRowWarning
from tenant_sdk.warn import warn_and_go_on
from wire.errors import ConfigurationError, DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The value is the default of torch.nn.CrossEntropyLoss's ignore_index; transformers' ForCausalLMLoss relies on it.
IGNORE_INDEX = -100

# Errors that a template may raise if it does not fit a conversation, jinja2's own errors included.
RENDER_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
# The most roles that an error lists about a conversation that does not fit the template.
_MAX_SHOWN_ROLES = 8


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

    def __call__(self, features: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Pads some rows to the length of the longest and returns them as one batch.

        Args:
            features: dicts as `tokenize` returns them.

        Returns:
            `input_ids`, `labels` and `attention_mask`, each int64 on the CPU, shape (batch, longest row).
        """
        padding = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX, "attention_mask": 0}
        num_tokens = max(len(row["input_ids"]) for row in features)
        return {
            key: torch.tensor(
                [[*row[key], *[pad] * (num_tokens - len(row[key]))] for row in features], dtype=torch.long
            )
            for key, pad in padding.items()
        }


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
    for turn in range(form.num_prompt_messages, len(form.messages)):
        if form.messages[turn]["role"] == "assistant":
            span = whole.span(turn)
            labels[span] = whole.token_ids[span]
    return whole.token_ids, labels


class _Rendered:
    """Holds the tokens of a whole conversation, and finds the span of each of the assistant's messages in them."""

    def __init__(self, where: str, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> None:
        self._where = where
        self._messages = messages
        self._tokenizer = tokenizer
        self._check_template()
        self.token_ids = self._ids(len(messages))

    def span(self, turn: int) -> slice:
        """Returns the token positions of message `turn`, from after the generation prompt to the message's end.

        The tokens of the messages before `turn` are usually a prefix of the whole conversation. A difference at the end
        of this prefix is accepted if the span still contains the whole answer. Such a difference arises if a token
        merges across the boundary, or if the generation prompt opens a thinking block that the answer does not keep.
        Any other difference is refused, because the template renders earlier messages differently: the labels would
        then contain the user's words or miss the assistant's.
        """
        opened = self._ids(turn, add_generation_prompt=True)
        start = _common_prefix(opened, self.token_ids)
        is_prefix = start == len(opened)
        if not is_prefix:
            # Either prefix is enough: some templates (Phi-3) end every text without generation prompt by an end token.
            before = (self._text(turn), self._text(turn, add_generation_prompt=True))
            if not self._text(len(self._messages)).startswith(before):
                self._refuse(turn)
            start = max(start, _common_prefix(self._ids(turn), self.token_ids))
        closed = self._ids(turn + 1)
        end = _common_prefix(closed, self.token_ids)
        is_prefix = is_prefix and end == len(closed)
        if not is_prefix and not self._holds(slice(start, end), self._messages[turn]["content"]):
            self._refuse(turn)
        return slice(start, end)

    def _holds(self, span: slice, content: str) -> bool:
        # The content is stripped, because many templates trim what they render.
        text: str = self._tokenizer.decode(self.token_ids[span], clean_up_tokenization_spaces=False)
        return content.strip() in text

    def _refuse(self, turn: int) -> NoReturn:
        raise DatasetError(
            f"{self._where}: message {turn + 1}: the chat template renders this answer or what precedes it differently "
            "within the whole conversation: give one row per answer, or plain prompt and completion"
        )

    def _ids(self, num_messages: int, add_generation_prompt: bool = False) -> list[int]:
        return list(self._render(num_messages, add_generation_prompt, tokenize=True, return_dict=True)["input_ids"])

    def _text(self, num_messages: int, add_generation_prompt: bool = False) -> str:
        return str(self._render(num_messages, add_generation_prompt, tokenize=False))

    def _render(self, num_messages: int, add_generation_prompt: bool, **options: bool) -> Any:
        """Renders messages by `apply_chat_template`, so that a provider's template runs only in transformers' sandbox.

        Errors are raised `from None`, because a template can raise an error with any text, such as the messages.
        """
        messages = self._messages[:num_messages]
        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **options)
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


def _common_prefix(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """Returns the number of leading tokens that two sequences share."""
    for index, (left, right) in enumerate(zip(ids, other_ids, strict=False)):
        if left != right:
            return index
    return min(len(ids), len(other_ids))
