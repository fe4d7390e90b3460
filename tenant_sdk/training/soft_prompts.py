"""This module adds a soft prompt to a batch that goes through the model in windows of tokens.

A soft prompt is a number of virtual tokens in front of every row, which are trained. Prompt tuning and P-tuning train
their embeddings, and prefix tuning trains their keys and values in every layer.

Guarantees: a batch gets the virtual tokens that PEFT's own forward method would give it. The gradients of the virtual
tokens are collected while the windows go backward, and reach the adapter once, after the last window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional
from transformers import Cache

from tenant_sdk.training.labelled_tokens import IGNORE_INDEX

EMBEDDINGS = frozenset({"PROMPT_TUNING", "P_TUNING"})
"""PEFT's names of the kinds that train embeddings of virtual tokens."""
PREFIX = "PREFIX_TUNING"
"""PEFT's name of the kind that trains keys and values of virtual tokens."""

_Inputs = Mapping[str, torch.Tensor]


def kind_of(model: Any) -> str | None:
    """Returns PEFT's name of a model's kind of soft prompt; None if the model has no soft prompt."""
    config: Any = getattr(model, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False):
        return None
    return str(getattr(config.peft_type, "value", config.peft_type))


class Prompted:
    """Holds a batch with the soft prompt of a model, if the model has one.

    Attributes:
        inputs: the batch: `attention_mask`, `labels`, and either `input_ids` or `inputs_embeds`. Embeddings of virtual
            tokens are in front of the rows; keys and values are not, but have places in `attention_mask`.
        prefix: the keys and values of the virtual tokens in each layer; None for other kinds.
    """

    def __init__(self, model: Any, inputs: _Inputs) -> None:
        """Adds the soft prompt of a PEFT model to a batch, with the graph through which its gradients go."""
        kind, num_rows = kind_of(model), inputs["labels"].shape[0]
        self.inputs: _Inputs = inputs
        self.prefix: Cache | None = None
        self._embeddings: torch.Tensor | None = None
        if kind is None:
            return
        with torch.enable_grad():
            prompt = model.get_prompt(num_rows)
        num_virtual = model.active_peft_config.num_virtual_tokens
        changed = {"attention_mask": functional.pad(inputs["attention_mask"], (num_virtual, 0), value=1)}
        if kind == PREFIX:
            self.prefix = prompt
        else:
            with torch.enable_grad():
                embedded = model.word_embeddings(inputs["input_ids"])
                self._embeddings = torch.cat([prompt.to(embedded.dtype), embedded], dim=1)
            # rows ask for gradients as those of PEFT's forward method do, so the calls are the same
            changed["inputs_embeds"] = self._embeddings.detach().requires_grad_()
            changed["labels"] = functional.pad(inputs["labels"], (num_virtual, 0), value=IGNORE_INDEX)
        self.inputs = {**{name: value for name, value in inputs.items() if name != "input_ids"}, **changed}
        if kind == PREFIX:
            self.inputs["input_ids"] = inputs["input_ids"]

    def backward(self) -> None:
        """Adds the gradients of the embeddings of virtual tokens to those of the adapter's parameters."""
        if self._embeddings is not None and self._embeddings.requires_grad:
            torch.autograd.backward([self._embeddings], [self.inputs["inputs_embeds"].grad])
