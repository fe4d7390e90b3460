"""This module holds what the commands `tenant` and `provider` have in common: how they name the option that a user
meant, and which version they are.

Importing this module does not load torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer
from typer.core import TyperCommand

_OTHER_WORDS = {
    "rank": "r", "r": "rank", "lora_r": "r", "lora_rank": "rank", "epochs": "num_epochs",
    "num_train_epochs": "num_epochs", "out": "output", "model_name_or_path": "model",
    "per_device_train_batch_size": "batch_size", "checkpoint": "verify", "cert": "identity", "endpoint": "url",
    "address": "host", "listen": "host", "grad_accum": "gradient_accumulation_steps",
}  # fmt: skip
"""Words that other programs have for an option, with the word of this one."""
_MOST_LISTED = 12
"""The most names that an error lists: more would bury what it says."""


def nearest(word: str, known: Collection[str]) -> str | None:
    """Returns the name that a user most likely meant, or None if none is near.

    Args:
        word: what was given: a misspelt or shortened name, or one of another program, such as `modle`, `lr`, `alpha` or
            `rank`.
        known: the names that there are, with `--` and `-` or with `_`.
    """
    plain = {_plain(name): name for name in known}
    given = _plain(word)
    if given in plain:
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


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


class Command(TyperCommand):
    """Is a command of typer that names the option which the user meant, where there is none of the given name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the words of the command line; see `TyperCommand`."""
        try:
            return super().parse_args(ctx, args)
        except Exception as exc:
            # typer brings its own copy of click, whose place differs between versions: so the error is told by what it
            # has, and not by its class
            failure: Any = exc
            if hasattr(failure, "option_name") and hasattr(failure, "possibilities"):
                flags = [flag for option in self.params if not getattr(option, "hidden", False) for flag in option.opts]
                meant = nearest(failure.option_name, [flag for flag in flags if flag.startswith("--")])
                failure.possibilities = [] if meant is None else [meant]
            raise


def show_version(wanted: bool) -> None:
    """Prints the version of Veilbase and ends the command, if `wanted`. It is the callback of the option --version."""
    if wanted:
        typer.echo(f"veilbase {installed_version()}")
        raise typer.Exit


def installed_version() -> str:
    """Returns the version of the installed package, or `unknown` if the code runs without having been installed."""
    try:
        return version("veilbase")
    except PackageNotFoundError:
        return "unknown"
