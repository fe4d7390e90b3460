"""This module reads and checks the rows of a user's data set: a file of JSON, CSV or parquet, a folder or table of the
library `datasets`, a table of another library, or rows in memory.

tenant_sdk/training/token_rows.py turns the rows into tokens and labels. The libraries for parquet, folders and tables
are optional (the extra `parquet`), and are imported when they are needed.

Guarantees:
- every row has exactly one of the forms `messages`, `prompt` with `completion`, `text`, or `prompt` with `chosen` and
  `rejected`; rows as OpenAI, ShareGPT and Alpaca have them are turned into these. Preferences are not mixed with other
  rows;
- an error is one line, which names the file and the line of the row. It never shows a row's contents, only keys, types
  and numbers;
- rows that are not JSON are read into memory, and no copy of them is written anywhere, not even into a cache. No file
  is opened for them but the one that the user names and, for a saved data set, those in its folder that hold its rows:
  columns of images, sounds and other media, whose rows may name files, are left out before a row is read.
"""

from __future__ import annotations

import csv
import difflib
import errno
import functools
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wire.errors import ConfigurationError, DatasetError

Numbered = tuple[str, int, object]
"""A row of a file with its place: (`line` or `row`, the number of it from 1, the row)."""

_INSTALL = "pip install 'veilbase[parquet]'"
_MARKS = ("dataset_info.json", "dataset_dict.json")
"""The names of files that `save_to_disk` writes into the folder of a data set, or of several splits."""
_TEXT_TYPES = frozenset(
    ("Value", "ClassLabel", "Json", "List", "LargeList", "Sequence", "Translation", "TranslationVariableLanguages")
)
"""The types of columns, in the library `datasets`, whose values are in the data set itself; `Image` and `Audio` may be
paths of files."""
_DELIMITERS = ",;\t"
_MOST_CELL_BYTES = 1 << 30
_UNPACK = "a packed file is not read: unpack it first"
_CONVERT = "such a table is not read: save it as CSV or parquet"
_PICKLED = "a pickle is not opened, since it can run code: save the rows as JSONL"
NOT_READ = {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z"), _UNPACK),
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".arrow", ".feather", ".sqlite", ".db"), _CONVERT),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".npy", ".npz"), _PICKLED),
}
"""What to do about files that are not read, by the ends of their names."""


def one_line(path: str) -> str:
    """Returns the path, escaped as ASCII if it has characters that would break the line or the terminal."""
    return path if path.isprintable() else ascii(path)


def _is_saved_dataset(path: str) -> bool:
    """Returns whether a path is an existing folder, which is then taken for a saved data set."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # the path is too long, or holds a null character
        return False


def _reader_of(path: str, keys: Collection[str]) -> Iterator[Numbered] | None:
    """Returns a reader of the rows of a file or folder; None for a file that is to be read as JSON.

    Args:
        path: the path as the user gave it; its end says what kind of file it is.
        keys: the keys of rows that are used.

    Raises:
        DatasetError: such files are not read; the text says what to do.
    """
    suffix = os.path.splitext(path)[1].lower()
    if _is_saved_dataset(path):
        return _read_saved_dataset(path, keys)
    if suffix in NOT_READ:
        raise DatasetError(f"{one_line(path)}: {NOT_READ[suffix]}")
    if suffix in (".csv", ".tsv"):
        return _read_csv(path)
    return _read_parquet(path) if suffix == ".parquet" else None


def _rows_of_table(data: object, keys: Collection[str]) -> Iterable[object] | None:
    """Returns the rows of a table in memory, as dicts; None if `data` is not one of the known kinds.

    Args:
        data: a DataFrame of pandas or polars, a table of pyarrow, or a data set of the library `datasets`.
        keys: the keys of rows that are used.

    Raises:
        DatasetError: a column that is used holds something other than text.
    """
    table: Any = data
    if _is_a(data, "pandas", "DataFrame"):
        missing_as_none = table.astype(object).where(table.notna(), None)
        return [_without_arrays(row) for row in missing_as_none.to_dict("records")]
    if _is_a(data, "polars", "DataFrame"):
        return table.to_dicts()  # type: ignore[no-any-return]
    if _is_a(data, "pyarrow", "Table") or _is_a(data, "pyarrow", "RecordBatch"):
        return table.to_pylist()  # type: ignore[no-any-return]
    if _is_a(data, "datasets", "Dataset") or _is_a(data, "datasets", "IterableDataset"):
        found: Iterable[object] = _text_columns("data set", table, keys)
        return found
    return None


def _is_a(value: object, library: str, name: str) -> bool:
    """Returns whether a value is an object of a library's class, without importing the library."""
    kind = getattr(sys.modules.get(library), name, None)
    return kind is not None and isinstance(value, kind)


def _without_arrays(value: Any) -> Any:
    """Returns a value in which lists replace numpy's arrays, as which pandas holds lists that it read from parquet."""
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _without_arrays(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_arrays(part) for part in value]
    return None if isinstance(value, float) and value != value else value


def _unreadable(path: str, kind: str, exc: Exception) -> DatasetError:
    """Returns the error for a file that cannot be read; it quotes nothing of the file.

    Args:
        path: the path as the user gave it.
        kind: the kind of file that was expected.
        exc: what was raised; a ValueError may be about a path with a null character.
    """
    if isinstance(exc, OSError) and exc.errno == errno.ENOENT:
        return DatasetError(f"there is no file {one_line(path)}")
    reason = f": {os.strerror(exc.errno)}" if isinstance(exc, OSError) and exc.errno else ""
    if "\0" in path:
        reason = ": not a file name"
    return DatasetError(f"{one_line(path)}: expected a readable {kind} file{reason}")


def _read_csv(path: str) -> Iterator[Numbered]:
    """Yields each row of a CSV file, whose first line names its columns; an empty cell counts as absent."""
    csv.field_size_limit(max(csv.field_size_limit(), _MOST_CELL_BYTES))  # a cell may be a long text
    line = 1
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            delimiter = max(_DELIMITERS, key=header.count)
            names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter, strict=True), [])]
            if len({*names}) != len(names):
                raise DatasetError(f"{one_line(path)}, line 1: expected columns of different names, one comes twice")
            _check_columns(path, names)
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            while True:
                line = reader.line_num + 2
                cells = next(reader, None)
                if cells is None:
                    return
                if not any(cells):
                    continue
                if len(cells) != len(names):
                    raise DatasetError(
                        f"{one_line(path)}, line {line}: expected {len(names)} cells, as in the header; "
                        f"{len(cells)} came"
                    )
                yield "line", line, {name: cell or None for name, cell in zip(names, cells, strict=True)}
    except UnicodeDecodeError:  # `from None`, here and below: the original error may show a part of the file
        raise DatasetError(f"{one_line(path)}: expected UTF-8: save the file as CSV UTF-8") from None
    except csv.Error:
        raise DatasetError(
            f"{one_line(path)}, line {line}: expected CSV, with \" around a cell that holds a comma, a line's end or a "
            'quotation mark, and "" for the latter'
        ) from None
    except (OSError, ValueError) as exc:
        raise _unreadable(path, "CSV", exc) from None


def _check_columns(path: str, names: list[str]) -> None:
    """Raises DatasetError if the first line of a CSV file does not name the columns of any form of rows. A name that
    does not look like one is not shown, since a file without such a line begins with a row."""
    if not names or any(columns <= {*names} for columns in _COLUMNS_OF_FORMS):
        return
    shown = [name if _SHOWN_KEY.fullmatch(name) else "(another name)" for name in names[:_MAX_SHOWN_KEYS]]
    more = f" and {len(names) - _MAX_SHOWN_KEYS} more" if len(names) > _MAX_SHOWN_KEYS else ""
    hint = _hint(dict.fromkeys(names, ""))
    if not hint and len({*shown}) < len(names):
        hint = ": does the file lack its first line, with the columns' names?"
    raise DatasetError(
        f"{one_line(path)}, line 1: expected the columns prompt and completion, or text, or prompt, chosen and "
        f"rejected, or instruction and output; found {', '.join(shown)}{more}{hint}"
    )


def _read_parquet(path: str) -> Iterator[Numbered]:
    """Yields each row of a parquet file, row group by row group.

    Raises:
        DatasetError: the file cannot be read.
        ConfigurationError: pyarrow is not installed.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ConfigurationError(f"a parquet file needs pyarrow: {_INSTALL}") from None
    number = 0
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield "row", number, row
    except (ArrowException, OSError, ValueError) as exc:  # `from None`: Arrow's error may quote the file
        raise _unreadable(path, "parquet", exc) from None


def _read_saved_dataset(path: str, keys: Collection[str]) -> Iterator[Numbered]:
    """Yields each row of a data set that `datasets.Dataset.save_to_disk` wrote.

    Raises:
        DatasetError: the folder holds no data set, holds several splits, or cannot be read; or a column that is used
            holds something other than text.
        ConfigurationError: the library `datasets` is not installed.
    """
    shown = one_line(path)
    if not any((Path(path) / name).is_file() for name in _MARKS):
        raise DatasetError(
            f"{shown}: expected a folder written by datasets' save_to_disk, found another one: name a file in it, or "
            "such a folder"
        )
    try:
        from datasets import Dataset
    except ImportError:
        raise ConfigurationError(f"a saved data set needs the library datasets: {_INSTALL}") from None
    try:
        _check_files(Path(path), shown)
        found: Any = Dataset.load_from_disk(path)
        for number, row in enumerate(_text_columns(shown, found, keys), start=1):
            yield "row", number, row
    except DatasetError:
        raise
    except Exception:  # noqa: BLE001 - Arrow, JSON and the file system raise errors of their own, which may quote rows
        raise DatasetError(f"{shown}: expected a readable data set of the library datasets") from None


def _check_files(folder: Path, shown: str) -> None:
    """Refuses a saved data set that names files elsewhere, and several splits, of which none is opened.

    Raises:
        DatasetError: the data set is refused.
        OSError, ValueError, LookupError, TypeError: a file of the folder is missing or damaged.
    """
    if not all((folder / name).is_file() for name in ("dataset_info.json", "state.json")):
        named = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        splits = ", ".join(map(one_line, named))
        raise DatasetError(f"{shown}: expected one data set, found the splits {splits}: name {shown}/SPLIT")
    for each in json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]:
        name = each["filename"]
        if os.path.basename(name) != name or not (folder / name).is_file():
            raise DatasetError(f"{shown}: expected the data set's files in this folder, another one is named: copy it")


def _text_columns(where: str, dataset: Any, keys: Collection[str]) -> Any:
    """Returns a data set without its columns of media: a row of these may name any file, and reading it opens the
    file."""
    if dataset.features is None:  # rows of a generator, which are not decoded
        return dataset
    media = {name: kind for name, kind in ((name, _medium(type_)) for name, type_ in dataset.features.items()) if kind}
    for name, kind in media.items():
        if name in keys:
            raise DatasetError(f"{where}: expected text in the column {name}, {kind} came: only text is trained on")
    kept = [name for name in dataset.features if name not in media]
    return dataset.select_columns(kept).with_format(None)


def _medium(feature: Any) -> str | None:
    """Returns the name of the first type in a column's type that may lie outside the data set; None if there is
    none."""
    if isinstance(feature, dict | list | tuple):
        parts = feature.values() if isinstance(feature, dict) else feature
        return next(filter(None, map(_medium, parts)), None)
    kind = type(feature).__name__
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _medium(inner)
    return None if kind in _TEXT_TYPES or kind.startswith("Array") else kind


# These are the roles of transformers' chat format (docs, "Chat templates"); a template may accept fewer.
ROLES = ("system", "developer", "user", "assistant", "tool")

_FORM_KEYS = ("messages", "prompt", "completion", "text", "chosen", "rejected")
# TRL renders these keys into the prompt. A run that ignored them would train on another text than the user means.
_UNSUPPORTED_KEYS = ("tools", "chat_template_kwargs")
_CONVERSATIONS = ("conversations", "conversation")
"""ShareGPT's keys for a list of messages; data sets have either."""
_OTHER_KEYS = (*_CONVERSATIONS, "system", "instruction", "input", "output", "preferred_output", "non_preferred_output")
_USED_KEYS = frozenset((*_FORM_KEYS, *_OTHER_KEYS, *_UNSUPPORTED_KEYS, "functions", "history", "context", "label"))
_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"), "system": "system",
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot", "bard", "bing"), "assistant"),
}  # fmt: skip
"""The values of `from` in ShareGPT's messages, by the role of transformers' chat format."""
_PAIRS = (
    ("question", "answer"), ("query", "response"), ("query", "answer"), ("instruction", "response"),
    ("instruction", "completion"), ("prompt", "response"), ("prompt", "output"), ("prompt", "answer"),
    ("input", "output"), ("question", "response"), ("source", "target"),
)  # fmt: skip
"""Names that data sets have for a prompt and what follows it, for the hint of an error."""
_NEARLY = 0.8
"""How alike two keys are, as difflib counts it, if one is taken for a misspelt other: `promt` and `text_`, but not
`test`. One with the same letters (`roel`) counts too."""
_NAMES_OF_COLUMNS = (*_FORM_KEYS, *_OTHER_KEYS)
_COLUMNS_OF_FORMS = (
    {"messages"}, {"text"}, {"prompt", "completion"}, {"prompt", "chosen", "rejected"}, {"instruction", "output"},
    {"instruction", "chosen", "rejected"}, {"input", *_OTHER_KEYS[-2:]}, *({key} for key in _CONVERSATIONS),
)  # fmt: skip
"""The columns that a table must have for each form of rows; it may have several forms, one a row."""
_OPTIONAL_KEYS = ("input", "system")
"""Keys that are read beside `instruction` or `conversations` if they are there."""
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

    The first `num_prompt_messages` messages are the prompt. Of the others, the assistant's messages are labels, but for
    those whose numbers (from 0) are in `untrained`: they have OpenAI's `weight` of 0.
    """

    messages: list[dict[str, str]] = field(repr=False)
    num_prompt_messages: int = 0
    untrained: frozenset[int] = frozenset()

    @property
    def trained_turns(self) -> list[int]:
        """Returns the numbers (from 0) of the messages that are labels, in order."""
        return [
            turn
            for turn in range(self.num_prompt_messages, len(self.messages))
            if self.messages[turn]["role"] == "assistant" and turn not in self.untrained
        ]


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
        line: the number of the line in the file, or of the row in a table or in memory, from 1.
        form: the row's contents, in one of the four forms.
        unit: what `line` counts, `line` or `row`.
    """

    source: str | None
    line: int
    form: Text | Completion | Conversation | Preference
    unit: str = "line"

    @property
    def where(self) -> str:
        """Returns the words with which every error about this row begins: the file and the line."""
        return _where(self.source, self.line, self.unit)


def source_of(row: Row) -> dict[str, Any]:
    """Returns the contents of a row as plain values, for a fingerprint of a run."""
    return {"form": type(row.form).__name__, **asdict(row.form)}


def load_rows(data: object) -> list[Row]:
    """Reads and checks a data set.

    Args:
        data: the path of a JSON file (UTF-8; one object per line, blank lines skipped, or one list of objects), of a
            CSV or parquet file (with such a suffix) or of a folder that `datasets.Dataset.save_to_disk` wrote; a table
            of `datasets`, pandas, polars or pyarrow; or any iterable of dicts. A key with the value null counts as
            absent, because tables fill absent columns with null. Keys other than those of the forms are ignored,
            except those that would change what is trained on, such as `tools`, which are refused.

    Returns:
        The rows in order, at least one.

    Raises:
        DatasetError: a file cannot be read or is not UTF-8, the data set is empty, a row has none of the forms, or only
            some rows are preferences.
        ConfigurationError: a library that reads this kind of file is not installed.
    """
    source: str | None = None
    if isinstance(data, str | os.PathLike):
        source = str(os.fspath(data))
        rows = [_parse_row(source, line, value, unit) for unit, line, value in _read(source)]
    elif (table := _rows_of_table(data, _USED_KEYS)) is not None:
        rows = [_parse_row(None, line, value) for line, value in enumerate(table, start=1)]
    elif isinstance(data, Iterable) and not isinstance(data, Mapping | bytes | bytearray):
        rows = [_parse_row(None, line, value) for line, value in enumerate(data, start=1)]
    else:
        raise DatasetError(
            f"expected a path, a data set or an iterable of rows; {_type(data)} came (of several splits, choose one; "
            "of a dict of columns, make rows)"
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


def check_alike(rows: Iterable[Row], eval_rows: Iterable[Row]) -> None:
    """Raises DatasetError if only one of two data sets holds preferences."""
    if are_preferences(rows) is not are_preferences(eval_rows):
        raise DatasetError("expected chosen and rejected in the rows of data and of eval_data, or in neither")


def num_held_back(part: float, num_rows: int) -> int:
    """Returns how many rows a part of a data set holds back for evaluation, at least one.

    Raises:
        ConfigurationError: the part is not between 0 and 1, or leaves no row to train on.
    """
    if isinstance(part, bool) or not 0 < part < 1:
        raise ConfigurationError(f"eval_data must be a data set or a part between 0 and 1, got {part!r}")
    found = max(1, round(part * num_rows))
    if found >= num_rows:
        raise ConfigurationError(f"eval_data={part} of {num_rows} rows leaves none to train on")
    return found


# Reading


def _read(path: str) -> Iterator[Numbered]:
    """Yields (`line` or `row`, its number from 1, value) of each row of a file or a saved data set."""
    reader = _reader_of(path, _USED_KEYS)
    return _read_json(path) if reader is None else reader


def _read_json(path: str) -> Iterator[Numbered]:
    """Yields the JSON value of each line that is not blank; of a file that begins with `[`, the parts of one list."""
    is_first = True
    try:
        # The file is read as bytes, so that only \n ends a line (a JSON string may hold U+2028) and a bad byte has a
        # line number.
        with open(path, "rb") as file:
            for line, raw in enumerate(file, start=1):
                text = _decode(path, line, raw)
                if is_first and text.lstrip().startswith("["):
                    rest = [_decode(path, number, raw) for number, raw in enumerate(file, start=line + 1)]
                    yield from _parts(path, line, "".join([text, *rest]))
                    return
                if text.strip():
                    is_first = False
                    yield "line", line, _json_value(path, line, text)
    except (OSError, ValueError) as exc:
        raise _unreadable(path, "JSON", exc) from None


def _parts(path: str, line: int, text: str) -> Iterator[Numbered]:
    """Yields the parts of a JSON list that begins on a line of a file."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as exc:  # `from None`: the original error carries the whole text
        where = (
            f"{_where(path, line + exc.lineno - 1, 'line')}: expected a JSON list of objects, or one object per line"
        )
        raise DatasetError(f"{where}; invalid JSON at column {exc.colno}") from None
    except (RecursionError, ValueError):
        raise DatasetError(f"{_where(path, line)}: invalid JSON: nested too deeply or a number too long") from None
    yield from (("row", number, part) for number, part in enumerate(found, start=1))


def _decode(path: str, line: int, raw: bytes) -> str:
    """Returns the line's text, without the byte order mark with which some editors begin a file."""
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as exc:  # `from None`: the original error shows the byte
        raise DatasetError(f"{_where(path, line)}: expected UTF-8; byte {exc.start + 1} of the line is not") from None


def _json_value(path: str, line: int, text: str) -> object:
    """Parses the JSON value of one line of a data set; raises DatasetError if the line is not valid JSON."""
    try:
        value: object = json.loads(text.rstrip("\r\n"))  # An error behind a line's end would count as column 1.
    except json.JSONDecodeError as exc:  # `from None`: the original error carries the whole line
        raise DatasetError(
            f"{_where(path, line)}: expected one JSON object per line; invalid JSON at column {exc.colno} (a list of "
            "objects is read too; an object on several lines is not)"
        ) from None
    except (RecursionError, ValueError):  # nesting or digits exceed the interpreter's limits
        raise DatasetError(f"{_where(path, line)}: invalid JSON: nested too deeply or a number too long") from None
    return value


# Checking


def _parse_row(source: str | None, line: int, value: object, unit: str = "line") -> Row:
    where = _where(source, line, unit)
    if not isinstance(value, Mapping):
        hint = '; for a text on its own give {"text": ...}' if isinstance(value, str) and source is None else ""
        raise DatasetError(f"{where}: expected an object, {_type(value)} came{hint}")
    _refuse_what_would_be_lost(where, value)
    return Row(source, line, _parse_form(where, value), unit)


def _refuse_what_would_be_lost(where: str, value: Mapping[str, object]) -> None:
    """Refuses a row with a key that says something about the training, and that is not supported."""
    if any(value.get(key) for key in _UNSUPPORTED_KEYS):
        raise DatasetError(f"{where}: {' and '.join(_UNSUPPORTED_KEYS)} are not supported: remove them from the row")
    if value.get("functions"):
        raise DatasetError(f"{where}: functions are not supported: remove them from the row")
    if any(value.get(key) is not None for key in ("instruction", *_CONVERSATIONS)) and (
        meant := _misspelt(value, _OPTIONAL_KEYS)
    ):
        raise DatasetError(f"{where}: {_keys(value)} came: did you mean {meant}? Rename the key, or leave it out")
    if isinstance(value.get("label"), bool) and value.get("completion") is not None:
        raise DatasetError(
            f"{where}: label: completions that are marked as good or bad (KTO) are not supported: leave out the bad "
            "ones and the key, or give prompt, chosen and rejected"
        )


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
        case [] | [("chosen", _), ("rejected", _)]:
            found = _of_sharegpt(where, value) or _of_alpaca(where, value) or _of_openai(where, value)
            if found is not None:
                return found
    raise DatasetError(
        f"{where}: expected exactly one of messages, prompt with completion, text, or prompt with chosen and rejected; "
        f"{_keys(value)} came{_hint(value)}"
    )


def _hint(value: Mapping[str, object]) -> str:
    """Returns the end of an error's text about a row without a form: what to do, as far as its keys tell."""
    has = {key for key in value if value.get(key) is not None}
    if has == {"role", "content"}:
        return ": put the messages of a conversation into one row, as a list under messages"
    if meant := _misspelt(value, _NAMES_OF_COLUMNS):
        return f": did you mean {meant}?"
    if {"chosen", "rejected"} <= has and "prompt" not in has:
        return ": give what both answers follow as prompt"
    if {"instruction", "context", "response"} <= has:
        return ": rename context and response to input and output"
    for prompt, completion in _PAIRS:
        if {prompt, completion} <= has:
            return f": rename {prompt} and {completion} to prompt and completion"
    return ""


def _misspelt(value: Mapping[Any, object], known: tuple[str, ...]) -> str:
    """Returns those of the known keys that a mapping lacks and probably means by other keys that it has, in words."""
    others = [key for key, part in value.items() if isinstance(key, str) and key not in known and part is not None]
    meant = dict.fromkeys(filter(None, (_nearly(key, known) for key in others)))
    return " and ".join(key for key in meant if value.get(key) is None)


@functools.lru_cache(maxsize=1024)
def _nearly(key: str, known: tuple[str, ...]) -> str | None:
    """Returns the known key that another one is nearly, or None. Rows of a data set have the same keys again and
    again."""
    given = key.strip().lower()
    turned = [each for each in known if sorted(each) == sorted(given)]
    return next(iter(turned or difflib.get_close_matches(given, known, n=1, cutoff=_NEARLY)), None)


# Rows as others have them


def _of_sharegpt(where: str, value: Mapping[str, object]) -> Conversation | Preference | None:
    """Returns the form of a row with ShareGPT's `conversations`, if it is one: messages with `from` and `value`."""
    key = next((key for key in _CONVERSATIONS if value.get(key) is not None), None)
    if key is None:
        return None
    messages = [*_system(where, value), *_messages(f"{where}: {key}", value[key], is_sharegpt=True)]
    if value.get("chosen") is None:
        return _conversation(where, key, [], messages)
    return _preference(where, messages, value, "chosen", "rejected")


def _of_alpaca(where: str, value: Mapping[str, object]) -> Conversation | Preference | None:
    """Returns the form of a row with Alpaca's `instruction`, `input` and `output`, if it is one. Instruction and input
    are the user's message, with an empty line between them."""
    is_preference = value.get("chosen") is not None
    if value.get("instruction") is None or (value.get("output") is None and not is_preference):
        return None
    if value.get("history"):
        raise DatasetError(f"{where}: history is not supported: give the conversation as messages")
    if value.get("context"):
        raise DatasetError(f"{where}: context is not read beside instruction: make it the input")
    asked = [_text_or_nothing(where, value, key) for key in ("instruction", "input")]
    question = _Message({"role": "user", "content": "\n\n".join(filter(None, asked))})
    given = [*_system(where, value), question]
    if is_preference:
        return _preference(where, given, value, "chosen", "rejected")
    answer = {"role": "assistant", "content": _string(f"{where}: output", value["output"])}
    return _conversation(where, "output", given, [_Message(answer)])


def _of_openai(where: str, value: Mapping[str, object]) -> Preference | None:
    """Returns the form of a preference with OpenAI's `input`, `preferred_output` and `non_preferred_output`, if the
    row is one."""
    given = value.get("input")
    if not isinstance(given, Mapping) or any(value.get(key) is None for key in _OTHER_KEYS[-2:]):
        return None
    _refuse_what_would_be_lost(f"{where}: input", given)
    return _preference(where, _messages(f"{where}: input: messages", given.get("messages")), value, *_OTHER_KEYS[-2:])


def _system(where: str, value: Mapping[str, object]) -> list[_Message]:
    content = _text_or_nothing(where, value, "system")
    return [_Message({"role": "system", "content": content})] if content else []


def _text_or_nothing(where: str, value: Mapping[str, object], key: str) -> str:
    """Returns the text under a key; an empty one if the key is absent."""
    found = value.get(key)
    return "" if found is None else _string(f"{where}: {key}", found)


def _preference(where: str, given: list[_Message], value: Mapping[str, object], better: str, worse: str) -> Preference:
    """Returns the preference of two answers to some messages; an answer is a text, a message or a list of one."""
    return Preference(*(_answer_to(where, given, key, value[key]) for key in (better, worse)))


def _answer_to(where: str, given: list[_Message], key: str, answer: object) -> Conversation:
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    wanted = _messages(f"{where}: {key}", [answer] if isinstance(answer, Mapping) else answer, is_sharegpt=True)
    if len(wanted) > 1:
        raise DatasetError(f"{where}: {key}: expected one message, the assistant's; {len(wanted)} came")
    return _conversation(where, key, given, wanted)


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


@dataclass(frozen=True, slots=True)
class _Message:
    """Holds a checked message: its role and content, and whether it is trained on if it is the assistant's."""

    rendered: dict[str, str]
    is_trained: bool = True

    @property
    def is_assistants(self) -> bool:
        return self.rendered["role"] == "assistant"


def _conversation(where: str, key: str, given: list[_Message], wanted: list[_Message]) -> Conversation:
    if not wanted[-1].is_assistants:
        raise DatasetError(f"{where}: {key}: expected the last message to be the assistant's")
    messages = given + wanted
    if not given and messages[0].is_assistants:
        raise DatasetError(f"{where}: {key}: expected a message of another role before the assistant's first")
    untrained = frozenset(number for number, message in enumerate(messages) if not message.is_trained)
    form = Conversation([message.rendered for message in messages], len(given), untrained)
    if not form.trained_turns:
        raise DatasetError(f"{where}: {key}: expected an assistant's message with weight 1; all have weight 0")
    return form


def _messages(where: str, value: object, is_sharegpt: bool = False) -> list[_Message]:
    if not isinstance(value, list | tuple):
        raise DatasetError(f"{where}: expected a list of messages, {_type(value)} came")
    if not value:
        raise DatasetError(f"{where}: expected at least one message, none came")
    read = _sharegpt_message if is_sharegpt else _message
    return [read(f"{where}: message {number}", message) for number, message in enumerate(value, start=1)]


def _message(where: str, value: object) -> _Message:
    if not isinstance(value, Mapping):
        raise DatasetError(f"{where}: expected an object with role and content, {_type(value)} came")
    # A further key (tool_calls, images) would be rendered or lost depending on the template, so it is refused.
    if {key for key, part in value.items() if part is not None} - {"role", "content", "weight"} or "role" not in value:
        meant = _misspelt(value, ("role", "content"))
        advice = f": did you mean {meant}?" if meant else ""
        raise DatasetError(f"{where}: expected the keys role and content; {_keys(value)} came{advice}")
    role, content = value["role"], value.get("content")
    if not isinstance(role, str) or role not in ROLES:
        came = "another string" if isinstance(role, str) else _type(role)
        raise DatasetError(f"{where}: expected the role to be one of {', '.join(ROLES)}; {came} came")
    if isinstance(content, list | tuple):
        raise DatasetError(
            f"{where}: content: expected a string, {_type(content)} came: only text is trained on; join its parts"
        )
    return _weighted(where, role, _string(f"{where}: content", content), value.get("weight"))


def _sharegpt_message(where: str, value: object) -> _Message:
    """Returns a message with `from` and `value`; one with `role` and `content` is read too."""
    if not isinstance(value, Mapping) or "from" not in value:
        return _message(where, value)
    if {key for key, part in value.items() if part is not None} - {"from", "value", "weight"}:
        raise DatasetError(f"{where}: expected the keys from and value; {_keys(value)} came")
    said = value["from"]
    role = _SHAREGPT_ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        came = "another string" if isinstance(said, str) else _type(said)
        raise DatasetError(f"{where}: expected from to be one of {', '.join(_SHAREGPT_ROLES)}; {came} came")
    return _weighted(where, role, _string(f"{where}: value", value.get("value")), value.get("weight"))


def _weighted(where: str, role: str, content: str, weight: object) -> _Message:
    """Returns a message with OpenAI's `weight`: 1, or nothing, trains on an assistant's message, and 0 does not."""
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        came = weight if isinstance(weight, int | float) else _type(weight)
        raise DatasetError(f"{where}: weight: expected 0 or 1, {came} came")
    if weight == 1 and role != "assistant":
        raise DatasetError(f"{where}: weight: expected 1 in the assistant's messages only: no other is trained on")
    return _Message({"role": role, "content": content}, weight != 0 or role != "assistant")


def _string(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise DatasetError(f"{where}: expected a string, {_type(value)} came")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell a lone surrogate; tokenizers do not accept one
        raise DatasetError(f"{where}: expected Unicode text, a lone surrogate came") from None
    return value


# Messages


def _where(source: str | None, line: int, unit: str = "line") -> str:
    if source is None:
        return f"data set, row {line}"
    return f"{one_line(source)}, {unit} {line}"


def _type(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _keys(value: Mapping[Any, object]) -> str:
    """Returns the keys of a row with the types of their values; a key that does not look like a field name is not
    shown."""
    shown = [key if isinstance(key, str) and _SHOWN_KEY.fullmatch(key) else "(another key)" for key in value]
    listed = [f"{key} ({_type(part)})" for key, part in zip(shown, value.values(), strict=True)]
    more = [f"{len(listed) - _MAX_SHOWN_KEYS} more"] if len(listed) > _MAX_SHOWN_KEYS else []
    return ", ".join(listed[:_MAX_SHOWN_KEYS] + more) or "no key"
