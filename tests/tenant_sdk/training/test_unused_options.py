"""Tests that an option without effect is refused before anything is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import get_scheduler

from tenant_sdk import TenantClient
from tests.support.training import QUICK, ROWS
from wire.errors import ConfigurationError

PREFERENCES = "rows with chosen and rejected"


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"eval_steps": 2}, "eval_steps has no effect without eval_data"),
        ({"early_stopping_threshold": 0.1}, "early_stopping_threshold has no effect without early_stopping_steps"),
        ({"dpo_beta": 0.2}, f"dpo_beta has no effect without {PREFERENCES}"),
        ({"dpo_loss": "hinge"}, f"dpo_loss has no effect without {PREFERENCES}"),
        ({"dpo_precompute_reference": True}, f"dpo_precompute_reference has no effect without {PREFERENCES}"),
        ({"log_dir": "logs"}, "log_dir has no effect without report_to"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 5}, "warmup_steps has no effect with lr_scheduler_type"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 3}, "warmup_steps has no effect with lr_scheduler_type"),
        ({"num_epochs": 3.0}, r"num_epochs \(--epochs\) has no effect beside max_steps"),
        ({"num_epochs": 5.0}, r"num_epochs \(--epochs\) has no effect beside max_steps"),
    ],
)
def test_an_option_without_effect_is_refused(
    chat_client: TenantClient, options: dict[str, Any], needed: str, tmp_path: Path
) -> None:
    before = chat_client.traffic.calls
    with pytest.raises(ConfigurationError, match=needed):
        chat_client.finetune(ROWS, LoraConfig(), str(tmp_path / "out"), **{**QUICK, **options})
    assert chat_client.traffic.calls == before


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"])
def test_constant_is_the_only_schedule_without_warm_up(kind: str) -> None:
    """This is what transformers does: if it changes, the option is refused in vain."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    (rate,) = get_scheduler(kind, optimizer, num_warmup_steps=4, num_training_steps=8).lr_lambdas
    assert (rate(1) == rate(4)) is (kind == "constant")


@pytest.mark.parametrize("task", ["SEQ_CLS", "FEATURE_EXTRACTION"])
def test_another_task_is_refused(chat_client: TenantClient, task: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"expected 'CAUSAL_LM' or None .*, got '{task}'"):
        chat_client.finetune(ROWS, LoraConfig(task_type=task), str(tmp_path / "out"), **QUICK)
