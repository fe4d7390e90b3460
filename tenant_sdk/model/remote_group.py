"""This module gives the layers of one group their outputs, and autograd their gradients. A group is a set of layers
that read the same input, such as q, k and v of one block; these layers are its members. Their rows are sent by
tenant_sdk/model/send.py.

Guarantees: the autograd node keeps no tensor, since the gradient g·Wᵀ of a linear layer's input needs none. Members
share a call only if they read the same tensor object at the same version. A backward call is made only if the input
needs a gradient. Groups cannot be pickled, because what sends their rows holds secrets.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch

from noise.scheme import GroupSpec
from tenant_sdk.model.run_state import PROVIDER, RunStates
from tenant_sdk.model.send import RemoteExecutor
from wire.frame import Arithmetic, Direction


class _Product(torch.autograd.Function):
    """Computes y = x·W (+ b) over a whole layer group, and saves no tensor for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: RemoteGroup, out_dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Returns the outputs of the group's layers. Of the input, only shape and dtype are kept for the backward
        pass."""
        ctx.group, ctx.shape, ctx.dtype, ctx.sent = group, x.shape, x.dtype, group.rows_to_send(x)
        ctx.set_materialize_grads(False)
        return group.products(x, out_dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        """Returns the gradient of the input, g·Wᵀ, or None if no output has a gradient. If only some outputs have one,
        the others count as zeros."""
        group: RemoteGroup = ctx.group
        present = [grad for grad in grads if grad is not None]
        if not present:
            return None, None, None
        like, num_rows = present[0], ctx.shape[:-1].numel()
        rows = [
            # an absent gradient counts as zeros, and is masked too
            (like.new_zeros(num_rows, features) if grad is None else grad.reshape(num_rows, features))
            for grad, features in zip(grads, group.member_features, strict=True)
        ]
        whole = torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]
        product = group.run(Direction.BACKWARD, whole if ctx.sent is None else whole.index_select(0, ctx.sent))
        return _spread(product.to(ctx.dtype), ctx.sent, num_rows).view(ctx.shape), None, None


def _spread(product: torch.Tensor, sent: torch.Tensor | None, num_rows: int) -> torch.Tensor:
    """Puts the products of the rows that were sent (None for all of `num_rows`) to their places, and zeros to the
    others."""
    return product if sent is None else product.new_zeros(num_rows, product.shape[1]).index_copy_(0, sent, product)


_Context = tuple[bool, torch.dtype]
"""The type of the conditions under which outputs can be shared: whether they need a gradient, and their dtype."""


@dataclass
class _Shared:
    """Holds the input of a group's last call, and the outputs that some of the group's layers have not taken yet."""

    source: Callable[[], torch.Tensor | None]
    version: int
    context: _Context
    outputs: list[torch.Tensor | None]


class RemoteGroup:
    """Computes the outputs of one layer group, such as q, k and v; one call serves all its layers that get the same
    input."""

    def __init__(
        self, executor: RemoteExecutor, spec: GroupSpec, member_features: Sequence[int], states: RunStates
    ) -> None:
        """Makes a group that has not computed any outputs yet.

        Args:
            executor: the executor that gets the group's products from the provider.
            spec: public facts about the group.
            member_features: the number of output features of each member, in manifest order.
            states: the run states of the model that the group belongs to.
        """
        self._executor = executor
        self.run_states = states
        self.spec = spec
        self.member_features = list(member_features)
        self.base_biases: list[torch.Tensor | None] = [None] * len(self.member_features)
        """The frozen biases of the members, which the provider adds in float arithmetic; None for each without a bias
        and until the member is attached."""
        self._local = threading.local()

    @property
    def provider_adds_bias(self) -> bool:
        """Returns whether the provider adds its frozen bias to the products."""
        return self._executor.scheme.arithmetic is Arithmetic.FLOAT

    def run(self, direction: Direction, rows: torch.Tensor) -> torch.Tensor:
        """Returns the product that `RemoteExecutor.run` gives."""
        return self._executor.run(self.spec, direction, rows, self.run_states)

    @staticmethod
    def run_together(calls: Sequence[tuple[RemoteGroup, torch.Tensor]]) -> list[torch.Tensor]:
        """Returns the products that `RemoteExecutor.run_together` gives for groups of one model."""
        if not calls:
            return []
        first = calls[0][0]
        return first._executor.run_together([(group.spec, rows) for group, rows in calls], first.run_states)

    def run_public(self, direction: Direction, rows: torch.Tensor) -> torch.Tensor:
        """Returns the product that `RemoteExecutor.run_public` gives."""
        return self._executor.run_public(self.spec, direction, rows)

    def rows_to_send(self, x: torch.Tensor) -> torch.Tensor | None:
        """Returns the numbers of those rows of a layer's input that are sent, int64 on its device; None for all.
        Padding is left out (tenant_sdk/model/padding.py)."""
        attended = self.run_states.padding.attended
        return None if attended is None else attended.of(x.shape, x.device)

    def products(self, x: torch.Tensor, out_dtype: torch.dtype, may_share: bool = False) -> tuple[torch.Tensor, ...]:
        """Returns the output of each layer of the group, without a gradient, from the source of this thread's products
        (tenant_sdk/model/run_state.py).

        Args:
            x: shape (..., in_features).
            out_dtype: the dtype of the outputs.
            may_share: whether the outputs may be in the same memory block, because no gradient is recorded.

        Returns:
            For each layer, shape (..., out_features of the layer); for the layer of a group of one, shape (num_rows,
            out_features).
        """
        rows, source = x.detach().reshape(-1, x.shape[-1]), self.run_states.current.source
        num_rows, sent = rows.shape[0], self.rows_to_send(x)
        if sent is not None:
            rows = rows.index_select(0, sent)
        if source is PROVIDER:
            product = self._executor.run(self.spec, Direction.FORWARD, rows, self.run_states).to(out_dtype)
        else:
            source.see(rows)
            given = source.given((rows.shape[0], self.spec.out_features))
            if given is None:
                with torch._C.DisableTorchFunction():  # masks and checks multiply too: no mode may keep what they use
                    given = self._executor.run(self.spec, Direction.FORWARD, rows, self.run_states).to(out_dtype)
                source.keep(given)
            product = given.to(device=x.device, dtype=out_dtype)
        product = _spread(product, sent, num_rows)
        if len(self.member_features) == 1:
            return (product,)
        if x.dim() != 2:
            product = product.view(*x.shape[:-1], product.shape[1])
        parts = product.split_with_sizes(self.member_features, dim=-1)
        # model code may change an output in place, as it may change a local layer's output; so autograd must not see
        # one output as a view of another
        if may_share and x.numel() == x.shape[-1]:
            return tuple(part.detach() for part in parts)  # a part of one row is contiguous and overlaps no other part
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)

    def output(self, index: int, x: torch.Tensor, is_alone: bool = False) -> torch.Tensor:
        """Returns the output of the group's layer number `index`.

        Args:
            index: the layer's number in the group, from 0.
            x: shape (..., in_features), any float dtype and device.
            is_alone: whether the output comes from a call of its own, which neither uses nor replaces the outputs that
                the members share.

        Returns:
            shape (..., out_features of the member), in the dtype of a local layer's output; `provider_adds_bias` says
            whether the provider's bias is included.
        """
        kind, has_gradient = x.device.type, torch.is_grad_enabled() and x.requires_grad
        out_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        context = has_gradient, out_dtype
        num_members = len(self.member_features)
        tracked = not x.is_inference()  # inference tensors have no version count, so nothing shows a change
        if num_members > 1 and tracked and not is_alone:
            shared: _Shared | None = getattr(self._local, "shared", None)
            if (
                shared is not None
                and shared.source() is x
                and shared.version == x._version
                and shared.context == context
            ):
                found = shared.outputs[index]
                if found is not None:
                    shared.outputs[index] = None
                    return found
        if has_gradient:
            parts = cast(tuple[torch.Tensor, ...], _Product.apply(x, self, out_dtype))  # type: ignore[no-untyped-call]
        else:
            parts = self.products(x, out_dtype, may_share=not torch.is_grad_enabled())
        mine = parts[index]
        if num_members == 1:
            if x.dim() == 2:
                return mine
            whole = mine.view(*x.shape[:-1], mine.shape[1])
            return whole if has_gradient else whole.detach()  # detached for the same reason as in `products`
        if not is_alone:
            others: list[torch.Tensor | None] = list(parts)
            others[index] = None
            self._local.shared = _Shared(weakref.ref(x), x._version, context, others) if tracked else None
        return mine

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteGroup:
        """Returns this same group, since a copied model uses it too."""
        return self

    def __reduce__(self) -> NoReturn:
        """Raises TypeError, so that this object is never pickled."""
        raise TypeError("a remote layer group cannot be pickled: save the adapter instead")
