"""Masks and their effects, made ahead of use in the background, in memory only.

Guarantees: a row is handed out once, ever (`noise.blocks.slots.Slots`); nothing is written to disk, pickled or carried
into a forked child; when no row is ready the caller makes one itself, so that an empty pool costs time and never
privacy. It does not guarantee that a long run never waits: that needs a core that has time to refill. Where the budget
does not hold two blocks for every layer, blocks are made a piece at a time (`piece_rows`), which takes more arithmetic.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from noise.blocks.slots import Origin, Slots
from noise.scheme import GroupSpec
from wire.errors import MaskError
from wire.frame import ITEM_BYTES, Direction
from wire.ring.threads import all_cores

DEFAULT_BYTES = 2 << 30
_LEAVE_S = 10.0
"""Seconds that the exit waits for a worker that is making blocks; eight of the widest layer take a second or two."""
_MOST_CALLS_BEYOND = 3
"""Most later calls whose rows are made together with those of a call. Four blocks made together take about half the
time of four made one by one, and eight not much less a block (docs/decisions/0009-compiled-kernels.md)."""
Key = tuple[int, Direction]


@dataclass(eq=False)
class Block:
    """Rows of mask and effect: a block, or a piece of one that shares its rows with no other piece.

    Attributes:
        mask: int32, shape (num_rows, request columns).
        effect: int32, shape (num_rows, reply columns); what unmasking subtracts.
        slots: which rows are left.
    """

    mask: torch.Tensor = field(repr=False)
    effect: torch.Tensor = field(repr=False)
    slots: Slots

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of memory that it takes."""
        return (self.mask.numel() + self.effect.numel()) * ITEM_BYTES


Maker = Callable[[GroupSpec, Direction, int], Sequence[Block]]
"""(group, direction, rows wanted) → fresh blocks, or pieces of some, with at least so many rows."""


class _Shelf:
    """The rows that are ready for one group and direction."""

    def __init__(self, group: GroupSpec) -> None:
        self.group = group
        self.blocks: deque[Block] = deque()
        self.last_rows = self.rows_a_call = 0
        self.is_wanted = self.is_being_made = False

    def note_call(self, num_rows: int) -> None:
        """Keeps the number of rows that both of the last two calls took: single tokens follow a prompt, and a step
        follows its like."""
        self.last_rows, self.rows_a_call = num_rows, min(self.last_rows, num_rows)

    @property
    def features(self) -> int:
        """Returns the features of a request and its reply: how many numbers a row of mask and effect has."""
        return self.group.in_features + self.group.out_features

    @property
    def num_rows(self) -> int:
        return sum(block.slots.remaining for block in self.blocks)


class MaskPool:
    """Hands out mask rows; a worker thread refills what was used, in the order in which it was used."""

    def __init__(
        self,
        make: Maker,
        block_rows: int,
        budget_bytes: int = DEFAULT_BYTES,
        background: bool = True,
        least_rows: int | None = None,
        features: int = 0,
        on_drop: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepares; nothing is made before rows are asked for.

        Args:
            make: makes blocks; called from any thread, for one key by one thread at a time.
            block_rows: the rows in a block; a shelf with fewer than half of them is refilled.
            budget_bytes: how much may be ready ahead of use; callers that find nothing make their own rows beyond it.
            background: whether a thread makes blocks; if not, all are made when they are used.
            least_rows: the fewest rows of a block that are worth making alone; None for whole blocks only.
            features: how many numbers a row of mask and effect has, over all groups in one direction, where that is
                known: until the last of them was used the pool would give the first ones too much of the budget.
            on_drop: called when all masks are dropped, also in a forked child.
        """
        self._make, self._block_rows, self._budget_bytes = make, block_rows, budget_bytes
        self._least_rows, self._expected_features, self._on_drop = least_rows or block_rows, features, on_drop
        self._shelves: dict[Key, _Shelf] = {}
        self._state = threading.Condition()
        self._wanted: deque[Key] = deque()
        self._ready_bytes = self._seen_features = 0
        self._measure()
        self._closed = False
        self._origin = Origin()
        self._background = background
        self._worker: threading.Thread | None = None
        _POOLS.add(self)

    def check_open(self) -> None:
        """Raises MaskError when the pool was closed. Code that makes many blocks calls this now and then."""
        if self._closed:
            raise MaskError("this mask was closed")

    @property
    def ready_bytes(self) -> int:
        """Returns the bytes of masks and effects that are held now."""
        return self._ready_bytes

    def ready_rows(self) -> dict[Key, int]:
        """Returns how many rows are ready for each group number and direction that was asked for, 0 where all were
        used."""
        with self._state:
            return {key: shelf.num_rows for key, shelf in self._shelves.items()}

    def describe(self, what: str) -> str:
        """Returns a line for a user that says how much is ready; `what` is the mask's own word for its rows."""
        size = f"{self.ready_bytes / 1e6:.0f} of {self._budget_bytes / 1e6:.0f} MB"
        line = f"{size} of {what} and effects ready, in memory only"
        if rows := self.ready_rows():
            line += f": at least {min(rows.values())} rows in each of {len(rows)} groups and directions"
        return line

    def take(self, group: GroupSpec, direction: Direction, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns fresh rows, burnt before they are returned.

        Returns:
            mask, int32, shape (num_rows, request columns); effect, int32, shape (num_rows, reply columns).

        Raises:
            MaskError: no rows can be had, or this is a forked child (`MaskReused`); nothing may be sent.
        """
        self._origin.check()
        key = (group.id, direction)
        request_cols, reply_cols = group.widths(direction)
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        is_noted = False
        while num_rows > 0 or not is_noted:
            with self._state:
                shelf = self._shelf(key, group)
                if not is_noted:
                    shelf.note_call(num_rows)
                    is_noted = True
                num_rows -= self._take_ready(shelf, num_rows, parts)
                self._want(key, shelf)
                beyond = self._rows_beyond(shelf)
                must_make = num_rows > 0 and self._claim(shelf)
            if must_make:
                self._fill(key, shelf, num_rows + beyond)
        if len(parts) == 1:
            return parts[0]
        if not parts:
            none = torch.empty(0, 0, dtype=torch.int32, device="cpu")
            return none.view(0, request_cols), none.view(0, reply_cols)
        masks, effects = zip(*parts, strict=True)
        return torch.cat(masks), torch.cat(effects)

    def _rows_beyond(self, shelf: _Shelf) -> int:
        """Returns how many rows for later calls are worth making with those of this one: blocks made together share
        transforms.

        These are the rows of as many calls as every shelf could keep within the budget, once a cycle through all has
        been seen.
        """
        rows = shelf.rows_a_call
        if 2 * rows < self._block_rows:
            return 0  # These are single tokens: a block lasts for many of them.
        cycle_bytes = self._features * -(-rows // self._block_rows) * self._block_rows * ITEM_BYTES
        return rows * min(self._budget_bytes // cycle_bytes, _MOST_CALLS_BEYOND)

    def _shelf(self, key: Key, group: GroupSpec) -> _Shelf:
        self.check_open()
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf(group)
            self._seen_features += shelf.features
            self._measure()
        return shelf

    def _take_ready(self, shelf: _Shelf, num_rows: int, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
        taken = 0
        while shelf.blocks and taken < num_rows:
            block = shelf.blocks[0]
            rows = block.slots.take_up_to(num_rows - taken)
            parts.append((block.mask[rows.start : rows.stop], block.effect[rows.start : rows.stop]))
            taken += len(rows)
            if block.slots.remaining == 0:
                self._ready_bytes -= shelf.blocks.popleft().num_bytes
                self._state.notify_all()  # What did not fit into the budget may fit now.
        return taken

    def _claim(self, shelf: _Shelf) -> bool:
        """Tells whether the caller has to make rows itself; waits for the thread that is making them, if there is
        one."""
        if shelf.is_being_made:
            self._state.wait_for(lambda: not shelf.is_being_made or self._closed)
            return False
        shelf.is_being_made = True
        return True

    def _fill(self, key: Key, shelf: _Shelf, num_rows: int) -> None:
        """Makes blocks for a shelf that the calling thread has claimed."""
        try:
            with all_cores():
                blocks = self._make(shelf.group, key[1], num_rows)
        except BaseException:
            with self._state:
                shelf.is_being_made = False
                self._state.notify_all()
            raise
        with self._state:
            shelf.is_being_made = False
            if not self._closed:
                shelf.blocks.extend(blocks)
                self._ready_bytes += sum(block.num_bytes for block in blocks)
            self._state.notify_all()

    # ---- ahead of use -----------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Counts the numbers in a row of every shelf, also of those still to come, and how many of these rows are made
        at a time.

        A piece is half of what the budget holds for every shelf, so that all can be refilled before one has run out.
        """
        num_directions = max(1, len({direction for _, direction in self._shelves}))
        self._features = max(self._seen_features, self._expected_features * num_directions)
        fitting = self._budget_bytes // (2 * max(1, self._features) * ITEM_BYTES)
        num_pieces = -(-self._block_rows // max(self._least_rows, min(fitting, self._block_rows)))
        self._piece_rows = -(-self._block_rows // num_pieces)

    @property
    def piece_rows(self) -> int:
        """Returns the rows made at a time for single tokens: a block, or an even part of one if the model is too wide
        for it."""
        return self._piece_rows

    def rounded(self, num_rows: int) -> int:
        """Returns the rows that are made where so many are wanted: whole blocks, and pieces of the last where that is
        enough."""
        whole, rest = divmod(num_rows, self._block_rows)
        pieces = -(-rest // self._piece_rows) * self._piece_rows
        return whole * self._block_rows + min(pieces, self._block_rows)

    def fitting_rows(self, features: int) -> int:
        """Returns how many rows of so many numbers the budget holds: at least one, in whole blocks or pieces."""
        return self._fitting(features, self._piece_rows)

    def _fitting(self, features: int, unit: int) -> int:
        return max(1, self._budget_bytes // (features * ITEM_BYTES) // unit) * unit

    def _target(self, shelf: _Shelf) -> int:
        """Returns the rows for a few calls, but not so many that the first layers keep the budget from the last."""
        if self._piece_rows < self._block_rows and 2 * shelf.rows_a_call < self._block_rows:
            return self._piece_rows
        calls = (1 + _MOST_CALLS_BEYOND) * shelf.rows_a_call
        return max(self._block_rows, min(calls, self._fitting(self._features, self._block_rows)))

    def _want(self, key: Key, shelf: _Shelf) -> None:
        if self._background and not shelf.is_wanted and shelf.num_rows <= self._target(shelf) // 2:
            shelf.is_wanted = True
            self._wanted.append(key)
            self._state.notify_all()
            if self._worker is None:
                # The thread holds only a weak reference to the pool, so that a pool that is forgotten ends its thread.
                work = threading.Thread(target=_work, args=(weakref.ref(self),), name="veilbase-masks", daemon=True)
                self._worker = work
                work.start()

    def _cost(self, shelf: _Shelf, num_rows: int) -> int:
        return self.rounded(num_rows) * shelf.features * ITEM_BYTES

    def _next_wanted(self) -> tuple[Key, _Shelf, int] | None:
        """Claims the first shelf, in the order of use, that fits into the budget; returns it and the rows to make for
        it.

        The caller holds the lock.
        """
        for key in list(self._wanted):
            shelf = self._shelves[key]
            target = self._target(shelf)
            if self._ready_bytes + self._cost(shelf, target) > self._budget_bytes:
                continue  # This one may never fit, and must not stand in the way of the others.
            self._wanted.remove(key)
            shelf.is_wanted = False
            if not shelf.is_being_made and shelf.num_rows <= target // 2:
                shelf.is_being_made = True
                return key, shelf, target
        return None

    def _refill_one(self) -> bool:
        """Takes one turn of the worker; returns False when the pool was closed."""
        with self._state:
            found = self._next_wanted()
            if found is None and not self._closed:
                self._state.wait(1.0)
                found = self._next_wanted()
            if self._closed:
                return False
        if found is not None:
            # The thread that needs the rows makes them and meets the error itself.
            with contextlib.suppress(Exception):
                self._fill(*found)
        return True

    def prepare(self, group: GroupSpec, direction: Direction, num_rows: int) -> None:
        """Makes rows now, in the calling thread, until `num_rows` are ready or the budget is full.

        Raises:
            MaskError: see `take`.
        """
        self._origin.check()
        key = (group.id, direction)
        while True:
            with self._state:
                shelf = self._shelf(key, group)
                missing = num_rows - shelf.num_rows
                if missing <= 0 or self._ready_bytes + self._cost(shelf, missing) > self._budget_bytes:
                    return
                must_make = self._claim(shelf)
            if must_make:
                self._fill(key, shelf, missing)

    def close(self) -> None:
        """Drops every mask."""
        with self._state:
            self._closed = True
            self._drop()
            self._state.notify_all()

    def _drop(self) -> None:
        self._shelves.clear()
        self._wanted.clear()
        self._ready_bytes = self._seen_features = 0
        self._on_drop()

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled."""
        raise TypeError("a mask pool holds secrets: it cannot be pickled")


def _work(pool_of: weakref.ref[MaskPool]) -> None:
    while True:
        pool = pool_of()
        if pool is None or not pool._refill_one():
            return
        del pool


_POOLS: weakref.WeakSet[MaskPool] = weakref.WeakSet()


def _forget_in_child() -> None:
    for pool in list(_POOLS):
        pool._state = threading.Condition()  # The thread that held the old one is not in this process.
        pool._drop()


def _end_workers() -> None:
    """Ends the workers before the interpreter: a thread that returns from torch's C++ code afterwards aborts the
    process."""
    pools = list(_POOLS)
    for pool in pools:
        pool.close()
    for pool in pools:
        if pool._worker is not None:
            pool._worker.join(_LEAVE_S)


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_end_workers)
