"""The provider's checkpoint, as it loads it: the adversary is the provider, so this may use the provider's code."""

from __future__ import annotations

from typing import Any

from attacks.seen.public_model import PublicModel, describe
from wire.manifest import Manifest


def load_public(name: str, manifest: Manifest) -> tuple[Any, PublicModel]:
    """Loads a model for a recording.

    Args:
        name: as `provider serve --model` takes it.
        manifest: of the recording.

    Returns:
        transformers' model, and what adversaries know of it.

    Raises:
        ConfigurationError: no such model, or the recording is of another.
    """
    from provider.model.load import load, resolve

    loaded = load(resolve(name))
    return loaded.model, describe(loaded.model, manifest, loaded.tokenizer)
