"""This module says what identifies a fine-tuning run, so that a plan holds for its own run alone and checkpoints are
used by theirs alone, and names what is another in a run that differs.

Guarantees: nothing of the data is kept but SHA-256. Options and the adapter's settings are kept as short texts, so that
a user is told the name and both values. Importing this module does not load torch: a command compares what is known
without it at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tenant_sdk.options import flag_of
from tenant_sdk.training.settings import FinetuneOptions

PARTS = {
    "data": "the data", "tokenizer": "the tokenizer", "adapter": "the adapter's settings", "options": "the options",
}  # fmt: skip
"""The parts of a run that have a fingerprint each, and how an error names them."""
_MOST_CHARACTERS, _SHOWN_CHARACTERS = 60, 20
_MOST_NAMED, _MOST_TEXT = 4, 200


def fingerprint(data: Any, peft_config: dict[str, Any], options: dict[str, Any], digests: list[str]) -> str:
    """Returns the fingerprint of a run, SHA-256 in hex; only runs with the same fingerprint share checkpoints.

    Args:
        data: what the tokens are made from (`tenant_sdk.training.token_rows.sources`). The tokens themselves may differ
            from day to day, since chat templates print the date.
        peft_config: PEFT's settings of the adapter.
        options: the options that identify the run (`FinetuneOptions.identity`).
        digests: the digests of the base weights, by layer group.
    """
    return _digest((_plain(data), _plain(peft_config), options, digests))


@dataclass(frozen=True)
class RunIdentity:
    """Holds what tells one run from another, as far as it is known.

    Attributes:
        parts: the fingerprints of those of `PARTS`, by name; SHA-256 in hex.
        options: the options that identify the run, by name, as texts.
        adapter: PEFT's settings of the adapter, by name, as texts.
    """

    parts: dict[str, str] = field(default_factory=dict, repr=False)
    options: dict[str, str] = field(default_factory=dict)
    adapter: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Mapping[str, Any], peft_config: dict[str, Any], options: FinetuneOptions) -> RunIdentity:
        """Returns the whole identity of a run; the arguments are as for `fingerprint`, with all options."""
        rows = {name: value for name, value in data.items() if name in ("rows", "eval_rows")}
        cut = {name: value for name, value in data.items() if name not in rows and name != "tokenizer"}
        fitted = {"max_length": cut["max_length"]} if "max_length" in cut else {}
        return cls(
            {
                "data": _digest(rows), "tokenizer": _digest(data["tokenizer"]), "adapter": _digest(peft_config),
                "options": _digest({**options.identity(), **cut}),
            },
            {**cls.of_options(options, cut["bucket"]).options, **texts(fitted)},
            texts(peft_config),
        )  # fmt: skip

    @classmethod
    def of_options(cls, options: FinetuneOptions, bucket: int | None) -> RunIdentity:
        """Returns what is known of a run's identity by its options alone.

        Args:
            options: all options.
            bucket: the number of tokens to which rows are padded; None if they are not padded.
        """
        return cls(options=texts({**options.identity(), "pad_rows": bucket, "truncation": options.truncation}))

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> RunIdentity:
        """Returns the identity in a JSON object that `to_dict` made; what is not of its form is left out."""
        return cls(*(_read_texts(content.get(each.name)) for each in dataclasses.fields(cls)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the identity as a JSON object."""
        return dataclasses.asdict(self)

    def differences(self, now: RunIdentity, whose: str) -> str:
        """Returns what of a run is another than in this one, in words; an empty text if nothing is, of what both hold.

        Args:
            now: the run that is to be made.
            whose: what this one is the identity of, such as "the plan's".
        """
        options = [*_changed(self.options, now.options)]
        adapter = [*_changed(self.adapter, now.adapter)]
        named = [f"{_option(name)} is {new}, {whose} is {old}" for name, new, old in options]
        named += [f"{name} of peft_config is {new}, {whose} is {old}" for name, new, old in adapter]
        told = {"options": options, "adapter": adapter}
        others = [PARTS[name] for name, _, _ in _changed(self.parts, now.parts) if name in PARTS and not told.get(name)]
        more = [f"{len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
        return ", ".join([*others, *named[:_MOST_NAMED], *more])


def data_part(rows: list[dict[str, Any]], eval_rows: list[dict[str, Any]]) -> dict[str, str]:
    """Returns the part `data` of a `RunIdentity`, of rows as `tenant_sdk.training.dataset.source_of` gives them."""
    return {"data": _digest({"rows": rows, "eval_rows": eval_rows})}


def adapter_part(peft_config: dict[str, Any]) -> dict[str, str]:
    """Returns the part `adapter` of a `RunIdentity`, of all PEFT's settings."""
    return {"adapter": _digest(peft_config)}


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns values as short texts that differ where the values do."""
    return {name: _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(_plain(value), sort_keys=True, default=str)
    text = text if text.isascii() and text.isprintable() else ascii(text)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _read_texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {name: text for name, text in value.items() if _is_text(name) and _is_text(text)}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT and value.isascii() and value.isprintable()


def _changed(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yields name, new value and old value of what both hold and what differs."""
    for name, old in then.items():
        if name in now and now[name] != old:
            yield name, now[name], old


def _option(name: str) -> str:
    flags = {each.name: flag_of(each) for each in dataclasses.fields(FinetuneOptions)} | {"pad_rows": "--pad-rows"}
    return f"{name} ({flags[name]})" if name in flags else name


def _digest(value: Any) -> str:
    """Returns the SHA-256 of a value's JSON, in hex."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Returns a value with sets replaced by sorted lists, since the order of a set differs between processes."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset | list | tuple):
        items = [_plain(item) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    return value
