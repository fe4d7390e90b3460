"""This module holds the numbers by which a mask pool shows that no row was lost: rows made, ready and burnt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowCounts:
    """Counts the rows of a pool over all groups and directions, since the pool was made. Callers got the rows that are
    made and neither ready nor burnt.

    Attributes:
        made: the rows that were made.
        ready: the rows that no call has taken.
        burnt: the rows that were taken for calls of `take` that then failed. No caller got these rows.
    """

    made: int
    ready: int
    burnt: int
