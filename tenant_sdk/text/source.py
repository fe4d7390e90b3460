"""The tokenizer of a session: checked with the checkpoint, named by the tenant, or the provider's own within bounds.

Guarantees: a tokenizer that the tenant names maps every token as the provider's does, so that the model reads what the
tenant means. Where nothing else is named, the provider's own is used: it is made of known components only
(`components.py`), its template never sees text (`template.py`), and its class is transformers' plain one whatever the
bundle says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tenant_sdk.text.components import REMEDY, check_components
from tenant_sdk.text.stops import stop_ids_of
from tenant_sdk.text.template import BlindTemplates
from wire.errors import ConfigurationError
from wire.loading import loading

Origin = Literal["verified", "named", "provider"]
"""The party that decides how text becomes rows: the checkpoint of `verify`, the tenant's `tokenizer`, or the
provider."""


@dataclass(frozen=True)
class LocalSource:
    """The place of a checkpoint or a tokenizer that the tenant names.

    Attributes:
        name: what the tenant called it.
        folder: a folder of this machine.
        gguf_file: a file in that folder; None where Hugging Face's own files are read.
    """

    name: str
    folder: Path
    gguf_file: str | None = None


@dataclass(frozen=True)
class TenantText:
    """What a session uses to turn text into tokens and tokens into text.

    Attributes:
        tokenizer: a transformers tokenizer.
        origin: the party that chose the tokenizer, see `Origin`.
        stop_ids: tokens that end an answer.
        settings: generation settings of the trusted source, or None where there are none.
    """

    tokenizer: Any
    origin: Origin
    stop_ids: tuple[int, ...]
    settings: Any = None


class ProviderTokenizer(BlindTemplates, PreTrainedTokenizerFast):  # type: ignore[misc]
    """A provider's tokenizer whose chat template does not see text."""


# `save_pretrained` writes this name into the tokenizer's config, and stock transformers has to find a class by it.
ProviderTokenizer.__name__ = PreTrainedTokenizerFast.__name__

_SETTINGS = (
    *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"),
    *("extra_special_tokens", "additional_special_tokens", "model_max_length", "model_input_names"),
    *("padding_side", "clean_up_tokenization_spaces", "chat_template"),
)
"""The entries of an unverified provider's tokenizer_config.json that are used. Whether a text begins with a special
token is decided in tokenizer.json, by its post-processor."""
_TYPES: dict[str, Any] = {"model_max_length": (int, float), "padding_side": str, "clean_up_tokenization_spaces": bool}
_TOKEN_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")


def verified_text(folder: Path) -> TenantText:
    """Returns the bundle's tokenizer and generation settings, which were compared with the trusted checkpoint."""
    tokenizer = _load(LocalSource("", folder), "the provider's bundle holds no usable tokenizer")
    return _text(tokenizer, "verified", _settings_in(folder))


def named_text(source: LocalSource, folder: Path) -> TenantText:
    """Returns the tokenizer that the tenant names.

    Args:
        source: the result of `tenant_sdk.trust.checkpoint.find_tokenizer`.
        folder: the bundle's folder.

    Raises:
        ConfigurationError: the tokenizer cannot be read, or maps a token differently from the bundle's.
    """
    tokenizer = _load(source, f"the tokenizer {source.name[:200]!r} cannot be read")
    theirs = _bundle_vocabulary(folder)
    if theirs is not None and theirs != tokenizer.get_vocab():
        raise ConfigurationError(
            f"the tokenizer {source.name[:200]!r} does not fit the provider's model: it maps tokens to other numbers "
            "than the provider's tokenizer does"
        )
    return _text(tokenizer, "named", None if source.gguf_file else _settings_in(source.folder))


def provider_text(folder: Path) -> TenantText:
    """Returns the provider's own tokenizer, held within bounds.

    Raises:
        ConfigurationError: the bundle has no tokenizer, or one with components that could read the text.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigurationError(f"the provider's bundle holds no usable tokenizer (no tokenizer.json): {REMEDY}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError
        check_components(content)
        with loading():
            tokenizer = ProviderTokenizer(
                tokenizer_object=Tokenizer.from_str(json.dumps(content)), **_tokenizer_settings(folder)
            )
    except ConfigurationError:
        raise
    except Exception as exc:  # noqa: BLE001 - the tokenizers library raises bare Exception
        raise ConfigurationError(f"the provider's bundle holds no usable tokenizer ({type(exc).__name__})") from None
    return _text(tokenizer, "provider", None)


def has_tokenizer(folder: Path) -> bool:
    """Whether a bundle has a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))


def _text(tokenizer: Any, origin: Origin, settings: Any) -> TenantText:
    from_settings = None if settings is None else settings.eos_token_id
    if from_settings is None:
        return TenantText(tokenizer, origin, stop_ids_of(tokenizer), settings)
    stops = from_settings if isinstance(from_settings, list) else [from_settings]
    return TenantText(tokenizer, origin, tuple(sorted(set(stops))), settings)


def _load(source: LocalSource, failure: str) -> Any:
    options = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    try:
        with loading():
            return AutoTokenizer.from_pretrained(
                source.folder, local_files_only=True, trust_remote_code=False, **options
            )
    except Exception as exc:  # noqa: BLE001 - a damaged file makes transformers and tokenizers raise anything
        raise ConfigurationError(f"{failure} ({type(exc).__name__})") from None


def _settings_in(folder: Path) -> Any | None:
    """Returns the generation settings in a trusted folder; None where it has none that can be read."""
    if not (folder / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception:  # noqa: BLE001 - settings are optional, and transformers may refuse them in many ways
        return None


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Returns the entries of tokenizer_config.json that are used, and the chat template."""
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    settings = {key: _with_tokens(content[key]) for key in _SETTINGS if content.get(key) is not None}
    for key, types in _TYPES.items():
        if not isinstance(settings.get(key), types):
            settings.pop(key, None)
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    elif isinstance(settings.get("chat_template"), list):  # older releases write several templates, each with a name
        settings["chat_template"] = {entry["name"]: entry["template"] for entry in settings["chat_template"]}
    return settings


def _with_tokens(value: Any) -> Any:
    """Returns a setting whose tokens are objects, as `from_pretrained` makes them from a file's entries."""
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {name: value[name] for name in _TOKEN_FLAGS if isinstance(value.get(name), bool)}
        return AddedToken(value["content"], special=True, **flags)
    if isinstance(value, list):
        return [_with_tokens(item) for item in value]
    return value


def _bundle_vocabulary(folder: Path) -> dict[str, int] | None:
    """Returns each token's number as the provider's model has it; None where the bundle has no tokenizer."""
    try:
        if (folder / "tokenizer.json").is_file():
            backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
            return dict(backend.get_vocab(with_added_tokens=True))
        if (folder / "vocab.json").is_file():
            return dict(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    except Exception as exc:  # noqa: BLE001 - the tokenizers library raises bare Exception
        raise ConfigurationError(
            f"the provider's bundle holds a tokenizer that cannot be compared with yours ({type(exc).__name__})"
        ) from None
    return None


def check_fits_embedding(tokenizer: Any, num_embeddings: int) -> None:
    """Refuses token numbers for which the model has no embedding: such a token would end a run whose text holds it.

    Args:
        tokenizer: the session's tokenizer.
        num_embeddings: the number of embeddings of the model as it was built, whatever its config says.

    Raises:
        ConfigurationError: a token number is too large; the text names both numbers.
    """
    largest = max([*tokenizer.get_vocab().values(), *tokenizer.all_special_ids], default=0)
    if largest >= num_embeddings:
        raise ConfigurationError(
            f"the tokenizer numbers tokens up to {largest}, the provider's model has {num_embeddings}: they do not fit "
            "together"
        )
