"""This module compiles the patterns of an adapter's settings, and refuses those whose matching could take long."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from wire.errors import ConfigurationError

MAX_PATTERNS = 4096
"""The most rank or alpha patterns of one adapter: EVA writes one for each linear layer."""
MAX_INTRICATE = 16
"""The most rank or alpha patterns of one adapter that have a quantifier or an alternative. One takes up to 0.4 ms to
match a layer's name of 60 characters; a pattern without them takes microseconds."""
MAX_ALTERNATIVES = 32
"""The most `|` in one pattern."""
_QUANTIFIERS = re.compile(r"[*+?{]")
_UNBOUNDED = re.compile(r"\)[*+{]|\(\?(?!:)|\\[NUux]|[^ -~]")
"""Finds parts of a pattern that are refused: a repeated group, which may take exponential time; a flag or a look-ahead;
a character beyond printable ASCII, also as an escape (`\\N`, `\\U`, `\\u`, `\\x`), since ranges of such characters take
long to compile."""


def bounded_patterns(
    name: str, config: Mapping[str, Any], setting: str
) -> list[tuple[str, re.Pattern[str], Any]]:  # fmt: skip
    """Returns the entries of a setting that is a table of patterns.

    Args:
        name: the adapter's name, for error messages.
        config: all settings of the adapter.
        setting: the table's name, such as rank_pattern.

    Returns:
        Each pattern as it is written and compiled, and its value, which is not checked.

    Raises:
        ConfigurationError: the setting is no table, the table is too large, or one of its patterns is invalid or could
            take long to match.
    """
    patterns = config.get(setting) or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise ConfigurationError(f"the adapter {name} has a {setting} that is no table of up to {MAX_PATTERNS} entries")
    if sum("|" in pattern or _QUANTIFIERS.search(pattern) is not None for pattern in patterns) > MAX_INTRICATE:
        raise ConfigurationError(
            f"the adapter {name} has a {setting} with more than {MAX_INTRICATE} intricate patterns"
        )
    compiled = [(text, bounded_pattern(text), value) for text, value in patterns.items()]
    if any(pattern is None for _, pattern, _ in compiled):
        raise ConfigurationError(f"the adapter {name} has a {setting} with a pattern that is too intricate")
    return [(text, pattern, value) for text, pattern, value in compiled if pattern is not None]


def bounded_pattern(pattern: str) -> re.Pattern[str] | None:
    """Compiles a pattern that matches as in PEFT (`peft.utils.other.get_pattern_key`); returns None if the pattern is
    invalid, or matching could take long."""
    # In one group that is not repeated, alternatives add to the ways to match and do not multiply them. So matching
    # takes at most the cube of a module name's length, or its square for each alternative.
    num_alternatives = pattern.count("|")
    num_loops = len(_QUANTIFIERS.findall(pattern.replace("(?:", "("))) + (num_alternatives > 0)
    if len(pattern) > 256 or num_loops > 2 or num_alternatives > MAX_ALTERNATIVES:
        return None
    if pattern.count("(") > 1 or _UNBOUNDED.search(pattern) is not None:
        return None
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, RecursionError, OverflowError):
        return None
