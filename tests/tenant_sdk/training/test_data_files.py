"""Tests data sets in parquet files and in folders of the library datasets."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from tenant_sdk.training.dataset import load_rows
from tests.support.quick_training import ROWS
from wire.errors import ConfigurationError, DatasetError

SECRET = "hunter2"
MIXED = [{"text": "a", "prompt": None}, {"text": "b", "prompt": None}]


def forms(data: object) -> list[object]:
    return [row.form for row in load_rows(data)]  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["messages", "absent columns"])
def test_the_rows_are_those_of_the_same_data_in_memory(rows: list[dict[str, object]], tmp_path: Path) -> None:
    dataset = Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "data.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    DatasetDict(train=dataset).save_to_disk(tmp_path / "splits")
    want = forms(rows)
    for data in (dataset, tmp_path / "data.parquet", str(tmp_path / "saved"), tmp_path / "splits" / "train"):
        assert forms(data) == want
    assert forms(dataset.to_iterable_dataset()) == want


def test_many_row_groups(tmp_path: Path) -> None:
    Dataset.from_list([{"text": str(number)} for number in range(10)]).to_parquet(tmp_path / "x.PARQUET", batch_size=3)
    assert [row.line for row in load_rows(tmp_path / "x.PARQUET")] == list(range(1, 11))


def test_a_bad_row_is_named_by_its_number_and_not_shown(tmp_path: Path) -> None:
    dataset = Dataset.from_list([{"text": "a"}, {"text": None}])
    dataset = dataset.add_column("note", [SECRET, SECRET])
    dataset.to_parquet(tmp_path / "data.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "data.parquet", tmp_path / "saved"):
        with pytest.raises(DatasetError, match=r", row 2: expected exactly one of messages") as failure:
            load_rows(path)
        assert str(failure.value).startswith(str(path))
        assert SECRET not in str(failure.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text(SECRET * 100)
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    (tmp_path / "other").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "dataset_info.json").write_text(SECRET)
    DatasetDict(train=Dataset.from_list(MIXED), test=Dataset.from_list(MIXED)).save_to_disk(tmp_path / "splits")
    for name, text in (
        ("text.parquet", "expected a readable parquet file"),
        ("cut.parquet", "expected a readable parquet file"),
        ("two\nlines.parquet", "expected a readable parquet file: No such file or directory"),
        ("none.parquet", "expected a readable parquet file: No such file or directory"),
        ("other", "expected a folder written by datasets' save_to_disk"),
        ("broken", "expected a readable data set"),
        ("splits", "found the splits train, test: name "),
    ):
        with pytest.raises(DatasetError, match=text) as failure:
            load_rows(tmp_path / name)
        assert "\n" not in str(failure.value)
        assert SECRET not in str(failure.value)


@pytest.mark.parametrize(("library", "name"), [("pyarrow.parquet", "x.parquet"), ("datasets", "saved")])
def test_without_the_library(library: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Dataset.from_list(MIXED).save_to_disk(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigurationError, match=r"pip install 'veilbase\[parquet\]'$"):
        load_rows(tmp_path / name)
