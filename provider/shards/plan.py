"""Decides which shard holds which layer groups.

Each shard gets a run of neighbouring groups, so that the size of the largest shard is as small as possible.
"""

from __future__ import annotations

from collections.abc import Sequence

from wire.errors import ConfigurationError
from wire.manifest import GroupInfo


def make_plan(groups: Sequence[GroupInfo], num_shards: int) -> tuple[tuple[int, ...], ...]:
    """Splits the groups, in their order, into runs, so that the largest run is as small as possible. The size of a run
    is the number of its weights.

    Args:
        groups: the groups of the manifest.
        num_shards: the number of shards, at least 1.

    Returns:
        The ids of each shard's groups, in the order of shards; every shard has at least one group.

    Raises:
        ConfigurationError: there are more shards than groups.
    """
    if num_shards > len(groups):
        raise ConfigurationError(f"expected at most {len(groups)} shards, as many as layer groups, got {num_shards}")
    sizes = [group.in_features * group.out_features for group in groups]
    low, high = max(sizes), sum(sizes)
    while low < high:  # This finds the smallest bound for which `num_shards` runs suffice.
        bound = (low + high) // 2
        if len(_runs(sizes, bound)) <= num_shards:
            high = bound
        else:
            low = bound + 1
    runs = _runs(sizes, low)
    while len(runs) < num_shards:  # If fewer runs suffice, the largest run that can be split is split.
        widest = max((run for run in runs if len(run) > 1), key=lambda run: sum(sizes[one] for one in run))
        where = runs.index(widest)
        runs[where : where + 1] = [widest[: len(widest) // 2], widest[len(widest) // 2 :]]
    return tuple(tuple(groups[one].id for one in run) for run in runs)


def _runs(sizes: Sequence[int], bound: int) -> list[list[int]]:
    """Splits all indices into runs of neighbours; each run is as long as possible while its total size is at most the
    bound."""
    runs: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes):
        if not runs or size > room:
            runs.append([])
            room = bound
        runs[-1].append(index)
        room -= size
    return runs
