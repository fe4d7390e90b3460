"""This module runs the provider in the tenant's own process, for `inproc:` URLs.

There is nothing to set up, and no privacy boundary. Only this module of tenant_sdk imports the provider's code, and
only for such a URL. The rules of import-linter list this exception.
"""

from __future__ import annotations

from wire.errors import ConfigurationError
from wire.transport.connection import Connection
from wire.transport.inproc import InprocConnection

SCHEME = "inproc:"


def connect_inproc(url: str, weights: str | None = None) -> Connection:
    """Loads the model that `inproc:MODEL` names, and returns a connection to a provider of this model.

    Args:
        url: inproc:smollm2-135m, inproc:/path/to/folder, inproc:/path/to/file.gguf or inproc:hub/id.
        weights: `int8` (default) or `native`.
    """
    from provider.embedded import serve_in_process

    if weights not in (None, "int8", "native"):
        raise ConfigurationError(f"weights is int8 or native, got {weights!r}")

    return InprocConnection(serve_in_process(url.removeprefix(SCHEME), "native" if weights == "native" else "int8"))
