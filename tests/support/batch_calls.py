"""Counts the adapters that are computed together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from tenant_sdk.serving.adapters.module_stack import ModuleBatch


@pytest.fixture
def batch_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which every call of a batch adds the number of its modules."""
    made: list[int] = []
    run = ModuleBatch.outputs

    def counted(batch: ModuleBatch, modules: Sequence[nn.Module], *rows: torch.Tensor) -> torch.Tensor:
        made.append(len(modules))
        return run(batch, modules, *rows)

    monkeypatch.setattr(ModuleBatch, "outputs", counted)
    return made
