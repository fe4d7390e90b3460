"""This module keeps PEFT's modules of many adapters for one layer of the model, and applies each to its own rows.

Modules of adapters with the same settings and as many rows are computed together, where torch can do this and there are
more than `MOST_ALONE`; all others are computed one after the other. Modules with the same settings differ in numbers
only, so `torch.func.vmap` computes them as one: it runs the code of one of them on stacked numbers. The stacked numbers
are kept until other adapters are computed together, so modules that were computed together take twice their memory.

Guarantees:
- a module gets the rows of its adapter alone. If a module changes its layer's input, the rows that it sends to its base
  layer are computed in a first run, and its result in a second run. Between the two runs the real layer is called once
  for all adapters;
- modules are computed together only if their code and settings are the same, so that they differ in their registered
  tensors alone, and only after a trial, in which two such modules gave the same rows as one after the other, up to
  rounding. A module that cannot be judged is computed alone;
- the trial is made when an adapter is loaded, once for all layers whose modules are alike, with random numbers in place
  of the adapters' own. No comparison or copy changes the numbers of a module.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from runtime.threads import one_core
from tenant_sdk.serving.adapters.lora import Run, Segment
from tenant_sdk.serving.adapters.peft_modules import base_inputs, outputs, outputs_and_inputs, same_rows
from wire.errors import InvalidTensor

_TRIAL_SCALE = 0.5
"""The standard deviation of the numbers of a trial."""
_STUB = "base_layer"
"""The name under which PEFT's modules hold their base layers, which are stubs here."""


def shapes(module: nn.Module) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """Returns the names, shapes and dtypes of a module's tensors."""
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in _named_tensors(module))


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters and buffers of a module, each with its name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def _without_numbers(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose tensors are on the meta device, and so take no memory."""
    made = {}
    for _, tensor in _named_tensors(module):
        empty = torch.empty_like(tensor, device="meta")
        made[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, made)


def _with_random_numbers(module: nn.Module, seed: int) -> nn.Module:
    """Returns a copy of a module in which random numbers replace those that training changes. The other tensors are
    those of the module."""
    generator, made = torch.Generator().manual_seed(seed), dict[int, torch.Tensor]()
    for _, tensor in _named_tensors(module):
        made[id(tensor)] = tensor
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            numbers = _TRIAL_SCALE * torch.randn(tensor.shape, generator=generator)
            made[id(tensor)] = nn.Parameter(numbers.to(tensor), requires_grad=False)
    return copy.deepcopy(module, made)


def _are_alike(module: nn.Module, other: nn.Module) -> bool:
    """Returns whether two modules run the same code with the same settings, so that they differ in their registered
    tensors only. What belongs to the stubs is not compared."""
    own, others = _own_modules(module), _own_modules(other)
    return len(own) == len(others) and all(
        type(one) is type(two) and _settings(one) == _settings(two) for one, two in zip(own, others, strict=True)
    )


def _own_modules(module: nn.Module) -> list[nn.Module]:
    return [each for path, each in module.named_modules() if path.split(".")[0] != _STUB]


def _settings(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module that are neither its tensors nor its modules. If an attribute holds a tensor
    that is not registered, an object that is equal to no other takes its place."""
    found = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
    return {key: object() if _holds_tensor(value) else value for key, value in found.items()}


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return any(map(_holds_tensor, value)) if isinstance(value, list | tuple) else isinstance(value, torch.Tensor)


def share(module: nn.Module, others: Sequence[nn.Module]) -> None:
    """Replaces tensors of a module that training does not change by those of other modules, where they are equal. These
    are buffers, and what belongs to the base layer's stub."""
    for path, owner in module.named_modules():
        is_stub = path.split(".")[0] == _STUB
        for held in (owner._buffers, owner._parameters) if is_stub else (owner._buffers,):
            for leaf, tensor in held.items():
                if tensor is None:
                    continue
                theirs = [getattr(other.get_submodule(path), leaf) for other in others]
                candidates = {id(each): each for each in theirs}
                if id(tensor) not in candidates:
                    held[leaf] = next((each for each in candidates.values() if torch.equal(tensor, each)), tensor)


_ROUNDING, _MOST_ROUNDING = 256, 0.03
"""How many times the dtype's rounding step a result of the trial may differ from the module's own, and the most for any
dtype. Both are relative to the largest number of the module's own result."""
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


@dataclass(frozen=True, eq=False)
class Stack:
    """Holds tensors of the same shape, and a tensor in which they are stacked along a new first dimension."""

    sources: tuple[torch.Tensor, ...]
    tensor: torch.Tensor


class Batching:
    """Holds what the batches of all layers of a model have in common: how trials of modules ended, for the latest 256
    kinds of modules, and the stacks in use. Only one thread at a time may load adapters."""

    def __init__(self) -> None:
        """Makes a memory of no trials, and of no stacks."""
        self._known: OrderedDict[Hashable, tuple[_Way, nn.Module]] = OrderedDict()
        self._stacks: weakref.WeakValueDictionary[tuple[int, ...], Stack] = weakref.WeakValueDictionary()

    def way(self, key: Hashable, template: nn.Module, make: Callable[[], _Way | None]) -> _Way | None:
        """Returns how the trial of a kind of modules ended.

        Args:
            key: the kind of modules.
            template: such a module. A trial of a module with other settings than this one does not count.
            make: makes the trial, if there was none; returns None if it decided nothing, which is not remembered.
        """
        known = self._known.get(key)
        if known is not None and _are_alike(template, known[1]):
            self._known.move_to_end(key)
            return known[0]
        found = make()
        if found is not None:
            self._known[key] = found, template
            self._known.move_to_end(key)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return found

    def stack(self, tensors: Sequence[torch.Tensor]) -> Stack:
        """Returns tensors of the same shape, stacked. A tensor that many layers of an adapter share, such as VB-LoRA's
        vectors, is stacked once for all layers that use the result at the same time."""
        key = tuple(map(id, tensors))  # A stack keeps its sources, so no other tensor gets their ids meanwhile.
        found = self._stacks.get(key)
        if found is None:
            found = self._stacks[key] = Stack(tuple(tensors), torch.stack(list(tensors)))
        return found


@dataclass(frozen=True)
class _Stacked:
    """Holds the numbers of the modules that were computed last: each tensor stacked along a new first dimension (0 in
    `dims`), or once if all modules share it (None). `stacks` keeps the stacks of these tensors in use."""

    modules: tuple[nn.Module, ...]
    tensors: dict[str, torch.Tensor]
    dims: dict[str, int | None]
    stacks: list[Stack]


class ModuleBatch:
    """Computes modules of one layer together. The modules' adapters have the same kind, settings and layers."""

    def __init__(self, rows: RowFormat, batching: Batching, key: Hashable) -> None:
        """Makes a batch without modules.

        Args:
            rows: the format of the layer's rows.
            batching: what the batches of all layers have in common.
            key: what modules that are alike have in common: they run the same code on tensors of the same shapes.
        """
        self._format, self._key, self._batching = rows, key, batching
        self._way: _Way | None = None  # None until a trial has decided it
        self._members: dict[int, nn.Module] = {}
        # The ids of the tensors that training does not change, by place; places that are computed alone are left out.
        self._shared: dict[int, tuple[int, ...]] = {}
        self._template: nn.Module | None = None  # a copy of a module without numbers, whose code is run
        self._stacked: _Stacked | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Returns the number of places that have a module in this batch."""
        return len(self._members)

    def group(self, place: int) -> Hashable | None:
        """Returns a value that is the same for places whose modules may be computed together, since they share the
        tensors that training does not change; None if the module of the place is computed alone."""
        works = self._way in (_Way.TOGETHER, _Way.WITH_OWN_CONSTANTS)
        return self._shared.get(place) if works else None

    def put(self, place: int, module: nn.Module) -> None:
        """Adds the module of a place. Tensors that training does not change, such as VeRA's projections, are kept once
        for all modules in which they are equal. With the second module, a trial is made."""
        others = list(self._members.values())
        self._members[place] = module
        try:
            share(module, others)
            if self._template is None and others:
                self._template = _without_numbers(others[0])
            if self._template is not None and self._way is None:
                self._way = self._batching.way((self._key, self._format), self._template, lambda: self._try(module))
            if self._template is None or _are_alike(module, self._template):
                self._shared[place] = tuple(id(tensor) for _, tensor in module.named_buffers())
        except Exception:  # noqa: BLE001 - PEFT's code is of many kinds; what cannot be judged is computed alone
            self._shared.pop(place, None)

    def remove(self, place: int) -> None:
        """Removes the module of a place, which is in the batch."""
        module = self._members.pop(place)
        self._shared.pop(place, None)
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
        made: torch.Tensor = self._run(self._way, modules, base_inputs, rows)
        return made

    def outputs(
        self, modules: Sequence[nn.Module], rows: torch.Tensor, given: torch.Tensor, inputs: torch.Tensor
    ) -> torch.Tensor:
        """Returns the results of modules, shape (modules, rows, outputs).

        Args:
            modules: modules of this batch.
            rows: the input of each, shape (modules, rows, inputs).
            given: the rows that the real base layer gave, shape (modules, rows, outputs). They may be changed in place.
            inputs: the rows that the real base layer got, shape (modules, rows, inputs).

        Raises:
            InvalidTensor: the modules did not call their base layers once with these inputs.
        """
        return self._outputs(self._way, modules, rows, given, inputs)

    # ---- one call for all --------------------------------------------------------------------------------------------

    def _outputs(
        self, way: _Way | None, modules: Sequence[nn.Module], rows: torch.Tensor, given: torch.Tensor,
        inputs: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        unchanged: list[bool] = []

        def run(module: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> Any:
            result, called = outputs_and_inputs(module, x, y)
            unchanged.append(called is x)
            return result, called

        result: torch.Tensor
        called: torch.Tensor
        result, called = self._run(way, modules, run, rows, given)
        is_right = all(unchanged) and inputs is rows  # The numbers need not be compared, nor a device waited for.
        if result.shape != given.shape or not (is_right or same_rows(called, inputs)):
            raise InvalidTensor("a layer of an adapter called its base layer with other rows than announced")
        return result

    def _run(
        self, way: _Way | None, modules: Sequence[nn.Module], how: Callable[..., Any], *rows: torch.Tensor
    ) -> Any:  # fmt: skip
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
        if found is not None and found.modules == modules:  # Two modules are equal if they are one object.
            return found
        self._stacked = None  # The memory is freed before more is allocated.
        every = [dict(_named_tensors(module)) for module in modules]
        made = _Stacked(modules, {}, {}, [])
        for name, first in every[0].items():
            own = [each[name] for each in every]
            if all(tensor is first for tensor in own):
                made.tensors[name], made.dims[name] = first, None
            else:
                stack = self._batching.stack(own)
                made.stacks.append(stack)
                made.tensors[name], made.dims[name] = stack.tensor, 0
        self._stacked = made
        return made

    def _try(self, like: nn.Module) -> _Way | None:
        """Returns a way in which two modules like `like`, with random numbers, give what each gives alone, up to
        rounding. Returns None if these numbers decide nothing."""
        modules = _with_random_numbers(like, 1), _with_random_numbers(like, 2)
        rows, given = (
            torch.linspace(-1, 1, 4 * cols, dtype=self._format.dtype, device=self._format.device).view(2, 2, cols)
            for cols in (self._format.inputs, self._format.outputs)
        )
        with torch.no_grad(), one_core():  # as in a step (module_stack.py)
            own_inputs = torch.stack([base_inputs(module, x) for module, x in zip(modules, rows, strict=True)])
            own_results = torch.stack([
                outputs(module, x, y.clone(), None) for module, x, y in zip(modules, rows, given, strict=True)
            ])  # fmt: skip
            if not (torch.isfinite(own_inputs).all() and torch.isfinite(own_results).all()):
                return None
            if _are_close(own_inputs, rows) and _are_close(own_results, given):
                return None  # The modules change nothing.
            for way in (_Way.TOGETHER, _Way.WITH_OWN_CONSTANTS):
                try:
                    inputs = self._run(way, modules, base_inputs, rows)
                    result = self._outputs(way, modules, rows, given.clone(), inputs)
                except torch.OutOfMemoryError:
                    return None
                except Exception:  # noqa: BLE001 - torch cannot compute such modules together, or not in this way
                    inputs = result = None
                finally:
                    self._stacked = None
                if inputs is not None and result is not None:
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


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two results differ by rounding only, shape (modules, rows, columns)."""
    if one.shape != other.shape:
        return False
    scale = other.abs().amax(dim=(1, 2))  # shape (modules,)
    bound = min(_ROUNDING * torch.finfo(other.dtype).eps, _MOST_ROUNDING) * scale
    return bool(((one - other).abs().amax(dim=(1, 2)) <= bound).all())


MOST_ALONE = 3
"""Up to this many modules are computed one after the other, since a call for all of them would take longer."""


class ModuleStack:
    """Holds one layer's modules for all places of adapters that are kept as modules.

    Attributes:
        adapted: the places whose adapter changes this layer.
    """

    def __init__(self) -> None:
        """Makes a stack without modules."""
        self.adapted: set[int] = set()
        self._modules: dict[int, nn.Module] = {}
        self._changing: set[int] = set()
        self._batches: dict[Hashable, ModuleBatch] = {}
        self._key_of: dict[int, Hashable] = {}

    def put(
        self, place: int, module: nn.Module, changes_input: bool, settings: Hashable | None,
        new_batch: Callable[[Hashable], ModuleBatch],
    ) -> None:  # fmt: skip
        """Puts a module into a place.

        Args:
            place: the place, from 0.
            module: PEFT's module, whose base layer is a stub.
            changes_input: whether the module calls its base layer with another input than its own.
            settings: the kind, the settings and the layers of the adapter, by which modules are computed together;
                None if this module is always computed alone.
            new_batch: makes a batch for modules that are alike, from what they have in common.
        """
        self.clear(place)
        self._modules[place] = module
        self.adapted.add(place)
        if changes_input:
            self._changing.add(place)
        if settings is not None:
            key = settings, changes_input, type(module), shapes(module)
            if key not in self._batches:
                self._batches[key] = new_batch(key)
            self._key_of[place] = key
            self._batches[key].put(place, module)

    def clear(self, place: int) -> None:
        """Removes the module of a place, if it has one."""
        self._modules.pop(place, None)
        self.adapted.discard(place)
        self._changing.discard(place)
        key = self._key_of.pop(place, None)
        if key is not None:
            self._batches[key].remove(place)
            if not len(self._batches[key]):
                del self._batches[key]

    def changes_inputs(self, segment: Segment) -> bool:
        """Returns whether a module changes the layer's input for some rows of a segment."""
        return any(run.place in self._changing for run in segment.runs)

    def change_inputs(self, rows: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Returns a step's rows as the layer has to get them.

        Args:
            rows: the rows of the step, shape (rows, inputs).
            segment: the rows with adapters of this stack.

        Raises:
            InvalidTensor: a module calls its base layer with another number of rows than it got, or not at all.
        """
        made = rows.clone()
        for batch, runs in self._parts(segment, self._changing):
            own = _own_rows(runs, rows)
            with self._cores(runs):
                if batch is None:
                    changed = base_inputs(self._modules[runs[0].place], own[0])[None]
                else:
                    changed = batch.base_inputs(self._modules_of(runs), own)
            if changed.shape != own.shape:
                raise InvalidTensor("a layer of an adapter calls its base layer with other shapes")
            _write(runs, made, changed)
        return made

    def apply(self, rows: torch.Tensor, flat: torch.Tensor, segment: Segment, inputs: torch.Tensor) -> None:
        """Replaces the output rows of a segment by the results of the modules of these rows.

        Args:
            rows: the input of the layer before `change_inputs`, shape (rows of the step, inputs).
            flat: the output of the layer, shape (rows of the step, outputs), which is changed in place.
            segment: the rows with adapters of this stack.
            inputs: the input that the layer got, shape (rows of the step, inputs).

        Raises:
            InvalidTensor: a module does not call its base layer once, with the input that the layer got.
        """
        for batch, runs in self._parts(segment, self.adapted):
            x, given = _own_rows(runs, rows), _own_rows(runs, flat)
            got = _own_rows(runs, inputs) if runs[0].place in self._changing else x
            with self._cores(runs):
                if batch is None:
                    # The same tensor object in both places lets the stub skip a comparison.
                    alone = x[0]
                    made = outputs(self._modules[runs[0].place], alone, given[0], alone if got is x else got[0])[None]
                else:
                    made = batch.outputs(self._modules_of(runs), x, given, got)
            _write(runs, flat, made)

    def _cores(self, runs: tuple[Run, ...]) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the modules of runs are computed: on one core, unless they make matrices of the
        layer's size. As with LoRA (lora.py), their products are small, and would wake OpenMP's other threads each
        time: a pass of SmolLM2-135M with 16 VeRA adapters took 196 ms on two cores and 155 ms on one."""
        return one_core() if runs[0].place in self._key_of else contextlib.nullcontext()

    def _modules_of(self, runs: tuple[Run, ...]) -> list[nn.Module]:
        return [self._modules[run.place] for run in runs]

    def _parts(
        self, segment: Segment, places: Collection[int]
    ) -> Iterator[tuple[ModuleBatch | None, tuple[Run, ...]]]:  # fmt: skip
        """Yields the runs of a segment that have these places. Runs that one call computes come together, with their
        batch; others come alone."""
        together: dict[tuple[ModuleBatch, Hashable, int], list[Run]] = {}
        for run in segment.runs:
            if run.place in places:
                batch = self._batches.get(self._key_of.get(run.place))
                group = None if batch is None else batch.group(run.place)
                if batch is None or group is None:
                    yield None, (run,)
                else:
                    together.setdefault((batch, group, run.end - run.begin), []).append(run)
        for (batch, _, _), runs in together.items():
            if len(runs) > MOST_ALONE:
                yield batch, tuple(runs)
            else:
                yield from ((None, (run,)) for run in runs)


def _own_rows(runs: tuple[Run, ...], rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows of runs of the same length, shape (runs, rows, columns)."""
    begin, end = runs[0].begin, runs[-1].end
    if end - begin == len(runs) * (runs[0].end - begin):  # The runs follow one another.
        return rows[begin:end].reshape(len(runs), -1, rows.shape[1])
    return torch.stack([rows[run.begin : run.end] for run in runs])


def _write(runs: tuple[Run, ...], rows: torch.Tensor, made: torch.Tensor) -> None:
    """Writes the rows of runs, shape (runs, rows, columns), to their places among all rows."""
    begin, end = runs[0].begin, runs[-1].end
    if end - begin == made.shape[0] * made.shape[1]:
        rows[begin:end].copy_(made.reshape(-1, made.shape[2]))
        return
    for run, own in zip(runs, made, strict=True):
        rows[run.begin : run.end] = own
