"""Tests that what differs between two runs is named with both values, and that nothing of the data is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig

from tenant_sdk.plan_file import Bill
from tenant_sdk.training.command import check_recipe, peft_config_of
from tenant_sdk.training.dataset import load_rows, source_of
from tenant_sdk.training.recipe import RunRecipe, check_recipe_early
from tenant_sdk.training.run_identity import RunIdentity, texts
from tenant_sdk.training.settings import FinetuneOptions
from tests.support.training import ROWS
from wire.errors import ConfigurationError

OPTIONS = FinetuneOptions(max_steps=6, save_steps=1)


def identity(
    rows: Any = ROWS, config: LoraConfig | None = None, bucket: int | None = None, **options: Any
) -> RunIdentity:
    data = {"rows": [source_of(row) for row in load_rows(rows)], "eval_rows": [], "tokenizer": ["t"], "bucket": bucket}
    adapter = config or LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return RunIdentity.of(data, adapter.to_dict(), replace(OPTIONS, **options))


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (identity(), ""),
        (identity(max_steps=3), "max_steps (--max-steps) is 3, theirs is 6"),
        (identity(max_steps=None, num_epochs=2.0), "is none, theirs is 6, num_epochs (--epochs) is 2.0, theirs is 3.0"),
        (identity(learning_rate=0.5), "learning_rate (--learning-rate) is 0.5, theirs is 0.001"),
        (identity(bucket=64), "pad_rows (--pad-rows) is 64, theirs is none"),
        (identity(lr_scheduler_type="cosine"), "(--lr-scheduler-type) is cosine, theirs is linear"),
        (identity(ROWS[1:]), "the data"),
        (identity(ROWS[1:], seed=1), "the data, seed (--seed) is 1, theirs is 0"),
        (identity(progress=False, resume=True, provider_wait_s=1.0), ""),
        (RunIdentity(), ""),
        (RunIdentity(options={"seed": "1", "unknown": "2"}), "seed (--seed) is 1, theirs is 0"),
    ],
)
def test_what_differs_is_named_with_both_values(now: RunIdentity, expected: str) -> None:
    told = identity().differences(now, "theirs")
    assert told.endswith(expected)
    assert bool(told) == bool(expected)


def test_settings_of_the_adapter_are_named() -> None:
    other = LoraConfig(r=8, lora_alpha=32, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    told = identity().differences(identity(config=other), "the plan's")
    assert "r of peft_config is 8, the plan's is 16" in told
    assert 'target_modules of peft_config is ["q_proj", "v_proj"], the plan\'s is all-linear' in told


def test_many_differences_are_counted() -> None:
    now = identity(seed=1, max_steps=1, batch_size=1, save_steps=9, warmup_steps=0, weight_decay=0.5)
    assert identity().differences(now, "theirs").endswith(", 2 more")


def test_an_identity_is_read_back_and_holds_no_text_of_the_data() -> None:
    written = json.dumps(identity(config=LoraConfig(rank_pattern={f"layer{n}": n for n in range(99)})).to_dict())
    assert RunIdentity.read(json.loads(written)) == identity(
        config=LoraConfig(rank_pattern={f"layer{n}": n for n in range(99)})
    )
    assert "Ada" not in written
    assert len(written) < 6000


@pytest.mark.parametrize(
    "content", [{}, {"options": []}, {"options": {"seed": 1}}, {"parts": None, "options": {"seed": "\x1b[2J"}}]
)
def test_what_is_not_of_its_form_is_left_out(content: dict[str, Any]) -> None:
    assert RunIdentity.read(content) == RunIdentity()


def test_texts_are_short_printable_and_differ_where_values_do() -> None:
    values = {"a": "x" * 999, "b": "x" * 998 + "y", "c": "\x1b\n", "d": {"z", "y"}, "e": None, "f": True, "g": 1e-3}
    made = texts(values)
    assert all(len(text) <= 60 and text.isprintable() and text.isascii() for text in made.values())
    assert made["a"] != made["b"]
    assert (made["d"], made["e"], made["f"], made["g"]) == ('["y", "z"]', "none", "true", "0.001")


# ---- a command's run, compared without torch and with it -------------------------------------------------------------


def recipe_of(folder: Path, **given: Any) -> Any:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = {"data": folder / "rows.jsonl", "output_dir": folder / "out", "max_steps": 6, "save_steps": 1, **given}
    recipe = RunRecipe(**settings)
    return SimpleNamespace(
        **dict(recipe), options=recipe.options, given=recipe.given, pad_rows=None, mask=None, keep=None, precision=None
    )


def planned(folder: Path, recipe: Any) -> Path:
    """Writes the plan of a recipe's run, as `tenant plan` would."""
    data = {"rows": [*map(source_of, load_rows(recipe.data))], "eval_rows": [], "tokenizer": ["t"], "bucket": None}
    made = RunIdentity.of(data, peft_config_of(recipe).to_dict(), recipe.options())
    bill = Bill("finetune", 1, 1, 1, 1, 1, 1, run="r", mask="lattice", precision="balanced", **made.to_dict())
    bill.save(folder / "plan.json")
    return folder / "plan.json"


def test_the_run_of_a_plan_is_not_refused(tmp_path: Path) -> None:
    """So what is compared early is what a plan holds, also of values that the recipe leaves at their defaults."""
    for given in ({}, {"rank": 4}, {"peft_config": {"r": 8, "lora_dropout": 0.1, "layers_to_transform": [1],
                                                    "target_modules": ["q_proj"]}}):  # fmt: skip
        recipe = recipe_of(tmp_path, **given)
        recipe.plan = planned(tmp_path, recipe)
        check_recipe_early(recipe)
        check_recipe(recipe)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_steps": 7}, "changed since: max_steps (--max-steps) is 7, the plan's is 6"),
        ({"rank": 4}, "r of peft_config is 4, the plan's is 16, lora_alpha of peft_config is 8, the plan's is 32"),
        ({"peft_config": {"lora_dropout": 0.1}}, "lora_dropout of peft_config is 0.1, the plan's is 0.0"),
    ],
)
def test_another_run_than_the_plans_is_told_without_torch(tmp_path: Path, given: Any, expected: str) -> None:
    plan = planned(tmp_path, recipe_of(tmp_path))
    with pytest.raises(ConfigurationError) as caught:
        check_recipe_early(recipe_of(tmp_path, **given, plan=plan))
    assert expected in str(caught.value)


def test_settings_that_only_peft_knows_are_told_before_a_provider_is_asked(tmp_path: Path) -> None:
    plan = planned(tmp_path, recipe_of(tmp_path))
    recipe = recipe_of(tmp_path, plan=plan, peft_config={"target_modules": ["q_proj"]})
    check_recipe_early(recipe)
    with pytest.raises(ConfigurationError, match=r"target_modules of peft_config is \[\"q_proj\"\], the plan's is all"):
        check_recipe(recipe)
    check_recipe(recipe, is_run=False)
