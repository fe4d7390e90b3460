"""Makes the provider's registry unreadable for a while."""

from __future__ import annotations

import os
from typing import Any

import pytest

import provider.identity.revocations as revocations


class Fault:
    """Makes every read of the registry fail until `is_over` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.is_over, stamp = False, revocations._stamp

        def fail(status: os.stat_result) -> Any:
            if not self.is_over:
                raise OSError(number, os.strerror(number))
            return stamp(status)

        monkeypatch.setattr(revocations, "_stamp", fail)
