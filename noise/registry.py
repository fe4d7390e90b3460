"""From a mask's name and options to a scheme, and the refusals of DESIGN.md section 3 in one sentence each."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from noise.gaussian_pool import GaussianPool
from noise.off import Off
from noise.scheme import MaskScheme
from wire.errors import ConfigurationError
from wire.frame import Arithmetic

MASKS = ("off", "gaussian-pool")
_ARITHMETIC = {"ring": Arithmetic.RING, "float": Arithmetic.FLOAT}


def make_scheme(
    mask: str, arithmetic: str | None, weights: str, offered: Collection[str], options: dict[str, Any]
) -> MaskScheme:
    """Makes the scheme a client asked for.

    Args:
        mask: one of MASKS.
        arithmetic: `ring`, `float`, or None for what suits the mask and the provider's weights.
        weights: the provider's weights, `int8` or `native`.
        offered: arithmetics in the manifest.
        options: keyword arguments of the scheme.

    Raises:
        ConfigurationError: an unknown mask or option, or a pair of mask and arithmetic that does not exist.
    """
    if mask not in MASKS:
        raise ConfigurationError(f"mask is one of {', '.join(MASKS)}, got {mask!r}")
    if arithmetic not in (None, *_ARITHMETIC):
        raise ConfigurationError(f"arithmetic is ring or float, got {arithmetic!r}")
    if mask == "gaussian-pool" and arithmetic == "ring":
        raise ConfigurationError("mask='gaussian-pool' runs on float arithmetic only")
    chosen = arithmetic or ("float" if mask == "gaussian-pool" or weights == "native" else "ring")
    if chosen not in offered:
        raise ConfigurationError(f"this provider does not offer {chosen} arithmetic")
    try:
        return GaussianPool(**options) if mask == "gaussian-pool" else Off(_ARITHMETIC[chosen], **options)
    except TypeError:
        raise ConfigurationError(f"mask={mask!r} does not know one of the options {sorted(options)}") from None
