"""Provides parameters, hints, layer groups and rows for tests of the lattice mask, slow reference products, and bounds
of the error of a product under the mask."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from noise import sampling
from noise.params import PARAMETERS, LatticeParameters
from noise.scheme import GroupSpec, Masked, encode_rows
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.payload import Payload
from wire.ring import coding
from wire.ring.quantise import max_norms
from wire.ring.seeded_rows import SeededRows
from wire.ring.widths import unpacked_effect

DEFAULT = PARAMETERS["default"]
"""The parameters that a client uses if the user names none."""
TOY = LatticeParameters("toy", 16, 2, 3.2, 0, "a test", toy=True)
"""Parameters that are small enough for slow reference products. A client accepts them only with `allow_toy`."""
TOY_OPTIONS = {"parameters": TOY, "allow_toy": True, "precision": "exact"}
"""Mask options of a client that uses the toy parameters. Rows go unrounded, so that results can be compared closely;
tests/noise/masks/test_short_rows.py has tests of rounded ones."""
TOY_MASK = {**TOY_OPTIONS, "hints": "stream", "background": False}
"""The same, with hints in memory only, and masks made by the thread that needs them."""
PLAIN: dict[str, Any] = {"mask": "off", "arithmetic": "float", "weights": "native", "verify": False}
"""Options of a `ScriptedProvider`'s client whose results equal local ones up to rounding. It fetches no hints."""


@dataclass
class Answered:
    """Stands in for a pending request whose reply has already arrived."""

    reply: torch.Tensor

    def result(self) -> torch.Tensor:
        """Returns the reply, as a pending request does after its reply has arrived."""
        return self.reply


FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def weight_of(d: int, m: int, seed: int = 0) -> torch.Tensor:
    """Returns a random int8 weight, shape (d, m), without -128."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (d, m), generator=generator, dtype=torch.int8)
    return weight


def group_of(number: int, weight: torch.Tensor) -> GroupSpec:
    """Returns a group whose only layer has this weight."""
    alpha = torch.linspace(0.001, 0.01, weight.shape[1])
    digest = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    return GroupSpec(number, *weight.shape, *max_norms(weight), alpha, digest)


class Provider:
    """Computes products with its weights, notes the requests, and serves hints in the way that the mask requests
    them."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.weights = list(weights)
        self.groups = [group_of(number, weight) for number, weight in enumerate(weights)]
        self.hints: list[tuple[Call, SeededRows]] = []
        self.fail: Callable[[], None] = lambda: None

    def matrix(self, call: Call) -> torch.Tensor:
        """Returns the matrix by which a call multiplies: the weight or its transpose."""
        weight = self.weights[call.group]
        return weight if call.direction is FORWARD else weight.t()

    def effect(self, call: Call, payload: Payload, reply_cols: int) -> Answered:
        """Returns the reply to a request for a hint, and notes the request."""
        rows = payload.rows(call)
        assert isinstance(rows, SeededRows)
        assert (call.purpose, call.arithmetic) == (Purpose.HINT, Arithmetic.RING)
        self.hints.append((call, rows))
        self.fail()
        matrix = self.matrix(call)
        assert matrix.shape[1] == reply_cols
        return Answered(coding.product(rows.expand(matrix.shape[0]), matrix))

    def answer(self, masked: Masked) -> torch.Tensor:
        """Returns the product of masked rows after unmasking."""
        (message,) = masked.messages
        assert isinstance(message.rows, torch.Tensor)
        assert message.call.purpose is Purpose.PRODUCT
        return masked.unmask([coding.product(message.rows, self.matrix(message.call))])


def sent(masked: Masked) -> torch.Tensor:
    """Returns the rows that the tenant sends."""
    rows = masked.messages[0].rows
    assert isinstance(rows, torch.Tensor)
    return rows


def rows_of(num_rows: int, features: int, seed: int = 3) -> torch.Tensor:
    """Returns random fp32 rows, shape (num_rows, features)."""
    return torch.randn(num_rows, features, generator=torch.Generator().manual_seed(seed))


def reference_product(matrix: torch.Tensor, secrets: torch.Tensor) -> torch.Tensor:
    """Returns the products mod 2^32, as schoolbook sums in integers with X^N = −1. `combine` and `product` of
    noise/polynomial/ must equal them.

    Args:
        matrix: int32, shape (k·N, features).
        secrets: int8, shape (B, k, N).

    Returns:
        int32, shape (B, N, features).
    """
    num_blocks, rank, degree = secrets.shape
    polynomials = matrix.to(torch.int64).view(rank, degree, -1)
    total = torch.zeros(num_blocks, degree, matrix.shape[1], dtype=torch.int64, device="cpu")
    for shift in range(degree):
        for i in range(rank):
            # This is X^shift times polynomial i: coefficients that pass X^N come back negated.
            turned = torch.cat((-polynomials[i, degree - shift :], polynomials[i, : degree - shift]))
            total += secrets[:, i, shift].to(torch.int64).view(-1, 1, 1) * turned
    return ((total + 2**31) % 2**32 - 2**31).to(torch.int32)


def whole(effect: torch.Tensor) -> torch.Tensor:
    """Returns an effect as int32, whether it is packed or not."""
    return effect if effect.dtype == torch.int32 else unpacked_effect(effect)


ETA = 21
"""The largest error of the centred binomial, which is a sum of 21 bits minus another sum of 21 bits."""
FP32 = 2.0**-22
"""The relative error of a few fp32 operations (2^-24 each): the quotient, the scale, α and the product."""


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor converted to float64."""
    return tensor.to(torch.float64)


def bounds(
    spec: GroupSpec, direction: Direction, weight: torch.Tensor, rows: torch.Tensor, parameters: LatticeParameters,
    hint_error: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the exact product and the largest distance of a masked one from it, both of shape (num_rows, cols), and
    the scales β of the encoded rows, which broadcast to this shape; all are float64.

    The input v is x, or g ⊙ α for gradients. Encoding changes it by ‖v − β·ṽ‖∞ ≤ β/2 and a few fp32 roundings. The
    mask adds an error row e with ‖e‖₂ ≤ e_max·√d. Each of the k·N coefficients of the hint that a secret multiplies is
    off by at most `hint_error`. Let w be a column of the weight (or of its transpose), and a the output scale (α or 1).
    Then, by Cauchy-Schwarz,
    |y − v·w·a| ≤ a·(‖w‖₂·(β·√d/2 + FP32·‖v‖₂ + β·e_max·√d) + β·hint_error·k·N), and fp32 rounding of y itself.
    """
    is_forward = direction is Direction.FORWARD
    matrix = wide(weight if is_forward else weight.t())
    given = wide(rows) * (1.0 if is_forward else wide(spec.alpha))
    out_scale = wide(spec.alpha) if is_forward else torch.ones(matrix.shape[1], dtype=torch.float64)
    d, largest = rows.shape[1], sampling.error_bound(parameters)
    _, beta = encode_rows(spec, direction, rows, largest * math.sqrt(d), float(hint_error * parameters.dimension))
    scale = wide(beta)
    reach = scale * math.sqrt(d) * (0.5 + largest) + FP32 * given.norm(dim=1, keepdim=True)
    exact = (given @ matrix) * out_scale
    bound = out_scale * (reach * matrix.norm(dim=0) + scale * hint_error * parameters.dimension)
    return exact, bound + FP32 * exact.abs(), scale
