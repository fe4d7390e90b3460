"""This module reads data sets from files other than JSONL: parquet files, and folders of the library `datasets`.

Guarantees: rows are read into memory, and no copy of them is written anywhere, not even into a cache. An error is one
line without a row's contents. The libraries are optional (the extra `parquet`), and are imported when they are needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wire.errors import ConfigurationError, DatasetError

_SUFFIX = ".parquet"
_INSTALL = "pip install 'veilbase[parquet]'"
_MARKS = ("dataset_info.json", "dataset_dict.json")
"""The names of files that `save_to_disk` writes into the folder of a data set, or of several splits."""


def one_line(path: str) -> str:
    """Returns the path, escaped as ASCII if it has characters that would break the line or the terminal."""
    return path if path.isprintable() else ascii(path)


def is_table(path: str) -> bool:
    """Returns whether a path names a parquet file or a folder. Errors then give a row's number in place of a line."""
    return path.lower().endswith(_SUFFIX) or is_saved_dataset(path)


def is_saved_dataset(path: str) -> bool:
    """Returns whether a path is an existing folder, which is then taken for a saved data set."""
    try:
        return Path(path).is_dir()
    except ValueError:  # the path holds a null character
        return False


def read_parquet(path: str) -> Iterator[tuple[int, object]]:
    """Yields (number from 1, row) of each row of a parquet file, row group by row group.

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
                    yield number, row
    except (ArrowException, OSError, ValueError) as exc:  # `from None`: Arrow's error may quote the file
        reason = f": {os.strerror(exc.errno)}" if isinstance(exc, OSError) and exc.errno else ""
        raise DatasetError(f"{one_line(path)}: expected a readable parquet file{reason}") from None


def read_saved_dataset(path: str) -> Iterator[tuple[int, object]]:
    """Yields (number from 1, row) of each row of a data set that `datasets.Dataset.save_to_disk` wrote.

    Raises:
        DatasetError: the folder holds no data set, holds several splits, or cannot be read.
        ConfigurationError: the library `datasets` is not installed.
    """
    if not any((Path(path) / name).is_file() for name in _MARKS):
        raise DatasetError(f"{one_line(path)}: expected a folder written by datasets' save_to_disk, found another one")
    try:
        from datasets import DatasetDict, load_from_disk
    except ImportError:
        raise ConfigurationError(f"a saved data set needs the library datasets: {_INSTALL}") from None
    try:
        found: Any = load_from_disk(path)
    except Exception:  # noqa: BLE001 - Arrow, JSON and the file system raise errors of their own, which may quote rows
        raise DatasetError(f"{one_line(path)}: expected a readable data set of the library datasets") from None
    if isinstance(found, DatasetDict):
        shown, splits = one_line(path), ", ".join(found)
        raise DatasetError(f"{shown}: expected one data set, found the splits {splits}: name {shown}/SPLIT")
    yield from enumerate(found, start=1)
