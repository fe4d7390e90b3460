"""What a control is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ControlResult:
    """How an adversary did where it should win.

    Attributes:
        adversary: its name in the catalogue.
        setting: what makes it easy, in a few words.
        metric: what `value` is.
        value, needed: wins when value <= needed where `smaller_wins`, else when value >= needed.
    """

    adversary: str
    setting: str
    metric: str
    value: float
    needed: float
    smaller_wins: bool

    @property
    def wins(self) -> bool:
        """False for a value that is not a number, too."""
        return self.value <= self.needed if self.smaller_wins else self.value >= self.needed


Control = Callable[[], ControlResult]
