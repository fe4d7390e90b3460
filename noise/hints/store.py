"""This module implements the hint store. A hint is H = A·W̃, the product of the public matrix A and the int8 weight W̃.
The store gets the hint of each layer group and direction once, from the provider or from the tenant's own computing
(noise/hints/local.py), and keeps it on disk. Without a folder it keeps hints in memory, and fetches them again if they
do not fit.

Guarantees: a hint is used only if it was made for exactly this weight, seed, shape, group, direction and rounding, and
every tile that is read from disk first passes its checksum. In a session that verifies the provider's replies, the
caller's `verify` checks each fetched range of a hint's rows at the full 32 bits, before the range is rounded. Such a
session does not use a hint that was fetched without this check, but fetches the hint again. An interrupted fetch
continues with the missing rows. A file gets its final name only when it is complete. If several processes want one
hint, it is fetched once. A hint that the tenant computed and one that was fetched never stand for each other. What is
said here of fetching holds for computing too.

The tenant's own disk is trusted, so nothing protects against a user who writes to it. The checksums detect damaged and
mixed-up files, but not forgeries. Hints are public: without the secrets they do not help an attacker (docs/masks.md,
"lattice").
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from noise.disk.private_files import free_bytes, locked, make_private_folder
from noise.hints.file import ELSEWHERE, Hint, Layout, MappedHint, PartFile, disk_errors
from wire.errors import ConfigurationError, InvalidTensor, MaskError, VerificationFailed
from wire.frame import ITEM_BYTES, Direction
from wire.limits import MIB
from wire.ring.seeded_rows import SEED_BYTES

DEFAULT_DROPPED_BITS = 8
"""How many low bits of each number are rounded away on disk, which leaves 24 bits. The rounding error then stays below
e·W̃, the error that the mask adds to a reply (docs/decisions/0006-lattice.md). On SmolLM2 the error of gradient norms
is then 4e-5 (docs/masks.md, "lattice")."""
DEFAULT_RAM_BUDGET_BYTES = 4 << 30
"""The most bytes of hints that are kept open, 4 GiB. A step uses every hint in turn, so hints that do not fit would be
mapped and checked anew in each step. SmolLM2 has 1.2 GB of hints."""
_MOST_MAPPED = 256
"""The most hints that are kept open. Each mapping holds a file descriptor, of which a process commonly has 1,024."""


@dataclass(frozen=True)
class HintKey:
    """Identifies a hint by its weight, seed, layer group and direction.

    Attributes:
        weights: the group's weight digest, 64 hex digits. In a session that verifies, the tenant has computed this
            digest from its own checkpoint, since a stored `verified` mark means nothing for another weight.
        seed: the public seed of A.
        group, direction: the layer group's number in the manifest, and the direction (forward or backward).
        is_local: whether the tenant computed the hint itself, under a seed that no provider has seen.
    """

    weights: str
    seed: bytes = field(repr=False)
    group: int
    direction: Direction
    is_local: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigurationError for a malformed digest or seed."""
        if re.fullmatch("[0-9a-f]{64}", self.weights) is None or len(self.seed) != SEED_BYTES:
            raise ConfigurationError(f"a hint's key is a digest of 64 hex digits and a seed of {SEED_BYTES} bytes")

    @property
    def seed_digest(self) -> str:
        """Returns the SHA-256 of the seed, as hex."""
        return hashlib.sha256(self.seed).hexdigest()

    def metadata(self) -> dict[str, str]:
        """Returns the fields that state this key in a hint file's header."""
        return {
            "weights": self.weights,
            "seed_sha256": self.seed_digest,
            "group": str(self.group),
            "direction": self.direction.name.lower(),
            **({"computed": "by the tenant"} if self.is_local else {}),
        }


class Reply(Protocol):
    """Stands for hint rows that were requested and may not have been received yet, such as a `Pending` of
    wire/transport."""

    def result(self) -> torch.Tensor:
        """Waits for the rows and returns them: int32, shape (num_rows, features)."""
        ...


Fetch = Callable[[int, int], Reply]
"""A function that requests rows of a hint: it takes (first row, number of rows) and returns the pending rows. It is
called for several ranges before the first is awaited."""
Verify = Callable[[int, torch.Tensor], None]
"""A function that checks rows of a hint: it takes (first row, int32 rows at 32 bits) and raises VerificationFailed
unless these are A·W̃ of the trusted checkpoint."""


@dataclass(frozen=True)
class _Source:
    """Fetches the rows of one hint, and checks them if `verify` is given."""

    fetch: Fetch
    verify: Verify | None
    rows_per_fetch: int
    in_flight: int

    def into(self, write: Callable[[int, torch.Tensor], None], layout: Layout, missing: Iterable[range]) -> None:
        """Fetches the missing rows, checks them if `verify` is given, and passes them to `write` in order. Raises
        InvalidTensor if a reply has another shape or dtype."""
        ranges = [part for rows in missing for part in _split(rows, self.rows_per_fetch)]
        for part, reply in self._replies(ranges):
            if reply.dtype != torch.int32 or reply.shape != (len(part), layout.features):
                raise InvalidTensor(
                    f"expected int32 hint rows of shape ({len(part)}, {layout.features}), "
                    f"got {reply.dtype} of shape {tuple(reply.shape)}"
                )
            if self.verify is not None:
                self.verify(part.start, reply)
            write(part.start, reply)

    def _replies(self, ranges: list[range]) -> Iterator[tuple[range, torch.Tensor]]:
        """Yields the replies in order, and requests up to `in_flight` ranges at a time."""
        waiting: deque[tuple[range, Reply]] = deque()
        for part in ranges:
            waiting.append((part, self.fetch(part.start, len(part))))
            if len(waiting) >= self.in_flight:
                first, reply = waiting.popleft()
                yield first, reply.result()
        while waiting:
            first, reply = waiting.popleft()
            yield first, reply.result()


def _split(rows: range, most: int) -> Iterator[range]:
    for start in range(rows.start, rows.stop, most):
        yield range(start, min(start + most, rows.stop))


class HintStore:
    """Keeps hints by key, safely under threads and processes. Callers call `get` for each use of a hint and drop the
    hint afterwards.

    The RAM budget bounds the hints that the store itself keeps open: mapped files on disk (their pages may be in
    memory) or, without a folder, whole hints in memory. The least recently used hint is dropped first. A hint larger
    than the budget is returned but not kept. A file that is mapped again is checked again. The kernel's page cache is
    not counted, since the kernel frees it for other needs by itself.
    """

    def __init__(
        self,
        folder: Path | None,
        dropped_bits: int = DEFAULT_DROPPED_BITS,
        ram_budget_bytes: int = DEFAULT_RAM_BUDGET_BYTES,
        range_bytes: int = 8 * MIB,
        in_flight: int = 4,
    ) -> None:
        """Opens a store; nothing is read or written yet.

        Args:
            folder: where hints are stored, made with mode 0700. None keeps hints in memory only, unrounded, within the
                RAM budget; other hints are fetched again for each use (`hints="stream"`).
            dropped_bits: the low bits that are rounded away on disk: 0, 8, 10 or 12.
            ram_budget_bytes: see the class.
            range_bytes: the most bytes of one fetched range of rows; a single row may exceed it.
            in_flight: the most ranges that are requested at a time.

        Raises:
            ConfigurationError: `dropped_bits` is another number, `ram_budget_bytes` is negative, or `range_bytes` or
                `in_flight` is below 1.
        """
        Layout(1, 1, dropped_bits)  # This call refuses other roundings.
        if min(ram_budget_bytes, range_bytes - 1, in_flight - 1) < 0:
            raise ConfigurationError("a hint store's RAM budget, range size and ranges in flight must be positive")
        self.folder = folder
        self.dropped_bits = dropped_bits if folder is not None else 0
        self._budget_bytes = ram_budget_bytes
        self._range_bytes = range_bytes
        self._in_flight = in_flight
        self._kept: OrderedDict[tuple[HintKey, Layout], Hint] = OrderedDict()
        self._forgotten: set[bytes] = set()
        self._renew_locks()
        _STORES.add(self)

    def _renew_locks(self) -> None:
        self._fetching: dict[tuple[HintKey, Layout], threading.Lock] = {}
        self._lock = threading.Lock()

    def get(
        self,
        key: HintKey,
        shape: tuple[int, int],
        fetch: Fetch,
        *,
        verify: Verify | None = None,
        rows_per_fetch: int | None = None,
    ) -> Hint:
        """Returns one hint: one that is kept open, one from disk, or one that is fetched now.

        Args:
            key: which hint.
            shape: (rank·N, reply features).
            fetch: asks the provider for rows; not called if a hint that may be used is kept or stored.
            verify: called on every fetched range. If it is given, a hint that was stored without a check is fetched
                again.
            rows_per_fetch: the most rows that the provider accepts in a request; None if only `range_bytes` limits
                them.

        Raises:
            MaskError: the file is damaged or belongs to another model, seed or setting; nothing was sent.
            VerificationFailed: `verify`, or a reply that `fetch` returned, raised it; all fetched rows of this hint
                were deleted.
            ConfigurationError: the folder cannot be written, or its disk is full.
            InvalidTensor: a reply has another shape or dtype.
            VeilbaseError: `fetch` or its reply raised it; the next `get` continues from the rows that were stored.
        """
        layout = Layout(*shape, self.dropped_bits)
        source = _Source(fetch, verify, self.rows_at_once(layout.features, rows_per_fetch), self._in_flight)
        slot = (key, layout)
        with self._lock:
            turn = self._fetching.setdefault(slot, threading.Lock())
        with turn:  # If several threads want one hint, it is fetched once.
            hint = self._recall(slot)
            if hint is None or (verify is not None and not hint.verified):
                try:
                    hint = self._load(slot, source)
                finally:
                    if key.seed in self._forgotten:
                        self._clear(key.seed)  # `forget` skipped the files that this thread had locked.
                self._keep(slot, hint)
        return hint

    def rows_at_once(self, features: int, rows_per_fetch: int | None) -> int:
        """Returns how many rows of a hint with so many features are asked for together; see `get`."""
        most_rows = max(1, self._range_bytes // (features * ITEM_BYTES))
        return min(most_rows, rows_per_fetch or most_rows)

    def _load(self, slot: tuple[HintKey, Layout], source: _Source) -> Hint:
        key, layout = slot
        if self.folder is None or key.seed in self._forgotten:  # A block of the old seed may be unfinished.
            return _stream(Layout(layout.rows, layout.features, 0), source)
        return self._from_disk(self.folder, slot, source)

    def has(self, key: HintKey, shape: tuple[int, int], verified: bool = False) -> bool:
        """Tells whether the hint's file is on disk, complete and with the header that it should have. Its numbers are
        checked only when they are read.

        Args:
            key, shape: see `get`.
            verified: whether a file that was stored without a check counts as missing.
        """
        if self.folder is None:
            return False
        layout = Layout(*shape, self.dropped_bits)
        try:
            found = MappedHint.open(self._path(self.folder, key, layout), layout, key.metadata())
        except MaskError:
            return False
        return found is not None and (found.verified or not verified)

    def _recall(self, slot: tuple[HintKey, Layout]) -> Hint | None:
        with self._lock:
            hint = self._kept.get(slot)
            if hint is not None:
                self._kept.move_to_end(slot)
            return hint

    def _keep(self, slot: tuple[HintKey, Layout], hint: Hint) -> None:
        with self._lock:
            self._kept.pop(slot, None)
            if hint.num_bytes > self._budget_bytes or slot[0].seed in self._forgotten:
                return
            self._kept[slot] = hint
            held = sum(other.num_bytes for other in self._kept.values())
            while held > self._budget_bytes or len(self._kept) > _MOST_MAPPED:
                held -= self._kept.popitem(last=False)[1].num_bytes

    def _from_disk(self, folder: Path, slot: tuple[HintKey, Layout], source: _Source) -> Hint:
        key, layout = slot
        path = self._path(folder, key, layout)
        found = MappedHint.open(path, layout, key.metadata())
        if found is not None and (found.verified or source.verify is None):
            return found
        with disk_errors(path, layout.file_bytes):
            make_private_folder(folder)
        with _locked(path.with_suffix(".lock")):
            found = MappedHint.open(path, layout, key.metadata())  # Another process may have fetched it.
            if found is None or (source.verify is not None and not found.verified):
                _fetch_to(path, slot, source)
                found = MappedHint.open(path, layout, key.metadata())
        if found is None:
            raise ConfigurationError(f"the hint file {path} was deleted as soon as it was made")
        return found

    @staticmethod
    def _path(folder: Path, key: HintKey, layout: Layout) -> Path:
        """Returns `SEED/GROUP-DIRECTION-DIGEST.safetensors`; the digest covers everything that a hint depends on."""
        stated = repr((sorted(key.metadata().items()), layout)).encode()
        name = f"{key.group}-{key.direction.name.lower()}-{hashlib.sha256(stated).hexdigest()[:24]}.safetensors"
        return folder / key.seed_digest[:24] / name

    def total_bytes(self, shapes: Iterable[tuple[int, int]]) -> int:
        """Returns the bytes that hints of these shapes take on disk; without a folder, the bytes fetched to use each
        hint once."""
        layouts = (Layout(*shape, self.dropped_bits) for shape in shapes)
        if self.folder is None:
            return sum(layout.rows * layout.features * ITEM_BYTES for layout in layouts)
        return sum(layout.file_bytes for layout in layouts)

    def check_room(self, num_bytes: int) -> None:
        """Raises ConfigurationError if the disk has less than `num_bytes` free, so that a model's hints are not begun
        where they will not fit; does nothing without a folder."""
        if self.folder is None:
            return
        free = free_bytes(self.folder)
        if num_bytes > free:
            raise ConfigurationError(
                f"hints take {num_bytes / 1e6:,.0f} MB in {self.folder}, where {free / 1e6:,.0f} MB are free; "
                f"{ELSEWHERE}"
            )

    def stored_bytes(self) -> int:
        """Returns the bytes that are on disk now: the hints of every seed, and the remains of interrupted fetches; 0
        without a folder."""
        if self.folder is None:
            return 0
        total = 0
        for folder, _, names in os.walk(self.folder):  # A folder that vanishes is skipped.
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # Another process may finish a fetch meanwhile.
                    total += os.stat(os.path.join(folder, name)).st_size
        return total

    def rounding_bound(self) -> int:
        """Returns the largest distance of a stored coefficient from the exact one, mod 2^32: 2^(t-1) for t dropped
        bits, or 0."""
        return 1 << (self.dropped_bits - 1) if self.dropped_bits else 0

    def forget(self, seed: bytes) -> None:
        """Deletes every hint of a seed that is no longer used (after a reseed), without waiting.

        Hints in use stay readable. A hint that is being fetched is deleted when its fetch has ended: in this process by
        that fetch, in another process when that process forgets the seed itself. A later caller still gets the hint,
        but it is not stored.
        """
        with self._lock:
            self._forgotten.add(seed)
            for slot in [slot for slot in self._kept if slot[0].seed == seed]:
                del self._kept[slot]
        self._clear(seed)

    def _clear(self, seed: bytes) -> None:
        """Deletes a seed's files, except those that another thread or process is writing."""
        if self.folder is None:
            return
        folder, names = self.folder / hashlib.sha256(seed).hexdigest()[:24], []
        with contextlib.suppress(OSError):  # Here and below, another process may clear the same files.
            names = os.listdir(folder)
        for path in {(folder / name).with_suffix(".lock") for name in names}:
            with contextlib.suppress(OSError), locked(path, wait=False) as is_held:
                if is_held:
                    for suffix in (".safetensors", ".part", ".journal", ".lock"):  # The lock file is removed last.
                        path.with_suffix(suffix).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # The folder may not be empty, or may be gone.
            folder.rmdir()

    def close(self) -> None:
        with self._lock:
            self._kept.clear()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a file lock (`noise.disk.private_files.locked`) while the block runs, and makes the lock's folder if it is
    missing. Raises ConfigurationError if the folder cannot be made."""
    with contextlib.ExitStack() as stack:
        is_held = False
        while not is_held:
            with disk_errors(path, 0):
                with contextlib.suppress(FileExistsError):  # mkdir(exist_ok=True) would look a second time.
                    path.parent.mkdir(mode=0o700)
                with contextlib.suppress(FileNotFoundError):  # `forget` removed the folder meanwhile.
                    is_held = stack.enter_context(locked(path))
        yield


def _fetch_to(path: Path, slot: tuple[HintKey, Layout], source: _Source) -> None:
    """Fetches the rows of a hint that no earlier attempt has stored, and gives the complete file its final name."""
    key, layout = slot
    with PartFile(path, layout, verified=source.verify is not None) as part:
        try:
            source.into(part.write, layout, part.missing())
        except VerificationFailed:
            part.delete()  # No row from a provider that was caught lying is kept, even if it passed its check.
            path.unlink(missing_ok=True)
            raise
        part.finish(key.metadata())


class _StreamedHint(Hint):
    """Holds a hint in memory, unrounded, for a store that has no folder."""

    def __init__(self, layout: Layout, verified: bool) -> None:
        super().__init__(layout, verified, layout.rows * layout.features * ITEM_BYTES)
        self._numbers = torch.empty(layout.rows, layout.features, dtype=torch.int32, device="cpu")

    def write(self, first_row: int, rows: torch.Tensor) -> None:
        self._numbers[first_row : first_row + rows.shape[0]] = rows

    def _load(self, start: int, stop: int) -> torch.Tensor:
        return self._numbers[:, start:stop].clone(memory_format=torch.contiguous_format)


def _stream(layout: Layout, source: _Source) -> Hint:
    hint = _StreamedHint(layout, source.verify is not None)
    source.into(hint.write, layout, [range(layout.rows)])
    return hint


_STORES: weakref.WeakSet[HintStore] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for store in list(_STORES):
        store._renew_locks()  # The threads that held the old locks are not in this process.


os.register_at_fork(after_in_child=_after_fork_in_child)
