"""This module describes how a preparation says how far it is. tenant_sdk/progress.py shows it.

Importing this module does not load torch.
"""

from __future__ import annotations

from typing import Protocol


class Report(Protocol):
    """Is a function that is told how far a preparation is."""

    def __call__(self, stage: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        """Shows that `done` of `total` parts of a stage are done; a stage that was not named before begins.

        Args:
            stage: what is being done, such as "reading the checkpoint".
            done, total: the parts; a total of None stands for a stage without parts, or whose number is not known yet.
            unit: what the parts are, such as "MB".
        """


def unseen(stage: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
    """Is a `Report` that shows nothing."""


def megabytes(num_bytes: int) -> int:
    """Returns a number of bytes in MB, rounded up, as `Report` takes it with the unit MB."""
    return -(-num_bytes // 10**6)
