"""This module keeps PEFT's modules of many adapters for one layer of the model, and applies each to its own rows.

Guarantees: a module gets the rows of its adapter alone. If a module changes its layer's input, the rows that it sends
to its base layer are computed in a first run, and its result in a second run. Between the two runs the real layer is
called once for all adapters.
"""

from __future__ import annotations

import torch
from torch import nn

from tenant_sdk.serving.adapters.lora import Segment
from tenant_sdk.serving.adapters.stub_layers import base_inputs, outputs
from wire.errors import InvalidTensor


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

    def put(self, place: int, module: nn.Module, changes_input: bool) -> None:
        """Puts a module into a slot.

        Args:
            place: the slot's index.
            module: PEFT's module, whose base layer is a stub.
            changes_input: whether the module calls its base layer with another input than its own.
        """
        self._modules[place] = module
        self.adapted.add(place)
        (self._changing.add if changes_input else self._changing.discard)(place)

    def clear(self, place: int) -> None:
        """Removes the module of a slot, if it has one."""
        self._modules.pop(place, None)
        self.adapted.discard(place)
        self._changing.discard(place)

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
        for run in segment.runs:
            if run.place in self._changing:
                changed = base_inputs(self._modules[run.place], rows[run.begin : run.end])
                if changed.shape != rows[run.begin : run.end].shape:
                    raise InvalidTensor("a layer of an adapter calls its base layer with other shapes")
                made[run.begin : run.end] = changed
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
        for run in segment.runs:
            if run.place in self.adapted:
                own, module = slice(run.begin, run.end), self._modules[run.place]
                x = rows[own]
                flat[own] = outputs(module, x, flat[own], inputs[own] if run.place in self._changing else x)
