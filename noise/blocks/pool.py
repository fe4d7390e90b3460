"""This module makes masks and their effects (the products of mask and weight) in the background, ahead of use, and
hands out their rows. They wait in memory, or in an encrypted file (noise/blocks/row_file.py).

With a file, the rows that are made go there in records of a few rows. A second thread, the reader, reads the next
record of a layer while the rows of the last one are used, so that calls need not wait for the disk.

By `RowCounts` (rows made, ready and burnt) a pool shows that no row was lost.

`share` runs the threads that make masks. Each thread computes alone on one core, and the threads share a queue of
pieces of work. The threads of torch are not suitable. An operation on a chunk of mask takes 100 µs, and after every
operation OpenMP makes its threads wait for each other, spinning. When other code computed on the same cores (the model,
a provider on the same machine), an operation took 20 to 100 times as long. Threads that never wait for each other lose
only the time that the other work takes.

Guarantees: a row is handed out at most once, whatever threads do, and is burnt before the caller receives it. Without
a file nothing of a pool is written to disk. Nothing is pickled or carried into a forked child: a forked child is
refused, and neither slots nor pools can be pickled or copied. If no row is ready, the caller makes one itself, so an
empty pool costs time and never privacy. A row is in memory or in the file, and never in both.

Not guaranteed: that a block is on record, which noise/ledger/ledger.py guarantees. During a long run callers may still
have to wait, unless a core has time to refill the pool: the worker uses one core, with a low priority. A caller that
makes rows itself uses all cores, and one that finds the worker at its own group's rows waits for the worker. If the
budget does not hold a block for every layer, blocks are made a piece at a time (`piece_rows`), which takes the lattice
mask more arithmetic.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import torch

from noise.blocks.arena import arena, copied, joined
from noise.blocks.row_file import Record, RowFile
from noise.blocks.slots import Origin, Slots
from noise.scheme import GroupSpec
from runtime import threads
from runtime.threads import Workers, all_cores, one_core
from wire.errors import MaskError, VeilbaseError
from wire.frame import ITEM_BYTES, Direction

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowCounts:
    """Counts the rows of a pool over all groups and directions, since the pool was made. Callers got the rows that are
    made and neither ready nor burnt.

    Attributes:
        made: the rows that were made.
        ready: the rows that no call has taken.
        burnt: the rows that were taken for calls of `take` that then failed, those of a direction that was no longer
            used, and those left out so that groups do not run out together. No caller got these rows.
    """

    made: int
    ready: int
    burnt: int


Item = TypeVar("Item")
Result = TypeVar("Result")
_workers = Workers("veilbase-masks")
"""The threads that make masks. They are not those that share a product (runtime/threads.py): a block of masks occupies
them for seconds, and a product does not wait for helpers that are busy."""


def share(work: Callable[[Iterator[Item]], None], items: Sequence[Item]) -> None:
    """Runs `work` in the calling thread and in this module's threads (see `runtime.threads.share`). Gradients are off
    in `work`, and a torch operation in it uses one core."""

    def run(queue: Iterator[Item]) -> None:
        with torch.inference_mode(), one_core():
            work(queue)

    threads.share(run, items, _workers)


def alone(work: Callable[[], Result]) -> Result:
    """Runs `work` in one of this module's threads and returns its result, or raises its error. This is for an operation
    that torch, or MKL's FFT, would spread over several threads if the calling thread ran it.

    Threads that torch or MKL start for an operation spin afterwards, on the cores that the pieces of the next step
    need, which costs these pieces a third of their time. A thread that uses one core anyway runs it itself: a thread
    that the pool's worker started would have the worker's low priority for good.
    """
    if torch.get_num_threads() == 1:
        with torch.inference_mode():
            return work()
    return _workers.submit(torch.inference_mode()(work)).result()


DEFAULT_BYTES, DEFAULT_DEVICE_BYTES = 2 << 30, 512 << 20
"""The most that the default budget of a pool in the CPU's memory may be, and the default budget of one in a GPU's,
where the model needs room too."""
_DISK_TOKENS, _MOST_DISK_BYTES, _SHARE_OF_FREE_DISK = 1024, 16 << 30, 0.25
"""For how many tokens the default size of a file holds masks and effects in one direction (two blocks of 512 rows of
every layer, so that blocks are made as wholes), the most that it may be, and its most of the disk that is free."""
_LEAST_BYTES = 64 << 20
"""The least default budget, on a machine that has little memory left."""
_SHARE_OF_FREE_MEMORY = 0.1
_ENOUGH_TOKENS = 256
"""For how many tokens the default budget holds masks and effects in both directions: a block of 512 rows of every layer
while tokens are generated, or about half a training step."""
STEP_BYTES = 48 << 20
"""The default of what the worker makes ahead for calls of half a block or more, those of training: a step uses every
row once and in the same order, so the worker is ahead of it with the rows of a few layers, and more would only wait."""
_LEAVE_S = 10.0
"""The seconds that the process waits at its exit for a pool's thread that is making blocks. Eight blocks of the widest
layer take a second or two."""
_MOST_CALLS_BEYOND = 3
"""The most later calls whose rows are made together with the rows of the present call. Four blocks that are made
together take about half the time of four that are made one by one. With eight blocks together, the time for each block
is little shorter (docs/decisions/0009-compiled-kernels.md)."""
_STALE_ROUNDS = 4
"""After how many rounds without a call, of as many calls as there are groups and directions in use, a direction counts
as out of use. Training uses both directions in each round, and evaluation between two steps a few rounds of one."""
_LEAST_STALE_CALLS = 1000
_PATIENCE = 10
"""The nice value of the worker, which then takes what time the model leaves, and a provider on the same machine: a step
of 2 × 256 tokens beside its provider on two cores took 4.2 s with all cores and the usual priority, 3.7 with one core
and this one."""
_GOLDEN_RATIO = 0.6180339887498949
"""Its multiples mod 1 are spread evenly, however many there are."""
_BLOCKS_TO_FILE = 2
"""The most blocks of a layer that `prepare` makes together when they go to a file."""
Key = tuple[int, Direction]


@dataclass(eq=False)
class Block:
    """Holds the mask rows and effect rows of a block, or of a piece of a block. No two pieces share a row.

    Attributes:
        mask: int32, shape (num_rows, request columns).
        effect: int32, shape (num_rows, reply columns), or packed (`wire.ring.widths.pack_effect`), shape (num_rows,
            3 · reply columns); unmasking subtracts it.
        slots: says which rows are unused.
    """

    mask: torch.Tensor = field(repr=False)
    effect: torch.Tensor = field(repr=False)
    slots: Slots

    def part(self, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns masks and effects of some rows, without a copy."""
        return self.mask[rows.start : rows.stop], self.effect[rows.start : rows.stop]

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of memory that the block takes."""
        return self.mask.nbytes + self.effect.nbytes


def default_bytes(features: int, free_bytes: int | None, effect_bytes: int = ITEM_BYTES) -> int:
    """Returns the default budget of a pool in the CPU's memory: enough for the next tokens, and at most a tenth of the
    memory that is free when the mask is made.

    Args:
        features: as for `MaskPool`; 0 if unknown.
        free_bytes: the memory that is free; None if unknown.
        effect_bytes: as for `MaskPool`.
    """
    enough = _ENOUGH_TOKENS * 2 * _expected_bytes(features, effect_bytes) or DEFAULT_BYTES
    free = DEFAULT_BYTES if free_bytes is None else int(free_bytes * _SHARE_OF_FREE_MEMORY)
    return max(_LEAST_BYTES, min(DEFAULT_BYTES, enough, free))


def default_disk_bytes(features: int, free_bytes: int | None, effect_bytes: int = ITEM_BYTES) -> int:
    """Returns the default size of a pool's file: enough for two blocks of every layer, and at most a quarter of the
    disk that is free when the mask is made.

    Args:
        features: as for `MaskPool`; 0 if unknown.
        free_bytes: the bytes that are free on the disk; None if they are not to count.
        effect_bytes: as for `MaskPool`.
    """
    enough = _DISK_TOKENS * _expected_bytes(features, effect_bytes) or DEFAULT_BYTES
    free = _MOST_DISK_BYTES if free_bytes is None else int(free_bytes * _SHARE_OF_FREE_DISK)
    return max(_LEAST_BYTES, min(_MOST_DISK_BYTES, enough, free))


def _expected_bytes(features: int, effect_bytes: int) -> int:
    """Returns the bytes of a row of mask and effect over all groups in one direction, in the mean of both directions:
    what is a mask in one is an effect in the other."""
    return features * (ITEM_BYTES + effect_bytes) // 2


Maker = Callable[[GroupSpec, Direction, int], Sequence[Block]]
"""Maps (group, direction, number of rows) to new blocks, or pieces of blocks, that have at least this number of
rows."""


class _Shelf:
    """Holds the mask rows that are ready for one layer group and direction."""

    def __init__(self, group: GroupSpec, row_bytes: int) -> None:
        self.group, self.row_bytes = group, row_bytes
        self.blocks: deque[Block] = deque()
        self.records: deque[Record] = deque()
        self.last_rows = self.rows_a_call = self.rows_in_file = self.last_call = 0
        self.is_wanted = self.is_being_made = self.is_read_wanted = self.is_being_read = False
        self.number = 0  # of this shelf among all, in the order of their first use
        self.is_staggered = False
        self.failure: VeilbaseError | MemoryError | None = None  # what the reader met, for the next caller

    def note_call(self, num_rows: int) -> None:
        """Records how many rows a call took. `rows_a_call` becomes the smaller number of the last two calls, so that
        one long prompt before single tokens does not count."""
        self.last_rows, self.rows_a_call = num_rows, min(self.last_rows, num_rows)

    @property
    def num_rows(self) -> int:
        return self.rows_in_memory + self.rows_in_file

    @property
    def rows_in_memory(self) -> int:
        return sum(block.slots.remaining for block in self.blocks)


class MaskPool:
    """Hands out mask rows. With `background`, a worker thread makes new rows in place of used ones, for the layers in
    the order in which they were used. With a file, another thread reads ahead."""

    def __init__(
        self,
        make: Maker,
        block_rows: int,
        budget_bytes: int = DEFAULT_BYTES,
        background: bool = True,
        least_rows: int | None = None,
        features: int = 0,
        on_drop: Callable[[], object] = lambda: None,
        file: RowFile | None = None,
        effect_bytes: int = ITEM_BYTES,
        step_bytes: int | None = None,
    ) -> None:
        """Makes an empty pool. The first masks are made when the first rows are requested.

        Args:
            make: makes blocks. It is called from any thread, but for one layer group and direction only by one thread
                at a time.
            block_rows: how many rows a whole block has.
            budget_bytes: the most bytes that may be ready ahead of use. A caller that finds no rows makes its own
                beyond the budget.
            background: whether a worker thread makes blocks, and another reads ahead; if not, they are made by `take`
                and `prepare` alone, and read by `take`.
            least_rows: the fewest rows of a block that are worth making alone; None for whole blocks only.
            features: how many numbers one row of mask and effect has over all groups in one direction; 0 if unknown.
                Then the first groups get too much of the budget until every group has been used.
            on_drop: called when all masks are dropped, also in a forked child.
            file: where rows wait, of `budget_bytes`; None for memory. The pool closes it. Rows that do not fit there
                wait in memory.
            effect_bytes: how many bytes each number of the effects has that `make` makes: `ITEM_BYTES`, or
                `EFFECT_BYTES` if they are packed.
            step_bytes: the most bytes that the worker makes ahead for calls of half a block or more; None for
                `budget_bytes`.
        """
        self._step_bytes = budget_bytes if step_bytes is None else min(step_bytes, budget_bytes)
        self._num_calls = 0
        self._live: frozenset[Direction] = frozenset()
        self._make, self._block_rows, self._budget_bytes = make, block_rows, budget_bytes
        self.file = file
        self._least_rows, self._on_drop, self._effect_bytes = least_rows or block_rows, on_drop, effect_bytes
        self._expected_row_bytes = _expected_bytes(features, effect_bytes)
        self._shelves: dict[Key, _Shelf] = {}
        self._state = threading.Condition()
        self._wanted: deque[Key] = deque()
        self._read_wanted: deque[Key] = deque()
        self._held_bytes = self._stored_bytes = self._num_made = self._num_burnt = 0
        self._measure()
        self._closed = False
        self._origin = Origin()
        self._background = background
        self._worker: threading.Thread | None = None
        self._reader: threading.Thread | None = None
        _POOLS.add(self)

    def check_open(self) -> None:
        """Raises MaskError if the pool was closed. Code that makes many blocks must call this method from time to
        time."""
        if self._closed:
            raise MaskError("this mask was closed")

    @property
    def ready_bytes(self) -> int:
        """Returns the bytes of masks and effects that are held now, in memory and in the file."""
        return self._held_bytes + self._stored_bytes

    def row_bytes(self, group: GroupSpec, direction: Direction) -> int:
        """Returns the bytes that a row of mask and its effect take while they are ready."""
        request_cols, reply_cols = group.widths(direction)
        return request_cols * ITEM_BYTES + reply_cols * self._effect_bytes

    @property
    def budget_bytes(self) -> int:
        """Returns the most bytes that may be ready ahead of use."""
        return self._budget_bytes

    @property
    def held_bytes(self) -> int:
        """Returns the bytes of masks and effects that are in memory now."""
        return self._held_bytes

    def ready_rows(self) -> dict[Key, int]:
        """Returns how many rows are ready for each group number and direction that has been requested; 0 if all were
        used."""
        with self._state:
            return {key: shelf.num_rows for key, shelf in self._shelves.items()}

    def row_counts(self) -> RowCounts:
        """Returns how many rows were made, how many are ready, and how many were burnt without use. A closed pool
        counts none."""
        with self._state:
            ready = sum(shelf.num_rows for shelf in self._shelves.values())
            return RowCounts(self._num_made, ready, self._num_burnt)

    def describe(self, what: str) -> str:
        """Returns a line that tells the user how much is ready and was used; `what` names the rows in this line."""
        size = f"{self.ready_bytes / 1e6:.0f} of {self._budget_bytes / 1e6:.0f} MB"
        where = "in memory only"
        if self.file is not None:
            where = (
                f"encrypted in a file without a name in {self.file.folder}, {self._held_bytes / 1e6:.0f} of them in "
                f"memory (read ahead: at most {self.file.held_bytes / 1e6:.0f} MB)"
            )
        line = f"{size} of {what} and effects ready, {where}"
        if rows := self.ready_rows():
            line += f": at least {min(rows.values())} rows in each of {len(rows)} groups and directions"
        counts = self.row_counts()
        used = counts.made - counts.ready - counts.burnt
        return f"{line}; {counts.made} rows made, {used} of them used" if counts.made else line

    def take(self, group: GroupSpec, direction: Direction, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns fresh rows. They are burnt (marked as used) before they are returned. If this fails, the rows that
        were already burnt stay so, and are counted in `RowCounts.burnt`.

        Returns:
            mask, int32, shape (num_rows, request columns); effect, as `Block` has it.

        Raises:
            MaskError: the pool is closed, or this is a forked child (`MaskReused`); nothing may be sent.
            StorageError: a record of the file is damaged, or cannot be read or written; its rows are burnt.
            VeilbaseError: the maker raised it, for example because a hint could not be fetched; nothing may be sent.
        """
        self._origin.check()
        request_cols, reply_cols = group.widths(direction)
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            self._collect(group, direction, num_rows, parts)
        except BaseException:
            with self._state:
                if not self._closed:
                    self._num_burnt += sum(mask.shape[0] for mask, _ in parts)
            raise
        if len(parts) == 1:
            return parts[0]
        if not parts:
            none = torch.empty(0, 0, dtype=torch.int32, device="cpu")
            if self._effect_bytes == ITEM_BYTES:
                return none.view(0, request_cols), none.view(0, reply_cols)
            return none.view(0, request_cols), none.view(torch.uint8).view(0, reply_cols * self._effect_bytes)
        masks, effects = zip(*parts, strict=True)
        mask, effect = joined(masks), joined(effects)
        for each in (*masks, *effects):
            if not each.is_cpu:
                each.zero_()  # A device's memory may come to another process.
        return mask, effect

    def _collect(
        self, group: GroupSpec, direction: Direction, num_rows: int, parts: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Burns fresh rows and appends them to `parts`, which has what was burnt so far if this raises an error."""
        key = (group.id, direction)
        is_noted = False
        while num_rows > 0 or not is_noted:
            with self._state:
                shelf = self._shelf(key, group)
                if not is_noted:
                    self._note_call(key, shelf, num_rows)
                    is_noted = True
                if shelf.failure is not None:
                    failure, shelf.failure = shelf.failure, None
                    raise failure
                num_rows -= self._take_ready(shelf, num_rows, parts)
                self._want(key, shelf)
                beyond = self._rows_beyond(shelf)
                must_read = must_make = False
                if num_rows == 0:
                    self._want_read(key, shelf)
                elif shelf.is_being_read:
                    self._await_read(shelf)
                elif shelf.records:
                    must_read = shelf.is_being_read = True
                else:
                    must_make = self._claim(shelf)
            if must_read:
                self._read(shelf, num_rows)
            elif must_make:
                self._fill(key, shelf, num_rows + beyond, num_rows)

    def _rows_beyond(self, shelf: _Shelf) -> int:
        """Returns how many rows for later calls are worth making together with the rows of this call, since blocks made
        together share transforms.

        The later calls are at most `_MOST_CALLS_BEYOND`, and no more than the budget could hold for every shelf.
        """
        rows = shelf.rows_a_call
        if not self._is_step(shelf):
            return 0  # If calls are single tokens, a block lasts for many calls.
        cycle_bytes = self._row_bytes * -(-rows // self._block_rows) * self._block_rows
        return rows * min(self._step_bytes // cycle_bytes, _MOST_CALLS_BEYOND)

    def _shelf(self, key: Key, group: GroupSpec) -> _Shelf:
        self.check_open()
        shelf = self._shelves.get(key)
        if shelf is None:
            shelf = self._shelves[key] = _Shelf(group, self.row_bytes(group, key[1]))
            shelf.last_call, shelf.number = self._num_calls, len(self._shelves) - 1
            self._measure()
        return shelf

    def _note_call(self, key: Key, shelf: _Shelf, num_rows: int) -> None:
        """Counts a call of `take`, and from time to time looks for a direction that is out of use: a tenant that has
        trained and now serves would else keep a part of the budget for gradients that never come."""
        shelf.note_call(num_rows)
        self._num_calls += 1
        shelf.last_call = self._num_calls
        is_due = self._num_calls % (_LEAST_STALE_CALLS // 2) == 0
        if not is_due and key[1] in self._live:
            return
        self._measure()
        for other, idle in self._shelves.items():
            if other[1] not in self._live and not idle.is_being_made and not idle.is_being_read:
                self._retire(idle)

    def _retire(self, shelf: _Shelf) -> None:
        """Burns and drops all rows of a shelf. The caller must hold the lock, and nobody may be making or reading rows
        of it."""
        self._num_burnt += shelf.num_rows
        for block in shelf.blocks:
            self._held_bytes -= block.num_bytes
            _overwrite(block)
        shelf.blocks.clear()
        for record in shelf.records:
            self._stored_bytes -= record.num_bytes
            if self.file is not None:
                self.file.drop(record)
        shelf.records.clear()
        shelf.rows_in_file = 0

    def _take_ready(self, shelf: _Shelf, num_rows: int, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
        taken = 0
        while shelf.blocks and taken < num_rows:
            block = shelf.blocks[0]
            rows = block.slots.take_up_to(num_rows - taken)
            parts.append(block.part(rows))
            taken += len(rows)
            if block.slots.remaining == 0:
                self._held_bytes -= shelf.blocks.popleft().num_bytes
                self._state.notify_all()  # Blocks that did not fit into the budget may fit now.
        return taken

    def _claim(self, shelf: _Shelf) -> bool:
        """Returns True, and marks the shelf as being filled, if the caller must make rows itself. If another thread is
        making rows for the shelf, this waits for that thread and returns False."""
        if shelf.is_being_made:
            self._state.wait_for(lambda: not shelf.is_being_made or self._closed)
            return False
        shelf.is_being_made = True
        return True

    def _fill(self, key: Key, shelf: _Shelf, num_rows: int, num_now: int = 0, is_ahead: bool = False) -> None:
        """Makes blocks for a shelf that the calling thread has claimed (marked as being filled).

        Args:
            num_now: how many of the rows a caller waits for, so that they need not go through the file.
            is_ahead: whether nobody waits for the rows, so that they are made on one core.
        """
        records: Sequence[Record] = ()
        try:
            with one_core() if is_ahead else all_cores():
                blocks = self._make(shelf.group, key[1], num_rows)
            num_made = sum(block.slots.remaining for block in blocks)
            self._stagger(shelf, blocks, num_now, is_ahead)
            if self.file is not None:
                blocks, records = self._stored(key, blocks, num_now, self.file)
        except BaseException:
            with self._state:
                shelf.is_being_made = False
                self._state.notify_all()
            raise
        with self._state:
            shelf.is_being_made = False
            if not self._closed:
                shelf.blocks.extend(blocks)
                shelf.records.extend(records)
                shelf.rows_in_file += sum(record.num_rows for record in records)
                self._held_bytes += sum(block.num_bytes for block in blocks)
                self._stored_bytes += sum(record.num_bytes for record in records)
                self._num_made += num_made
            self._state.notify_all()

    def _stagger(self, shelf: _Shelf, blocks: Sequence[Block], num_now: int, is_ahead: bool) -> None:
        """Burns some rows of the first block of a shelf, once, if the budget has room for little more than a block of
        each shelf. All calls of a step take as many rows, so all shelves would else run out in the same step, which
        would have to wait for a block of each; a block keeps its memory until its last row is used.

        Args:
            num_now, is_ahead: as for `_fill`. Rows that `prepare` asked for stay.
        """
        fitting = self._budget_bytes // max(1, self._row_bytes)
        is_tight = self._block_rows <= fitting < 2 * self._block_rows and self.file is None
        if shelf.is_staggered or not is_tight or self._may_be_step(shelf) or not (num_now or is_ahead):
            return
        shelf.is_staggered = True
        rows = int(self._block_rows * (shelf.number * _GOLDEN_RATIO % 1))
        burnt = blocks[0].slots.take_up_to(max(0, min(rows, blocks[0].slots.remaining - max(1, num_now))))
        with self._state:
            self._num_burnt += len(burnt)

    # ---- in a file --------------------------------------------------------------------------------------------------

    def _stored(
        self, key: Key, blocks: Sequence[Block], num_now: int, file: RowFile
    ) -> tuple[list[Block], list[Record]]:
        """Moves rows into the file. Each row is burnt in its block first, and is then in one record or in one block of
        those that are returned.

        Returns:
            blocks in memory: of the first `num_now` rows, rounded up to whole records, and of the rows for which the
            file has no room; records of all other rows.
        """
        rows_each = file.rows_of_records(self._row_bytes)
        num_now = -(-num_now // rows_each) * rows_each
        kept: list[Block] = []
        records: list[Record] = []
        try:
            for block in blocks:
                while block.slots.remaining > 0:
                    rows = block.slots.take_up_to(num_now or rows_each)
                    record = None if num_now > 0 else file.put(*key, *block.part(rows))
                    if record is not None:
                        records.append(record)
                        continue
                    if num_now == 0:  # The file is full.
                        rows = range(rows.start, rows.stop + len(block.slots.take_up_to(block.slots.remaining)))
                    num_now = max(0, num_now - len(rows))
                    parts = block.part(rows)
                    if len(rows) < len(block.mask):  # A copy, so that the memory of the other rows is free.
                        parts = copied(parts[0]), copied(parts[1])
                    kept.append(Block(*parts, Slots(len(rows))))
        except BaseException:
            for record in records:
                with contextlib.suppress(MaskError):  # The file was closed meanwhile.
                    file.drop(record)
            raise
        return kept, records

    def _await_read(self, shelf: _Shelf) -> None:
        self._state.wait_for(lambda: not shelf.is_being_read or self._closed)

    def _want_read(self, key: Key, shelf: _Shelf) -> None:
        """Has the reader read the next record, if the rows in memory do not suffice for the next call."""
        if self._background and shelf.records and not shelf.is_read_wanted and self._lacks_rows(shelf):
            shelf.is_read_wanted = True
            self._read_wanted.append(key)
            self._state.notify_all()
            if self._reader is None:
                self._reader = self._start(MaskPool._read_one, "veilbase-masks-reader")

    @staticmethod
    def _lacks_rows(shelf: _Shelf) -> bool:
        return shelf.rows_in_memory < max(1, shelf.rows_a_call)

    def _next_read(self) -> _Shelf | None:
        """Claims the first shelf, in the order of use, that lacks rows and whose next record fits into the memory for
        reading ahead. The caller must hold the lock."""
        for key in list(self._read_wanted):
            shelf = self._shelves[key]
            is_needed = bool(shelf.records) and self._lacks_rows(shelf)
            if is_needed and (shelf.is_being_read or not self._may_hold(shelf.records[0])):
                continue
            self._read_wanted.remove(key)
            shelf.is_read_wanted = False
            if is_needed:
                shelf.is_being_read = True
                return shelf
        return None

    def _may_hold(self, record: Record) -> bool:
        return self.file is not None and self._held_bytes + record.num_bytes <= self.file.held_bytes

    def _next_or_wait(self, find: Callable[[], Result | None]) -> Result | None:
        """Returns what `find`, which is called under the lock, finds at once or after at most a second; None if that is
        nothing, or if the pool is closed."""
        with self._state:
            found = find()
            if found is None and not self._closed:
                self._state.wait(1.0)
                found = find()
            return None if self._closed else found

    def _read_one(self) -> bool:
        """Reads ahead for at most one shelf, which is one round of the reader. Returns False if the pool was closed."""
        shelf = self._next_or_wait(self._next_read)
        if shelf is None:
            return not self._closed
        try:
            self._read(shelf, max(1, shelf.rows_a_call), ahead=True)
        except (VeilbaseError, MemoryError) as exc:
            shelf.failure = exc.with_traceback(None)  # Its frames hold the pool.
        return True

    def _read(self, shelf: _Shelf, num_rows: int, ahead: bool = False) -> None:
        """Reads records of a shelf that the calling thread has claimed (marked as being read) until `num_rows` are in
        memory, or no record is left.

        Args:
            ahead: whether to stop at the bound of what may wait in memory.
        """
        try:
            while True:
                with self._state:
                    if self._closed or shelf.rows_in_memory >= num_rows or not shelf.records:
                        return
                    if ahead and not self._may_hold(shelf.records[0]):
                        return
                    record = shelf.records.popleft()
                self._read_record(shelf, record)
        finally:
            with self._state:
                shelf.is_being_read = False
                self._state.notify_all()

    def _read_record(self, shelf: _Shelf, record: Record) -> None:
        block: Block | None = None
        try:
            if self.file is not None:
                block = Block(*self.file.take(record), Slots(record.num_rows))
        finally:
            with self._state:
                if not self._closed:
                    shelf.rows_in_file -= record.num_rows
                    self._stored_bytes -= record.num_bytes
                    if block is None:
                        self._num_burnt += record.num_rows
                    else:
                        shelf.blocks.append(block)
                        self._held_bytes += block.num_bytes

    # ---- ahead of use -----------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        """Updates which directions are in use, and two counts. One is how many bytes a row of every shelf in use takes
        in total, including shelves that have had no call yet. The other is how many rows of a block are made at a time
        (a piece).

        If the budget holds a block for every shelf, whole blocks are made, and shelves run out one after the other (see
        `_stagger`). If not, a piece is half of the rows that the budget holds for every shelf,
        so that all shelves can be refilled before one has run out.
        """
        last = {direction: 0 for _, direction in self._shelves}
        for (_, direction), shelf in self._shelves.items():
            last[direction] = max(last[direction], shelf.last_call)
        stale = max(_LEAST_STALE_CALLS, _STALE_ROUNDS * len(self._shelves))
        self._live = frozenset(each for each, call in last.items() if self._num_calls - call <= stale)
        seen = sum(shelf.row_bytes for key, shelf in self._shelves.items() if key[1] in self._live)
        self._row_bytes = max(seen, self._expected_row_bytes * max(1, len(self._live)))
        fitting = self._budget_bytes // max(1, self._row_bytes)
        if fitting < self._block_rows:
            fitting //= 2
        num_pieces = -(-self._block_rows // max(self._least_rows, min(fitting, self._block_rows)))
        self._piece_rows = -(-self._block_rows // num_pieces)

    @property
    def piece_rows(self) -> int:
        """Returns the rows made at a time for single tokens: a whole block, or an even part of a block if the model is
        too wide for whole blocks."""
        return self._piece_rows

    def rounded(self, num_rows: int) -> int:
        """Returns how many rows are made if `num_rows` are wanted: whole blocks, and pieces of the last block if pieces
        suffice."""
        whole, rest = divmod(num_rows, self._block_rows)
        pieces = -(-rest // self._piece_rows) * self._piece_rows
        return whole * self._block_rows + min(pieces, self._block_rows)

    def fitting_rows(self, row_bytes: int) -> int:
        """Returns how many rows of `row_bytes` the budget holds, rounded down to a multiple of `piece_rows`, but at
        least `piece_rows`."""
        return self._fitting(row_bytes, self._piece_rows)

    def _fitting(self, row_bytes: int, unit: int) -> int:
        return max(1, self._budget_bytes // row_bytes // unit) * unit

    def _target(self, shelf: _Shelf) -> int:
        """Returns how many rows a shelf should hold: enough for a few calls, within a bound that leaves some of the
        budget to the last layers."""
        if self._piece_rows < self._block_rows and not self._is_step(shelf):
            return self._piece_rows
        is_limited = self._is_step(shelf) and self._step_bytes < self._budget_bytes
        calls = shelf.rows_a_call * (1 if is_limited else 1 + _MOST_CALLS_BEYOND)
        return max(self._block_rows, min(calls, self._fitting(self._row_bytes, self._block_rows)))

    def _may_be_step(self, shelf: _Shelf) -> bool:
        """Tells whether calls are, or may be, those of training: a single long call may have been a prompt."""
        return 2 * (shelf.rows_a_call or shelf.last_rows) >= self._block_rows

    def _is_step(self, shelf: _Shelf) -> bool:
        """Tells whether calls are of half a block or more, as those of training are."""
        return 2 * shelf.rows_a_call >= self._block_rows

    def _want(self, key: Key, shelf: _Shelf) -> None:
        if self._background and not shelf.is_wanted and shelf.num_rows <= self._target(shelf) // 2:
            shelf.is_wanted = True
            self._wanted.append(key)
            self._state.notify_all()
            if self._worker is None:
                self._worker = self._start(MaskPool._refill_one, "veilbase-masks", is_patient=True)

    def _start(self, step: Callable[[MaskPool], bool], name: str, is_patient: bool = False) -> threading.Thread:
        """Starts a thread that repeats `step` until it returns False; if it is patient, with a low priority."""
        # The thread holds only a weak reference to the pool, so that it ends once the pool is collected.
        thread = threading.Thread(target=_repeat, args=(weakref.ref(self), step, is_patient), name=name, daemon=True)
        thread.start()
        return thread

    def _cost(self, shelf: _Shelf, num_rows: int) -> int:
        return self.rounded(num_rows) * shelf.row_bytes

    def _next_wanted(self) -> tuple[Key, _Shelf, int] | None:
        """Claims the first shelf, in the order of use, whose rows fit the budget. Rows for training have a part of it
        that other rows leave free. Returns the shelf's key, the shelf and how many rows to make. The caller must hold
        the lock."""
        steps = [each for each in self._shelves.values() if self._may_be_step(each)] if self._wanted else []
        of_steps = sum(each.num_rows * each.row_bytes for each in steps)
        reserved = self._step_bytes if steps and self._step_bytes < self._budget_bytes else of_steps
        for key in list(self._wanted):
            shelf = self._shelves[key]
            target = self._target(shelf)
            cost = self._cost(shelf, target)
            is_step = self._may_be_step(shelf)
            held, most = (of_steps, self._step_bytes) if is_step else (self.ready_bytes - of_steps + reserved, math.inf)
            if held + cost > min(most, self._budget_bytes) or self.ready_bytes + cost > self._budget_bytes:
                continue  # This shelf may never fit, and must not block the others.
            self._wanted.remove(key)
            shelf.is_wanted = False
            if not shelf.is_being_made and shelf.num_rows <= target // 2:
                shelf.is_being_made = True
                return key, shelf, target
        return None

    def _refill_one(self) -> bool:
        """Refills at most one shelf, which is one round of the worker thread. Returns False if the pool was closed."""
        found = self._next_or_wait(self._next_wanted)
        if found is None:
            return not self._closed
        # The error is dropped here: the thread that needs the rows will make them and get the error itself.
        with contextlib.suppress(Exception):
            self._fill(*found, is_ahead=True)
        return True

    def prepare(self, group: GroupSpec, direction: Direction, num_rows: int) -> None:
        """Makes rows now, in the calling thread, so that `num_rows` are ready. If the missing rows do not all fit into
        the budget, none are made.

        Raises:
            VeilbaseError: see `take`.
        """
        self._origin.check()
        key = (group.id, direction)
        while True:
            with self._state:
                shelf = self._shelf(key, group)
                missing = num_rows - shelf.num_rows
                if missing <= 0 or self.ready_bytes + self._cost(shelf, missing) > self._budget_bytes:
                    return
                must_make = self._claim(shelf)
            if must_make:
                # What goes to a file is made a few blocks at a time, since it passes through memory.
                most = missing if self.file is None else _BLOCKS_TO_FILE * self._block_rows
                self._fill(key, shelf, min(missing, most))

    def close(self) -> None:
        """Drops every mask, and closes the file and drops its key; later calls raise MaskError."""
        with self._state:
            self._closed = True
            self._drop()
            self._state.notify_all()
        if self.file is not None:
            self.file.close()
        arena().trim()

    def _drop(self) -> None:
        for shelf in self._shelves.values():
            for block in shelf.blocks:
                _overwrite(block)
        self._shelves.clear()
        self._wanted.clear()
        self._read_wanted.clear()
        self._held_bytes = self._stored_bytes = self._num_made = self._num_burnt = 0
        self._on_drop()

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied or pickled."""
        raise TypeError("a mask pool holds secrets: it cannot be pickled")


def _overwrite(block: Block) -> None:
    """Overwrites rows that nobody got, if they are in a device's memory, which may come to another process."""
    for each in (block.mask, block.effect):
        if not each.is_cpu:
            each.zero_()


def _repeat(pool_of: weakref.ref[MaskPool], step: Callable[[MaskPool], bool], is_patient: bool) -> None:
    if is_patient and sys.platform == "linux":  # Elsewhere a thread has no priority of its own.
        try:
            usual = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(usual, _PATIENCE))
        except OSError as exc:
            _LOGGER.warning(
                "the thread that makes masks ahead could not get a low priority (%s): it takes time from the model",
                exc.strerror,
            )
    while True:
        pool = pool_of()
        if pool is None or not step(pool):
            return
        del pool


_POOLS: weakref.WeakSet[MaskPool] = weakref.WeakSet()


def _forget_in_child() -> None:
    for pool in list(_POOLS):
        pool._state = threading.Condition()  # The thread that held the old lock is not in this process.
        pool._drop()


def _end_workers() -> None:
    """Closes all pools before the interpreter ends, and waits for their threads, at most `_LEAVE_S` for each. If
    a thread returned from torch's C++ code later, the process would abort."""
    pools = list(_POOLS)
    for pool in pools:
        pool.close()
    for pool in pools:
        for thread in (pool._worker, pool._reader):
            if thread is not None:
                thread.join(_LEAVE_S)


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_end_workers)
