"""Provides hints, layer groups and rows for tests of the lattice mask."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from noise.scheme import GroupSpec, Masked
from tests.support.answered import Answered
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.payload import Payload
from wire.ring import coding
from wire.ring.quantise import max_norms
from wire.ring.seeded_rows import SeededRows

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
