"""One layer group at a provider: rows out, product back, forward and backward, with the mask in between.

Guarantees: the autograd node keeps no tensor (a linear layer's input gradient is g·Wᵀ); members share a call only when
they read the same tensor object at the same version; a backward call is made only when the input needs a gradient;
after a reply that failed its check nothing is sent, and every call ends with the one fixed `VerificationFailed`,
whichever thread met the lie; which calls are made does not depend on values (tenant_sdk/model/planned_calls.py).
Nothing here can be pickled: a mask scheme holds secrets.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch

from noise.scheme import GroupSpec, Masked, MaskScheme, Message
from noise.verify import FAILED, Verifier
from tenant_sdk.model.planned_calls import AT_ONCE, Course, PlannedCalls, masked_on_course
from wire.errors import InvalidTensor, VerificationFailed
from wire.frame import DTYPES, ITEM_BYTES, Arithmetic, Call, Direction, row_of
from wire.limits import CHUNK_BYTES, Limits
from wire.ring.seeded_rows import Rows, SeededRows
from wire.transport.connection import Connection, Pending

_Asked = tuple[Masked, list[Pending]]
"""A call whose messages are on their way."""


class RemoteExecutor:
    """Sends masked rows to the provider (or providers) and unmasks the replies."""

    def __init__(
        self, connections: Sequence[Connection], scheme: MaskScheme, limits: Limits, verifier: Verifier | None = None
    ) -> None:
        """Args.

        connections: in the order of the client's URLs.
        scheme: the mask.
        limits: the smallest of the providers'.
        verifier: checks every reply, hints included, before it is unmasked.
        """
        self._connections = tuple(connections)
        self.scheme = scheme
        self._limits = limits
        self._verifier = verifier
        scheme.bind(self._effect)

    @contextlib.contextmanager
    def in_session(self) -> Iterator[None]:
        """Whatever uses the session happens in here: a failed check is the one thing that is said from then on.

        Raises:
            VerificationFailed: a check has failed, before or meanwhile, here or in another thread. Masks and
                connections were closed with it, and their own words about that would hide the reason.
        """
        self._check_honest()
        try:
            yield
        except Exception:  # whatever breaks because everything was closed
            self._check_honest()
            raise

    def _check_honest(self) -> None:
        """The verifier alone remembers the failure."""
        if self._verifier is not None and self._verifier.failed:
            raise VerificationFailed(FAILED) from None  # what broke may hold rows

    def planned_calls(self) -> PlannedCalls:
        """A model's own."""
        return PlannedCalls(may_stop=self._verifier is not None)

    def run(
        self, group: GroupSpec, direction: Direction, rows: torch.Tensor, planned: PlannedCalls = AT_ONCE
    ) -> torch.Tensor:
        """One product.

        Args:
            group: which weight.
            direction: FORWARD or BACKWARD.
            rows: float32, shape (num_rows, request columns), any device.
            planned: of the model that the call belongs to.

        Returns:
            float32, shape (num_rows, reply columns), same device; with bias where the provider adds it.

        Raises:
            VeilbaseError: one error, on the side that can act on it.
        """
        request_cols = group.widths(direction)[0]
        if rows.shape[1] != request_cols:
            raise InvalidTensor(f"this layer takes {request_cols} features, got {rows.shape[1]}")
        self._check_honest()
        try:  # as `in_session`, which a decode step would enter a hundred times
            return self._run(group, direction, rows, planned.course)
        except Exception:
            self._check_honest()
            raise

    def _run(self, group: GroupSpec, direction: Direction, rows: torch.Tensor, course: Course) -> torch.Tensor:
        product = self._product(group, direction, rows, course)
        return torch.zeros_like(product) if course.sends_zeros else product

    def _product(self, group: GroupSpec, direction: Direction, rows: torch.Tensor, course: Course) -> torch.Tensor:
        request_cols, reply_cols = group.widths(direction)
        num_rows = rows.shape[0]
        if num_rows == 0:
            return torch.empty(0, reply_cols, dtype=torch.float32, device=rows.device)
        if num_rows == 1:  # a token's, which is never too large
            product = self._run_row(group, direction, rows, reply_cols, course)
            if product is not None:
                return product
        parts = rows.split(min(num_rows, self._rows_per_request(request_cols, reply_cols)))
        waiting = [self._ask(group, direction, part, reply_cols, course) for part in parts]
        products = [self._result(each, rows) for each in waiting]
        return products[0] if len(products) == 1 else torch.cat(products)

    def _run_row(
        self, group: GroupSpec, direction: Direction, row: torch.Tensor, reply_cols: int, course: Course
    ) -> torch.Tensor | None:
        """By the shorter way that some masks have; None where there is none."""
        if not row.is_cpu or not row.is_contiguous() or row.shape[1] * ITEM_BYTES > CHUNK_BYTES:
            return None
        masked = masked_on_course(lambda row: self.scheme.mask_row(group, direction, row), row, course)
        if masked is None:
            return None
        self._check_honest()
        call, message, unmask = masked
        reply = self._connections[0].submit(call, message, reply_cols).result()
        if self._verifier is not None:
            self.check(call, row_of(call, message), reply)
        return unmask(reply)

    def _ask(
        self, group: GroupSpec, direction: Direction, rows: torch.Tensor, reply_cols: int, course: Course
    ) -> _Asked:
        masked = masked_on_course(lambda rows: self.scheme.mask(group, direction, rows), rows, course)
        return masked, [self._send(message, reply_cols) for message in masked.messages]

    def _result(self, asked: _Asked, like: torch.Tensor) -> torch.Tensor:
        masked, waiting = asked
        replies = [pending.result() for pending in waiting]
        return masked.unmask(replies if like.is_cpu else [reply.to(like.device) for reply in replies])

    def _rows_per_request(self, request_cols: int, reply_cols: int) -> int:
        limits = self._limits
        widest = max(request_cols, reply_cols) * ITEM_BYTES
        both = (request_cols + reply_cols) * ITEM_BYTES
        return max(1, min(limits.max_rows, limits.max_tensor_bytes // widest, limits.max_in_flight_bytes // both))

    def _send(self, message: Message, reply_cols: int) -> Pending:
        self._check_honest()  # the mask's own thread comes this way too, and an inproc: connection cannot be closed
        rows = message.rows
        if isinstance(rows, torch.Tensor):
            rows = rows.to("cpu", DTYPES[message.call.arithmetic]).contiguous()
        pending = self._connections[message.provider].submit(message.call, rows, reply_cols)
        return pending if self._verifier is None else _Checked(pending, message.call, rows, self)

    def check(self, call: Call, rows: Rows, reply: torch.Tensor) -> None:
        """Ends the session unless a reply is what the trusted weights give.

        Raises:
            VerificationFailed: it is not; connections and secrets are gone, and nothing restarts by itself.
        """
        if self._verifier is None:
            return
        try:
            if isinstance(rows, SeededRows):
                rows = rows.expand(self._verifier.request_features(call.group, call.direction))
            self._verifier.check(call.group, call.direction, rows, reply)
        except VerificationFailed:
            self.close()
            raise

    def close(self) -> None:
        """Drops secrets and connections."""
        if self._verifier is not None:
            self._verifier.close()
        self.scheme.close()
        for connection in self._connections:
            connection.close()

    def _effect(self, call: Call, rows: Rows, reply_cols: int) -> Pending:
        return self._send(Message(call, rows), reply_cols)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteExecutor:
        """A copied model talks through the same connection."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled."""
        raise TypeError("a remote executor holds secrets and connections: it cannot be pickled")


def _forward(
    x: torch.Tensor, group: RemoteGroup, out_dtype: torch.dtype, may_share: bool = False
) -> tuple[torch.Tensor, ...]:
    """Args: may_share: whether outputs may lie in one piece of memory: nothing of them is kept for a gradient."""
    product = group.run(Direction.FORWARD, x.detach().reshape(-1, x.shape[-1]))
    if product.dtype != out_dtype:
        product = product.to(out_dtype)
    if len(group.member_features) == 1:
        return (product,)
    if x.dim() != 2:
        product = product.view(*x.shape[:-1], product.shape[1])
    parts = product.split_with_sizes(group.member_features, dim=-1)
    # model code may change an output in place, as it may a local layer's: to autograd none is a view of another
    if may_share and x.numel() == x.shape[-1]:
        return tuple(part.detach() for part in parts)  # of one row each is contiguous, and its numbers are its own
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)


@dataclass(frozen=True)
class _Checked:
    """A reply that is verified before anybody sees it."""

    pending: Pending
    call: Call
    rows: Rows = field(repr=False)
    executor: RemoteExecutor

    def result(self) -> torch.Tensor:
        """Waits for the reply and checks it as it came, still masked."""
        reply = self.pending.result()
        self.executor.check(self.call, self.rows, reply)
        return reply


class _Product(torch.autograd.Function):
    """y = x·W (+ b) over a whole group; saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: RemoteGroup, out_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Sends the rows and keeps their shape only."""
        ctx.group, ctx.shape, ctx.dtype = group, x.shape, x.dtype
        ctx.set_materialize_grads(False)
        return _forward(x, group, out_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        """Sends the outputs' gradients through the transpose; members without one count as zeros."""
        group: RemoteGroup = ctx.group
        present = [grad for grad in grads if grad is not None]
        if not present:
            return None, None, None
        like, num_rows = present[0], ctx.shape[:-1].numel()
        rows = [
            # an absent gradient is zeros, masked like the rest
            (like.new_zeros(num_rows, features) if grad is None else grad.reshape(num_rows, features))
            for grad, features in zip(grads, group.member_features, strict=True)
        ]
        product = group.run(Direction.BACKWARD, torch.cat(rows, dim=1) if len(rows) > 1 else rows[0])
        return product.to(ctx.dtype).view(ctx.shape), None, None


_Context = tuple[bool, torch.dtype]
"""Whether a gradient may be asked for, and the dtype of the outputs."""


def _apply(x: torch.Tensor, group: RemoteGroup, context: _Context) -> tuple[torch.Tensor, ...]:
    has_gradient, out_dtype = context
    if has_gradient:
        parts = cast(tuple[torch.Tensor, ...], _Product.apply(x, group, out_dtype))  # type: ignore[no-untyped-call]
    else:
        parts = _forward(x, group, out_dtype, may_share=not torch.is_grad_enabled())
    if x.dim() == 2 or len(parts) > 1:
        return parts
    whole = parts[0].view(*x.shape[:-1], parts[0].shape[1])
    return (whole if has_gradient else whole.detach(),)  # as in `_forward`


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype a local linear layer would answer in: autocast's where it is on, the input's otherwise."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@dataclass
class _Shared:
    """Outputs of the last call that other members may still ask for."""

    source: Callable[[], torch.Tensor | None]
    version: int
    context: _Context
    outputs: list[torch.Tensor | None]


class RemoteGroup:
    """The members of one group; each asks for its own output, and one call answers all that share an input."""

    def __init__(
        self, executor: RemoteExecutor, spec: GroupSpec, member_features: Sequence[int], planned: PlannedCalls
    ) -> None:
        """Args: spec: public facts; member_features: outputs of each layer, in manifest order; planned: the model's."""
        self._executor = executor
        self.planned_calls = planned
        self.spec = spec
        self.member_features = list(member_features)
        self._local = threading.local()

    @property
    def provider_adds_bias(self) -> bool:
        """Whether products come with the provider's own bias."""
        return self._executor.scheme.arithmetic is Arithmetic.FLOAT

    def run(self, direction: Direction, rows: torch.Tensor) -> torch.Tensor:
        """`RemoteExecutor.run` in float32 with autocast off."""
        kind = rows.device.type
        if not torch.is_autocast_enabled(kind):
            return self._executor.run(self.spec, direction, rows.to(torch.float32), self.planned_calls)
        with torch.autocast(kind, enabled=False):
            return self._executor.run(self.spec, direction, rows.to(torch.float32), self.planned_calls)

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The product of member `index`.

        Args:
            index: position in the group.
            x: shape (..., in_features), any float dtype and device.

        Returns:
            shape (..., out_features of the member), dtype as a local layer would give; with the provider's bias or
            without, see `provider_adds_bias`.
        """
        context = (torch.is_grad_enabled() and x.requires_grad, autocast_dtype(x))
        if len(self.member_features) == 1:
            return _apply(x, self, context)[0]
        shared: _Shared | None = getattr(self._local, "shared", None)
        tracked = not x.is_inference()  # inference tensors count no versions, so nothing says they are unchanged
        if (
            tracked
            and shared is not None
            and shared.source() is x
            and shared.version == x._version
            and shared.context == context
        ):
            found = shared.outputs[index]
            if found is not None:
                shared.outputs[index] = None
                return found
        outputs: list[torch.Tensor | None] = list(_apply(x, self, context))
        mine = cast(torch.Tensor, outputs[index])
        outputs[index] = None
        self._local.shared = _Shared(weakref.ref(x), x._version, context, outputs) if tracked else None
        return mine

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteGroup:
        """A copied model talks through the same group."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled."""
        raise TypeError("a remote layer group cannot be pickled: save the adapter instead")
