"""Tests a conversation in the terminal: it streams answers, remembers earlier messages, switches adapters and prints
the cost. Also tests that no control character of a model or of a file reaches the terminal."""

from __future__ import annotations

import io
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tenant_sdk import TenantClient, cli
from tenant_sdk.terminal import HELP, talk
from wire.errors import ConfigurationError

FIGURES = re.compile(r"\[(\w+): (\d+) tokens, \d+\.\d tokens/s, \d+\.\d\d MB up, \d+\.\d\d MB down\]")


def spoken(client: TenantClient, lines: list[str], adapters: Path | None = None) -> list[str]:
    shown: list[str] = []
    talk(client, adapters, lines, shown.append, max_new_tokens=6)
    return shown


def test_a_conversation_is_remembered_until_new(client: TenantClient) -> None:
    shown = "".join(spoken(client, ["who?\n", "", "and then?", "/new", "who?", "/quit", "never"])).splitlines()
    shown.remove("the conversation is forgotten")
    first = client.generate("who?", max_new_tokens=6)
    turns = [
        {"role": "user", "content": "who?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and then?"},
    ]
    assert shown[:3] == HELP.splitlines()
    assert max(map(len, shown[:3])) < 80  # also in a pipe, which wraps nothing
    shown = shown[2:]
    assert shown[1::2] == [first, client.generate(turns, max_new_tokens=6), first]
    assert [FIGURES.fullmatch(line).groups() for line in shown[2::2]] == [("base", "6")] * 3  # type: ignore[union-attr]


def test_the_text_comes_in_pieces(client: TenantClient) -> None:
    shown = spoken(client, ["who?"])
    assert "".join(shown[1:-1]) == client.generate("who?", max_new_tokens=6)
    assert len(shown) > 5


def test_adapters_are_switched(client: TenantClient, adapters: Path) -> None:
    shown = "".join(spoken(client, ["/adapters", "/adapter sales", "who?", "/adapter", "/new", "who?"], adapters))
    (want,) = client.generate_many(["who?"], adapters / "sales", max_new_tokens=6, progress=False)
    lines = shown.removeprefix(HELP).splitlines()
    assert lines[1:4] == ["sales support", "answers with the adapter sales", want]
    assert lines[4].startswith("[sales: 6 tokens")
    assert lines[5:7] == ["answers with the base model", "the conversation is forgotten"]
    assert lines[7] == client.generate("who?", max_new_tokens=6)
    assert lines[8].startswith("[base: ")


def test_the_base_models_name_chooses_it_and_a_misspelt_name_is_mended(client: TenantClient, adapters: Path) -> None:
    shown = "".join(spoken(client, ["/adapter llama", "/adapter base", "/adapter suport", "/adapter lama"], adapters))
    assert shown.removeprefix(HELP).splitlines()[1:] == [
        *["answers with the base model"] * 2,
        "",
        "there is no adapter 'suport': the nearest is support",
        "",
        "there is no adapter 'lama': the nearest is llama",
    ]


def test_what_cannot_be_done_is_one_line_and_no_end(client: TenantClient, capsys: pytest.CaptureFixture[str]) -> None:
    shown = "".join(spoken(client, ["/adapter nobody", "x" * 5000, "/adapters", "/huh", "/explain", "who?"]))
    assert "there is no adapter 'nobody'" in shown
    assert "shorten the prompt" in shown
    assert "no adapters" in shown
    assert shown.count(HELP) == 2
    assert client.generate("who?", max_new_tokens=6) in shown
    assert "verification" in capsys.readouterr().out


EVIL = ("\x1b]0;ti", "tle\x07\x1b", "[2J", "\r\u202e\x9b31m", "fine\n")
"""An answer in pieces, with escape sequences that span them."""
SHOWN = r"\x1b]0;title\x07\x1b[2J\r\u202e\x9b31mfine"


class EvilClient:
    """Stands in for a client whose model says `EVIL`, or which fails with it."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def __enter__(self) -> EvilClient:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def generate(self, *_: Any, on_text: Callable[[str], None], **__: Any) -> None:
        if self.fails:
            warnings.warn("".join(EVIL), UserWarning, stacklevel=1)
            raise ConfigurationError("".join(EVIL))
        for piece in EVIL:
            on_text(piece)


class Screen(io.StringIO):
    """Stands in for a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _a_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `inproc:.` name a folder with a model's config, which commands look for before they do anything."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)


def run(
    monkeypatch: pytest.MonkeyPatch, client: Any, command: str, out: io.StringIO, url: str = "inproc:.",
    mask: str = "off",
) -> int:  # fmt: skip
    """Runs a command of `tenant` in this process, and returns its exit code."""
    words = ["tenant", command, *(["who?"] if command == "generate" else []), "--url", url, "--mask", mask]
    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("always")
        if client is not None:
            patched.setattr("tenant_sdk.TenantClient", lambda *_, **__: client)
        patched.setattr(warnings, "showwarning", warnings.showwarning)  # which `main` replaces
        for name, value in {"argv": words, "stdout": out, "stderr": out}.items():
            patched.setattr(sys, name, value)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


def test_an_answer_gives_a_terminal_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    assert run(monkeypatch, EvilClient(), "generate", screen) == 0
    assert screen.getvalue() == f"{SHOWN}\n\n"


def test_a_conversation_gives_a_terminal_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    def say(client: Any, adapters: Any, lines: Any, write: Callable[[str], None], *_: Any) -> None:
        for piece in EVIL:
            write(piece)

    screen = Screen()
    monkeypatch.setattr("tenant_sdk.terminal.talk", say)
    assert run(monkeypatch, EvilClient(), "chat", screen) == 0
    assert screen.getvalue() == f"{SHOWN}\n"


def test_errors_and_warnings_give_a_terminal_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    assert run(monkeypatch, EvilClient(fails=True), "generate", screen) == 1
    assert screen.getvalue() == f"tenant: warning: {SHOWN}\n\ntenant: {SHOWN}\\n\n"


def test_a_file_gets_an_answer_without_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    assert run(monkeypatch, EvilClient(), "generate", written) == 0
    assert "fine\n" in written.getvalue()
    assert r"\x1b" not in written.getvalue()


@pytest.mark.parametrize("command", ["explain", "generate", "chat"])
def test_each_command_says_once_that_rows_go_readable(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, command: str
) -> None:
    monkeypatch.setenv("VEILBASE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "stdin", io.StringIO("/quit\n"))
    for mask in ("off", "gaussian-pool"):
        shown = io.StringIO()
        assert run(monkeypatch, None, command, shown, f"inproc:{folder}", mask) == 0
        (line,) = [each for each in shown.getvalue().splitlines() if each.startswith("tenant: warning: ROWS")]
        assert line.startswith(f"tenant: warning: ROWS GO READABLE: mask={mask!r} ")
