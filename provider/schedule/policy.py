"""Defines the operator's choices about the order of requests, and the length of a tenant's turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from provider.schedule.request_class import RequestClass

PolicyName = Literal["opportunistic", "none", "lockstep"]
QUANTUM_ROWS = {RequestClass.DECODE: 8, RequestClass.PREFILL: 256, RequestClass.FINETUNE: 512}
_TURN_S, _TURN_BASES = 3.5e-3, 8.0
"""The length of a turn without a latency target, which also bounds a product while a tenant decodes. It is `_TURN_S`
seconds, but at least `_TURN_BASES` times a product's base time (the part that does not depend on its rows), since every
piece of a request reads its layer's weights again."""
_REQUEST_S, _REQUEST_BASES = 3e-3, 2.0
_LONGEST_TURN_S, _LONGEST_TURN_BASES = 25e-3, 20.0
"""If several tenants wait with one request each, a turn is longer by `_REQUEST_S` seconds, or `_REQUEST_BASES` base
times if that is more, for each tenant after the first. No turn is longer than `_LONGEST_TURN_S` seconds, or
`_LONGEST_TURN_BASES` base times if that is more. Longer turns cut a large request into fewer pieces. Each cut lets each
other tenant run one more request, which costs about `_REQUEST_S` more than its product. If a tenant waits with several
requests, turns stay short. With these base times, eight tenants get the most rows (docs/benchmarks.md, "Many tenants on
one executor")."""


@dataclass(frozen=True)
class Policy:
    """Says how requests are combined into batches.

    Attributes:
        name: `opportunistic` holds a request for a while, depending on its size, so that other requests can share its
            product; `none` runs the requests one by one in order of arrival; `lockstep` waits for all active tenants.
        max_wait_s: longest time in seconds for which a request is held, under any policy.
        wait_share: under `opportunistic`, the longest hold as a share of the request's own predicted time. Decode
            requests are not held.
        slo_s: latency target of a decode request inside the provider, in seconds; None for no target.
        starvation_s: by class, with a latency target, the longest time in seconds until a piece of the class runs,
            while more urgent work waits or is expected.
        max_batch_rows: the most rows of one product. A larger request is cut into pieces under `opportunistic`, and is
            one product under the other policies.
        max_batch_numbers: the most numbers in the input or the output of one product, which bounds a batch's memory;
            for larger requests see `max_batch_rows`.
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
    """Returns how many rows a tenant of weight 1 may compute in one turn, if there is a latency target. The number does
    not depend on `num_equal`."""
    return QUANTUM_ROWS[request_class]


def turn_s(num_equal: int, base_s: float) -> float:
    """Returns how many seconds a tenant of weight 1 may compute in one turn, if there is no latency target.

    Args:
        num_equal: the number of waiting tenants if each waits with one request, else 1.
        base_s: the mean over all calls of the seconds of a product that do not depend on its rows.
    """
    shortest_s, request_s = max(_TURN_S, _TURN_BASES * base_s), max(_REQUEST_S, _REQUEST_BASES * base_s)
    return min(max(_LONGEST_TURN_S, _LONGEST_TURN_BASES * base_s), shortest_s + request_s * max(0, num_equal - 1))
