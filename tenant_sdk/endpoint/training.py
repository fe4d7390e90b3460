"""This module trains the adapter of one fine-tuning job by `finetune`. The job can be stopped between two forward
passes.

The adapter is written beside the jobs and moved into the folder of adapters when it is complete, so that no request
sees an incomplete adapter. A job that was stopped, or whose process died, resumes from its last checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft import LoraConfig

from tenant_sdk.model.planned_calls import AT_ONCE, planned_calls
from tenant_sdk.training.checkpoints import checkpoints_folder
from tenant_sdk.training.finetune import finetune
from tenant_sdk.training.result import FinetuneResult
from tenant_sdk.training.settings import FinetuneSettings
from tenant_sdk.training.waiting import WAIT_S
from wire.errors import ConfigurationError

SAVE_STEPS = 5
"""The number of optimizer steps from one checkpoint to the next."""


class JobStopped(Exception):
    """Says that a job was asked to stop. The worker thread for jobs catches this exception; no user sees it."""


class StoppableSession:
    """Wraps a session. Its models call `check`, which raises `JobStopped` to stop the job, before every forward pass,
    and `pause` before every call to the provider."""

    def __init__(self, session: Any, check: Callable[[], None], pause: Callable[[], None]) -> None:
        self._session, self._check, self._pause = session, check, pause
        self.loaded: tuple[Any, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def load_model(self) -> Any:
        """Returns a model that calls `check` before its embeddings, with which every forward pass begins."""
        model = self._session.load_model()
        planned = planned_calls(model)
        if planned is not AT_ONCE:  # which other models share
            planned.before_call = self._pause
        model.get_input_embeddings().register_forward_pre_hook(lambda *_: self._check())
        return model


def train(
    session: Any, data: Path, output: Path, settings: dict[str, Any], check: Callable[[], None],
    on_step: Callable[[int, float], None], pause: Callable[[], None],
) -> FinetuneResult:  # fmt: skip
    """Trains an adapter, and resumes from the job's last checkpoint if there is one.

    Args:
        session: the tenant's session.
        data: the job's JSONL file.
        output: the adapter's folder; checkpoints are beside it.
        settings: num_epochs, batch_size, learning_rate, seed, rank and max_steps.
        check: called before every forward pass, and several times a second during a wait for the provider; raises
            `JobStopped` if the job should stop.
        on_step: called with the number and the loss of each optimizer step.
        pause: called before every call to the provider; it may wait.

    Raises:
        JobStopped: the job was stopped.
        VeilbaseError: the run failed.
    """
    rank = settings["rank"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    # what a job does not say is as in `TenantClient.finetune`
    chosen = FinetuneSettings(
        max_steps=settings["max_steps"], num_epochs=settings["num_epochs"], batch_size=settings["batch_size"],
        gradient_accumulation_steps=1, learning_rate=settings["learning_rate"], lr_scheduler_type="linear",
        warmup_steps=3, weight_decay=0.0, max_grad_norm=1.0, save_steps=SAVE_STEPS, seed=settings["seed"],
    )  # fmt: skip
    stoppable: Any = StoppableSession(session, check, pause)
    return finetune(
        stoppable, data, config, output, chosen, overwrite=True, provider_wait_s=WAIT_S, progress=False,
        on_step=on_step, while_waiting=check,
    )  # fmt: skip


def publish(output: Path, adapter: Path) -> None:
    """Moves a complete adapter into the folder of adapters.

    Raises:
        ConfigurationError: another adapter has this name by now, or the folder cannot be written.
    """
    if adapter.exists():
        raise ConfigurationError(f"an adapter {adapter.name} is there already")
    try:
        os.rename(output, adapter)
    except OSError as exc:
        raise ConfigurationError(f"the adapter cannot be moved to the folder of adapters: {exc.strerror}") from exc


def checkpoints_of(output: Path) -> list[tuple[int, list[float]]]:
    """Returns for each complete checkpoint of a run, in order: its step, and the losses of all steps up to it."""
    found = []
    for mark in checkpoints_folder(output).glob("checkpoint-*/complete"):
        try:
            state = json.loads((mark.parent / "trainer_state.json").read_text(encoding="utf-8"))
            losses = [float(entry["loss"]) for entry in state["log_history"] if "loss" in entry]
            found.append((int(state["global_step"]), losses))
        except (OSError, ValueError, KeyError, TypeError):  # it is being removed
            continue
    return sorted(found)
