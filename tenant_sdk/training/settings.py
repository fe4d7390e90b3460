"""This module defines the options of a fine-tuning run, each of them once, and the run's result.

From `FinetuneOptions` come the keyword arguments of `TenantClient.finetune`, the flags of `tenant finetune` and its
recipes' keys (tenant_sdk/training/recipe.py), what a job of the endpoint leaves at its default, and the table of
options in docs/finetune.md. Importing this module does not load torch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from runtime.command_line import nearest
from tenant_sdk.options import from_keywords, told
from tenant_sdk.plain_values import seconds
from wire.errors import ConfigurationError

_SCHEDULERS = ("linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt")
"""The learning-rate schedules of transformers that need no further argument."""
_TENSORBOARD = "tensorboard"
NO_TENSORBOARD = "report_to='tensorboard' needs it: pip install 'veilbase[tensorboard]'"
NO_TRL = "rows with chosen and rejected need TRL: pip install 'veilbase[dpo]'"
MODES = ("auto", "replies", "recompute")
"""The values of the option `checkpointing` besides None."""
REFUSE, TRUNCATE, DROP = TRUNCATIONS = ("refuse", "truncate", "drop")
"""The values of the option `truncation`."""
_DPO_LOSSES = ("sigmoid", "hinge", "ipo", "apo_zero", "apo_down", "sigmoid_norm")
"""The losses of TRL's DPOTrainer that need no further argument."""


def _told(meaning: str, group: str = "", *, identifies: bool = False, **more: Any) -> dict[str, Any]:
    """Returns what is told about an option (`tenant_sdk.options.told`), and whether only runs with the same value share
    checkpoints."""
    return told(meaning, group, identifies=identifies, **more)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """Holds the options of one fine-tuning run.

    Attributes:
        max_steps: number of optimizer steps; None for the number of steps that `num_epochs` takes.
        num_epochs: number of passes over the data, if `max_steps` is not given; giving both is refused.
        batch_size: rows that go through the model together.
        window_tokens: the most tokens, over all rows of a batch, that go through the model together. Gradients stay
            the same; memory depends on the window, the provider gets requests of so many rows, and all windows but
            a batch's last one are sent twice in the forward direction (docs/windows.md). None for whole batches.
        gradient_accumulation_steps: batches whose gradients make one optimizer step.
        learning_rate: AdamW's peak learning rate, which is reached with the last step of the warm-up.
        lr_scheduler_type: linear, cosine, constant (which has no warm-up), constant_with_warmup or inverse_sqrt.
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
        cache_frozen_prefix: whether what enters the lowest adapted block is kept in an encrypted file, so that the
            blocks below are computed, and sent, in the first epoch only (docs/finetune.md, "Adapters on upper blocks").
            Refused where it would not be exact.
        resume: None resumes from a checkpoint of the same run if there is one; True requires a checkpoint; False
            starts over.
        overwrite: whether an adapter that `output_dir` holds already is replaced; otherwise that is an error.
        report_to: where losses and metrics are written besides: `tensorboard` for its files, None for nowhere.
        log_dir: the folder of these files; None for `adapters/.support.logs` beside `adapters/support`.
        provider_wait_s: the seconds for which a run that has begun waits for a provider that went away, before it
            fails. When the provider is back, the run goes on from its last checkpoint, under new masks. 0 for a run
            that fails at once.
        progress: whether a progress bar is shown on stderr.
    """

    eval_data: Any = field(
        default=None,
        repr=False,
        metadata=_told("rows to evaluate on: a data set, or a part of the data, such as 0.1", "Data", shown="none"),
    )
    max_steps: int | None = field(
        default=None,
        metadata=_told(
            "optimizer steps, in place of num_epochs; giving both is refused",
            "Training",
            shown="none",
            identifies=True,
        ),
    )
    num_epochs: float = field(
        default=3.0, metadata=_told("passes over the data", "Training", flag="--epochs", identifies=True)
    )
    batch_size: int = field(
        default=8, metadata=_told("rows that go through the model together", "Training", identifies=True)
    )
    gradient_accumulation_steps: int = field(
        default=1, metadata=_told("batches whose gradients make one step", "Training", identifies=True)
    )
    learning_rate: float = field(
        default=1e-3, metadata=_told("AdamW's peak learning rate", "Training", identifies=True)
    )
    lr_scheduler_type: str = field(
        default="linear",
        metadata=_told(
            "one of linear, cosine, constant (no warm-up), constant_with_warmup, inverse_sqrt",
            "Training",
            identifies=True,
        ),
    )
    warmup_steps: int = field(
        default=3,
        metadata=_told(
            "steps in which the learning rate rises to its peak; the first of N has an N-th of it",
            "Training",
            identifies=True,
        ),
    )
    weight_decay: float = field(default=0.0, metadata=_told("AdamW's weight decay", "Training", identifies=True))
    max_grad_norm: float = field(
        default=1.0, metadata=_told("the norm to which a longer gradient is scaled down", "Training", identifies=True)
    )
    max_length: int | None = field(
        default=None, metadata=_told("the most tokens of a row", "Data", shown="the model's context")
    )
    truncation: Literal["refuse", "truncate", "drop"] = field(
        default="refuse", metadata=_told("what becomes of longer rows: refuse, truncate or drop", "Data")
    )
    bf16: bool = field(
        default=False,
        metadata=_told(
            "compute in bfloat16 where that is usual (autocast); rows cross the wire as without it",
            "Training",
            identifies=True,
        ),
    )
    seed: int = field(
        default=0,
        metadata=_told(
            "seed of the adapter's initial values, of orders, of dropout and of what eval_data holds back",
            "Data",
            identifies=True,
        ),
    )
    save_steps: int = field(
        default=10, metadata=_told("steps between checkpoints", "Checkpoints and waits", identifies=True)
    )
    resume: bool | None = field(
        default=None,
        metadata=_told(
            "go on from a checkpoint: by default if the same run has one; on: only then; off: start over",
            "Checkpoints and waits",
            shown="none",
        ),
    )
    overwrite: bool = field(default=False, metadata=_told("replace an adapter that the output folder holds already"))
    eval_steps: int | None = field(
        default=None,
        metadata=_told("steps between evaluations", "Evaluation and reports", shown="save_steps", identifies=True),
    )
    early_stopping_steps: int | None = field(
        default=None,
        metadata=_told(
            "end if the evaluation's loss has not fallen for so many steps; needs verify",
            "Evaluation and reports",
            shown="none",
            identifies=True,
        ),
    )
    early_stopping_threshold: float = field(
        default=0.0, metadata=_told("the least by which that loss must fall", "Evaluation and reports", identifies=True)
    )
    keep_best: bool = field(
        default=False,
        metadata=_told(
            "write the adapter of the best evaluation; needs verify", "Evaluation and reports", identifies=True
        ),
    )
    dpo_beta: float = field(default=0.1, metadata=_told("DPO's beta", "Preferences (DPO)", identifies=True))
    dpo_loss: str = field(
        default="sigmoid",
        metadata=_told(
            "DPO's loss: sigmoid, hinge, ipo, apo_zero, apo_down or sigmoid_norm", "Preferences (DPO)", identifies=True
        ),
    )
    dpo_precompute_reference: bool = field(
        default=False,
        metadata=_told("ask for the reference once, before the training", "Preferences (DPO)", identifies=True),
    )
    window_tokens: int | None = field(
        default=None,
        metadata=_told(
            "train in windows of so many tokens: less memory, more traffic",
            "Memory",
            shown="none",
            unit="TOKENS",
            page="windows.md",
            identifies=True,
        ),
    )
    checkpointing: Literal["auto", "replies", "recompute"] | None = field(
        default="auto",
        metadata=_told(
            "how activations are kept: auto, none, replies (the rest is computed again), recompute (more calls)",
            "Memory",
            page="memory.md",
        ),
    )
    memory_budget_mb: float | None = field(
        default=None, metadata=_told("memory for activations, in MB", "Memory", shown="what is free", page="memory.md")
    )
    gradient_checkpointing: bool = field(default=False, metadata=_told("the same as checkpointing recompute", "Memory"))
    cache_frozen_prefix: bool = field(
        default=False,
        metadata=_told(
            "keep what enters the lowest adapted block on disk: blocks below are sent in the first epoch only", "Memory"
        ),
    )
    report_to: str | None = field(
        default=None,
        metadata=_told(
            "where losses and metrics are written besides: tensorboard, or nowhere",
            "Evaluation and reports",
            shown="none",
        ),
    )
    log_dir: str | Path | None = field(
        default=None,
        metadata=_told(
            "the folder of these files", "Evaluation and reports", shown=".NAME.logs beside the output NAME"
        ),
    )
    provider_wait_s: float = field(
        default=600.0,
        metadata=_told(
            "seconds for which a run waits for a provider that went away",
            "Checkpoints and waits",
            flag="--provider-wait",
        ),
    )
    progress: bool = field(
        default=True,
        metadata=_told(
            "show a progress bar on stderr; without a terminal, a line for each step, and every 15 s within a long one",
            "Evaluation and reports",
        ),
    )

    def identity(self) -> dict[str, Any]:
        """Returns the options that a resumed run must have as they were; they are part of a run's fingerprint."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.metadata["identifies"]}

    @property
    def steps_of_evaluation(self) -> int:
        """Returns the number of optimizer steps between evaluations, by default that between checkpoints."""
        return self.save_steps if self.eval_steps is None else self.eval_steps

    def check(self) -> None:
        """Raises ConfigurationError for an impossible value; callers must call this method before they send rows or
        write files."""
        positive: tuple[str, ...] = ("num_epochs", "batch_size", "gradient_accumulation_steps", "save_steps")
        optional = ("max_steps", "max_length", "window_tokens", "eval_steps", "early_stopping_steps")
        positive += ("learning_rate", "dpo_beta", *(name for name in optional if getattr(self, name) is not None))
        for name in positive:
            if not 0 < getattr(self, name) < math.inf:  # a NaN fails this too
                raise ConfigurationError(f"{name} must be positive, got {getattr(self, name)}")
        more: tuple[str, ...] = ("weight_decay", "max_grad_norm", "seed", "early_stopping_threshold")
        more += ("memory_budget_mb",) if isinstance(self.memory_budget_mb, int | float) else ()
        for name in ("warmup_steps", *more):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} must be a finite number from 0, got {getattr(self, name)}")
        if self.seed >= 1 << 32:  # numpy's generator takes no more
            raise ConfigurationError(f"seed must be below 2^32, got {self.seed}")
        if self.lr_scheduler_type not in _SCHEDULERS:
            raise _no_such("lr_scheduler_type", self.lr_scheduler_type, _SCHEDULERS)
        if self.report_to not in (None, _TENSORBOARD):
            raise ConfigurationError(
                f"report_to must be {_TENSORBOARD!r} or None, got {self.report_to!r}: others send losses over a network"
            )
        if self.dpo_loss not in _DPO_LOSSES:
            raise _no_such("dpo_loss", self.dpo_loss, _DPO_LOSSES)
        if self.cache_frozen_prefix and self.window_tokens is not None:
            raise ConfigurationError(
                "cache_frozen_prefix is not possible with window_tokens, whose windows read keys and values of each "
                "block: leave one of them out"
            )
        if self.keep_best and self.steps_of_evaluation != self.save_steps:
            raise ConfigurationError(
                f"keep_best takes the adapter from a checkpoint: expected eval_steps as save_steps, {self.save_steps}, "
                f"got {self.eval_steps}"
            )
        if self.truncation not in TRUNCATIONS:
            raise ConfigurationError(f"truncation must be {', '.join(TRUNCATIONS)}, got {self.truncation!r}")
        if self.window_tokens is not None and self.window_tokens < self.batch_size:
            raise ConfigurationError(
                f"window_tokens (--window-tokens) counts the tokens of a window over all {self.batch_size} rows of a "
                f"batch: expected at least {self.batch_size}, got {self.window_tokens}"
            )
        seconds("provider_wait_s", self.provider_wait_s)
        self.memory_mode()

    def memory_mode(self) -> str | None:
        """Returns how the run saves memory: one of `MODES`, or None.

        Raises:
            ConfigurationError: an option has an impossible value, or two options contradict each other.
        """
        mode = resolve(self.checkpointing, self.gradient_checkpointing, self.memory_budget_mb)
        if self.window_tokens is None or mode != "auto":
            return mode
        if self.memory_budget_mb is not None:
            raise ConfigurationError("memory_budget_mb with window_tokens needs checkpointing='replies'")
        return None

    def check_padding(self, is_padded: bool) -> None:
        """Raises ConfigurationError if rows are to be dropped although rows are padded: the number of rows would then
        show how many are long."""
        if self.truncation == DROP and is_padded:
            raise ConfigurationError(
                "truncation='drop' would show how many rows are long, which pad_rows hides: choose "
                "truncation='truncate'"
            )

    def check_repeats(self, num_rows: int, has_evaluation: bool) -> None:
        """Refuses `cache_frozen_prefix` for a run that meets no row a second time, where keeping hidden states has no
        effect.

        Raises:
            ConfigurationError: it is such a run.
        """
        if self.max_steps is None:
            has_epochs = self.num_epochs > 1
        else:
            has_epochs = self.max_steps * self.batch_size * self.gradient_accumulation_steps > num_rows
        if self.cache_frozen_prefix and not has_epochs and not has_evaluation:
            raise ConfigurationError(
                "cache_frozen_prefix has no effect without a second epoch or an evaluation: leave it out"
            )

    def check_used(self, *, has_evaluation: bool, are_preferences: bool) -> None:
        """Refuses an option that differs from its default but has no effect, because another option or a kind of rows
        is missing, and one that does not go with the kind of rows.

        Args:
            has_evaluation: whether there are rows to evaluate on.
            are_preferences: whether the rows are preferences.

        Raises:
            ConfigurationError: such an option is set; the text says what it needs.
        """
        if are_preferences and self.window_tokens is not None:
            raise ConfigurationError("window_tokens is not possible with preferences: their loss compares whole rows")
        if are_preferences and self.cache_frozen_prefix:
            raise ConfigurationError(
                "cache_frozen_prefix is not possible with preferences, whose two answers go through the model together"
            )
        needs = {
            "eval_steps": ("eval_data", has_evaluation),
            "early_stopping_threshold": ("early_stopping_steps", self.early_stopping_steps is not None),
            "dpo_beta": ("rows with chosen and rejected", are_preferences),
            "dpo_loss": ("rows with chosen and rejected", are_preferences),
            "dpo_precompute_reference": ("rows with chosen and rejected", are_preferences),
            "log_dir": ("report_to", self.report_to is not None),
        }
        for name, (needed, is_there) in needs.items():
            if not is_there and getattr(self, name) != getattr(FinetuneOptions, name):
                raise ConfigurationError(f"{name} has no effect without {needed}: leave it out")

    def check_effect(self, given: Collection[str]) -> None:
        """Raises ConfigurationError for a value that another option leaves without effect. This is for options that a
        user gives now; a run that began with such a value may go on.

        Args:
            given: the names of the options that the user gave. One of them counts as given also with its default.
        """
        if self.lr_scheduler_type == "constant" and "warmup_steps" in given and self.warmup_steps != 0:
            raise ConfigurationError(
                "warmup_steps has no effect with lr_scheduler_type constant: choose constant_with_warmup, or leave it "
                "out"
            )
        if self.max_steps is not None and "num_epochs" in given:
            raise ConfigurationError("num_epochs (--epochs) has no effect beside max_steps: leave one of them out")

    def check_loss_branches(self, has_evaluation: bool, can_be_steered: bool) -> None:
        """Refuses options that depend on losses where a provider could steer them, or where nothing is evaluated.

        Raises:
            ConfigurationError: such an option is set; the text says what would allow it.
        """
        chosen = [name for name in ("early_stopping_steps", "keep_best") if getattr(self, name)]
        if not chosen:
            return
        if not has_evaluation:
            raise ConfigurationError(f"{chosen[0]} needs an evaluation: name rows with eval_data (--eval-data)")
        if can_be_steered:
            raise ConfigurationError(
                f"{chosen[0]} lets losses decide, and a provider that lies could choose them and see the decision: "
                "name a checkpoint that you trust (verify=, --verify), or leave it out"
            )


def resolve(checkpointing: str | None, gradient_checkpointing: bool, memory_budget_mb: float | None) -> str | None:
    """Returns the mode that a run's options name: one of MODES, or None.

    Raises:
        ConfigurationError: an option has an impossible value, or two options contradict each other.
    """
    if checkpointing is not None and checkpointing not in MODES:
        raise ConfigurationError(f"checkpointing must be {', '.join(MODES)} or None, got {checkpointing!r}")
    if gradient_checkpointing:
        if checkpointing not in ("auto", "recompute"):
            raise ConfigurationError(
                f"gradient_checkpointing=True means checkpointing='recompute', got checkpointing={checkpointing!r} too"
            )
        checkpointing = "recompute"
    if memory_budget_mb is None:
        return checkpointing
    is_number = isinstance(memory_budget_mb, int | float) and not isinstance(memory_budget_mb, bool)
    if not is_number or not 0 <= memory_budget_mb < float("inf"):
        raise ConfigurationError(f"memory_budget_mb must be a finite number from 0, got {memory_budget_mb!r}")
    if checkpointing not in ("auto", "replies"):
        raise ConfigurationError(
            f"memory_budget_mb needs checkpointing='auto' or 'replies', got checkpointing={checkpointing!r}"
        )
    return checkpointing


def _no_such(name: str, value: Any, known: Sequence[str]) -> ConfigurationError:
    """Returns the error for an option whose value is none of those that there are."""
    meant = nearest(value[:100], known) if isinstance(value, str) else None
    advice = "" if meant is None else f": did you mean {meant}?"
    return ConfigurationError(f"{name} must be one of {', '.join(known)}, got {value!r}{advice}")


class FinetuneKeywords(TypedDict, total=False):
    """Gives the fields of `FinetuneOptions` to type checkers, as keyword arguments."""

    eval_data: Any
    max_steps: int | None
    num_epochs: float
    batch_size: int
    gradient_accumulation_steps: int
    learning_rate: float
    lr_scheduler_type: str
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    max_length: int | None
    truncation: Literal["refuse", "truncate", "drop"]
    bf16: bool
    seed: int
    save_steps: int
    resume: bool | None
    overwrite: bool
    eval_steps: int | None
    early_stopping_steps: int | None
    early_stopping_threshold: float
    keep_best: bool
    dpo_beta: float
    dpo_loss: str
    dpo_precompute_reference: bool
    window_tokens: int | None
    checkpointing: Literal["auto", "replies", "recompute"] | None
    memory_budget_mb: float | None
    gradient_checkpointing: bool
    cache_frozen_prefix: bool
    report_to: str | None
    log_dir: str | Path | None
    provider_wait_s: float
    progress: bool


def finetune_options(given: Mapping[str, Any]) -> FinetuneOptions:
    """Returns the options that keyword arguments name, and defaults for the others.

    Raises:
        TypeError: there is no such option; the text names the nearest one.
        ConfigurationError: another option leaves one of them without effect.
    """
    options = from_keywords(FinetuneOptions, given, "finetune")
    options.check_effect(given)
    return options


@dataclass(frozen=True)
class Evaluation:
    """Holds what one evaluation of a run found, on rows that the run does not train on.

    Attributes:
        step: the number of optimizer steps before the evaluation.
        loss: the mean of the batches' losses, each the mean over its labelled tokens, or over its preferences.
        metrics: `accuracy` (the part of labelled tokens that the model finds likeliest) and `perplexity`; for
            preferences TRL's metrics, such as `rewards/accuracies` and `rewards/margins`.
    """

    step: int
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FinetuneResult:
    """Holds the result of a fine-tuning run.

    Attributes:
        adapter_dir: the folder with PEFT's files, which `PeftModel.from_pretrained(base, adapter_dir)` loads.
        losses: mean loss per labelled token, or per preference, of each optimizer step, in order; a resumed run has the
            losses of all steps.
        tokens: number of tokens trained on in this call, without padding; those of steps that were made again count
            twice.
        bytes_up, bytes_down: bytes sent to and received from the providers in this call.
        seconds: wall-clock time for hints, model, training, evaluations and waits, in this call; not for connecting,
            the check of the provider and reading the data.
        resumed_from_step: the optimizer step of the checkpoint that the run was resumed from; 0 if there was none.
        evaluations: the evaluations, in order; empty without `eval_data`.
        adapter_step: the optimizer step after which the adapter was as it was written: the last one, or with
            `keep_best` that of the evaluation with the least loss.
        num_waits: how often this call waited for a provider that went away, and went on from a checkpoint. `tokens`,
            bytes and `seconds` count all that was done, also what was lost and the waits.
        hint_bytes: the part of `bytes_down` with which hints of the lattice mask were fetched ahead of the training; 0
            if all were on disk. Hints that are not kept on disk are fetched during the training, and not counted here.
    """

    adapter_dir: Path
    losses: list[float] = field(repr=False)
    tokens: int
    bytes_up: int
    bytes_down: int
    seconds: float
    resumed_from_step: int = 0
    evaluations: list[Evaluation] = field(default_factory=list, repr=False)
    adapter_step: int = 0
    num_waits: int = 0
    hint_bytes: int = 0
