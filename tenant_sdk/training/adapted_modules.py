"""This module tells which settings of an adapter name nothing in the provider's model, before anything is sent for it:
`target_modules` that no module is called, `layers_to_transform` beyond the last block, and `cache_frozen_prefix` with
an adapter on the lowest block.

What the names of the model's modules are is known from the manifest and from the header of the bundle's tensors
(`module_names`), so neither torch nor PEFT is needed, and a command knows it within a second where the bundle was
fetched before.

Guarantees: settings that PEFT can use are not refused. Where the names do not tell, such as settings of another form or
the default targets of a kind, nothing is said here, and PEFT decides when the adapter is made.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runtime.command_line import nearest
from wire.errors import ConfigurationError

if TYPE_CHECKING:
    from wire.manifest import Manifest

ALL_LINEAR = "all-linear"
TENSORS = "model.safetensors"
"""The file of a bundle that holds the model's tensors, except for the weights of the provider's layers."""
_HEADS = (
    "lm_head", "embed_out", "output_layer", "output_projection", "proj_out", "head", "score", "classifier",
    "cls.predictions.decoder", "lm_head.decoder", "pred_layer.proj", "codebooks_head",
)  # fmt: skip
"""Names of output heads in transformers' models. A head whose weight is that of the embedding has no tensor of its own,
and is in no header."""
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
_BLOCK = re.compile(r"(.*?\.[^.]*\.)(\d{1,9})\.")
"""Finds the number of a module's block as PEFT does (`peft.tuners.tuners_utils.check_target_module_exists`), and what
is before it."""
_OF_EXPERTS = re.compile(r"(^|\.)experts\.[^.\d]")
"""Finds parameters that hold the weights of all experts of a mixture, which PEFT also finds by the names that the
layers of single experts have in a checkpoint."""
_MOST_CHARACTERS = 60
NO_PREFIX = (
    "cache_frozen_prefix has no effect with an adapter on the lowest block, number 0: choose upper blocks with "
    "layers_to_transform, and target_modules as a list of names, in peft_config"
)
_SIZES = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Keys of configs that count blocks."""
NO_PROMPT_LEARNING = (
    "cache_frozen_prefix is not possible with prompt learning, whose vectors are trained below every block"
)


def module_names(manifest: Manifest, tensors: bytes) -> frozenset[str] | None:
    """Returns the names of all modules of a model that hold parameters, themselves or in modules inside them, and the
    names of these parameters; None if `tensors` does not hold them.

    Args:
        manifest: the provider's manifest.
        tensors: the beginning of the file `TENSORS` of its bundle, with the whole header.
    """
    try:
        own = json.loads(tensors[8 : 8 + int.from_bytes(tensors[:8], "little")])
    except (ValueError, RecursionError):
        own = None
    if not isinstance(own, dict):
        return None
    served = [layer.name for group in manifest.groups for layer in group.layers]
    names = [*(name for name in own if name != "__metadata__"), *served, *_HEADS]
    return frozenset(part for name in names for part in _with_parents(name))


def _with_parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def check_adapter(
    settings: Mapping[str, Any], caches_prefix: bool, manifest: Manifest, beginning: Callable[[str], bytes]
) -> None:
    """Refuses settings that name nothing in the provider's model, or that leave `cache_frozen_prefix` without effect.

    Args:
        settings: PEFT's settings by name, as in `peft_config` of a recipe.
        caches_prefix: whether the run has `cache_frozen_prefix`.
        manifest: the provider's manifest.
        beginning: returns the beginning of a file of the provider's bundle, or no bytes; then names of modules are not
            looked at.

    Raises:
        ConfigurationError: a setting names nothing, and the text names the nearest that there is; or the lowest block
            is adapted.
    """
    _check_blocks(settings, manifest)
    names_targets = str(settings.get("target_modules")).lower() not in (ALL_LINEAR, "none")
    if names_targets or settings.get("modules_to_save"):
        modules = module_names(manifest, beginning(TENSORS))
        if modules is not None:
            _check_saved(settings, modules)
            if names_targets:
                _check_targets(settings, modules)
    if caches_prefix and _adapts_lowest(settings, [layer.name for group in manifest.groups for layer in group.layers]):
        raise ConfigurationError(NO_PREFIX)


def check_prefix(settings: Mapping[str, Any]) -> None:
    """Refuses settings with which `cache_frozen_prefix` has no effect on any model: LoRA on all linear layers.

    Raises:
        ConfigurationError: they are such settings.
    """
    if str(settings.get("target_modules")).lower() == ALL_LINEAR and not settings.get("exclude_modules"):
        raise ConfigurationError(NO_PREFIX)


def _adapts_lowest(settings: Mapping[str, Any], served: Sequence[str]) -> bool:
    """Returns whether settings adapt a layer of block 0; False where that is not sure.

    Args:
        settings: PEFT's settings by name.
        served: the names of the provider's layers.
    """
    wanted, blocks = settings.get("target_modules"), settings.get("layers_to_transform")
    in_blocks = [match for name in served if (match := _BLOCK.match(name))]
    if settings.get("exclude_modules") or settings.get("layers_pattern") or len({each[1] for each in in_blocks}) != 1:
        return False
    lowest = [each.string for each in in_blocks if int(each[2]) == 0]
    if isinstance(wanted, str):
        return wanted.lower() == ALL_LINEAR or any(_pattern(wanted).fullmatch(name) for name in lowest)
    if not isinstance(wanted, list | tuple | set | frozenset):
        return False
    numbers = blocks if isinstance(blocks, list | tuple) else [blocks]
    has_lowest = blocks is None or not numbers or 0 in numbers
    return has_lowest and any(end in wanted for name in lowest for end in _ends(name))


def _check_blocks(settings: Mapping[str, Any], manifest: Manifest) -> None:
    """Refuses numbers of blocks in `layers_to_transform` that the provider's model does not have."""
    wanted = settings.get("layers_to_transform")
    numbers: Sequence[Any] = wanted if isinstance(wanted, list | tuple) else [wanted]
    if settings.get("layers_pattern") or not all(type(each) is int for each in numbers):
        return  # PEFT checks the form, and finds other blocks by the pattern
    served = [layer.name for group in manifest.groups for layer in group.layers]
    found = [int(match[2]) for name in served if (match := _BLOCK.match(name))]
    num_blocks = max([*(number + 1 for number in found), *_counts(manifest.config)], default=0)
    for number in numbers if num_blocks else ():
        if not 0 <= number < num_blocks:
            raise ConfigurationError(
                f"layers_to_transform of peft_config names block {number}, but the model has blocks 0 to "
                f"{num_blocks - 1}"
            )


def _counts(config: Mapping[str, Any], depth: int = 0) -> Iterator[int]:
    """Yields what a model's config and the configs in it say of numbers of blocks."""
    for key, value in config.items():
        if key in _SIZES and type(value) is int:
            yield value
        elif isinstance(value, Mapping) and depth < 4:
            yield from _counts(value, depth + 1)


def _check_targets(settings: Mapping[str, Any], modules: Collection[str]) -> None:
    """Refuses `target_modules` of which none names a module of the model, and warns of one that does not beside others
    that do."""
    wanted = settings.get("target_modules")
    if settings.get("target_parameters") or not wanted or any(map(_OF_EXPERTS.search, modules)):
        return
    if isinstance(wanted, str):
        _check_pattern(wanted, modules)
    elif isinstance(wanted, list | tuple | set | frozenset) and all(isinstance(each, str) for each in wanted):
        ends = {end for name in modules for end in _ends(name)}
        unknown = sorted(each for each in wanted if each not in ends)
        if len(unknown) == len(wanted):
            raise ConfigurationError(_no_module(unknown[0], modules))
        if unknown:
            warnings.warn(f"{_no_module(unknown[0], modules)}; the others are adapted", stacklevel=2)


def _check_saved(settings: Mapping[str, Any], modules: Collection[str]) -> None:
    """Refuses `modules_to_save` of which none names a module of the model, and warns of one that does not: PEFT passes
    over both."""
    wanted = settings.get("modules_to_save")
    if not isinstance(wanted, list | tuple | set | frozenset) or not all(isinstance(each, str) for each in wanted):
        return
    ends = {end for name in modules for end in _ends(name)}
    unknown = sorted(each for each in wanted if each not in ends)
    if unknown and len(unknown) == len(wanted):
        raise ConfigurationError(_no_module(unknown[0], modules, "modules_to_save"))
    if unknown:
        warnings.warn(f"{_no_module(unknown[0], modules, 'modules_to_save')}; it is not trained", stacklevel=2)


def _check_pattern(wanted: str, modules: Collection[str]) -> None:
    """Refuses a text, which PEFT takes for a pattern of whole names."""
    if wanted.lower() == ALL_LINEAR:
        return
    if any(_pattern(wanted).fullmatch(name) for name in modules):
        return
    if _PLAIN.fullmatch(wanted) and any(wanted in _ends(name) for name in modules):
        raise ConfigurationError(
            f"target_modules of peft_config is the text {_shown(wanted)}, a pattern for the whole name of a module, "
            f"which matches none: write a list, [{wanted[:_MOST_CHARACTERS]}]"
        )
    raise ConfigurationError(_no_module(wanted, modules))


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        raise ConfigurationError("target_modules of peft_config is a text that is no regular expression") from None


def _no_module(wanted: str, modules: Collection[str], setting: str = "target_modules") -> str:
    lasts = [*dict.fromkeys(name.rpartition(".")[2] for name in sorted(modules))]
    if setting == "target_modules":
        lasts.append(ALL_LINEAR)
    meant = nearest(wanted[:_MOST_CHARACTERS], [name for name in lasts if not name.isdecimal()])
    advice = "" if meant is None else f": the nearest is {meant}"
    return f"{setting} of peft_config names {_shown(wanted)}, but no module of the model is called so{advice}"


def _ends(name: str) -> Iterator[str]:
    """Yields a name and what follows each of its dots, as which a list of names matches it."""
    while name:
        yield name
        name = name.partition(".")[2]


def _shown(text: str) -> str:
    return ascii(text[:_MOST_CHARACTERS])
