"""This module defines the base layers of PEFT's modules in the adapter store. Such a base layer computes nothing.

A PEFT module calls its base layer in the middle of its own work, and the rows of many adapters have to reach the real
base layer in one call. So a module runs twice: the first time (`base_inputs`) it stops at the call, and the stub keeps
the rows that it got; the second time (`outputs`) the stub returns the rows that the real base layer gave.

Guarantees: a module that calls its base layer never or more than once, or with rows of another number or content than
the real base layer got, raises an error and gives no result.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from wire.errors import InvalidTensor


class _Stopped(Exception):
    """Ends a module's first run at the call of its base layer. No code outside this module sees it."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self.rows = rows


class _Call(threading.local):
    """Holds the run of a module in the current thread: the rows that the real base layer got (None if they are not
    compared), the rows that it gave (None in the first run), how often the module has called its stub, and the rows of
    the latest such call."""

    inputs: torch.Tensor | None = None
    outputs: torch.Tensor | None = None
    num_calls = 0
    called: torch.Tensor | None = None


_CALL = _Call()


class _Stub:
    """Implements the call of a base layer that computes nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ends a module's first run by `_Stopped`; returns the rows that the real base layer gave in the second.

        Raises:
            InvalidTensor: in the second run, `x` differs from the rows that the real base layer got.
        """
        _CALL.num_calls += 1
        _CALL.called = x
        if _CALL.outputs is None:
            raise _Stopped(x)
        if _CALL.inputs is not None and x is not _CALL.inputs and not same_rows(x, _CALL.inputs):
            raise InvalidTensor("a layer of an adapter called its base layer with other rows than announced")
        return _CALL.outputs


class StubLinear(_Stub, RemoteLinear):  # type: ignore[misc]
    """Replaces an nn.Linear below a PEFT module."""


class StubConv1D(_Stub, RemoteConv1D):
    """Replaces a Conv1D below a PEFT module."""


def stub_of(layer: nn.Module, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Returns a stub of a layer's type, with a copy of the layer's bias, which some PEFT modules subtract from the
    output that they get. On the meta device, the bias has no numbers.

    Args:
        layer: a Linear or Conv1D, local or remote.
        shape: (inputs, outputs) of the layer.
        dtype, device: dtype and device of its rows.
    """
    bias = getattr(layer, "bias", None)
    made = (StubConv1D if isinstance(layer, Conv1D) else StubLinear)(*shape, bias is not None, dtype).to(device)
    if bias is not None and made.bias is not None and device.type != "meta":
        made.bias.data.copy_(bias.detach())
    return made


def base_inputs(module: Callable[[torch.Tensor], Any], rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows with which a PEFT module calls its base layer, shape (rows, inputs).

    Args:
        module: a module whose base layer is a stub.
        rows: the module's input, shape (rows, inputs).

    Raises:
        InvalidTensor: the module does not call its base layer.
    """
    with _call(None, None):
        try:
            module(rows)
        except _Stopped as exc:
            return exc.rows
    raise InvalidTensor("a layer of an adapter does not call its base layer")


def outputs(
    module: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, given: torch.Tensor,
    inputs: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Returns a PEFT module's result, shape (rows, outputs).

    Args:
        module: a module whose base layer is a stub.
        rows: the module's input, shape (rows, inputs).
        given: the rows that the real base layer gave, shape (rows, outputs). They may be changed in place.
        inputs: the rows that the real base layer got; None if they are not compared.

    Raises:
        InvalidTensor: the module did not call its base layer once with these inputs.
    """
    with _call(inputs, given) as call:
        result = module(rows)
        if call.num_calls != 1 or result.shape != given.shape:
            raise InvalidTensor("a layer of an adapter does not call its base layer once")
    return result


def outputs_and_inputs(
    module: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, given: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `outputs` returns, and the rows with which the module called its base layer, shape (rows, inputs).
    The caller has to compare these with the rows that the real base layer got.

    Raises:
        InvalidTensor: the module did not call its base layer once.
    """
    with _call(None, given) as call:
        result = module(rows)
        if call.num_calls != 1 or call.called is None or result.shape != given.shape:
            raise InvalidTensor("a layer of an adapter does not call its base layer once")
        return result, call.called


@contextlib.contextmanager
def _call(inputs: torch.Tensor | None, given: torch.Tensor | None) -> Iterator[_Call]:
    _CALL.inputs, _CALL.outputs, _CALL.num_calls, _CALL.called = inputs, given, 0, None
    try:
        yield _CALL
    finally:
        _CALL.inputs = _CALL.outputs = _CALL.called = None


def same_rows(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors hold the same numbers, where NaN counts as the same as NaN."""
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
