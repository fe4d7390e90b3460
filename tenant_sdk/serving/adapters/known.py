"""This module remembers the digest of each adapter on disk, or the reason why the adapter cannot be used, so that
unchanged files are not read again."""

from __future__ import annotations

import threading
from collections import OrderedDict

from tenant_sdk.serving.adapters.reading import Found, Stamp
from wire.errors import ConfigurationError, VeilbaseError

MOST_NAMES = 4096
"""The most adapters that are remembered. The files of any other adapter are read again."""


class Known:
    """Remembers adapters' digests and failures by name. Each entry is valid while the files have the same stamp
    (sizes and times, see reading.py)."""

    def __init__(self) -> None:
        """Makes an empty memory of digests and failures."""
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Stamp, str | None, str]] = OrderedDict()

    def digest(self, name: str, stamp: Stamp | None) -> str | None:
        """Returns an adapter's digest if it is known for the present stamp of the files; otherwise returns None.

        Raises:
            ConfigurationError: the files were read before with this stamp, and cannot be used.
        """
        with self._lock:
            found = self._known.get(name)
            if found is None or stamp is None or found[0] != stamp:
                return None
            self._known.move_to_end(name)
        if found[1] is None:
            raise ConfigurationError(found[2])
        return found[1]

    def last_digest(self, name: str) -> str | None:
        """Returns the digest that an adapter had when its files were last read; None if it is not known."""
        with self._lock:
            found = self._known.get(name)
            return None if found is None else found[1]

    def keep_digest(self, found: Found, digest: str) -> None:
        """Remembers the digest of an adapter that can be used."""
        self._remember(found.name, found.stamp if found.settled else None, digest, "")

    def keep_failure(self, name: str, stamp: Stamp | None, failure: VeilbaseError) -> None:
        """Remembers why an adapter cannot be used. A failure that may be temporary is not remembered."""
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
