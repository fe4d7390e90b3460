"""This module says which PEFT settings cannot be used over a provider's layers, and what would do in their place.

Guarantees: an adapter of a kind that is listed here is refused in one sentence before anything is sent for it. A kind
that is not listed, and that reads the base weight, gets the error of tenant_sdk/model/remote_linear.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wire.errors import ConfigurationError

_WHOLE = "which stays with the provider"
KINDS: Mapping[str, str] = {
    "ADAMSS": f"AdaMSS clusters the rows of the base weight, {_WHOLE}: use TinyLoRA, or LoRA with 'pissa_niter_8'",
    "FROD": "FRoD decomposes the base weights of all layers together, and they stay with the provider: use VeRA",
    "OSF": f"OSF holds all singular vectors of the base weight, {_WHOLE}: use LoRA with 'pissa_niter_8'",
    "SUPERTUNING": f"Super-Tuning trains the largest elements of the base weight, {_WHOLE}: use SHiRA",
}
"""The sentences for kinds of PEFT that are refused whatever their settings, by `peft_type`. An adapter of
kind SUPERTUNING that was trained elsewhere can be loaded all the same."""
TASKS: Mapping[str, str] = {
    "MULTITASK_PROMPT_TUNING": "multitask prompt tuning needs a task id for each row, which a text has not: use prompt "
    "tuning, or stock PEFT over load_model()",
    "POLY": "Poly needs a task id for each row, which a text has not: use LoRA, or stock PEFT over load_model()",
    "XLORA": "X-LoRA routes among LoRA adapters that are trained already, and runs the model twice: use one of them",
}
"""The sentences for kinds that need more than rows of text. `finetune` and `generate` refuse them; stock PEFT over
`load_model` does not."""
LOSSES: Mapping[str, str] = {
    "CPT": "CPT has a loss of its own, which finetune does not compute: use stock PEFT and Trainer over load_model()",
    "SHADOW": "Shadow adds a loss of its own, which finetune does not compute: use stock PEFT and Trainer over "
    "load_model()",
}
"""The sentences for kinds with a loss of their own. Only `finetune` refuses them."""
STARTS: Mapping[str, str] = {
    "pissa": f"'pissa' takes the exact singular vectors of the base weight, {_WHOLE}: use 'pissa_niter_8'",
    "loftq": f"LoftQ quantises the base weight, {_WHOLE} as int8: use init_lora_weights=True",
    "corda": f"CorDA decomposes the base weight, {_WHOLE}, with the inputs: use 'pissa_niter_8'",
    "lora_ga": f"LoRA-GA takes gradients of the base weight, {_WHOLE}: use 'pissa_niter_8'",
    "mica": f"MiCA takes the smallest singular vectors of the base weight, {_WHOLE}: use 'olora'",
}
"""The sentences for values of LoRA's `init_lora_weights` that are refused."""
_B_IS_ZERO = (True, "gaussian", "eva")
"""The values of LoRA's `init_lora_weights` with which DoRA can be trained. With others B is not zero at first, so that
A·W, which comes through the mask, would be in the first magnitudes. The mask's noise would be in the adapter's file."""
_VARIANTS: Mapping[str, str] = {
    "kasa_config": f"KaSA changes the base weight, {_WHOLE}: use LoRA with 'pissa_niter_8'",
}
"""The sentences for settings of LoRA that are refused when they are on."""
_RANKS = ("r", "init_r", "target_r")
"""The settings of PEFT's kinds that are ranks, where 0 has no meaning of its own."""
_CHANGED_BASE = (
    "was started by {how!r}, which changes base weights: save it again as plain LoRA where the weights are, by "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
)


def refusal(kind: str) -> str:
    """Returns the sentence that says why a kind of `KINDS` is refused, and what would do."""
    return KINDS[kind]


def check_trainable(config: Any) -> None:
    """Checks that an adapter with these settings can be made over a provider's layers and trained on rows of text.

    Args:
        config: a PeftConfig.

    Raises:
        ConfigurationError: the kind, its settings or its `task_type` are refused, or `config` is no PeftConfig.
    """
    if not hasattr(config, "peft_type"):
        raise ConfigurationError(
            f"peft_config must be a config of PEFT's, such as LoraConfig, got {type(config).__name__}"
        )
    kind = kind_of(config)
    task = getattr(config, "task_type", None)
    if task not in (None, "CAUSAL_LM"):
        raise ConfigurationError(
            f"expected 'CAUSAL_LM' or None as task_type of peft_config, got {str(getattr(task, 'value', task))!r}: "
            "rows of text train a model that tells the next token"
        )
    reason = KINDS.get(kind) or TASKS.get(kind) or LOSSES.get(kind) or _reason_of_settings(kind, config)
    if reason is not None:
        raise ConfigurationError(reason)
    check_values(vars(config))


def check_values(settings: Mapping[str, Any]) -> None:
    """Refuses settings of PEFT under which a run would train nothing, or nothing that has an effect. This needs neither
    PEFT nor torch.

    Args:
        settings: values by name, as in a PeftConfig or in `peft_config` of a recipe.

    Raises:
        ConfigurationError: a rank is no positive whole number, an alpha is not positive, a dropout is not from 0 to
            below 1, or the adapter would not be trained.
    """
    if settings.get("inference_mode"):
        raise ConfigurationError("inference_mode of peft_config makes an adapter that is not trained: leave it out")
    is_oft = settings.get("peft_type") == "OFT"  # it takes either r or oft_block_size, and the other one is 0
    for name, value in settings.items():
        if name in _RANKS and value is not None and not (is_oft and value == 0):
            _check_rank(name, value)
        if name == "rank_pattern" and isinstance(value, Mapping):
            for each in value.values():
                if not isinstance(each, list):  # AdaLoRA's pattern has a list for each layer
                    _check_rank("a rank in rank_pattern", each)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and name.endswith("alpha") and not 0 < value < math.inf:
            raise ConfigurationError(f"{name} of peft_config must be positive, got {value}")
        if is_number and name.endswith("dropout") and not 0 <= value < 1:
            raise ConfigurationError(f"{name} of peft_config must be from 0 to below 1, got {value}")


def _check_rank(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):  # a recipe's value is not quoted
        raise ConfigurationError(f"{name} of peft_config must be a whole number, got {type(value).__name__}")
    if value < 1:
        raise ConfigurationError(f"{name} of peft_config must be positive, got {value}")


def check_loadable(name: str, config: Any) -> None:
    """Checks that a trained adapter can be used over a provider's layers, as far as its settings tell.

    Args:
        name: the adapter's name, for the error.
        config: the PeftConfig that was read from the adapter's folder.

    Raises:
        ConfigurationError: the adapter needs base weights in more than products, or base weights other than the
            provider's, or more than rows of text.
    """
    kind, how = kind_of(config), getattr(config, "init_lora_weights", None)
    needs = TASKS.get(kind) if kind == "SUPERTUNING" else KINDS.get(kind) or TASKS.get(kind)
    if needs is not None:
        raise ConfigurationError(f"{name} cannot be used: {needs}")
    if kind == "PSOFT":
        raise ConfigurationError(
            f"{name} cannot be used: PSOFT's file lacks the singular vectors that PEFT takes of the base weight, "
            f"{_WHOLE}: save it as LoRA where the weights are, by peft.save_as_lora"
        )
    if kind == "LORA" and isinstance(how, str) and how.lower() not in ("gaussian", "eva", "orthogonal", "mica"):
        raise ConfigurationError(f"{name} " + _CHANGED_BASE.format(how=how[:40]))
    reason = _reason_of_variant(config) if kind == "LORA" else _reason_of_settings(kind, config)
    if reason is not None:
        raise ConfigurationError(f"{name} cannot be used: {reason}")


def kind_of(config: Any) -> str:
    """Returns a config's kind as PEFT names it in a file, such as LORA."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def _reason_of_settings(kind: str, config: Any) -> str | None:
    how = getattr(config, "init_lora_weights", None)
    if kind == "LORA":
        if config.use_dora and (how.lower() if isinstance(how, str) else how) not in _B_IS_ZERO:
            return f"DoRA cannot start from init_lora_weights={how!r}: use True, or use_dora=False"
        return (STARTS.get(how.lower()) if isinstance(how, str) else None) or _reason_of_variant(config)
    if kind == "MISS" and config.init_weights == "bat":
        return (
            f"the start 'bat' of MiSS multiplies blocks of the base weight, {_WHOLE}: use init_weights=True or 'mini'"
        )
    if kind == "PSOFT" and config.psoft_svd == "full":
        return f"psoft_svd='full' takes the exact singular vectors of the base weight, {_WHOLE}: use 'lowrank'"
    return None


def _reason_of_variant(config: Any) -> str | None:
    return next((reason for setting, reason in _VARIANTS.items() if getattr(config, setting, None)), None)
