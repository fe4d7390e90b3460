"""This module compiles the patterns of an adapter's settings, and refuses those whose matching could take long.

Guarantees: no pattern of a file is matched in this process unless the time that it takes is bounded. The patterns that
choose layers may be of any form, as PEFT's users write them; such a pattern is matched in a process of its own, which
is ended when it takes too much time or memory.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from typing import Any

from wire.errors import ConfigurationError

MAX_PATTERNS = 4096
"""The most rank or alpha patterns of one adapter: EVA writes one for each linear layer."""
MAX_INTRICATE = 16
"""The most rank or alpha patterns of one adapter that have a quantifier or an alternative. One takes up to 0.4 ms to
match a layer's name of 60 characters; a pattern without them takes microseconds."""
MAX_ALTERNATIVES = 32
"""The most `|` in one pattern."""
MATCHING_S = 2
"""The seconds of processor time that one pattern may take for all names of a model. The longest pattern that is known
to be in use, for 2,000 names, takes 0.1 s."""
WAIT_S = 20
"""The seconds after which the process that matches a pattern is ended, however busy the machine is."""
_MATCHING_BYTES = 512 << 20
_PLAIN = re.compile(r"(?:[A-Za-z0-9_-]|\\?\.)*")
"""Finds patterns without repetitions and alternatives, which take microseconds."""
_MATCHER = """
import json, re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1]) + 1))
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
pattern, texts = json.load(sys.stdin)
compiled = re.compile(pattern)
json.dump([at for at, text in enumerate(texts) if compiled.fullmatch(text)], sys.stdout)
"""
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


def is_plain(pattern: str) -> bool:
    """Returns whether a pattern has neither repetitions nor alternatives, so that it takes microseconds to match."""
    return _PLAIN.fullmatch(pattern) is not None


def fully_matched(name: str, setting: str, pattern: str, texts: Collection[str]) -> frozenset[str]:
    """Returns the texts that a pattern of any form matches from beginning to end, as `re.fullmatch` does.

    Args:
        name: the adapter's name, for error messages.
        setting: the setting that holds the pattern, for error messages.
        pattern: the pattern.
        texts: the names of modules.

    Raises:
        ConfigurationError: the pattern is invalid, or matching takes more than `MATCHING_S` seconds or 512 MiB.
    """
    if is_plain(pattern):
        compiled = re.compile(pattern)
        return frozenset(text for text in texts if compiled.fullmatch(text))
    found = _matched_elsewhere(pattern, tuple(texts))
    if found is None:
        raise ConfigurationError(
            f"the adapter {name} has a pattern in {setting} that is invalid or takes more than {MATCHING_S} s to "
            "match: list the names of the layers in its place"
        )
    return found


@functools.lru_cache(maxsize=256)  # adapters of one origin share their patterns; a failure is remembered as well
def _matched_elsewhere(pattern: str, texts: tuple[str, ...]) -> frozenset[str] | None:
    """Returns what `fully_matched` returns, or None if it would raise. A process of its own matches the pattern."""
    command = [sys.executable, "-I", "-S", "-c", _MATCHER, str(MATCHING_S), str(_MATCHING_BYTES)]
    try:
        done = subprocess.run(
            command, input=json.dumps([pattern, texts]).encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=WAIT_S, env={}, check=True,
        )  # fmt: skip
        return frozenset(texts[at] for at in json.loads(done.stdout))
    except (subprocess.SubprocessError, OSError, ValueError):
        return None
