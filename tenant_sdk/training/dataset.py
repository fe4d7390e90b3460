"""This module reads and checks the rows of a user's data set.

Guarantees: every row has exactly one of the forms `messages`, `prompt` with `completion`, `text`, or `prompt` with
`chosen` and `rejected`. Rows of the last form are not mixed with others. An error is one line, which names the file and
the line of the row. It never shows a row's contents, only keys, types and numbers. The modules
tenant_sdk/training/labelled_tokens.py and preference_rows.py turn rows into tokens and labels, and data_files.py reads
files other than JSONL.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tenant_sdk.training.data_files import is_saved_dataset, is_table, one_line, read_parquet, read_saved_dataset
from wire.errors import DatasetError

# These are the roles of transformers' chat format (docs, "Chat templates"); a template may accept fewer.
ROLES = ("system", "developer", "user", "assistant", "tool")

_FORM_KEYS = ("messages", "prompt", "completion", "text", "chosen", "rejected")
# TRL renders these keys into the prompt. A run that ignored them would train on another text than the user means.
_UNSUPPORTED_KEYS = ("tools", "chat_template_kwargs")
# Only a key that looks like a field name is shown: a malformed row may carry its private text as a key.
_SHOWN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", re.ASCII)
_MAX_SHOWN_KEYS = 8


class UnusableRowWarning(UserWarning):
    """Warns that a row could not be used and is left out of training; the calls to the provider do not show this."""


@dataclass(frozen=True, slots=True)
class Text:
    """Holds a row of plain text, in which every token is a label."""

    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Completion:
    """Holds a plain prompt and the text that follows the prompt; the two are joined unchanged."""

    prompt: str = field(repr=False)
    completion: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Holds messages for a chat template.

    The first `num_prompt_messages` messages are the prompt. Of the others, the assistant's messages are labels.
    """

    messages: list[dict[str, str]] = field(repr=False)
    num_prompt_messages: int = 0


@dataclass(frozen=True, slots=True)
class Preference:
    """Holds a prompt with an answer that is preferred to another one; both forms have the same prompt."""

    chosen: Completion | Conversation
    rejected: Completion | Conversation


@dataclass(frozen=True, slots=True)
class Row:
    """Holds one checked row; the repr of a row shows its source and line, but not its contents.

    Attributes:
        source: the file's path as the user gave it; None for rows from memory.
        line: the number of the line in the file, or of the row in memory, from 1.
        form: the row's contents, in one of the four forms.
    """

    source: str | None
    line: int
    form: Text | Completion | Conversation | Preference

    @property
    def where(self) -> str:
        """Returns the words with which every error about this row begins: the file and the line."""
        return _where(self.source, self.line)


def load_rows(data: str | os.PathLike[str] | Iterable[Mapping[str, object]]) -> list[Row]:
    """Reads and checks a data set.

    Args:
        data: the path of a JSONL file (UTF-8, one object per line, blank lines skipped), of a parquet file (with this
            suffix) or of a folder that `datasets.Dataset.save_to_disk` wrote; a `datasets.Dataset`; or any iterable of
            dicts. A key with the value null counts as absent, because `datasets` fills absent columns with
            null. Keys other than those of the forms are ignored, except `tools` and `chat_template_kwargs`, which are
            refused.

    Returns:
        The rows in order, at least one.

    Raises:
        DatasetError: a file cannot be read or is not UTF-8, the data set is empty, a row has none of the forms, or only
            some rows are preferences.
        ConfigurationError: a library that reads this kind of file is not installed.
    """
    if isinstance(data, str | os.PathLike):
        source = os.fspath(data)
        rows = [_parse_row(source, line, value) for line, value in _read(source)]
    elif isinstance(data, Iterable) and not isinstance(data, Mapping | bytes | bytearray):
        source = None
        rows = [_parse_row(source, line, value) for line, value in enumerate(data, start=1)]
    else:
        raise DatasetError(
            f"expected a path, a data set or an iterable of rows; {_type(data)} came (of several splits, choose one)"
        )
    if not rows:
        raise DatasetError(f"{source or 'data set'}: expected at least one row, none came")
    other = next((row for row in rows if are_preferences([row]) is not are_preferences(rows)), None)
    if other is not None:
        raise DatasetError(f"{other.where}: expected chosen and rejected in all rows or in none")
    return rows


def are_preferences(rows: Iterable[Row]) -> bool:
    """Returns whether rows are preferences (prompts with a chosen and a rejected answer); the first row decides. There
    must be one."""
    return isinstance(next(iter(rows)).form, Preference)


# Reading


def _read(path: str) -> Iterator[tuple[int, object]]:
    """Yields (number, value) of each row of a file, from 1; for JSONL the number is that of the line."""
    if is_saved_dataset(path):
        return read_saved_dataset(path)
    return read_parquet(path) if is_table(path) else _read_jsonl(path)


def _read_jsonl(path: str) -> Iterator[tuple[int, object]]:
    """Yields (line number, JSON value) of each line that is not blank."""
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
        raise DatasetError(f"{one_line(path)}: expected a readable JSONL file: {reason}") from None


def _decode(path: str, line: int, raw: bytes) -> str:
    """Returns the line's text, without the byte order mark with which some editors begin a file."""
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as exc:  # `from None`: the original error shows the byte
        raise DatasetError(f"{_where(path, line)}: expected UTF-8; byte {exc.start + 1} of the line is not") from None


def _json_value(path: str, line: int, text: str) -> object:
    """Parses the JSON value of one line of a data set; raises DatasetError if the line is not valid JSON."""
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


def _parse_form(where: str, value: Mapping[str, object]) -> Text | Completion | Conversation | Preference:
    present = [(key, value[key]) for key in _FORM_KEYS if value.get(key) is not None]
    match present:
        case [("text", text)]:
            return Text(_string(f"{where}: text", text))
        case [("messages", messages)]:
            return _conversation(where, "messages", [], _messages(f"{where}: messages", messages))
        case [("prompt", prompt), ("completion", completion)]:
            return _prompt_completion(where, prompt, "completion", completion)
        case [("prompt", prompt), ("chosen", chosen), ("rejected", rejected)]:
            return Preference(_answer(where, prompt, "chosen", chosen), _answer(where, prompt, "rejected", rejected))
    raise DatasetError(
        f"{where}: expected exactly one of messages, prompt with completion, text, or prompt with chosen and rejected; "
        f"{_keys(value)} came"
    )


def _prompt_completion(where: str, prompt: object, key: str, completion: object) -> Completion | Conversation:
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(_string(f"{where}: prompt", prompt), _string(f"{where}: {key}", completion))
    if isinstance(prompt, list | tuple) and isinstance(completion, list | tuple):
        given = _messages(f"{where}: prompt", prompt)
        return _conversation(where, key, given, _messages(f"{where}: {key}", completion))
    raise DatasetError(
        f"{where}: expected prompt and {key} to be two strings or two lists of messages; "
        f"{_type(prompt)} and {_type(completion)} came"
    )


def _answer(where: str, prompt: object, key: str, answer: object) -> Completion | Conversation:
    """Returns the form of a preference's answer. It is one message, so that every token after the prompt is the
    assistant's."""
    if isinstance(answer, list | tuple) and len(answer) > 1:
        raise DatasetError(f"{where}: {key}: expected one message, the assistant's; {len(answer)} came")
    return _prompt_completion(where, prompt, key, answer)


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


# Messages


def _where(source: str | None, line: int) -> str:
    if source is None:
        return f"data set, row {line}"
    return f"{one_line(source)}, {'row' if is_table(source) else 'line'} {line}"


def _type(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _keys(value: Mapping[Any, object]) -> str:
    """Returns the keys of a row with the types of their values; a key that does not look like a field name is not
    shown."""
    shown = [key if isinstance(key, str) and _SHOWN_KEY.fullmatch(key) else "(another key)" for key in value]
    listed = [f"{key} ({_type(part)})" for key, part in zip(shown, value.values(), strict=True)]
    more = [f"{len(listed) - _MAX_SHOWN_KEYS} more"] if len(listed) > _MAX_SHOWN_KEYS else []
    return ", ".join(listed[:_MAX_SHOWN_KEYS] + more) or "no key"
