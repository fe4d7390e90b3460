"""Tests which tokenizer a session uses, and which tokens end its answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tenant_sdk.testing import SPECIAL_TOKENS, character_tokenizer
from tenant_sdk.text.source import ProviderTokenizer, check_fits_embedding, named_text, provider_text, verified_text
from tenant_sdk.trust.checkpoint import find_tokenizer
from wire.errors import ConfigurationError

SENTENCES = ("who founded it?", "  two  spaces\n\n and\tlines ", "émoji 🦦 ﬁ", "<|end|> <|user|>x", "")


def bundle(folder: Path, tokenizer: Any, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 200, **config}))
    return folder


def test_the_providers_own_equals_transformers(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "b", character_tokenizer())
    text, stock = provider_text(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert isinstance(text.tokenizer, ProviderTokenizer)
    assert text.origin == "provider"
    for sentence in SENTENCES:
        assert text.tokenizer(sentence)["input_ids"] == stock(sentence)["input_ids"]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "padding_side", "model_max_length"):
        assert getattr(text.tokenizer, name) == getattr(stock, name)


@pytest.mark.real_model
def test_the_providers_own_equals_transformers_on_a_real_model(tmp_path: Path, smollm2: Path) -> None:
    stock = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name, local_files_only=True)
    folder = bundle(tmp_path / "b", stock, vocab_size=49152)
    text = provider_text(folder)
    prompt = [{"role": "user", "content": "Who was Harborlight's founder?  \n"}]
    for sentence in SENTENCES:
        assert text.tokenizer(sentence)["input_ids"] == stock(sentence)["input_ids"]
    ids = stock.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    assert text.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False) == ids
    assert text.stop_ids == (stock.convert_tokens_to_ids("<|im_end|>"),)


def test_a_sentencepiece_like_one(tmp_path: Path) -> None:
    """The tokenizer has a token for the beginning of a text, prepends a space, and uses byte tokens for characters that
    the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "\u2581", *map(chr, range(33, 127))]
    backend = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    content = json.loads(backend.to_str())
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    }
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    folder = bundle(tmp_path / "b", made, vocab_size=400)
    stock = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for sentence in SENTENCES:
        ids = provider_text(folder).tokenizer(sentence)["input_ids"]
        assert ids == stock(sentence)["input_ids"]
        assert ids[0] == 1


def test_a_tokenizer_with_numbers_that_the_model_does_not_have() -> None:
    """A tokenizer is refused if it has more tokens than the model has embeddings. A text with such a token would
    otherwise end a run."""
    check_fits_embedding(character_tokenizer(), 128)
    with pytest.raises(ConfigurationError, match="the provider's model has 50"):
        check_fits_embedding(character_tokenizer(), 50)


@pytest.mark.parametrize("damage", [b"not json", b"[]", b"{}", b"\xff\xfe", b'{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_cannot_be_read(tmp_path: Path, damage: bytes) -> None:
    folder = bundle(tmp_path / "b", character_tokenizer())
    (folder / "tokenizer.json").write_bytes(damage)
    with pytest.raises(ConfigurationError) as failure:
        provider_text(folder)
    assert "\n" not in str(failure.value)


def test_a_bundle_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="no usable tokenizer"):
        provider_text(tmp_path)


def other_numbers() -> Any:
    """Returns a vocabulary of the same size in which two tokens have exchanged numbers."""
    made = character_tokenizer()
    content = json.loads(made.backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    backend = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=made.chat_template, **made.special_tokens_map
    )


def smaller() -> Any:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


@pytest.mark.parametrize("make", [other_numbers, smaller])
def test_a_named_tokenizer_that_maps_otherwise(tmp_path: Path, make: Any) -> None:
    folder = bundle(tmp_path / "b", character_tokenizer())
    make().save_pretrained(tmp_path / "mine")
    source = find_tokenizer(tmp_path / "mine")
    with pytest.raises(ConfigurationError, match="maps tokens to other numbers") as failure:
        named_text(source, folder)
    assert "\n" not in str(failure.value)


def test_a_named_tokenizer_takes_the_place_of_a_hostile_one(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "b", character_tokenizer("{{ ' ' * (messages[0]['content'] | length) }}"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "e"}, "content": "eeeeeeee"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    character_tokenizer().save_pretrained(tmp_path / "mine")
    text = named_text(find_tokenizer(str(tmp_path / "mine")), folder)
    assert text.origin == "named"
    assert len(text.tokenizer("eee")["input_ids"]) == 3
    assert text.tokenizer.apply_chat_template([{"role": "user", "content": "e"}], tokenize=False) == "<|user|>e<|end|>"
    with pytest.raises(ConfigurationError, match="normalizer Replace"):
        provider_text(folder)


def test_tokenizers_that_are_nowhere(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    for name in (tmp_path / "empty", tmp_path / "missing", tmp_path / "file.txt", "", "no/such-model", "../x"):
        with pytest.raises(ConfigurationError) as failure:
            find_tokenizer(name)
        assert "\n" not in str(failure.value)


TWO_ENDS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% if m['role'] == 'assistant' %}<|assistant|>"
    "{% else %}<|end|>{% endif %}{% endfor %}"
)


def test_two_stop_ids_of_eos_and_turn_end(tmp_path: Path) -> None:
    """The end of a text and the end of an assistant's turn are two different tokens, and both end an answer."""
    folder = bundle(tmp_path / "b", character_tokenizer(TWO_ENDS))
    expected = (SPECIAL_TOKENS.index("<|end|>"), SPECIAL_TOKENS.index("<|assistant|>"))
    assert provider_text(folder).stop_ids == expected
    character_tokenizer(TWO_ENDS).save_pretrained(tmp_path / "mine")
    assert named_text(find_tokenizer(tmp_path / "mine"), folder).stop_ids == expected


def test_stop_ids_of_a_trusted_source_are_its_own(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "b", character_tokenizer())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [50, 51], "temperature": 0.3}))
    assert provider_text(folder).stop_ids == (2,), "an unverified provider's generation settings were applied"
    assert verified_text(folder).stop_ids == (50, 51)
    character_tokenizer().save_pretrained(tmp_path / "mine")
    assert named_text(find_tokenizer(tmp_path / "mine"), folder).stop_ids == (2,)
    (tmp_path / "mine" / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert named_text(find_tokenizer(tmp_path / "mine"), folder).stop_ids == (7,)


def test_no_stop_ids(tmp_path: Path) -> None:
    made = PreTrainedTokenizerFast(tokenizer_object=character_tokenizer().backend_tokenizer)
    assert provider_text(bundle(tmp_path / "b", made)).stop_ids == ()
