"""This module prepares the data of a fine-tuning run: the rows to train on, and the rows to evaluate on.

Guarantees: data sets are read and checked before anything is sent. Which rows of a data set are held back for
evaluation depends on the number of rows and on the seed, and on nothing that a row says.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

import torch
from peft import PeftConfig, PeftType

from tenant_sdk.text.source import TenantText
from tenant_sdk.training.dataset import Row, are_preferences, load_rows
from tenant_sdk.training.preference_rows import longest_side, preference_rows
from tenant_sdk.training.settings import FinetuneSettings
from tenant_sdk.training.token_rows import num_tokens_of, training_rows
from tenant_sdk.training.truncation import REFUSE
from wire.errors import ConfigurationError, DatasetError


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
        length = max(map(longest_side if self.are_preferences else num_tokens_of, self.rows))
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
    if are_preferences(rows) is not are_preferences(eval_rows):
        raise DatasetError("expected chosen and rejected in the rows of data and of eval_data, or in neither")
    return ParsedData(rows, eval_rows)


def _check_trl() -> None:
    try:
        import_module("trl.trainer.dpo_trainer")
    except ImportError:
        raise ConfigurationError("rows with chosen and rejected need TRL: pip install 'veilbase[dpo]'") from None


def _split(rows: list[Row], part: float, seed: int) -> ParsedData:
    if isinstance(part, bool) or not 0 < part < 1:
        raise ConfigurationError(f"eval_data must be a data set or a part between 0 and 1, got {part!r}")
    num_held_back = max(1, round(part * len(rows)))
    if num_held_back >= len(rows):
        raise ConfigurationError(f"eval_data={part} of {len(rows)} rows leaves none to train on")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    held_back = set(order[:num_held_back])
    return ParsedData(
        [row for number, row in enumerate(rows) if number not in held_back],
        [row for number, row in enumerate(rows) if number in held_back],
    )


def check_kind(parsed: ParsedData, settings: FinetuneSettings, peft_config: PeftConfig) -> None:
    """Refuses settings that do not go with the kind of the rows, before rows are sent.

    Raises:
        ConfigurationError: preferences are to be trained on in windows or by prefix tuning.
    """
    if not are_preferences(parsed.rows):
        return
    if settings.window_tokens is not None:
        raise ConfigurationError("window_tokens is not possible with preferences: their loss compares whole rows")
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
        "rows": [_source(row) for row in parsed.rows],
        "eval_rows": [_source(row) for row in parsed.eval_rows],
        "tokenizer": [
            _tokenizer_source(tokenizer),
            tokenizer.chat_template,
            sorted(tokenizer.special_tokens_map.items()),
        ],
        "bucket": bucket,
        **fitting,
    }


def _source(row: Row) -> dict[str, Any]:
    return {"form": type(row.form).__name__, **asdict(row.form)}


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
