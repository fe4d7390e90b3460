"""This module holds the method `finetune` of `TenantClient`, with all its options.

The command's flags and recipes have the same options (tenant_sdk/training/recipe.py); a test compares the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenant_sdk.training.settings import FinetuneResult

if TYPE_CHECKING:
    from peft import PeftConfig


class Trains:
    """Is the part of `TenantClient` that trains adapters; it is used with a `TrainingSession` only."""

    has_trained = False
    """Whether this client has begun to fine-tune."""

    def finetune(
        self,
        data: Any,
        peft_config: PeftConfig | None = None,
        output_dir: str | Path = "adapters/adapter",
        *,
        max_steps: int | None = None,
        num_epochs: float = 3.0,
        batch_size: int = 8,
        window_tokens: int | None = None,
        gradient_accumulation_steps: int = 1,
        learning_rate: float = 1e-3,
        lr_scheduler_type: str = "linear",
        warmup_steps: int = 3,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        max_length: int | None = None,
        truncation: str = "refuse",
        save_steps: int = 10,
        seed: int = 0,
        bf16: bool = False,
        eval_data: Any = None,
        eval_steps: int | None = None,
        early_stopping_steps: int | None = None,
        early_stopping_threshold: float = 0.0,
        keep_best: bool = False,
        dpo_beta: float = 0.1,
        dpo_loss: str = "sigmoid",
        dpo_precompute_reference: bool = False,
        checkpointing: str | None = "auto",
        memory_budget_mb: float | None = None,
        gradient_checkpointing: bool = False,
        resume: bool | None = None,
        overwrite: bool = False,
        report_to: str | None = None,
        log_dir: str | Path | None = None,
        provider_wait_s: float = 600.0,
        progress: bool = True,
    ) -> FinetuneResult:
        """Trains an adapter over the provider's base model (docs/finetune.md).

        Args:
            data: a JSONL, JSON, CSV or parquet file, a folder written by datasets' `save_to_disk`, a table of datasets,
                pandas, polars or pyarrow, or an iterable of dicts, with `messages`, `prompt` and `completion`, or
                `text`; or all with `prompt`, `chosen` and `rejected`, which are trained on by TRL's DPOTrainer.
            peft_config: the config of a PEFT method that docs/peft.md lists for `finetune`; LoRA on all linear layers
                by default. The object is not changed.
            output_dir: the adapter's folder, such as `adapters/support`; checkpoints are kept in
                `adapters/.support.checkpoints` until the run ends.
            max_steps: number of optimizer steps; None for the number of steps that `num_epochs` takes.
            num_epochs: number of passes over the data; ignored if `max_steps` is given.
            batch_size: rows that go through the model together.
            window_tokens: the most tokens, over all rows of a batch, that go through the model together. Gradients stay
                the same; memory depends on the window, the provider gets requests of so many rows, and all windows but
                a batch's last one are sent twice in the forward direction (docs/windows.md). None for whole batches.
            gradient_accumulation_steps: batches whose gradients make one optimizer step.
            learning_rate: AdamW's peak learning rate, which is reached with the last step of the warm-up.
            lr_scheduler_type: linear, cosine, constant, constant_with_warmup or inverse_sqrt.
            warmup_steps: number of optimizer steps in which the learning rate rises to its peak; the first of N steps
                has an N-th of it.
            weight_decay: AdamW's weight decay.
            max_grad_norm: the L2 norm to which a longer gradient is scaled down.
            max_length: the most tokens that a row may have; by default the model's context minus the adapter's virtual
                tokens.
            truncation: what becomes of longer rows: `refuse` raises an error, `truncate` keeps their first tokens, and
                `drop` leaves them out.
            save_steps: optimizer steps between checkpoints.
            seed: the seed of the adapter's initial weights, of the order of rows, of dropout and of the rows that a
                part as `eval_data` holds back.
            bf16: whether the model computes in bfloat16 where that is usual (autocast); the adapter stays in float32.
            eval_data: rows to evaluate on during the run: a data set, as for `data`, or a number between 0 and 1 for
                this part of `data`, which is then not trained on.
            eval_steps: optimizer steps between evaluations; None for `save_steps`. The last step is evaluated too.
            early_stopping_steps: the run ends if the evaluation's loss has not fallen for so many optimizer steps; it
                needs `verify`, as does `keep_best`, unless there is nothing to hide from the provider.
            early_stopping_threshold: the least by which a loss must fall for `early_stopping_steps`.
            keep_best: whether the adapter of the evaluation with the least loss is written, and not the last one.
            dpo_beta: DPO's beta: the larger it is, the closer the adapter stays to the base model.
            dpo_loss: DPO's loss: sigmoid, hinge, ipo, apo_zero, apo_down or sigmoid_norm.
            dpo_precompute_reference: whether the base model scores each preference once before the training, and not
                once each time that it is trained on.
            checkpointing: how a run saves memory for activations (docs/memory.md). None keeps all activations.
                `replies` keeps the provider's replies, in memory and beyond that in an encrypted file, and computes the
                rest again; the calls to the provider stay the same. `recompute` also asks the provider again, with
                about twice as many forward calls. `auto` chooses the first of these that fits.
            memory_budget_mb: the memory in MB that a step's activations may take, for `auto` and `replies`; by default
                half of what is free for `auto`, and the disk alone for `replies`.
            gradient_checkpointing: True is the same as checkpointing="recompute"; transformers has this name for it.
            resume: None resumes from a checkpoint of the same run if there is one; True requires a checkpoint; False
                starts over.
            overwrite: whether an adapter that `output_dir` holds already is replaced; otherwise that is an error.
            report_to: where losses and metrics are written besides: `tensorboard` for its files, None for nowhere.
            log_dir: the folder of these files; None for `adapters/.support.logs` beside `adapters/support`.
            provider_wait_s: the seconds for which a run that has begun waits for a provider that went away, before it
                fails. When the provider is back, the run goes on from its last checkpoint, under new masks. 0 for a run
                that fails at once.
            progress: whether a progress bar is shown on stderr.

        Returns:
            The adapter's folder, and the losses, evaluations, tokens, bytes and seconds of the run.

        Raises:
            DatasetError: a row cannot be used; the text names its line.
            ConfigurationError: a setting is impossible, a library that it needs is not installed, or there is a
                checkpoint of another run.
            NotFinite: a value was NaN or infinite, and there is no adapter. With `verify` the error is raised at once,
                without `verify` at the planned end of the run.
            TransportError, ProtocolError, AccessError: a request failed, and a provider that went away was not back in
                time; the same call again resumes the run.
            StorageError: the disk has no room for replies, or returned other bytes than were written.
            VeilbaseError: the adapter or a checkpoint could not be written.
        """
        from tenant_sdk.training.finetune import finetune
        from tenant_sdk.training.settings import FinetuneSettings

        settings = FinetuneSettings(
            max_steps=max_steps, num_epochs=num_epochs, batch_size=batch_size, window_tokens=window_tokens,
            gradient_accumulation_steps=gradient_accumulation_steps, learning_rate=learning_rate,
            lr_scheduler_type=lr_scheduler_type, warmup_steps=warmup_steps, weight_decay=weight_decay,
            max_grad_norm=max_grad_norm, save_steps=save_steps, seed=seed, bf16=bf16, eval_steps=eval_steps,
            early_stopping_steps=early_stopping_steps, early_stopping_threshold=early_stopping_threshold,
            keep_best=keep_best, dpo_beta=dpo_beta, dpo_loss=dpo_loss,
            dpo_precompute_reference=dpo_precompute_reference,
        )  # fmt: skip
        session: Any = self
        self.has_trained = True
        return finetune(
            session, data, peft_config, output_dir, settings, eval_data=eval_data, max_length=max_length,
            truncation=truncation, checkpointing=checkpointing, memory_budget_mb=memory_budget_mb,
            gradient_checkpointing=gradient_checkpointing, resume=resume, overwrite=overwrite, report_to=report_to,
            log_dir=log_dir, provider_wait_s=provider_wait_s, progress=progress,
        )  # fmt: skip
