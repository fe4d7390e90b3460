"""Holds positive controls, which are traffic with a known weakness on which an adversary must win.

A control runs the same code of the adversary as an attack on a mask does. The control makes its own traffic and so
knows the secrets, but the adversary sees only the view (what a provider sees). Each run of `attacks.extract_lora` runs
the controls of its adversaries, and the tests run all controls. Both fail if an adversary no longer wins on its
control. attacks/report/catalogue.py says which control belongs to which adversary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ControlResult:
    """Holds how an adversary performed on traffic that it should win on.

    Attributes:
        adversary: the adversary's name in the catalogue.
        setting: the weakness of the traffic, in a few words.
        metric: the meaning of `value`.
        value, needed: the adversary wins if value <= needed (with `smaller_wins`) or if value >= needed (without).
    """

    adversary: str
    setting: str
    metric: str
    value: float
    needed: float
    smaller_wins: bool

    @property
    def wins(self) -> bool:
        """Returns whether the adversary won on the control's traffic. If `value` is NaN, the adversary lost."""
        return self.value <= self.needed if self.smaller_wins else self.value >= self.needed


Control = Callable[[], ControlResult]
