"""Moves the weights of layer groups to a device, one group after another, and checks that they arrived.

Guarantees: a group's fingerprint is taken from the copy on the CPU, and `move` keeps no reference to that copy when the
next group moves. Weights that do not fit are refused in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from provider.engine.products import ring_weight
from provider.model.served_group import ServedGroup
from wire.errors import ConfigurationError
from wire.frame import Direction
from wire.ring.quantise import digest

RESERVED_BYTES = 512 << 20
"""The bytes of a device's memory that weights leave free, for the limbs and sums of a product."""
_COPIES = 2
"""The copies of each int8 weight on a CUDA device: kernels want the weight's inner width contiguous in both
directions."""


@dataclass(frozen=True, eq=False)
class Moved:
    """Holds one group on a device.

    Attributes:
        group: the group, whose tensors are on the device.
        fingerprint: the fingerprint of the group's tensors; see `ServedGroup.fingerprint`.
        weights: W̃ for each direction, shape (columns of the request, columns of the reply). These tensors live as long
            as the group, since kernels keep a weight's copy for as long as the weight lives, and captured graphs use
            the copy's address.
    """

    group: ServedGroup
    fingerprint: str
    weights: dict[Direction, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Makes the views of W̃."""
        views = {direction: ring_weight(self.group, direction) for direction in Direction}
        object.__setattr__(self, "weights", views)

    def is_whole(self) -> bool:
        """Copies the tensors back to the CPU, and returns whether they are still those that were moved to the device.
        Raises RuntimeError if the device fails."""
        group = _on(self.group, torch.device("cpu"))
        is_same = digest(group.quantised, group.alpha) == group.info.digest
        return is_same and group.fingerprint() == self.fingerprint


def move(
    groups: list[ServedGroup], device: torch.device, check: Callable[[ServedGroup, Moved], None]
) -> dict[int, Moved]:
    """Moves groups to a device.

    Args:
        groups: the groups, on the CPU. The list is emptied, so that each group's memory is freed once it has moved.
        device: a CUDA device, or torch's `cpu`.
        check: called with each group on the CPU and on the device, before the CPU's copy is freed.

    Returns:
        The groups on the device, by id.

    Raises:
        ConfigurationError: the weights do not fit; the message says how many layers would. `check` may raise others.
    """
    num_layers = _num_layers(groups)
    moved: dict[int, Moved] = {}
    groups.reverse()
    while groups:
        group = groups.pop()
        try:
            there = Moved(_on(group, device), group.fingerprint())
            check(group, there)
        except torch.OutOfMemoryError:
            fitted = _num_layers([one.group for one in moved.values()])
            raise ConfigurationError(_does_not_fit(device, fitted, num_layers)) from None
        moved[group.info.id] = there
    return moved


def _on(group: ServedGroup, device: torch.device) -> ServedGroup:
    bias, native = (None if one is None else one.to(device) for one in (group.bias, group.native))
    return replace(group, quantised=group.quantised.to(device), alpha=group.alpha.to(device), bias=bias, native=native)


def check_room(groups: Sequence[ServedGroup], device: torch.device) -> None:
    """Raises ConfigurationError if a CUDA device has too little free memory for all groups; the message says how many
    layers would fit."""
    room, num_fitting = torch.cuda.mem_get_info(device)[0] - RESERVED_BYTES, 0
    for group in groups:
        room -= _COPIES * group.quantised.numel()
        room -= sum(one.numel() * one.itemsize for one in (group.alpha, group.bias, group.native) if one is not None)
        if room < 0:
            raise ConfigurationError(_does_not_fit(device, num_fitting, _num_layers(groups)))
        num_fitting += len(group.info.layers)


def _num_layers(groups: Sequence[ServedGroup]) -> int:
    return sum(len(group.info.layers) for group in groups)


def _does_not_fit(device: torch.device, num_fitting: int, num_layers: int) -> str:
    return (
        f"the weights do not fit on {device}: {num_fitting} of {num_layers} layers would; "
        "all need more devices (--shards), or --device cpu"
    )
