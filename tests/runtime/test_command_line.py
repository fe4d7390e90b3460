"""Tests what the commands have in common: the option that was meant, the version, and how their help begins."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterable
from importlib.metadata import version
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from provider import cli as provider_cli
from runtime.command_line import Command, instead, nearest, plain_message, told_if_slow
from tenant_sdk import cli as tenant_cli
from tests.support.waiting import comes

FLAGS = ["--learning-rate", "--lr-scheduler-type", "--rank", "--max-steps", "--epochs", "--output", "--batch-size"]
LORA = ["r", "lora_alpha", "lora_dropout", "target_modules", "rank_pattern", "alpha_pattern", "use_dora", "bias"]


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("--lr", FLAGS, "--learning-rate"), ("--learnign-rate", FLAGS, "--learning-rate"),
        ("--r", FLAGS, "--rank"), ("--out", FLAGS, "--output"), ("--bs", FLAGS, "--batch-size"),
        ("--steps", FLAGS, "--max-steps"), ("--batch_size", FLAGS, "--batch-size"), ("--zzz", FLAGS, None),
        ("rank", LORA, "r"), ("alpha", LORA, "lora_alpha"), ("targets", LORA, "target_modules"), ("zzz", LORA, None),
        ("modle", ["mode", "model", "tls"], "model"), ("MODLE", ["MODEL", "TLS"], "MODEL"), ("x", [], None),
    ],
)  # fmt: skip
def test_the_name_that_was_meant(word: str, known: list[str], meant: str | None) -> None:
    assert nearest(word, known) == meant


def test_long_names_are_compared_by_their_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def noted(word: str, known: Iterable[str], **options: Any) -> list[str]:
        compared.extend(map(len, [word, *known]))
        return []

    monkeypatch.setattr("difflib.get_close_matches", noted)
    names = [f"{number:03}" * 43 for number in range(3)]
    assert nearest("x" * 128, names) is None
    assert set(compared) == {40}
    assert nearest("002" * 42, names) == names[2]
    assert nearest(names[1].upper(), names) == names[1]


def test_an_error_lists_names_only_if_they_are_few() -> None:
    assert instead("targets", LORA, "a page") == "the nearest is target_modules"
    assert instead("zzz", LORA, "a page") == f"there are {', '.join(LORA)}"
    assert instead("zzz", LORA * 2, "a page") == "a page lists them"


def run(
    module: Any, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[Any, str]:
    """Returns the exit code of a command, and all that it printed in one line."""
    monkeypatch.setattr(sys, "argv", [module.__name__.partition(".")[0], *words.split()])
    with pytest.raises(SystemExit) as end:
        module.main()
    shown = capsys.readouterr()
    return end.value.code, " ".join((shown.out + shown.err).replace("│", " ").split())


@pytest.mark.parametrize(
    ("module", "words", "meant"),
    [
        (tenant_cli, "finetune data.jsonl --lr 3", "--learning-rate"),
        (tenant_cli, "generate x --length 3", "--fixed-length"),
        (provider_cli, "serve --modle x", "--model"),
        (provider_cli, "usage --statte x", "--state"),
    ],
)
def test_an_unknown_option_names_the_one_that_was_meant(
    module: Any, words: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(module, words, monkeypatch, capsys)
    assert code == 2
    assert meant in text


@pytest.mark.parametrize(
    ("module", "word", "told"),
    [
        (
            tenant_cli,
            "modle",
            "there is no command modle: there are finetune, plan, generate, chat, serve, explain, status",
        ),
        (tenant_cli, "finetun", "the nearest is finetune"),
        (provider_cli, "export", "the nearest is export-server"),
        (provider_cli, "shrd", "there are serve, enroll"),
        (provider_cli, "\x1b[2Jx", r"there is no command \x1b[2Jx"),
    ],
)
def test_an_unknown_command_names_the_one_that_was_meant(
    module: Any, word: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(module, word, monkeypatch, capsys)
    assert code == 2
    assert told in text


@pytest.mark.parametrize("module", [tenant_cli, provider_cli])
def test_the_version(module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(module, "--version", monkeypatch, capsys) == (0, f"veilbase {version('veilbase')}")


@pytest.mark.parametrize("module", [tenant_cli, provider_cli])
def test_help_begins_with_what_a_command_is_for(module: Any) -> None:
    group: Any = typer.main.get_command(module.app)
    for name, command in [("", group), *group.commands.items()]:
        assert command.help, name
        assert not command.help.startswith(("This ", "Defines", "Implements")), name
        many = [option for option in command.params if option.name not in ("help", "state", "name", "out")]
        if len(many) > 8:
            headings = {getattr(option, "rich_help_panel", None) for option in many}
            assert len(headings) > 2, f"{name} lists {len(many)} options under one heading"


@pytest.mark.parametrize("columns", ["80", "40"])
@pytest.mark.parametrize("module", [tenant_cli, provider_cli], ids=["tenant", "provider"])
def test_help_cuts_no_name_of_an_option(module: Any, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    group: Any = typer.main.get_command(module.app)
    for name, command in group.commands.items():
        shown = CliRunner().invoke(module.app, [name, "--help"]).stdout
        assert "…" not in shown
        assert "..." not in shown
        options = [each for each in command.params if not getattr(each, "hidden", False)]
        names = {flag for each in options for flag in (*each.opts, *each.secondary_opts) if flag[:2] == "--"}
        assert not {flag for flag in names if not re.search(rf"(?<![\w-]){flag}(?![\w-])", shown)}
    assert "..." not in CliRunner().invoke(module.app, ["--help"]).stdout.partition("Options:")[2]


def test_help_lists_options_under_their_headings() -> None:
    shown = CliRunner().invoke(tenant_cli.app, ["finetune", "--help"], env={"COLUMNS": "80"}).stdout
    assert re.search(
        r"\nPrivacy:\n  --mask <str> .*\n\nTraining:\n.*  --gradient-accumulation-steps <int>\n", shown, re.DOTALL
    )
    assert {"CSV", "TSV", "JSON", "JSONL", "parquet"} <= set(re.findall(r"\w+", shown.partition("Options:")[0]))


def test_what_takes_long_is_told_and_told_again() -> None:
    said, is_said = list[str](), [threading.Event() for _ in range(3)]

    def say(line: str) -> None:
        said.append(line)
        is_said[min(len(said), 3) - 1].set()

    with told_if_slow("loading", say, 0.0, 60.0):
        comes(is_said[0], "the line")
    with told_if_slow("waiting", say, 0.0, 0.0):
        comes(is_said[2], "the second line of what goes on")
    with told_if_slow("quick", say, 60.0):
        pass
    with told_if_slow("shown otherwise", say, 60.0) as is_told:
        is_told()
    with told_if_slow("silent", None, 0.0):
        pass
    assert said[:3] == ["loading ...", "waiting ...", "waiting ... 0 s so far"]
    assert set(said) == set(said[:3])


def test_pydantics_words_before_a_message_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer(add_completion=False)

    @app.command(cls=Command)
    def run(how: Annotated[Literal["a", "b"], typer.Option()] = "a") -> None:
        pass

    with pytest.raises(SystemExit):
        app(["--how", "c"])
    assert "'--how': 'c' is not one of" in capsys.readouterr().err
    assert plain_message("Value error, write a number") == "write a number"
