"""Makes lattice masks on a provider of hints, and observes the numbers that the masks draw."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from noise import sampling
from noise.hints.store import DEFAULT_RAM_BUDGET_BYTES, HintStore
from noise.ledger.ledger import Ledger, Seed
from noise.masks.lattice import Lattice
from noise.params import LatticeParameters
from noise.polynomial import negacyclic
from tests.support.lattice import DEFAULT, Provider, weight_of
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
        is_bound: bool = True,
        hint_ram_bytes: int = DEFAULT_RAM_BUDGET_BYTES,
        **options: Any,
    ) -> Lattice:
        ledger = Ledger.open(tmp_path / "ledger", "tenant")
        options = {"background": False, **options}
        made.append(Lattice(parameters, ledger, HintStore(folder, 32 - bits, hint_ram_bytes), **options))
        if is_bound:
            made[-1].bind(provider.effect)
        return made[-1]

    yield run
    for scheme in made:
        scheme.close()


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """Returns lists to which all drawn secrets and errors are added, in order."""
    return {"secret": results_of(monkeypatch, sampling, "ternary"), "error": results_of(monkeypatch, sampling, "error")}


@pytest.fixture
def counted(tmp_path: Path) -> Callable[[], list[Seed]]:
    """Returns a function that reads, as another process would, the seeds in the ledger of the masks of `make`."""

    def audit() -> list[Seed]:
        with contextlib.closing(Ledger.open(tmp_path / "ledger", "tenant")) as ledger:
            return ledger.audit()

    return audit


@pytest.fixture
def live_secrets(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns a function that counts the transforms of secrets that were made since the fixture began and are still in
    memory. A transform is as secret as the secret itself."""
    made: list[weakref.ref[torch.Tensor]] = []
    transform = negacyclic.secret_transform

    def spy(secrets: torch.Tensor) -> torch.Tensor:
        secrets_hat = transform(secrets)
        made.append(weakref.ref(secrets_hat))
        return secrets_hat

    def count() -> int:
        gc.collect()
        return sum(each() is not None for each in made)

    monkeypatch.setattr(negacyclic, "secret_transform", spy)
    return count
