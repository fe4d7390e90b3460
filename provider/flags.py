"""The flags of a command, made from its settings, so that each setting is described once: in provider/config.py.

Every setting that has a description is a flag, and the description is the flag's help. A flag checks no more than the
type that a shell's word must have; what a value may be is checked with the settings, wherever it comes from.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

SHOWN = "shown"
"""Key of a field's json_schema_extra: the default that the help shows, where that is not the setting's own."""
_TYPES_OF_WORDS = (bool, int, float, Path)
_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[Path | None, typer.Option(help="YAML file with any of these settings.")],
)
_BEFORE_CONFIG = "threads"
"""--config is listed after the settings that say what is served, and before this one, the first that says how."""


def takes_settings(settings: type[BaseSettings]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function of flags and config file a command that takes the flags of `settings`, and --config.

    Args:
        settings: the class whose described fields become flags.

    Returns:
        A decorator for `run(flags, config)`: flags by setting's name, None where not given; config a path or None.
    """

    def decorate(run: Callable[[dict[str, Any], Path | None], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            config = given.pop(_CONFIG.name)
            run(given, config)

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = inspect.Signature(_parameters(settings))  # type: ignore[attr-defined]
        return command

    return decorate


def _parameters(settings: type[BaseSettings]) -> list[inspect.Parameter]:
    """The command's parameters, in the order of the settings."""
    parameters = []
    for name, field in settings.model_fields.items():
        if name == _BEFORE_CONFIG:
            parameters.append(_CONFIG)
        if field.description is not None:
            parameters.append(_flag(name, field))
    return parameters


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    option = typer.Option(
        f"--{name.replace('_', '-')}", help=field.description, show_default=_shown_default(field) or True
    )
    annotation = Annotated[_type_of_word(field.annotation) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown_default(field: FieldInfo) -> str | None:
    """What the help says of the default; None where there is none, or none that says anything."""
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    if SHOWN in extra:
        return str(extra[SHOWN])
    if field.is_required() or field.default is None or field.default is False or field.default == "":
        return None
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def _type_of_word(annotation: Any) -> Any:
    """The type that the word after a flag must have; str where only the settings can tell."""
    options = [_bare(option) for option in get_args(annotation) if option is not NoneType]
    if NoneType in get_args(annotation) and len(options) == 1:
        annotation = options[0]
    return annotation if annotation in _TYPES_OF_WORDS or get_origin(annotation) is Literal else str


def _bare(annotation: Any) -> Any:
    """The type without what pydantic is told about it."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
