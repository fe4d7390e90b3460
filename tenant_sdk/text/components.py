"""This module checks that a provider's tokenizer.json consists of allowed components only.

Guarantees: a tokenizer that passes turns a text of n UTF-8 bytes into at most c·n tokens plus a constant; Unicode's
tables fix the factor c. Such a tokenizer has no random part and no rule that replaces text by a text of the provider's
choice, and no component that may lengthen a text occurs twice. Not guaranteed: that the vocabulary is honest, or that
the tokenizer accepts every text (`source.py` handles failures). The vocabulary decides how many tokens a text has.
A provider that guesses some texts may therefore still learn from a row count which of them was sent
(docs/security-evaluation.md, "Row counts").
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from wire.errors import ConfigurationError

REMEDY = "name a tokenizer that you trust (tokenizer=, --tokenizer), or a checkpoint (verify=, --verify)"

_MAX_DEPTH = 4
"""The most levels of `Sequence` inside `Sequence`; published tokenizers have one or two."""
_MAX_AFFIX = 8
"""The most characters of an affix such as `##` or `</w>`, which marks the inside or the end of a word in a vocabulary.
For an unknown word the tokenizer emits the affix's characters as tokens, so that a long affix would add many rows."""
_MAX_PATTERN = 2000
_MAX_REPEATS = 4
"""The most unbounded repetitions in one branch of a regular expression. Published patterns have at most three. Each
repetition multiplies the time that matching may take by the length of the text."""
_CUTS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
"""The allowed behaviours of a Split for a separator. The behaviour `Removed` is not allowed, since it would delete text
of the provider's choice."""
_MAX_CONSTANT_TOKENS = 8
"""The most tokens that a post-processor may add to every text; those of published tokenizers add at most two."""

_SPACE = "\u2581"
"""SentencePiece's sign for a space."""
_REPLACEMENTS = (
    ({"String": " "}, _SPACE),
    ({"Regex": " {2,}"}, " "),
    ({"Regex": " {2,}"}, _SPACE),
)
"""The allowed (pattern, replacement) pairs, which are those of SentencePiece models. Another pair could replace one
character by a hundred tokens."""


def _any(_: Mapping[str, Any]) -> bool:
    return True


def _is_known_replacement(part: Mapping[str, Any]) -> bool:
    return any(part.get("pattern") == pattern and part.get("content") == text for pattern, text in _REPLACEMENTS)


def _is_sentencepiece_space(part: Mapping[str, Any]) -> bool:
    return part.get("replacement") == _SPACE and part.get("prepend_scheme", "always") in ("always", "first", "never")


def _is_known_cut(part: Mapping[str, Any]) -> bool:
    """Returns whether a Split only cuts text, with a pattern whose matching time is bounded."""
    pattern = part.get("pattern")
    if part.get("behavior") not in _CUTS or not isinstance(pattern, dict) or len(pattern) != 1:
        return False
    text = pattern.get("Regex", pattern.get("String"))
    if not isinstance(text, str) or len(text) > _MAX_PATTERN:
        return False
    return "String" in pattern or _is_plain_pattern(text)


def _is_plain_pattern(pattern: str) -> bool:
    """Returns whether a regular expression has no look-around except the one in GPT-2's pattern, no back-reference, no
    repeated group, and at most `_MAX_REPEATS` unbounded repetitions in each branch."""
    bare = re.sub(r"\\[pPx]\{[^}]*\}|\\.|\[(?:\\.|\[:[^\]]*:\]|[^\]\\])*\]", "a", pattern.replace(r"(?!\S)", ""))
    if re.search(r"\(\?(?!:|i:)", bare) or re.search(r"\)\s*[*+{]", bare) or re.search(r"\\[1-9gk]", pattern):
        return False
    return all(len(re.findall(r"[*+]|\{\d*,\}", branch)) <= _MAX_REPEATS for branch in bare.split("|"))


def _is_short(part: Mapping[str, Any], *affixes: str) -> bool:
    return all(len(part.get(name) or "") <= _MAX_AFFIX for name in affixes)


def _is_bounded_bpe(part: Mapping[str, Any]) -> bool:
    # with dropout, the split of a text into tokens would be random
    return not part.get("dropout") and _is_short(part, "continuing_subword_prefix", "end_of_word_suffix", "unk_token")


def _strips_at_most_one(part: Mapping[str, Any]) -> bool:
    """Returns whether a decoder strips at most one character; a decoder that strips more fails on some texts."""
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
"""The checks that components' settings must pass, by top-level entry of tokenizer.json and by component
type."""

_ONCE = {
    "normalizer": ("NFC", "NFD", "NFKC", "NFKD", "ByteLevel", "BertNormalizer", "Prepend", "Replace", "Nmt"),
    "pre_tokenizer": ("ByteLevel", "Metaspace"),
    "post_processor": ("TemplateProcessing", "BertProcessing", "RobertaProcessing"),
}  # fmt: skip
"""The components that may lengthen a text, by top-level entry of tokenizer.json; each component may therefore
occur only once."""

_CHILDREN = {
    "normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors", "decoder": "decoders"
}  # fmt: skip


def check_components(content: Mapping[str, Any]) -> None:
    """Refuses a tokenizer.json with a component that lets the provider choose how a text becomes rows.

    Args:
        content: the parsed file.

    Raises:
        ConfigurationError: a component is not allowed; the text names the entry, and the component if its name is a
            short alphanumeric word.
    """
    for entry, rules in _ALLOWED.items():
        kinds = _check_part(entry, content.get(entry), rules, 0)
        repeated = [kind for kind in _ONCE.get(entry, ()) if kinds.count(kind) > 1]
        if repeated:
            raise _refused(entry, f"{repeated[0]} twice")
    for setting in ("truncation", "padding"):
        if content.get(setting) is not None:
            raise _refused(setting, "")
    unknown = set(content) - set(_ALLOWED) - {"version", "truncation", "padding", "added_tokens"}
    if unknown:
        raise _refused("a setting that tokenizers of this release do not have", "")


def _check_part(entry: str, part: Any, rules: _Rules, depth: int) -> list[str]:
    """Checks all components in one top-level entry of tokenizer.json, and returns the components' types."""
    if part is None and entry != "model":
        return []
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "Sequence" and entry in _CHILDREN and depth < _MAX_DEPTH:
        children = part.get(_CHILDREN[entry])
        if not isinstance(children, list):
            raise _refused(entry, "Sequence")
        return [kind for child in children for kind in _check_part(entry, child, rules, depth + 1)]
    rule = rules.get(kind) if isinstance(kind, str) else None
    if rule is None or not rule(part):
        raise _refused(entry, str(kind) if isinstance(kind, str) and kind.isalnum() and len(kind) < 40 else "")
    return [str(kind)]


def _refused(entry: str, kind: str) -> ConfigurationError:
    shown = f"{entry} {kind}".strip()
    return ConfigurationError(
        f"the provider's tokenizer has a component through which it could read your text by row counts ({shown}): "
        f"{REMEDY}"
    )
