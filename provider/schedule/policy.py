"""What the operator chooses about the order of requests, and how much a tenant's turn is worth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from provider.schedule.request_class import RequestClass

PolicyName = Literal["opportunistic", "none", "lockstep"]
QUANTUM_ROWS = {RequestClass.DECODE: 8, RequestClass.PREFILL: 256, RequestClass.FINETUNE: 512}
_TURN_S, _TURN_BASES = 3.5e-3, 8.0
"""What a turn is worth without a latency target, and the longest product while a tenant decodes: seconds, but at least
so many times the base time of a product (its time beside its rows), since every piece of a request reads its layer's
weights again."""
_REQUEST_S, _REQUEST_BASES = 3e-3, 2.0
_LONGEST_TURN_S, _LONGEST_TURN_BASES = 25e-3, 20.0
"""For each further tenant that waits, while each waits with one request, a turn is longer by the first pair (seconds,
base times) and at most as long as the second: every cut of a large request would give each of the others one more,
which costs about so much beside its product. Beside a tenant that sends many at a time turns are short. The base times
are what gives eight tenants the most rows (docs/benchmarks.md, "Many tenants on one executor")."""


@dataclass(frozen=True)
class Policy:
    """How requests are combined.

    Attributes:
        name: `opportunistic` holds a request for company as long as its size is worth it; `none` runs one request after
            the other as they came; `lockstep` waits for all tenants that are active.
        max_wait_s: the longest that a request is held, under any policy.
        wait_share: the share of a request's own predicted time that an opportunistic one is held at most. Decode is not
            held.
        slo_s: the latency target of a decode request inside the provider; None for no target.
        starvation_s: by class, the longest that it waits for a piece to run while there is more urgent work, or while
            such work is expected.
        max_batch_rows: the most rows of one product.
        max_batch_numbers: the most numbers on the wider side of one product, which is what a batch takes in memory.
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
    """Returns the worth of a turn with a latency target: rows, whichever tenants wait."""
    return QUANTUM_ROWS[request_class]


def turn_s(num_equal: int, base_s: float) -> float:
    """Returns the worth of a turn without a latency target: seconds of products.

    Args:
        num_equal: how many tenants wait with one request each.
        base_s: what a product takes beside its rows, in the mean over layers.
    """
    shortest_s, request_s = max(_TURN_S, _TURN_BASES * base_s), max(_REQUEST_S, _REQUEST_BASES * base_s)
    return min(max(_LONGEST_TURN_S, _LONGEST_TURN_BASES * base_s), shortest_s + request_s * max(0, num_equal - 1))
