"""This module makes the PEFT model of an adapter: a model whose base layers are at the provider, with the adapter on
it.

The adapter's files are read in tenant_sdk/serving/adapters/reader.py, for this module as for the store of adapters, so
that both refuse the same files for the same reasons. This module also takes the kinds and settings of PEFT that the
store does not serve.

Guarantees:
- every tensor of an adapter's file is used, and every layer that its settings name has its tensors; else the adapter is
  refused with a one-line error that names the first tensor or layer. No adapter is applied only in part;
- an adapter that contains a whole copy of a layer that the provider holds is refused;
- a model is used again only for an adapter with the same bytes in both of its files;
- PEFT gets no pattern that could take long to match, and no setting that makes it load other files or code;
- loading an adapter runs no compiler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    LoraConfig,
    PeftConfig,
    PeftModelForCausalLM,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from peft.tuners.ln_tuning.layer import LNTuningLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from runtime.loading import loading
from tenant_sdk.kinds.refused import check_loadable
from tenant_sdk.model.dora import for_remote_base
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.plain_values import adapter_folder, positive
from tenant_sdk.serving.adapters.peft_modules import Layer, ShapeChecks, config_of, no_compiler
from tenant_sdk.serving.adapters.peft_settings import MAX_SIZE
from tenant_sdk.serving.adapters.reader import (
    LoraFile,
    ModuleFile,
    OpenAdapter,
    OtherFile,
    Stamp,
    StoredTensor,
    opened_by_user,
)
from tenant_sdk.serving.adapters.targets import (
    ALL_LINEAR,
    Base,
    base_of,
    bounded_pattern,
    bounded_patterns,
    excluded,
    is_plain,
    layers_patterns,
    linear_layers,
    names_of,
    shape_of,
    targeted,
)
from tenant_sdk.session_protocol import ModelSource
from tenant_sdk.warn import warn_and_go_on
from wire.errors import ConfigurationError, VeilbaseError

_REMEDY = "change base_model_name_or_path in its adapter_config.json"
_NEVER = {
    "layer_replication": "it repeats layers of the base, which stay with the provider",
    "megatron_config": "it makes PEFT import a module that the file names",
    "shadow_model": "it makes PEFT load a model that the file names",
}
"""The settings that are refused if they are on, with the reasons."""
_RUNTIME = "runtime_config"
"""A setting that PEFT ignores in a file."""
_SEEDS = ("seed", "prng_key")
"""Parts of the names of settings that may be any whole number."""
_STEPS = ("total_step", "tinit", "tfinal", "deltaT")
"""Settings that count steps of training, and so change nothing here."""
_INJECTION_S = 120.0
"""The seconds of processor time that PEFT may take to make the modules of an adapter of a kind that the store does not
serve."""
_INJECTION_BYTES = 2 << 30
"""The bytes that PEFT may allocate for such modules, whatever the size of the file; 8 times the file's size are allowed
if that is more."""


@dataclasses.dataclass(frozen=True)
class _Identity:
    """Tells whether an adapter is the one that a model already has: the stamp of its files, and the SHA-256 of both."""

    stamp: Stamp
    digest: str


def adapted_model(session: ModelSource, adapter: str | Path | None) -> Any:
    """Returns the session's model, with an adapter on it if one is named, and keeps this model in `session.loaded` for
    the next call.

    Raises:
        ConfigurationError: the adapter does not exist, cannot be used over a provider's layers, or does not fit.
    """
    if adapter is None:
        if session.loaded is None or session.loaded[0] is not None:
            session.loaded = None
            session.loaded = (None, session.load_model())
        return session.loaded[1]
    with opened_by_user(adapter_folder(adapter)) as opened:
        known = session.loaded
        if known is not None and isinstance(known[0], _Identity) and _is_same(known[0], opened):
            session.loaded = (_Identity(opened.stamp, known[0].digest), known[1])
            return known[1]
        session.loaded = None
        del known  # the old model's memory is free before the new model takes its own
        model: Any = session.load_model()
        made = _with_adapter(model, opened)
        session.loaded = (_Identity(opened.stamp, opened.digest()), made)
    return session.loaded[1]


def _is_same(known: _Identity, opened: OpenAdapter) -> bool:
    """Returns whether an adapter is a known one: by the stamp of its files if it can be relied on, else by their
    contents, as in the store."""
    if opened.settled_stamp == known.stamp:
        return True
    same_sizes = [each[2] for each in opened.stamp] == [each[2] for each in known.stamp]
    return same_sizes and opened.has_digest(known.digest)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _with_adapter(model: Any, opened: OpenAdapter) -> Any:
    """Returns a model with an adapter on it.

    Raises:
        ConfigurationError: the adapter cannot be used.
    """
    name, base = opened.name, base_of(model, remedy=_REMEDY)
    with loading(), no_compiler():
        settings = opened.settings(base, _memory_bytes())
        check_loadable(name, _peft_config(name, settings))
        contents = opened.check(base, _memory_bytes())
        config = _checked_config(model, name, settings, contents)
        tensors = _tensors(opened, contents)
        num_bytes = sum(each.numel() * each.itemsize for each in tensors.values())
        made = _injected(model, name, config, contents, max(_INJECTION_BYTES, 8 * num_bytes))
        copied = copied_base_layer(made)
        if copied is not None:  # PEFT would silently leave out the adapter's copy
            raise ConfigurationError(f"{name} holds {copied[0]} whole, a base layer held by the provider")
        try:
            set_peft_model_state_dict(made, dict(tensors))
        except ConfigurationError as exc:  # a kind's own check, which does not know the adapter's name
            raise ConfigurationError(f"{name} is no adapter for this model: {exc}") from None
        except VeilbaseError:
            raise
        except Exception as exc:  # noqa: BLE001 - PEFT raises many types; their texts may quote the file
            raise ConfigurationError(f"{name} is no adapter for this model ({type(exc).__name__})") from None
        _check_used(name, made, tensors)
    return made.eval()


def _injected(model: Any, name: str, config: PeftConfig, contents: Any, most_bytes: int) -> Any:
    """Returns a model with an adapter on it, into which the file's numbers have not been loaded yet."""
    limits = _Limits(name, most_bytes) if isinstance(contents, OtherFile) else None
    try:
        with limits or contextlib.nullcontext():
            return PeftModelForCausalLM(model, config)
    except VeilbaseError:
        raise
    except Exception as exc:  # noqa: BLE001 - as above
        raise ConfigurationError(f"{name} is no adapter for this model ({type(exc).__name__})") from None


class _Limits(TorchDispatchMode):
    """Bounds the memory and the time that PEFT takes to make an adapter's modules. A tensor that is too large is
    refused before its memory is written."""

    def __init__(self, name: str, most_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name, self._left, self._end = name, most_bytes, time.thread_time() + _INJECTION_S

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        is_made = not any(isinstance(each, torch.Tensor) for each in args)
        if is_made and func.__name__.partition(".")[0] not in ("empty", "empty_strided"):
            self._count(func(*args, **{**options, "device": "meta"}) if "device" in options else None)
        made = func(*args, **options)
        self._count(made if not is_made or func.__name__.startswith("empty") else None)
        return made

    def _count(self, made: Any) -> None:
        if isinstance(made, torch.Tensor) and not made._is_view():
            self._left -= made.numel() * made.itemsize
        if self._left < 0 or time.thread_time() > self._end:
            raise ConfigurationError(f"the adapter {self._name} has settings that take too much memory or time")


def _check_used(name: str, made: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compares the tensors of a file with those of the model, after PEFT has loaded them.

    Raises:
        ConfigurationError: PEFT did not take a tensor as it is, or the file lacks a tensor of the adapter.
    """
    taken = get_peft_model_state_dict(made, save_embedding_layers=False)
    whole = made.state_dict()
    for key, value in tensors.items():
        held = taken.get(key, whole.get(key))
        if held is None or held.is_meta or held.shape != value.shape:
            raise ConfigurationError(f"the adapter {name} holds {ascii(key)[:100]}, which PEFT does not use")
        if not torch.equal(held.cpu(), value.to(held.dtype)):
            raise ConfigurationError(f"the adapter {name} holds {ascii(key)[:100]}, which PEFT does not take as it is")
    missing = sorted(taken.keys() - tensors.keys())
    if missing:
        raise ConfigurationError(
            f"the adapter {name} has no {missing[0]!a}, which its settings ask for: was it saved whole?"
        )


def _tensors(opened: OpenAdapter, contents: LoraFile | ModuleFile | OtherFile) -> dict[str, torch.Tensor]:
    """Reads an adapter's numbers, by the names that PEFT writes today.

    Raises:
        ConfigurationError: a number is NaN or infinite, or the files are being changed.
    """
    if isinstance(contents, LoraFile):
        keys = {tensor.begin: key for key, tensor in _keys_of(contents)}
    else:
        keys = {tensor.begin: key for key, tensor in contents.named.items()}
    read = {keys[stored.begin]: numbers.clone() for stored, numbers in opened.tensors()}
    opened.digest()  # raises an error if the files have changed
    for key, numbers in read.items():
        if numbers.is_floating_point() and not bool(torch.isfinite(numbers).all()):
            raise ConfigurationError(f"the adapter {opened.name} holds NaN or infinite numbers, in {ascii(key)[:100]}")
    return read


def _keys_of(contents: LoraFile) -> Iterator[tuple[str, StoredTensor]]:
    for layer in contents.layers:
        module = f"base_model.model.{layer.module}"
        yield f"{module}.lora_A.weight", layer.lora_a
        yield f"{module}.lora_B.weight", layer.lora_b
        if layer.magnitude is not None:
            yield f"{module}.lora_magnitude_vector", layer.magnitude


# ---- settings --------------------------------------------------------------------------------------------------------


def _checked_config(
    model: Any, name: str, settings: Mapping[str, Any], contents: LoraFile | ModuleFile | OtherFile
) -> PeftConfig:  # fmt: skip
    """Returns the config with which PEFT makes the adapter's modules: of checked settings alone for the kinds that the
    store serves, and else of all settings, of which none can take long or load anything."""
    if isinstance(contents, OtherFile):
        return for_remote_base(_peft_config(name, _harmless(name, settings, base_of(model))))
    layers = {key: Layer(layer, shape_of(layer)) for key, layer in linear_layers(model).items()}
    if isinstance(contents, LoraFile):
        named = {key: settings[key] for key in _LORA_SETTINGS if settings.get(key) is not None}
        modules = [layer.module for layer in contents.layers]
        named["fan_in_fan_out"] = isinstance(layers[modules[0]].like, Conv1D)  # PEFT corrects a wrong value
        return for_remote_base(LoraConfig(**named, target_modules=modules, inference_mode=True))
    ShapeChecks(layers).check(name, contents, _memory_bytes())
    return config_of(contents, layers)


_LORA_SETTINGS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
"""The settings of LoRA on which its arithmetic depends."""


def _peft_config(name: str, settings: Mapping[str, Any]) -> PeftConfig:
    """Returns PEFT's config of an adapter.

    Raises:
        ConfigurationError: PEFT has no such kind, does not know a setting that is on, or refuses a value.
    """
    kind = settings.get("peft_type")
    of_kind = PEFT_TYPE_TO_CONFIG_MAPPING.get(kind) if isinstance(kind, str) else None
    if of_kind is None:
        raise ConfigurationError(f"{name} is of the kind {ascii(kind)[:40]}, which this PEFT does not have")
    fields = {field.name: field for field in dataclasses.fields(of_kind) if field.init and field.name != _RUNTIME}
    for setting, value in settings.items():
        if setting in _NEVER and value and (setting not in fields or value != fields[setting].default):
            raise ConfigurationError(f"{name} sets {setting}, which is refused: {_NEVER[setting]}")
        if setting not in fields and value and setting != _RUNTIME:
            raise ConfigurationError(f"{name} sets {ascii(setting)[:60]}, which this PEFT does not know")
    try:
        known = of_kind.check_kwargs(**{key: value for key, value in settings.items() if key in fields})
        return PeftConfig.from_peft_type(**{**known, "inference_mode": True, "task_type": "CAUSAL_LM"})
    except Exception as exc:  # noqa: BLE001 - whatever it is, it comes of the file; its text may quote the file
        raise ConfigurationError(f"{name} has settings that PEFT refuses ({type(exc).__name__})") from None


def _harmless(name: str, settings: Mapping[str, Any], base: Base) -> dict[str, Any]:
    """Returns an adapter's settings with names of layers in place of patterns, for a kind that the store does not
    serve.

    Raises:
        ConfigurationError: a number is too large, or a pattern cannot be used or takes too long to match.
    """
    made = dict(settings)
    for setting, value in settings.items():
        if setting not in _STEPS and not any(part in setting for part in _SEEDS):
            _check_numbers(name, setting, value)
        if setting.endswith("_pattern") and setting != "layers_pattern":
            bounded_patterns(name, settings, setting)
    layers_patterns(name, settings.get("layers_pattern"))
    if settings.get("modules_to_save"):
        given = settings["modules_to_save"]
        names_of(name, "modules_to_save", [given] if isinstance(given, str) else given)
    feedforward = settings.get("feedforward_modules")
    if isinstance(feedforward, str) and bounded_pattern(feedforward) is None:
        raise ConfigurationError(f"the adapter {name} has a pattern in feedforward_modules that is too intricate")
    wanted = settings.get("target_modules")
    if isinstance(wanted, str) and wanted.lower() != ALL_LINEAR and not is_plain(wanted):
        made["target_modules"] = sorted(targeted(name, {**settings, "exclude_modules": None}, base))
    if isinstance(settings.get("exclude_modules"), str):
        made["exclude_modules"] = sorted(excluded(name, settings, base.modules))
    return made


def _check_numbers(name: str, setting: str, value: Any) -> None:
    """Refuses a setting that holds a number which is too large for a size, or is none."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)
        elif isinstance(each, int | float) and not (math.isfinite(each) and abs(each) <= MAX_SIZE):
            raise ConfigurationError(f"the adapter {name} has a number in {ascii(setting)[:60]} that is too large")


def copied_base_layer(model: Any) -> tuple[str, str] | None:
    """Returns (module name, PEFT setting) of a module that the setting makes PEFT train or load as a whole, although it
    has base layers at the provider; returns None if there is no such module."""
    for name, module in model.named_modules():
        if not isinstance(module, AuxiliaryTrainingWrapper | LNTuningLayer):
            continue
        if any(isinstance(inner, RemoteLinear | RemoteConv1D) for inner in module.modules()):
            setting = "target_modules" if isinstance(module, LNTuningLayer) else "modules_to_save"
            return name.removeprefix("base_model.model."), setting
    return None


class FewLayersWarning(UserWarning):
    """Says that an adapter changes less of the model than a user would expect."""


_FEW = 0.1
"""The share of the linear layers below which PEFT's default targets are few. The usual default for a Llama is 2 of 7;
for models with state-space layers, the defaults of PEFT 0.21 find 7% of the layers, and a run learns nothing."""
_GATES = ("gate", "router")


def say_how_little(model: Any, num_linear: int, by_default: bool) -> None:
    """Issues a warning if an adapter that is about to be trained changes few layers because PEFT chose them, or if it
    changes only the gate of a mixture of experts.

    Args:
        model: the model with the adapter.
        num_linear: how many linear layers the base has.
        by_default: whether the user left `target_modules` out, so that PEFT chose the layers.
    """
    changed = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    if by_default and changed and len(changed) < _FEW * num_linear:
        warn_and_go_on(
            f"PEFT's default targets for this model are {len(changed)} of its {num_linear} linear layers: name them "
            "yourself in target_modules, or set target_modules='all-linear'",
            FewLayersWarning,
        )
    has_gate = any(name.rpartition(".")[2] in _GATES for name in changed)
    has_experts = any(".experts." in name for name, _ in model.named_parameters()) or any(
        name.endswith(".experts") for name, _ in model.named_modules()
    )
    if has_gate and has_experts and not any(".experts" in name for name in changed):
        warn_and_go_on(
            "of the mixture of experts the adapter changes only the gate, which chooses among the experts: name the "
            "experts too, or leave the gate out",
            FewLayersWarning,
        )


def virtual_tokens(peft_config: Any) -> int:
    """Returns the number of tokens that an adapter puts before every prompt or training row: 0 except for
    prompt-learning methods.

    Raises:
        ConfigurationError: the number is not a positive whole number.
    """
    if not getattr(peft_config, "is_prompt_learning", False):
        return 0
    return positive("num_virtual_tokens", peft_config.num_virtual_tokens)
