"""The options of each mask, and the sentence that refuses one before anything is opened for it.

Guarantees: an option that the mask does not have is named, and so is one whose value cannot be, with what was expected
and what came; a value that is long, or neither a number nor a word, is shown by its size or its type alone. A scheme
that is made afterwards can rely on the types and ranges below, so that whatever it raises is not about them. The names
are those of the makers in noise/registry.py; tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from noise.params import LatticeParameters
from wire.errors import ConfigurationError

_MOST_CHARACTERS = 40
"""Most characters of a word that are shown; a longer one is shown by its length, since whole files have been passed
where a name was meant."""
_MOST_BITS = 64
"""Most bits of a number that is shown; a longer one is shown by its length."""
_HINT_BITS = (32, 24, 22, 20)
"""Bits a number that noise/hints/file.py can store."""


@dataclass(frozen=True)
class Option:
    """The values that one option may have.

    Attributes:
        expected: the values in words, as they follow "is".
        fits: tells whether a value is one of them; it takes any value and raises nothing.
    """

    expected: str
    fits: Callable[[Any], bool]


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_parameters(value: Any) -> bool:
    """Accepts a name, which `choose` looks up, or a set whose numbers are numbers, which `choose` compares with the
    table."""
    if not isinstance(value, LatticeParameters):
        return isinstance(value, str)
    counts = (value.ring_degree, value.rank, value.bits)
    return all(isinstance(each, Integral) for each in counts) and isinstance(value.sigma, Real)


_BYTES = Option("a whole number of bytes from 0", _is_count)
_SWITCH = Option("True or False", lambda value: isinstance(value, bool))
_POSITIVE = Option("a whole number from 1", lambda value: _is_count(value, 1))
_POOL = {"pool_bytes": _BYTES, "background": _SWITCH}

OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "lattice": {
        "parameters": Option("the name of a parameter set or a LatticeParameters of numbers", _is_parameters),
        "allow_toy": _SWITCH,
        "hints": Option("'disk' or 'stream'", lambda value: isinstance(value, str) and value in ("disk", "stream")),
        "hint_bits": Option("32, 24, 22 or 20", lambda value: _is_count(value) and value in _HINT_BITS),
        "hint_ram_bytes": _BYTES,
        **_POOL,
    },
    "pad": _POOL,
    "shares": {},
    "gaussian-pool": {
        "pool_size": _POSITIVE,
        "sigma": Option("a finite number above 0", lambda value: _is_number(value) and value > 0),
        "renew_every": _POSITIVE,
    },
    "off": {},
}
"""Mask → option → the values that it may have."""


def check_options(mask: str, options: object) -> dict[str, Any]:
    """Returns the options as keyword arguments of a mask's maker.

    Args:
        mask: a key of OPTIONS.
        options: what a user gave.

    Raises:
        ConfigurationError: the options are no mapping, the mask does not have one of them, or one cannot have its
            value.
    """
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"mask_options is a mapping of option names to values, got {_shown(options)}")
    known = OPTIONS[mask]
    for name, value in options.items():
        if not isinstance(name, str) or name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ConfigurationError(f"mask={mask!r} has no option {_shown(name)}: {takes}")
        if not known[name].fits(value):
            raise ConfigurationError(f"{name} of mask={mask!r} is {known[name].expected}, got {_shown(value)}")
    return dict(options)


def _shown(value: object) -> str:
    """Shows a value in a message: never many characters, and nothing of what only a container or tensor holds."""
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
