"""This module makes the flags of `tenant finetune` and its recipes (YAML files) from `FinetuneOptions`.
tenant_sdk/training/command.py runs it.

A flag takes precedence over the file, and the file over the default. Names, meanings and defaults are those of
`TenantClient.finetune`, which has no `rank`. A recipe may also have the options of the connection, which are the
command's.

Guarantees: an unknown key of a file is refused in one line that names the nearest option; no error about a file quotes
a value. Importing this module does not load torch.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from noise.options import DEFAULT_MASK
from runtime.command_line import instead, no_path, plain_message
from tenant_sdk.keep import read_keep, spoken_keep
from tenant_sdk.kinds.refused import check_values
from tenant_sdk.plan_file import Bill
from tenant_sdk.text.rows import bucket_tokens
from tenant_sdk.training.adapted_modules import (
    ALL_LINEAR,
    NO_PROMPT_LEARNING,
    check_adapter,
    check_prefix,
)
from tenant_sdk.training.checkpoints import Checkpoints, check_output, check_writable, checkpoints_folder
from tenant_sdk.training.dataset import are_preferences, check_alike, load_rows, num_held_back, one_line, source_of
from tenant_sdk.training.run_identity import RunIdentity, data_part, texts
from tenant_sdk.training.settings import DROP, NO_TENSORBOARD, NO_TRL, FinetuneOptions
from wire.errors import ConfigurationError

if TYPE_CHECKING:
    from wire.manifest import Manifest

_WORDS = (bool, int, float, Path)
"""The types that typer checks on the command line; it takes any other as text, which the recipe checks."""


_EITHER = ("max_steps", "num_epochs")
"""Two options that say the same: a flag for one of them replaces the other in the file."""
_NO_FIELDS = ("object", "PushToHubMixin")
"""The classes under PEFT's settings that have no fields."""
_OF_A_RUN = ("plan", "output_dir", "overwrite", "resume", "report_to", "log_dir", "provider_wait_s")
"""The options that have no effect where a run is only planned. A recipe may name them all the same."""
DEFAULT_RANK = 16
"""The rank of an adapter for which the user chooses none; its alpha is twice as much."""
_OF_RANK = ("r", "lora_alpha")
"""The settings of LoRA that the flag --rank sets, in place of those of the file."""


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
    if reason := no_path(path):
        raise ValueError(reason)
    try:
        return path.expanduser()
    except RuntimeError:  # pydantic shows the text of a ValueError only
        raise ValueError("~ must stand for the folder of a user of this machine") from None


_UserPath = Annotated[Path, AfterValidator(_in_home)]


def _field(meaning: str, flag: str = "", group: str = "", shown: str = "") -> Any:
    return Field(default=None, json_schema_extra={"meaning": meaning, "flag": flag, "group": group, "shown": shown})


def _settings(value: Any) -> Any:
    """Returns the settings of an adapter, if they are names with values."""
    if value is None or (isinstance(value, Mapping) and all(isinstance(name, str) for name in value)):
        return value
    raise ValueError("write the adapter's settings, as in peft_config: {r: 8, lora_alpha: 16}")


_TYPES: dict[str, Any] = {
    "eval_data": Annotated[float | _UserPath | None, BeforeValidator(_part_or_path)],
    "checkpointing": Literal["auto", "none", "replies", "recompute"],
    "log_dir": _UserPath | None,
}
"""The types of options that a file or a flag gives in another form than Python does."""


class Recipe(BaseModel):
    """Holds what one fine-tuning run is about; `RunRecipe` adds the fields of `FinetuneOptions`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: _UserPath | None = None
    output_dir: _UserPath | None = _field("folder for the adapter", flag="--output")
    peft_config: Annotated[dict[str, Any] | None, BeforeValidator(_settings)] = None
    plan: _UserPath | None = _field("file of `tenant plan --out`; another run is refused", shown="none")
    rank: int | None = _field("LoRA's rank; alpha is twice as much", group="Training", shown="16")

    def options(self) -> FinetuneOptions:
        """Returns the options of the run."""
        return FinetuneOptions(**self.given())

    def given(self) -> dict[str, Any]:
        """Returns the options of the run that a file or a flag names, also those that have their default's value."""
        names = [each.name for each in dataclasses.fields(FinetuneOptions) if each.name in self.model_fields_set]
        return {name: _in_python(name, getattr(self, name)) for name in names}


def _in_python(name: str, value: Any) -> Any:
    """Returns an option's value as `TenantClient.finetune` takes it."""
    return None if name == "checkpointing" and value == "none" else value


def _fields() -> dict[str, Any]:
    """Returns pydantic's fields for the fields of `FinetuneOptions`."""
    kinds = get_type_hints(FinetuneOptions)
    return {
        each.name: (
            _TYPES.get(each.name, kinds[each.name]),
            Field(default=each.default, json_schema_extra=dict(each.metadata)),
        )
        for each in dataclasses.fields(FinetuneOptions)
    }


RunRecipe: Any = create_model("RunRecipe", __base__=Recipe, **_fields())
"""The class of recipes without the options of a connection; a field with a meaning is a flag of `tenant finetune`."""


def with_connection(connection: Mapping[str, Any]) -> Any:
    """Returns a class of recipes that also has the options of the connection.

    Args:
        connection: types of these options by name, annotated with typer's options.
    """
    fields: dict[str, Any] = {
        name: (Annotated[kind | None, BeforeValidator(_several)] if list in _kinds(kind) else kind | None, None)
        for name, kind in connection.items()
    }
    return create_model("Recipe", __base__=RunRecipe, **fields)


def _kinds(annotation: Any) -> list[Any]:
    """Returns the types that an annotation allows, such as [list, NoneType]."""
    bare = _plain(annotation)
    return [get_origin(_plain(kind)) or _plain(kind) for kind in get_args(bare) or [bare]]


def _plain(annotation: Any) -> Any:
    """Returns a type without what annotates it."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def load_recipe(kind: Any, flags: Mapping[str, Any], config: Path | None, writes: bool = True) -> Any:
    """Returns the recipe of a run.

    Args:
        kind: the class that `with_connection` returned.
        flags: the values from the command line by the option's name; None where a flag was not given.
        config: the recipe's file, or None.
        writes: whether there has to be an output folder.

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
    if "rank" in given and isinstance(settings := values.get("peft_config"), dict):
        values["peft_config"] = {name: value for name, value in settings.items() if name not in _OF_RANK}
    try:
        recipe = kind.model_validate({**values, **given})
    except ValidationError as exc:  # `from None`: the exception's text quotes the value
        first = exc.errors(include_url=False, include_input=False)[0]
        raise ConfigurationError(f"{where}{first['loc'][0]}: {plain_message(first['msg'])}") from None
    if recipe.data is None:
        command = "finetune" if writes else "plan"
        raise ConfigurationError(f"name a data set: tenant {command} DATA, or data: in the recipe of --config")
    if recipe.output_dir is None and writes:
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
        if isinstance(exc, FileNotFoundError):
            raise ConfigurationError(f"there is no file {one_line(str(path))} (--config)") from exc
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
        ConfigurationError: a key is not known; the text ends as `runtime.command_line.instead` says.
    """
    for key in values:
        if key not in known:
            advice = instead(str(key), known, listed_by)
            raise ConfigurationError(f"{where}{ascii(key)[:60]} is no option: {advice}")


def check_recipe_early(recipe: Any, is_run: bool = True) -> None:
    """Checks settings, names in `peft_config`, output folder, plan and data sets of a recipe without torch, so that a
    mistake in them is told at once. Does not read data from a pipe, which can be read only once.

    Args:
        recipe: a recipe with the options of the connection (`with_connection`).
        is_run: whether the recipe is to be run; if it is only planned, what the run writes is not looked at.

    Raises:
        DatasetError, ConfigurationError: see `TenantClient.finetune`.
    """
    options = recipe.options()
    options.check()
    options.check_effect(recipe.given())
    options.check_padding(recipe.pad_rows is not None)
    if recipe.rank is not None and recipe.rank < 1:
        raise ConfigurationError(f"rank must be positive, got {recipe.rank}")
    if recipe.peft_config is not None:
        _check_peft_keys(recipe.peft_config)
        check_values(recipe.peft_config)
    if options.cache_frozen_prefix:
        _check_prefix(recipe)
    if options.report_to is not None and importlib.util.find_spec("tensorboard") is None:
        raise ConfigurationError(NO_TENSORBOARD)
    if is_run:
        _check_written(recipe, options)
    found = _check_data(recipe.data, options)
    if is_run:
        named = RunIdentity.of_options(options, bucket_tokens(recipe.pad_rows or False))
        check_same_run(recipe, RunIdentity(found, named.options, texts(_sizes(recipe))))


def _sizes(recipe: Any) -> dict[str, Any]:
    """Returns the numbers among the settings of a recipe's adapter, which PEFT keeps as they are, and for LoRA those
    that the recipe leaves at their defaults."""
    settings = _adapter_settings(recipe)
    if "target_modules" in settings and settings.get("peft_type", "LORA") == "LORA":
        rank = {} if recipe.rank is None else {"r": recipe.rank, "lora_alpha": 2 * recipe.rank}
        settings = {"r": DEFAULT_RANK, "lora_alpha": 2 * DEFAULT_RANK, **rank, **settings}
    return {name: value for name, value in settings.items() if isinstance(value, int | float)}


def check_same_run(recipe: Any, identity: RunIdentity) -> None:
    """Checks that a recipe's run is the one of its plan, and of the checkpoints beside its output folder, as far as it
    is known what the run is.

    Raises:
        ConfigurationError: it is another; the text says in what.
    """
    if recipe.plan is not None:
        keep = getattr(recipe, "keep", None)
        Bill.load(recipe.plan).check_known(
            identity, mask=getattr(recipe, "mask", None) or DEFAULT_MASK, precision=getattr(recipe, "precision", None),
            keep=spoken_keep([] if keep is None else read_keep(keep, True)),
        )  # fmt: skip
    if recipe.output_dir is not None:
        Checkpoints(checkpoints_folder(recipe.output_dir)).check(recipe.options().resume, identity)


def _check_prefix(recipe: Any) -> None:
    """Refuses an adapter with which `cache_frozen_prefix` is not possible, or has no effect, on any model."""
    settings = _adapter_settings(recipe)
    if "num_virtual_tokens" in peft_fields(str(settings.get("peft_type", "LORA")))[1]:
        raise ConfigurationError(NO_PROMPT_LEARNING)
    check_prefix(settings)


def _adapter_settings(recipe: Any) -> dict[str, Any]:
    """Returns the settings of a recipe's adapter that are known without PEFT: its `peft_config`, and for LoRA the
    default of `target_modules`."""
    settings = dict(recipe.peft_config or {})
    return settings if settings.get("peft_type", "LORA") != "LORA" else {"target_modules": ALL_LINEAR} | settings


def check_offer(recipe: Any, manifest: Manifest, beginning: Callable[[str], bytes]) -> None:
    """Checks a recipe against what its provider offers, as far as that is possible without torch.

    Args:
        recipe: a recipe with the options of the connection (`with_connection`).
        manifest: the provider's manifest.
        beginning: asks the provider for the beginning of a file of its bundle; no bytes if it does not come soon.

    Raises:
        ConfigurationError: the adapter's settings name nothing in the provider's model, or the recipe has a plan of
            another provider.
    """
    is_alone = len(recipe.url or ()) < 2 and len(recipe.identity or ()) < 2  # two providers have one manifest
    if recipe.plan is not None and is_alone:
        Bill.load(recipe.plan).check_known(RunIdentity(), manifest=manifest.digest)
    with warnings.catch_warnings(action="ignore"):  # the run says it again
        check_adapter(_adapter_settings(recipe), bool(recipe.cache_frozen_prefix), manifest, beginning)


def _check_written(recipe: Any, options: FinetuneOptions) -> None:
    if recipe.output_dir is not None:
        check_output(recipe.output_dir, options.overwrite)
    if options.log_dir is not None:
        check_writable(Path(options.log_dir))
    if recipe.plan is not None:
        if not recipe.plan.exists():
            raise ConfigurationError(f"there is no plan {recipe.plan} (--plan): `tenant plan --out` writes one")
        Bill.load(recipe.plan)


def _check_data(data: Path, options: FinetuneOptions) -> dict[str, str]:
    """Checks both data sets, and the options that need them, as far as they are no pipes. Returns their part of the
    run's identity, if it is known: not which rows a part as `eval_data` holds back, which torch draws."""
    rows, part = None if is_pipe(data) else load_rows(data), options.eval_data
    eval_rows = load_rows(part) if isinstance(part, Path) and not is_pipe(part) else None
    if isinstance(part, float):
        num_held_back(part, sys.maxsize if rows is None else len(rows))
    if rows is None:
        return {}
    if eval_rows is not None:
        check_alike(rows, eval_rows)
    options.check_used(has_evaluation=part is not None, are_preferences=are_preferences(rows))
    if options.truncation != DROP:  # which leaves rows out
        options.check_repeats(len(rows), part is not None)
    if are_preferences(rows) and importlib.util.find_spec("trl") is None:
        raise ConfigurationError(NO_TRL)
    is_known = part is None or eval_rows is not None
    return data_part([*map(source_of, rows)], [*map(source_of, eval_rows or [])]) if is_known else {}


def _check_peft_keys(settings: Mapping[str, Any]) -> None:
    """Refuses a kind that PEFT does not have, and a key of `peft_config` that its settings of this kind do not have.
    PEFT is not imported, which takes seconds, but its source files are read; where they cannot be, or have another
    form, nothing is said.

    Raises:
        ConfigurationError: the kind or a key is not known.
    """
    name = str(settings.get("peft_type", "LORA"))
    check_peft_type(name, peft_types() or [name])
    kind, keys = peft_fields(name)
    if keys:
        own = {key: value for key, value in settings.items() if key != "peft_type"}
        check_keys("peft_config: ", own, keys, f"PEFT's documentation of {kind}")


def check_peft_type(name: str, known: Collection[str]) -> None:
    """Raises ConfigurationError if the name of a kind of adapter is none of those that are known."""
    if name not in known:
        advice = instead(name, known, "docs/peft.md")
        raise ConfigurationError(f"peft_config: {ascii(name)[:60]} is no peft_type: {advice}")


def peft_types() -> list[str]:
    """Returns the names of PEFT's kinds, such as LORA, as its source files register them; none if they cannot be
    read."""
    try:
        spec = importlib.util.find_spec("peft")
        tuners = Path(spec.origin).parent / "tuners" if spec is not None and spec.origin else Path()
        files = sorted(tuners.glob("*/__init__.py"))
        return [each.parent.name.upper() for each in files if "register_peft_method(" in each.read_text("utf-8")]
    except (OSError, ValueError):
        return []


def peft_fields(name: str) -> tuple[str, list[str]]:
    """Returns the name of the class that holds PEFT's settings of a kind, such as LORA, and the names of its fields, as
    they stand in PEFT's source files; an empty name and no fields if they do not stand there."""
    try:
        spec = importlib.util.find_spec("peft")
        root = Path(spec.origin).parent if spec is not None and spec.origin else Path()
        tuner = root / "tuners" / name.lower()
        made = ast.walk(ast.parse((tuner / "__init__.py").read_text(encoding="utf-8")))
        found = [
            word.value.id
            for call in made
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "register_peft_method"
            for word in call.keywords
            if word.arg == "config_cls" and isinstance(word.value, ast.Name)
        ]
        (kind,) = found
        shared = ("config.py", "tuners/lora/config.py", "tuners/lycoris_utils.py", "tuners/prompt_tuning/config.py")
        files = [*(root / each for each in shared), tuner / "config.py"]
        trees = [ast.parse(each.read_text(encoding="utf-8")) for each in files]
        return kind, _fields_of(kind, {each.name: each for tree in trees for each in _classes(tree)})
    except (OSError, ValueError, SyntaxError, KeyError):
        return "", []


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [each for each in tree.body if isinstance(each, ast.ClassDef)]


def _fields_of(kind: str, classes: Mapping[str, ast.ClassDef]) -> list[str]:
    """Returns the fields of a dataclass and of those that it extends; raises KeyError if one of them is not there."""
    bases = [each.id if isinstance(each, ast.Name) else "" for each in classes[kind].bases]
    inherited = [name for base in bases if base not in _NO_FIELDS for name in _fields_of(base, classes)]
    own = [
        each.target.id
        for each in classes[kind].body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and "ClassVar" not in ast.unparse(each.annotation)
    ]
    return list(dict.fromkeys([*inherited, *own]))


def is_pipe(data: Path) -> bool:
    """Returns whether a path is that of a pipe or a terminal, which can be read only once."""
    return data.is_fifo() or data.is_char_device()


def takes_recipe(
    connection: Mapping[str, Any], is_run: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that turns a function into a typer command with the options of a recipe, as `finetune` is.

    Args:
        connection: types of the connection's options by name, annotated with typer's options.
        is_run: whether the command trains, and so needs an output folder and may have a plan.

    Returns:
        A decorator for a function that takes the recipe, and, as keyword arguments, options of its own.
    """
    kind = with_connection(connection)

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(run, eval_str=True).parameters.values())[1:]

        def command(**given: Any) -> None:
            config, more = given.pop("config"), {each.name: given.pop(each.name) for each in own}
            run(load_recipe(kind, given, config, is_run), **more)

        data = typer.Argument(
            help="JSON, JSONL, CSV, TSV or parquet, or a folder of datasets' save_to_disk (docs/finetune.md)."
        )
        config = typer.Option(help="YAML file with any of these options; flags given beside it win.")
        parameters = [_parameter("data", Path, data), _parameter("config", Path, config)]
        left_out = () if is_run else _OF_A_RUN
        fields = {name: field for name, field in RunRecipe.model_fields.items() if name not in left_out}
        parameters += [_flag(name, field) for name, field in fields.items() if field.json_schema_extra]
        num_first = 2 + is_run
        parameters[num_first:num_first] = [_parameter(name, *get_args(kind)) for name, kind in connection.items()]
        parameters[2:2] = own
        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    told = _told(field)
    flag, group, unit = flag_of(name), told["group"], told.get("unit")
    kinds = [kind for kind in _kinds(field.annotation) if kind is not NoneType]
    word: Any = next((kind for kind in _WORDS if kinds == [kind]), None)
    if get_origin(field.annotation) is Literal:
        word = field.annotation
    if word is bool:
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    meaning, shown = _by_flags(told["meaning"]), shown_default(name)
    option = typer.Option(
        flag,
        help=f"{meaning[0].upper()}{meaning[1:]}.",
        metavar=unit or None,
        rich_help_panel=group or None,
        show_default=False if shown in ("", "none", "off") else _by_flags(shown),
    )
    return _parameter(name, word or str, option)


def _told(field: FieldInfo) -> dict[str, Any]:
    return field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}


def flag_of(name: str) -> str:
    """Returns the flag of an option."""
    return str(_told(RunRecipe.model_fields[name])["flag"]) or f"--{name.replace('_', '-')}"


def _by_flags(text: str) -> str:
    """Returns a text in which options have the names of their flags."""
    names = [name for name in RunRecipe.model_fields if "_" in name and _told(RunRecipe.model_fields[name])]
    for name in names:
        text = re.sub(rf"\b{name}\b", flag_of(name), text)
    return re.sub(r"\bneeds verify\b", "needs --verify", text)


def shown_default(name: str) -> str:
    """Returns an option's default as help and docs show it; an empty text if there is none."""
    field = RunRecipe.model_fields[name]
    if shown := _told(field)["shown"]:
        return str(shown)
    if field.default is None:
        return ""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def options_table() -> str:
    """Returns the table of options in docs/finetune.md."""
    lines = ["| option | flag | default | meaning |", "|---|---|---|---|", "| `data` | DATA | | rows to train on |"]
    for name, field in RunRecipe.model_fields.items():
        told = _told(field)
        if told:
            page = f" ([{told['page']}]({told['page']}))" if told.get("page") else ""
            lines.append(f"| `{name}` | `{flag_of(name)}` | {shown_default(name)} | {told['meaning']}{page} |")
    lines.append("| `peft_config` | | LoRA on all linear layers | PEFT's settings |")
    return "\n".join(re.sub(r" +", " ", line) for line in lines)
