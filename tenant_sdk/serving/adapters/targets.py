"""This module finds the layers of a model that adapters may change, the shapes of these layers, and the layers that an
adapter's settings name.

Guarantees: an adapter's settings name the same layers here as in PEFT (`peft.tuners.tuners_utils`), and no pattern of
theirs can take long.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from peft import PEFT_TYPE_TO_TUNER_MAPPING
from torch import nn
from transformers.pytorch_utils import Conv1D

from tenant_sdk.serving.adapters.patterns import fully_matched
from wire.errors import ConfigurationError

MAX_NAMES = 1 << 16
"""The most names in one list of an adapter's settings."""
MAX_LAYERS_PATTERNS = 16
"""The most names of `layers_pattern`. A model has one or a few, and PEFT compiles each of them for every layer."""
ALL_LINEAR = "all-linear"
"""The value of `target_modules` that stands for all linear layers but the output head, in small or capital letters."""
_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_INDEX = re.compile(r".*?\.[^.]*\.(\d+)\.")


@dataclass(frozen=True)
class Base:
    """Describes the model that an adapter must fit.

    Attributes:
        names: the names by which adapters may refer to the model; the first is the model's own name.
        shapes: (inputs, outputs) of each linear layer, by module name; adapters may change these layers and no others.
        in_groups: the layers that share a call to the provider with other layers, such as q, k and v.
        modules: the names of all modules, linear layers or not; empty if only the linear layers are known.
        head: the name of the output head; None if the model has none.
        model_type: the model's type as transformers names it, from which PEFT takes its default targets.
        remedy: what the user does if an adapter names another model than this one and the weights are the same.
    """

    names: tuple[str, ...]
    shapes: Mapping[str, tuple[int, int]]
    in_groups: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()
    head: str | None = None
    model_type: str | None = None
    remedy: str = "name it in `bases`"


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns a model's linear layers (Linear and Conv1D, local or remote) by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def head_of(model: Any) -> str | None:
    """Returns the module name of the output head, the layer that computes logits; None if the model has none."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return next((name for name, module in model.named_modules() if module is head), None)


def shape_of(layer: Any) -> tuple[int, int]:
    """Returns (inputs, outputs) of a Linear or Conv1D without reading its weight."""
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)


def base_of(model: nn.Module, also: tuple[str, ...] = (), remedy: str = Base.remedy) -> Base:
    """Returns the description of a model that is needed to check whether adapters fit the model.

    Args:
        model: a transformers model.
        also: further names of the same weights, such as a hub id if the provider serves a local folder.
        remedy: what the user does if an adapter names another model and the weights are the same.
    """
    own, layers = str(getattr(model, "name_or_path", "") or ""), linear_layers(model)
    return Base(
        names=(own, *also),
        shapes={name: shape_of(layer) for name, layer in layers.items()},
        in_groups=frozenset(name for name, layer in layers.items() if getattr(layer, "shares_calls", False)),
        modules=tuple(name for name, _ in model.named_modules()),
        head=head_of(model),
        model_type=getattr(getattr(model, "config", None), "model_type", None),
        remedy=remedy,
    )


def targeted(name: str, config: Mapping[str, Any], base: Base) -> frozenset[str]:
    """Returns the names of the modules that an adapter's settings name, by PEFT's rule.

    Args:
        name: the adapter's name, for error messages.
        config: the contents of adapter_config.json.
        base: the model.

    Raises:
        ConfigurationError: a setting is no list of names and no pattern, or a pattern takes too long to match.
    """
    modules = base.modules or tuple(base.shapes)
    wanted = config.get("target_modules")
    if wanted is None:
        tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(config.get("peft_type"))
        wanted = getattr(tuner, "target_module_mapping", {}).get(base.model_type)
        wanted = list(wanted) if isinstance(wanted, Collection) and not isinstance(wanted, str) else wanted
    if isinstance(wanted, str) and wanted.lower() == ALL_LINEAR:
        found = frozenset(base.shapes) - {base.head}
    elif isinstance(wanted, str):
        found = fully_matched(name, "target_modules", wanted, modules)
    else:
        found = _ending_in(modules, names_of(name, "target_modules", wanted))
        found = _in_layers(name, config, found)
    return found - excluded(name, config, modules)


def excluded(name: str, config: Mapping[str, Any], modules: Collection[str]) -> frozenset[str]:
    """Returns the modules that the setting `exclude_modules` names; see `targeted`."""
    given = config.get("exclude_modules")
    if not given:
        return frozenset()
    if isinstance(given, str):
        return fully_matched(name, "exclude_modules", given, modules)
    return _ending_in(modules, names_of(name, "exclude_modules", given))


def names_of(name: str, setting: str, given: Any) -> list[str]:
    """Returns a setting that is a list of the names of modules, or of ends of such names.

    Raises:
        ConfigurationError: the setting is anything else.
    """
    if not isinstance(given, list) or len(given) > MAX_NAMES or not all(_is_name(each) for each in given):
        raise ConfigurationError(
            f"the adapter {name} has {ascii(given)[:60]} for {setting}: expected a list of the names of layers"
        )
    return given


def layers_patterns(name: str, given: Any) -> list[str]:
    """Returns the setting `layers_pattern` as a list of names.

    Raises:
        ConfigurationError: the setting is no name and no list of names, or has too many of them.
    """
    names = names_of(name, "layers_pattern", [given] if isinstance(given, str) and given else given or [])
    if len(names) > MAX_LAYERS_PATTERNS:
        raise ConfigurationError(
            f"the adapter {name} has {len(names)} names in layers_pattern: expected at most {MAX_LAYERS_PATTERNS}"
        )
    return names


def _is_name(given: Any) -> bool:
    return isinstance(given, str) and _NAME.fullmatch(given) is not None


def _ending_in(modules: Iterable[str], ends: Iterable[str]) -> frozenset[str]:
    """Returns the modules whose names are in `ends`, or end in a dot and one of these."""
    wanted = frozenset(ends)
    return frozenset(
        module for module in modules
        if any(module[at:] in wanted for at in (0, *(m.end() for m in re.finditer(r"\.", module))))
    )  # fmt: skip


def _in_layers(name: str, config: Mapping[str, Any], modules: frozenset[str]) -> frozenset[str]:
    """Returns the modules that are in the layers whose numbers `layers_to_transform` lists, if it lists any."""
    wanted, pattern = config.get("layers_to_transform"), config.get("layers_pattern")
    if wanted is None or wanted == []:
        return modules
    numbers = wanted if isinstance(wanted, list) else [wanted]
    patterns = layers_patterns(name, pattern)
    if len(numbers) > MAX_NAMES or not all(type(each) is int for each in numbers):
        raise ConfigurationError(
            f"the adapter {name} has {ascii(wanted)[:60]} for layers_to_transform: expected the numbers of layers"
        )
    held = [re.compile(rf"(?:^|.*?\.){each}\.(\d+)\.") for each in patterns]
    chosen = frozenset(numbers)

    def number_of(module: str) -> int | None:
        found = next((match for each in held or [_INDEX] if (match := each.match(module))), None)
        return None if found is None else int(found[1])

    return frozenset(module for module in modules if number_of(module) in chosen)
