"""This module trains on preferences by TRL's DPOTrainer, over a model whose base layers are at the provider.

The reference is the base model without the adapter: a second forward pass over the same remote layers, in which PEFT
leaves the adapter out, so no second model is loaded. TRL multiplies by the head's weight itself; here the model scores
its tokens (tenant_sdk/training/loss.py), so the head may be at the provider.

Guarantees: losses and gradients equal those of TRL on the same model. Each preference is two sequences, which are sent
forward once with the adapter and once without, and backward once, whatever they say. TRL sends nothing to its makers,
and writes no copy of the data set and no model card. Not guaranteed: a load-balancing loss of mixtures of experts.

The module imports TRL, which is an extra (`dpo`): `tenant_sdk.training.token_rows` says so if it is missing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from peft.tuners.tuners_utils import BaseTunerLayer
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

from tenant_sdk.training.checkpoints import SavesAdapter
from tenant_sdk.training.loss import score_tokens
from tenant_sdk.training.settings import FinetuneOptions
from tenant_sdk.training.token_rows import PreferenceRow
from tenant_sdk.training.trainers import WarmsUpFromTheFirstStep
from tenant_sdk.warn import warn_and_go_on
from wire.errors import ConfigurationError


class PreferenceTrainer(WarmsUpFromTheFirstStep, SavesAdapter, DPOTrainer):  # type: ignore[misc]
    """Changes TRL's trainer as the module's docstring says: how it computes the reference, and what it sends and
    writes."""

    num_tokens = 0
    before_forward: Callable[[torch.Tensor], None] = staticmethod(lambda token_ids: None)
    """A function that is called with a batch's token ids before a forward pass with gradients."""

    def _send_telemetry(self) -> None:
        """Sends nothing; TRL would tell its makers of the run."""

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Writes nothing; TRL would describe the run in each checkpoint."""

    def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
        return dataset  # its rows are tokens already

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        if "ref_chosen_logps" not in inputs:
            inputs = {**inputs, **self._reference(inputs)}
        if torch.is_grad_enabled():
            self.num_tokens += int(inputs["attention_mask"].sum())
            self.before_forward(inputs["input_ids"])
        return super()._compute_loss(model, inputs, return_outputs)

    def _reference(self, inputs: Any) -> dict[str, torch.Tensor]:
        """Returns the log-probabilities of a batch's answers in the base model, without the adapter.

        TRL's own pass would turn activation checkpointing off and on again, and lose its store of replies. A pass
        without gradients stores none.
        """
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        with torch.no_grad(), self.compute_loss_context_manager(), self.model.disable_adapter():
            scores = self.model(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False, labels=labels,
                fused_lm_head=True,
            )  # fmt: skip
        chosen, rejected = scores.log_probs.sum(dim=1).chunk(2)
        return {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}

    def precompute_reference(self) -> None:
        """Computes the reference's log-probabilities of all rows before the training, in batches of the run's size, and
        adds them to the data sets. The training then makes no reference passes. Leaves the model in evaluation mode."""
        trainer: Any = self
        trainer.model.eval()
        trainer.train_dataset = self._with_reference(trainer.train_dataset)
        if trainer.eval_dataset is not None:
            trainer.eval_dataset = self._with_reference(trainer.eval_dataset)

    def _with_reference(self, dataset: Any) -> Any:
        rows, size = dataset.to_list(), self.args.per_device_train_batch_size
        found: dict[str, list[float]] = {"ref_chosen_logps": [], "ref_rejected_logps": []}
        for start in range(0, len(rows), size):
            batch = self._prepare_inputs(self.data_collator(rows[start : start + size]))
            for key, values in self._reference(batch).items():
                found[key] += values.tolist()
        for key, column in found.items():
            dataset = dataset.add_column(key, column)
        return dataset


def _has_dropout(model: Any) -> bool:
    """Returns whether the adapter of a PEFT model has dropout, which TRL turns off."""
    layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
    return any(isinstance(each, torch.nn.Dropout) and each.p > 0 for layer in layers for each in layer.modules())


def make_preference_trainer(
    model: Any,
    arguments: dict[str, Any],
    settings: FinetuneOptions,
    rows: list[PreferenceRow],
    eval_rows: list[PreferenceRow],
    tokenizer: Any,
    pad: int,
    bucket: int | None,
    callbacks: list[Any],
) -> PreferenceTrainer:
    """Returns a trainer for preferences.

    Args:
        model: a PEFT model that does not train its head.
        arguments: arguments of transformers' TrainingArguments.
        settings: the run's settings.
        rows, eval_rows: the rows to train on and to evaluate on; `eval_rows` may be empty.
        tokenizer: the session's tokenizer, which stays as it is.
        pad: the id of the padding token.
        bucket: the number of tokens to which all sequences are padded; None for the longest of the batch.
        callbacks: callbacks of transformers' Trainer.

    Raises:
        ConfigurationError: the adapter trains the head; nothing was sent.
    """
    if any(parameter.requires_grad for parameter in model.get_output_embeddings().parameters()):
        raise ConfigurationError("DPO cannot train the head: take it out of target_modules and modules_to_save")
    if _has_dropout(model):
        warn_and_go_on(
            "the adapter's dropout has no effect with preferences: DPO compares answers without it", UserWarning
        )
    config = DPOConfig(
        **arguments, beta=settings.dpo_beta, loss_type=[settings.dpo_loss], max_length=None, router_aux_loss_coef=0.0,
        activation_checkpointing=False,
    )  # fmt: skip
    trainer = PreferenceTrainer(
        model=model,
        # Without a reference model TRL would add a second adapter. The base is never run as one: see `_reference`.
        ref_model=model.get_base_model(),
        args=config,
        data_collator=DataCollatorForPreference(pad_token_id=pad, pad_to_multiple_of=bucket),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(eval_rows) if eval_rows else None,
        processing_class=copy.deepcopy(tokenizer),  # TRL sets its padding token
        callbacks=callbacks,
    )
    trainer.ref_model, trainer.precompute_ref_logps = None, True
    every_position = bucket is not None or getattr(model.active_peft_config, "is_prompt_learning", False)
    score_tokens(model, every_position=every_position)
    return trainer
