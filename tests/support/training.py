"""Trains a tiny chat model within seconds, with settings for `finetune` and, for comparison, with transformers' own
Trainer on a local model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, Trainer, TrainingArguments, set_seed

from tenant_sdk.testing import character_tokenizer
from tenant_sdk.training.dataset import load_rows
from tenant_sdk.training.token_rows import Collator, tokenize

ROWS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in (
        ("who?", "Ada Quill"), ("where is it?", "in Port Hale"), ("when?", "1987"), ("what?", "a copper owl"),
        ("why so?", "no reason"), ("how?", "by boat"), ("which one?", "the third"), ("whose?", "Ada's"),
    )
]  # fmt: skip
"""Eight conversations, each with one question."""
QUICK: dict[str, Any] = {
    "max_steps": 6, "batch_size": 4, "learning_rate": 2e-2, "warmup_steps": 0, "save_steps": 2, "progress": False,
    "provider_wait_s": 0,
}  # fmt: skip
"""The settings of a run of six steps that saves two checkpoints on the way, and does not wait for a lost provider."""


def lora(**changes: Any) -> LoraConfig:
    """Returns a small LoRA config for every linear layer, with `changes` applied."""
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes})


TOLERANCE = 1e-4
"""The largest relative difference between a loss of `finetune` and the same loss of a stock trainer."""


def tokenized(data: Any = ROWS) -> list[dict[str, list[int]]]:
    """Returns the token rows of a data set, by the tiny chat model's tokenizer."""
    return tokenize(load_rows(data), character_tokenizer(), 128)


def training_arguments(scratch: Path, **changes: Any) -> dict[str, Any]:
    """Returns arguments for a stock trainer that agree with the settings in QUICK.

    Args:
        scratch: the folder for checkpoints.
        changes: settings of `finetune` under their own names, and further arguments of TrainingArguments.
    """
    settings = {**QUICK, **changes}
    batch_size = settings.pop("batch_size")
    del settings["progress"], settings["provider_wait_s"]
    return {
        "output_dir": str(scratch), "per_device_train_batch_size": batch_size, "per_device_eval_batch_size": batch_size,
        "seed": 0, "data_seed": 0, "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "remove_unused_columns": False, "label_names": ["labels"], "bf16": False,
        "dataloader_pin_memory": False, **settings,
    }  # fmt: skip


def stock_trainer(
    model: PreTrainedModel, config: Any, scratch: Path, rows: Any, *, eval_rows: Any = None, callbacks: Any = (),
    rates: Sequence[float] | None = None, **changes: Any,
) -> Trainer:  # fmt: skip
    """Returns a Trainer of transformers that has trained an adapter on a local model.

    Args:
        model: the base model.
        config: PEFT's config.
        scratch: the folder for checkpoints.
        rows, eval_rows: token rows.
        callbacks: callbacks of the Trainer.
        rates: the learning rate of each step, as a part of the peak; None for the Trainer's own schedule.
        changes: see `training_arguments`.
    """
    set_seed(0)
    adapted = get_peft_model(model, config)
    optimizer: Any = None
    schedule: Any = None
    if rates is not None:
        steps = (*rates, 0.0)  # the last one is asked for after the last step
        learning_rate = {**QUICK, **changes}["learning_rate"]
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: steps[step])
    trainer = Trainer(
        optimizers=(optimizer, schedule), model=adapted,
        args=TrainingArguments(**training_arguments(scratch, **changes)),
        train_dataset=rows, eval_dataset=eval_rows, data_collator=Collator(0), callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return trainer


def logged(trainer: Any, name: str = "loss") -> list[float]:
    """Returns the values of one name in a Trainer's history, in order."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
