"""This module hands out the rows of one block of masks in memory, each at most once.

A slot is one row of a block of masks. `Slots` burns rows, that is, marks them as used. The rule that no slot is used
twice is enforced in two places: noise/ledger records blocks in a file, and this module counts rows in memory.

Guarantees: a row is burnt before the caller receives it, whatever threads do; a forked child is refused; slots can be
neither pickled nor copied. It loads no torch, so that a ledger can be read at once.

Not guaranteed: that a block is on record, which noise/ledger/ledger.py guarantees.
"""

from __future__ import annotations

import os
import threading
from typing import NoReturn

from wire.errors import MaskError, MaskReused

_num_forks = 0


def _forked() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_forked)


class SlotsExhausted(MaskError):
    """The block has fewer unused rows than were requested. No row was marked as used."""


class Origin:
    """Remembers the process in which an object was made. `check` raises an error in every other process."""

    __slots__ = ("_num_forks", "_pid")

    def __init__(self) -> None:
        self._pid, self._num_forks = os.getpid(), _num_forks

    def check(self) -> None:
        """Raises MaskReused in a forked child, since parent and child would hand out the same slots."""
        # The pid shows forks made by C code; the counter shows a child that has its parent's pid in a new namespace.
        if self._num_forks != _num_forks or self._pid != os.getpid():
            raise MaskReused("masks made before a fork cannot be used in the child: make a new TenantClient there")

    def __reduce__(self) -> NoReturn:
        """Refuses to copy or pickle any object that holds an origin."""
        raise TypeError("mask slots and ledgers can be neither copied nor pickled: a copy would use its slots again")


class Slots:
    """Hands out the rows of one block, each at most once. It is safe under threads and refuses a forked child.

    Rows are handed out in order, so the number of the first unused row is the whole state.
    """

    __slots__ = ("_lock", "_next", "_num_rows", "_origin")

    def __init__(self, num_rows: int) -> None:
        """Makes the slots of a block of `num_rows` rows, all unused. `Reservation.open_block` makes the slots of a
        block that the ledger counts."""
        if num_rows < 0:
            raise MaskError(f"a block has at least 0 rows, got {num_rows}")
        self._num_rows, self._next = num_rows, 0
        self._lock, self._origin = threading.Lock(), Origin()

    @property
    def remaining(self) -> int:
        """Returns how many rows are unused. Another thread may take some of them at any moment."""
        return self._num_rows - self._next

    def take(self, num_rows: int) -> range:
        """Burns the next `num_rows` rows (marks them as used) and returns their numbers.

        Raises:
            SlotsExhausted: fewer rows are unused; no row was burnt.
            MaskReused: this is a forked child.
        """
        return self._take(num_rows, num_rows)

    def take_up_to(self, num_rows: int) -> range:
        """Burns at most `num_rows` of the next rows (marks them as used) and returns their numbers; an empty range if
        all rows are used."""
        return self._take(0, num_rows)

    def _take(self, at_least: int, at_most: int) -> range:
        self._origin.check()
        if at_most < 0:  # A negative count would hand out burnt rows.
            raise MaskError(f"a call takes at least 0 rows, got {at_most}")
        with self._lock:
            left = self._num_rows - self._next
            if left < at_least:
                raise SlotsExhausted(f"{at_least} mask rows were asked for and {left} are left in this block")
            rows = range(self._next, self._next + min(at_most, left))
            self._next = rows.stop  # The rows are burnt before the caller sees them.
        return rows

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied or pickled."""
        self._origin.__reduce__()
