"""How long this machine's products take, before the first tenant asks: where the scheduler's predictions begin."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from provider.executor import compute
from provider.schedule.latency import LatencyModel
from provider.schedule.scheduler import Policy, Scheduler
from provider.weights import ServedModel
from wire.expand import Rows
from wire.frame import DTYPES, Arithmetic, Call, Direction

_ROWS = (1, 64, 1, 64)
"""Measured twice: the first product of a shape also pays for its scratch memory."""
_MAX_PRODUCTS = 1 << 31
"""Multiplications in one measurement: an output head is profiled with fewer rows."""


def make_scheduler(
    served: ServedModel,
    policy: Policy,
    profiled: bool = True,
    weight_of: Callable[[str], float] = lambda tenant: 1.0,
    product: Callable[[Call, Rows], torch.Tensor] | None = None,
) -> Scheduler:
    """A scheduler for the products of one model; other arguments as of `latency_model` and `Scheduler`."""
    groups = served.manifest.groups
    return Scheduler(
        policy,
        latency_model(served, profiled, product),
        weight_of,
        width_of=lambda call: max(groups[call.group].in_features, groups[call.group].out_features),
    )


def latency_model(
    served: ServedModel, profiled: bool = True, product: Callable[[Call, Rows], torch.Tensor] | None = None
) -> LatencyModel:
    """A model of ring products by shape, each shape measured once; float and hints begin at its rate.

    Args:
        served: computed with.
        profiled: False begins at a guess, which the first products correct.
        product: what computes; None computes here.
    """
    product = product or functools.partial(compute, served)
    groups = served.manifest.groups
    latency = LatencyModel(lambda call: groups[call.group].in_features * groups[call.group].out_features)
    measured: dict[tuple[int, int, Direction], list[tuple[int, float]]] = {}
    for group in groups if profiled else ():
        for direction in Direction:
            call = Call(group.id, direction, Arithmetic.RING)
            given, replied = group.in_features, group.out_features
            if direction is Direction.BACKWARD:
                given, replied = replied, given
            shape = (given, replied, direction)
            if shape not in measured:
                rows = [min(count, max(1, _MAX_PRODUCTS // (given * replied))) for count in _ROWS]
                measured[shape] = [(count, _measure(product, call, given, count)) for count in rows][2:]
            for count, seconds in measured[shape]:
                latency.measured(call, count, seconds)
    return latency


def _measure(product: Callable[[Call, Rows], torch.Tensor], call: Call, cols: int, num_rows: int) -> float:
    rows = torch.ones(num_rows, cols, dtype=DTYPES[call.arithmetic])
    began = time.perf_counter()
    product(call, rows)
    return time.perf_counter() - began
