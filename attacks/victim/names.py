"""This module names the models, masks and stages of a victim. Importing it does not load torch, so that a command line
is checked at once."""

from __future__ import annotations

from wire.errors import ConfigurationError

TINY_MODELS = ("tiny-llama", "tiny-gpt2")
"""The tiny random models that attacks/victim/models.py makes."""
ROUNDED = "lattice-rounded"
"""The name of the runs under `lattice` whose rows are rounded, as by default. Those under the name `lattice` send all
32 bits: a mask whose error is missing or tiny shows in the lowest bits, which rounding takes away, so that the
adversaries that look there would find nothing to say about a tenant's sampler."""
MASKS = ("off", "gaussian-pool", "lattice", ROUNDED, "pad")
"""The masks under which a victim runs."""
STAGE = "stage: "
"""How the lines begin by which a victim's process says what it does."""
PRIVATE_MASKS = ("lattice", ROUNDED, "pad", "shares")
"""The masks that hide rows, so that no adversary may win against them."""


def masks_of(text: str) -> list[str]:
    """Returns the masks of a comma-separated list, each once.

    Raises:
        ConfigurationError: a mask is unknown, or there is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in MASKS]
    if unknown or not names:
        raise ConfigurationError(f"no mask {', '.join(unknown) or repr(text)}: this evaluates {', '.join(MASKS)}")
    return list(dict.fromkeys(names))


def check_model(name: str) -> None:
    """Raises ConfigurationError if a name is neither one of `TINY_MODELS` nor that of a model that a provider could
    serve."""
    if name not in TINY_MODELS:
        from provider.model.load import resolve

        resolve(name)
