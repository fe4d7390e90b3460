"""This module decides whether an adapter names another base model than the one that it is to be used on.

Guarantees: `generate` and the engine refuse the same adapters. An adapter that names a local path, or no base model at
all, is not refused here, since a path says nothing about the model. Then only the shapes of its tensors decide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from wire.errors import ConfigurationError

_PATH = re.compile(r"^[./~\\]|^[A-Za-z]:[\\/]")


def check_base_name(name: str, trained_on: Any, served: Sequence[str], remedy: str) -> None:
    """Compares the name of an adapter's base model with the names of the model that is served.

    Args:
        name: the adapter's name, for the error.
        trained_on: the adapter's setting `base_model_name_or_path`.
        served: the names of the model; the first is its own name.
        remedy: what the user does if the weights are the same, for the error.

    Raises:
        ConfigurationError: the adapter was trained on another model.
    """
    if not isinstance(trained_on, str) or not trained_on or _PATH.match(trained_on):
        return
    if not any(_same(trained_on, each) for each in served):
        raise ConfigurationError(
            f"the adapter {name} was trained on {ascii(trained_on)[:100]}, and this model is "
            f"{ascii(served[0])[:100]}: {remedy} if the weights are the same"
        )


def _same(one: str, other: str) -> bool:
    """Returns whether two names may mean the same weights. Case and owners (all before the last slash) are ignored, and
    one name may lack an ending of the other, such as -Instruct. If `other` is empty or a path, it fits any name."""
    if not other or _PATH.match(other):
        return True
    a, b = (name.rstrip("/").rpartition("/")[2].casefold() for name in (one, other))
    return a.startswith(b) or b.startswith(a)
