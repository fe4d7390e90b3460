"""Tests training on preferences: losses and metrics are those of TRL's own DPOTrainer on the local model, and the calls
depend on shapes alone."""

from __future__ import annotations

import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer
from trl.trainer import base_trainer

from attacks.programs.overflow import Fault
from tenant_sdk import TenantClient
from tenant_sdk.model.run_state import NotFiniteWarning
from tenant_sdk.testing import character_tokenizer
from tenant_sdk.training.dataset import load_rows
from tenant_sdk.training.token_rows import preference_rows
from tests.support.false_providers import HONEST, Opened
from tests.support.parity import dequantised
from tests.support.spies import before_requests
from tests.support.tiny_models import make_chat_model
from tests.support.training import QUICK, TOLERANCE, logged, lora, training_arguments
from wire.errors import ConfigurationError, DatasetError, NotFinite
from wire.frame import Direction

PLAIN = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in (
        ("who? ", "Ada Quill", "no idea"), ("where is it? ", "in Port Hale", "it is gone"), ("when? ", "1987", "then"),
        ("what? ", "a copper owl", "an owl"), ("why so? ", "no reason", "because of rain"), ("how? ", "by boat", "so"),
    )
]  # fmt: skip
CHAT = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        **{key: [{"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")},
    }
    for row in PLAIN
]
PAIRS: dict[str, Any] = {**QUICK, "batch_size": 2, "max_steps": 4}


def stock_dpo(model: Any, config: Any, scratch: Path, rows: Any, eval_rows: Any = None, **changes: Any) -> DPOTrainer:
    """Returns TRL's own DPOTrainer, which has trained an adapter on a local model with PAIRS."""
    arguments = training_arguments(scratch, **{**PAIRS, **changes})
    set_seed(0)
    trainer = DPOTrainer(
        model=model, args=DPOConfig(**arguments, gradient_checkpointing=False, max_length=None),
        train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(eval_rows) if eval_rows else None,
        processing_class=character_tokenizer(), peft_config=config,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def int8_client(chat_folder: Path) -> Iterator[TenantClient]:
    """Provides a client whose results equal those of the local dequantised model."""
    cache = chat_folder.with_name("int8-cache")
    with TenantClient(f"inproc:{chat_folder}", mask="off", arithmetic="float", cache=cache) as client:
        yield client


def test_a_warm_up_trains_from_its_first_step(int8_client: TenantClient, tmp_path: Path) -> None:
    options = {**PAIRS, "batch_size": 4, "warmup_steps": 3, "max_steps": 2}
    first, second = int8_client.finetune(PLAIN[:4], lora(), tmp_path / "out", **options).losses
    assert first == pytest.approx(math.log(2), rel=1e-5)
    assert second < 0.999 * math.log(2)


@pytest.mark.parametrize("rows", [PLAIN, CHAT], ids=["plain", "chat"])
def test_losses_are_those_of_trl(int8_client: TenantClient, chat_folder: Path, tmp_path: Path, rows: Any) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 2}
    stock = stock_dpo(dequantised(chat_folder), lora(), tmp_path / "stock", rows[:4], rows[4:], **evaluation)
    result = int8_client.finetune(rows[:4], lora(), tmp_path / "out", eval_data=rows[4:], eval_steps=2, **PAIRS)
    assert result.losses == pytest.approx(logged(stock), rel=TOLERANCE)
    assert result.losses[0] == pytest.approx(math.log(2), rel=1e-5)
    assert result.losses[-1] < 0.99 * math.log(2), "nothing was trained"
    assert [each.loss for each in result.evaluations] == pytest.approx(logged(stock, "eval_loss"), rel=TOLERANCE)
    for name in ("rewards/margins", "rewards/accuracies", "logps/chosen", "entropy", "mean_token_accuracy"):
        found = [each.metrics[name] for each in result.evaluations]
        assert found == pytest.approx(logged(stock, f"eval_{name}"), rel=1e-3, abs=1e-5), name
    # two passes over the four rows, each with two answers
    tokens = preference_rows(load_rows(rows[:4]), int8_client.text, 128, None, 0)
    assert result.tokens == 2 * sum(
        2 * len(row["prompt_ids"]) + len(row["chosen_ids"] + row["rejected_ids"]) for row in tokens
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"dpo_beta": 0.5}, {"beta": 0.5}),
        ({"dpo_loss": "ipo"}, {"loss_type": ["ipo"]}),
        ({"dpo_loss": "hinge"}, {"loss_type": ["hinge"]}),
        ({"dpo_loss": "apo_zero"}, {"loss_type": ["apo_zero"]}),
        ({"dpo_loss": "apo_down"}, {"loss_type": ["apo_down"]}),
        ({"dpo_loss": "sigmoid_norm"}, {"loss_type": ["sigmoid_norm"]}),
        ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 2}),
    ],
    ids=str,
)
def test_settings_are_those_of_trl(
    ours: dict[str, Any], theirs: dict[str, Any], chat_client: TenantClient, chat_folder: Path, tmp_path: Path
) -> None:
    local = AutoModelForCausalLM.from_pretrained(chat_folder)
    stock = stock_dpo(local, lora(), tmp_path / "stock", PLAIN, **theirs)
    result = chat_client.finetune(PLAIN, lora(), tmp_path / "out", **{**PAIRS, **ours})
    assert result.losses == pytest.approx(logged(stock), rel=TOLERANCE)


def test_bf16(chat_client: TenantClient, chat_folder: Path, tmp_path: Path) -> None:
    local = AutoModelForCausalLM.from_pretrained(chat_folder)
    stock = stock_dpo(local, lora(), tmp_path / "stock", PLAIN, bf16=True)
    result = chat_client.finetune(PLAIN, lora(), tmp_path / "out", bf16=True, **PAIRS)
    assert result.losses == pytest.approx(logged(stock), rel=2e-3)


@pytest.mark.parametrize("kind", ["gpt2", "gemma"])
def test_other_models(kind: str, tmp_path: Path) -> None:
    """The heads of these models are tied to the embeddings, and Gemma caps its logits."""
    folder = make_chat_model(tmp_path / kind, kind)
    config = lora(fan_in_fan_out=kind == "gpt2")
    local = AutoModelForCausalLM.from_pretrained(folder)
    stock = stock_dpo(local, config, tmp_path / "stock", PLAIN)
    with TenantClient(f"inproc:{folder}", weights="native", mask="off", arithmetic="float") as client:
        result = client.finetune(PLAIN, lora(fan_in_fan_out=kind == "gpt2"), tmp_path / "out", **PAIRS)
    assert result.losses == pytest.approx(logged(stock), rel=TOLERANCE)


def test_a_soft_prompt(chat_client: TenantClient, chat_folder: Path, tmp_path: Path) -> None:
    config = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    local = AutoModelForCausalLM.from_pretrained(chat_folder)
    stock = stock_dpo(local, config, tmp_path / "stock", PLAIN)
    result = chat_client.finetune(PLAIN, config, tmp_path / "out", **PAIRS)
    assert result.losses == pytest.approx(logged(stock), rel=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpointing": "replies", "memory_budget_mb": 0}, {"checkpointing": "recompute"}, {"checkpointing": None},
        {"dpo_precompute_reference": True},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_change_no_loss(chat_client: TenantClient, tmp_path: Path, options: dict[str, Any]) -> None:
    want = chat_client.finetune(PLAIN, lora(), tmp_path / "want", eval_data=0.3, **PAIRS)
    got = chat_client.finetune(PLAIN, lora(), tmp_path / "got", eval_data=0.3, **PAIRS, **options)
    assert got.losses == pytest.approx(want.losses, rel=1e-6)
    assert [each.loss for each in got.evaluations] == pytest.approx([each.loss for each in want.evaluations], rel=1e-6)


def test_a_step_is_two_forward_passes_and_one_backward(
    chat_client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kept replies, the numbers of calls are the same. With `dpo_precompute_reference`, the reference model
    computes each row once, and not again in each epoch."""
    seen: Counter[Direction] = Counter()
    before_requests(monkeypatch, lambda call, payload: seen.update([call.direction]))

    def counted(**options: Any) -> tuple[int, int]:
        seen.clear()
        chat_client.finetune(PLAIN, lora(), tmp_path / "out", overwrite=True, **{**PAIRS, **options})
        return seen[Direction.FORWARD], seen[Direction.BACKWARD]

    num_groups = len(chat_client.connect().groups)
    assert counted() == counted(checkpointing="replies", memory_budget_mb=0)
    forward, backward = counted()
    assert forward == 4 * 2 * num_groups
    # nothing trains below the first block's input
    assert backward == 4 * (num_groups - 1)
    # 6 rows in batches of 2 are asked for once, 12 steps are 4 passes over them
    assert counted(dpo_precompute_reference=True, max_steps=12)[0] == (3 + 12) * num_groups


def test_the_adapter_folder_is_a_stock_one(chat_client: TenantClient, tmp_path: Path) -> None:
    result = chat_client.finetune(PLAIN, lora(), tmp_path / "out", **PAIRS)
    assert {path.name for path in result.adapter_dir.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert isinstance(chat_client.generate("who?", result.adapter_dir, 4), str)


def test_nobody_is_told_and_nothing_is_kept(
    chat_client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL alone would send telemetry about each run and write a model card into each checkpoint, and the library
    datasets would keep a copy of the rows. Fine-tuning here does none of this."""
    told: list[Any] = []
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(base_trainer, "send_telemetry", lambda **said: told.append(said))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    written: set[str] = set()
    from tenant_sdk.training import checkpoints

    discard = checkpoints.Checkpoints.discard

    def look(self: Any) -> None:
        written.update(path.name for path in self.folder.rglob("*"))
        discard(self)

    monkeypatch.setattr(checkpoints.Checkpoints, "discard", look)
    chat_client.finetune(PLAIN, lora(), tmp_path / "out", eval_data=0.3, **PAIRS)
    assert told == []
    assert "trainer_state.json" in written
    assert not {name for name in written if "token" in name or "arrow" in name}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    stock = AutoModelForCausalLM.from_pretrained(chat_client.url.removeprefix("inproc:"))
    stock_dpo(stock, lora(), tmp_path / "stock", PLAIN, max_steps=1)
    assert told, "TRL alone tells"


def of_one_length(letter: str) -> list[dict[str, str]]:
    return [{"prompt": letter * 4, "chosen": letter * (5 - number % 2), "rejected": "b" * 3} for number in range(4)]


@pytest.mark.parametrize("mask", ["off", "lattice"])
def test_the_calls_do_not_depend_on_what_rows_say(mask: str, opened: Opened, tmp_path: Path) -> None:
    seen = []
    for letter in "ax":
        client, provider = opened(HONEST, mask)
        options = {**PAIRS, "max_steps": 2}
        client.finetune(of_one_length(letter), lora(r=2), tmp_path / letter, eval_data=0.5, **options)
        seen.append(provider.seen)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.name)
def test_a_value_that_is_not_finite_changes_no_call(direction: Direction, opened: Opened, tmp_path: Path) -> None:
    options = {**PAIRS, "max_steps": 3}
    client, provider = opened(HONEST)
    client.finetune(of_one_length("a"), lora(r=2), tmp_path / "honest", **options)
    expected = provider.seen
    client, provider = opened(Fault(direction, math.nan, len(expected) // 6))
    with pytest.warns(NotFiniteWarning), pytest.raises(NotFinite, match="nothing came of this run"):
        client.finetune(of_one_length("a"), lora(r=2), tmp_path / "out", **options)
    assert provider.seen == expected
    assert not (tmp_path / "out").exists()


def test_padded_rows(chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `pad_rows` both answers take as many rows as the bucket says, at the head too; a text that is longer loses
    its first tokens, since the tokenizer is the provider's."""
    sizes: set[int] = set()
    before_requests(monkeypatch, lambda call, payload: sizes.add(payload.num_rows))
    with TenantClient(f"inproc:{chat_folder}", mask="off", pad_rows=16, cache=tmp_path / "cache") as client:
        result = client.finetune(PLAIN, lora(), tmp_path / "out", **PAIRS)
        rows = preference_rows(load_rows(PLAIN), client.text, 128, 16, 0)
    assert sizes == {2 * 2 * 16}
    assert result.losses[-1] < result.losses[0]
    assert max(len(row["prompt_ids"]) + len(row["chosen_ids"]) for row in rows) == 16


def test_rows_by_truncation(chat_client: TenantClient) -> None:
    def made(truncation: str) -> list[dict[str, list[int]]]:
        return preference_rows(load_rows(PLAIN[:2]), chat_client.text, 20, None, 0, truncation)

    with pytest.raises(DatasetError, match=r"^data set, row 2: expected at most 20 tokens, 26 came: .*--truncation"):
        made("refuse")
    with pytest.warns(UserWarning, match="1 of 2 rows were cut to their first 20 tokens; the longest has 26"):
        first, second = made("truncate")
    assert len(first["prompt_ids"]) + len(first["chosen_ids"]) == 15
    assert (len(second["prompt_ids"]), len(second["chosen_ids"]), len(second["rejected_ids"])) == (13, 7, 7)
    with pytest.warns(UserWarning, match="1 of 2 rows have more than 20 tokens and are left out"):
        assert made("drop") == [first]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "a", "chosen": "b"}, "expected exactly one of"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d"}, "expected exactly one of"),
        ({"chosen": "b", "rejected": "c"}, "expected exactly one of"),
        ({"prompt": "a", "chosen": "b", "rejected": 7}, "prompt and rejected to be two strings"),
        ({"prompt": "a", "chosen": ["b"], "rejected": "c"}, "prompt and chosen to be two strings"),
        ({**CHAT[0], "chosen": CHAT[0]["chosen"] * 2}, "chosen: expected one message, the assistant's; 2 came"),
        ({**CHAT[0], "rejected": CHAT[0]["prompt"]}, "rejected: expected the last message to be the assistant's"),
        ({"prompt": "a", "chosen": "", "rejected": ""}, None),
    ],
)
def test_rows_that_cannot_be(row: dict[str, Any], text: str | None) -> None:
    if text is None:
        assert len(load_rows([row])) == 1, "an empty answer ends at once"
        return
    with pytest.raises(DatasetError, match=text) as failure:
        load_rows([row])
    assert str(failure.value).startswith("data set, row 1: ")


@pytest.mark.parametrize("rows", [[PLAIN[0], {"text": "a"}], [{"text": "a"}, PLAIN[0]]], ids=["first", "second"])
def test_preferences_are_not_mixed_with_other_rows(rows: Any, chat_client: TenantClient, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"^data set, row 2: expected chosen and rejected in all rows or in none$"):
        load_rows(rows)
    with pytest.raises(DatasetError, match=r"in the rows of data and of eval_data"):
        chat_client.finetune(PLAIN, lora(), tmp_path / "out", eval_data=[{"text": "a"}], **PAIRS)


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        (lora(), {"window_tokens": 8}, "window_tokens is not possible with preferences"),
        (PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), {}, "prefix tuning is not possible with"),
        (LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM"), {}, "DPO cannot train the head"),
        (lora(), {"dpo_loss": "nonsense"}, "dpo_loss must be one of sigmoid, "),
        (lora(), {"dpo_beta": 0}, "dpo_beta must be positive, got 0"),
        (lora(), {"max_length": 8}, "row 1: expected at most 8 tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_runs_that_cannot_be(
    config: Any, options: dict[str, Any], text: str, chat_client: TenantClient, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sent: list[Any] = []
    before_requests(monkeypatch, lambda call, payload: sent.append(call))
    with pytest.raises((ConfigurationError, DatasetError), match=text) as failure:
        chat_client.finetune(PLAIN, config, tmp_path / "out", **{**PAIRS, **options})
    assert "\n" not in str(failure.value)
    assert sent == []


def test_without_trl(chat_client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl.trainer.dpo_trainer", None)
    with pytest.raises(
        ConfigurationError, match=r"^rows with chosen and rejected need TRL: pip install 'veilbase\[dpo\]'$"
    ):
        chat_client.finetune(PLAIN, lora(), tmp_path / "out", **PAIRS)
    assert list(tmp_path.iterdir()) == []


def test_dropout_without_effect_is_told(chat_client: TenantClient, tmp_path: Path) -> None:
    options = {**PAIRS, "max_steps": 1}
    with pytest.warns(UserWarning, match="the adapter's dropout has no effect with preferences"):
        chat_client.finetune(PLAIN[:2], lora(lora_dropout=0.1), tmp_path / "out", **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        chat_client.finetune(PLAIN[:2], lora(), tmp_path / "other", **options)
    assert not [one for one in seen if "dropout" in str(one.message)]
