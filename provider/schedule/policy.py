"""What the operator chooses about the order of requests, and how much a tenant's turn is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from provider.schedule.request_class import RequestClass

PolicyName = Literal["opportunistic", "none", "lockstep"]
QUANTUM_ROWS = {RequestClass.DECODE: 8, RequestClass.PREFILL: 256, RequestClass.FINETUNE: 512}
_TURN_S = 3.5e-3
"""What a turn is worth without a latency target, and the longest product while somebody decodes."""
_REQUEST_S, _LONGEST_TURN_S = 3e-3, 25e-3
"""A turn is longer by the first for each further tenant that waits, while each waits with one request: every cut of a
large one would give each of the others one more, which costs about so much beside its product (docs/benchmarks.md,
table 5). Beside one who sends many at a time turns are short."""


@dataclass(frozen=True)
class Policy:
    """How requests are put together.

    Attributes:
        name: `opportunistic` holds a request for company as long as its size is worth it; `none` runs one request after
            the other as they came; `lockstep` waits for all tenants that are active.
        max_wait_s: the longest that a request is held, under any policy.
        wait_share: of a request's own predicted time; what an opportunistic one is held at most. Decode is not held.
        slo_s: latency target of a decode request inside the provider; None: none.
        starvation_s: by class, the longest that it waits for a piece to run while there is more urgent work, or while
            such work is expected.
        max_batch_rows: of one product.
        max_batch_numbers: of the wider of its two sides: what a batch takes in memory.
    """

    name: PolicyName = "opportunistic"
    max_wait_s: float = 0.02
    wait_share: float = 0.25
    slo_s: float | None = None
    starvation_s: Mapping[RequestClass, float] = field(
        default_factory=lambda: {RequestClass.PREFILL: 0.01, RequestClass.FINETUNE: 0.02}
    )
    max_batch_rows: int = 4096
    max_batch_numbers: int = 1 << 24


def turn_rows(request_class: RequestClass, num_equal: int) -> float:
    """A turn with a latency target: rows, whoever else waits."""
    return QUANTUM_ROWS[request_class]


def turn_s(num_equal: int) -> float:
    """A turn without one: seconds of products.

    Args:
        num_equal: tenants that wait with one request each.
    """
    return min(_LONGEST_TURN_S, _TURN_S + _REQUEST_S * max(0, num_equal - 1))
