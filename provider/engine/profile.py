"""Measures, when a provider starts, how long products of rows with its weights take on this machine. The scheduler
predicts times from these measurements until it has seen real requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import torch

from provider.engine.products import compute
from provider.engine.replica import Product
from provider.model.weights import PreparedModel
from provider.schedule.fairness import Policy
from provider.schedule.latency import LatencyModel
from provider.schedule.scheduler import Scheduler
from wire.frame import DTYPES, Arithmetic, Call, Direction

_ROWS = (1, 64, 1, 64)
"""The numbers of rows of the measured products. Each number comes twice, and its first result is dropped, since the
first product of a shape also allocates scratch memory."""
_MAX_PRODUCTS = 1 << 31
"""The most multiplications in one measurement, so that an output head is measured with fewer rows."""


def make_scheduler(
    served: PreparedModel,
    policy: Policy,
    profiled: bool = True,
    weight_of: Callable[[str], float] = lambda tenant: 1.0,
    product: Product | None = None,
    ids: Collection[int] | None = None,
) -> Scheduler:
    """Returns a scheduler for one model, with its latency model; see `latency_model` and `Scheduler` for arguments."""
    groups = served.manifest.groups
    return Scheduler(
        policy,
        latency_model(served, profiled, product, ids),
        weight_of,
        width_of=lambda call: max(groups[call.group].in_features, groups[call.group].out_features),
    )


def latency_model(
    served: PreparedModel, profiled: bool = True, product: Product | None = None, ids: Collection[int] | None = None
) -> LatencyModel:
    """Returns a model that predicts the time of products, after measuring ring products of each shape.

    Products in float arithmetic and hints start with the mean rate of the measured ring products.

    Args:
        served: the served model.
        profiled: whether to measure. If not, predictions start with a guess, which the first products correct.
        product: computes the products that are timed; None computes them in this process, with `served`.
        ids: the ids of the groups to measure; None for all groups.
    """
    groups = served.manifest.groups
    compute_one = product or (lambda call, rows: compute(served, call, rows))
    latency = LatencyModel(lambda call: groups[call.group].in_features * groups[call.group].out_features)
    measured: dict[tuple[int, int, Direction], list[tuple[int, float]]] = {}
    for group in groups if profiled else ():
        if ids is not None and group.id not in ids:
            continue
        for direction in Direction:
            call = Call(group.id, direction, Arithmetic.RING)
            given, replied = group.widths(direction)
            shape = (given, replied, direction)
            if shape not in measured:
                rows = [min(count, max(1, _MAX_PRODUCTS // (given * replied))) for count in _ROWS]
                measured[shape] = [(count, _measure(compute_one, call, given, count)) for count in rows][2:]
            for count, seconds in measured[shape]:
                latency.measured(call, count, seconds)
    return latency


def _measure(product: Product, call: Call, cols: int, num_rows: int) -> float:
    rows = torch.ones(num_rows, cols, dtype=DTYPES[call.arithmetic])
    began = time.perf_counter()
    product(call, rows)
    return time.perf_counter() - began
