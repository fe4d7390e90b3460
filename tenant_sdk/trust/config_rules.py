"""This module reduces an unverified provider's config.json to the keys that the config class of its architecture
declares, and checks their values.

Guarantees: the model is built only from keys that transformers' config class for the named architecture declares or has
by default. Every number is within a range that its key can have, and finite except for two keys of Mamba. Keys that
change how often or how a model is called keep transformers' defaults. Not guaranteed: that the config describes the
model that the provider names. If the experts of a mixture are layers at the provider, row counts may depend on routing
(`check_rows_are_padded`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from wire.errors import ConfigurationError, MalformedFrame

_LEFT_AT_DEFAULT = frozenset(
    {
        *("output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward", "problem_type"),
        *("id2label", "label2id", "is_encoder_decoder", "pruned_heads", "name_or_path", "_name_or_path"),
        *("transformers_version", "architectures"),
    }
)
"""The keys, common to all config classes, for which transformers' defaults are used. Some of them change how a model is
called or what it returns; none changes a linear layer."""
_ROWS_BY_CONTENT = ("blt",)
"""The architectures in which results of the provider's layers decide how many rows later layers get. A provider that
forges these results would choose what the row counts reveal. BLT cuts its input into patches by the entropy that a
smaller model, whose layers the provider serves, computes."""
_MAX_WHOLE = 1 << 31
_MAX_LIST = 1 << 16
_MAX_DEPTH = 6
_WORD = re.compile(r"[A-Za-z0-9_.:-]{0,64}", re.ASCII)
_KEY = re.compile(r"[A-Za-z0-9_]{1,64}", re.ASCII)
_PROBABILITY = re.compile(r"dropout|pdrop|drop_rate|_drop$|jitter")
_ACTIVATION = re.compile(r"(^|_)(hidden_act|activation_function|hidden_activation|ffn_act_fn)$")
_MAY_BE_INFINITE = ("time_step_limit", "time_step_max")
"""The keys whose value may be infinite: Mamba's published configs have an infinite upper limit."""


def read_config(folder: Path) -> Any:
    """Returns transformers' config for the bundle's config.json, which was not verified.

    Args:
        folder: the bundle's folder.

    Raises:
        ConfigurationError: the installed transformers does not know the architecture, or its row counts depend on
            the input's contents.
        MalformedFrame: a value is outside the range that its key can have.
    """
    content, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)  # `get_config_dict` accepts infinities
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        shown = re.sub(r"[^A-Za-z0-9_.-]", "?", str(kind)[:64])
        raise ConfigurationError(f"this transformers cannot build the provider's {shown} model (unknown type)")
    if kind in _ROWS_BY_CONTENT:
        raise ConfigurationError(
            f"a {kind} model sends as many rows as its input's contents say: it needs a checkpoint that you trust "
            "(verify=)"
        )
    config_class = CONFIG_MAPPING[kind]
    return config_class.from_dict(allowed(content, config_class))


def check_rows_are_padded(layer_names: Iterable[str], kind: object) -> None:
    """Refuses `pad_rows` for a model whose row counts depend on the text in spite of padding.

    Args:
        layer_names: the names of the manifest's layers.
        kind: the config's model type.

    Raises:
        ConfigurationError: a layer belongs to an expert, whose rows a router chooses, or the architecture is one of
            `_ROWS_BY_CONTENT`.
    """
    if kind in _ROWS_BY_CONTENT:
        raise ConfigurationError(f"pad_rows cannot hide how a {kind} model cuts its input, which depends on the text")
    if any("expert" in name.lower() for name in layer_names):
        raise ConfigurationError(
            "pad_rows cannot hide how a mixture's experts share the rows, which depends on the text: this provider "
            "serves experts one by one"
        )


def allowed(content: Mapping[str, Any], config_class: Any) -> dict[str, Any]:
    """Returns the entries of a config whose keys the class declares, except those of `_LEFT_AT_DEFAULT`, and drops all
    others.

    Raises:
        MalformedFrame: a value is outside the range that its key can have.
    """
    names = declared(config_class) - _LEFT_AT_DEFAULT
    inner = getattr(config_class, "sub_configs", None) or {}
    kept = {}
    for key, value in content.items():
        if key not in names:
            continue
        if key in inner and isinstance(value, dict):
            kept[key] = _inner(value, inner[key])
        else:
            _check(key, value, 0)
            kept[key] = value
    return kept


def _inner(content: Mapping[str, Any], config_class: Any) -> dict[str, Any]:
    """Returns the allowed entries of a config that is nested in another config. If `config_class` allows any class, the
    entry `model_type` names the class."""
    kind = content.get("model_type")
    if config_class is AutoConfig:
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            raise _outside("model_type", "a type that transformers knows")
        config_class = CONFIG_MAPPING[kind]
    return allowed(content, config_class) | ({"model_type": kind} if isinstance(kind, str) else {})


@functools.lru_cache(256)
def declared(config_class: Any) -> frozenset[str]:
    """Returns the keys that a config class declares: its fields, its default attributes and the aliases of both."""
    fields = dataclasses.fields(config_class) if dataclasses.is_dataclass(config_class) else ()
    names = {field.name for field in fields}
    names |= set(getattr(config_class, "attribute_map", None) or {})
    names |= {"rope_theta", "rope_scaling"} if "rope_parameters" in names else set()  # keys of older releases
    try:
        names |= set(config_class().to_dict())
    except Exception:  # noqa: BLE001 - a few classes have no default instance
        return frozenset(names)
    return frozenset(names)


def _check(key: str, value: Any, depth: int) -> None:
    """Raises MalformedFrame if a value is impossible for `key`, which is one of transformers' own names."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, dict | list):
        _check_inner(key, value, depth)
    elif isinstance(value, str):
        if _WORD.fullmatch(value) is None or (_ACTIVATION.search(key) and value not in ACT2FN):
            raise _outside(key, "a name that transformers knows")
    elif isinstance(value, int | float):
        _check_number(key, value)
    else:
        raise _outside(key, "a JSON value")


def _check_inner(key: str, value: dict[str, Any] | list[Any], depth: int) -> None:
    if depth >= _MAX_DEPTH or len(value) > _MAX_LIST:
        raise _outside(key, f"at most {_MAX_LIST} values, {_MAX_DEPTH} levels deep")
    if isinstance(value, list):
        for item in value:
            _check(key, item, depth + 1)
        return
    for name, item in value.items():
        if _KEY.fullmatch(name) is None:
            raise _outside(key, "plain names within it")
        _check(name if depth == 0 else key, item, depth + 1)


def _check_number(key: str, value: float) -> None:
    if not math.isfinite(value):
        if value == math.inf and key in _MAY_BE_INFINITE:
            return
        raise _outside(key, "a finite number")
    if abs(value) > (_MAX_WHOLE if isinstance(value, int) else 1e12):
        raise _outside(key, "a number of a possible size")
    if _PROBABILITY.search(key) and not 0 <= value < 1:
        raise _outside(key, "a probability below 1")


def _outside(key: str, expected: str) -> MalformedFrame:
    shown = key if _KEY.fullmatch(key) else "a key"
    return MalformedFrame(f"the provider's config was expected to have {expected} as {shown}")
