"""This module tells which rows of a step reach the model's head, so that each of them gets its own adapter there.

A pass that computes the logits of some rows passes `logits_to_keep` to the model: a number of last rows of each
sequence, or the indices of the rows. A head that gets another number of rows than these raises an error
(adapted_layer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tenant_sdk.serving.adapters.adapted_layer import AdaptedLayer, CurrentStep
from tenant_sdk.serving.adapters.lora import Step

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
            step_of: makes a step of the slots of its rows.
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
            self._current.head = self._step_of([step.slot_of_row[row] for row in kept.flatten().tolist()])

    def _after(self, model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._current.head = None  # The rows of a later call, or of the head alone, are not known.
