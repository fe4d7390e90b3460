"""This module changes the inputs and outputs of the model's linear layers, so that each row gets its own adapter.

Each row of a step has an adapter index, which stands for the place of an adapter on the device (lora.py).

The model's head may get fewer rows than the step has. A pass that computes the logits of some rows passes
`logits_to_keep` to the model: a number of last rows of each sequence, or the indices of the rows. From this argument
`HeadRows` tells which rows reach the head, so that each of them gets its own adapter there. A head that gets another
number of rows than these raises an error.

Guarantees: a row gets the adapter of its adapter index and no other. A layer is called once for all rows of a step, as
without adapters, with the same number of rows. The layer gets the same tensor object as without adapters, so that the
same layers share a call to the provider, except where an adapter in the step changes this layer's input. In a store
with `separate_calls`, each layer that could share a call gets a tensor object of its own in every step, so that the
provider cannot see that such an adapter is used. If a layer is adapted in a step but gets another number of rows than
the step has, the call fails.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tenant_sdk.serving.adapters.lora import MODULES, Segment, Stack, Step
from tenant_sdk.serving.adapters.module_stack import ModuleStack
from wire.errors import InvalidTensor

_INPUTS = ("input_ids", "inputs_embeds")
"""The arguments of a model that have one entry for each row."""


class HeadRows:
    """Watches the calls of the model, and sets the rows of the head in the current step."""

    def __init__(
        self, model: torch.nn.Module, head: AdaptedLayer, current: CurrentStep,
        step_of: Callable[[Sequence[int]], Step],
    ) -> None:  # fmt: skip
        """Registers hooks on the model.

        Args:
            model: a transformers model.
            head: the layer that computes logits.
            current: the step that each thread is computing.
            step_of: makes a step of the adapter indices of its rows.
        """
        self._head, self._current, self._step_of = head, current, step_of
        self._handles = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        )

    def detach(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadRows:
        """Returns the same object, since a copied model gets its adapters from the same store."""
        return self

    def _before(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, keep = self._current.value, kwargs.get("logits_to_keep", 0)
        if step is None or not self._head.changed_by(step) or (isinstance(keep, int) and keep == 0):
            return
        given = next((each for each in (*args[:1], *map(kwargs.get, _INPUTS)) if each is not None), None)
        shape = torch.Size() if given is None else given.shape
        if shape[:2].numel() == step.num_rows:
            rows = torch.arange(step.num_rows).view(shape[0], -1)  # (sequences, rows of each)
            kept = rows[:, -keep:] if isinstance(keep, int) else rows[:, keep.cpu()]
            self._current.head = self._step_of([step.index_of_row[row] for row in kept.flatten().tolist()])

    def _after(self, model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._current.head = None  # The rows of a later call, or of the head alone, are not known.


class CurrentStep(threading.local):
    """Holds the step (one forward pass) that the current thread computes.

    Attributes:
        value: the step; None outside a step.
        head: the rows of the step whose logits are computed, as a step of their own; None if these are all rows, or if
            no adapter of the step changes the head.
        inputs: for each layer whose input an adapter has changed, the input before this change.
    """

    value: Step | None = None
    head: Step | None = None

    def __init__(self) -> None:
        """Makes a state outside a step, for each thread that uses it."""
        self.inputs: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def of(self, step: Step) -> Iterator[None]:
        """Makes `step` the current step inside the context, and restores the previous step afterwards."""
        before = self.value, self.head, self.inputs
        self.value, self.head, self.inputs = step, None, {}
        try:
            yield
        finally:
            self.value, self.head, self.inputs = before


class AdaptedLayer:
    """Applies adapters to one linear layer of the model.

    Attributes:
        name, like: the layer's name in the model, and the layer.
        stacks: the LoRA factors of the layer, by rank.
        modules: PEFT's modules of the layer, for adapters of other kinds.
    """

    def __init__(
        self, name: str, layer: nn.Module, current: CurrentStep, is_head: bool = False, separates: bool = False
    ) -> None:  # fmt: skip
        """Registers hooks on the layer.

        Args:
            name: the layer's name in the model.
            layer: a Linear or Conv1D, local or remote.
            current: the step that each thread is computing.
            is_head: whether the layer computes logits, so that it may get some rows of a step only.
            separates: whether the layer gets a tensor object of its own in every step.
        """
        self.name, self.like = name, layer
        self._current, self._is_head, self._separates = current, is_head, separates
        self.stacks: dict[int, Stack] = {}
        self.modules = ModuleStack()
        self._handles = (layer.register_forward_pre_hook(self._before), layer.register_forward_hook(self._after))

    def detach(self) -> None:
        """Removes the hooks, so that the layer computes as before."""
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptedLayer:
        """Returns the same object, since a copied model gets its adapters from the same store."""
        return self

    def changed_by(self, step: Step) -> bool:
        """Returns whether an adapter of a step changes this layer."""
        return any(self._adapts(segment) for segment in step.segments)

    def _step(self) -> Step | None:
        return self._current.head if self._is_head and self._current.head is not None else self._current.value

    def _adapts(self, segment: Segment) -> bool:
        stack = self._stack(segment)
        return stack is not None and any(run.place in stack.adapted for run in segment.runs)

    def _stack(self, segment: Segment) -> Stack | ModuleStack | None:
        return self.modules if segment.rank == MODULES else self.stacks.get(segment.rank)

    def _before(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        step = self._step()
        if step is None:
            return None
        x: torch.Tensor = args[0]
        self._current.inputs.pop(self.name, None)
        segment = next((each for each in step.segments if each.rank == MODULES), None)
        if segment is not None and self.modules.changes_inputs(segment):
            self._current.inputs[self.name] = x
            return (self.modules.change_inputs(self._rows(x, step), segment).view(x.shape), *args[1:])
        return (x.view_as(x), *args[1:]) if self._separates else None

    def _after(self, layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        step = self._step()
        if step is None:
            return None
        segments = [segment for segment in step.segments if self._adapts(segment)]
        if not segments:
            return None
        given = self._rows(args[0], step)
        rows = self._rows(self._current.inputs.pop(self.name, args[0]), step)
        made = output.clone() if output.requires_grad or not output.is_contiguous() else output
        flat = made.view(-1, output.shape[-1])  # (rows, outputs)
        for segment in segments:
            stack = self._stack(segment)
            if stack is not None:
                stack.apply(rows, flat, segment, given)
        return made

    def _rows(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """Returns a layer's input as rows, shape (rows, inputs).

        Raises:
            InvalidTensor: x has another number of rows than the step, so the adapter of each row is unknown.
        """
        rows = x.reshape(-1, x.shape[-1])  # (rows, inputs)
        if rows.shape[0] != step.num_rows:
            raise InvalidTensor(f"{self.name} got {rows.shape[0]} rows in a step of {step.num_rows}")
        return rows
