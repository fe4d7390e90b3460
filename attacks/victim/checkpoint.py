"""Loads the provider's checkpoint with the provider's own code. This is allowed because the adversary is the
provider."""

from __future__ import annotations

from typing import Any

from attacks.seen.public_model import PublicModel, describe
from wire.manifest import Manifest


def load_public(name: str, manifest: Manifest) -> tuple[Any, PublicModel]:
    """Loads a model for a recording.

    Args:
        name: the model, as `provider serve --model` takes it.
        manifest: the recording's manifest.

    Returns:
        transformers' model, and what adversaries know of it.

    Raises:
        ConfigurationError: there is no such model, or the recording is of another one.
    """
    from provider.model.load import load, resolve

    loaded = load(resolve(name))
    return loaded.model, describe(loaded.model, manifest, loaded.tokenizer)
