"""Defines the replica whose weights are on an accelerator.

Guarantees: in ring arithmetic a reply is that of the CPU, to the last bit. In float arithmetic TF32 is off and every
row is multiplied in a block of `FLOAT_ROWS` rows, so that a reply depends neither on the rows beside it nor on how a
request was cut; it differs from the CPU's by rounding alone. A product that the device could not finish is never
answered with numbers: the tenant gets an error, or the executor has the product computed again. Before its first
product, each group was compared with the CPU's product in both directions.

The same code runs on torch's `cpu` device, where it is tested; of GPUs the tests were run on one H100.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

import torch

from provider.device.few_rows import MOST_ROWS, FewRows
from provider.device.lane import Lane, Multiply
from provider.device.weights import Moved, move
from provider.engine import products
from provider.engine.replica import RETRY_S, ReplicaLost
from provider.model.served_group import ServedGroup
from wire.errors import ConfigurationError, InvalidTensor, Unavailable, UnknownLayer, VeilbaseError
from wire.frame import DTYPES, ITEM_BYTES, Arithmetic, Call, Direction, Purpose, check_rows
from wire.ring import coding
from wire.ring.buffers import unwritten_like, unwritten_tensor
from wire.ring.pieces import RowsAndReply, row_blocks
from wire.ring.product import is_exact_on
from wire.ring.seeded_rows import Rows, SeededRows

PIECE_BYTES = 4 << 20
"""The most bytes of rows, or of their product, that one copy moves in ring arithmetic. Requests are cut evenly, so
pieces of large ones have 2 to 4 MiB: enough to fill a link, and small enough for copies and products to overlap."""
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
_LOGGER = logging.getLogger(__name__)


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
        self.lanes, self._lock = (Lane(device), Lane(device)), threading.Lock()
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
            for piece in rows.split(_step(rows.num_rows, max(given, reply_cols))):
                start = piece.first_row - rows.first_row
                yield [(piece.expand(given), reply[start : start + piece.num_rows])]

        with self._faults():
            self._run(blocks(), multiply_of(moved, call))
        return reply

    def _run(self, blocks: Iterator[list[RowsAndReply]], multiply: Multiply, num_padded: int = 0) -> None:
        """Computes blocks on two lanes that take turns."""
        with self._lock:
            try:
                for number, block in enumerate(blocks):
                    self.lanes[number % 2].start(block, multiply, num_padded)
                for lane in self.lanes:
                    lane.finish()
            except BaseException:
                for lane in self.lanes:
                    lane.drop()
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
        """Returns whether the device has worked so far."""
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
    """Returns the rows of each piece: even pieces of at most PIECE_BYTES."""
    most = max(1, PIECE_BYTES // (ITEM_BYTES * widest))
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
