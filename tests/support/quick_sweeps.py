"""Makes a provider's regular checks (sweeps) run many times a second."""

from __future__ import annotations

import pytest

import provider.net.service as service_module

QUICK_S = 0.05
"""The seconds between two sweeps in these tests. A provider in use sweeps less often."""


@pytest.fixture
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sweeps frequent. This fixture must come before `provider`, whose first wait begins when it starts."""
    monkeypatch.setattr(service_module, "SWEEP_S", QUICK_S)
