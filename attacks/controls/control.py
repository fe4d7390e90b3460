"""Defines the result of a positive control: a run of an adversary on traffic with a known weakness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ControlResult:
    """Holds how an adversary performed on traffic that it should win on.

    Attributes:
        adversary: the adversary's name in the catalogue.
        setting: what makes winning easy, in a few words.
        metric: the meaning of `value`.
        value, needed: the control wins if value <= needed (with `smaller_wins`) or if value >= needed (without).
    """

    adversary: str
    setting: str
    metric: str
    value: float
    needed: float
    smaller_wins: bool

    @property
    def wins(self) -> bool:
        """Returns True if the adversary won on the control's traffic. A value that is NaN counts as a loss."""
        return self.value <= self.needed if self.smaller_wins else self.value >= self.needed


Control = Callable[[], ControlResult]
