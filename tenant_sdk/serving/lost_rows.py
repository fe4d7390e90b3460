"""Keeps a value that is not finite in the request that it belongs to, and keeps it out of what the provider sees.

Rows of many requests share a call. In `generate` a value that is NaN or infinite ends the answer, or has the whole
model send zeros (tenant_sdk/model/planned_calls.py); here that would end or spoil the answers of others, and where
the step broke off would tell the provider which layer it was.

Guarantees: a step makes all its calls with all its rows, whether values are finite or not. A row that is not finite
is sent as a row of zeros under a fresh mask, and the model is given NaN as its product, so that the row stays NaN up
to the last hidden state, where the engine finds it and gives the request up.
"""

from __future__ import annotations

import torch

from tenant_sdk.model.planned_calls import Course


class LosesRows(Course):
    """The course of an engine: a row that is not finite is lost, the rows beside it are not."""

    def __init__(self) -> None:
        """Makes a course that never stops a call."""
        super().__init__(may_stop=False)
        self._is_repaired = False

    def finite_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows with zeros in place of those that are not finite."""
        self._is_repaired = True
        return torch.where(torch.isfinite(rows).all(dim=-1, keepdim=True), rows, 0.0)

    def product_of(self, rows: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """Returns the product with NaN in the rows that were sent as zeros."""
        if not self._is_repaired:
            return product
        self._is_repaired = False
        return torch.where(torch.isfinite(rows).all(dim=-1, keepdim=True), product, torch.nan)
