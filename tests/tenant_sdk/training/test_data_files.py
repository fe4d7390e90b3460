"""Tests data sets in parquet files and in folders of the library datasets."""

from __future__ import annotations

import builtins
import csv
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict
from PIL import Image

from tenant_sdk.training.dataset import NOT_READ, Text, load_rows
from tests.support.training import ROWS
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
        ("two\nlines.parquet", "^there is no file .*two.nlines.parquet"),
        ("none.parquet", "^there is no file .*none.parquet$"),
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


def png(path: Path) -> Path:
    """Writes a picture of one pixel."""
    Image.new("RGB", (1, 1)).save(path, "png")
    return path


@pytest.mark.parametrize("feature", [datasets.Image(), datasets.Audio(), datasets.List(datasets.Image())], ids=str)
def test_no_file_is_opened_that_a_row_names(feature: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = str(png(tmp_path / "private.png"))
    value = [named] if isinstance(feature, datasets.List) else named
    dataset = Dataset.from_dict({"text": ["a"], "picture": [value]}).cast_column("picture", feature)
    dataset.with_format("numpy").save_to_disk(tmp_path / "saved")
    opened: list[object] = []
    for owner, name in ((builtins, "open"), (io, "open"), (os, "open")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda file, *rest, real=real, **more: (opened.append(file), real(file, *rest, **more))[1]
        )
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *_, **__: pytest.fail("a picture was decoded"))
    monkeypatch.setattr(datasets.Audio, "decode_example", lambda *_, **__: pytest.fail("a sound was decoded"))
    for data in (tmp_path / "saved", dataset, dataset.to_iterable_dataset()):
        assert forms(data) == [Text("a")]
    assert not [file for file in opened if "private" in str(file)]


@pytest.mark.parametrize("name", ["messages", "text", "conversations", "instruction"])
def test_a_picture_where_text_is_expected_is_named(name: str, tmp_path: Path) -> None:
    dataset = Dataset.from_dict({name: [str(png(tmp_path / "x.png"))]}).cast_column(name, datasets.Image())
    dataset.save_to_disk(tmp_path / "saved")
    for data in (tmp_path / "saved", dataset):
        with pytest.raises(DatasetError, match=f": expected text in the column {name}, Image came"):
            load_rows(data)


def test_a_saved_data_set_with_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    Dataset.from_list(MIXED).save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:-300])
    with pytest.raises(DatasetError, match="expected a readable data set") as failure:
        load_rows(tmp_path / "saved")
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("name", ["../private/{0}", "{1}/private/{0}", "", "..", "none.arrow", "a\0b"])
def test_a_saved_data_set_opens_no_file_of_another_folder(name: str, tmp_path: Path) -> None:
    Dataset.from_list([{"text": SECRET}]).save_to_disk(tmp_path / "private")
    (arrow,) = (tmp_path / "private").glob("*.arrow")
    Dataset.from_list(MIXED).save_to_disk(tmp_path / "saved")
    state = tmp_path / "saved" / "state.json"
    named = {"_data_files": [{"filename": name.format(arrow.name, tmp_path)}]}
    state.write_text(json.dumps(json.loads(state.read_text()) | named))
    with pytest.raises(DatasetError, match="expected the data set's files in this folder") as failure:
        load_rows(tmp_path / "saved")
    assert "\n" not in str(failure.value)


PAIR = [{"prompt": "a, b", "completion": 'say "c"\nd'}, {"prompt": "é", "completion": "f" * 200_000}]


@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("CSV", ";"), ("tsv", "\t")])
def test_csv(suffix: str, delimiter: str, tmp_path: Path) -> None:
    path = tmp_path / f"data.{suffix}"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion", "text"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(PAIR)
    assert forms(path) == forms(PAIR)
    assert [row.where for row in load_rows(path)] == [f"{path}, line 2", f"{path}, line 4"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prompt,completion\na,hunter2,c\n", ", line 2: expected 2 cells, as in the header; 3 came"),
        ('prompt,completion\na,b\n"a"x,hunter2\n', ", line 3: expected CSV, with"),
        ('text\n"hunter2\n', ", line 2: expected CSV, with"),
        ("text,text\na,b\n", ", line 1: expected columns of different names"),
        (
            "question,answer\na,hunter2\n",
            ", line 1: expected the columns prompt and completion, or text, or prompt, chosen and rejected, or "
            "instruction and output; found question, answer: rename question and answer to prompt and completion",
        ),
        ("promt,completion\na,hunter2\n", ", line 1: expected the columns prompt and completion, or text,"),
        ("my hunter2,x\na,b\n", ", line 1: expected the columns prompt and completion, or text,"),
        ("text\n\n\n", ": expected at least one row, none came"),
        ("", ": expected at least one row, none came"),
        ("messages\n[]\n", ", line 2: messages: expected a list of messages, str came"),
    ],
)
def test_csv_that_cannot_be_read(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(DatasetError) as failure:
        load_rows(tmp_path / "x.csv")
    assert str(failure.value).startswith(f"{tmp_path / 'x.csv'}{expected}")
    assert SECRET not in str(failure.value)
    assert "\n" not in str(failure.value)


def test_csv_that_is_no_utf_8(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes("text\né\n".encode("latin-1"))
    with pytest.raises(DatasetError, match="expected UTF-8"):
        load_rows(tmp_path / "x.csv")
    with pytest.raises(DatasetError, match=r"^there is no file .*none\.csv$"):
        load_rows(tmp_path / "none.csv")


@pytest.mark.parametrize("name", sorted(NOT_READ))
def test_other_kinds_of_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / f"data{name}").write_bytes(b"\x1f\x8b")
    with pytest.raises(DatasetError, match=r"unpack it first|save it as CSV|save the rows as JSONL"):
        load_rows(tmp_path / f"data{name}")


def test_tables_in_memory(tmp_path: Path) -> None:
    import pandas
    import pyarrow

    assert forms(pandas.DataFrame(PAIR)) == forms(pyarrow.Table.from_pylist(PAIR)) == forms(PAIR)
    absent = pandas.DataFrame([{"text": "a"}, {"prompt": "b", "completion": "c"}], index=[7, 7])
    assert forms(absent) == forms([{"text": "a"}, {"prompt": "b", "completion": "c"}])
    talks = [{"messages": [*row["messages"][:1], {**row["messages"][1], "weight": 1}]} for row in ROWS]
    pandas.DataFrame(talks).to_parquet(tmp_path / "x.parquet")
    for frame in (pandas.DataFrame(talks), pandas.read_parquet(tmp_path / "x.parquet")):
        assert forms(frame) == forms(ROWS)
    with pytest.raises(DatasetError, match=r"data set, row 2: expected exactly one of"):
        load_rows(pandas.DataFrame({"text": ["a", float("nan")]}))
