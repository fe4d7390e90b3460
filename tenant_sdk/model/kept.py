"""This module computes the products of layer groups that the tenant keeps (tenant_sdk/keep.py), from weights in its own
memory: int8, or the checkpoint's own in bf16.

Guarantees: an int8 product is the one that an honest provider would return for the same numbers, mod 2^32, since both
multiply with the same code (wire/ring/product.py). So such a layer differs from one that is asked for only by the
mask's own rounding and error. A bf16 product is of float32 rows and sums in float32, so it differs from the
checkpoint's own by the order of sums. Nothing is sent.

Memory: one byte for each weight, two in bf16, and as much again on a device on which rows lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from wire.frame import Arithmetic, Call, Direction
from wire.payload import Payload
from wire.ring.coding import product
from wire.ring.seeded_rows import SeededRows

_CPU = torch.device("cpu")
_BLOCK_NUMBERS = 1 << 20
"""How many weights are widened to float32 at a time, 4 MiB. On two shared cores a weight of 4096 × 6144 took 7.2 ms for
one row and 77 ms for 256 (4.0 and 70 in float32); with a quarter of this number 8.9 and 98, with four times 6.4 and
78."""


class KeptWeights:
    """Holds the weights of kept groups, all int8 or all bf16. It is safe under threads."""

    def __init__(self, weights: Mapping[int, torch.Tensor] | None = None) -> None:
        """Keeps the weights.

        Args:
            weights: by group's number W̃, int8, or W, bf16; shape (in_features, out_features), CPU; None for no groups.
        """
        self._weights = {(group, _CPU): weight for group, weight in (weights or {}).items()}
        self.groups = frozenset(weights or {})
        self.num_bytes = sum(weight.nbytes for weight in self._weights.values())
        is_float = any(weight.is_floating_point() for weight in self._weights.values())
        self.arithmetic = Arithmetic.FLOAT if is_float else Arithmetic.RING
        """The arithmetic in which calls of these groups have to be made."""

    def pending(self, call: Call, payload: Payload, device: torch.device) -> _Product:
        """Returns the product that a call asks for, which is computed when it is waited for.

        Args:
            call: the call, of a kept group.
            payload: its rows, which are not masked.
            device: where the rows lie; the product will lie there, too.
        """
        return _Product(self, call, payload, device)

    def product(self, call: Call, payload: Payload, device: torch.device) -> torch.Tensor:
        """Returns rows times a group's weight, shape (num_rows, reply columns), on the device: int32, or float32
        without a bias if the weights are bf16."""
        rows = payload.rows_on(device)
        if rows is None:
            given = payload.rows(call)
            rows = given.expand(payload.cols) if isinstance(given, SeededRows) else given
        weight = self._weight(call.group, rows.device)
        if weight.is_floating_point():
            return _forward(rows, weight) if call.direction is Direction.FORWARD else _backward(rows, weight)
        return product(rows, weight if call.direction is Direction.FORWARD else weight.t(), are_secret=True)

    def _weight(self, group: int, device: torch.device) -> torch.Tensor:
        found = self._weights.get((group, device))
        if found is None:  # another thread may copy it too, which is harmless
            with torch.inference_mode(False):
                found = self._weights[group, device] = self._weights[group, _CPU].to(device)
        return found

    def __repr__(self) -> str:
        return f"KeptWeights({len(self.groups)} groups)"


def _forward(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns float32 rows times a bf16 weight, whose numbers are widened a few rows of it at a time."""
    product = rows.new_zeros(rows.shape[0], weight.shape[1])
    step = _block_rows(weight)
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        product.addmm_(rows[:, part], weight[part].to(torch.float32))
    return product


def _backward(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns float32 rows times a transposed bf16 weight; see `_forward`."""
    product = rows.new_empty(rows.shape[0], weight.shape[0])
    step = _block_rows(weight)
    for start in range(0, weight.shape[0], step):
        part = slice(start, start + step)
        product[:, part] = rows @ weight[part].to(torch.float32).t()
    return product


def _block_rows(weight: torch.Tensor) -> int:
    return max(1, _BLOCK_NUMBERS // weight.shape[1])


@dataclass(frozen=True, repr=False)
class _Product:
    """Stands for a product that is computed when it is asked for, after what is sent at the same time was sent."""

    weights: KeptWeights
    call: Call
    payload: Payload
    device: torch.device

    def result(self) -> torch.Tensor:
        return self.weights.product(self.call, self.payload, self.device)
