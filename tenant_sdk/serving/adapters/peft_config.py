"""This module reads a PEFT adapter's settings, and refuses settings that this store does not support.

Guarantees: an adapter for which this store would give other results than PEFT is refused, with an error of one line
that names the adapter's kind or setting. A setting that this release does not know must be off. Patterns from a file
cannot make the matching take long.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tenant_sdk.base_names import check_base_name
from tenant_sdk.serving.adapters.kinds import (
    KINDS,
    NOT_SERVED,
    ModuleSettings,
    NotServed,
    kept_as_modules,
    module_settings,
)
from tenant_sdk.serving.adapters.patterns import bounded_patterns
from tenant_sdk.serving.adapters.targets import Base, targeted
from wire.errors import ConfigurationError

MAX_CONFIG_BYTES = 1 << 20
"""The longest adapter_config.json that is read, 1 MiB. A file with a pattern for each layer of a large model takes
about 100 kB."""
MAX_SCALING = 1e4
"""The largest magnitude of alpha, which also bounds the scaling alpha / rank. A larger factor could make bfloat16 rows
overflow, and so spoil the step of other requests."""

_HARMLESS = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
    "bias", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights",
    "eva_config", "megatron_core", "qalora_group_size", "runtime_config",
})  # fmt: skip
"""The settings that this module reads, or that change nothing once an adapter is trained."""
_KEEPS_BASE = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""The values of init_lora_weights that leave the base weights unchanged. With PiSSA, OLoRA and others, PEFT changes the
base weights."""
_LORA_KINDS = {
    "alora_invocation_tokens": "aLoRA", "use_qalora": "QALoRA", "kasa_config": "KaSA",
    "arrow_config": "Arrow", "use_bdlora": "BD-LoRA", "velora_config": "VeLoRA", "monteclora_config": "MonteCLoRA",
}  # fmt: skip
"""Maps a setting of LoraConfig to the kind of adapter, other than plain LoRA, that PEFT makes if the setting is on."""


@dataclass(frozen=True)
class LoraSettings:
    """Holds the settings on which the arithmetic of a LoRA adapter depends.

    Attributes:
        rank, alpha: the rank and alpha of layers that no pattern matches.
        ranks, alphas: pairs of a pattern and the rank or alpha of the layers that it matches; the first pattern that
            matches a layer's name counts.
        rslora: whether alpha is divided by the square root of the rank, instead of the rank.
        dora: whether each layer has magnitudes, too (DoRA).
        targets: the layers that the settings name.
    """

    rank: int
    alpha: float
    ranks: Sequence[tuple[re.Pattern[str], int]]
    alphas: Sequence[tuple[re.Pattern[str], float]]
    rslora: bool
    dora: bool = False
    targets: frozenset[str] = frozenset()

    def rank_of(self, module: str) -> int:
        """Returns the rank that the adapter has in a layer."""
        return next((rank for pattern, rank in self.ranks if pattern.match(module)), self.rank)

    def scaling_of(self, module: str) -> float:
        """Returns the factor by which PEFT multiplies B·A·x in a layer."""
        rank = self.rank_of(module)
        alpha = next((alpha for pattern, alpha in self.alphas if pattern.match(module)), self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def read_settings(name: str, content: bytes, base: Base) -> dict[str, Any]:
    """Reads the contents of an adapter_config.json, and checks what concerns adapters of every kind.

    Args:
        name: the adapter's name, for error messages.
        content: the file's bytes.
        base: the model that is served.

    Raises:
        ConfigurationError: the file is no JSON object, or it is of an adapter for another model.
    """
    config = _json_object(name, content)
    check_base_name(name, config.get("base_model_name_or_path"), base.names, base.remedy)
    return config


def parse_settings(name: str, content: bytes, base: Base) -> LoraSettings | ModuleSettings:
    """Reads and checks the contents of an adapter_config.json.

    Args, Raises: see `read_settings`; and

    Raises:
        NotServed: the adapter's kind, or a setting that is on, is not served by the store of adapters.
        ConfigurationError: a setting is out of its bounds, or cannot be used.
    """
    config = read_settings(name, content, base)
    _check_kind(name, config)
    if kept_as_modules(config):
        settings: LoraSettings | ModuleSettings = module_settings(name, config, targeted(name, config, base))
    else:
        settings = _lora_settings(name, config, base)
    others = settings.targets - base.shapes.keys()
    if others:
        raise NotServed(f"the adapter {name} changes {min(others)!a}, which is no linear layer: not served")
    return settings


def _lora_settings(name: str, config: dict[str, Any], base: Base) -> LoraSettings:
    _check_settings(name, config)
    return LoraSettings(
        rank=_rank(name, config.get("r")),
        alpha=_alpha(name, config.get("lora_alpha")),
        ranks=[(pattern, _rank(name, value)) for _, pattern, value in bounded_patterns(name, config, "rank_pattern")],
        alphas=[
            (pattern, _alpha(name, value)) for _, pattern, value in bounded_patterns(name, config, "alpha_pattern")
        ],
        rslora=config.get("use_rslora") is True,
        dora=config.get("use_dora") is True,
        targets=targeted(name, config, base),
    )


def _json_object(name: str, content: bytes) -> dict[str, Any]:
    try:
        config = json.loads(
            content.decode()
        )  # From bytes, `loads` would also accept UTF-16 and UTF-32, which PEFT does not accept.
    except (ValueError, RecursionError):  # `from None`: a parser's text may quote the file
        config = None
    if not isinstance(config, dict):
        raise ConfigurationError(f"the adapter {name} has an adapter_config.json that is no JSON object") from None
    return config


def _check_kind(name: str, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if not isinstance(kind, str) or kind not in KINDS:
        why = NOT_SERVED.get(kind) if isinstance(kind, str) else None
        raise NotServed(
            f"the adapter {name} is of the kind {ascii(kind)[:40]}, which is not served{f': {why}' if why else ''}"
        )
    for setting, other in _LORA_KINDS.items():
        if kind == "LORA" and config.get(setting):
            raise NotServed(f"the adapter {name} is of the kind {other}, which is not served")


def _check_settings(name: str, config: dict[str, Any]) -> None:
    for setting, value in config.items():
        if setting not in _HARMLESS and value:
            raise NotServed(f"the adapter {name} sets {ascii(setting)[:60]}, which is not served")
    for flag in ("use_rslora", "use_dora"):
        if not isinstance(config.get(flag), bool | None):
            raise ConfigurationError(f"the adapter {name} has a {flag} that is neither true nor false")
    if config.get("bias", "none") != "none":
        raise NotServed(f"the adapter {name} trains biases, which are not served: expected bias='none'")
    how = config.get("init_lora_weights")
    if how not in _KEEPS_BASE:
        shown = ascii(how)[:40]
        raise ConfigurationError(
            f"the adapter {name} was started by {shown}, which changes base weights: convert it to plain LoRA"
        )


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 16:  # a bool is an int in Python, but no rank
        raise ConfigurationError(f"the adapter {name} has the rank {ascii(value)[:40]}: expected a whole number from 1")
    return value


def _alpha(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_SCALING:
        raise ConfigurationError(
            f"the adapter {name} has the alpha {ascii(value)[:40]}: expected a number up to {MAX_SCALING:g}"
        )
    return float(value)
