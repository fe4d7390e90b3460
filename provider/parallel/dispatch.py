"""Computes products on all ranks: rank 0 sends a command before every product, and the other ranks follow it.

A command is a message of fixed size that holds plain numbers, and no pickle. If there are only a few rows, the message
also holds the rows. To send one decode row in a second message took four times as long, since gloo's receiver must
announce for every message that it is ready (docs/placement.md, "Figures").

If ranks entered collectives in different orders, they would get wrong numbers without an error. So there is one
dispatcher with one lock.

Guarantees: rank 0 checks a request before it sends a command, so an invalid request never reaches another rank. If a
rank fails to compute, it still takes part in the communication of this product; the last number of each rank's part
says whether the rank failed. If a rank is gone, the present product fails within the timeout, and every later product
fails at once.
"""

from __future__ import annotations

import logging
import struct
import threading
from dataclasses import dataclass
from enum import IntEnum

import torch

from provider.engine import products
from provider.model.weights import PreparedModel
from provider.parallel.ranks import RankLost, Ranks, together
from provider.parallel.sharding import Block, Sharding
from wire.errors import InvalidTensor, RemoteFault, Unavailable, VeilbaseError
from wire.frame import DTYPES, Arithmetic, Call, Direction, Purpose, check_rows
from wire.ring.seeded_rows import Rows, SeededRows, count_rows

_HEAD = struct.Struct("<8q32s32x")
_HEAD_NUMBERS = _HEAD.size // 4
INLINE_NUMBERS = 8192
"""The limit on the number of elements of all rows in a command, which is enough for one row of most layers. To send
these 32 KiB takes only microseconds on loopback."""
NUM_NUMBERS = _HEAD_NUMBERS + INLINE_NUMBERS
_NO_CALL = Call(0, Direction.FORWARD, Arithmetic.RING)


class Operation(IntEnum):
    """Lists the operations that rank 0 can request from the other ranks."""

    STOP = 0
    HEARTBEAT = 1
    PRODUCT = 2


@dataclass(frozen=True)
class Command:
    """Holds one operation and its arguments.

    Attributes:
        operation: the operation.
        call: the call whose product the ranks compute; a placeholder if the operation is not PRODUCT.
        num_rows, cols: the shape of the rows; `cols` is 0 if `rows` is a seed.
        rows: the rows if there are few of them, or the seed of the rows; None if the rows follow in a separate message.
            It has no meaning if the operation is not PRODUCT.
    """

    operation: Operation
    call: Call = _NO_CALL
    num_rows: int = 0
    cols: int = 0
    rows: Rows | None = None

    @classmethod
    def product(cls, call: Call, rows: Rows) -> Command:
        """Returns the command to compute one product; a seed, or a few rows, are in the command itself."""
        if isinstance(rows, SeededRows):
            return cls(Operation.PRODUCT, call, rows.num_rows, 0, rows)
        inline = rows if rows.numel() <= INLINE_NUMBERS else None
        return cls(Operation.PRODUCT, call, rows.shape[0], rows.shape[1], inline)

    def pack(self) -> torch.Tensor:
        """Returns the command as a message: int32, shape (NUM_NUMBERS,)."""
        call, rows = self.call, self.rows
        first_row, seed = (rows.first_row, rows.seed) if isinstance(rows, SeededRows) else (0, b"")
        head = _HEAD.pack(
            self.operation, call.group, call.direction, call.arithmetic, call.purpose, self.num_rows, self.cols,
            first_row, seed,
        )  # fmt: skip
        numbers = torch.zeros(NUM_NUMBERS, dtype=torch.int32)
        numbers[:_HEAD_NUMBERS] = torch.frombuffer(bytearray(head), dtype=torch.int32)
        if isinstance(rows, torch.Tensor):
            # float32 rows keep their bits.
            numbers[_HEAD_NUMBERS : _HEAD_NUMBERS + rows.numel()] = rows.reshape(-1).view(torch.int32)
        return numbers

    @classmethod
    def unpack(cls, numbers: torch.Tensor) -> Command:
        """Returns the command in a message that `pack` made; the command's rows are a view of the message.

        Raises:
            ValueError: the message names an operation, direction, arithmetic or purpose that does not exist.
        """
        operation, group, direction, arithmetic, purpose, num_rows, cols, first_row, seed = _HEAD.unpack(
            numbers[:_HEAD_NUMBERS].numpy().tobytes()
        )
        call = Call(group, Direction(direction), Arithmetic(arithmetic), Purpose(purpose))
        rows: Rows | None = None
        if call.purpose is Purpose.HINT:
            rows = SeededRows(seed, first_row, num_rows)
        elif num_rows * cols <= INLINE_NUMBERS:
            flat = numbers[_HEAD_NUMBERS : _HEAD_NUMBERS + num_rows * cols]
            rows = flat.view(DTYPES[call.arithmetic]).view(num_rows, cols)
        return cls(Operation(operation), call, num_rows, cols, rows)

    def empty_rows(self) -> torch.Tensor:
        """Returns an uninitialised tensor that can receive the rows of this command, which follow in a separate
        message."""
        return torch.empty(self.num_rows, self.cols, dtype=DTYPES[self.call.arithmetic])


_LOGGER = logging.getLogger(__name__)
_HEARTBEATS = 4
"""The number of heartbeats that rank 0 sends within the timeout, which is the time after which a waiting rank gives
up."""


class Dispatcher:
    """Computes products for rank 0 on all ranks, as a `provider.engine.replica.Product`. This class is thread-safe."""

    def __init__(self, served: PreparedModel, ranks: Ranks, sharding: Sharding, timeout_s: float) -> None:
        """Starts the thread that sends heartbeats.

        Args:
            served: the model, for its shapes; its weights are not used.
            ranks: the connections to the other ranks, which must be running `follow`.
            sharding: this rank's share of the weights.
            timeout_s: the longest time that a rank waits for another, in seconds.
        """
        self._served, self._ranks, self._sharding = served, ranks, sharding
        self._lock = threading.Lock()
        self._is_lost = False
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, args=(timeout_s / _HEARTBEATS,), daemon=True)
        self._heart.start()

    def __call__(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes one product; `provider.engine.products.compute` describes the arguments, the reply and the errors.

        Raises:
            RemoteFault: a rank failed to compute, or is gone.
            Unavailable: a rank was lost before this call.
        """
        reply_cols = self._check(call, rows)
        if count_rows(rows) == 0:
            return torch.empty(0, reply_cols, dtype=DTYPES[call.arithmetic])
        with self._lock:
            self._check_alive()
            try:
                command = Command.product(call, rows)
                self._tell(command)
                if command.rows is None and isinstance(rows, torch.Tensor):
                    rows = self._ranks.broadcast(rows.contiguous())
                return _lead(self._ranks, self._sharding, call, rows, reply_cols)
            except VeilbaseError:
                raise  # All ranks have completed their communication.
            except Exception as exc:  # noqa: BLE001 - `RankLost`, or no memory: the other ranks' state is unknown
                self._lose(f"during a product ({type(exc).__name__})")
                raise RemoteFault("a process of this provider is gone, or too late") from None  # may hold rows

    def _check(self, call: Call, rows: Rows) -> int:
        """Checks a request as `provider.engine.products.compute` does; returns the number of columns of the reply."""
        check_rows(call, rows)
        reply_cols = products.check_call(self._served, call, self._cols(call, rows))
        is_checked = call.arithmetic is Arithmetic.FLOAT and count_rows(rows) > 0
        if is_checked and isinstance(rows, torch.Tensor) and not products.all_finite(rows):
            raise InvalidTensor("a row holds NaN or infinity")
        return reply_cols

    def _cols(self, call: Call, rows: Rows) -> int:
        if isinstance(rows, torch.Tensor):
            return rows.shape[1]
        if call.group >= len(self._served.groups):
            return 0  # `check_call` refuses the group before it uses the columns.
        return self._served.groups[call.group].info.widths(call.direction)[0]

    def _check_alive(self) -> None:
        if self._is_lost:
            raise Unavailable("this provider has lost one of its processes: it has to be started again")

    def _tell(self, command: Command) -> None:
        self._ranks.tell(command.pack())

    def _lose(self, when: str) -> None:
        self._is_lost = True
        _LOGGER.error("a rank was lost %s: no product can be made any more, start the provider again", when)

    def _beat(self, every_s: float) -> None:
        """Sends heartbeats to the other ranks until this dispatcher is closed or a rank is lost."""
        while not self._ended.wait(every_s):
            with self._lock:
                if self._is_lost:
                    return
                try:
                    self._tell(Command(Operation.HEARTBEAT))
                except RankLost:
                    self._lose("while nothing was computed")

    def close(self) -> None:
        """Stops the heartbeats and makes the other ranks end."""
        self._ended.set()
        self._heart.join()
        with self._lock:
            if self._is_lost:
                return
            self._is_lost = True
            try:
                self._tell(Command(Operation.STOP))
                self._ranks.leave()
            except RankLost:
                _LOGGER.error("a rank was lost before the end")


def follow(ranks: Ranks, sharding: Sharding) -> None:
    """Carries out the commands of rank 0, on another rank, until rank 0 sends the command to stop.

    Args:
        ranks: the connections to the other ranks.
        sharding: this rank's share of the weights.

    Raises:
        RankLost: rank 0 is gone, or sent nothing within the timeout; or another rank is gone or too late during a
            product.
    """
    while True:
        command = Command.unpack(ranks.hear(torch.empty(NUM_NUMBERS, dtype=torch.int32)))
        if command.operation is Operation.STOP:
            return ranks.leave()
        if command.operation is Operation.PRODUCT:
            rows = ranks.broadcast(command.empty_rows()) if command.rows is None else command.rows
            _help(ranks, sharding, command.call, rows)


def _lead(ranks: Ranks, sharding: Sharding, call: Call, rows: Rows, reply_cols: int) -> torch.Tensor:
    """Computes rank 0's part of a product, collects the other ranks' parts, and returns the whole reply."""
    num_rows = count_rows(rows)
    blocks = sharding.blocks(call, num_rows)
    if sharding.adds(call):
        flat = _flat_share(sharding, call, rows, blocks[0])
        ranks.reduce(flat)
        _check_failures(flat[-1:])
        return flat[:-1].view(num_rows, reply_cols)
    reply = torch.empty(num_rows, reply_cols, dtype=DTYPES[call.arithmetic])
    # Receiving begins before this rank computes, so that parts which are sent early arrive meanwhile.
    coming = [_Coming(ranks, rank, block, reply) for rank, block in enumerate(blocks) if rank and all(block.shape)]
    flat = _flat_share(sharding, call, rows, blocks[0])
    failures = [part.take() for part in coming]
    _check_failures(torch.cat([flat[-1:], *failures]))
    blocks[0].of(reply).copy_(flat[:-1].view(blocks[0].shape))
    return reply


class _Coming:
    """Receives another rank's part of a reply."""

    def __init__(self, ranks: Ranks, rank: int, block: Block, reply: torch.Tensor) -> None:
        self._block, self._reply = block, reply
        self._flat = torch.empty(_flat_size(block), dtype=reply.dtype)
        self._work = ranks.receive(self._flat, rank)

    def take(self) -> torch.Tensor:
        """Waits for the part and copies it into the reply; returns the part's last number, which is 0 if the rank could
        compute the part, else 1."""
        with together():
            self._work.wait()
        self._block.of(self._reply).copy_(self._flat[:-1].view(self._block.shape))
        return self._flat[-1:]


def _help(ranks: Ranks, sharding: Sharding, call: Call, rows: Rows) -> None:
    """On a rank other than 0, computes this rank's part of a product and sends the part to rank 0."""
    block = sharding.blocks(call, count_rows(rows))[ranks.rank]
    flat = _flat_share(sharding, call, rows, block)
    if sharding.adds(call):
        ranks.reduce(flat)
    elif all(block.shape):
        ranks.send(flat)


def _flat_share(sharding: Sharding, call: Call, rows: Rows, block: Block) -> torch.Tensor:
    """Computes this rank's part of a product; returns the part flattened, with one more number at the end.

    The last number is 0 if the part was computed. If the part could not be computed, the last number is 1, after zeros.
    The part and the last number are sent in one message, since a second message would slow down every decode row.
    """
    flat = torch.zeros(_flat_size(block), dtype=DTYPES[call.arithmetic])
    with sharding.weights(call):
        try:
            flat[:-1].view(block.shape).copy_(sharding.share(call, rows))
        except Exception as exc:  # noqa: BLE001 - the others wait for this part, whatever happened here
            _LOGGER.error("a product of group %d failed: %s", call.group, type(exc).__name__)
            flat.zero_()[-1] = 1
    return flat


def _flat_size(block: Block) -> int:
    return len(block.rows) * len(block.columns) + 1


def _check_failures(numbers: torch.Tensor) -> None:
    if bool(numbers.any()):
        raise RemoteFault("the provider failed while computing")
