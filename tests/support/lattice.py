"""A provider of hints, groups and rows for tests of the lattice mask, and the bounds that its results keep."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from noise import sampling
from noise.params import PARAMETERS, LatticeParameters
from noise.scheme import GroupSpec, Masked, encode_rows
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.payload import Payload
from wire.ring import coding
from wire.ring.quantise import max_norms
from wire.ring.seeded_rows import SeededRows

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
DEFAULT = PARAMETERS["default"]
TOY = LatticeParameters("toy", 16, 2, 3.2, 0, "a test", toy=True)
ETA = 21
"""The largest error of the centred binomial: Σ of 21 bits less Σ of 21 bits."""
FP32 = 2.0**-22
"""Relative error of a few fp32 operations (2^-24 each): quotient, scale, α and product."""
TIMEOUT_S = 60.0


def weight_of(d: int, m: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (d, m), generator=generator, dtype=torch.int8)
    return weight


def group_of(number: int, weight: torch.Tensor) -> GroupSpec:
    alpha = torch.linspace(0.001, 0.01, weight.shape[1])
    digest = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
    return GroupSpec(number, *weight.shape, *max_norms(weight), alpha, digest)


@dataclass
class _Done:
    reply: torch.Tensor

    def result(self) -> torch.Tensor:
        return self.reply


class Provider:
    """Products with its weights; keeps what it was asked for and answers hints through the scheme's own road."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.weights = list(weights)
        self.groups = [group_of(number, weight) for number, weight in enumerate(weights)]
        self.hints: list[tuple[Call, SeededRows]] = []
        self.fail: Callable[[], None] = lambda: None

    def matrix(self, call: Call) -> torch.Tensor:
        weight = self.weights[call.group]
        return weight if call.direction is FORWARD else weight.t()

    def effect(self, call: Call, payload: Payload, reply_cols: int) -> _Done:
        rows = payload.rows(call)
        assert isinstance(rows, SeededRows)
        assert (call.purpose, call.arithmetic) == (Purpose.HINT, Arithmetic.RING)
        self.hints.append((call, rows))
        self.fail()
        matrix = self.matrix(call)
        assert matrix.shape[1] == reply_cols
        return _Done(coding.product(rows.expand(matrix.shape[0]), matrix))

    def answer(self, masked: Masked) -> torch.Tensor:
        (message,) = masked.messages
        assert isinstance(message.rows, torch.Tensor)
        assert message.call.purpose is Purpose.PRODUCT
        return masked.unmask([coding.product(message.rows, self.matrix(message.call))])


def sent(masked: Masked) -> torch.Tensor:
    rows = masked.messages[0].rows
    assert isinstance(rows, torch.Tensor)
    return rows


def rows_of(num_rows: int, features: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(num_rows, features, generator=torch.Generator().manual_seed(seed))


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64)


def bounds(
    spec: GroupSpec, direction: Direction, weight: torch.Tensor, rows: torch.Tensor, parameters: LatticeParameters,
    hint_error: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(exact product, largest distance a masked one may have, the scales), float64, shape (num_rows, reply columns).

    With input v (x, or g ⊙ α), ‖v − β·ṽ‖∞ ≤ β/2 and a few fp32 roundings of v; an error row e with ‖e‖₂ ≤ e_max·√d; a
    hint that is off by at most `hint_error` a coefficient, k·N of which meet trits. So with w the columns of the weight
    that is read, and the output scale a (α or 1), and by Cauchy-Schwarz:
    |y − v·w·a| ≤ a·(‖w‖₂·(β·√d/2 + FP32·‖v‖₂ + β·e_max·√d) + β·hint_error·k·N), and fp32 rounding of y itself.
    """
    matrix = wide(weight if direction is FORWARD else weight.t())
    given = wide(rows) * (1.0 if direction is FORWARD else wide(spec.alpha))
    out_scale = wide(spec.alpha) if direction is FORWARD else torch.ones(matrix.shape[1], dtype=torch.float64)
    d, largest = rows.shape[1], sampling.error_bound(parameters)
    _, beta = encode_rows(spec, direction, rows, largest * math.sqrt(d), float(hint_error * parameters.dimension))
    scale = wide(beta)
    reach = scale * math.sqrt(d) * (0.5 + largest) + FP32 * given.norm(dim=1, keepdim=True)
    exact = (given @ matrix) * out_scale
    bound = out_scale * (reach * matrix.norm(dim=0) + scale * hint_error * parameters.dimension)
    return exact, bound + FP32 * exact.abs(), scale
