"""This module computes the products of layer groups that the tenant keeps (tenant_sdk/keep.py), from its own int8
weights.

Guarantees: a product is the one that an honest provider would return for the same numbers, mod 2^32, since both
multiply with the same code (wire/ring/product.py). So a kept layer differs from one that is asked for only by the
mask's own rounding and error. Nothing is sent.

Memory: one byte for each weight, and as much again on a device on which rows lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from wire.frame import Call, Direction
from wire.payload import Payload
from wire.ring.coding import product
from wire.ring.seeded_rows import SeededRows

_CPU = torch.device("cpu")


class KeptWeights:
    """Holds the int8 weights of kept groups. It is safe under threads."""

    def __init__(self, weights: Mapping[int, torch.Tensor] | None = None) -> None:
        """Keeps the weights.

        Args:
            weights: W̃ of each kept group by its number, int8, shape (in_features, out_features), CPU; None for no
                groups.
        """
        self._weights = {(group, _CPU): weight for group, weight in (weights or {}).items()}
        self.groups = frozenset(weights or {})
        self.num_bytes = sum(weight.nbytes for weight in self._weights.values())

    def pending(self, call: Call, payload: Payload, device: torch.device) -> _Product:
        """Returns the product that a call asks for, which is computed when it is waited for.

        Args:
            call: the call, of a kept group.
            payload: its rows, which are not masked.
            device: where the rows lie; the product will lie there, too.
        """
        return _Product(self, call, payload, device)

    def product(self, call: Call, payload: Payload, device: torch.device) -> torch.Tensor:
        """Returns rows times a group's weight, int32, shape (num_rows, reply columns), on the device."""
        rows = payload.rows_on(device)
        if rows is None:
            given = payload.rows(call)
            rows = given.expand(payload.cols) if isinstance(given, SeededRows) else given
        weight = self._weight(call.group, rows.device)
        return product(rows, weight if call.direction is Direction.FORWARD else weight.t(), are_secret=True)

    def _weight(self, group: int, device: torch.device) -> torch.Tensor:
        found = self._weights.get((group, device))
        if found is None:  # another thread may copy it too, which is harmless
            with torch.inference_mode(False):
                found = self._weights[group, device] = self._weights[group, _CPU].to(device)
        return found

    def __repr__(self) -> str:
        return f"KeptWeights({len(self.groups)} groups)"


@dataclass(frozen=True, repr=False)
class _Product:
    """Stands for a product that is computed when it is asked for, after what is sent at the same time was sent."""

    weights: KeptWeights
    call: Call
    payload: Payload
    device: torch.device

    def result(self) -> torch.Tensor:
        return self.weights.product(self.call, self.payload, self.device)
