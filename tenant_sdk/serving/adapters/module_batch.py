"""This module computes PEFT's modules of several adapters in one call, each on rows of its own.

The adapters have the same settings, so their modules of a layer differ in numbers only. `torch.func.vmap` computes such
modules as one: it runs the code of one of them on stacked numbers. The stacked numbers are kept until other adapters
are computed together.

Guarantees: modules are computed together only after a trial, in which those of two adapters gave the same rows as one
after the other, up to rounding. The trial is made when an adapter is loaded, once for all layers whose modules are
alike.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from tenant_sdk.serving.adapters.stub_layers import base_inputs, outputs, outputs_and_inputs, same_rows
from wire.errors import InvalidTensor, VeilbaseError

_ROUNDING = 256
"""How many times the dtype's rounding step, relative to the largest number of the result, a result of the trial may
differ from the modules' own."""
_REMEMBERED = 256
"""The most kinds of modules whose trials are remembered."""


@dataclass(frozen=True)
class RowFormat:
    """Describes a layer's rows: the numbers of columns of inputs and outputs, and their dtype and device."""

    inputs: int
    outputs: int
    dtype: torch.dtype
    device: torch.device


class _Way(Enum):
    """Names a way to compute modules."""

    ALONE = auto()
    TOGETHER = auto()
    WITH_OWN_CONSTANTS = auto()  # together, within `_OwnConstants`


class Trials:
    """Remembers how trials of modules ended, for the latest 256 kinds of modules. One thread at a time may use it."""

    def __init__(self) -> None:
        """Makes a memory of no trials."""
        self._known: OrderedDict[Hashable, _Way] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], _Way]) -> _Way:
        """Returns how the trial of a kind of modules ended; calls `make` to make it if there was none."""
        if key not in self._known:
            self._known[key] = make()
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]


@dataclass(frozen=True)
class _Stacked:
    """Holds the numbers of the modules that were computed last: each tensor stacked along a new first dimension (0 in
    `dims`), or once if all modules share it (None)."""

    modules: tuple[nn.Module, ...]
    tensors: dict[str, torch.Tensor]
    dims: dict[str, int | None]


class ModuleBatch:
    """Computes modules of one layer together. The modules' adapters have the same kind, settings and layers."""

    def __init__(self, rows: RowFormat, trials: Trials, key: Hashable) -> None:
        """Makes a batch without modules.

        Args:
            rows: the format of the layer's rows.
            trials: the trials of modules of other layers.
            key: what modules that are alike have in common: they run the same code on tensors of the same shapes.
        """
        self._format, self._key, self._trials = rows, key, trials
        self._way = _Way.ALONE
        self._members: dict[int, nn.Module] = {}
        self._template: nn.Module | None = None  # a copy of a module without numbers, whose code is run
        self._stacked: _Stacked | None = None
        self._lock = threading.Lock()

    @property
    def works(self) -> bool:
        """Returns whether modules of this batch may be computed together: a trial has shown it."""
        return self._way is not _Way.ALONE

    def __len__(self) -> int:
        """Returns the number of slots that have a module in this batch."""
        return len(self._members)

    def put(self, place: int, module: nn.Module) -> None:
        """Adds the module of a slot. Tensors that training does not change are kept once for all modules if they are
        equal, such as VeRA's projections. With the second module, a trial is made."""
        other = next(iter(self._members.values()), None)
        self._members[place] = module
        if other is None:
            return
        _share(module, other)
        if self._template is None:
            self._template = _without_numbers(module)
            self._way = self._trials.get((self._key, self._format), lambda: self._try((other, module)))

    def remove(self, place: int) -> None:
        """Removes the module of a slot, which is in the batch."""
        module = self._members.pop(place)
        with self._lock:
            if self._stacked is not None and module in self._stacked.modules:
                self._stacked = None

    def base_inputs(self, modules: Sequence[nn.Module], rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows with which modules call their base layers, shape (modules, rows, inputs).

        Args:
            modules: modules of this batch.
            rows: the input of each, shape (modules, rows, inputs).

        Raises:
            InvalidTensor: the modules do not call their base layers.
        """
        return self._run(self._way, modules, base_inputs, rows)

    def outputs(
        self, modules: Sequence[nn.Module], rows: torch.Tensor, given: torch.Tensor, inputs: torch.Tensor
    ) -> torch.Tensor:
        """Returns the results of modules, shape (modules, rows, outputs).

        Args:
            modules: modules of this batch.
            rows: the input of each, shape (modules, rows, inputs).
            given: the rows that the real base layer gave, shape (modules, rows, outputs).
            inputs: the rows that the real base layer got, shape (modules, rows, inputs).

        Raises:
            InvalidTensor: the modules did not call their base layers once with these inputs.
        """
        return self._checked(self._way, modules, rows, given, inputs)

    # ---- one call for all --------------------------------------------------------------------------------------------

    def _checked(
        self, way: _Way, modules: Sequence[nn.Module], rows: torch.Tensor, given: torch.Tensor, inputs: torch.Tensor
    ) -> torch.Tensor:
        result, called = self._run(way, modules, outputs_and_inputs, rows, given)
        if result.shape != given.shape or not same_rows(called, inputs):
            raise InvalidTensor("a layer of an adapter called its base layer with other rows than announced")
        return result

    def _run(self, way: _Way, modules: Sequence[nn.Module], how: Callable[..., Any], *rows: torch.Tensor) -> Any:
        template = self._template
        if template is None:
            raise InvalidTensor("modules were to be computed together before a trial")
        with self._lock:  # `functional_call` changes the template while it runs.
            stacked = self._stack(tuple(modules))

            def compute(tensors: dict[str, torch.Tensor], zero: torch.Tensor, *own: torch.Tensor) -> Any:
                def module(x: torch.Tensor) -> Any:
                    return functional_call(template, tensors, (x,))

                with _OwnConstants(zero) if way is _Way.WITH_OWN_CONSTANTS else contextlib.nullcontext():
                    return how(module, *own)

            zeros = torch.zeros(len(modules), dtype=rows[0].dtype, device=rows[0].device)
            return vmap(compute, in_dims=(stacked.dims, 0, *(0 for _ in rows)))(stacked.tensors, zeros, *rows)

    def _stack(self, modules: tuple[nn.Module, ...]) -> _Stacked:
        """Returns the stacked numbers of modules. The caller must hold the lock."""
        found = self._stacked
        if found is not None and len(found.modules) == len(modules) and all(map(_is, found.modules, modules)):
            return found
        self._stacked = None  # The memory is freed before more is allocated.
        every = [dict(_tensors(module)) for module in modules]
        tensors, dims = dict[str, torch.Tensor](), dict[str, int | None]()
        for name, first in every[0].items():
            own = [each[name] for each in every]
            is_one = all(tensor is first for tensor in own)
            tensors[name], dims[name] = (first, None) if is_one else (torch.stack(own), 0)
        self._stacked = _Stacked(modules, tensors, dims)
        return self._stacked

    def _try(self, modules: tuple[nn.Module, nn.Module]) -> _Way:
        """Returns a way in which two modules give what each gives alone, up to rounding."""
        rows, given = (
            torch.linspace(-1, 1, 4 * cols, dtype=self._format.dtype, device=self._format.device).view(2, 2, cols)
            for cols in (self._format.inputs, self._format.outputs)
        )
        with torch.no_grad():
            for way in (_Way.TOGETHER, _Way.WITH_OWN_CONSTANTS):
                try:
                    inputs = self._run(way, modules, base_inputs, rows)
                    result = self._checked(way, modules, rows, given.clone(), inputs)
                except (RuntimeError, NotImplementedError, ValueError, TypeError, VeilbaseError):
                    continue  # torch cannot compute such modules together, or not in this way.
                finally:
                    self._stacked = None
                alone = [
                    (base_inputs(module, x), outputs(module, x, y, None))
                    for module, x, y in zip(modules, rows, given, strict=True)
                ]
                own_inputs, own_results = (torch.stack(each) for each in zip(*alone, strict=True))
                is_right = _are_close(inputs, own_inputs) and _are_close(result, own_results)
                return way if is_right else _Way.ALONE
        return _Way.ALONE


class _OwnConstants(TorchFunctionMode):
    """Gives each adapter a tensor of its own where PEFT's code makes zeros or an identity matrix. `vmap` cannot write
    the different numbers of several adapters into a tensor that all of them share, as OFT's code would."""

    def __init__(self, zero: torch.Tensor) -> None:
        super().__init__()
        self._zero = zero

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made + self._zero.to(made.dtype) if func in (torch.zeros, torch.eye) else made


def _is(one: object, other: object) -> bool:
    return one is other


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def shapes(module: nn.Module) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """Returns the names, shapes and dtypes of a module's tensors."""
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in _tensors(module))


def _without_numbers(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose tensors are on the meta device, and so take no memory."""
    made = {}
    for _, tensor in _tensors(module):
        empty = torch.empty_like(tensor, device="meta")
        made[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, made)


def _share(module: nn.Module, other: nn.Module) -> None:
    """Replaces tensors of a module that training does not change by those of another module, where they are equal.
    These are buffers, and what belongs to the base layer's stub."""
    theirs = dict(_tensors(other))
    for path, owner in module.named_modules():
        is_stub = path.split(".")[0] == "base_layer"
        for held in (owner._buffers, owner._parameters) if is_stub else (owner._buffers,):
            for leaf, tensor in held.items():
                found = theirs.get(f"{path}.{leaf}" if path else leaf)
                if tensor is not None and found is not None and tensor is not found and torch.equal(tensor, found):
                    held[leaf] = found  # type: ignore[assignment]


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two results differ by rounding only."""
    bound = _ROUNDING * torch.finfo(other.dtype).eps * float(other.abs().max())
    return one.shape == other.shape and float((one - other).abs().max()) <= bound
