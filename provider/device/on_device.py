"""Defines the replica whose weights are on an accelerator, and how rows reach the device and products come back.

A `DeviceStream` moves rows to the device and products back, through staging buffers in pinned memory. It holds one
block of rows at a time. Two streams that take turns let the copies of one block overlap with the product of another.

`FewRows` computes small ring products, such as those of decode steps. For a row of one token the product takes less
time than starting its kernels one by one. So the copy to the device, the product and the copy back are captured as a
graph, once for each layer group, direction and number of rows in `_HEIGHTS`, and replayed with one call. Where the
device cannot capture, the same steps are started one by one.

Guarantees: in ring arithmetic a reply is that of the CPU, to the last bit; with or without captured graphs, small
products are those of `coding.product`. In float arithmetic TF32 is off and every row is multiplied in a block of
`FLOAT_ROWS` rows, so that a reply depends neither on the rows beside it nor on how a request was cut; it differs from
the CPU's by rounding alone. A product that the device could not finish is never answered with numbers: the tenant gets
an error, or the executor has the product computed again. Before its first product, each group was compared with the
CPU's product in both directions. A stream copies a block of rows to the device once, and its product back once. Rows
and replies that are on the device, in memory that a tenant shares, are copied there and cross nothing.

The same code runs on torch's `cpu` device, where it is tested; there are no CUDA streams and no graphs there, and a
stream computes a block at once. Of GPUs the tests were run on one H100.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from provider.device.weights import Moved, move
from provider.engine import products
from provider.engine.replica import RETRY_S, ReplicaLost
from provider.model.served_group import ServedGroup
from wire.errors import ConfigurationError, InvalidTensor, Unavailable, UnknownLayer, VeilbaseError
from wire.frame import DTYPES, ITEM_BYTES, Arithmetic, Call, Direction, Purpose, check_rows
from wire.ring import coding
from wire.ring.buffers import unwritten_like, unwritten_tensor
from wire.ring.product import is_exact_on
from wire.ring.seeded_rows import Rows, SeededRows
from wire.ring.tiles import RowsAndReply, row_blocks

MOST_ROWS = 8
"""The most rows of a small product. The executor may compute products of up to 8 rows in the thread that received
them."""
_HEIGHTS = (1, MOST_ROWS)
"""The numbers of rows of captured products; a product of fewer rows is padded with zeros."""
MOST_GRAPHS = 2048
"""The most graphs that are kept; further products are started step by step. A model of 32 blocks has 512 products."""
_LOGGER = logging.getLogger(__name__)

Place = tuple[int, Direction]
"""A layer group's id and a direction, which stand for one weight."""


class FewRows:
    """Computes products of at most MOST_ROWS rows, one at a time, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        """Makes the object without any graph; each graph is captured when it is first needed."""
        self._stream, self._lock = DeviceStream(device), threading.Lock()
        self.graphs: dict[tuple[Place, int], Callable[[], None]] = {}
        self._may_capture = device.type == "cuda"
        self._pool: Any = None

    def product(self, place: Place, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns the ring product of a few rows.

        Args:
            place: stands for the weight.
            weight: int8, shape (d, m), on the device; always the same tensor for the same place.
            rows: int32, shape (1 to MOST_ROWS, d), CPU.

        Returns:
            int32, shape (num_rows, m), CPU, with memory of its own.
        """
        num_rows = rows.shape[0]
        height = next(one for one in _HEIGHTS if num_rows <= one)
        with self._lock:
            run = self.graphs.get((place, height)) or self._prepared(place, height, weight)
            here = self._stream.rows.view(height, weight.shape[0], torch.int32)
            here[:num_rows].copy_(rows)
            here[num_rows:].zero_()
            with self._stream.current():
                run()
            self._stream.synchronize()
            back = self._stream.reply.view(height, weight.shape[1], torch.int32)
            return unwritten_tensor(num_rows, weight.shape[1], torch.int32).copy_(back[:num_rows])

    def reserve(self, widest: int) -> None:
        """Makes the staging buffers as large as they will ever be, since captured graphs hold their addresses. `widest`
        is the largest number of columns of rows and replies."""
        for staging in (self._stream.rows, self._stream.reply):
            staging.view(MOST_ROWS, widest, torch.int32)

    def drop(self) -> None:
        """Forgets all graphs, after an error of the device."""
        with self._lock:
            self._stream.drop()
            self.graphs.clear()
            self._pool = None

    def _prepared(self, place: Place, height: int, weight: torch.Tensor) -> Callable[[], None]:
        here = self._stream.rows.view(height, weight.shape[0], torch.int32)
        back = self._stream.reply.view(height, weight.shape[1], torch.int32)

        def steps() -> None:
            there = here.to(self._stream.device, non_blocking=True)
            back.copy_(coding.product(there, weight), non_blocking=True)

        run: Callable[[], None] = steps
        if self._may_capture and len(self.graphs) < MOST_GRAPHS:
            run = self._captured(steps)
        if len(self.graphs) < MOST_GRAPHS:
            self.graphs[place, height] = run
        return run

    def _captured(self, steps: Callable[[], None]) -> Callable[[], None]:
        """Captures steps as a graph, and returns a function that replays it; returns the steps themselves if that
        fails."""
        graph = torch.cuda.CUDAGraph()
        with self._stream.current():
            steps()  # Compiles kernels, copies the weight and allocates workspaces, none of which may be captured.
            self._stream.synchronize()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            try:
                # Other threads may allocate memory on the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    steps()
                finally:
                    graph.capture_end()
            except RuntimeError as exc:
                self._may_capture = False
                _LOGGER.warning("small products are started step by step: %s", type(exc).__name__)
                return steps
        return graph.replay


Multiply = Callable[[torch.Tensor], torch.Tensor]
"""A function that maps rows on a device to their product on that device."""


class DeviceStream:
    """Holds a stream of the device, and the staging buffers for the rows and the reply of one block."""

    def __init__(self, device: torch.device, is_here: Callable[[torch.Tensor], bool] = lambda one: one.is_cpu) -> None:
        """Makes a stream, without any staging memory yet.

        Args:
            device: a CUDA device, or torch's `cpu`.
            is_here: returns whether a tensor is in the CPU's memory and has to cross; on torch's `cpu` device, where
                all tensors are, tests may say otherwise.
        """
        self.device, self._is_here = device, is_here
        is_cuda = device.type == "cuda"
        self._cuda = torch.cuda.Stream(device) if is_cuda else None
        self.rows, self.reply = Staging(is_cuda), Staging(is_cuda)
        self.block: list[RowsAndReply] = []
        """The pairs of the block that was started whose rows and replies cross. Those on the device are in
        `_staying`."""
        self._staying: list[RowsAndReply] = []
        self._there: torch.Tensor | None = None

    def current(self) -> AbstractContextManager[object]:
        """Returns a context in which torch's operations run on this stream."""
        return contextlib.nullcontext() if self._cuda is None else torch.cuda.stream(self._cuda)

    def start(self, block: Sequence[RowsAndReply], multiply: Multiply, num_padded: int = 0) -> None:
        """Finishes the block that was started before, if there is one, and starts the product of a block of rows.

        Args:
            block: pairs of rows and memory for their product, all of the same widths; a pair is on the CPU or on the
                device.
            multiply: computes the product of rows on the device.
            num_padded: rows of zeros are appended to the block up to this number of rows.
        """
        self.finish()
        count = sum(rows.shape[0] for rows, _ in block)
        self.block = [pair for pair in block if self._is_here(pair[0])]
        self._staying = [pair for pair in block if not self._is_here(pair[0])]
        (first, reply), crossing = block[0], sum(rows.shape[0] for rows, _ in self.block)
        here = self.rows.view(crossing, first.shape[1], first.dtype)
        for (rows, _), part in zip(self.block, _parts(here, self.block), strict=True):
            part.copy_(rows)
        back = self.reply.view(crossing, reply.shape[1], reply.dtype)
        with self.current():
            height = max(count, num_padded)
            self._there = there = torch.empty(height, first.shape[1], dtype=first.dtype, device=self.device)
            there[:crossing].copy_(here, non_blocking=True)
            for (rows, _), part in zip(self._staying, _parts(there[crossing:count], self._staying), strict=True):
                part.copy_(rows, non_blocking=True)
            there[count:].zero_()
            product = multiply(there)
            back.copy_(product[:crossing], non_blocking=True)
            for (_, mine), part in zip(self._staying, _parts(product[crossing:count], self._staying), strict=True):
                mine.copy_(part, non_blocking=True)

    def finish(self) -> None:
        """Waits for the product of the block that was started, if there is one, and writes it to the block's memory."""
        if self._there is None:
            return
        self.synchronize()
        if self.block:
            first = self.block[0][1]
            back = self.reply.view(sum(rows.shape[0] for rows, _ in self.block), first.shape[1], first.dtype)
            for (_, reply), part in zip(self.block, _parts(back, self.block), strict=True):
                reply.copy_(part)
        self._let_go()

    def synchronize(self) -> None:
        if self._cuda is not None:
            self._cuda.synchronize()

    def drop(self) -> None:
        """Gives up the block that was started, and waits until the device no longer uses the staging buffers. An error
        of a lost device is ignored, since nothing in its memory is used again."""
        with contextlib.suppress(RuntimeError):  # The memory is let go only after the device has stopped using it.
            self.synchronize()
        self._let_go()

    def _let_go(self) -> None:
        self.block, self._staying, self._there = [], [], None


def _parts(stacked: torch.Tensor, pairs: Sequence[RowsAndReply]) -> Sequence[torch.Tensor]:
    """Returns the rows of each pair in a matrix that has the rows of all pairs, one pair after the other."""
    return stacked.split([rows.shape[0] for rows, _ in pairs]) if pairs else ()


class Staging:
    """Holds memory through which rows pass on their way to or from a device. It grows to the largest use."""

    def __init__(self, is_pinned: bool) -> None:
        """Makes an empty buffer. `is_pinned` says whether the device reads it directly, in copies that overlap with
        other work."""
        self._is_pinned = is_pinned
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def view(self, num_rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a matrix in this memory, with any content; `dtype` must have four bytes. Every call returns the same
        memory, until one asks for more."""
        size = num_rows * cols * ITEM_BYTES
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned)
        return self._memory[:size].view(dtype).view(num_rows, cols)


COPY_BYTES = 4 << 20
"""The most bytes of rows, or of their product, that one copy moves in ring arithmetic. Requests are cut evenly, so
copies of large ones have 2 to 4 MiB: enough to fill a link, and small enough for copies and products to overlap."""
FLOAT_ROWS = 64
"""The number of rows of every product in float arithmetic. Libraries choose another order of additions for another
number of rows, so a fixed number makes a row's result independent of its companions."""
_CHECKED_ROWS = 3
"""The number of rows of each group's first product, which is compared with the CPU's."""
_FLOAT_TOLERANCE = 1e-4
"""The largest accepted difference between the device's float products and the CPU's, relative to the largest number of
the product. TF32 would differ by 1e-3."""
PAUSE_S, MAX_TRIES = 1.0, 30
"""A lost device is tried again every `PAUSE_S` seconds, `MAX_TRIES` times. CUDA often needs a new process."""


class OnDevice:
    """Computes products on an accelerator, as a `provider.engine.replica.Replica`. Small products have a stream of
    their own, so that they run beside a large one."""

    can_share = True

    def __init__(self, groups: list[ServedGroup], device: torch.device) -> None:
        """Moves groups to a device and checks their products.

        Args:
            groups: the groups, on the CPU; the list is emptied.
            device: a CUDA device from `provider.device.choice.choose`, or torch's `cpu` for tests.

        Raises:
            ConfigurationError: the weights do not fit, a product on the device is wrong, or the device fails.
        """
        self.device = device
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False
        self.streams, self._lock = (DeviceStream(device), DeviceStream(device)), threading.Lock()
        self.few = FewRows(device)
        self.is_lost = self._is_closed = False
        """The first says that the device failed in a product, and that `revive` has not brought it back yet."""
        self.waits = True
        """Whether a product of rows on the device is complete when it is returned. A tenant in this process sets it to
        False, since the device does its work in the order in which it was asked for."""
        self.moved_groups: dict[int, Moved] = {}
        try:
            self.few.reserve(max((max(g.info.in_features, g.info.out_features) for g in groups), default=1))
            self.moved_groups = move(groups, device, self.check_products)
        except RuntimeError as exc:  # only the type: a text of CUDA's says nothing that an operator could change
            raise ConfigurationError(f"{device} cannot be used: {type(exc).__name__} while weights moved") from None

    # ---- products -------------------------------------------------------------------------------------------------

    def product(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes one product; see `Replica.product`."""
        moved = self._held(call)
        check_rows(call, rows)
        if isinstance(rows, SeededRows):
            return self._seeded(moved, call, rows)
        return self._checked(moved, call, [rows])[0]

    def products(self, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Computes the products of several requests' rows; see `Replica.products`. Rows may be on this device already;
        their reply is, too."""
        moved = self._held(call)
        for rows in parts:
            check_rows(call, rows)
        return self._checked(moved, call, parts)

    def row_product(self, call: Call) -> None:
        """Returns None, since no way is shorter for one row than `product`; see `Replica.row_product`."""

    def _checked(self, moved: Moved, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        info, is_ring = moved.group.info, call.arithmetic is Arithmetic.RING
        for rows in parts:
            products.check_cols(info, call, rows.shape[1])
            if not is_ring and rows.shape[0] and not products.all_finite(rows):
                raise InvalidTensor("a row holds NaN or infinity")
        with self._faults():
            if is_ring and len(parts) == 1 and parts[0].is_cpu and 0 < parts[0].shape[0] <= MOST_ROWS:
                weight = moved.weights[call.direction]
                return [self.few.product((info.id, call.direction), weight, parts[0])]
            if is_ring and not any(rows.is_cpu for rows in parts):
                return self._products_there(moved.weights[call.direction], parts)
            widths = info.widths(call.direction)
            replies = [unwritten_like(rows, rows.shape[0], widths[1], DTYPES[call.arithmetic]) for rows in parts]
            num_rows = sum(rows.shape[0] for rows in parts)
            step = _step(num_rows, max(widths)) if is_ring else FLOAT_ROWS
            self._run(row_blocks(parts, replies, step), multiply_of(moved, call), 0 if is_ring else FLOAT_ROWS)
        return replies

    def _products_there(self, weight: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns ring products of rows that are on the device, in its memory. Nothing crosses, so rows are not cut.
        Another process may read the replies, so this waits for the device."""
        rows = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        product = coding.product(rows, weight)
        if self.waits:
            torch.cuda.current_stream(self.device).synchronize()
        return list(product.split([part.shape[0] for part in parts]))

    def _seeded(self, moved: Moved, call: Call, rows: SeededRows) -> torch.Tensor:
        """Computes a part of a hint: expands rows on the CPU, a few at a time, and multiplies them on the device."""
        given, reply_cols = moved.group.info.widths(call.direction)
        products.check_cols(moved.group.info, call, given)
        reply = unwritten_tensor(rows.num_rows, reply_cols, torch.int32)

        def blocks() -> Iterator[list[RowsAndReply]]:
            for part in rows.split(_step(rows.num_rows, max(given, reply_cols))):
                start = part.first_row - rows.first_row
                yield [(part.expand(given), reply[start : start + part.num_rows])]

        with self._faults():
            self._run(blocks(), multiply_of(moved, call))
        return reply

    def _run(self, blocks: Iterator[list[RowsAndReply]], multiply: Multiply, num_padded: int = 0) -> None:
        """Computes blocks on two streams that take turns."""
        with self._lock:
            try:
                for number, block in enumerate(blocks):
                    self.streams[number % 2].start(block, multiply, num_padded)
                for stream in self.streams:
                    stream.finish()
            except BaseException:
                for stream in self.streams:
                    stream.drop()
                raise

    def _held(self, call: Call) -> Moved:
        if self.is_lost:
            raise ReplicaLost(began=False)
        moved = self.moved_groups.get(call.group)
        if moved is None:
            raise UnknownLayer("this device does not hold that group")
        return moved

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Turns errors of the device into errors of this provider. Their texts are dropped, since they may hold values
        of a tenant's rows."""
        try:
            yield
        except VeilbaseError:
            raise
        except torch.OutOfMemoryError:
            _LOGGER.warning("%s had no memory left for a product", self.device)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            raise Unavailable("the device has no memory left for this product", RETRY_S) from None
        except RuntimeError as exc:
            # After such an error no number of the device can be trusted before it has passed its tests again.
            _LOGGER.error("%s failed: %s", self.device, type(exc).__name__)
            self.is_lost = True
            self.few.drop()
            raise ReplicaLost from None

    # ---- checks ---------------------------------------------------------------------------------------------------

    def check_products(self, here: ServedGroup, there: Moved) -> None:
        """Compares the products of a group that has moved with the CPU's. This also makes the copies of the weight that
        kernels keep, so that a lack of memory shows now.

        Raises:
            ConfigurationError: a product is wrong.
        """
        for direction in Direction:
            cols = here.info.widths(direction)[0]
            generator = torch.Generator().manual_seed(here.info.id)
            numbers = torch.randint(-(2**31), 2**31, (_CHECKED_ROWS, cols), generator=generator, device="cpu")
            numbers[0] = 2**31 - 1
            for arithmetic in (Arithmetic.RING, Arithmetic.FLOAT):
                call = Call(here.info.id, direction, arithmetic, Purpose.EFFECT)
                rows = numbers.to(torch.int32) if arithmetic is Arithmetic.RING else (numbers / 2.0**31).float()
                expected = products.product(here, call, rows)
                found = torch.empty_like(expected)
                num_padded = 0 if arithmetic is Arithmetic.RING else FLOAT_ROWS
                self._run(iter([[(rows, found)]]), multiply_of(there, call), num_padded)
                if not _agree(found, expected):
                    raise ConfigurationError(f"{self.device} computed a wrong product of {here.info.name}")

    @property
    def is_alive(self) -> bool:
        return not self.is_lost

    @property
    def can_return(self) -> bool:
        """Returns whether `revive` may bring the device back: True until the replica is closed or given up."""
        return not self._is_closed

    def revive(self, is_over: threading.Event) -> bool:
        """Tries a lost device again, up to `MAX_TRIES` times, until it passes its self-test and still holds the
        weights; see `Replica.revive`."""
        for _ in range(MAX_TRIES):
            if self._is_closed or is_over.wait(PAUSE_S):
                return False
            try:
                is_good = self.passes_self_test() and all(moved.is_whole() for moved in self.moved_groups.values())
            except RuntimeError:
                continue
            if is_good:
                self.is_lost = False
                _LOGGER.warning("%s works again", self.device)
                return True
        _LOGGER.error("%s is given up: start the provider again", self.device)
        self._is_closed = True
        return False

    def passes_self_test(self) -> bool:
        """Returns whether the device's kernels are exact; True for torch's `cpu` device, which has no kernels of its
        own."""
        return self.device.type == "cpu" or is_exact_on(self.device, again=True)

    def close(self) -> None:
        """Frees the weights on the device."""
        self._is_closed = True
        with self._lock:
            self.few.drop()
            self.moved_groups.clear()
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


def _step(num_rows: int, widest: int) -> int:
    """Returns the rows of each copy: even parts of at most COPY_BYTES."""
    most = max(1, COPY_BYTES // (ITEM_BYTES * widest))
    return max(1, -(-num_rows // max(1, -(-num_rows // most))))


def multiply_of(moved: Moved, call: Call) -> Multiply:
    """Returns the function that multiplies rows by a group's weight on the device, in the direction and the arithmetic
    that the call names."""
    if call.arithmetic is Arithmetic.FLOAT:
        return lambda rows: products.float_product(moved.group, call, rows)
    weight = moved.weights[call.direction]
    return lambda rows: coding.product(rows, weight)


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if expected.dtype == torch.int32:
        return torch.equal(found, expected)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return bool(torch.isfinite(found).all()) and float((found - expected).abs().max()) <= _FLOAT_TOLERANCE * largest
