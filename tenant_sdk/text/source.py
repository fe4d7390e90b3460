"""This module loads a session's tokenizer (that of the verified bundle, one that the tenant names, or the provider's)
and finds the tokens that end an answer.

If no trusted generation settings name the stop tokens, which end an answer, they are found from the tokenizer. Special
tokens have no text in an answer, but may be named as a stop string. An unverified provider may choose a vocabulary or a
pattern that fails on texts of the provider's choice. The tokenizers library then raises a bare `Exception`, or, after a
panic in Rust, an exception that is no subclass of `Exception`; `surviving` turns either into one typed error.

Guarantees: a tokenizer that the tenant names maps every token to the same number as the provider's tokenizer, so that
the model reads the text that the tenant means. If the tenant names none and does not verify, the provider's tokenizer
is used within bounds: it consists of known components only (`components.py`), its chat template never sees text
(`template.py`), and its class derives from transformers' plain fast tokenizer, whatever class the bundle names. Stop
tokens that no trusted settings name are the tokenizer's end-of-sequence token and the special token that the chat
template puts after an assistant's turn. The generation settings of an unverified provider are never read.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from runtime.loading import loading
from tenant_sdk.text.components import REMEDY, check_components
from tenant_sdk.text.template import BlindTemplates
from wire.built_in import BuiltIn
from wire.errors import ConfigurationError, VeilbaseError

_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "VeilbaseProbeEnd"}]


def _stop_ids_of(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids of the stop tokens in ascending order; an empty tuple if the tokenizer and its template name no
    stop token.

    Args:
        tokenizer: a transformers tokenizer, with or without a chat template.
    """
    found = {tokenizer.eos_token_id, _turn_end(tokenizer)}
    return tuple(sorted(token for token in found if isinstance(token, int)))


def special_texts(tokenizer: Any) -> dict[int, str]:
    """Returns the texts of the special tokens by id; an answer is decoded without them.

    Args:
        tokenizer: a transformers tokenizer.
    """
    added = tokenizer.added_tokens_decoder.items()
    found = {int(number): str(token) for number, token in added if token.special and str(token)}
    pairs = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return found | {int(number): str(token) for number, token in pairs if str(token)}


def _turn_end(tokenizer: Any) -> int | None:
    """Returns the id of the special token with which the template ends an assistant's turn; None if there is none."""
    if not tokenizer.chat_template:
        return None
    try:
        text = str(tokenizer.apply_chat_template(_PROBE, tokenize=False))
    except Exception:  # noqa: BLE001 - a template may raise anything: then it names no stop token
        return None
    rest = text.rpartition(_PROBE[1]["content"])[2].lstrip()
    ends = [(len(text), number) for number, text in special_texts(tokenizer).items() if rest.startswith(text)]
    return max(ends)[1] if ends else None


class TokenizerFailed(ConfigurationError):
    """Says that the tokenizer failed on a text. The message does not quote the text."""


@contextlib.contextmanager
def surviving(what: str, *passing: type[BaseException]) -> Iterator[None]:
    """Turns errors that a tokenizer raises inside the context into `TokenizerFailed`.

    Errors of this project, Ctrl-C and the end of the program are passed on unchanged.

    Args:
        what: the name of the text for the error message, such as a line of a data set; never the text itself.
        passing: further error classes that are passed on unchanged.

    Raises:
        TokenizerFailed: the tokenizer raised any other error.
    """
    try:
        yield
    except BaseException as exc:
        if isinstance(exc, (VeilbaseError, KeyboardInterrupt, SystemExit, GeneratorExit, *passing)):
            raise
        raise TokenizerFailed(f"{what}: the tokenizer failed ({type(exc).__name__})") from None


class SafeDecoding:
    """Decodes tokens for a streamer; after a failure it returns no more text, and `check` raises the failure's error.

    If decoding raised the error at once, an answer of fixed length would end early, at a token that depends on the
    text.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Wraps a transformers tokenizer, which has not failed yet."""
        self._tokenizer = tokenizer
        self.failed: TokenizerFailed | None = None

    def decode(self, token_ids: Any, **options: Any) -> str:
        """Returns the text of the tokens; from the first failure on, returns an empty string."""
        if self.failed is not None:
            return ""
        try:
            with surviving("the answer"):
                return str(self._tokenizer.decode(token_ids, **options))
        except TokenizerFailed as exc:
            self.failed = exc
            return ""

    def check(self) -> None:
        """Raises TokenizerFailed if a text could not be decoded."""
        if self.failed is not None:
            raise self.failed


Origin = Literal["verified", "named", "provider"]
"""The source of the tokenizer, one of `verified` (a bundle that equals the checkpoint of `verify`), `named` (the
tenant's `tokenizer`) and `provider` (an unverified provider's bundle)."""


@dataclass(frozen=True)
class LocalSource:
    """Locates a checkpoint or a tokenizer of the tenant's on this machine.

    Attributes:
        name: the name to show in messages.
        folder: the folder that holds the files.
        gguf_file: the name of a GGUF file in `folder`; None if `folder` holds Hugging Face's own files.
        known: the built-in model that the GGUF file has to be; None if any file will do.
    """

    name: str
    folder: Path
    gguf_file: str | None = None
    known: BuiltIn | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[Path]:
        """Yields the folder to load from, which stays as it is until the end. If the name is a built-in one, this is a
        folder with a copy of the bytes that were checked.

        Raises:
            ConfigurationError: the file of a built-in model is not the known one, or cannot be read or copied.
        """
        if self.known is None or self.gguf_file is None:
            yield self.folder
            return
        with self.known.checked_copy(self.folder / self.gguf_file) as folder:
            yield folder


@dataclass(frozen=True)
class TenantText:
    """Holds the tokenizer of a session and the settings that belong to it.

    Attributes:
        tokenizer: a transformers tokenizer.
        origin: the source of the tokenizer, see `Origin`.
        stop_ids: the ids of the tokens that end an answer.
        settings: the GenerationConfig of a trusted source, or None if there is none.
    """

    tokenizer: Any
    origin: Origin
    stop_ids: tuple[int, ...]
    settings: Any = None


class ProviderTokenizer(BlindTemplates, PreTrainedTokenizerFast):  # type: ignore[misc]
    """Tokenizes as the provider's bundle says, and renders the provider's chat template without the text."""


# `save_pretrained` writes this name into the tokenizer's config, and stock transformers has to find a class by it.
ProviderTokenizer.__name__ = PreTrainedTokenizerFast.__name__

_SETTINGS = (
    *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"),
    *("extra_special_tokens", "additional_special_tokens", "model_max_length", "model_input_names"),
    *("padding_side", "clean_up_tokenization_spaces", "chat_template"),
)
"""The entries of an unverified provider's tokenizer_config.json that are used. Entries about a special token at the
start of a text are not needed: the post-processor in tokenizer.json adds this token."""
_TYPES: dict[str, Any] = {"model_max_length": (int, float), "padding_side": str, "clean_up_tokenization_spaces": bool}
_TOKEN_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")


def verified_text(folder: Path) -> TenantText:
    """Returns the bundle's tokenizer and generation settings, which were compared with the trusted checkpoint.

    Raises:
        ConfigurationError: the tokenizer cannot be loaded.
    """
    tokenizer = _load(LocalSource("", folder), "the provider's bundle holds no usable tokenizer")
    return _text(tokenizer, "verified", _settings_in(folder))


def named_text(source: LocalSource, folder: Path) -> TenantText:
    """Returns the tokenizer that the tenant names, with the generation settings of its folder.

    Args:
        source: the result of `tenant_sdk.trust.checkpoint.find_tokenizer`.
        folder: the bundle's folder.

    Raises:
        ConfigurationError: the tokenizer cannot be read, or is a built-in one whose file is not the known one, or the
            bundle's tokenizer cannot be read or has another vocabulary. A bundle without a tokenizer is not compared.
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
    """Returns the provider's own tokenizer, which has only allowed components, and whose chat template never sees a
    text.

    Raises:
        ConfigurationError: the bundle has no tokenizer, or its tokenizer cannot be loaded or has a component that is
            not allowed.
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
    """Returns whether a bundle has a tokenizer."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))


def _text(tokenizer: Any, origin: Origin, settings: Any) -> TenantText:
    from_settings = None if settings is None else settings.eos_token_id
    if from_settings is None:
        return TenantText(tokenizer, origin, _stop_ids_of(tokenizer), settings)
    stops = from_settings if isinstance(from_settings, list) else [from_settings]
    return TenantText(tokenizer, origin, tuple(sorted(set(stops))), settings)


def _load(source: LocalSource, failure: str) -> Any:
    options = {} if source.gguf_file is None else {"gguf_file": source.gguf_file}
    with source.opened() as folder:
        try:
            with loading():
                return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
        except Exception as exc:  # noqa: BLE001 - a damaged file makes transformers and tokenizers raise anything
            raise ConfigurationError(f"{failure} ({type(exc).__name__})") from None


def _settings_in(folder: Path) -> Any | None:
    """Returns the generation settings in a trusted folder; None if there are none or they cannot be read."""
    if not (folder / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception:  # noqa: BLE001 - settings are optional, and transformers may refuse them in many ways
        return None


def _tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Returns the used entries of tokenizer_config.json, and the chat template, as keyword arguments of a tokenizer."""
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
    """Returns a setting in which an `AddedToken` replaces each token that the file describes by a dict, as in
    transformers' `from_pretrained`."""
    if isinstance(value, dict) and isinstance(value.get("content"), str):
        flags = {name: value[name] for name in _TOKEN_FLAGS if isinstance(value.get(name), bool)}
        return AddedToken(value["content"], special=True, **flags)
    if isinstance(value, list):
        return [_with_tokens(item) for item in value]
    return value


def _bundle_vocabulary(folder: Path) -> dict[str, int] | None:
    """Returns the bundle's vocabulary, from token to number; None if the bundle has no tokenizer. Raises
    ConfigurationError if the vocabulary cannot be read."""
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
    """Refuses a tokenizer with token numbers for which the model has no embedding.

    Such a number would raise an error in the middle of a run, which the provider would see.

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
