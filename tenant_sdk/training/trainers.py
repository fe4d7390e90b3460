"""This module holds the Trainer of fine-tuning runs, and what a run adds to them: a state of its own, evaluation,
early stopping and reports.

`CompletionTrainer` trains on rows with labelled tokens; its loss is mean cross-entropy over labelled tokens.
Preferences have a Trainer of their own (tenant_sdk/training/preference_trainer.py).

Several runs may be in threads of one process. But accelerate keeps one state for the process: device and precision,
which every new Trainer resets, and whether the optimizer acts on this step, which differs between runs. torch has one
random generator for the process. `own_accelerate_state` and `DrawnFrom` give a run its own.

A provider whose replies are not verified can choose a loss by lying, and see what becomes of it: where a run ends
(early stopping), or which adapter is released (keeping the best one). What it sees may then tell about hidden data. So
these options are refused unless replies are verified, or there is nothing to hide from the provider
(docs/threat-model.md, "A provider that lies").

Guarantees:
- a run has its own state of accelerate, which no other thread sees. An adapter's initial values depend only on the
  run's seed. Every optimizer step trains, the first one of a warm-up too;
- `CompletionTrainer` computes logits at as few positions as possible, and never at positions that would show the
  provider how many labels there are when rows are padded (`same_rows_for_any_text`);
- an evaluation asks the provider for forward passes of the same rows in the same order each time, in batches as large
  as the run's; the steps at which it does so follow from settings alone. Logits of a whole batch never exist at once in
  it. A loss that is not finite is treated like any other such value (tenant_sdk/model/run_state.py);
- reports send nothing anywhere: TensorBoard's files are on this machine (the library is optional, the extra
  `tensorboard`). Reporters that send losses to a service over a network are refused, since what a run logs follows from
  the tenant's data;
- losses and gradients of preferences equal those of TRL on the same model. Each preference is two sequences, which are
  sent forward once with the adapter and once without, and backward once, whatever they say. TRL sends nothing to its
  makers, and writes no copy of the data set and no model card.

Not guaranteed: reproducible dropout, and reproducible sampling in `generate`. Both use torch's global generator, since
their operations take no generator as an argument. For these a run needs a process of its own. Nor is a load-balancing
loss of mixtures of experts in training on preferences.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.overrides import TorchFunctionMode
from transformers import Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback

from noise.disk.private_files import make_private_folder
from tenant_sdk.model.run_state import RunState, run_states
from tenant_sdk.session_protocol import TrainingSession
from tenant_sdk.training.checkpoints import SavesAdapter
from tenant_sdk.training.frozen_prefix import PrefixCache
from tenant_sdk.training.loss import Scores, has_another_loss
from tenant_sdk.training.settings import NO_TENSORBOARD, Evaluation, FinetuneOptions
from tenant_sdk.training.token_rows import IGNORE_INDEX, Collator
from tenant_sdk.training.windows import Windows, training_step
from wire.errors import ConfigurationError


class StepLosses(TrainerCallback):  # type: ignore[misc]
    """Calls a function with the number (from 1) and the loss of each optimizer step."""

    def __init__(self, on_step: Callable[[int, float], None]) -> None:
        """Keeps the function, which must return quickly: the next step waits for it."""
        self._on_step = on_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Passes on the loss of the step that was logged."""
        if logs and "loss" in logs:
            self._on_step(int(state.global_step), float(logs["loss"]))


_State = dict[str, Any]
_own: ContextVar[dict[type, _State] | None] = ContextVar("veilbase_own_accelerate_state", default=None)

_DRAWS = frozenset({
    torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.bernoulli_,
    torch.Tensor.exponential_, torch.Tensor.geometric_, torch.Tensor.log_normal_, torch.Tensor.cauchy_,
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.normal, torch.bernoulli, torch.multinomial,
    nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_,  # a mode sees a call of these as one call
})  # fmt: skip
"""The random operations that take a generator as an argument; other operations, such as dropout, always use torch's own
generator."""


def check_alone() -> None:
    """Checks that this process is not one of several that torchrun started: accelerate would let them train together.

    Raises:
        ConfigurationError: it is one of several.
    """
    if os.environ.get("LOCAL_RANK", "-1") != "-1" and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigurationError(
            "finetune trains in one process, and this is one of several (WORLD_SIZE): start it without torchrun, or "
            "use stock PEFT and Trainer over load_model()"
        )


@contextmanager
def own_accelerate_state() -> Iterator[None]:
    """Gives this thread a new state of accelerate inside the context; the state of other threads does not change."""
    _install()
    before = _own.set({})
    try:
        yield
    finally:
        _own.reset(before)


class _StateOfRun:
    """Replaces `_shared_state` of a class of accelerate: gives a run its own state, and gives code outside a run the
    process's state."""

    def __init__(self, kind: type, everybodys: _State) -> None:
        self._kind, self._everybodys = kind, everybodys

    def __get__(self, instance: Any, owner: type) -> _State:
        own = _own.get()
        return self._everybodys if own is None else own.setdefault(self._kind, {})


@functools.cache
def _install() -> None:
    for kind in (PartialState, AcceleratorState, GradientState):
        everybodys = vars(kind)["_shared_state"]
        if isinstance(everybodys, dict):  # on a TPU accelerate already has one state for each thread
            kind._shared_state = _StateOfRun(kind, everybodys)


class DrawnFrom(TorchFunctionMode):
    """Makes a thread's random numbers depend on a seed alone, not on what other threads draw.

    Inside this context the thread draws the same numbers as a process with one thread after `torch.manual_seed(seed)`.
    """

    def __init__(self, seed: int) -> None:
        """Keeps the seed, a number from 0 to 2^32 - 1."""
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator(args, kwargs)}
        return func(*args, **kwargs)

    def _generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        first = next(tensors, None)
        device = torch.device(kwargs.get("device") or (torch.get_default_device() if first is None else first.device))
        if device.type == "meta":
            return None
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def check_report_to(report_to: str | None) -> None:
    """Raises ConfigurationError if `report_to`, which `FinetuneOptions.check` has passed, needs tensorboard and it is
    not installed."""
    if report_to is not None:
        _writer_class()


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigurationError(NO_TENSORBOARD) from None
    return SummaryWriter


@contextmanager
def reports(trainer: Any, report_to: str | None, folder: Path) -> Iterator[None]:
    """Makes a trainer write its losses and metrics to TensorBoard's files inside the context.

    Args:
        trainer: a Trainer.
        report_to: `tensorboard`, or None for no report.
        folder: the folder of the files, which is made with mode 0700 if it is not there.
    """
    if report_to is None:
        yield
        return
    make_private_folder(folder)
    writer = _writer_class()(log_dir=str(folder))
    trainer.add_callback(TensorBoardCallback(tb_writer=writer))
    try:
        yield
    finally:
        writer.close()  # Trainer does not tell its callbacks that a run failed


def check_loss_branches(session: TrainingSession, settings: FinetuneOptions, has_evaluation: bool) -> None:
    """Refuses options that depend on losses where a provider could steer them, or where nothing is evaluated; see
    `FinetuneOptions.check_loss_branches`."""
    settings.check_loss_branches(has_evaluation, session.can_be_steered)


class StopEarly(TrainerCallback):  # type: ignore[misc]
    """Ends a run when the evaluation's loss has not fallen for some optimizer steps.

    The decision follows from the history in the run's checkpoints, so a resumed run ends where an uninterrupted one
    does. The threshold works as in transformers' EarlyStoppingCallback: a loss counts as progress if it is below
    every earlier one by more than the threshold.
    """

    def __init__(self, num_steps: int, threshold: float) -> None:
        """Stops after `num_steps` steps without progress of more than `threshold`."""
        self._num_steps, self._threshold = num_steps, threshold

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the run if there was no progress for long enough."""
        if steps_without_progress(evaluations(state.log_history), self._threshold) >= self._num_steps:
            control.should_training_stop = True


def steps_without_progress(history: list[Evaluation], threshold: float) -> int:
    """Returns the optimizer steps from the last evaluation that made progress to the last one; 0 without
    evaluations. If none made progress, it counts from step 0."""
    progressed_at, best = 0, float("inf")
    for evaluation in history:
        if best - evaluation.loss > threshold:
            progressed_at = evaluation.step
        best = min(best, evaluation.loss)
    return history[-1].step - progressed_at if history else 0


_PREFIX = "eval_"
_LOSS = f"{_PREFIX}loss"
_TIMES = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "num_tokens")
"""Entries that Trainer and TRL add to an evaluation and that measure no quality."""


class KeepsPrefix:
    """Is a mixin of transformers' Trainer whose passes over the data may leave out lower blocks."""

    prefix: PrefixCache | None = None
    """What enters the lowest adapted block; None if every pass computes all blocks."""

    def within_prefix(self, inputs: Any) -> AbstractContextManager[None]:
        """Returns a context for the forward pass of a batch, and takes the rows' positions out of the batch."""
        positions = inputs.pop("positions", None)
        return nullcontext() if self.prefix is None else self.prefix.batch(positions)


class EvaluatesInChunks(KeepsPrefix):
    """Is a mixin of transformers' Trainer, for a model that `score_tokens` has changed.

    An evaluation's loss is that of the stock Trainer: the mean of the batches' losses. Its accuracy is the part of all
    labelled tokens that the model finds likeliest.
    """

    _num_right = 0
    _num_labels = 0

    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None, None]:
        """Returns (the batch's mean loss over labelled tokens, None, None); the stock method gives logits and labels
        too."""
        trainer: Any = self
        inputs = trainer._prepare_inputs(inputs)
        with torch.no_grad(), trainer.compute_loss_context_manager(), trainer.within_prefix(inputs):
            scores: Scores = model(**inputs, **trainer.without_cache(model), fused_lm_head=True)
        num_labels = int(scores.label_mask.sum())
        self._num_right += int((scores.is_top1 & scores.label_mask).sum())
        self._num_labels += num_labels
        return -scores.log_probs.sum() / max(num_labels, 1), None, None

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Runs the stock loop, and adds accuracy and perplexity to its metrics."""
        self._num_right = self._num_labels = 0
        trainer: Any = super()
        output = trainer.evaluation_loop(*args, **options)
        loss = output.metrics[_LOSS]
        output.metrics[f"{_PREFIX}accuracy"] = self._num_right / max(self._num_labels, 1)
        output.metrics[f"{_PREFIX}perplexity"] = math.exp(min(loss, 700.0)) if loss == loss else math.nan
        return output


class EvaluateAtTheEnd(TrainerCallback):  # type: ignore[misc]
    """Asks for an evaluation after the last step too, and passes each evaluation's loss to the `RunState`, which
    decides what happens if a value is not finite (tenant_sdk/model/run_state.py)."""

    def __init__(self, run: RunState) -> None:
        """Takes the run's state, which records whether a value was not finite."""
        self._run = run

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Asks for an evaluation after the last planned step."""
        if state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Checks the loss of an evaluation."""
        self._run.check([torch.tensor(float((metrics or {}).get(_LOSS, 0.0)))])


def evaluations(history: list[dict[str, float]]) -> list[Evaluation]:
    """Returns the evaluations of a run, in order.

    Args:
        history: the `log_history` of a Trainer's state.
    """
    return [
        Evaluation(
            step=int(entry["step"]),
            loss=float(entry[_LOSS]),
            metrics={
                key.removeprefix(_PREFIX): float(value)
                for key, value in entry.items()
                if key.startswith(_PREFIX) and key != _LOSS and key.removeprefix(_PREFIX) not in _TIMES
            },
        )
        for entry in history
        if _LOSS in entry
    ]


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
    with run_states(model).padding.labels_known():
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
        with self.within_prefix(inputs):
            return self._batch_loss(model, inputs, return_outputs, num_items_in_batch)

    def _batch_loss(self, model: Any, inputs: Any, return_outputs: bool, num_items_in_batch: Any) -> Any:
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
