"""A user's data set: rows read and checked, tokenized with completion-only labels, padded into batches.

Guarantees: every row has exactly one of the forms `messages`, `prompt` with `completion`, or `text`; a label is the
token at its own position or -100; every row has at least one label that a causal model is trained on; no row is cut
short here (`pad_rows` may cut: tenant_sdk/text/rows.py). An error is one line that names the file and the line, and
never shows what the row says: only the keys, the types and the lengths that came.
It does not render a chat template outside transformers' own sandbox; does not shuffle, pack or truncate; and does not
hide special tokens that the user's own text spells out (they become special tokens, as in TRL).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from jinja2 import TemplateError, TemplateSyntaxError

from tenant_sdk.text.failures import TokenizerFailed, surviving
from tenant_sdk.text.template import TemplateDoesNotFit
from tenant_sdk.warn import warn_and_go_on
from wire.errors import ConfigurationError, DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The value is the default of torch.nn.CrossEntropyLoss's ignore_index; transformers' ForCausalLMLoss relies on it.
IGNORE_INDEX = -100

# These are the roles of transformers' chat format (docs, "Chat templates"); a template may accept fewer.
ROLES = ("system", "developer", "user", "assistant", "tool")

_FORM_KEYS = ("messages", "prompt", "completion", "text")
# TRL renders these into the prompt; to ignore them would train on another text than the user means.
_UNSUPPORTED_KEYS = ("tools", "chat_template_kwargs")
# Only a key that looks like a field name is shown: a malformed row may carry its private text as a key.
_SHOWN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", re.ASCII)
_MAX_SHOWN_KEYS = 8
# Errors that a template raises where it does not fit a conversation, jinja2's own included.
RENDER_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class UnusableRowWarning(UserWarning):
    """A row that could not be used is left out, and nothing that is sent shows it."""


@dataclass(frozen=True, slots=True)
class Text:
    """A row of plain text: every token is a label."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """A plain prompt and the text that should follow it, joined without change."""

    prompt: str = field(repr=False)
    completion: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for a chat template; the assistant's turns from `num_prompt_messages` on are labels."""

    messages: list[dict[str, str]] = field(repr=False)
    num_prompt_messages: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One checked row; its repr shows where it came from but not what it says.

    Attributes:
        source: the file as the user named it, or None for rows that came from memory.
        line: the line in the file or the number of the row, from 1.
        form: the row's contents, in one of the three forms.
    """

    source: str | None
    line: int
    form: Text | Completion | Conversation

    @property
    def where(self) -> str:
        """Returns the start of every message about this row."""
        return _where(self.source, self.line)


def load_rows(data: str | os.PathLike[str] | Iterable[Mapping[str, object]]) -> list[Row]:
    """Read and check a data set.

    Args:
        data: the path of a JSONL file (UTF-8, one object per line, blank lines skipped), a `datasets.Dataset`, or any
            iterable of dicts. A key whose value is null counts as absent, since `datasets` fills absent columns so.
            Other keys of a row are ignored, except `tools` and `chat_template_kwargs`, which are refused.

    Returns:
        At least one row, in order.

    Raises:
        DatasetError: a file cannot be read or is not UTF-8, the data set is empty, or a row has none of the forms.
    """
    if isinstance(data, str | os.PathLike):
        source = os.fspath(data)
        rows = [_parse_row(source, line, value) for line, value in _read_jsonl(source)]
    elif isinstance(data, Iterable) and not isinstance(data, Mapping | bytes | bytearray):
        source = None
        rows = [_parse_row(source, line, value) for line, value in enumerate(data, start=1)]
    else:
        raise DatasetError(
            f"expected a path, a data set or an iterable of rows; {_type(data)} came (of several splits, choose one)"
        )
    if not rows:
        raise DatasetError(f"{source or 'data set'}: expected at least one row, none came")
    return rows


def tokenize(
    rows: Iterable[Row],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    add_eos: bool = True,
    num_virtual_tokens: int = 0,
    *,
    never_refuse: bool = False,
) -> list[dict[str, list[int]]]:
    """Turn rows into token ids with completion-only labels.

    A conversation is rendered once by the tokenizer's chat template; an assistant's turn runs from the token prefix
    that the messages before it give with `add_generation_prompt=True` to the token prefix that ends with it, so its
    labels include the template's end marker. A prompt and a completion are joined as strings and tokenized together;
    the labels start where these tokens leave the tokens of the prompt alone. `text` is all labels.

    Args:
        rows: from `load_rows`.
        tokenizer: any transformers tokenizer; conversations need its chat template.
        max_length: the most tokens that a row may have, usually the model's context.
        add_eos: end `text` and plain completions with the end-of-sequence token, unless they have it. Conversations
            never get one: their template has its own end marker.
        num_virtual_tokens: the positions that a prompt-learning adapter adds to every row; they are already taken off
            `max_length`, and are named in the error about a row that is too long.
        never_refuse: accepts a row whose tokens cannot be used or are too many, for a tokenizer that may have been made
            to refuse some texts: a refusal would be visible. A row whose tokens cannot be used has no labels; a row
            that is too long is left as it is.

    Returns:
        One dict per row: `input_ids`, `labels` (IGNORE_INDEX where no loss is wanted) and `attention_mask` (ones), all
        of the row's length.

    Raises:
        DatasetError: the template refuses or rewrites a row, or a row has no label token, or is too long.
        ConfigurationError: the tokenizer lacks the chat template or the end-of-sequence token that a row needs.

    Source: TRL 1.16, SFTTrainer._prepare_dataset (tokenize_fn, add_eos); unlike there, a row is never truncated, only
        assistant turns of a conversational completion are labels, and a template that rewrites history is an error.
    """
    if not never_refuse:
        return [_tokenize_row(row, tokenizer, max_length, add_eos, num_virtual_tokens) for row in rows]
    return [_tokenize_whatever_comes(row, tokenizer, add_eos) for row in rows]


class Collator:
    """Pads rows on the right to the longest of their batch.

    The attention mask follows the rows' lengths, not the pad token: many tokenizers pad with their end marker, and the
    real one must stay visible.
    """

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, features: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Makes one batch.

        Args:
            features: dicts from `tokenize`.

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


# Reading


def _read_jsonl(path: str) -> Iterator[tuple[int, object]]:
    """Yields line number and JSON value of each line that is not blank."""
    try:
        # The file is read as bytes, so that only \n ends a line (a JSON string may hold U+2028) and a bad byte has a
        # line number.
        with open(path, "rb") as file:
            for line, raw in enumerate(file, start=1):
                text = _decode(path, line, raw)
                if text.strip():
                    yield line, _json_value(path, line, text)
    except (OSError, ValueError) as exc:  # ValueError: the path holds a null character
        reason = exc.strerror if isinstance(exc, OSError) else "not a file name"
        raise DatasetError(f"{_one_line(path)}: expected a readable JSONL file: {reason}") from None


def _decode(path: str, line: int, raw: bytes) -> str:
    """Returns the line's text; a byte order mark is dropped, as some editors begin a file with one."""
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as exc:  # `from None`: the original error shows the byte
        raise DatasetError(f"{_where(path, line)}: expected UTF-8; byte {exc.start + 1} of the line is not") from None


def _json_value(path: str, line: int, text: str) -> object:
    """Returns the line's JSON value."""
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as exc:  # `from None`: the original error carries the whole line
        raise DatasetError(
            f"{_where(path, line)}: expected one JSON object per line; invalid JSON at column {exc.colno}"
        ) from None
    except (RecursionError, ValueError):  # nesting or digits exceed the interpreter's limits
        raise DatasetError(f"{_where(path, line)}: invalid JSON: nested too deeply or a number too long") from None
    return value


# Checking


def _parse_row(source: str | None, line: int, value: object) -> Row:
    where = _where(source, line)
    if not isinstance(value, Mapping):
        raise DatasetError(f"{where}: expected an object, {_type(value)} came")
    if any(value.get(key) for key in _UNSUPPORTED_KEYS):
        raise DatasetError(f"{where}: {' and '.join(_UNSUPPORTED_KEYS)} are not supported: remove them from the row")
    return Row(source, line, _parse_form(where, value))


def _parse_form(where: str, value: Mapping[str, object]) -> Text | Completion | Conversation:
    present = [(key, value[key]) for key in _FORM_KEYS if value.get(key) is not None]
    match present:
        case [("text", text)]:
            return Text(_string(f"{where}: text", text))
        case [("messages", messages)]:
            return _conversation(where, "messages", [], _messages(f"{where}: messages", messages))
        case [("prompt", prompt), ("completion", completion)]:
            return _prompt_completion(where, prompt, completion)
    raise DatasetError(
        f"{where}: expected exactly one of messages, prompt with completion, or text; {_keys(value)} came"
    )


def _prompt_completion(where: str, prompt: object, completion: object) -> Completion | Conversation:
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(_string(f"{where}: prompt", prompt), _string(f"{where}: completion", completion))
    if isinstance(prompt, list | tuple) and isinstance(completion, list | tuple):
        given = _messages(f"{where}: prompt", prompt)
        return _conversation(where, "completion", given, _messages(f"{where}: completion", completion))
    raise DatasetError(
        f"{where}: expected prompt and completion to be two strings or two lists of messages; "
        f"{_type(prompt)} and {_type(completion)} came"
    )


def _conversation(where: str, key: str, given: list[dict[str, str]], wanted: list[dict[str, str]]) -> Conversation:
    if wanted[-1]["role"] != "assistant":
        raise DatasetError(f"{where}: {key}: expected the last message to be the assistant's")
    messages = given + wanted
    if not given and messages[0]["role"] == "assistant":
        raise DatasetError(f"{where}: {key}: expected a message of another role before the assistant's first")
    return Conversation(messages, len(given))


def _messages(where: str, value: object) -> list[dict[str, str]]:
    if not isinstance(value, list | tuple):
        raise DatasetError(f"{where}: expected a list of messages, {_type(value)} came")
    if not value:
        raise DatasetError(f"{where}: expected at least one message, none came")
    return [_message(f"{where}: message {number}", message) for number, message in enumerate(value, start=1)]


def _message(where: str, value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise DatasetError(f"{where}: expected an object with role and content, {_type(value)} came")
    # A further key (tool_calls, images) would be rendered or lost depending on the template, so it is refused.
    if {key for key, part in value.items() if part is not None} - {"role", "content"} or "role" not in value:
        raise DatasetError(f"{where}: expected the keys role and content; {_keys(value)} came")
    role, content = value["role"], value.get("content")
    if not isinstance(role, str) or role not in ROLES:
        came = "another string" if isinstance(role, str) else _type(role)
        raise DatasetError(f"{where}: expected the role to be one of {', '.join(ROLES)}; {came} came")
    return {"role": role, "content": _string(f"{where}: content", content)}


def _string(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise DatasetError(f"{where}: expected a string, {_type(value)} came")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell a lone surrogate; tokenizers do not accept one
        raise DatasetError(f"{where}: expected Unicode text, a lone surrogate came") from None
    return value


# Tokenizing


def _tokenize_row(
    row: Row, tokenizer: PreTrainedTokenizerBase, max_length: int, add_eos: bool, num_virtual_tokens: int
) -> dict[str, list[int]]:
    with surviving(row.where):
        if isinstance(row.form, Conversation):
            input_ids, labels = _tokenize_conversation(row.where, row.form, tokenizer)
        else:
            input_ids, labels = _tokenize_plain(row.form, tokenizer, add_eos)
    if len(input_ids) > max_length:
        beside = f" beside the adapter's {num_virtual_tokens} virtual ones" if num_virtual_tokens else ""
        raise DatasetError(f"{row.where}: expected at most {max_length} tokens{beside}, {len(input_ids)} came")
    # A causal model predicts token i from the tokens before it, so a label at position 0 trains nothing.
    if all(label == IGNORE_INDEX for label in labels[1:]):
        raise DatasetError(
            f"{row.where}: expected at least one label token after the first of the row's {len(input_ids)} tokens "
            f"(at most {max_length}), none came"
        )
    return {"input_ids": input_ids, "labels": labels, "attention_mask": [1] * len(input_ids)}


def _tokenize_whatever_comes(row: Row, tokenizer: PreTrainedTokenizerBase, add_eos: bool) -> dict[str, list[int]]:
    """Tokenizes a row; in place of a row that cannot be used it returns one token without a label."""
    try:
        return _tokenize_row(row, tokenizer, sys.maxsize, add_eos, 0)
    except (DatasetError, TokenizerFailed, TemplateDoesNotFit) as exc:
        warn_and_go_on(f"a row is left out of the training: {exc}", UnusableRowWarning, stacklevel=5)
        return {"input_ids": [0], "labels": [IGNORE_INDEX], "attention_mask": [1]}


def _tokenize_plain(
    form: Text | Completion, tokenizer: PreTrainedTokenizerBase, add_eos: bool
) -> tuple[list[int], list[int]]:
    """Returns token ids and labels of a row without a template."""
    start = 0
    if isinstance(form, Text):
        input_ids = list(tokenizer(form.text)["input_ids"])
    else:
        input_ids = list(tokenizer(form.prompt + form.completion)["input_ids"])
        # Where the two strings merge into one token, that token is a label: the labels always cover the whole
        # completion.
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
    """A whole conversation as tokens, and where each of the assistant's turns lies in them."""

    def __init__(self, where: str, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> None:
        self._where = where
        self._messages = messages
        self._tokenizer = tokenizer
        self._check_template()
        self.token_ids = self._ids(len(messages))

    def span(self, turn: int) -> slice:
        """Returns the tokens of message `turn`, from after the generation prompt to its end.

        A prompt that is not exactly a token prefix is accepted only where nothing but its end differs, because a token
        merges across the boundary or the generation prompt opens more than the answer keeps (a thinking block), and
        where the span still holds the whole answer. Otherwise the template rewrites history: the labels would hold the
        user's words or miss the assistant's.
        """
        opened = self._ids(turn, add_generation_prompt=True)
        start = _common_prefix(opened, self.token_ids)
        is_prefix = start == len(opened)
        if not is_prefix:
            # Either prefix will do: some templates end everything that is no generation prompt with an end token
            # (Phi-3).
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
        """Calls `apply_chat_template`, which is transformers' sandbox: a provider's template is never run elsewhere.

        Errors are raised `from None`: a template can raise any text, the messages included.
        """
        messages = self._messages[:num_messages]
        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **options)
        except TemplateSyntaxError:
            raise ConfigurationError("the tokenizer's chat template does not compile") from None
        except RENDER_ERRORS:
            roles = ", ".join(message["role"] for message in messages[:_MAX_SHOWN_KEYS])
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


# Messages


def _where(source: str | None, line: int) -> str:
    return f"data set, row {line}" if source is None else f"{_one_line(source)}, line {line}"


def _one_line(path: str) -> str:
    """Returns the path as given, or quoted where it would break the line or the terminal."""
    return path if path.isprintable() else ascii(path)


def _type(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _keys(value: Mapping[Any, object]) -> str:
    """Returns the keys of a row with their types, as far as they look like field names."""
    shown = [key if isinstance(key, str) and _SHOWN_KEY.fullmatch(key) else "(another key)" for key in value]
    listed = [f"{key} ({_type(part)})" for key, part in zip(shown, value.values(), strict=True)]
    more = [f"{len(listed) - _MAX_SHOWN_KEYS} more"] if len(listed) > _MAX_SHOWN_KEYS else []
    return ", ".join(listed[:_MAX_SHOWN_KEYS] + more) or "no key"
