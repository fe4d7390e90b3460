"""This module defines the training options of `tenant finetune`, which its flags and its recipes (YAML files) share.
tenant_sdk/training/command.py runs it.

Each option is described here once: `takes_recipe` makes flags from the fields, and `load_recipe` reads a file that has
the same names. A flag takes precedence over the file, and the file over the default. Names and meanings are those of
`TenantClient.finetune`, which has no `rank`; a field's default may differ where a command needs it, as for the output.
A recipe may also have the options of the connection, which are the command's.

Guarantees: an unknown key of a file is refused in one line that names the nearest option; no error about a file quotes
a value. Importing this module does not load torch.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from tenant_sdk.training.checkpoints import check_output, check_writable
from tenant_sdk.training.dataset import load_rows
from tenant_sdk.training.settings import FinetuneSettings
from wire.command_line import instead
from wire.errors import ConfigurationError

_FLAG, _SHOWN = "flag", "shown"
"""Keys in a field's json_schema_extra: the flag's name if it is not the option's, and the default that the help shows
if it is not the field's."""
_WORDS = (bool, int, float, Path)
"""The types that typer checks on the command line; it takes any other as text, which the recipe checks."""

_GROUPS = {
    "Data": ("eval_data", "max_length", "truncation", "seed"),
    "Training": (
        "rank", "max_steps", "num_epochs", "batch_size", "gradient_accumulation_steps", "learning_rate",
        "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "bf16",
    ),
    "Preferences (DPO)": ("dpo_beta", "dpo_loss", "dpo_precompute_reference"),
    "Evaluation and reports": (
        "eval_steps", "early_stopping_steps", "early_stopping_threshold", "keep_best", "report_to", "log_dir",
        "progress",
    ),
    "Checkpoints and waits": ("save_steps", "resume", "provider_wait_s"),
    "Memory": ("window_tokens", "checkpointing", "memory_budget_mb", "gradient_checkpointing"),
}  # fmt: skip
"""The options by the heading under which the help lists them; the others have none."""


_EITHER = ("max_steps", "num_epochs")
"""Two options that say the same, of which a flag takes the place of either in the file."""


def _part_or_path(value: Any) -> Any:
    """Returns a number for text that is one, since a flag's value is text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _several(value: Any) -> Any:
    """Returns a list for a single value, so that a recipe may name one provider without brackets."""
    return [value] if isinstance(value, str | Path) else value


def _in_home(path: Path) -> Path:
    """Returns a path with `~` replaced by the folder that it stands for."""
    try:
        return path.expanduser()
    except RuntimeError:  # pydantic shows the text of a ValueError only
        raise ValueError("~ must stand for the folder of a user of this machine") from None


_UserPath = Annotated[Path, AfterValidator(_in_home)]


class Recipe(BaseModel):
    """Holds the options of one fine-tuning run; a field with a description is a flag of `tenant finetune`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: _UserPath | None = None
    output_dir: _UserPath | None = Field(
        default=None, description="Folder for the adapter.", json_schema_extra={_FLAG: "--output"}
    )
    eval_data: Annotated[float | _UserPath | None, BeforeValidator(_part_or_path)] = Field(
        default=None, description="Rows to evaluate on: a data set, or a part of DATA, such as 0.1."
    )
    peft_config: dict[str, Any] | None = None
    rank: int | None = Field(
        default=None, description="LoRA rank; alpha is twice as much.", json_schema_extra={_SHOWN: "16"}
    )
    max_steps: int | None = Field(default=None, description="Optimizer steps, in place of --epochs.")
    num_epochs: float = Field(default=3.0, description="Passes over the data.", json_schema_extra={_FLAG: "--epochs"})
    batch_size: int = Field(default=8, description="Rows a step.")
    gradient_accumulation_steps: int = Field(default=1, description="Batches whose gradients make one step.")
    learning_rate: float = Field(default=1e-3, description="Peak learning rate.")
    lr_scheduler_type: str = Field(
        default="linear", description="linear, cosine, constant (no warm-up), constant_with_warmup, inverse_sqrt."
    )
    warmup_steps: int = Field(default=3, description="Steps in which the learning rate rises to its peak.")
    weight_decay: float = Field(default=0.0, description="AdamW's weight decay.")
    max_grad_norm: float = Field(default=1.0, description="Norm to which a longer gradient is scaled down.")
    max_length: int | None = Field(
        default=None, description="Most tokens of a row.", json_schema_extra={_SHOWN: "the model's context"}
    )
    truncation: Literal["refuse", "truncate", "drop"] = Field(
        default="refuse", description="What becomes of longer rows."
    )
    bf16: bool = Field(default=False, description="Compute in bfloat16 where that is usual (autocast).")
    seed: int = Field(
        default=0, description="Seed of adapter initialisation, data order and what --eval-data holds back."
    )
    save_steps: int = Field(default=10, description="Steps between checkpoints.")
    resume: bool | None = Field(default=None, description="Default: go on if the same run has a checkpoint.")
    overwrite: bool = Field(default=False, description="Replace an adapter that --output holds already.")
    eval_steps: int | None = Field(
        default=None, description="Steps between evaluations.", json_schema_extra={_SHOWN: "--save-steps"}
    )
    early_stopping_steps: int | None = Field(
        default=None, description="End if the evaluation's loss has not fallen for so many steps; needs --verify."
    )
    early_stopping_threshold: float = Field(default=0.0, description="The least by which that loss must fall.")
    keep_best: bool = Field(default=False, description="Write the adapter of the best evaluation; needs --verify.")
    dpo_beta: float = Field(default=0.1, description="For preferences: DPO's beta.")
    dpo_loss: str = Field(default="sigmoid", description="sigmoid, hinge, ipo, apo_zero, apo_down or sigmoid_norm.")
    dpo_precompute_reference: bool = Field(
        default=False, description="Ask for the reference once, before the training."
    )
    window_tokens: int | None = Field(
        default=None,
        description="Train in windows of so many tokens: less memory.",
        json_schema_extra={"unit": "TOKENS"},
    )
    checkpointing: Literal["auto", "none", "replies", "recompute"] = Field(
        default="auto", description="auto, none, replies (kept; recompute the rest) or recompute (more calls)."
    )
    memory_budget_mb: float | None = Field(
        default=None, description="Memory for activations, in MB.", json_schema_extra={_SHOWN: "see memory.md"}
    )
    gradient_checkpointing: bool = Field(default=False, description="The same as --checkpointing recompute.")
    report_to: str | None = Field(default=None, description="tensorboard: write losses and metrics to its files.")
    log_dir: _UserPath | None = Field(
        default=None, description="Folder of these files.", json_schema_extra={_SHOWN: "beside OUTPUT, hidden"}
    )
    provider_wait_s: float = Field(
        default=600.0,
        description="Seconds for which a run waits for a provider that went away.",
        json_schema_extra={_FLAG: "--provider-wait"},
    )
    progress: bool = Field(default=True, description="Show a progress bar.")

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of `TenantClient.finetune` after its output folder."""
        apart = ("data", "output_dir", "peft_config", "rank")
        found = {name: getattr(self, name) for name in Recipe.model_fields if name not in apart}
        return {**found, "checkpointing": None if self.checkpointing == "none" else self.checkpointing}


def with_connection(connection: Mapping[str, Any]) -> Any:
    """Returns a class of recipes that also has the options of the connection.

    Args:
        connection: types of these options by name, annotated with typer's options.
    """
    fields: dict[str, Any] = {
        name: (Annotated[kind | None, BeforeValidator(_several)] if list in _kinds(kind) else kind | None, None)
        for name, kind in connection.items()
    }
    return create_model("Recipe", __base__=Recipe, **fields)


def _kinds(annotation: Any) -> list[Any]:
    """Returns the types that an annotation allows, such as [list, NoneType]."""
    bare = _plain(annotation)
    return [get_origin(_plain(kind)) or _plain(kind) for kind in get_args(bare) or [bare]]


def _plain(annotation: Any) -> Any:
    """Returns a type without what annotates it."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def load_recipe(kind: Any, flags: Mapping[str, Any], config: Path | None) -> Any:
    """Returns the recipe of a run.

    Args:
        kind: the class that `with_connection` returned.
        flags: the values from the command line by the option's name; None where a flag was not given.
        config: the recipe's file, or None.

    Raises:
        ConfigurationError: the file cannot be read, a key is no option, a value is not possible, or there is no data
            set or output folder.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    values = {} if config is None else _read(config)
    where = "" if config is None else f"{config}: "
    check_keys(where, values, list(kind.model_fields), "docs/finetune.md (All options)")
    for name, value in values.items():
        if isinstance(value, bool) and bool not in _kinds(kind.model_fields[name].annotation):
            raise ConfigurationError(f"{where}{name}: expected a value other than true and false")
    for name, other in zip(_EITHER, reversed(_EITHER), strict=True):
        if name in given and other not in given:
            values.pop(other, None)
    try:
        recipe = kind.model_validate({**values, **given})
    except ValidationError as exc:  # `from None`: the exception's text quotes the value
        first = exc.errors(include_url=False, include_input=False)[0]
        raise ConfigurationError(f"{where}{first['loc'][0]}: {first['msg'].lower()}") from None
    if recipe.data is None:
        raise ConfigurationError("name a data set: tenant finetune DATA, or data: in the recipe of --config")
    if recipe.output_dir is None:
        raise ConfigurationError("name a folder for the adapter: --output, or output_dir: in the recipe of --config")
    return recipe


class _Twice(yaml.YAMLError):
    """Says that a mapping has a key, which is the text of this error, twice."""


class _Loader(yaml.SafeLoader):
    """Reads YAML of plain values, and refuses a key that comes twice, of which YAML would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Returns the mapping of a node."""
        pairs = node.value if isinstance(node, yaml.MappingNode) else []  # others are refused below
        names = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise _Twice(ascii(name)[:60])
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a subclass of the safe one
    except OSError as exc:
        raise ConfigurationError(f"{path}: expected a readable recipe: {exc.strerror}") from exc
    except _Twice as exc:
        raise ConfigurationError(f"{path}: {exc} comes twice") from None
    except (yaml.YAMLError, ValueError, RecursionError) as exc:  # `from None`: the exception's text quotes the file
        mark = getattr(exc, "problem_mark", None)
        line = "" if mark is None else f", see line {mark.line + 1}"
        raise ConfigurationError(f"{path} is no YAML file{line}") from None
    if not isinstance(found, dict | NoneType):
        raise ConfigurationError(f"{path}: expected options with values (name: value), one a line")
    return {name: value for name, value in (found or {}).items() if value is not None}


def check_keys(where: str, values: Mapping[Any, Any], known: list[str], listed_by: str) -> None:
    """Refuses a key that is not known.

    Args:
        where: the beginning of the error's text.
        values: a mapping of a recipe.
        known: the keys that it may have.
        listed_by: a command or a page that lists them.

    Raises:
        ConfigurationError: a key is not known; the text ends as `wire.command_line.instead` says.
    """
    for key in values:
        if key not in known:
            advice = instead(str(key), known, listed_by)
            raise ConfigurationError(f"{where}{ascii(key)[:60]} is no option: {advice}")


def check_recipe_early(recipe: Recipe) -> None:
    """Checks settings, output folder and data sets of a recipe without torch, so that a mistake in them is told at
    once. Does not read data from a pipe, which can be read only once.

    Raises:
        DatasetError, ConfigurationError: see `TenantClient.finetune`.
    """
    options = recipe.options()
    FinetuneSettings(**{field.name: options[field.name] for field in dataclasses.fields(FinetuneSettings)}).check()
    if recipe.output_dir is not None:
        check_output(recipe.output_dir, recipe.overwrite)
    if recipe.log_dir is not None:
        check_writable(recipe.log_dir)
    for data in (recipe.data, recipe.eval_data):
        if isinstance(data, Path) and not is_pipe(data):
            load_rows(data)


def is_pipe(data: Path) -> bool:
    """Returns whether a path is that of a pipe or a terminal, which can be read only once."""
    return data.is_fifo() or data.is_char_device()


def takes_recipe(connection: Mapping[str, Any]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Returns a decorator that turns a function into the typer command `finetune`.

    Args:
        connection: types of the connection's options by name, annotated with typer's options.

    Returns:
        A decorator for a function that takes the recipe.
    """
    kind = with_connection(connection)

    def decorate(run: Callable[[Any], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            config = given.pop("config")
            run(load_recipe(kind, given, config))

        data = typer.Argument(help="JSONL, parquet, or a folder of datasets' save_to_disk (docs/finetune.md).")
        config = typer.Option(help="YAML file with any of these options; flags given beside it win.")
        parameters = [_parameter("data", Path, data), _parameter("config", Path, config)]
        parameters += [_flag(name, field) for name, field in Recipe.model_fields.items() if field.description]
        parameters[3:3] = [_parameter(name, *get_args(kind)) for name, kind in connection.items()]
        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    extra: dict[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    flag = extra.get(_FLAG, f"--{name.replace('_', '-')}")
    kinds = [kind for kind in _kinds(field.annotation) if kind is not NoneType]
    word: Any = next((kind for kind in _WORDS if kinds == [kind]), None)
    if get_origin(field.annotation) is Literal:
        word = field.annotation
    if word is bool:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    shown = extra.get(_SHOWN, field.default)
    text = f"{shown:g}" if isinstance(shown, float) else str(shown)
    option = typer.Option(
        flag,
        help=field.description,
        metavar=extra.get("unit"),
        rich_help_panel=next((heading for heading, names in _GROUPS.items() if name in names), None),
        show_default=text if shown not in (None, False) else False,
    )
    return _parameter(name, word or str, option)
