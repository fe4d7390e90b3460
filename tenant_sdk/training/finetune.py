"""This module fine-tunes an adapter by transformers' Trainer. Adapter, data and optimizer stay with the tenant.

Options that would have no effect are refused, since the user expects that they do something. Errors of libraries during
a run become errors of one line that say what to do.

Guarantees: the loss is computed over labelled tokens only (tenant_sdk/training/token_rows.py). If a run fails, the same
call again resumes it from its last complete checkpoint. The adapter folder is written completely or not at all, and
loads in stock PEFT. The calls of a run do not depend on whether a value was finite (tenant_sdk/model/run_state.py).
Errors of saving and of reading keep no cause, since its frames hold texts, an adapter or gradients.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, get_peft_model
from safetensors import SafetensorError
from transformers import Trainer, TrainerState, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from runtime.command_line import to_stderr, told_if_slow
from runtime.loading import loading, quiet_transformers
from tenant_sdk.keep import block_of, choose_kept
from tenant_sdk.kinds.refused import check_trainable
from tenant_sdk.model.dora import for_remote_base
from tenant_sdk.model.run_state import KeepFinite, RunState, run_states, trainable
from tenant_sdk.peft_model import copied_base_layer, say_how_little, virtual_tokens
from tenant_sdk.progress import ProgressBar
from tenant_sdk.serving.adapters.peft_modules import no_compiler
from tenant_sdk.serving.adapters.targets import linear_layers
from tenant_sdk.session_protocol import ModelSource, TrainingSession
from tenant_sdk.text.rows import pad_token
from tenant_sdk.training.activation_checkpointing import (
    Checkpointing,
    KeptReplies,
    choose,
    has_dropout,
)
from tenant_sdk.training.adapted_modules import check_adapter
from tenant_sdk.training.checkpoints import (
    Checkpoints,
    check_output,
    check_writable,
    checkpoints_folder,
    logs_folder,
    save_adapter,
    step_of,
)
from tenant_sdk.training.dataset import are_preferences
from tenant_sdk.training.frozen_prefix import PrefixCache, check_config, frozen_prefix
from tenant_sdk.training.loss import chunk_loss, score_tokens
from tenant_sdk.training.pruning import prune
from tenant_sdk.training.run_identity import RunIdentity, fingerprint
from tenant_sdk.training.settings import FinetuneOptions, FinetuneResult
from tenant_sdk.training.token_rows import (
    Collator,
    RunData,
    check_kind,
    num_tokens_of,
    numbered,
    parse_data,
    sources,
    token_data,
)
from tenant_sdk.training.trainers import (
    CompletionTrainer,
    DrawnFrom,
    EvaluateAtTheEnd,
    StepLosses,
    StopEarly,
    check_alone,
    check_loss_branches,
    check_report_to,
    evaluations,
    own_accelerate_state,
    reports,
    steps_without_progress,
)
from tenant_sdk.training.waiting import with_waits
from tenant_sdk.training.windows import PREFIX, Windows, check_window, kind_of
from tenant_sdk.warn import users_line, warn_and_go_on
from wire.errors import ConfigurationError, NotFinite, VeilbaseError


@contextmanager
def adapter_errors() -> Iterator[None]:
    """Turns an error of PEFT about an adapter into a ConfigurationError of one line."""
    try:
        yield
    except VeilbaseError:
        raise
    except (ValueError, TypeError, StopIteration) as exc:  # the last if a module that it wants has no parameter here
        text = str(exc).split("\n")[0][:200] or type(exc).__name__
        raise ConfigurationError(f"PEFT cannot put this adapter on the model: {text}") from exc


@contextmanager
def saving_errors() -> Iterator[None]:
    """Turns an error of writing a file, such as a full disk, into a VeilbaseError of one line."""
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
def reading_errors(checkpoint: Path | None) -> Iterator[None]:
    """Turns an error about a damaged checkpoint into a ConfigurationError of one line. Without a checkpoint (None),
    errors stay as they are."""
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


def default_peft_config() -> LoraConfig:
    """Returns LoRA of rank 16 on every linear layer (PEFT's `all-linear`)."""
    return LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


@dataclass(frozen=True)
class Prepared:
    """Holds what a run is about, after everything was checked that needs no model; nothing of the data was sent.

    Attributes:
        peft_config: the adapter's settings, a copy of the user's.
        options: how the run goes.
        rows: the token rows.
        mode: the result of `FinetuneOptions.memory_mode`; see `choose`.
        run_id: the fingerprint of data, adapter, options and weights.
        identity: the parts of that, so that a run that differs can be told in what.
    """

    peft_config: PeftConfig = field(repr=False)
    options: FinetuneOptions
    rows: RunData
    mode: str | None
    run_id: str
    identity: RunIdentity


def prepare(session: TrainingSession, data: Any, peft_config: PeftConfig | None, options: FinetuneOptions) -> Prepared:
    """Checks the arguments of `finetune` but for its output folder, connects, and turns the data into tokens.

    Raises:
        VeilbaseError: as `TenantClient.finetune` says.
    """
    check_alone()
    options.check()
    check_loss_branches(session, options, has_evaluation=options.eval_data is not None)
    options.check_padding(session.bucket is not None)
    check_report_to(options.report_to)
    mode = options.memory_mode()
    # a copy: PEFT writes into the config, and a repeated call must have the same fingerprint
    peft_config = copy.deepcopy(peft_config or default_peft_config())
    check_trainable(peft_config)
    if options.cache_frozen_prefix:
        check_config(peft_config)
    num_virtual = virtual_tokens(peft_config)
    parsed = parse_data(data, options.eval_data, options.seed)
    check_kind(parsed, peft_config)
    options.check_used(has_evaluation=bool(parsed.eval_rows), are_preferences=are_preferences(parsed.rows))
    manifest = session.connect(partial(check_adapter, peft_config.to_dict(), options.cache_frozen_prefix))
    room = _room(session.context_length, num_virtual)
    check_window(options.window_tokens, options.batch_size, room)
    longest = min(options.max_length or room, room)
    with told_if_slow("turning the data into tokens", to_stderr if options.progress else None):
        rows = token_data(parsed, session.text, longest, session.bucket, num_virtual, options.truncation)
    if options.cache_frozen_prefix:
        options.check_repeats(len(rows.rows), bool(rows.eval_rows))
    digests = [group.digest for group in manifest.groups]
    data_id = sources(parsed, session.text, longest, session.bucket, options.truncation)
    run_id = fingerprint(data_id, peft_config.to_dict(), options.identity(), digests)
    return Prepared(
        peft_config, options, rows, mode, run_id, RunIdentity.of(data_id, peft_config.to_dict(), options)
    )  # fmt: skip


@own_accelerate_state()
def finetune(
    session: TrainingSession,
    data: Any,
    peft_config: PeftConfig | None,
    output_dir: str | Path,
    options: FinetuneOptions,
    *,
    on_step: Callable[[int, float], None] | None = None,
    while_waiting: Callable[[], None] = lambda: None,
    before_run: Callable[[Prepared], None] = lambda prepared: None,
) -> FinetuneResult:
    """Trains an adapter over the provider's base model; `TenantClient.finetune` describes arguments and errors.

    Args:
        session: the tenant's session, which this function connects if the session is not connected yet.
        data, peft_config, output_dir: the arguments of `TenantClient.finetune`.
        options: how the run goes; some of them identify it, together with its data and its adapter.
        on_step: called with the number and the loss of each optimizer step; after a wait for the provider, also with
            steps that are made again.
        while_waiting: called several times a second during a wait for the provider; it may raise an error to end the
            run.
        before_run: called when all is checked, before anything of the data is sent; an error that it raises ends the
            call.

    Returns:
        The adapter's folder, and the losses, tokens, bytes and seconds of the run.
    """
    output_dir = Path(output_dir)
    options.check()
    check_output(output_dir, options.overwrite)
    if options.report_to is not None:
        check_report_to(options.report_to)
        check_writable(Path(options.log_dir or logs_folder(output_dir)))
    checkpoints = Checkpoints(checkpoints_folder(output_dir))
    checkpoints.check(options.resume, RunIdentity.of_options(options, session.bucket))
    prepared = prepare(session, data, peft_config, options)
    before_run(prepared)
    start = checkpoints.open(prepared.run_id, options.resume, prepared.identity)
    run = Run(session, prepared, checkpoints, output_dir, on_step=on_step, start=start)
    before, began = session.traffic, time.monotonic()
    state = with_waits(run.attempt, session, options.provider_wait_s, lambda: run.num_steps, while_waiting)
    took_s, after = time.monotonic() - began, session.traffic
    checkpoints.discard()
    return FinetuneResult(
        adapter_dir=output_dir,
        losses=[entry["loss"] for entry in state.log_history if "loss" in entry],
        tokens=run.num_tokens,
        bytes_up=after.bytes_up - before.bytes_up,
        bytes_down=after.bytes_down - before.bytes_down,
        seconds=took_s,
        resumed_from_step=step_of(start),
        evaluations=evaluations(state.log_history),
        adapter_step=state.best_global_step if options.keep_best else state.global_step,
        num_waits=run.num_attempts - 1,
        hint_bytes=run.hint_bytes,
    )


@dataclass(eq=False)
class Run:
    """Holds what all attempts of one call of `finetune` have in common: the first one, and one after each wait for the
    provider."""

    session: TrainingSession
    prepared: Prepared
    checkpoints: Checkpoints
    output_dir: Path
    _: KW_ONLY
    on_step: Callable[[int, float], None] | None = None
    start: Path | None = None
    """The checkpoint that the first attempt begins with; None for the beginning of the run."""
    num_attempts: int = 0
    num_tokens: int = 0
    """The tokens that ended attempts and a finished one have trained on."""
    num_steps: int = 0
    """The optimizer steps that the newest attempt has reached."""
    hint_bytes: int = 0
    """The bytes with which all attempts have fetched hints ahead of the training."""

    def attempt(self) -> TrainerState:
        """Trains from the last checkpoint to the end, writes the adapter, and returns Trainer's state.

        An attempt after the first one goes on even from a spoilt checkpoint (of a run that sends zeros), with zeros: so
        the provider, which may have cut the connection on purpose, sees the same calls as from any other run.
        """
        start, is_spoilt = (self.start, False) if self.num_attempts == 0 else self.checkpoints.newest()
        self.num_attempts += 1
        self.num_steps = step_of(start)
        set_seed(self.options.seed)
        with self.made_trainer() as (trainer, _), saving_errors(), reading_errors(start):
            run_state = run_states(trainer.model).current
            run_state.outcome.sends_zeros |= is_spoilt
            if self.on_step is not None:
                trainer.add_callback(StepLosses(self.on_step))
            try:
                if start is None or not self._restore_finished(trainer, start):
                    self._open_prefix(trainer)
                    before = self.session.traffic.bytes_down
                    self.session.fetch_hints(backward=True)
                    self.hint_bytes += self.session.traffic.bytes_down - before
                    self._train(trainer, start)
            finally:
                self.num_tokens += trainer.num_tokens
                self.num_steps = trainer.state.global_step
            _check_finite(trainer.model, run_state, self.checkpoints)
            save_adapter(trainer.model, self.output_dir)
        return trainer.state

    @contextmanager
    def made_trainer(self) -> Iterator[tuple[Any, Checkpointing]]:
        """Makes the model with its adapter and the trainer of an attempt, and the way in which it saves memory."""
        model = _adapted(self.session, self.peft_config, self.options.seed)
        num_virtual = virtual_tokens(self.peft_config)
        prefix = self._cut(model) if self.options.cache_frozen_prefix else None  # before checkpointing is turned on
        kept, windows = self._save_memory(model, num_virtual, 0 if prefix is None else prefix.num_bytes)
        with closing(kept), nullcontext() if prefix is None else closing(prefix):
            trainer = _make_trainer(
                model, self.rows, self.options, self.checkpoints, self.session, run_states(model).current
            )
            if isinstance(trainer, CompletionTrainer):
                trainer.windows, trainer.prefix = windows, prefix
                _prepare_loss(trainer, self.session.bucket, num_virtual)
            trainer.before_forward = lambda inputs: kept.before_step(inputs.numel() + num_virtual * inputs.shape[0])
            yield trainer, kept

    @property
    def options(self) -> FinetuneOptions:
        """Returns how the run goes."""
        return self.prepared.options

    @property
    def peft_config(self) -> PeftConfig:
        """Returns the adapter's settings."""
        return self.prepared.peft_config

    @property
    def rows(self) -> RunData:
        """Returns the token rows."""
        return self.prepared.rows

    def _cut(self, model: Any) -> PrefixCache:
        """Prepares a model for leaving out the blocks below its adapter. The cache is this attempt's own."""
        lengths = [num_tokens_of(row) for row in (*self.rows.rows, *self.rows.eval_rows)]
        return PrefixCache(
            frozen_prefix(model, bf16=self.options.bf16), lengths, checkpoints_folder(self.output_dir)
        )  # fmt: skip

    def _open_prefix(self, trainer: Any) -> None:
        prefix: PrefixCache | None = getattr(trainer, "prefix", None)
        if prefix is not None:
            said = prefix.open()
            if self.options.progress:
                to_stderr(said)
            if self._keeps_all_below(prefix.prefix.first):
                warn_and_go_on(
                    f"cache_frozen_prefix saves no traffic: all layers of the {prefix.prefix.first} blocks below the "
                    "adapter are computed here (keep, --keep); it only saves their time",
                    UserWarning,
                    users_line() + 1,
                )

    def _keeps_all_below(self, first: int) -> bool:
        """Tells whether the tenant computes all layers of blocks below a block itself."""
        manifest = self.session.connect()
        numbers = {group.id: block_of(group.layers[0].name) for group in manifest.groups}
        below = {group for group, number in numbers.items() if number is not None and number < first}
        return bool(below) and below <= choose_kept(self.session.keep, manifest).groups

    def _save_memory(self, model: Any, num_virtual: int, prefix_bytes: int) -> tuple[Checkpointing, Windows | None]:
        """Prepares a model for activation checkpointing and windows, as far as the run has them, and returns both."""
        kept = choose(
            self.prepared.mode, model.get_base_model(), self.rows.longest_batch(self.options.batch_size, num_virtual),
            has_dropout(model), self.options.memory_budget_mb, checkpoints_folder(self.output_dir), prefix_bytes,
        )  # fmt: skip
        windows = prepare_windows(model, self.options.window_tokens, kept)
        if kept.mode is None and windows is None:  # otherwise the graph of one block or window is there at a time
            prune(model)
        return kept, windows

    def _restore_finished(self, trainer: Any, start: Path) -> bool:
        """Takes over the state and the adapter of a checkpoint that was written after the run's last step, and returns
        True; returns False for any other checkpoint. Trainer would make a step more, at a learning rate of 0, and
        evaluate once more."""
        state = TrainerState.load_from_json(str(start / "trainer_state.json"))
        steps = self.options.early_stopping_steps
        idle = steps_without_progress(evaluations(state.log_history), self.options.early_stopping_threshold)
        if state.global_step < state.max_steps and (steps is None or idle < steps):
            return False
        trainer.state = state
        if self.options.keep_best and state.best_model_checkpoint is not None:
            trainer._load_best_model()
        else:
            trainer._load_from_checkpoint(str(start))
        return True

    @property
    def _log_dir(self) -> Path:
        return Path(self.options.log_dir or logs_folder(self.output_dir))

    def _train(self, trainer: Any, start: Path | None) -> None:
        shown = _progress_bar(trainer) if self.options.progress else nullcontext()
        with quiet_transformers(), reports(trainer, self.options.report_to, self._log_dir), shown:
            if self.options.dpo_precompute_reference and self.rows.are_preferences:
                trainer.precompute_reference()
            _train(trainer, start)


def _prepare_loss(trainer: CompletionTrainer, bucket: int | None, num_virtual: int) -> None:
    """Lets a trainer's model compute its loss, and the scores of an evaluation, in chunks where it can."""
    trainer.same_rows_for_any_text = bucket is not None
    # the positions of a prompt-learning adapter's virtual tokens are not those of the rows' labels
    every_position = bucket is not None or num_virtual > 0
    trainer.loss_in_chunks = chunk_loss(trainer.model, every_position=every_position)
    if trainer.eval_dataset is not None:
        score_tokens(trainer.model, every_position=every_position)


def _train(trainer: Trainer, start: Path | None) -> None:
    """Trains from the checkpoint `start`, or from the beginning.

    Raises:
        NotFinite: a value was NaN or infinite in a run whose replies are checked (`verify`); the error's text says what
            may help.
    """
    try:
        trainer.train(resume_from_checkpoint=str(start) if start else None)
    except NotFinite as exc:  # `from None`: the original's frames hold activations or gradients
        raise NotFinite(f"{exc}; try a lower learning_rate, and resume=False (--no-resume) to start over") from None


def _check_finite(model: Any, run_state: RunState, checkpoints: Checkpoints) -> None:
    """Checks that all values of the run and the adapter are finite; else marks all checkpoints as spoilt (unusable).

    Raises:
        NotFinite: a value is not finite.
    """
    try:
        run_state.check(trainable(model))
        run_state.finish()
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
    with adapter_errors():
        base = session.load_model()
        num_linear, by_default = len(linear_layers(base)), getattr(peft_config, "target_modules", ()) is None
        with loading(), no_compiler(), DrawnFrom(seed):
            model = get_peft_model(base, for_remote_base(peft_config))
    copied = copied_base_layer(model)
    if copied is not None:
        name, setting = copied
        raise ConfigurationError(
            f"base layers held by the provider cannot be trained whole: take {name} out of {setting}, "
            "or adapt it with LoRA"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigurationError("peft_config makes an adapter without a parameter that is trained: choose another")
    say_how_little(model, num_linear, by_default)
    return model


def prepare_windows(model: Any, window_tokens: int | None, kept: Checkpointing) -> Windows | None:
    """Prepares a model with an adapter for activation checkpointing and for windows (parts of a batch's tokens).

    All windows but the last go through the model twice. With a store of replies, the second pass uses the provider's
    replies of the first pass. Blocks are then not checkpointed, and each row is sent to the provider as often as
    without windows.

    Returns:
        The object that trains in windows; None if batches go through the model as a whole.
    """
    # a checkpointed block would drop the keys and values of a prefix, which only the cache of windows can hand it twice
    is_one_window = window_tokens is None and kept.mode is not None and kind_of(model) == PREFIX
    if window_tokens is None or kept.store is None:
        kept.turn_on(model.get_base_model())
    if window_tokens is None and not is_one_window:
        return None
    windows = Windows(model, sys.maxsize if window_tokens is None else window_tokens)
    if kept.store is not None and not is_one_window:
        windows.contexts = KeptReplies(kept.store, run_states(model)).contexts
    return windows


@quiet_transformers()  # Trainer reads the log level and sets it
def _make_trainer(
    model: Any,
    rows: RunData,
    settings: FinetuneOptions,
    checkpoints: Checkpoints,
    session: TrainingSession,
    run_state: RunState,
) -> Any:
    arguments: dict[str, Any] = dict(
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
        bf16=settings.bf16,
        prediction_loss_only=True,
        per_device_eval_batch_size=settings.batch_size,
        eval_strategy="steps" if rows.eval_rows else "no",
        eval_steps=settings.steps_of_evaluation,
        load_best_model_at_end=settings.keep_best,
        metric_for_best_model="loss" if settings.keep_best else None,
        greater_is_better=False if settings.keep_best else None,
    )

    def is_sound() -> bool:
        run_state.check(trainable(model))
        return not run_state.sends_zeros

    callbacks = [KeepFinite(run_state), checkpoints.callback(is_sound)]
    callbacks += [EvaluateAtTheEnd(run_state)] if rows.eval_rows else []
    if settings.early_stopping_steps is not None:
        callbacks.append(StopEarly(settings.early_stopping_steps, settings.early_stopping_threshold))
    pad = pad_token(session.tokenizer)
    trainer: Any
    train_rows: list[Any] = rows.rows
    eval_rows: list[Any] = rows.eval_rows
    if settings.cache_frozen_prefix:
        train_rows, eval_rows = numbered(train_rows, 0), numbered(eval_rows, len(train_rows))
    if rows.are_preferences:
        from tenant_sdk.training.preference_trainer import make_preference_trainer

        trainer = make_preference_trainer(
            model, arguments, settings, rows.rows, rows.eval_rows, session.tokenizer, pad, session.bucket, callbacks
        )
    else:
        trainer = CompletionTrainer(
            model=model, args=TrainingArguments(**arguments), train_dataset=train_rows,
            eval_dataset=eval_rows or None, data_collator=Collator(pad), callbacks=callbacks,
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
