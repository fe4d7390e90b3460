"""What is known of adapters on disk whose files have not changed: their digest, or why they cannot be used."""

from __future__ import annotations

import threading
from collections import OrderedDict

from tenant_sdk.serving.adapters.reading import Found, Stamp
from wire.errors import ConfigurationError, VeilbaseError

MOST_NAMES = 4096
"""So many names are remembered; what is forgotten is read again."""


class Known:
    """Digests and failures by name, each good for one stamp."""

    def __init__(self) -> None:
        """Knows nothing."""
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Stamp, str | None, str]] = OrderedDict()

    def digest(self, name: str, stamp: Stamp | None) -> str | None:
        """Returns an adapter's digest where its files have the stamp that they had then.

        Raises:
            ConfigurationError: these files were read before and cannot be used.
        """
        with self._lock:
            found = self._known.get(name)
            if found is None or stamp is None or found[0] != stamp:
                return None
            self._known.move_to_end(name)
        if found[1] is None:
            raise ConfigurationError(found[2])
        return found[1]

    def is_good(self, found: Found, digest: str) -> None:
        """Remembers a digest."""
        self._remember(found.name, found.stamp if found.settled else None, digest, "")

    def is_bad(self, name: str, stamp: Stamp | None, failure: VeilbaseError) -> None:
        """Remembers why an adapter cannot be used; a failure that may pass is not remembered."""
        if isinstance(failure, ConfigurationError):
            self._remember(name, stamp, None, str(failure))

    def _remember(self, name: str, stamp: Stamp | None, digest: str | None, reason: str) -> None:
        if stamp is None:
            return
        with self._lock:
            self._known[name] = (stamp, digest, reason)
            self._known.move_to_end(name)
            if len(self._known) > MOST_NAMES:
                self._known.popitem(last=False)
