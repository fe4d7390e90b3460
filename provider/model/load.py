"""Finds and loads the model that a provider serves.

Guarantees: no code of a model repository runs, since `trust_remote_code` stays off. A built-in name loads the file with
the known SHA-256 and no other (wire/built_in.py). An unknown name is a one-line error. The name that tenants see is
never a path of this machine.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wire.built_in import BUILT_IN, BuiltIn
from wire.errors import ConfigurationError
from wire.model_files import check_config, check_gguf, check_hub_answers, existing, is_cached, is_gguf_name

DEFAULT_MODEL = "smollm2-135m"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """Says where to load a model from.

    Attributes:
        model_id: the public name of the model, which tenants see.
        location: a folder on this machine, or a hub id.
        gguf_file: the name of the GGUF file in that folder; None for a Hugging Face model.
        known: the built-in model that the GGUF file has to be; None if any file will do.
    """

    model_id: str
    location: str
    gguf_file: str | None = None
    known: BuiltIn | None = None


@dataclass
class LoadedModel:
    """Holds a loaded model; `tokenizer` is None if the model has no tokenizer that can be loaded."""

    model_id: str
    model: Any
    tokenizer: Any | None


def resolve(model: str) -> ModelSource:
    """Finds the model that `--model` names: a built-in model, a GGUF file, a Hugging Face folder or a hub id.

    Raises:
        ConfigurationError: `model` is none of these, the built-in model is not installed, the file is no GGUF file, the
            folder has no config.json or a damaged one, or HF_HUB_OFFLINE forbids the download of a hub id that is not
            cached, or there is no way to the hub. Whether a hub id exists is found out by `load`.
    """
    if model in BUILT_IN:
        file = BUILT_IN[model].find()
        return ModelSource(model, str(file.parent), file.name, BUILT_IN[model])
    path = existing(model)
    if path is not None and is_gguf_name(path):
        check_gguf(path)
        return ModelSource(path.stem, str(path.resolve().parent), path.name)
    if path is not None and path.is_dir():
        check_config(path, model)
        return ModelSource(path.resolve().name or "model", str(path.resolve()))
    # A name without an owner is most often a typing mistake, and to look it up takes a minute offline.
    if "/" not in model or _HUB_ID.fullmatch(model) is None or path is not None:
        raise _unknown(model)
    if not _is_offline():
        check_hub_answers("model", model)
    elif not is_cached(model):
        raise _not_cached(model)
    return ModelSource(model, model)


def _is_offline() -> bool:
    """Returns whether HF_HUB_OFFLINE forbids downloads."""
    from huggingface_hub.constants import is_offline_mode

    return bool(is_offline_mode())


def _not_cached(hub_id: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot find the model {hub_id[:200]!r}: it is neither a path nor cached here, and HF_HUB_OFFLINE=1, which "
        "the commands set by default, forbids downloads: name a folder or a GGUF file, or set HF_HUB_OFFLINE=0"
    )


def _unknown(model: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot find the model {model[:200]!r}: expected {', '.join(BUILT_IN)}, a GGUF file, a Hugging Face folder, "
        "or a hub id that is cached here or can be reached"
    )


def load(source: ModelSource) -> LoadedModel:
    """Loads a model and its tokenizer into memory, in eval mode.

    The dtype is float32 for a GGUF file, otherwise the checkpoint's own.

    Raises:
        ConfigurationError: the model is not found, transformers cannot load it as a causal language model, or the file
            of a built-in model is not the known one.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from runtime.loading import loading

    options: dict[str, Any] = {"trust_remote_code": False, "dtype": "auto"}
    if source.gguf_file is not None:
        options.update(gguf_file=source.gguf_file, dtype=torch.float32)
    _hush()
    with ExitStack() as around:
        if source.known is not None and source.gguf_file is not None:
            copy = around.enter_context(source.known.checked_copy(Path(source.location, source.gguf_file)))
            source = replace(source, location=str(copy))
        around.enter_context(loading())
        around.enter_context(_no_gguf_bar())
        if source.gguf_file is not None:
            around.enter_context(_gguf_parsed_once())
        try:
            _check_causal(source, AutoConfig.from_pretrained(source.location, **options))
            model = AutoModelForCausalLM.from_pretrained(source.location, **options)
        except ConfigurationError:
            raise
        except Exception as exc:  # a damaged file may raise any type, such as struct.error
            raise _not_loaded(source, exc) from exc
        tokenizer = _load_tokenizer(source)
    _make_public(model, source.model_id)
    return LoadedModel(source.model_id, model.eval().requires_grad_(False), tokenizer)


def _check_causal(source: ModelSource, config: Any) -> None:
    """Raises ConfigurationError unless a config is of a causal language model. An encoder-decoder is refused, since
    transformers may load only the decoder, which is a different model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(
            f"cannot serve the model {source.model_id!r} of type {str(config.model_type)[:64]!r}: "
            "choose a causal language model (one that AutoModelForCausalLM loads)"
        )


def _load_tokenizer(source: ModelSource) -> Any | None:
    from transformers import AutoTokenizer

    options = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    try:
        return AutoTokenizer.from_pretrained(source.location, trust_remote_code=False, **options)
    except Exception as exc:  # noqa: BLE001 - transformers raises many types; a model serves without a tokenizer too
        _LOGGER.warning("model %s has no tokenizer that can be loaded (%s)", source.model_id, type(exc).__name__)
        return None


def _not_loaded(source: ModelSource, exc: Exception) -> ConfigurationError:
    if source.location == source.model_id and isinstance(exc, OSError):
        return _not_cached(source.model_id) if _is_offline() else _unknown(source.model_id)
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()] or [type(exc).__name__]
    return ConfigurationError(f"cannot load the model {source.model_id!r}: {lines[0][:300]}")


def _make_public(model: Any, model_id: str) -> None:
    """Removes this machine's paths, the GGUF loader's settings and names of code to run from a model's config, since
    tenants receive the config."""
    model.name_or_path = model_id
    config = model.config
    config._name_or_path = model_id
    config.architectures = [type(model).__name__]
    # With a quantization_config, save_pretrained refuses a model that was loaded from GGUF.
    for name in ("quantization_config", "auto_map"):
        if hasattr(config, name):
            delattr(config, name)


@contextmanager
def _gguf_parsed_once() -> Iterator[None]:
    """Makes transformers parse a GGUF file only once while this context is open, which halves the time to load it.

    Otherwise transformers reads the header three times, and the table of tensor names once per module.
    """
    import gguf

    originals = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = (functools.cache(original) for original in originals)
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = originals


def _hush() -> None:
    """Turns off transformers' progress bars and notices for the rest of the process; also turns off the threads of
    tokenizers, unless TOKENIZERS_PARALLELISM is set."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def _no_gguf_bar() -> Iterator[None]:
    """Disables all progress bars of tqdm while this context is open, since the GGUF loader's bar has no switch of its
    own."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    original = tqdm.__init__

    def disabled(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "disable": True})

    tqdm.__init__ = disabled
    try:
        yield
    finally:
        tqdm.__init__ = original
