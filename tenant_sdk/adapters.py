"""This module loads PEFT adapters onto a model whose base layers are at the provider.

Guarantees: an adapter that does not fit, or that contains a whole copy of a layer that the provider holds, is refused
with a one-line error. No adapter is applied only in part. Loading an adapter runs no compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from peft.tuners.boft import layer as boft
from peft.tuners.ln_tuning.layer import LNTuningLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import SafetensorError

from tenant_sdk.adapter_folder import adapter_folder
from tenant_sdk.base_names import check_base_name
from tenant_sdk.kinds.refused import check_loadable
from tenant_sdk.model.dora import for_remote_base
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.plain_values import positive
from tenant_sdk.session_protocol import ModelSource
from wire.errors import ConfigurationError, VeilbaseError
from wire.loading import loading


def adapted_model(session: ModelSource, adapter: str | Path | None) -> Any:
    """Returns the session's model, with an adapter on it if one is named, and keeps this model in `session.loaded` for
    the next call.

    Raises:
        ConfigurationError: the adapter does not exist, cannot be used over a provider's layers, or does not fit.
    """
    key = _adapter_key(adapter)
    if session.loaded is None or session.loaded[0] != key:
        session.loaded = None
        model: Any = session.load_model()
        if adapter is not None:
            try:
                with loading(), no_compiler():
                    config = PeftConfig.from_pretrained(str(adapter))
                    _check_settings(model, str(adapter), config)
                    config = for_remote_base(config)
                    model = PeftModel.from_pretrained(model, str(adapter), config=config).eval()
            except VeilbaseError:
                raise
            except (ValueError, OSError, KeyError, RuntimeError, TypeError, SafetensorError) as exc:
                # `from None`: PEFT's frames hold the adapter's tensors, and its error may quote the adapter's settings.
                raise ConfigurationError(f"{adapter} is no adapter for this model ({type(exc).__name__})") from None
            copied = copied_base_layer(model)
            if copied is not None:  # PEFT would silently leave out the adapter's copy
                raise ConfigurationError(f"{adapter} holds {copied[0]} whole, a base layer held by the provider")
        session.loaded = (key, model)
    return session.loaded[1]


def _check_settings(model: Any, adapter: str, config: PeftConfig) -> None:
    """Raises ConfigurationError for an adapter that was trained on another model, or whose kind needs more of base
    weights than products. Changes the config of a MiCA adapter, so that loading it does not read the base weight."""
    remedy = "change base_model_name_or_path in its adapter_config.json"
    check_base_name(adapter, config.base_model_name_or_path, (str(model.name_or_path or ""),), remedy)
    check_loadable(adapter, config)
    if getattr(config, "init_lora_weights", None) == "mica":  # it keeps B as it starts, and reads the weight for that
        config.init_lora_weights = True


@contextlib.contextmanager
def no_compiler() -> Iterator[None]:
    """Keeps PEFT from compiling BOFT's CUDA code, which it tries for every layer; BOFT then computes with torch.

    Callers must be inside `loading`.
    """
    before, boft._FBD_CUDA = boft._FBD_CUDA, False
    try:
        yield
    finally:
        boft._FBD_CUDA = before


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


def _adapter_key(adapter: str | Path | None) -> tuple[str, int] | None:
    if adapter is None:
        return None
    weights = adapter_folder(adapter) / "adapter_model.safetensors"
    if not weights.is_file():
        raise ConfigurationError(f"{adapter} holds no adapter_model.safetensors: is it an adapter folder?")
    return str(Path(adapter).resolve()), weights.stat().st_mtime_ns


def virtual_tokens(peft_config: Any) -> int:
    """Returns the number of tokens that an adapter puts before every prompt or training row: 0 except for
    prompt-learning methods.

    Raises:
        ConfigurationError: the number is not a positive whole number.
    """
    if not getattr(peft_config, "is_prompt_learning", False):
        return 0
    return positive("num_virtual_tokens", peft_config.num_virtual_tokens)
