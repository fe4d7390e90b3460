"""The result of a positive control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ControlResult:
    """How an adversary performed where it should win.

    Attributes:
        adversary: its name in the catalogue.
        setting: what makes winning easy, in a few words.
        metric: the meaning of `value`.
        value, needed: the control wins when value <= needed where `smaller_wins`, else when value >= needed.
    """

    adversary: str
    setting: str
    metric: str
    value: float
    needed: float
    smaller_wins: bool

    @property
    def wins(self) -> bool:
        """Whether the control won; False for NaN, too."""
        return self.value <= self.needed if self.smaller_wins else self.value >= self.needed


Control = Callable[[], ControlResult]
