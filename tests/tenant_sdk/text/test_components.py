"""Which tokenizer.json a provider may send: those of real models pass, those that spell text out as rows do not."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tenant_sdk.text.components import check_components
from tests.tenant_sdk import tiny
from wire.errors import ConfigurationError

SPACE = "\u2581"
PLAIN: dict[str, Any] = json.loads(tiny.tokenizer().backend_tokenizer.to_str())

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
    assert "tokenizer='path or hub id'" in str(failure.value)


def test_nesting_has_an_end() -> None:
    part: dict[str, Any] = {"type": "NFC"}
    for _ in range(50):
        part = {"type": "Sequence", "normalizers": [copy.copy(part)]}
    with pytest.raises(ConfigurationError):
        check_components(PLAIN | {"normalizer": part})
