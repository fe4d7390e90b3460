"""The parts that a provider's tokenizer.json may be made of.

Guarantees: a tokenizer that passes turns a text of n UTF-8 bytes into at most a small multiple of n tokens, fixed by
Unicode, plus a constant; nothing in it is random; it holds no rule that replaces text by longer text of the
provider's choice. Not guaranteed: that its vocabulary is honest. A vocabulary alone decides how many tokens
each text has, so the number of tokens may still tell a little about it (docs/security-evaluation.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wire.errors import ConfigurationError

REMEDY = "name a tokenizer that you trust (tokenizer='path or hub id'), or a checkpoint (verify=)"

_MAX_DEPTH = 4
"""Levels of `Sequence` within `Sequence`; real tokenizers have one or two."""
_MAX_CONSTANT_TOKENS = 8
"""Tokens that a post-processor may add to every text; real ones add at most two."""

_SPACE = "\u2581"
"""SentencePiece's sign for a space."""
_REPLACEMENTS = (
    ({"String": " "}, _SPACE),
    ({"Regex": " {2,}"}, " "),
    ({"Regex": " {2,}"}, _SPACE),
)
"""Replacements of SentencePiece models. Any other could spell a character out as a hundred tokens."""


def _any(_: Mapping[str, Any]) -> bool:
    return True


def _is_known_replacement(part: Mapping[str, Any]) -> bool:
    return any(part.get("pattern") == pattern and part.get("content") == text for pattern, text in _REPLACEMENTS)


def _is_sentencepiece_space(part: Mapping[str, Any]) -> bool:
    return part.get("replacement") == _SPACE and part.get("prepend_scheme", "always") in ("always", "first", "never")


def _adds_few_tokens(part: Mapping[str, Any]) -> bool:
    single, special = part.get("single"), part.get("special_tokens", {})
    if not isinstance(single, list) or not isinstance(special, dict):
        return False
    texts = [piece for piece in single if isinstance(piece, dict) and "Sequence" in piece]
    ids = [token for entry in special.values() if isinstance(entry, dict) for token in entry.get("ids", ())]
    return len(texts) == 1 and len(single) <= _MAX_CONSTANT_TOKENS and len(ids) <= _MAX_CONSTANT_TOKENS


_Rules = Mapping[str, Callable[[Mapping[str, Any]], bool]]

_ALLOWED: Mapping[str, _Rules] = {
    "normalizer": {
        **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents", "Nmt"), _any),
        **dict.fromkeys(("BertNormalizer", "ByteLevel"), _any),
        "Prepend": lambda part: part.get("prepend") == _SPACE,
        "Replace": _is_known_replacement,
    },
    "pre_tokenizer": {
        **dict.fromkeys(("ByteLevel", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits"), _any),
        **dict.fromkeys(("Punctuation", "Split", "UnicodeScripts", "CharDelimiterSplit"), _any),  # these only cut
        "Metaspace": _is_sentencepiece_space,
    },
    "model": {
        "BPE": lambda part: not part.get("dropout"),  # dropout draws how a text is cut
        **dict.fromkeys(("WordPiece", "WordLevel", "Unigram"), _any),
    },
    "post_processor": {
        **dict.fromkeys(("ByteLevel", "BertProcessing", "RobertaProcessing"), _any),
        "TemplateProcessing": _adds_few_tokens,
    },
    "decoder": {  # what is decoded stays with the tenant
        **dict.fromkeys(("ByteLevel", "WordPiece", "BPEDecoder", "ByteFallback", "Fuse"), _any),
        **dict.fromkeys(("Metaspace", "Replace", "Strip"), _any),
    },
}
"""Slot of tokenizer.json: component type: what its settings have to be."""

_CHILDREN = {
    "normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors", "decoder": "decoders"
}  # fmt: skip


def check_components(content: Mapping[str, Any]) -> None:
    """Refuses a tokenizer.json with a component that could turn a text into rows of the provider's choice.

    Args:
        content: the parsed file.

    Raises:
        ConfigurationError: names the slot and, where it is one of the library's own names, the component.
    """
    for slot, rules in _ALLOWED.items():
        _check_part(slot, content.get(slot), rules, 0)
    for setting in ("truncation", "padding"):
        if content.get(setting) is not None:
            raise _refused(setting, "")
    unknown = set(content) - set(_ALLOWED) - {"version", "truncation", "padding", "added_tokens"}
    if unknown:
        raise _refused("a setting that tokenizers of this release do not have", "")


def _check_part(slot: str, part: Any, rules: _Rules, depth: int) -> None:
    if part is None and slot != "model":
        return
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "Sequence" and slot in _CHILDREN and depth < _MAX_DEPTH:
        children = part.get(_CHILDREN[slot])
        if not isinstance(children, list):
            raise _refused(slot, "Sequence")
        for child in children:
            _check_part(slot, child, rules, depth + 1)
        return
    rule = rules.get(kind) if isinstance(kind, str) else None
    if rule is None or not rule(part):
        raise _refused(slot, str(kind) if isinstance(kind, str) and kind.isalnum() and len(kind) < 40 else "")


def _refused(slot: str, kind: str) -> ConfigurationError:
    shown = f"{slot} {kind}".strip()
    return ConfigurationError(
        f"the provider's tokenizer has a component through which it could read your text by row counts ({shown}): "
        f"{REMEDY}"
    )
