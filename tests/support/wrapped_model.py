"""A served model in another's place: tests override what they want to see or change of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wire.frame import Call


class WrappedModel:
    """Hands everything on to a served model, and has every product made by `compute`."""

    def __init__(self, served_model: Any) -> None:
        self.served_model = served_model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.served_model, name)

    def row_product(self, call: Call) -> None:
        """No call has a shorter way for one row: every product is `compute`'s."""


class SwitchedModel(WrappedModel):
    """Makes each product by `make`, at first the served model's own, which a test may change while a provider runs."""

    def __init__(self, served_model: Any) -> None:
        super().__init__(served_model)
        self.make: Callable[..., torch.Tensor] = served_model.compute

    def compute(self, *arguments: Any) -> torch.Tensor:
        """Returns what `make` gives."""
        return self.make(*arguments)
