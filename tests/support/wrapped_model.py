"""Wraps a served model, so that tests can observe or change parts of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wire.frame import Call


class WrappedModel:
    """Passes all attributes on to a served model, but makes every product go through `compute`."""

    def __init__(self, served_model: Any) -> None:
        self.served_model = served_model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.served_model, name)

    def row_product(self, call: Call) -> None:
        """Returns None, so that `compute` computes every product, also for a single row."""


class SwitchedModel(WrappedModel):
    """Computes each product by `make`, which is the served model's function at first. A test may replace `make` while a
    provider runs."""

    def __init__(self, served_model: Any) -> None:
        super().__init__(served_model)
        self.make: Callable[..., torch.Tensor] = served_model.compute

    def compute(self, *arguments: Any) -> torch.Tensor:
        """Returns the result of `make`."""
        return self.make(*arguments)
