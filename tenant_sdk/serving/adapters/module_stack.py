"""This module keeps PEFT's modules of many adapters for one layer of the model, and applies each to its own rows.

Modules of adapters with the same settings and as many rows are computed together, where torch can do this
(module_batch.py); all others are computed one after the other.

Guarantees: a module gets the rows of its adapter alone. If a module changes its layer's input, the rows that it sends
to its base layer are computed in a first run, and its result in a second run. Between the two runs the real layer is
called once for all adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator

import torch
from torch import nn

from tenant_sdk.serving.adapters.lora import Run, Segment
from tenant_sdk.serving.adapters.module_batch import ModuleBatch
from tenant_sdk.serving.adapters.module_likeness import shapes
from tenant_sdk.serving.adapters.stub_layers import base_inputs, outputs
from wire.errors import InvalidTensor
from wire.ring.threads import one_core

MOST_ALONE = 3
"""Up to this many modules are computed one after the other, since a call for all of them would take longer."""


class ModuleStack:
    """Holds one layer's modules for all slots of adapters that are kept as modules.

    Attributes:
        adapted: the slots whose adapter changes this layer.
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
        """Puts a module into a slot.

        Args:
            place: the slot's index.
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
        """Removes the module of a slot, if it has one."""
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
