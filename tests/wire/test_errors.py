"""Tests errors: their codes in both directions, their fixed texts, and that the tree is as it is drawn."""

from __future__ import annotations

import inspect
import re

import pytest

from noise.blocks.slots import SlotsExhausted
from noise.ledger.ledger import SeedExhausted
from tenant_sdk import PromptsFailed
from wire import errors
from wire.errors import VeilbaseError, WireCode, code_of, error_from_code, printable

MEMBERS = inspect.getmembers(errors, inspect.isclass)
CLASSES = {name: kind for name, kind in MEMBERS if issubclass(kind, Exception)}


@pytest.mark.parametrize("code", list(WireCode))
def test_there_and_back(code: WireCode) -> None:
    error = error_from_code(code, 17)
    assert isinstance(error, VeilbaseError)
    assert code_of(error) is code
    assert str(error).endswith("(request 17)")
    assert str(error).isprintable()


def test_codes_are_those_of_the_wire() -> None:
    assert {code.name: code.value for code in WireCode} == {
        "INVALID_TENSOR": 1, "UNKNOWN_LAYER": 2, "LIMIT": 3, "UNAUTHENTICATED": 4, "NOT_PERMITTED": 5, "QUOTA": 6,
        "DEADLINE": 7, "UNAVAILABLE": 8, "VERSION": 9, "MALFORMED": 10, "INTERNAL": 11,
    }  # fmt: skip


@pytest.mark.parametrize("code", [0, 12, 255, 65_535, -1])
def test_an_unknown_code_is_a_remote_fault(code: int) -> None:
    error = error_from_code(code, 3)
    assert type(error) is errors.RemoteFault
    assert str(code) not in str(error).removesuffix("(request 3)")


def test_each_code_has_its_own_class_and_text() -> None:
    made = [error_from_code(code, 1) for code in WireCode]
    assert len({type(error) for error in made}) == len({str(error) for error in made}) == len(WireCode)


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("secret 1.25"), MemoryError(), KeyboardInterrupt(), errors.MaskReused("slot"), errors.DatasetError(),
        errors.ConfigurationError("/home/x"), errors.ForkedConnection(), VeilbaseError(), errors.RequestError(),
    ],
)  # fmt: skip
def test_everything_else_is_internal(exc: BaseException) -> None:
    assert code_of(exc) is WireCode.INTERNAL


def test_subclasses_have_their_parents_code() -> None:
    class Narrow(errors.LimitExceeded):
        pass

    assert code_of(Narrow()) is WireCode.LIMIT
    assert code_of(errors.ProtocolError()) is WireCode.MALFORMED


def test_the_tree_is_the_one_drawn() -> None:
    drawn: dict[str, str] = {}
    parents = ["VeilbaseError"]
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        found = re.match(r"((?:│   |    )*)[├└]── (\w+)", line.removeprefix("    "))
        if found:
            depth = len(found[1]) // 4 + 1
            del parents[depth:]
            drawn[found[2]] = parents[-1]
            parents.append(found[2])
    elsewhere = {kind.__name__: kind for kind in (SlotsExhausted, SeedExhausted, PromptsFailed)}
    everything = {**CLASSES, **elsewhere}
    assert drawn == {name: kind.__bases__[0].__name__ for name, kind in everything.items() if name != "VeilbaseError"}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_class_says_what_it_means(name: str) -> None:
    assert CLASSES[name].__doc__
    assert issubclass(CLASSES[name], VeilbaseError)


OBEYED = {
    "\x1b[31mred\x1b[0m": r"\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07": r"\x1b]0;title\x07",
    "\x1b]52;c;ZXZpbA==\x1b\\": r"\x1b]52;c;ZXZpbA==\x1b\\"[:-1],
    "\x9b2J": r"\x9b2J",
    "ten\rtwo\x08\x7f\x00": r"ten\rtwo\x08\x7f\x00",
    "a\u202eb\u2066c\u2028d\x85": r"a\u202eb\u2066c\u2028d\x85",
    "\ud83d": r"\ud83d",
}
"""Texts with what a terminal may obey, and how they are shown."""


@pytest.mark.parametrize(("text", "shown"), OBEYED.items(), ids=map(ascii, OBEYED))
def test_what_a_terminal_may_obey_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text).isprintable()
    assert "".join(map(printable, text)) == shown, "a sequence may come in pieces"


def test_other_text_is_shown_as_it_is() -> None:
    for text in ("a\n\tb", "Grüße, 東京 \N{RIGHT-TO-LEFT MARK}שלום", "👩\N{ZERO WIDTH JOINER}🚀", "C:\\x1b", ""):
        assert printable(text) == text
    assert printable("a\n\tb\x1b", one_line=True) == r"a\n\tb\x1b"
