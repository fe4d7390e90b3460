"""Tests a conversation in the terminal: it streams answers, remembers earlier messages, switches adapters and prints
the cost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tenant_sdk import TenantClient
from tenant_sdk.terminal import HELP, talk

FIGURES = re.compile(r"\[(\w+): (\d+) tokens, \d+\.\d tokens/s, \d+\.\d\d MB up, \d+\.\d\d MB down\]")


def spoken(client: TenantClient, lines: list[str], adapters: Path | None = None) -> list[str]:
    shown: list[str] = []
    talk(client, adapters, lines, shown.append, max_new_tokens=6)
    return shown


def test_a_conversation_is_remembered_until_new(client: TenantClient) -> None:
    shown = "".join(spoken(client, ["who?\n", "", "and then?", "/new", "who?", "/quit", "never"])).splitlines()
    first = client.generate("who?", max_new_tokens=6)
    turns = [
        {"role": "user", "content": "who?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and then?"},
    ]
    assert shown[0] == HELP
    assert shown[1::2] == [first, client.generate(turns, max_new_tokens=6), first]
    assert [FIGURES.fullmatch(line).groups() for line in shown[2::2]] == [("base", "6")] * 3  # type: ignore[union-attr]


def test_the_text_comes_in_pieces(client: TenantClient) -> None:
    shown = spoken(client, ["who?"])
    assert "".join(shown[1:-1]) == client.generate("who?", max_new_tokens=6)
    assert len(shown) > 5


def test_adapters_are_switched(client: TenantClient, adapters: Path) -> None:
    shown = "".join(spoken(client, ["/adapters", "/adapter sales", "who?", "/adapter", "/new", "who?"], adapters))
    (want,) = client.generate_many(["who?"], adapters / "sales", max_new_tokens=6, progress=False)
    lines = shown.splitlines()
    assert lines[1:3] == ["sales support", want]
    assert lines[3].startswith("[sales: 6 tokens")
    assert lines[4] == client.generate("who?", max_new_tokens=6)
    assert lines[5].startswith("[base: ")


def test_what_cannot_be_done_is_one_line_and_no_end(client: TenantClient, capsys: pytest.CaptureFixture[str]) -> None:
    shown = "".join(spoken(client, ["/adapter nobody", "x" * 5000, "/adapters", "/huh", "/explain", "who?"]))
    assert "there is no adapter 'nobody'" in shown
    assert "the model's context holds" in shown
    assert "no adapters" in shown
    assert shown.count(HELP) == 2
    assert client.generate("who?", max_new_tokens=6) in shown
    assert "verification" in capsys.readouterr().out
