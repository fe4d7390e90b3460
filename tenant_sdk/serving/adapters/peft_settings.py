"""This module reads a PEFT adapter's settings, and refuses settings that the store of adapters does not support.

Plain LoRA and DoRA are kept as stacked factors (lora.py). The other kinds in `KINDS`, and LoRA with biases, are kept as
PEFT's own modules. A kind is in this list if PEFT's layer calls its base layer exactly once, treats each row by itself,
and reads no base weights. PEFT has other kinds that are refused:

- HiRA, GLoRA and PEANuT ask for rows of their own beside those of a step, so that the provider would see which steps
  have such an adapter;
- SHiRA's and Super-Tuning's files hold whole numbers, by which the adapter's own weights are placed;
- FRoD, OSF, PSOFT and AdaMSS read base weights;
- Lily's layers take a mean over rows, so that an answer would depend on the requests beside it;
- UniLoRA's and Poly's files do not tell the layers or the task; X-LoRA, Shadow and prompt learning change more of the
  model than its linear layers.

Guarantees: an adapter for which this store would give other results than PEFT is refused, with an error of one line
that names the adapter's kind or setting. A setting that this release does not know must be off. Patterns from a file
cannot make the matching take long. For its own modules, PEFT gets only settings that are listed here, each within a
bound. All other settings must be off, or are settings of training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenant_sdk.adapter_checks import json_object
from tenant_sdk.base_names import check_base_name
from tenant_sdk.serving.adapters.targets import Base, bounded_pattern, bounded_patterns, targeted
from wire.errors import ConfigurationError

MAX_SIZE = 1 << 20
"""The largest rank, block or number of vectors. What really bounds memory is the comparison with the file's shapes."""
MAX_TERMS = 64
"""The most repetitions of a sum or product in a layer: terms of OFT's series, factors of BOFT's butterfly, and so
on."""
MAX_NUMBER = 1e4
"""The largest magnitude of a scaling or another factor, as for LoRA's alpha."""
_MAX_SEED = 1 << 63
_WORD = re.compile(r"[A-Za-z0-9_.]{1,16}")

Check = Callable[[Any], bool]


class NotServed(ConfigurationError):
    """Says that the store does not serve the kind of an adapter or one of its settings. `TenantClient.generate`, which
    computes with PEFT's own modules on the whole model, may serve it all the same."""


def _size(value: Any) -> bool:
    return type(value) is int and -1 <= value <= MAX_SIZE


def _terms(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_TERMS


def _seed(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_SEED


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) <= MAX_NUMBER


def _number_or_none(value: Any) -> bool:
    return value is None or _number(value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _word(value: Any) -> bool:
    return isinstance(value, str) and _WORD.fullmatch(value) is not None


def _kept_ranks(value: Any) -> bool:
    """Returns whether a value is None or a table as AdaLoRA writes it, with a list for each layer that says of each
    rank whether it was kept."""
    return value is None or (
        isinstance(value, dict)
        and all(isinstance(each, list) and all(isinstance(kept, bool) for kept in each) for each in value.values())
    )


def _mini(value: Any) -> bool:
    return isinstance(value, bool) or value == "mini"  # The third way of MiSS, "bat", reads base weights.


@dataclass(frozen=True)
class Kind:
    """Describes a kind of adapter.

    Attributes:
        title: the name of the kind in error messages.
        settings: the settings that PEFT gets, each with its check.
        patterns: the settings that are tables of patterns, each with the check of its values.
        training: further settings that change nothing once the adapter is trained.
        changes_inputs: whether all layers of this kind call their base layers with changed inputs.
        shapes_on_meta: whether PEFT can make the layers on torch's meta device, which takes no memory, so that their
            shapes can be read.
        always: settings of training that PEFT requires, each with a value that PEFT accepts.
        makes_matrices: whether PEFT's layers make a matrix of the layer's size for every step. Adapters of such a kind
            are computed one after the other: the matrices take the time, and all at once would take their memory.
    """

    title: str
    settings: Mapping[str, Check]
    patterns: Mapping[str, Check] = field(default_factory=dict)
    training: Collection[str] = ()
    changes_inputs: bool = False
    shapes_on_meta: bool = True
    always: Mapping[str, Any] = field(default_factory=dict)
    makes_matrices: bool = False


_LYCORIS: dict[str, Check] = {"r": _size, "alpha": _number}
_RANKS: dict[str, Check] = {"rank_pattern": _size, "alpha_pattern": _number}
_LYCORIS_TRAINING = ("rank_dropout", "module_dropout", "use_effective_conv2d", "rank_dropout_scale")
_ROUND: dict[str, Check] = {"fan_in_fan_out": _flag}
_PROJECTION: dict[str, Check] = {"r": _size, "projection_prng_key": _seed, "save_projection": _flag, **_ROUND}
_SPECTRUM: dict[str, Check] = {"n_frequency": _size, "scaling": _number, "random_loc_seed": _seed, **_ROUND}
KINDS: dict[str, Kind] = {
    "LORA": Kind(  # Plain LoRA is stacked (lora.py); see `_kept_as_modules`.
        "LoRA with biases", {"r": _size, "lora_alpha": _number, "use_rslora": _flag, "lora_bias": _flag, **_ROUND},
        _RANKS, ("lora_dropout", "eva_config"),
    ),
    "IA3": Kind("IA3", _ROUND, training=("feedforward_modules",)),  # `feedforward_modules` is read by this module.
    "LOHA": Kind("LoHa", _LYCORIS, _RANKS, _LYCORIS_TRAINING, makes_matrices=True),
    "LOKR": Kind(
        "LoKr", {**_LYCORIS, "decompose_both": _flag, "decompose_factor": _size}, _RANKS, _LYCORIS_TRAINING,
        makes_matrices=True,
    ),
    "VERA": Kind("VeRA", _PROJECTION, training=("d_initial", "vera_dropout")),
    "PVERA": Kind("PVeRA", _PROJECTION, training=("d_initial", "pvera_dropout", "generator_seed")),
    "RANDLORA": Kind(
        "RandLoRA", {**_PROJECTION, "sparse": _flag, "very_sparse": _flag, "randlora_alpha": _number},
        training=("randlora_dropout",),
    ),
    "OFT": Kind(
        "OFT",
        {
            "r": _size, "oft_block_size": _size, "coft": _flag, "eps": _number, "block_share": _flag,
            "use_cayley_neumann": _flag, "num_cayley_neumann_terms": _terms, **_ROUND,
        },
        training=("module_dropout",), changes_inputs=True,
    ),
    "BOFT": Kind(
        "BOFT",
        {"boft_block_size": _size, "boft_block_num": _size, "boft_n_butterfly_factor": _terms, **_ROUND},
        training=("boft_dropout",), changes_inputs=True, shapes_on_meta=False, makes_matrices=True,
    ),
    "FOURIERFT": Kind("FourierFT", _SPECTRUM, {"n_frequency_pattern": _size}, makes_matrices=True),
    "WAVEFT": Kind(
        "WaveFT", {**_SPECTRUM, "wavelet_family": _word, "use_idwt": _flag, "proportional_parameters": _flag},
        {"n_frequency_pattern": _size}, makes_matrices=True,
    ),
    "VBLORA": Kind(
        "VB-LoRA", {"r": _size, "num_vectors": _size, "vector_length": _size, "topk": _terms, **_ROUND},
        training=("vblora_dropout", "init_vector_bank_bound", "init_logits_std"),
    ),
    "GRALORA": Kind(
        "GraLoRA", {"r": _size, "hybrid_r": _size, "alpha": _number, "gralora_k": _terms, **_ROUND},
        training=("gralora_dropout",),
    ),
    "MISS": Kind("MiSS", {"r": _size, "mini_r": _size, "init_weights": _mini}, training=("miss_dropout",)),
    "BEFT": Kind("BEFT", {}),
    "C3A": Kind("C3A", {"block_size": _size}, {"block_size_pattern": _size}),
    "ROAD": Kind("RoAd", {"variant": _word, "group_size": _size}),
    "HRA": Kind("HRA", {"r": _size, "apply_GS": _flag}, changes_inputs=True, makes_matrices=True),
    "DEFT": Kind(
        "DEFT", {"r": _size, "alpha": _number_or_none, "decomposition_method": _word, "para": _flag, **_ROUND},
        training=("deft_dropout", "init_scale"),
    ),
    "DELORA": Kind(
        "DeLoRA", {"r": _size}, {"rank_pattern": _size, "lambda_pattern": _number},
        training=("delora_lambda", "module_dropout"),
    ),
    "TINYLORA": Kind(
        "TinyLoRA",
        {
            "r": _size, "u": _size, "weight_tying": _number, "projection_seed": _seed, "save_projection": _flag,
            **_ROUND,
        },
        training=("tinylora_dropout", "init_v_bound"), shapes_on_meta=False,
    ),
    "ADALORA": Kind(
        "AdaLoRA", {"init_r": _size, "lora_alpha": _number, "rank_pattern": _kept_ranks, **_ROUND},
        training=(
            "r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step",
            "lora_dropout",
        ),
        shapes_on_meta=False, always={"total_step": 1},
    ),
}  # fmt: skip
"""The kinds that are kept as PEFT's own modules, by their `peft_type`."""
_OWN_ROWS = "it asks for rows of its own, which would show the steps that it is in"
_PLACES = "its file places its numbers by whole numbers, which are not read here"
_MORE = "it changes more of the model than its linear layers"
NOT_SERVED: dict[str, str] = {
    **dict.fromkeys(("HIRA", "GLORA", "PEANUT"), _OWN_ROWS),
    **dict.fromkeys(("SHIRA", "SUPERTUNING"), _PLACES),
    **dict.fromkeys((
        "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE", "ADAPTION_PROMPT",
        "LN_TUNING", "TRAINABLE_TOKENS", "SHADOW", "XLORA",
    ), _MORE),
    "LILY": "its layers take a mean over the rows of a step",
}  # fmt: skip
"""Why some kinds are not served, by their `peft_type`. `TenantClient.generate` serves most of them (docs/peft.md)."""
_ALWAYS_TRAINING = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "init_weights", "init_ia3_weights",
    "init_lora_weights", "megatron_core", "qalora_group_size", "runtime_config", "bias",
})  # fmt: skip
"""The settings that every kind may have, and that are not given to PEFT: they change nothing once an adapter is
trained, or are checked or chosen elsewhere, as `bias` and `target_modules` are."""
_INITS = frozenset({"lycoris", "xavier_uniform", "kaiming_uniform", "gaussian", "orthogonal", "eva"})
"""The texts that `init_weights` may be: ways to choose the initial numbers of the adapter. None changes the base."""


@dataclass(frozen=True)
class ModuleSettings:
    """Holds the checked settings of an adapter that is kept as PEFT's modules.

    Attributes:
        peft_type: the kind, a key of `KINDS`.
        options: the settings that PEFT gets.
        feedforward: for IA3, the rule that tells which layers' inputs are scaled: the ends of the layers' names, or a
            pattern.
        targets: the layers that the settings name.
    """

    peft_type: str
    options: Mapping[str, Any]
    feedforward: tuple[str, ...] | re.Pattern[str] = ()
    targets: frozenset[str] = frozenset()

    @property
    def kind(self) -> Kind:
        """Returns the description of the adapter's kind."""
        return KINDS[self.peft_type]

    def changes_input(self, module: str) -> bool:
        """Returns whether the adapter calls this layer with a changed input."""
        return self.kind.changes_inputs or self.scales_input(module)

    def scales_input(self, module: str) -> bool:
        """Returns whether this is a layer whose input IA3 scales, by PEFT's rule for `feedforward_modules`."""
        if isinstance(self.feedforward, re.Pattern):
            return self.feedforward.fullmatch(module) is not None
        return module.endswith(self.feedforward) if self.feedforward else False


def _kept_as_modules(config: Mapping[str, Any]) -> bool:
    """Returns whether an adapter of a kind in `KINDS` is kept as PEFT's modules, and not as stacked LoRA factors."""
    return config["peft_type"] != "LORA" or bool(config.get("lora_bias"))


def _module_settings(name: str, config: Mapping[str, Any], targets: frozenset[str]) -> ModuleSettings:
    """Checks the settings of an adapter whose `peft_type` is in `KINDS`.

    Args:
        name: the adapter's name, for error messages.
        config: the contents of adapter_config.json.
        targets: the layers that the settings name.

    Raises:
        NotServed: a setting is on that the store does not serve.
        ConfigurationError: a setting is out of its bounds.
    """
    peft_type = str(config["peft_type"])
    kind, options = KINDS[peft_type], dict[str, Any]()
    for setting, value in config.items():
        if setting in kind.settings:
            options[setting] = _checked(name, kind, setting, value, kind.settings[setting])
        elif setting in kind.patterns:
            table = {pattern: value for pattern, _, value in bounded_patterns(name, config, setting)}
            for each in table.values():
                _checked(name, kind, setting, each, kind.patterns[setting])
            options[setting] = table
        elif setting not in _ALWAYS_TRAINING and setting not in kind.training and value:
            raise NotServed(f"the adapter {name} ({kind.title}) sets {ascii(setting)[:60]}, which is not served")
    _check_training(name, kind, config)
    return ModuleSettings(peft_type, options, _feedforward(name, config) if peft_type == "IA3" else (), targets)


def _checked(name: str, kind: Kind, setting: str, value: Any, check: Check) -> Any:
    if not check(value):
        raise ConfigurationError(
            f"the adapter {name} ({kind.title}) has {ascii(value)[:40]} for {ascii(setting)[:60]}, which is not served"
        )
    return value


def _check_training(name: str, kind: Kind, config: Mapping[str, Any]) -> None:
    if config.get("bias", "none") not in ("none", None):
        raise NotServed(f"the adapter {name} trains biases, which are not served: expected bias='none'")
    for setting in ("init_weights", "init_ia3_weights", "init_lora_weights"):
        how = config.get(setting)
        if setting not in kind.settings and not isinstance(how, bool | None) and how not in _INITS:
            raise ConfigurationError(f"the adapter {name} ({kind.title}) was started by {ascii(how)[:40]}: not served")


def _feedforward(name: str, config: Mapping[str, Any]) -> tuple[str, ...] | re.Pattern[str]:
    """Returns the rule that tells which layers' inputs IA3 scales; see `ModuleSettings.feedforward`."""
    given = config.get("feedforward_modules") or []
    if isinstance(given, str) and bounded_pattern(given) is not None:
        return re.compile(given)
    if isinstance(given, list) and len(given) <= MAX_SIZE and all(isinstance(each, str) and each for each in given):
        return tuple(given)
    raise ConfigurationError(f"the adapter {name} (IA3) has feedforward_modules that are no list of names")


MAX_DEPTH = 16
"""The most levels of lists and tables in an adapter_config.json. PEFT's own settings have up to four."""
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
        ConfigurationError: the file is no JSON object, its values are nested too deeply, or it is of an adapter for
            another model.
    """
    config = json_object(name, content)
    _check_depth(name, config)
    check_base_name(name, config.get("base_model_name_or_path"), base.names, base.remedy)
    return config


def served_settings(name: str, config: dict[str, Any], base: Base) -> LoraSettings | ModuleSettings:
    """Checks the settings of an adapter that the store of adapters has to serve.

    Args:
        name: the adapter's name, for error messages.
        config: what `read_settings` returned.
        base: the model that is served.

    Raises:
        NotServed: the adapter's kind, or a setting that is on, is not served by the store of adapters.
        ConfigurationError: a setting is out of its bounds, or cannot be used.
    """
    _check_kind(name, config)
    if _kept_as_modules(config):
        settings: LoraSettings | ModuleSettings = _module_settings(name, config, targeted(name, config, base))
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


def _check_depth(name: str, config: dict[str, Any]) -> None:
    """Refuses values of which a copy or a text could not be made, since both are made by recursion."""
    level: list[Any] = [config]
    for _ in range(MAX_DEPTH):
        parts = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [each for part in parts for each in part]
    if any(isinstance(each, dict | list) for each in level):
        raise ConfigurationError(f"the adapter {name} has settings of more than {MAX_DEPTH} levels of lists and tables")


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
