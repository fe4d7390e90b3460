"""This module defines the only interface between a remote layer and the mask that hides the layer's rows.

A caller gives a scheme (a mask's implementation) the rows of one call, sends the messages that the scheme returns,
passes in the replies and gets the product. The scheme decides arithmetic, scaling, rounding and noise, names the
provider of each message, and subtracts the noise's effect from replies. Every scheme must guarantee that `mask` checks
its input before it uses up mask rows or seeds, and that printing a `Masked` shows no rows. Callers must unmask a
`Masked` at most once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from wire.frame import Arithmetic, Call, Direction
from wire.payload import MessagePayload, Payload
from wire.ring import coding, kernels
from wire.ring.seeded_rows import Rows
from wire.ring.widths import FULL_BITS, SHORT_REPLY_BITS, enough_bits

_CPU = torch.device("cpu")
TOLERANCE = 1.25e-3
"""τ, the largest rounding error of a product that `balanced` accepts, as a share of what a row gives that is not turned
to any column. docs/decisions/0018-short-rows.md has what losses, gradients and answers do at this and other values."""


@dataclass(frozen=True)
class GroupSpec:
    """Holds the public facts about a layer group that a mask needs.

    Attributes:
        id: the group's number in the manifest.
        in_features, out_features: the shape of the group's weight W, in which the columns of all layers of the group
            are joined.
        column_norm, row_norm: the largest Euclidean norms of the columns and rows of W̃, the int8 weight.
        alpha: α, the scales of W̃'s columns, float32, shape (out_features,), on any device; `alpha_on` returns it on
            the device of the rows.
        digest: the digest of W̃ and α, from the manifest.
    """

    id: int
    in_features: int
    out_features: int
    column_norm: float
    row_norm: float
    alpha: torch.Tensor = field(repr=False)
    digest: str = ""
    _moved: dict[torch.device, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def widths(self, direction: Direction) -> tuple[int, int]:
        """Returns (columns of a request, columns of its reply) for a direction."""
        forward = direction is Direction.FORWARD
        return (self.in_features, self.out_features) if forward else (self.out_features, self.in_features)

    def alpha_on(self, device: torch.device) -> torch.Tensor:
        """Returns α on the device of some rows, since a model may be moved after it was loaded. α is copied once for
        each device.

        Args:
            device: a tensor's own device, which includes its index.

        Returns:
            float32, shape (out_features,); `alpha` itself if that is on this device.
        """
        if self.alpha.device == device:
            return self.alpha
        moved = self._moved.get(device)
        if moved is None:
            with torch.inference_mode(False):  # The copy is kept, and later calls may run outside inference mode.
                moved = self._moved[device] = self.alpha.to(device)
        return moved


class Message(NamedTuple):
    """Holds one request: the product that it asks for, its rows or their seed, and the index of the provider's URL."""

    call: Call
    payload: Payload
    provider: int = 0

    @property
    def rows(self) -> Rows:
        """Returns what the provider will read: the masked rows, shape (num_rows, features), or their seed."""
        return self.payload.rows(self.call)


class Masked(NamedTuple):
    """Holds messages to send, in order, and the function that turns their replies into the product.

    `unmask` takes one reply for each message, on the tenant's device, and returns float32, shape (num_rows, reply
    features).
    """

    messages: tuple[Message, ...]
    unmask: Callable[[Sequence[torch.Tensor]], torch.Tensor]


class Reply(Protocol):
    """Stands for the effect rows that were requested through an `EffectPath` and may not have been received yet."""

    def result(self) -> torch.Tensor:
        """Waits for the rows and returns them. In a session that verifies, the rows are checked before they are
        returned."""
        ...


EffectPath = Callable[[Call, Payload, int], Reply]
"""A function that asks a provider for a product without the bias. It takes (a call, the payload, the number of reply
columns) and returns the pending product of the payload's rows and the weight. The payload of a call with purpose EFFECT
holds noise rows; with purpose HINT it holds the seed of rows of the public matrix."""


WeightOf = Callable[[int], torch.Tensor]
"""A function that returns the tenant's own W̃ of a group, by the group's number: int8, shape (in_features,
out_features)."""


class MaskScheme(Protocol):
    """Defines the interface of a mask that tenant_sdk uses."""

    @property
    def name(self) -> str:
        """Returns the name of the mask, as in `TenantClient(mask=...)`."""
        ...

    @property
    def arithmetic(self) -> Arithmetic:
        """Returns the arithmetic of the mask's messages. In FLOAT the provider adds the bias to the product; in RING it
        does not."""
        ...

    @property
    def precision(self) -> str:
        """Returns how many bits of a number cross, by its name in `noise.options.PRECISIONS`."""
        ...

    def bind(self, effect_path: EffectPath) -> None:
        """Gives the mask the function that asks the provider for products without the bias. Callers must call this
        once, before the first call of `mask`."""
        ...

    def mask(self, group: GroupSpec, direction: Direction, rows: torch.Tensor) -> Masked:
        """Hides the rows of one call.

        Args:
            group: the layer group whose weight the rows are multiplied by.
            direction: FORWARD takes activations, BACKWARD takes gradients of the group's outputs.
            rows: float32, shape (num_rows, request columns), on the tenant's device.

        Raises:
            NotFinite: a value is NaN or infinite; no mask row or seed was used up.
            VeilbaseError: there is no mask for the rows, for example because the ledger cannot be written, the pool is
                closed, or the provider did not give a hint or an effect.
        """
        ...

    def describe(self) -> Mapping[str, str]:
        """Returns a description of the mask for the user: scheme, assumption, parameters and what the mask does not
        hide."""
        ...

    def close(self) -> None:
        """Drops all masks and secrets that are kept in memory."""
        ...


class EncodedRow(NamedTuple):
    """Holds one row that was encoded directly into the bytes that are sent, and the row's `scale`, which stays with the
    tenant."""

    call: Call
    payload: MessagePayload
    codec: coding.RowCodec
    scale: Any

    def add(self, mask: torch.Tensor) -> None:
        """Adds a row of a mask, int32, shape (1, columns), CPU, and writes what is sent."""
        payload = self.payload
        self.codec.add(mask, payload.numbers, self.call.bits, payload.packed)
        payload.is_packed = True

    def __repr__(self) -> str:
        """Returns a text that does not show the row's numbers."""
        return "EncodedRow()"


def number_bits(features: int, weight_norm: float, precision: str) -> tuple[int, int]:
    """Returns how many bits each number of a request has, and each of its reply. They follow from a norm of the
    manifest and the precision alone, so they are the same for every row of a session.

    Args:
        features, weight_norm: see `wire.ring.widths.enough_bits`.
        precision: one of `noise.options.PRECISIONS`.
    """
    if precision == "exact":
        return FULL_BITS, FULL_BITS
    bits = enough_bits(features, weight_norm, TOLERANCE)
    return bits, SHORT_REPLY_BITS if precision == "short" else bits


def rounding_sigma(bits: int) -> float:
    """Returns the standard deviation of the error of rounding to a number of bits, in units of encoded rows."""
    return 0.0 if bits == FULL_BITS else 2.0 ** (FULL_BITS - bits) / math.sqrt(12)


def product_call(group: GroupSpec, direction: Direction, precision: str) -> Call:
    """Returns the call for a product in ring arithmetic, with the bits of its numbers; see `number_bits`."""
    norm = group.column_norm if direction is Direction.FORWARD else group.row_norm
    bits, reply_bits = number_bits(group.widths(direction)[0], norm, precision)
    return Call(group.id, direction, Arithmetic.RING, bits=bits, reply_bits=reply_bits)


def error_bounds(call: Call, request_cols: int, error_bound: float, slack: float) -> tuple[float, float]:
    """Returns the `error_norm` and the `slack` of `wire.ring.coding.encode` for rows that a mask hides and that are
    rounded to the widths of a call.

    Args:
        call: the call of the rows.
        request_cols: how many numbers a row has.
        error_bound: a bound on each number of the mask's error.
        slack: a bound on every other error of a product, without that of the widths.
    """
    moved = 0.0 if call.bits == FULL_BITS else 2.0 ** (FULL_BITS - 1 - call.bits)
    reply_moved = 0.0 if call.reply_bits == call.bits else 2.0 ** (FULL_BITS - 1 - call.reply_bits)
    return (error_bound + moved) * math.sqrt(request_cols), slack + reply_moved


def encode_for_mask(
    group: GroupSpec,
    direction: Direction,
    rows: torch.Tensor,
    precision: str,
    error_bound: float = 0.0,
    slack: float = 0.0,
) -> tuple[Call, torch.Tensor, torch.Tensor]:
    """Scales rows that a mask will hide and that are rounded afterwards; see `encode_rows` for shapes and errors.

    Args:
        precision: one of `noise.options.PRECISIONS`.
        error_bound, slack: see `error_bounds`.

    Returns:
        The call of the rows, whose bits the masked rows must be rounded to, the ring rows, and their scales.
    """
    call = product_call(group, direction, precision)
    bounds = error_bounds(call, group.widths(direction)[0], error_bound, slack)
    return call, *encode_rows(group, direction, rows, *bounds)


class RowEncoder:
    """Encodes a single row into its message. A mask does this for each of the hundred calls of a decode step, so it
    must be fast."""

    def __init__(self, error_bound: float = 0.0, slack: float = 0.0, precision: str = "exact") -> None:
        """Keeps the settings of the encoding.

        Args:
            error_bound: a bound on each number of a mask's error.
            slack: see `wire.ring.coding.encode`.
            precision: one of `noise.options.PRECISIONS`.
        """
        self._error_bound, self._slack, self._precision = error_bound, slack, precision
        self._known: dict[tuple[int, Direction], tuple[GroupSpec, Call, coding.RowCodec | None]] = {}

    def encode(self, group: GroupSpec, direction: Direction, rows: torch.Tensor) -> EncodedRow | None:
        """Encodes a single row that is contiguous, on the CPU and fits in a frame. Returns None for any other rows, if
        there are no compiled kernels, or if the group has no inputs or no outputs; callers must then use `encode_rows`.

        Args:
            rows: float32, shape (num_rows, request columns), on any device.

        Raises:
            NotFinite: a value is NaN or infinite.
            MaskOverflow: the layer is too wide for any scale.
        """
        if rows.shape[0] != 1 or not rows.is_cpu or not rows.is_contiguous() or not MessagePayload.fits(rows.shape[1]):
            return None
        known = self._known.get((group.id, direction))
        if known is None or known[0] is not group:
            known = self._known[group.id, direction] = group, *self._make(group, direction)
        _, call, codec = known
        if codec is None:
            return None
        payload = MessagePayload(rows.shape[1], call.bits)
        return EncodedRow(call, payload, codec, codec.encode(rows, payload.numbers))

    def _make(self, group: GroupSpec, direction: Direction) -> tuple[Call, coding.RowCodec | None]:
        call, widths = product_call(group, direction, self._precision), group.widths(direction)
        if not kernels.available() or 0 in widths:
            return call, None
        error_norm, slack = error_bounds(call, widths[0], self._error_bound, self._slack)
        alpha = group.alpha_on(_CPU).contiguous()
        if direction is Direction.FORWARD:
            return call, coding.RowCodec(widths, group.column_norm, error_norm, slack, None, alpha)
        return call, coding.RowCodec(widths, group.row_norm, error_norm, slack, alpha, None)


def encode_rows(
    group: GroupSpec, direction: Direction, rows: torch.Tensor, error_norm: float = 0.0, slack: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales real rows into ring rows for one direction: x̃ = round(x/β), or for gradients g̃ = round((g ⊙ α)/β′). The
    numbers β and β′ are the rows' scales (wire/SPEC.md, section 5), and α are the scales of the weight's columns.

    Args:
        group, direction, rows: as for `MaskScheme.mask`.
        error_norm, slack: see `wire.ring.coding.encode`.

    Returns:
        int32 rows and their float32 scales, shape (num_rows, 1), which stay with the tenant.

    Raises:
        NotFinite: a value is NaN or infinite.
        MaskOverflow: the layer is too wide for any scale.
    """
    if direction is Direction.FORWARD:
        return coding.encode(rows, group.column_norm, error_norm, slack)
    return coding.encode(rows, group.row_norm, error_norm, slack, group.alpha_on(rows.device))


def decode_rows(
    group: GroupSpec,
    direction: Direction,
    reply: torch.Tensor,
    scales: torch.Tensor,
    effect: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the real product that a ring reply holds, without the mask's effect and without bias: float32, shape
    (num_rows, reply columns)."""
    alpha = group.alpha_on(reply.device) if direction is Direction.FORWARD else None
    return coding.decode(reply, scales, alpha, effect)
