"""Tests which tokenizer.json files are accepted from a provider: those of real models are, and those that reveal text
by row counts are not."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tenant_sdk.testing import character_tokenizer
from tenant_sdk.text.components import check_components
from wire.errors import ConfigurationError

SPACE = "\u2581"
PLAIN: dict[str, Any] = json.loads(character_tokenizer().backend_tokenizer.to_str())

REAL = {
    "gpt2": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}},
    "llama-2": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
    },
    "llama-3": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}{1,3}"}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        }
    },
    "gpt-4o": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {
                "Regex": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
        }
    },
    "deepseek": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {
                "Regex": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
        }
    },
    "gemma": {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}},
    "metaspace": {"pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first"}},
    "bert": {
        "normalizer": {"type": "BertNormalizer", "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_components_of_real_models(name: str) -> None:
    check_components(PLAIN | REAL[name])


def replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


MANY = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 20 + [{"Sequence": {"id": "A", "type_id": 0}}]
HOSTILE = {
    "a letter spelled out": {"normalizer": replace({"String": "e"}, "e" * 40)},
    "the same, hidden in a sequence": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "NFC"}, {"type": "Sequence", "normalizers": [replace({"String": "7"}, "7777")]}],
        }
    },
    "a pattern spelled out": {"normalizer": replace({"Regex": "(secret)"}, " " * 200)},
    "a table of the provider's own": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a long beginning": {"normalizer": {"type": "Prepend", "prepend": "x" * 500}},
    "a replacement in the cutting": {"pre_tokenizer": {"type": "Metaspace", "replacement": "e"}},
    "a cutting nobody knows": {"pre_tokenizer": {"type": "Evil"}},
    "a drawn cutting": {"model": PLAIN["model"] | {"type": "BPE", "dropout": 0.5}},
    "bytes spelled out again and again": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}, {"type": "ByteLevel"}]}
    },
    "a long mark of a word's end": {"model": PLAIN["model"] | {"type": "BPE", "end_of_word_suffix": "x" * 5000}},
    "a long mark of a word's inside": {"model": {"type": "WordPiece", "continuing_subword_prefix": "x" * 500}},
    "text removed": {"pre_tokenizer": split("7", "Removed")},
    "a pattern that looks ahead": {"pre_tokenizer": split(r"(?=[\s\S]*7)a|[\s\S]")},
    "a pattern that takes for ever": {"pre_tokenizer": split(r"(?:[\s\S]+[\s\S]+)+x|[\s\S]")},
    "a pattern of many repetitions": {"pre_tokenizer": split("a+b+c+d+e+f+")},
    "a pattern that looks back": {"pre_tokenizer": split(r"(a)\1")},
    "a very long pattern": {"pre_tokenizer": split("a" * 3000)},
    "a decoder that strips": {"decoder": {"type": "Strip", "content": "6", "start": 5, "stop": 5}},
    "a decoder with a pattern": {"decoder": replace({"Regex": "a+"}, "b")},
    "no model": {"model": None},
    "a model nobody knows": {"model": {"type": "Evil"}},
    "the text twice": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2,
            "special_tokens": {},
        }
    },
    "many constant tokens": {"post_processor": {"type": "TemplateProcessing", "single": MANY, "special_tokens": {}}},
    "a decoder nobody knows": {"decoder": {"type": "Evil"}},
    "a length limit": {"truncation": {"max_length": 3}},
    "padding of its own": {"padding": {"strategy": {"Fixed": 9}}},
    "another setting": {"evil": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_components_that_could_read_text(name: str) -> None:
    with pytest.raises(ConfigurationError, match="could read your text by row counts") as failure:
        check_components(PLAIN | HOSTILE[name])
    assert "\n" not in str(failure.value)
    assert "tokenizer=, --tokenizer" in str(failure.value)


def test_nesting_has_an_end() -> None:
    part: dict[str, Any] = {"type": "NFC"}
    for _ in range(50):
        part = {"type": "Sequence", "normalizers": [copy.copy(part)]}
    with pytest.raises(ConfigurationError):
        check_components(PLAIN | {"normalizer": part})
