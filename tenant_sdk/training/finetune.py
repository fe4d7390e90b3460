"""This module fine-tunes an adapter by transformers' Trainer. Adapter, data and optimizer stay with the tenant.

Guarantees: the loss is computed over labelled tokens only (tenant_sdk/training/labelled_tokens.py). If a run fails, the
same call again resumes it from its last complete checkpoint. The adapter folder is written completely or not at all,
and loads in stock PEFT. The calls of a run do not depend on whether a value was finite
(tenant_sdk/model/planned_calls.py).
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model
from safetensors import SafetensorError
from torch.nn import functional
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from noise.disk.private_files import make_private_folder
from tenant_sdk.adapters import copied_base_layer, virtual_tokens
from tenant_sdk.kinds.refused import check_trainable
from tenant_sdk.model.dora import for_remote_base
from tenant_sdk.model.planned_calls import Course, KeepFinite, planned_calls, trainable
from tenant_sdk.progress import ProgressBar
from tenant_sdk.session_protocol import ModelSource, TrainingSession
from tenant_sdk.text.rows import pad_token
from tenant_sdk.training.checkpointing import Checkpointing, choose, has_dropout, resolve
from tenant_sdk.training.checkpoints import Checkpoints, check_replaceable, fingerprint, save_adapter
from tenant_sdk.training.chunked_loss import chunk_loss
from tenant_sdk.training.dataset import load_rows
from tenant_sdk.training.kept_replies import KeptReplies
from tenant_sdk.training.labelled_tokens import IGNORE_INDEX, Collator
from tenant_sdk.training.own_state import DrawnFrom, own_accelerate_state
from tenant_sdk.training.pruning import prune
from tenant_sdk.training.result import FinetuneResult
from tenant_sdk.training.settings import FinetuneSettings
from tenant_sdk.training.token_rows import training_rows
from tenant_sdk.training.window_attention import check_window
from tenant_sdk.training.windows import Windows, training_step
from wire.errors import ConfigurationError, NotFinite, VeilbaseError
from wire.loading import loading, quiet_transformers


def default_peft_config() -> LoraConfig:
    """Returns LoRA of rank 16 on every linear layer (PEFT's `all-linear`)."""
    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


@own_accelerate_state()
def finetune(
    session: TrainingSession,
    data: Any,
    peft_config: PeftConfig | None,
    output_dir: str | Path,
    settings: FinetuneSettings,
    *,
    max_length: int | None = None,
    checkpointing: str | None = "auto",
    memory_budget_mb: float | None = None,
    gradient_checkpointing: bool = False,
    resume: bool | None = None,
    progress: bool = True,
) -> FinetuneResult:
    """Trains an adapter over the provider's base model; `TenantClient.finetune` describes arguments and errors.

    Args:
        session: the tenant's session, which this function connects if the session is not connected yet.
        data, peft_config, output_dir: the arguments of `TenantClient.finetune`.
        settings: the settings that identify the run, together with its data and its adapter.
        max_length, checkpointing, memory_budget_mb, gradient_checkpointing, resume, progress: the arguments of
            `TenantClient.finetune`.

    Returns:
        The adapter's folder, and the losses, tokens, bytes and seconds of the run.
    """
    settings.check()
    mode = resolve(checkpointing, gradient_checkpointing, memory_budget_mb)
    mode = None if settings.window_tokens is not None and mode == "auto" else mode
    if max_length is not None and max_length < 1:
        raise ConfigurationError(f"max_length must be positive, got {max_length}")
    parsed = load_rows(data)
    manifest = session.connect()
    # a copy: PEFT writes into the config, and a repeated call must have the same fingerprint
    peft_config = copy.deepcopy(peft_config or default_peft_config())
    check_trainable(peft_config)
    num_virtual = virtual_tokens(peft_config)
    room = _room(session.context_length, num_virtual)
    check_window(settings.window_tokens, settings.batch_size, room)
    rows = training_rows(parsed, session.text, min(max_length or room, room), session.bucket, num_virtual)
    output_dir = Path(output_dir)
    check_replaceable(output_dir)
    digests = [group.digest for group in manifest.groups]
    checkpoints = Checkpoints(output_dir.with_name(output_dir.name + ".checkpoints"))
    start = checkpoints.open(fingerprint(rows, peft_config.to_dict(), settings, digests), resume)

    set_seed(settings.seed)
    model = _adapted(session, peft_config, settings.seed)
    longest = settings.batch_size * (max(len(row["input_ids"]) for row in rows) + num_virtual)
    kept = choose(mode, model.get_base_model(), longest, has_dropout(model), memory_budget_mb, checkpoints.folder)
    windows = _windows(model, settings.window_tokens, kept)
    if kept.mode is None and windows is None:  # with checkpointing or windows, one block's or window's graph is there
        prune(model)
    course = planned_calls(model).course
    trainer = _make_trainer(model, rows, settings, checkpoints, pad_token(session.tokenizer), course)
    trainer.windows = windows
    trainer.same_rows_for_any_text = session.bucket is not None
    # the positions of a prompt-learning adapter's virtual tokens are not those of the rows' labels
    trainer.loss_in_chunks = chunk_loss(model, every_position=session.bucket is not None or num_virtual > 0)
    trainer.before_forward = lambda inputs: kept.before_step(inputs.numel() + num_virtual * inputs.shape[0])
    session.fetch_hints(backward=True)
    before, began = session.traffic, time.monotonic()
    with closing(kept), _saving_errors(), _reading_errors(start):
        with quiet_transformers(), _progress_bar(trainer) if progress else nullcontext():
            _train(trainer, start)
        _check_finite(model, course, checkpoints)
        save_adapter(model, output_dir)
    seconds, after = time.monotonic() - began, session.traffic
    checkpoints.discard()
    return FinetuneResult(
        adapter_dir=output_dir,
        losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        tokens=trainer.num_tokens,
        bytes_up=after.bytes_up - before.bytes_up,
        bytes_down=after.bytes_down - before.bytes_down,
        seconds=seconds,
        resumed_from_step=int(start.name.rpartition("-")[2]) if start else 0,
    )


def _train(trainer: Trainer, start: Path | None) -> None:
    """Trains from the checkpoint `start`, or from the beginning.

    Raises:
        NotFinite: a value of a verified run was not finite; the text says what may help.
    """
    try:
        trainer.train(resume_from_checkpoint=str(start) if start else None)
    except NotFinite as exc:  # `from None`: the original's frames hold activations or gradients
        raise NotFinite(f"{exc}; try a lower learning_rate, and resume=False (--no-resume) to start over") from None


def _check_finite(model: Any, course: Course, checkpoints: Checkpoints) -> None:
    """Checks that all values of the run and the adapter are finite; else marks all checkpoints as spoilt (unusable).

    Raises:
        NotFinite: a value is not finite.
    """
    try:
        course.check(trainable(model))
        course.finish()
    except NotFinite:
        checkpoints.spoil()
        raise


def _room(context: int, num_virtual: int) -> int:
    """Returns the largest number of tokens in a row: the model's context minus the adapter's virtual tokens."""
    if num_virtual >= context:
        raise ConfigurationError(
            f"num_virtual_tokens must leave room for rows in the model's context of {context}, got {num_virtual}"
        )
    return context - num_virtual


def _adapted(session: ModelSource, peft_config: PeftConfig, seed: int) -> Any:
    """Returns a new model with the adapter on it.

    An adapter that would train a base layer as a whole is refused: the layer has no weight here that could be trained,
    and stock PEFT could not load the adapter.
    """
    with _adapter_errors():
        base = session.load_model()
        with loading(), DrawnFrom(seed):
            model = get_peft_model(base, for_remote_base(peft_config))
    copied = copied_base_layer(model)
    if copied is not None:
        name, setting = copied
        raise ConfigurationError(
            f"base layers held by the provider cannot be trained whole: take {name} out of {setting}, "
            "or adapt it with LoRA"
        )
    return model


def _windows(model: Any, window_tokens: int | None, kept: Checkpointing) -> Windows | None:
    """Prepares a model with an adapter for activation checkpointing and for windows (parts of a batch's tokens).

    All windows but the last go through the model twice. With a store of replies, the second pass uses the provider's
    replies of the first pass. Blocks are then not checkpointed, and each row is sent to the provider as often as
    without windows.

    Returns:
        The object that trains in windows; None if batches go through the model as a whole.
    """
    if window_tokens is None or kept.store is None:
        kept.turn_on(model.get_base_model())
    if window_tokens is None:
        return None
    windows = Windows(model, window_tokens)
    if kept.store is not None:
        windows.contexts = KeptReplies(kept.store).contexts
    return windows


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


class CompletionTrainer(Trainer):  # type: ignore[misc]
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
        """Returns mean cross-entropy over labelled tokens, which equals the model's own loss.

        Logits are computed at as few positions as possible, because the head is by far the widest layer.
        """
        self.num_tokens += int(inputs["attention_mask"].sum())
        self.before_forward(inputs["input_ids"])
        if self.loss_in_chunks:
            outputs = model(**inputs, num_items_in_batch=num_items_in_batch, **self._without_cache(model))
            return (outputs.loss, outputs) if return_outputs else outputs.loss
        if not self._keeps_logits(model):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss, outputs = completion_loss(model, inputs, num_items_in_batch, self.same_rows_for_any_text)
        return (loss, outputs) if return_outputs else loss

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Saves the adapter without embeddings; otherwise PEFT would ask a hub whether the base vocabulary was
        changed."""
        folder = Path(output_dir or self.args.output_dir)
        make_private_folder(folder)  # before Trainer writes there: its files reveal facts about the data
        self.accelerator.unwrap_model(self.model).save_pretrained(folder, save_embedding_layers=False)

    @staticmethod
    def _without_cache(model: Any) -> dict[str, bool]:
        # prefix tuning gives its vectors as a cache
        return {} if getattr(model.active_peft_config, "is_prompt_learning", False) else {"use_cache": False}

    def _keeps_logits(self, model: Any) -> bool:
        base = self.accelerator.unwrap_model(model)
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        # a prompt-learning method adds tokens in front, which would shift the indices
        return not getattr(model.active_peft_config, "is_prompt_learning", False) and (
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


@quiet_transformers()  # Trainer reads the log level and sets it
def _make_trainer(
    model: Any,
    rows: list[dict[str, list[int]]],
    settings: FinetuneSettings,
    checkpoints: Checkpoints,
    pad: int,
    course: Course,
) -> CompletionTrainer:
    arguments = TrainingArguments(
        output_dir=str(checkpoints.folder),
        max_steps=settings.max_steps or -1,
        num_train_epochs=settings.num_epochs,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.lr_scheduler_type,
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        data_seed=settings.seed,  # else the order would follow the last seed that any thread has set
        use_cpu=model.device.type == "cpu",
        logging_steps=1,
        logging_first_step=True,
        save_strategy="steps",
        save_steps=settings.save_steps,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_num_workers=0,  # workers would fork after the connection is open
        dataloader_pin_memory=False,
    )

    def is_sound() -> bool:
        course.check(trainable(model))
        return not course.sends_zeros

    trainer = CompletionTrainer(
        model=model, args=arguments, train_dataset=rows, data_collator=Collator(pad),
        callbacks=[KeepFinite(course), checkpoints.callback(is_sound)],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


@contextmanager
def _progress_bar(trainer: Trainer) -> Iterator[None]:
    bar = ProgressBar()
    trainer.add_callback(bar)
    try:
        yield
    finally:
        bar.stop()  # Trainer does not tell its callbacks that a run failed


@contextmanager
def _adapter_errors() -> Iterator[None]:
    try:
        yield
    except VeilbaseError:
        raise
    except (ValueError, TypeError, StopIteration) as exc:  # the last if a module that it wants has no parameter here
        text = str(exc).split("\n")[0][:200] or type(exc).__name__
        raise ConfigurationError(f"PEFT cannot put this adapter on the model: {text}") from exc


@contextmanager
def _saving_errors() -> Iterator[None]:
    try:
        yield
    except VeilbaseError:
        raise
    except Exception as exc:
        reason = _full_disk(exc)
        if reason is None:
            raise
        # `from None`, here and below: frames of a training step hold texts, adapter and gradients.
        raise VeilbaseError(
            f"the adapter or a checkpoint could not be written ({reason}): make room and run the same command again; "
            "it goes on from the last complete checkpoint"
        ) from None


@contextmanager
def _reading_errors(checkpoint: Path | None) -> Iterator[None]:
    try:
        yield
    except (json.JSONDecodeError, pickle.UnpicklingError, EOFError, SafetensorError, RuntimeError) as exc:
        read_by_torch = not isinstance(exc, RuntimeError) or "PytorchStreamReader" in str(exc)
        if checkpoint is None or not read_by_torch or _full_disk(exc) is not None:
            raise
        raise ConfigurationError(f"{checkpoint} is damaged: pass resume=False (--no-resume) to start over") from None


def _full_disk(exc: BaseException) -> str | None:
    """Returns the reason why a file could not be written, or None if the failure was another one.

    The error's text is searched too, because safetensors and torch do not pass on the OSError.
    """
    if isinstance(exc, OSError):
        return exc.strerror or "write error"
    text = str(exc)
    writes = ("No space left", "Disk quota", "File too large", "PytorchStreamWriter", "unexpected pos", "os error")
    return "no space or no permission" if any(word in text for word in writes) else None


def mean_loss(model: Any, rows: list[dict[str, list[int]]], pad_token_id: int, batch_size: int = 8) -> float:
    """Returns a model's mean loss per labelled token over tokenised rows, for comparing models; nothing is trained."""
    collate, total, count = Collator(pad_token_id), 0.0, 0
    with torch.no_grad():
        for start in range(0, len(rows), batch_size):
            batch = {key: value.to(model.device) for key, value in collate(rows[start : start + batch_size]).items()}
            labelled = int((batch["labels"][:, 1:] != -100).sum())
            total += float(model(**batch).loss) * labelled
            count += labelled
    return total / count if count else math.nan
