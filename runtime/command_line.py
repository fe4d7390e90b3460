"""This module holds what the commands `tenant` and `provider` have in common: how their help is laid out, how they
name the option that a user meant, how they say what takes long, how they print tables, and which version they are.

Importing this module does not load torch.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import math
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_OTHER_WORDS = {
    "rank": "r", "r": "rank", "lora_r": "r", "lora_rank": "rank", "epochs": "num_epochs",
    "num_train_epochs": "num_epochs", "out": "output", "model_name_or_path": "model",
    "per_device_train_batch_size": "batch_size", "checkpoint": "verify", "cert": "identity", "endpoint": "url",
    "address": "host", "listen": "host", "grad_accum": "gradient_accumulation_steps",
}  # fmt: skip
"""Words that other programs have for an option, with the word of this one."""
_MOST_COMPARED = 40
"""The most characters of a name that are compared: the time grows with their square, and names may come from a peer."""
_MOST_LISTED = 12
"""The most names that an error lists: more would bury what it says."""

_VALUE_ERROR = "Value error, "
"""What pydantic, which typer also uses, puts before the text of a ValueError."""
TOLD_AFTER_S = 2.0
"""The seconds after which a user is told what takes so long."""
TOLD_AGAIN_S = 10.0
"""The seconds after which a user is told once more."""
_MOST_NAME_BYTES, _MOST_PATH_BYTES = 255, 4095
"""The most bytes of a file's name, and of a path, that Linux takes. Asked about longer ones, Python raises an error."""
_MOST_OF_A_NAME, _LEAST_OF_A_MEANING = 30, 20
"""The most characters of the column with names in a command's help, and the fewest of the one beside it."""


def nearest(word: str, known: Collection[str]) -> str | None:
    """Returns the name that a user most likely meant, or None if none is near.

    Args:
        word: what was given: a misspelt or shortened name, or one of another program, such as `modle`, `lr`, `alpha` or
            `rank`.
        known: the names that there are, with `--` and `-` or with `_`.
    """
    whole = {_plain(name): name for name in known}
    given = _plain(word)
    if given in whole:
        return whole[given]
    plain, given = {name[:_MOST_COMPARED]: each for name, each in whole.items()}, given[:_MOST_COMPARED]
    if len(given) == _MOST_COMPARED and given in plain:
        return plain[given]
    if (other := _OTHER_WORDS.get(given)) in plain:
        return plain[other]
    if turned := [name for name in plain if sorted(name) == sorted(given)]:  # `modle`: model, although mode is nearer
        return plain[turned[0]]
    if typing_mistake := difflib.get_close_matches(given, plain, n=1, cutoff=0.75):
        return plain[typing_mistake[0]]
    parts = set(given.split("_"))
    for means in (
        lambda name: len(given) > 1 and given == "".join(part[:1] for part in name.split("_")),
        lambda name: parts <= set(name.split("_")),
        lambda name: len(given) > 2 and name.startswith(given),
    ):
        if found := sorted((name for name in plain if means(name)), key=len):
            return plain[found[0]]
    near = difflib.get_close_matches(given, plain, n=1)
    return plain[near[0]] if near else None


def instead(word: str, known: Collection[str], listed_by: str) -> str:
    """Returns the end of an error's text about a name that there is not: the name that was most likely meant, all names
    if they are few, or else what lists them.

    Args:
        word: what was given.
        known: the names that there are.
        listed_by: a command or a page with all of them.
    """
    meant = nearest(word, known)
    if meant is not None:
        return f"the nearest is {meant}"
    return f"there are {', '.join(known)}" if len(known) <= _MOST_LISTED else f"{listed_by} lists them"


def plain_message(message: str) -> str:
    """Returns pydantic's message about a value as it stands in an error's text, without what pydantic puts before a
    text that is not its own."""
    return message.removeprefix(_VALUE_ERROR).lower()


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


class Command(TyperCommand):
    """Is a command of typer that names the option which the user meant, where there is none of the given name, and
    whose help lists options under their headings, each with its whole name."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the options and arguments, a list for each heading (typer's `rich_help_panel`)."""
        headings: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if each.param_type_name == "argument" else "Options"
                headings.setdefault(getattr(each, "rich_help_panel", None) or usual, []).append(record)
        for heading, records in headings.items():
            with formatter.section(heading):
                _write_records(formatter, records)

    def get_short_help_str(self, limit: int = 0) -> str:
        """Returns the first paragraph of the command's help, for the list of commands. It is not cut at `limit`."""
        return " ".join(inspect.cleandoc(self.help or "").split("\n\n")[0].split())

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the words of the command line; see `TyperCommand`."""
        try:
            rest = super().parse_args(ctx, args)
            _check_paths(ctx, self.params)
            return rest
        except Exception as exc:
            # typer brings its own copy of click, whose place differs between versions: so the error is told by what it
            # has, and not by its class
            failure: Any = exc
            if hasattr(failure, "option_name") and hasattr(failure, "possibilities"):
                flags = [flag for option in self.params if not getattr(option, "hidden", False) for flag in option.opts]
                meant = nearest(failure.option_name, [flag for flag in flags if flag.startswith("--")])
                failure.possibilities = [] if meant is None else [meant]
            if hasattr(failure, "message"):
                failure.message = str(failure.message).removeprefix(_VALUE_ERROR)
            raise


def no_path(path: str | Path) -> str:
    """Returns why a text cannot be the path of anything: a name in it is too long, or it has a null character. An empty
    text if it can."""
    text = os.fsencode(path)
    if b"\0" in text:
        return "a path has no null character"
    if len(text) > _MOST_PATH_BYTES or any(len(name) > _MOST_NAME_BYTES for name in text.split(b"/")):
        return f"a path has at most {_MOST_PATH_BYTES} bytes, and each name in it {_MOST_NAME_BYTES}"
    return ""


def _check_paths(ctx: Any, options: Sequence[Any]) -> None:
    """Refuses a value of an option that is to be a path and cannot be one."""
    for option in options:
        value = ctx.params.get(option.name)
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, Path) and (reason := no_path(each)):
                raise typer.BadParameter(reason, ctx=ctx, param_hint=f"'{option.opts[0]}'")


class Commands(TyperGroup):
    """Is a group of typer's commands that names the command which the user meant, or all of them, where there is
    none of the given name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Returns the command that the first word names; see `TyperGroup`."""
        word = args[0] if args else "-"
        if not word.startswith("-") and self.get_command(ctx, word) is None:
            known = [name for name, command in self.commands.items() if not command.hidden]
            ctx.fail(f"there is no command {ascii(word[:80])[1:-1]}: {instead(word, known, '--help')}")
        return super().resolve_command(ctx, args)


def _write_records(formatter: Any, records: list[tuple[str, str]]) -> None:
    """Writes names and what they mean in two columns. A long name has a line of its own, and no name is broken."""
    column = min(max(len(name) for name, _ in records), _MOST_OF_A_NAME) + 2
    indent = " " * formatter.current_indent
    for name, meaning in records:
        lines = textwrap.wrap(
            meaning, max(formatter.width - formatter.current_indent - column, _LEAST_OF_A_MEANING),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        first = lines.pop(0) if lines and len(name) + 2 <= column else ""
        formatter.write(f"{indent}{name:<{column}}{first}".rstrip() + "\n")
        for line in lines:
            formatter.write(f"{indent}{'':<{column}}{line}\n")


def finite(value: float | None) -> float | None:
    """Returns the value of an option that is a number; refuses NaN, which passes every bound, and infinity. It is the
    callback of such options."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("expected a finite number")
    return value


def show_version(wanted: bool) -> None:
    """Prints the version of Veilbase and ends the command, if `wanted`. It is the callback of the option --version."""
    if wanted:
        typer.echo(f"veilbase {installed_version()}")
        raise typer.Exit


@contextlib.contextmanager
def told_if_slow(
    what: str, say: Callable[[str], object] | None, after_s: float | None = None, again_s: float = TOLD_AGAIN_S
) -> Iterator[Callable[[], None]]:
    """Says what is under way, in one line, if the code in this context takes longer than `after_s`; and again from time
    to time, with the seconds that it has taken, until it ends.

    Args:
        what: what is done, such as "loading torch".
        say: called with the line, in a thread of its own; None says nothing.
        after_s: the seconds before anything is said; None for `TOLD_AFTER_S`.
        again_s: the seconds between two lines after that.

    Yields:
        A function that ends this early, when something else shows that work goes on.
    """
    if say is None:
        yield lambda: None
        return
    ended, began_s = threading.Event(), time.monotonic()

    def tell() -> None:
        if ended.wait(TOLD_AFTER_S if after_s is None else after_s):
            return
        say(f"{what} ...")
        while not ended.wait(again_s):
            say(f"{what} ... {time.monotonic() - began_s:.0f} s so far")

    threading.Thread(target=tell, name="told if slow", daemon=True).start()
    try:
        yield ended.set
    finally:
        ended.set()


def to_stderr(line: str) -> None:
    """Prints a line on stderr."""
    print(line, file=sys.stderr, flush=True)


def aligned(columns: Sequence[tuple[str, Sequence[str]]], num_names: int) -> str:
    """Returns a table as lines.

    Args:
        columns: of each column its title and its cells.
        num_names: the number of columns, from the left, that begin at one place; the others, with numbers, end at one.
    """
    cells = [[title, *rest] for title, rest in columns]
    widths = [max(map(len, column)) for column in cells]
    lines = (
        "  ".join(
            cell.ljust(width) if index < num_names else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in zip(*cells, strict=True)
    )
    return "".join(f"{line}\n" for line in lines)


def installed_version() -> str:
    """Returns the version of the installed package, or `unknown` if the code runs without having been installed."""
    try:
        return version("veilbase")
    except PackageNotFoundError:
        return "unknown"
