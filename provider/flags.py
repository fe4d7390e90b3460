"""Makes a command's flags from the command's settings, so that a setting is described only in provider/config.py.

Every setting that has a description becomes a flag, and the description becomes the flag's help. A flag checks only the
type of its value on the command line. Ranges and patterns are checked in the settings, so that the same checks apply to
flags, environment variables and the YAML file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

SHOWN = "shown"
"""The key in a field's json_schema_extra of the text that the help shows instead of the field's default."""
_TYPES_OF_WORDS = (bool, int, float, Path)
_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[Path | None, typer.Option(help="YAML file with any of these settings.")],
)
_BEFORE_CONFIG = "threads"
"""The name of the setting before which the help lists --config. The settings before --config choose what is served; the
settings after it choose how."""


def takes_settings(
    settings: type[BaseSettings],
    groups: Mapping[str, Collection[str]] = {},
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that turns a function into a typer command with --config and the flags of `settings`.

    Args:
        settings: the class whose described fields become flags.
        groups: the settings' names by the heading under which the help lists their flags; the others have none.

    Returns:
        A decorator for `run(flags, config)`. `flags` maps each setting's name to the flag's value, or to None if the
        flag was not given. `config` is the path given with --config, or None.
    """

    def decorate(run: Callable[[dict[str, Any], Path | None], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            config = given.pop(_CONFIG.name)
            run(given, config)

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = inspect.Signature(_parameters(settings, groups))  # type: ignore[attr-defined]
        return command

    return decorate


def _parameters(settings: type[BaseSettings], groups: Mapping[str, Collection[str]]) -> list[inspect.Parameter]:
    """Returns the command's parameters: one for each described setting, in their order, and --config."""
    parameters = []
    headings = {name: heading for heading, names in groups.items() for name in names}
    for name, field in settings.model_fields.items():
        if name == _BEFORE_CONFIG:
            parameters.append(_CONFIG)
        if field.description is not None:
            parameters.append(_flag(name, field, headings.get(name)))
    return parameters


def _flag(name: str, field: FieldInfo, heading: str | None) -> inspect.Parameter:
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        help=field.description,
        show_default=_shown_default(field) or True,
        rich_help_panel=heading,
    )
    annotation = Annotated[_type_of_word(field.annotation) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown_default(field: FieldInfo) -> str | None:
    """Returns the text that the help shows as a flag's default; None if the default is missing, off or empty."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    if SHOWN in extra:
        return str(extra[SHOWN])
    if field.is_required() or field.default is None or field.default is False or field.default == "":
        return None
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def _type_of_word(annotation: Any) -> Any:
    """Returns the type that typer checks for a flag's value; str if only the settings class can check the value."""
    options = [_bare(option) for option in get_args(annotation) if option is not NoneType]
    if NoneType in get_args(annotation) and len(options) == 1:
        annotation = options[0]
    return annotation if annotation in _TYPES_OF_WORDS or get_origin(annotation) is Literal else str


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
