"""Lattice masks on a provider of hints, and what they draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from noise import sampling
from noise.hints.store import HintStore
from noise.lattice import Lattice
from noise.ledger.ledger import Ledger
from noise.params import LatticeParameters
from tests.support.lattice import Provider, weight_of
from tests.support.mask_parameters import DEFAULT
from tests.support.spies import results_of


@pytest.fixture
def provider() -> Provider:
    return Provider([weight_of(40, 24, 1), weight_of(24, 56, 2)])


@pytest.fixture
def make(tmp_path: Path, provider: Provider) -> Any:
    made: list[Lattice] = []

    def run(
        parameters: LatticeParameters = DEFAULT,
        bits: int = 24,
        folder: Path | None = tmp_path / "hints",
        **options: Any,
    ) -> Lattice:
        ledger = Ledger.open(tmp_path / "ledger", "tenant")
        options = {"background": False, **options}
        made.append(Lattice(parameters, ledger, HintStore(folder, 32 - bits), **options))
        made[-1].bind(provider.effect)
        return made[-1]

    yield run
    for scheme in made:
        scheme.close()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """The secrets and errors that are drawn, in order."""
    return {"secret": results_of(monkeypatch, sampling, "ternary"), "error": results_of(monkeypatch, sampling, "error")}
