"""This module reads data sets that are not JSON: CSV and parquet files, folders of the library `datasets`, and tables.

Guarantees: rows are read into memory, and no copy of them is written anywhere, not even into a cache. No file is opened
but the one that the user names and, for a saved data set, those in its folder that hold its rows: columns of images,
sounds and other media, whose rows may name files, are left out before a row is read. An error is one line without a
row's contents. The libraries are optional (the extra `parquet`), and are imported when they are needed.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator
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


def is_saved_dataset(path: str) -> bool:
    """Returns whether a path is an existing folder, which is then taken for a saved data set."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # the path is too long, or holds a null character
        return False


def reader_of(path: str, keys: Collection[str]) -> Iterator[Numbered] | None:
    """Returns a reader of the rows of a file or folder; None for a file that is to be read as JSON.

    Args:
        path: the path as the user gave it; its end says what kind of file it is.
        keys: the keys of rows that are used.

    Raises:
        DatasetError: such files are not read; the text says what to do.
    """
    suffix = os.path.splitext(path)[1].lower()
    if is_saved_dataset(path):
        return _read_saved_dataset(path, keys)
    if suffix in NOT_READ:
        raise DatasetError(f"{one_line(path)}: {NOT_READ[suffix]}")
    if suffix in (".csv", ".tsv"):
        return _read_csv(path)
    return _read_parquet(path) if suffix == ".parquet" else None


def rows_of_table(data: object, keys: Collection[str]) -> Iterable[object] | None:
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
    except (OSError, ValueError) as exc:  # ValueError: the path holds a null character
        reason = exc.strerror if isinstance(exc, OSError) else "not a file name"
        raise DatasetError(f"{one_line(path)}: expected a readable CSV file: {reason}") from None


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
        reason = f": {os.strerror(exc.errno)}" if isinstance(exc, OSError) and exc.errno else ""
        raise DatasetError(f"{one_line(path)}: expected a readable parquet file{reason}") from None


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
