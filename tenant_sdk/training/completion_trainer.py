"""This module holds the Trainer for rows with labelled tokens, and its loss: mean cross-entropy over labelled tokens.

Guarantees: logits are computed at as few positions as possible, and never at positions that would show the provider
how many labels there are when rows are padded (`same_rows_for_any_text`). Every optimizer step trains, the first one of
a warm-up too.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer

from tenant_sdk.training.checkpoints import SavesAdapter
from tenant_sdk.training.chunked_loss import has_another_loss
from tenant_sdk.training.evaluation import EvaluatesInChunks
from tenant_sdk.training.labelled_tokens import IGNORE_INDEX, Collator
from tenant_sdk.training.windows import Windows, training_step


def completion_loss(
    model: Any, inputs: Any, count: Any = None, every_position: bool = False
) -> tuple[torch.Tensor, Any]:
    """Returns (mean cross-entropy over labelled tokens, the model's outputs).

    By default logits are computed only at positions at which some row has a label.

    Args:
        model: a model whose forward takes `logits_to_keep`.
        inputs: a batch of a `Collator`; `labels` are removed from the dict.
        count: the number by which the sum of the losses is divided; None for the number of labels.
        every_position: whether logits are computed at every position, so that a provider that serves the head does not
            see the number of labels.
    """
    labels = inputs.pop("labels")
    targets = functional.pad(labels, (0, 1), value=-100)[:, 1:]  # position p predicts token p + 1
    keep = (targets != IGNORE_INDEX).any(dim=0).nonzero().squeeze(1)
    if every_position:
        keep = torch.arange(targets.shape[1], device=targets.device)
    outputs = model(**inputs, use_cache=False, logits_to_keep=keep)
    logits = outputs.logits.float().flatten(0, 1)
    total = functional.cross_entropy(logits, targets[:, keep].flatten(), ignore_index=-100, reduction="sum")
    count = (targets != IGNORE_INDEX).sum() if count is None else count
    return total / max(int(count), 1), outputs  # a batch may have no label: see tenant_sdk/text/rows.py


class WarmsUpFromTheFirstStep:
    """Is a mixin of transformers' Trainer in which the first optimizer step of a warm-up trains too.

    With N warm-up steps the stock schedule has 0/N, 1/N, 2/N ... of the peak, so that its first step changes nothing
    and costs as many calls as any other. Here the steps have 1/N, 2/N ... N/N: it is the stock schedule of a run that
    is one step longer, without its first step. A run without warm-up has the stock schedule.
    """

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Returns the run's schedule of learning rates, and makes it if it is not there yet."""
        trainer: Any = self
        stock: Any = super()
        is_new, num_warmup = trainer.lr_scheduler is None, trainer.args.get_warmup_steps(num_training_steps)
        if not (is_new and num_warmup):
            return stock.create_scheduler(num_training_steps, optimizer)
        made = stock.create_scheduler(num_training_steps + 1, optimizer)
        (rate,) = {*made.lr_lambdas}  # one for all groups of parameters
        trainer.lr_scheduler = LambdaLR(made.optimizer, lambda step: float(rate(step + 1)))
        return trainer.lr_scheduler


class CompletionTrainer(EvaluatesInChunks, WarmsUpFromTheFirstStep, SavesAdapter, Trainer):  # type: ignore[misc]
    """Trains with the loss that `chunk_loss` gives the model, or else with `completion_loss`, and counts tokens."""

    num_tokens = 0
    loss_in_chunks = False
    """Whether `chunk_loss` has changed the model; if not, `completion_loss` computes logits at labelled positions."""
    before_forward: Callable[[torch.Tensor], None] = staticmethod(lambda token_ids: None)
    """A function that is called with a batch's token ids before its forward pass."""
    same_rows_for_any_text = False
    """Whether logits are computed at every position, so that the number of rows of a call to a remote head does not
    depend on the number of labels."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the loss of a batch, and the model's outputs too if `return_outputs` is set.

        The loss is mean cross-entropy over labelled tokens. A model with another loss, or without `logits_to_keep`, and
        prompt learning use the model's own loss, unless `chunk_loss` has changed the model.
        """
        self.num_tokens += int(inputs["attention_mask"].sum())
        self.before_forward(inputs["input_ids"])
        if self.loss_in_chunks:
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch, **self.without_cache(model))
            return (outputs.loss, outputs) if return_outputs else outputs.loss
        if not self._keeps_logits(model):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = completion_loss(model, inputs, num_items_in_batch, self.same_rows_for_any_text)
        return (loss, outputs) if return_outputs else loss

    @staticmethod
    def without_cache(model: Any) -> dict[str, bool]:
        """Returns the argument that turns the KV cache off. With prompt learning it returns none, since prefix tuning
        passes its vectors in the cache."""
        return {} if getattr(model.active_peft_config, "is_prompt_learning", False) else {"use_cache": False}

    def _keeps_logits(self, model: Any) -> bool:
        base = self.accelerator.unwrap_model(model)
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        # a prompt-learning method adds tokens in front, which would shift the indices
        return not (getattr(model.active_peft_config, "is_prompt_learning", False) or has_another_loss(base)) and (
            "logits_to_keep" in inspect.signature(base.forward).parameters
        )

    windows: Windows | None = None
    """The object that trains in windows of tokens; None if batches go through the model as a whole."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Computes the loss of a batch, adds its gradients to those of the parameters, and returns the loss."""
        if self.windows is None:
            return torch.as_tensor(super().training_step(model, inputs, num_items_in_batch))
        self.num_tokens += int(inputs["attention_mask"].sum())
        self.before_forward(inputs["input_ids"])
        return training_step(self, self.windows, inputs, num_items_in_batch, self.same_rows_for_any_text)


def mean_loss(model: Any, rows: list[dict[str, list[int]]], pad_token_id: int, batch_size: int = 8) -> float:
    """Returns a model's mean loss per labelled token over tokenised rows; NaN if no token has a label. The
    model stays in its mode, so callers turn dropout off."""
    collate, total, count = Collator(pad_token_id), 0.0, 0
    with torch.no_grad():
        for start in range(0, len(rows), batch_size):
            batch = {key: value.to(model.device) for key, value in collate(rows[start : start + batch_size]).items()}
            labelled = int((batch["labels"][:, 1:] != -100).sum())
            total += float(model(**batch).loss) * labelled
            count += labelled
    return total / count if count else math.nan
