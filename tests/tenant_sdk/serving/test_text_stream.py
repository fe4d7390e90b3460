"""Tests streamed text: it consists of whole characters, contains no part of a stop string, and in the end equals the
text that is decoded at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tenant_sdk.serving.requests import TextStream
from tenant_sdk.text.source import SafeDecoding, special_texts


def byte_tokenizer() -> Any:
    """Returns a tokenizer with one token per byte, like byte-level BPE without merges, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


BYTES = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return list(BYTES(text)["input_ids"])


def pieces_of(ids: Sequence[int], stops: Sequence[str] = ()) -> list[str]:
    stream = TextStream(SafeDecoding(BYTES), stops)
    pieces = [stream.put(token_id) for token_id in ids]
    pieces.append(stream.end())
    assert "".join(pieces) == stream.text
    return pieces


def test_a_character_of_several_tokens_comes_whole() -> None:
    assert pieces_of(ids_of("a€😀b")) == ["a", "", "", "€", "", "", "", "😀", "b", ""]


def test_bytes_that_are_no_character_come_at_the_end_or_when_too_many_wait() -> None:
    broken = ids_of("€")[0]
    assert pieces_of([*ids_of("ab"), broken]) == ["a", "b", "", "�"]
    assert "".join(pieces_of([broken] * 40)) == "�" * 40


@given(st.lists(st.integers(0, 255), max_size=30))
def test_the_pieces_are_what_decoding_at_once_gives(ids: list[int]) -> None:
    assert "".join(pieces_of(ids)) == BYTES.decode(ids, skip_special_tokens=True)


@given(st.lists(st.integers(0, 255), max_size=30))
def test_each_token_s_text_ends_where_its_piece_does(ids: list[int]) -> None:
    """`token_ends` says after how many characters each token's text is complete, as far as it was handed out."""
    stream, whole = TextStream(SafeDecoding(BYTES)), ""
    for number, token_id in enumerate(ids, 1):
        piece = stream.put(token_id)
        whole += piece
        assert not piece or stream.token_ends[number - 1] == len(whole)
        assert len(stream.token_ends) == number if piece else len(stream.token_ends) < number
    rest = stream.end()
    assert (len(stream.token_ends) == len(ids)) or not rest
    assert stream.token_ends == sorted(stream.token_ends)


def test_the_ends_of_tokens_that_begin_a_stop_string_are_those_of_their_own_text() -> None:
    stream = TextStream(SafeDecoding(BYTES), ["STOP"])
    assert [stream.put(token_id) for token_id in ids_of("aSSTO")] == ["a", "", "S", "", ""]
    assert stream.token_ends == [1, 2, 3, 4, 5]
    assert (stream.put(BYTES.eos_token_id), stream.end()) == ("", "STO")
    assert stream.token_ends == [1, 2, 3, 4, 5], "a token without text at the end has no place in the text"


@given(st.text(max_size=20))
def test_text_comes_through(text: str) -> None:
    assert "".join(pieces_of(ids_of(text))) == text


@pytest.mark.parametrize(
    ("text", "stops", "pieces"),
    [
        ("abcd", ["cd"], ["a", "b", "", "", ""]),
        ("abcx", ["cd"], ["a", "b", "", "cx", ""]),
        ("abc", ["cd"], ["a", "b", "", "c"]),
        ("aab", ["ab"], ["", "a", "", ""]),
        ("xyz", ["z", "yz"], ["x", "", "", ""]),
        ("€€", ["€"], ["", "", "", "", "", "", ""]),
    ],
)
def test_stop_strings_are_held_back_and_left_out(text: str, stops: list[str], pieces: list[str]) -> None:
    assert pieces_of(ids_of(text), stops) == pieces


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_text_ends_before_the_stop_string_that_is_complete_first(text: str, stops: list[str]) -> None:
    ended = next((size for size in range(1, len(text) + 1) if any(text[:size].endswith(stop) for stop in stops)), None)
    expected = text
    if ended is not None:
        expected = text[: min(text[:ended].find(stop) for stop in stops if stop in text[:ended])]
    assert "".join(pieces_of(ids_of(text), stops)) == expected


def test_special_tokens_are_no_text() -> None:
    assert pieces_of([*ids_of("ab"), END]) == ["a", "b", "", ""]


END = BYTES.convert_tokens_to_ids("<|end|>")
SPECIAL = special_texts(BYTES)


def marked_ids(text: str) -> list[int]:
    """Returns the tokens of a text in which `$` stands for the special token."""
    parts = [ids_of(part) for part in text.split("$")]
    return [*parts[0], *(token_id for part in parts[1:] for token_id in [END, *part])]


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("ab$cd", ["<|end|>"], "ab"),  # the special token itself
        ("ab$cd", ["<|end|>c"], "ab"),  # it begins the stop string
        ("ab$cd", ["b<|end|>"], "a"),  # it ends it
        ("ab$cd", ["b<|end|>c"], "a"),  # it is in the middle of it
        ("a$$b", ["<|end|><|end|>"], "a"),
        ("ab$cd", ["end|>c"], "ab"),  # a part of it
        ("ab$cd", ["|>", "d"], "ab"),
        ("ab$cd", ["<|end|>x", "cx"], "abcd"),  # the beginning of a stop string, which is not completed
        ("ab$cd$", ["d<|end|>x"], "abcd"),
        ("ab$c$d", ["bc"], "abcd"),  # text on both sides of a special token does not stand together
        ("a$b$c", ["<|end|>c"], "ab"),
        ("a$b", ["x"], "ab"),
        ("$a", ["<|end|>"], ""),
        ("€$a", ["€<|end|>"], ""),
    ],
)
def test_a_stop_string_may_hold_special_tokens(text: str, stops: list[str], expected: str) -> None:
    stream = TextStream(SafeDecoding(BYTES), stops, SPECIAL)
    pieces = [stream.put(token_id) for token_id in marked_ids(text)]
    assert "".join([*pieces, stream.end()]) == stream.text == expected
    assert stream.is_stopped is (expected != text.replace("$", ""))


@given(st.text("ab$", max_size=20), st.lists(st.text("ab$", min_size=1, max_size=4), min_size=1, max_size=3))
def test_special_tokens_in_the_text_and_in_stop_strings(text: str, stops: list[str]) -> None:
    """Cut at the first stop string that is complete, as it stands in the text with special tokens."""
    ended = next((size for size in range(1, len(text) + 1) if any(text[:size].endswith(stop) for stop in stops)), None)
    expected = text
    if ended is not None:
        expected = text[: min(text[:ended].find(stop) for stop in stops if stop in text[:ended])]
    stream = TextStream(SafeDecoding(BYTES), [stop.replace("$", "<|end|>") for stop in stops], SPECIAL)
    pieces = [stream.put(token_id) for token_id in marked_ids(text)]
    assert "".join([*pieces, stream.end()]) == expected.replace("$", "")
    assert stream.is_stopped is (ended is not None)


def test_a_tokenizer_that_fails_is_reported_once_and_gives_no_more_text() -> None:
    class Failing:
        def decode(self, ids: list[int], **_: Any) -> str:
            raise RuntimeError("shows the text")

    decoding = SafeDecoding(Failing())
    stream = TextStream(decoding, ["x"])
    assert [stream.put(1), stream.put(2), stream.end()] == ["", "", ""]
    assert decoding.failed is not None
    assert "shows the text" not in str(decoding.failed)
