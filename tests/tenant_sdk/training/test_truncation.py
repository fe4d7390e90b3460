"""Tests the option that decides what becomes of rows that are too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from tenant_sdk import CutWarning, TenantClient
from tenant_sdk.testing import character_tokenizer
from tenant_sdk.training.dataset import load_rows
from tenant_sdk.training.token_rows import training_rows
from tests.support.training import QUICK, TOLERANCE, logged, lora, training_arguments
from wire.errors import ConfigurationError, DatasetError

TEXTS = [
    {"text": "abc"},
    {"text": "a longer line of text"},
    {"text": "owl"},
    {"text": "a line that is longer still, for " * 2},
]
MOST = 12


def rows_of(client: TenantClient, data: Any, truncation: str, bucket: int | None = None) -> list[dict[str, list[int]]]:
    return training_rows(load_rows(data), client.text, MOST, bucket, 0, truncation)


def test_rows(chat_client: TenantClient) -> None:
    with pytest.raises(DatasetError, match=r"^data set, row 2: expected at most 12 tokens, 22 came: .*--truncation"):
        rows_of(chat_client, TEXTS, "refuse")
    whole = training_rows(load_rows(TEXTS), chat_client.text, 128, None, 0)
    with pytest.warns(CutWarning, match=r"^2 of 4 rows were cut to their first 12 tokens; the longest has 67$"):
        cut = rows_of(chat_client, TEXTS, "truncate")
    assert cut == [{key: values[:MOST] for key, values in row.items()} for row in whole]
    with pytest.warns(CutWarning, match=r"^2 of 4 rows have more than 12 tokens and are left out$"):
        assert rows_of(chat_client, TEXTS, "drop") == [whole[0], whole[2]]
    for truncation in ("refuse", "truncate", "drop"):
        assert rows_of(chat_client, TEXTS[::2], truncation) == [whole[0], whole[2]]
    with pytest.raises(DatasetError, match="leaves no row"):
        rows_of(chat_client, TEXTS[1:2], "drop")


def test_losses_of_cut_rows_are_those_of_trl(chat_client: TenantClient, chat_folder: Path, tmp_path: Path) -> None:
    arguments = training_arguments(tmp_path / "stock", max_steps=3, remove_unused_columns=True)
    stock = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(chat_folder), peft_config=lora(),
        args=SFTConfig(**arguments, max_length=MOST, gradient_checkpointing=False),
        train_dataset=Dataset.from_list(TEXTS), processing_class=character_tokenizer(),
    )  # fmt: skip
    stock.train()
    with pytest.warns(CutWarning):
        result = chat_client.finetune(
            TEXTS, lora(), tmp_path / "out", max_length=MOST, truncation="truncate", **QUICK | {"max_steps": 3}
        )
    assert result.losses == pytest.approx(logged(stock), rel=TOLERANCE)


def test_a_row_whose_labels_are_cut_off_stays(chat_client: TenantClient, tmp_path: Path) -> None:
    """The number of rows, and of steps, does not show where labels are."""
    data = [{"prompt": "a prompt that is long", "completion": "yes"}, {"text": "owl"}]
    with (
        pytest.warns(CutWarning, match="1 of 2 rows were cut"),
        pytest.warns(CutWarning, match="1 of 2 rows have nothing to learn in their first 12 tokens: they are sent"),
    ):
        cut, _ = rows_of(chat_client, data, "truncate")
    assert set(cut["labels"]) == {-100}
    with pytest.warns(CutWarning):
        result = chat_client.finetune(
            data, lora(), tmp_path / "out", max_length=MOST, truncation="truncate",
            **QUICK | {"max_steps": None, "num_epochs": 1, "batch_size": 1},
        )  # fmt: skip
    assert sorted(loss > 0 for loss in result.losses) == [False, True]


@pytest.mark.parametrize("tokenizer", ["named", "provider"])
def test_padded_rows(tokenizer: str, chat_folder: Path, tmp_path: Path) -> None:
    """With `pad_rows` and `truncate`, long rows keep their first tokens, and `drop` is refused. With `refuse`, a long
    row is an error if the user named the tokenizer. The provider's own tokenizer must not decide which rows are errors,
    so long rows keep their last tokens."""
    given = {"tokenizer": chat_folder} if tokenizer == "named" else {}
    with TenantClient(f"inproc:{chat_folder}", mask="off", pad_rows=8, cache=tmp_path / "cache", **given) as client:
        with pytest.warns(CutWarning, match="2 of 4 rows were cut to their first 8 tokens"):
            rows = rows_of(client, TEXTS, "truncate", 8)
        assert {len(row["input_ids"]) for row in rows} == {8}
        assert client.tokenizer.decode(rows[1]["input_ids"]) == "a longer"
        with pytest.raises(ConfigurationError, match=r"drop' would show how many rows are long, which pad_rows hides"):
            client.finetune(TEXTS, lora(), tmp_path / "out", truncation="drop", **QUICK)
        if tokenizer == "named":
            with pytest.raises(DatasetError, match="row 2: expected at most 8 tokens"):
                rows_of(client, TEXTS, "refuse", 8)
        else:
            with pytest.warns(CutWarning, match="2 of 4 rows were cut to their last 8 tokens"):
                assert client.tokenizer.decode(rows_of(client, TEXTS, "refuse", 8)[1]["input_ids"]) == "of text<|end|>"


def test_a_value_that_cannot_be(chat_client: TenantClient, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^truncation must be refuse, truncate, drop, got 'cut'$"):
        chat_client.finetune(TEXTS, lora(), tmp_path / "out", truncation="cut", **QUICK)
    assert list(tmp_path.iterdir()) == []
