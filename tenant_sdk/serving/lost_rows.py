"""This module ends only the affected request if a value is not finite, and hides such a value from the provider.

Rows of many requests share a call. In `generate`, a value that is NaN or infinite ends the answer, or makes the whole
model send zeros (tenant_sdk/model/planned_calls.py). In the engine, this would end or spoil the answers of other
requests. A step that stopped early would also show the provider in which layer the value appeared.

Guarantees: a step makes all its calls with all its rows, whether values are finite or not. A row that is not finite
is sent as a row of zeros under a fresh mask, and the model gets NaN as the row's product. So the row stays NaN up to
the last hidden state, in which the engine finds it and gives up the request.
"""

from __future__ import annotations

import torch

from tenant_sdk.model.planned_calls import Course


class LosesRows(Course):
    """Decides what the calls of an engine's model send. A row that is not finite is sent as zeros, and the other rows
    of the call are sent as they are."""

    def __init__(self) -> None:
        """Makes the state of a run that makes all its calls, whatever the values are."""
        super().__init__(may_stop=False)
        self._is_repaired = False

    def finite_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows, with zeros in place of each row that is not finite."""
        self._is_repaired = True
        return torch.where(torch.isfinite(rows).all(dim=-1, keepdim=True), rows, 0.0)

    def product_of(self, rows: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """Returns the product with NaN in the rows that were sent as zeros."""
        if not self._is_repaired:
            return product
        self._is_repaired = False
        return torch.where(torch.isfinite(rows).all(dim=-1, keepdim=True), product, torch.nan)
