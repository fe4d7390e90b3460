"""Computes the matrix products that calls ask for: the rows of a request times a group's weight.

Guarantees: `compute` is a pure function of the call and the call's rows. Nothing is kept between calls, so a reply
depends neither on other requests nor on the order of requests. `check_call` needs no rows, so it can run before memory
for rows is allocated.
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
"""The number of weights that are converted to float32 at a time, 64 MiB: an output head as a whole would take
gigabytes."""
HINT_SCRATCH_BYTES = 64 << 20
"""The most bytes of scratch memory for computing a part of a hint (the product of rows that are expanded from a seed
and a weight). All rows of a wide layer's hint would take gigabytes."""


def check_call(served: PreparedModel, call: Call, cols: int) -> int:
    """Checks a call against what is served.

    Args:
        served: the model.
        call: the call in a request's header.
        cols: the number of columns of the request's rows, as its header announces.

    Returns:
        The number of columns of the reply.

    Raises:
        UnknownLayer: there is no such group, or the call asks for a hint in float arithmetic.
        InvalidTensor: `cols` is not the number of features of this group and direction.
    """
    if call.group >= len(served.manifest.groups):
        raise UnknownLayer(f"expected a group below {len(served.manifest.groups)}, got {call.group}")
    return check_cols(served.manifest.groups[call.group], call, cols)


def check_cols(info: GroupInfo, call: Call, cols: int) -> int:
    """Checks a call against its group, and returns the number of columns of the reply; see `check_call`."""
    if call.purpose is Purpose.HINT and call.arithmetic is not Arithmetic.RING:
        raise UnknownLayer("hints exist in ring arithmetic only")
    if call.purpose is Purpose.WEIGHTS:
        raise UnknownLayer("this provider does not give away its weights")
    given, replied = info.widths(call.direction)
    if cols != given:
        raise InvalidTensor(f"expected {given} columns, got {cols}")
    return replied


def compute(served: PreparedModel, call: Call, rows: Rows) -> torch.Tensor:
    """Computes the product of a request's rows and a group's weight.

    Args:
        served: the model.
        call: the group, direction, arithmetic and purpose.
        rows: shape (num_rows, in_features), or out_features if the direction is backward; int32 (ring) or float32
            (float), CPU; not written to. For a hint, the seed of the rows.

    Returns:
        The product, shape (num_rows, out_features), or in_features if the direction is backward; same dtype.

    Raises:
        UnknownLayer, InvalidTensor: see `check_call`. InvalidTensor also if a hint comes with rows, if another purpose
            comes with a seed, and for a wrong dtype, NaN or infinity.
    """
    if call.group >= len(served.groups):
        raise UnknownLayer(f"expected a group below {len(served.groups)}, got {call.group}")
    return product(served.groups[call.group], call, rows)


def product(group: ServedGroup, call: Call, rows: Rows) -> torch.Tensor:
    """Computes the product of a request's rows and one group's weight; see `compute` for shapes and errors."""
    check_rows(call, rows)
    if isinstance(rows, SeededRows):
        check_cols(group.info, call, group.info.widths(call.direction)[0])
        weight = ring_weight(group, call.direction)
        return seeded_product(weight, rows, range(weight.shape[0]))
    reply_cols = check_cols(group.info, call, rows.shape[1])
    if rows.shape[0] == 0:
        return torch.empty(0, reply_cols, dtype=rows.dtype, device="cpu")
    if call.arithmetic is Arithmetic.RING:
        return coding.product(rows, ring_weight(group, call.direction))
    if not all_finite(rows):
        raise InvalidTensor("a row holds NaN or infinity")
    return float_product(group, call, rows)


def products(group: ServedGroup, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Computes the products of several requests' rows by one multiplication of all rows; each reply owns its memory.
    Errors are those of `compute`; one bad request fails the whole call."""
    if call.arithmetic is not Arithmetic.RING:
        return together(lambda call, rows: product(group, call, rows), call, parts)
    for rows in parts:
        check_rows(call, rows)
        check_cols(group.info, call, rows.shape[1])
    return coding.products(parts, ring_weight(group, call.direction))


def together(
    product: Callable[[Call, Rows], torch.Tensor], call: Call, parts: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Computes the products of several requests' rows by one call of `product`: copies all rows into one matrix, and
    copies each request's reply out of the result."""
    counts = [rows.shape[0] for rows in parts]
    stacked = unwritten_tensor(sum(counts), parts[0].shape[1], parts[0].dtype)
    replies = product(call, torch.cat(list(parts), out=stacked)).split(counts)
    return [unwritten_tensor(reply.shape[0], reply.shape[1], reply.dtype).copy_(reply) for reply in replies]


def ring_weight(group: ServedGroup, direction: Direction) -> torch.Tensor:
    """Returns W̃, the int8 weight, transposed if needed to shape (columns of the request, columns of the reply)."""
    return group.quantised if direction is Direction.FORWARD else group.quantised.t()


def seeded_product(weight: torch.Tensor, rows: SeededRows, columns: range, features: int | None = None) -> torch.Tensor:
    """Expands a seed into rows and multiplies the rows by a weight, a few rows at a time to bound the memory.

    Args:
        weight: shape (len(columns), columns of the reply), int8.
        rows: the seed, the first row and the number of rows.
        columns: the columns of the expanded rows to multiply; other processes may multiply the other columns.
        features: the number of columns of an expanded row; None for len(columns).

    Returns:
        The product, shape (num_rows, columns of the reply), int32.
    """
    reply_features, features = weight.shape[1], features or len(columns)
    reply = torch.empty(rows.num_rows, reply_features, dtype=torch.int32, device="cpu")
    # Per number of a row: 4 bytes and four 1-byte limbs. Per number of the reply: four int32 sums.
    row_bytes = 8 * features + 16 * reply_features
    for part in rows.split(max(1, HINT_SCRATCH_BYTES // row_bytes)):
        start = part.first_row - rows.first_row
        numbers = part.expand(features)[:, columns.start : columns.stop]
        reply[start : start + part.num_rows] = coding.product(numbers, weight)
    return reply


def all_finite(rows: torch.Tensor) -> bool:
    """Returns whether a tensor holds neither NaN nor infinity; the tensor must not be empty."""
    # aminmax returns NaN if there is one, cannot overflow, and allocates no tensor of the rows' size.
    low, high = torch.aminmax(rows)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def float_product(group: ServedGroup, call: Call, rows: torch.Tensor) -> torch.Tensor:
    """Computes a product in float arithmetic, on the device of the rows and of the group's weights. The rows must be
    finite."""
    if call.direction is Direction.BACKWARD:
        return _float_backward(group, rows)
    reply = _float_forward(group, rows)
    if call.purpose is Purpose.PRODUCT and group.bias is not None:
        reply += group.bias  # EFFECT leaves the bias out, and is otherwise computed alike.
    return reply


def _float_forward(group: ServedGroup, rows: torch.Tensor) -> torch.Tensor:
    weight = group.quantised if group.native is None else group.native
    if weight.dtype == torch.float32:
        return torch.matmul(rows, weight, out=_unwritten_beside(rows, weight.shape[1]))
    step = _block_columns(weight)
    reply = _unwritten_beside(rows, weight.shape[1])
    for start in range(0, weight.shape[1], step):
        columns = slice(start, start + step)
        torch.matmul(rows, weight[:, columns].to(torch.float32), out=reply[:, columns])
    return reply if group.native is not None else reply.mul_(group.alpha)


def _float_backward(group: ServedGroup, rows: torch.Tensor) -> torch.Tensor:
    weight = group.native
    if weight is None:
        weight, rows = group.quantised, rows * group.alpha
    if weight.dtype == torch.float32:
        return torch.matmul(rows, weight.t(), out=_unwritten_beside(rows, weight.shape[0]))
    step = _block_columns(weight)
    reply = _unwritten_beside(rows, weight.shape[0]).zero_()
    for start in range(0, weight.shape[1], step):
        columns = slice(start, start + step)
        reply.addmm_(rows[:, columns], weight[:, columns].to(torch.float32).t())
    return reply


def _unwritten_beside(rows: torch.Tensor, cols: int) -> torch.Tensor:
    """Returns float32 memory with any content for the rows' product, on the rows' device."""
    if rows.is_cpu:
        return unwritten_tensor(rows.shape[0], cols, torch.float32)
    return torch.empty(rows.shape[0], cols, dtype=torch.float32, device=rows.device)


def _block_columns(weight: torch.Tensor) -> int:
    return max(1, BLOCK_ELEMENTS // weight.shape[0])
