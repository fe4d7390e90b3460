"""The products of one call.

Guarantees: `compute` is a pure function of the call and its rows: nothing is kept between calls, so any two requests
are independent of each other and of their order. `check_call` needs only numbers, so it runs before anything is
allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from provider.model.served_group import ServedGroup
from wire.errors import InvalidTensor, UnknownLayer
from wire.frame import Arithmetic, Call, Direction, Purpose, check_rows
from wire.manifest import GroupInfo
from wire.ring import coding
from wire.ring.buffers import unwritten_tensor
from wire.ring.seeded_rows import Rows, SeededRows

if TYPE_CHECKING:
    from provider.model.weights import PreparedModel

BLOCK_ELEMENTS = 1 << 24
"""Weights that are converted to float32 at a time, 64 MiB: a full copy of an output head would take gigabytes."""
HINT_SCRATCH_BYTES = 64 << 20
"""Most bytes of scratch in which a hint's rows are expanded and multiplied: a whole hint of a wide layer would take
gigabytes."""


def check_call(served: PreparedModel, call: Call, cols: int) -> int:
    """Checks a call against what is served.

    Args:
        served: the model.
        call: the call in a request's header.
        cols: how many numbers per row the request announces.

    Returns:
        How many numbers per row the reply has.

    Raises:
        UnknownLayer: there is no such group, or it is a hint in float arithmetic.
        InvalidTensor: `cols` is not the number of features of this group and direction.
    """
    if call.group >= len(served.manifest.groups):
        raise UnknownLayer(f"expected a group below {len(served.manifest.groups)}, got {call.group}")
    return check_cols(served.manifest.groups[call.group], call, cols)


def check_cols(info: GroupInfo, call: Call, cols: int) -> int:
    """Checks a call against its group; see `check_call`."""
    if call.purpose is Purpose.HINT and call.arithmetic is not Arithmetic.RING:
        raise UnknownLayer("hints exist in ring arithmetic only")
    given, replied = info.widths(call.direction)
    if cols != given:
        raise InvalidTensor(f"expected {given} columns, got {cols}")
    return replied


def compute(served: PreparedModel, call: Call, rows: Rows) -> torch.Tensor:
    """Makes one product.

    Args:
        served: the model.
        call: which product.
        rows: shape (num_rows, features of the direction), int32 (ring) or float32 (float), CPU; not written to. For a
            hint, the seed that they come from.

    Returns:
        Shape (num_rows, features of the other side), same dtype.

    Raises:
        UnknownLayer, InvalidTensor: see `check_call`; also for rows in place of a hint's seed, a seed for another
            purpose, another dtype, NaN or infinity.
    """
    if call.group >= len(served.groups):
        raise UnknownLayer(f"expected a group below {len(served.groups)}, got {call.group}")
    return product(served.groups[call.group], call, rows)


def product(group: ServedGroup, call: Call, rows: Rows) -> torch.Tensor:
    """Makes one product of one group; see `compute`."""
    check_rows(call, rows)
    if isinstance(rows, SeededRows):
        check_cols(group.info, call, group.info.widths(call.direction)[0])
        weight = _ring_weight(group, call.direction)
        return seeded_product(weight, rows, range(weight.shape[0]))
    reply_cols = check_cols(group.info, call, rows.shape[1])
    if rows.shape[0] == 0:
        return torch.empty(0, reply_cols, dtype=rows.dtype, device="cpu")
    if call.arithmetic is Arithmetic.RING:
        return coding.product(rows, _ring_weight(group, call.direction))
    if not all_finite(rows):
        raise InvalidTensor("a row holds NaN or infinity")
    if call.direction is Direction.BACKWARD:
        return _float_backward(group, rows)
    reply = _float_forward(group, rows)
    if call.purpose is Purpose.PRODUCT and group.bias is not None:
        reply += group.bias  # The sum is the same for every caller: the two forms differ by exactly b.
    return reply


def products(group: ServedGroup, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Makes `product` of each matrix, by one multiplication of all rows; each reply has memory of its own."""
    if call.arithmetic is not Arithmetic.RING:
        return together(lambda call, rows: product(group, call, rows), call, parts)
    for rows in parts:
        check_rows(call, rows)
        check_cols(group.info, call, rows.shape[1])
    return coding.products(parts, _ring_weight(group, call.direction))


def together(
    product: Callable[[Call, Rows], torch.Tensor], call: Call, parts: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Makes `products` by a function that makes one: rows are joined, and replies split, by copies."""
    counts = [rows.shape[0] for rows in parts]
    stacked = unwritten_tensor(sum(counts), parts[0].shape[1], parts[0].dtype)
    replies = product(call, torch.cat(list(parts), out=stacked)).split(counts)
    return [unwritten_tensor(reply.shape[0], reply.shape[1], reply.dtype).copy_(reply) for reply in replies]


def _ring_weight(group: ServedGroup, direction: Direction) -> torch.Tensor:
    """Returns W̃, int8, shape (features of the request, features of the reply)."""
    return group.quantised if direction is Direction.FORWARD else group.quantised.t()


def seeded_product(weight: torch.Tensor, rows: SeededRows, columns: range, features: int | None = None) -> torch.Tensor:
    """Makes the product of what a seed expands to, piece by piece.

    Args:
        weight: int8, shape (len(columns), features of the reply).
        rows: the seed and how many rows.
        columns: the columns of the expanded rows that are multiplied.
        features: how many numbers an expanded row has; None for as many as `columns` has.

    Returns:
        int32, shape (num_rows, features of the reply).
    """
    reply_features, features = weight.shape[1], features or len(columns)
    reply = torch.empty(rows.num_rows, reply_features, dtype=torch.int32, device="cpu")
    # These are the numbers and their limbs, and four limbs of int32 sums.
    row_bytes = 8 * features + 16 * reply_features
    for piece in rows.split(max(1, HINT_SCRATCH_BYTES // row_bytes)):
        start = piece.first_row - rows.first_row
        numbers = piece.expand(features)[:, columns.start : columns.stop]
        reply[start : start + piece.num_rows] = coding.product(numbers, weight)
    return reply


def all_finite(rows: torch.Tensor) -> bool:
    """Tells whether no number is NaN or infinite."""
    # aminmax passes NaN on and cannot overflow, and needs no tensor of the rows' size.
    low, high = torch.aminmax(rows)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _float_forward(group: ServedGroup, rows: torch.Tensor) -> torch.Tensor:
    weight = group.quantised if group.native is None else group.native
    if weight.dtype == torch.float32:
        return torch.matmul(rows, weight, out=unwritten_tensor(rows.shape[0], weight.shape[1], torch.float32))
    step = _block_columns(weight)
    reply = unwritten_tensor(rows.shape[0], weight.shape[1], torch.float32)
    for start in range(0, weight.shape[1], step):
        columns = slice(start, start + step)
        torch.matmul(rows, weight[:, columns].to(torch.float32), out=reply[:, columns])
    return reply if group.native is not None else reply.mul_(group.alpha)


def _float_backward(group: ServedGroup, rows: torch.Tensor) -> torch.Tensor:
    weight = group.native
    if weight is None:
        weight, rows = group.quantised, rows * group.alpha
    if weight.dtype == torch.float32:
        return torch.matmul(rows, weight.t(), out=unwritten_tensor(rows.shape[0], weight.shape[0], torch.float32))
    step = _block_columns(weight)
    reply = unwritten_tensor(rows.shape[0], weight.shape[0], torch.float32).zero_()
    for start in range(0, weight.shape[1], step):
        columns = slice(start, start + step)
        reply.addmm_(rows[:, columns], weight[:, columns].to(torch.float32).t())
    return reply


def _block_columns(weight: torch.Tensor) -> int:
    return max(1, BLOCK_ELEMENTS // weight.shape[0])
