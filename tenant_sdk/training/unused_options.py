"""This module refuses options of a run that would have no effect, since the user expects that they do something."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from tenant_sdk.training.settings import FinetuneSettings
from wire.errors import ConfigurationError

_DEFAULTS = {field.name: field.default for field in fields(FinetuneSettings)}


def check_used(
    settings: FinetuneSettings,
    *,
    has_evaluation: bool,
    are_preferences: bool,
    report_to: str | None,
    log_dir: str | Path | None,
) -> None:
    """Refuses an option that differs from its default but has no effect, because another option or a kind of rows is
    missing.

    Args:
        settings: the run's settings.
        has_evaluation: whether there are rows to evaluate on.
        are_preferences: whether the rows are preferences.
        report_to, log_dir: the arguments of `TenantClient.finetune`.

    Raises:
        ConfigurationError: such an option is set; the text says what it needs.
    """
    needs = {
        "eval_steps": ("eval_data", has_evaluation),
        "early_stopping_threshold": ("early_stopping_steps", settings.early_stopping_steps is not None),
        "dpo_beta": ("rows with chosen and rejected", are_preferences),
        "dpo_loss": ("rows with chosen and rejected", are_preferences),
        "dpo_precompute_reference": ("rows with chosen and rejected", are_preferences),
    }
    for name, (needed, is_there) in needs.items():
        if not is_there and getattr(settings, name) != _DEFAULTS[name]:
            raise ConfigurationError(f"{name} has no effect without {needed}: leave it out")
    if log_dir is not None and report_to is None:
        raise ConfigurationError("log_dir has no effect without report_to: leave it out")
