"""The parts that a provider's tokenizer.json may be made of.

Guarantees: a tokenizer that passes turns a text of n UTF-8 bytes into at most c·n tokens plus a constant, where c is
fixed by Unicode's own tables; nothing in it is random; it holds no rule that replaces text by text of the provider's
choice, and each component comes once. Not guaranteed: that its vocabulary is honest, or that it takes every text
(`failures.py` handles the texts that it fails on). A vocabulary alone decides how many tokens each text has, so that
number may still tell which of the texts that the provider guesses it is (docs/security-evaluation.md, "Row counts").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from wire.errors import ConfigurationError

REMEDY = "name a tokenizer that you trust (tokenizer=, --tokenizer), or a checkpoint (verify=, --verify)"

_MAX_DEPTH = 4
"""Levels of `Sequence` within `Sequence` that are allowed; real tokenizers have one or two."""
_MAX_AFFIX = 8
"""The most characters in an affix that marks a word's inside or end in a vocabulary, such as `##` or `</w>`; the
tokenizer writes the affix out in tokens for words that it does not know."""
_MAX_PATTERN = 2000
_MAX_REPEATS = 4
"""Unbounded repetitions that one branch of a pattern may have: published patterns have at most three, and each
multiplies the time that a pattern may take by the text's length."""
_CUTS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
"""What a Split may do with a separator. `Removed` would delete text of the provider's choice."""
_MAX_CONSTANT_TOKENS = 8
"""The most tokens that a post-processor may add to every text; real ones add at most two."""

_SPACE = "\u2581"
"""SentencePiece's sign for a space."""
_REPLACEMENTS = (
    ({"String": " "}, _SPACE),
    ({"Regex": " {2,}"}, " "),
    ({"Regex": " {2,}"}, _SPACE),
)
"""The replacements that SentencePiece models make. Any other could spell a character out as a hundred tokens."""


def _any(_: Mapping[str, Any]) -> bool:
    return True


def _is_known_replacement(part: Mapping[str, Any]) -> bool:
    return any(part.get("pattern") == pattern and part.get("content") == text for pattern, text in _REPLACEMENTS)


def _is_sentencepiece_space(part: Mapping[str, Any]) -> bool:
    return part.get("replacement") == _SPACE and part.get("prepend_scheme", "always") in ("always", "first", "never")


def _is_known_cut(part: Mapping[str, Any]) -> bool:
    """Whether a Split has a pattern that only cuts text, and does so in bounded time."""
    pattern = part.get("pattern")
    if part.get("behavior") not in _CUTS or not isinstance(pattern, dict) or len(pattern) != 1:
        return False
    text = pattern.get("Regex", pattern.get("String"))
    if not isinstance(text, str) or len(text) > _MAX_PATTERN:
        return False
    return "String" in pattern or _is_plain_pattern(text)


def _is_plain_pattern(pattern: str) -> bool:
    """Whether a regular expression has no look-around but GPT-2's, no back-reference, and no repeated group."""
    bare = re.sub(r"\\[pPx]\{[^}]*\}|\\.|\[(?:\\.|\[:[^\]]*:\]|[^\]\\])*\]", "a", pattern.replace(r"(?!\S)", ""))
    if re.search(r"\(\?(?!:|i:)", bare) or re.search(r"\)\s*[*+{]", bare) or re.search(r"\\[1-9gk]", pattern):
        return False
    return all(len(re.findall(r"[*+]|\{\d*,\}", branch)) <= _MAX_REPEATS for branch in bare.split("|"))


def _is_short(part: Mapping[str, Any], *affixes: str) -> bool:
    return all(len(part.get(name) or "") <= _MAX_AFFIX for name in affixes)


def _is_bounded_bpe(part: Mapping[str, Any]) -> bool:
    # with dropout, how a text is cut into tokens would be random
    return not part.get("dropout") and _is_short(part, "continuing_subword_prefix", "end_of_word_suffix", "unk_token")


def _strips_at_most_one(part: Mapping[str, Any]) -> bool:
    """Whether a decoder strips at most one character: one that strips more panics on some texts."""
    return all(part.get(name) in (0, 1) for name in ("start", "stop"))


def _replaces_a_string(part: Mapping[str, Any]) -> bool:
    pattern = part.get("pattern")
    return isinstance(pattern, dict) and set(pattern) == {"String"}


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
        "UnicodeScripts": _any,
        "Punctuation": lambda part: part.get("behavior", "Isolated") in _CUTS,
        "Split": _is_known_cut,
        "Metaspace": _is_sentencepiece_space,
    },
    "model": {
        "BPE": _is_bounded_bpe,
        "WordPiece": lambda part: _is_short(part, "continuing_subword_prefix"),
        **dict.fromkeys(("WordLevel", "Unigram"), _any),
    },
    "post_processor": {
        **dict.fromkeys(("ByteLevel", "BertProcessing", "RobertaProcessing"), _any),
        "TemplateProcessing": _adds_few_tokens,
    },
    "decoder": {  # decoded text stays with the tenant
        **dict.fromkeys(("ByteLevel", "WordPiece", "BPEDecoder", "ByteFallback", "Fuse", "Metaspace"), _any),
        "Replace": _replaces_a_string,
        "Strip": _strips_at_most_one,
    },
}
"""For each slot of tokenizer.json and each type of component: the check that its settings have to pass."""

_ONCE = {
    "normalizer": ("NFC", "NFD", "NFKC", "NFKD", "ByteLevel", "BertNormalizer", "Prepend", "Replace", "Nmt"),
    "pre_tokenizer": ("ByteLevel", "Metaspace"),
    "post_processor": ("TemplateProcessing", "BertProcessing", "RobertaProcessing"),
}  # fmt: skip
"""Components that may lengthen a text, and so may not be repeated."""

_CHILDREN = {
    "normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors", "decoder": "decoders"
}  # fmt: skip


def check_components(content: Mapping[str, Any]) -> None:
    """Refuses a tokenizer.json with a component that lets the provider choose how a text becomes rows.

    Args:
        content: the parsed file.

    Raises:
        ConfigurationError: a component is not allowed; the text names the slot and, where it is one of the library's
            own names, the component.
    """
    for slot, rules in _ALLOWED.items():
        kinds = _check_part(slot, content.get(slot), rules, 0)
        repeated = [kind for kind in _ONCE.get(slot, ()) if kinds.count(kind) > 1]
        if repeated:
            raise _refused(slot, f"{repeated[0]} twice")
    for setting in ("truncation", "padding"):
        if content.get(setting) is not None:
            raise _refused(setting, "")
    unknown = set(content) - set(_ALLOWED) - {"version", "truncation", "padding", "added_tokens"}
    if unknown:
        raise _refused("a setting that tokenizers of this release do not have", "")


def _check_part(slot: str, part: Any, rules: _Rules, depth: int) -> list[str]:
    """Checks each component of one slot and returns their types."""
    if part is None and slot != "model":
        return []
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "Sequence" and slot in _CHILDREN and depth < _MAX_DEPTH:
        children = part.get(_CHILDREN[slot])
        if not isinstance(children, list):
            raise _refused(slot, "Sequence")
        return [kind for child in children for kind in _check_part(slot, child, rules, depth + 1)]
    rule = rules.get(kind) if isinstance(kind, str) else None
    if rule is None or not rule(part):
        raise _refused(slot, str(kind) if isinstance(kind, str) and kind.isalnum() and len(kind) < 40 else "")
    return [str(kind)]


def _refused(slot: str, kind: str) -> ConfigurationError:
    shown = f"{slot} {kind}".strip()
    return ConfigurationError(
        f"the provider's tokenizer has a component through which it could read your text by row counts ({shown}): "
        f"{REMEDY}"
    )
