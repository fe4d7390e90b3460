"""A served model in another's place: tests override what they want to see or change of it."""

from __future__ import annotations

from typing import Any

from wire.frame import Call


class WrappedModel:
    """Hands everything on to a served model, and has every product made by `compute`."""

    def __init__(self, served_model: Any) -> None:
        self.served_model = served_model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.served_model, name)

    def row_product(self, call: Call) -> None:
        """No call has a shorter way for one row: every product is `compute`'s."""
