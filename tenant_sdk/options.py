"""This module makes keyword arguments, flags and a table in the docs from a dataclass, so that each option is written
once.

The dataclass is frozen, each of its fields has what `told` returns as its metadata, and the docstring describes each
field under "Attributes". A TypedDict of the same fields gives them to type checkers, as `**options: Unpack[Keywords]`.
Such dataclasses are `FinetuneOptions` (training/settings.py), `EngineOptions`, `RequestOptions` and `StoreOptions`
(serving/settings.py), and `EndpointOptions` (endpoint/settings.py).

Importing this module does not load torch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, TypeVar, cast

import typer

from runtime.command_line import nearest

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Options = TypeVar("_Options")


def told(
    meaning: str, group: str = "", *, flag: str = "", shown: str = "", unit: str = "", page: str = "", kind: Any = None,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns what is told about an option, as the metadata of its field.

    Args:
        meaning: a line on the option, for `--help` and the table in the docs.
        group: the heading under which `--help` lists the flag.
        flag: the flag, if it is not the option's name.
        shown: the default as it is shown, if that is not the value.
        unit: what the flag's value is called, if not by its type.
        page: the page of docs/ with more on it.
        kind: the type of the flag's value for typer, such as int or list[str]; None for an option without a flag, and
            for one whose flag is made elsewhere.
        more: what else the module of the dataclass tells about its options.
    """
    common = {"meaning": meaning, "group": group, "flag": flag, "shown": shown, "unit": unit, "page": page}
    return {**common, "kind": kind, **more}


def from_keywords(kind: type[_Options], given: Mapping[str, Any], method: str) -> _Options:
    """Returns the options that keyword arguments name, and defaults for the others.

    Args:
        kind: the dataclass.
        given: the keyword arguments.
        method: the name of the method that got them, for the error.

    Raises:
        TypeError: there is no such option; the text names the nearest one.
    """
    _check_keywords(given, option_names(kind), method)
    return kind(**given)


def split_keywords(given: Mapping[str, Any], *kinds: Any, method: str) -> list[dict[str, Any]]:
    """Returns, for each of some dataclasses, those of some keyword arguments that are its options.

    Args:
        given: the keyword arguments.
        kinds: the dataclasses, of which no two have an option of the same name.
        method: the name of the method that got them, for the error.

    Raises:
        TypeError: none of them has such an option; the text names the nearest one.
    """
    _check_keywords(given, [name for kind in kinds for name in option_names(kind)], method)
    return [{name: given[name] for name in option_names(kind) if name in given} for kind in kinds]


def _check_keywords(given: Collection[str], known: Collection[str], method: str) -> None:
    for name in given:
        if name not in known:
            meant = nearest(name, known)
            advice = "" if meant is None else f": did you mean {meant}?"
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{advice}")


def names_keywords(method: _Method) -> _Method:
    """Makes a method name the keyword argument that its caller meant, where there is none of the given name. The
    `TypeError` is then as that of `from_keywords`. A `stacklevel` in the method has to count one frame more.

    Raises:
        TypeError: the method takes keyword arguments of any name, so that there is none that it does not know.
    """
    parameters = inspect.signature(method).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        raise TypeError(f"{method.__qualname__} takes keyword arguments of any name")
    known = [name for name in parameters if name != "self"]
    called = method.__qualname__.removesuffix(".__init__")

    @functools.wraps(method)
    def checked(*args: Any, **given: Any) -> Any:
        _check_keywords(given, known, called)
        return method(*args, **given)

    return cast(_Method, checked)


def option_names(kind: Any) -> tuple[str, ...]:
    """Returns the names of a dataclass's options."""
    return tuple(each.name for each in dataclasses.fields(kind))


def takes_options(*kinds: Any, without: Collection[str] = ()) -> Callable[[_Method], _Method]:
    """Returns a decorator that gives a method whose keyword arguments are the options of one dataclass, or of several,
    their signature and their part of its docstring, so that `help` and `inspect` show what type checkers know.

    Args:
        kinds: the dataclasses.
        without: the options that the method does not take.
    """
    taken = [each for kind in kinds for each in dataclasses.fields(kind) if each.name not in without]

    def decorate(method: _Method) -> _Method:
        signature = inspect.signature(method)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in taken
        ]
        method.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        if method.__doc__ and all(kind.__doc__ for kind in kinds):  # neither is there with python -OO
            described = "\n".join(text for kind in kinds for text in _descriptions(kind, without))

            def indented(here: re.Match[str]) -> str:
                return "\n".join(here[1][4:] + line if line else line for line in described.split("\n"))

            *others, last = (f"`{kind.__name__}`" for kind in kinds)
            listed = f"{', '.join(others)} and {last}" if others else last
            # The line of a docstring whose place the options' descriptions take.
            line = rf"(?m)^( *)\*\*options: those of {listed}\.$"
            method.__doc__, num_found = re.subn(line, indented, method.__doc__)
            if num_found != 1:
                raise ValueError(f"expected a line **options in the docstring of {method.__qualname__}")
        return method

    return decorate


def _descriptions(kind: Any, without: Collection[str]) -> list[str]:
    """Returns the description of each option from a dataclass's docstring, of one line or more."""
    described = inspect.cleandoc(kind.__doc__).split("Attributes:\n")[1]
    texts = [text.rstrip("\n") for text in re.split(r"(?m)^(?=    \S)", described) if text]
    return [text for text in texts if text.split(":")[0].strip() not in without]


def takes_flags(*kinds: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that gives a typer command a flag for each option that tells its `kind`, of one dataclass or
    of several. The command gets those that are given, by their names, in a dictionary as its keyword argument
    `options`."""

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(run, eval_str=True)
        own = [each for each in signature.parameters.values() if each.name != "options"]
        made = [each for kind in kinds for each in dataclasses.fields(kind) if each.metadata["kind"] is not None]

        def command(**given: Any) -> None:
            values = {each.name: given.pop(each.name) for each in made}
            run(**given, options={name: value for name, value in values.items() if value not in (None, [])})

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *map(_flag, made))]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def flag_of(option: dataclasses.Field[Any]) -> str:
    """Returns the flag of an option."""
    return str(option.metadata["flag"]) or f"--{option.name.replace('_', '-')}"


def _flag(option: dataclasses.Field[Any]) -> inspect.Parameter:
    tells, shown = option.metadata, shown_default(option)
    flag, meaning = flag_of(option), str(tells["meaning"])
    made = typer.Option(
        f"{flag}/--no-{flag.removeprefix('--')}" if tells["kind"] is bool else flag,
        help=f"{meaning[0].upper()}{meaning[1:]}.",
        metavar=tells["unit"] or None,
        rich_help_panel=tells["group"] or None,
        show_default=False if shown in ("", "none", "off") else shown,
    )
    kind: Any = tells["kind"] | None
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, made]
    )


def shown_default(option: dataclasses.Field[Any]) -> str:
    """Returns an option's default as help and docs show it; an empty text if there is none."""
    if option.metadata["shown"]:
        return str(option.metadata["shown"])
    if option.default in (None, (), ""):
        return ""
    return {True: "on", False: "off"}[option.default] if isinstance(option.default, bool) else str(option.default)


def options_table(kind: Any, flags: bool = True) -> str:
    """Returns the table of a dataclass's options for the docs.

    Args:
        kind: the dataclass.
        flags: whether the table has a column of flags.
    """
    heads = ["option", *(["flag"] if flags else []), "default", "meaning"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for each in dataclasses.fields(kind):
        page = f" ([{each.metadata['page']}]({each.metadata['page']}))" if each.metadata["page"] else ""
        flag = f"`{flag_of(each)}`" if each.metadata["kind"] is not None else ""
        cells = [f"`{each.name}`", *([flag] if flags else []), shown_default(each), f"{each.metadata['meaning']}{page}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(re.sub(r" +", " ", line) for line in lines)
