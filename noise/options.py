"""This module lists the masks and the options of each, and refuses a wrong option before anything is opened for the
mask.

Guarantees: the error names an option that the mask does not have, or whose value is not allowed, and says what was
expected and what was given. Of a value that is long, or neither a number nor a word, only the size or type is shown. A
scheme that is made afterwards can rely on the types and ranges below, so the scheme need not check them again. The
names are those of the makers in noise/registry.py; tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from noise.params import LatticeParameters
from runtime.command_line import nearest
from wire.errors import ConfigurationError

MASKS = ("lattice", "pad", "shares", "gaussian-pool", "off")
DEFAULT_MASK = "lattice"
RING_ONLY = frozenset({"lattice", "pad", "shares"})
PRECISIONS = ("exact", "balanced", "short")
"""The names of how many bits of a masked number cross: `exact`, 32; `balanced`, 24 to 32 as a layer's norms ask for,
and as many of its reply, which is exact for the rows that were sent; `short`, the same and 16 of its reply."""
DEFAULT_PRECISION = "balanced"
_MOST_CHARACTERS = 40
"""The most characters of a word that are shown. A longer word is shown by its length, since users have passed whole
files in place of a name."""
_MOST_BITS = 64
"""The most bits of a number that is shown. A longer number is shown by its length."""
HINTS = ("local", "fetched", "stream")
"""Where the lattice mask's hints come from: the tenant computes and keeps them, the provider's are fetched and kept, or
fetched for each use and not kept."""
_HINT_BITS = (32, 24, 22, 20)
"""The sizes in bits in which noise/hints/file.py can store a number of a hint."""


@dataclass(frozen=True)
class Option:
    """Describes the values that one option may have.

    Attributes:
        expected: a description of the allowed values, which follows the word "is" in an error message.
        fits: a function that returns whether a value is allowed. Its argument may be anything, and it raises no error.
    """

    expected: str
    fits: Callable[[Any], bool]


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _is_parameters(value: Any) -> bool:
    """Tells whether a value is a text, or a parameter set with numbers where numbers belong. Later
    `noise.params.choose` looks up the text as a set's name, or compares the set with the table of accepted sets."""
    if not isinstance(value, LatticeParameters):
        return isinstance(value, str)
    counts = (value.ring_degree, value.rank, value.bits)
    return all(isinstance(each, Integral) for each in counts) and isinstance(value.sigma, Real)


_BYTES = Option("a whole number of bytes from 0", _is_count)
_SWITCH = Option("True or False", lambda value: isinstance(value, bool))
_POSITIVE = Option("a whole number from 1", lambda value: _is_count(value, 1))
_POOL = {
    "pool_bytes": Option(f"{_BYTES.expected}, or None", lambda value: value is None or _is_count(value)),
    "background": _SWITCH,
    "pool": Option("'memory' or 'disk'", lambda value: isinstance(value, str) and value in ("memory", "disk")),
}

_PRECISION = {
    "precision": Option("'exact', 'balanced' or 'short'", lambda value: isinstance(value, str) and value in PRECISIONS)
}

OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "lattice": {
        "parameters": Option("the name of a parameter set or a LatticeParameters of numbers", _is_parameters),
        "allow_toy": _SWITCH,
        "hints": Option(
            f"{', '.join(map(repr, HINTS))} or None",
            lambda value: value is None or (isinstance(value, str) and value in HINTS),
        ),
        "hint_bits": Option("32, 24, 22 or 20", lambda value: _is_count(value) and value in _HINT_BITS),
        "hint_ram_bytes": _BYTES,
        **_POOL,
        **_PRECISION,
    },
    "pad": _POOL | _PRECISION,
    "shares": _PRECISION,
    "gaussian-pool": {
        "pool_size": _POSITIVE,
        "sigma": Option("a finite number above 0", lambda value: _is_number(value) and value > 0),
        "renew_every": _POSITIVE,
    },
    "off": {},
}
"""Maps each mask to its options, and each option to the values that it may have."""


def check_options(mask: str, options: object) -> dict[str, Any]:
    """Checks a user's options and returns them as keyword arguments of a mask's maker.

    Args:
        mask: a key of OPTIONS.
        options: what a user gave.

    Raises:
        ConfigurationError: the options are no mapping, the mask does not have one of them, or a value is not allowed.
    """
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"mask_options is a mapping of option names to values, got {_shown(options)}")
    known = OPTIONS[mask]
    for name, value in options.items():
        if not isinstance(name, str) or name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            meant = nearest(name[:_MOST_CHARACTERS], known) if isinstance(name, str) else None
            advice = "" if meant is None else f"; did you mean {meant}?"
            raise ConfigurationError(f"mask={mask!r} has no option {_shown(name)}: {takes}{advice}")
        if not known[name].fits(value):
            raise ConfigurationError(f"{name} of mask={mask!r} is {known[name].expected}, got {_shown(value)}")
    return dict(options)


def check_precision(options: Mapping[str, Any], verified: bool) -> None:
    """Raises ConfigurationError if a mask's options ask for replies that cannot be checked, in a session that checks
    replies."""
    if verified and options.get("precision") == "short":
        raise ConfigurationError(
            "precision='short' cannot be used with verify: a check of rounded replies would let forgeries pass; "
            "leave out one of them"
        )


def check_hints(options: Mapping[str, Any], is_verified: bool) -> None:
    """Raises ConfigurationError if checked options ask for hints that the tenant computes, and no checkpoint is
    named."""
    if options.get("hints") == "local" and not is_verified:
        raise ConfigurationError(
            "hints='local' (--hints local) needs verify= (--verify), the checkpoint that hints are computed from: "
            "name one, or leave hints out"
        )


def check_num_providers(mask: str, num_providers: int) -> None:
    """Raises ConfigurationError if a mask does not take so many providers."""
    if num_providers != (2 if mask == "shares" else 1):
        raise ConfigurationError(
            "mask='shares' takes exactly two provider URLs, every other mask one: "
            f"mask={mask!r} was given {num_providers}"
        )


def _shown(value: object) -> str:
    """Returns a short text that stands for a value in an error message. The text shows nothing of the content of a
    container or tensor."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, int):
        num_bits = value.bit_length()
        return str(int(value)) if num_bits <= _MOST_BITS else f"a number of {num_bits} bits"
    if isinstance(value, str):
        return repr(value) if len(value) <= _MOST_CHARACTERS else f"a text of {len(value)} characters"
    return f"a value of type {type(value).__name__}"
