"""Tests how the tokens of an answer are written beside their logprobs: by their own bytes, whatever the tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tenant_sdk.endpoint.logprobs import TextOffsets, TokenTexts, chat_logprobs, completion_logprobs
from tenant_sdk.endpoint.options import LogprobRecord
from tenant_sdk.endpoint.privacy import Released

FACE = "😊"
RELEASED = Released("off", None)


def wrapped(backend: Tokenizer) -> Any:
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("née", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def byte_level() -> Any:
    """Returns a tokenizer as GPT-2, Llama 3 and Qwen have it: a token is one or several bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("ð", "Ł"), ("ðŁ", "ĺ"), ("Ġ", "a"), ("c", "Ã")]  # f0 9f 98, " a", and "c" with the first byte of é
    pieces = [*letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend)


def byte_fallback() -> Any:
    """Returns a tokenizer as Llama 2 and Gemma have it: what is no piece of text is tokens of one byte."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "d", "é"]
    backend = Tokenizer(
        models.BPE({piece: number for number, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return wrapped(backend)


KINDS: dict[str, Callable[[], Any]] = {"byte level": byte_level, "byte fallback": byte_fallback}
TOKENIZERS = {kind: make() for kind, make in KINDS.items()}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def record_of(ids: list[int], vocab_size: int, rivals: list[int]) -> LogprobRecord:
    """Returns the record of an answer, in each step of which its token and `rivals` are the likeliest, in order."""
    record = LogprobRecord(1 + len(rivals), RELEASED.rounded_logprobs)
    for place, token_id in enumerate(ids):
        logits = torch.zeros(1, vocab_size)
        for rank, each in enumerate([token_id, *(each for each in rivals if each != token_id)]):
            logits[0, each] = 10.0 - rank
        record(torch.tensor([[0, *ids[:place]]]), logits)
    return record


def test_each_token_of_a_character_has_its_own_bytes(tokenizer: Any) -> None:
    ids = ids_of(tokenizer, FACE)
    assert len(ids) > 1
    record = record_of(ids, len(tokenizer), [])
    content = chat_logprobs(record, ids, TokenTexts(tokenizer), RELEASED)["content"]
    assert [byte for each in content for byte in each["bytes"]] == list(FACE.encode())
    for each in content:
        assert each["token"] == "".join(f"\\x{byte:02x}" for byte in each["bytes"])
        assert each["top_logprobs"][0]["bytes"] == each["bytes"]


@settings(deadline=None)
@given(st.text(st.sampled_from("abcdé €😊\n中\u0301\ufffd"), min_size=1, max_size=20))
def test_the_bytes_of_all_tokens_are_those_of_the_text(text: str) -> None:
    for tokenizer in TOKENIZERS.values():
        texts = TokenTexts(tokenizer)
        assert b"".join(texts[token_id] for token_id in ids_of(tokenizer, text)) == text.encode()


def test_tokens_that_are_whole_characters_are_shown_as_text(tokenizer: Any) -> None:
    texts = TokenTexts(tokenizer)
    end, name = tokenizer.convert_tokens_to_ids(["<|end|>", "née"])
    assert (texts[end], texts[name]) == (b"<|end|>", "née".encode())
    ids = [*ids_of(tokenizer, "b a"), end, name]
    content = chat_logprobs(record_of(ids, len(tokenizer), []), ids, texts, RELEASED)["content"]
    assert "".join(each["token"] for each in content) == "b a<|end|>née"


def test_a_token_that_ends_in_the_middle_of_a_character_shows_both() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = ids_of(tokenizer, "cé")
    texts = TokenTexts(tokenizer)
    assert [texts[each] for each in ids] == [b"c\xc3", b"\xa9"]
    content = chat_logprobs(record_of(ids, len(tokenizer), []), ids, texts, RELEASED)["content"]
    assert [each["token"] for each in content] == ["c\\xc3", "\\xa9"]


def test_completions_have_a_key_for_each_token_and_offsets_into_the_text(tokenizer: Any) -> None:
    text = f"a{FACE}b"
    ids = ids_of(tokenizer, text)
    rivals = ids_of(tokenizer, FACE)[:2] + ids_of(tokenizer, "中")[1:]
    found = completion_logprobs(record_of(ids, len(tokenizer), rivals), ids, TokenTexts(tokenizer), RELEASED)
    partial = found["tokens"][1:-1]
    assert found["tokens"] == ["a", *partial, "b"]
    assert all(each.startswith("bytes:\\x") for each in partial)
    assert bytes.fromhex("".join(partial).replace("bytes:", "").replace("\\x", "")) == FACE.encode()
    assert found["text_offset"] == [0, *(1 for _ in partial), 2]
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(top) == 1 + len(rivals)  # as one text, all parts of characters had one key
        assert next(iter(top.items())) == (token, value)  # the likeliest comes first


def test_the_offsets_of_chunks_are_those_of_the_whole_and_each_token_is_counted_once(tokenizer: Any) -> None:
    asked: list[int] = []

    class Counting(TokenTexts):
        def __getitem__(self, token_id: int) -> bytes:
            asked.append(token_id)
            return super().__getitem__(token_id)

    ids = ids_of(tokenizer, f"a{FACE}b" * 50)
    whole = TextOffsets(TokenTexts(tokenizer)).of(ids, 0)
    offsets = TextOffsets(Counting(tokenizer))
    chunks = [offsets.of(ids[: place + 1], place) for place in range(len(ids))]
    assert [each for chunk in chunks for each in chunk] == whole
    assert len(asked) == 2 * len(ids)


def test_a_key_that_two_tokens_share_is_that_of_the_likelier_one() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    letter, byte = tokenizer.convert_tokens_to_ids(["a", "<0x61>"])
    found = completion_logprobs(record_of([letter], len(tokenizer), [byte]), [letter], TokenTexts(tokenizer), RELEASED)
    assert found["top_logprobs"] == [{"a": found["token_logprobs"][0]}]
