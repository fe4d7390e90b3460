"""Makes a provider look for what is over many times a second."""

from __future__ import annotations

import pytest

import provider.net.service as service_module

QUICK_S = 0.05
"""Sweeps come this often here, every two seconds otherwise."""


@pytest.fixture
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sweeps quick; goes before `provider`, whose first wait begins when it starts."""
    monkeypatch.setattr(service_module, "SWEEP_S", QUICK_S)
