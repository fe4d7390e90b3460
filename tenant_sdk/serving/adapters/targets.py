"""This module finds the layers of a model that adapters may change, the shapes of these layers, and the layers that an
adapter's settings name.

Settings may name layers by patterns. A pattern in the tables of ranks and alphas is refused if matching it could take
long. The patterns that choose layers may be of any form, as PEFT's users write them; such a pattern is matched in a
process of its own, which is ended when it takes too much time or memory.

Guarantees: an adapter's settings name the same layers here as in PEFT (`peft.tuners.tuners_utils`). No pattern of a
file is matched in this process unless the time that it takes is bounded, and no pattern can take long.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from peft import PEFT_TYPE_TO_TUNER_MAPPING
from torch import nn
from transformers.pytorch_utils import Conv1D

from wire.errors import ConfigurationError

MAX_PATTERNS = 4096
"""The most rank or alpha patterns of one adapter: EVA writes one for each linear layer."""
MAX_INTRICATE = 16
"""The most rank or alpha patterns of one adapter that have a quantifier or an alternative. One takes up to 0.4 ms to
match a layer's name of 60 characters; a pattern without them takes microseconds."""
MAX_ALTERNATIVES = 32
"""The most `|` in one pattern."""
MATCHING_S = 2
"""The seconds of processor time that one pattern may take for all names of a model. The longest pattern that is known
to be in use, for 2,000 names, takes 0.1 s."""
WAIT_S = 20
"""The seconds after which the process that matches a pattern is ended, however busy the machine is."""
_MATCHING_BYTES = 512 << 20
_PLAIN = re.compile(r"(?:[A-Za-z0-9_-]|\\?\.)*")
"""Finds patterns without repetitions and alternatives, which take microseconds."""
_MATCHER = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1]) + 1))
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
pattern, texts = json.load(sys.stdin)
compiled = re.compile(pattern)
json.dump([at for at, text in enumerate(texts) if compiled.fullmatch(text)], sys.stdout)
"""
_QUANTIFIERS = re.compile(r"[*+?{]")
_UNBOUNDED = re.compile(r"\)[*+{]|\(\?(?!:)|\\[NUux]|[^ -~]")
"""Finds parts of a pattern that are refused: a repeated group, which may take exponential time; a flag or a look-ahead;
a character beyond printable ASCII, also as an escape (`\\N`, `\\U`, `\\u`, `\\x`), since ranges of such characters take
long to compile."""


def bounded_patterns(
    name: str, config: Mapping[str, Any], setting: str
) -> list[tuple[str, re.Pattern[str], Any]]:  # fmt: skip
    """Returns the entries of a setting that is a table of patterns.

    Args:
        name: the adapter's name, for error messages.
        config: all settings of the adapter.
        setting: the table's name, such as rank_pattern.

    Returns:
        Each pattern as it is written and compiled, and its value, which is not checked.

    Raises:
        ConfigurationError: the setting is no table, the table is too large, or one of its patterns is invalid or could
            take long to match.
    """
    patterns = config.get(setting) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise ConfigurationError(f"the adapter {name} has a {setting} that is no table of up to {MAX_PATTERNS} entries")
    if sum("|" in pattern or _QUANTIFIERS.search(pattern) is not None for pattern in patterns) > MAX_INTRICATE:
        raise ConfigurationError(
            f"the adapter {name} has a {setting} with more than {MAX_INTRICATE} intricate patterns"
        )
    compiled = [(text, bounded_pattern(text), value) for text, value in patterns.items()]
    if any(pattern is None for _, pattern, _ in compiled):
        raise ConfigurationError(f"the adapter {name} has a {setting} with a pattern that is too intricate")
    return [(text, pattern, value) for text, pattern, value in compiled if pattern is not None]


def bounded_pattern(pattern: str) -> re.Pattern[str] | None:
    """Compiles a pattern that matches as in PEFT (`peft.utils.other.get_pattern_key`); returns None if the pattern is
    invalid, or matching could take long."""
    # In one group that is not repeated, alternatives add to the ways to match and do not multiply them. So matching
    # takes at most the cube of a module name's length, or its square for each alternative.
    num_alternatives = pattern.count("|")
    num_loops = len(_QUANTIFIERS.findall(pattern.replace("(?:", "("))) + (num_alternatives > 0)
    if len(pattern) > 256 or num_loops > 2 or num_alternatives > MAX_ALTERNATIVES:
        return None
    if pattern.count("(") > 1 or _UNBOUNDED.search(pattern) is not None:
        return None
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError):
        return None


def is_plain(pattern: str) -> bool:
    """Returns whether a pattern has neither repetitions nor alternatives, so that it takes microseconds to match."""
    return _PLAIN.fullmatch(pattern) is not None


def fully_matched(name: str, setting: str, pattern: str, texts: Collection[str]) -> frozenset[str]:
    """Returns the texts that a pattern of any form matches from beginning to end, as `re.fullmatch` does.

    Args:
        name: the adapter's name, for error messages.
        setting: the setting that holds the pattern, for error messages.
        pattern: the pattern.
        texts: the names of modules.

    Raises:
        ConfigurationError: the pattern is invalid, or matching takes more than `MATCHING_S` seconds or 512 MiB.
    """
    if is_plain(pattern):
        compiled = re.compile(pattern)
        return frozenset(text for text in texts if compiled.fullmatch(text))
    found = _matched_elsewhere(pattern, tuple(texts))
    if found is None:
        raise ConfigurationError(
            f"the adapter {name} has a pattern in {setting} that is invalid or takes more than {MATCHING_S} s to "
            "match: list the names of the layers in its place"
        )
    return found


@functools.lru_cache(maxsize=256)  # adapters of one origin share their patterns; a failure is remembered as well
def _matched_elsewhere(pattern: str, texts: tuple[str, ...]) -> frozenset[str] | None:
    """Returns what `fully_matched` returns, or None if it would raise. A process of its own matches the pattern."""
    command = [sys.executable, "-I", "-S", "-c", _MATCHER, str(MATCHING_S), str(_MATCHING_BYTES)]
    try:
        done = subprocess.run(
            command, input=json.dumps([pattern, texts]).encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=WAIT_S, env={}, check=True,
        )  # fmt: skip
        return frozenset(texts[at] for at in json.loads(done.stdout))
    except (subprocess.SubprocessError, OSError, ValueError):
        return None


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
