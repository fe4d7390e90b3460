"""Tests recipes: they have every option of `finetune`, flags win over them, and what cannot be is one line."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, IA3Config, LoraConfig
from typer.testing import CliRunner

from tenant_sdk import cli
from tenant_sdk.training.command import finetune_command, peft_config_of
from tenant_sdk.training.recipe import (
    Recipe,
    RunRecipe,
    check_recipe_early,
    load_recipe,
    peft_fields,
    peft_types,
    with_connection,
)
from tenant_sdk.training.settings import Evaluation, FinetuneResult
from tests.support.repository import ROOT
from tests.support.training import ROWS
from wire.errors import ConfigurationError

SECRET = "hunter2"
NEEDED = "data: d.jsonl\noutput_dir: out\n"
KIND = with_connection({"url": cli.Url, "identity": cli.Identity, "verify": cli.Verify, "pad_rows": cli.PadRows})


def loaded(text: str, folder: Path, **flags: Any) -> Any:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return load_recipe(KIND, flags, path)


def test_every_option_is_a_flag_unless_it_holds_more_than_a_word() -> None:
    command = typer.main.get_command(cli.app).commands["finetune"]  # type: ignore[attr-defined]
    flags = {option.name: option for option in command.params}
    assert set(flags) - {"config", "help"} - set(RunRecipe.model_fields) == {
        "url", "identity", "mask", "verify", "parameters", "hints", "pool", "precision", "tokenizer", "pad_rows",
        "accept_change", "peer_uid", "keep", "keep_dtype",
    }  # fmt: skip
    assert set(RunRecipe.model_fields) - set(flags) == {"peft_config"}
    assert all(option.default is None and option.help for option in command.params if option.name != "help")
    assert flags["num_epochs"].opts == ["--epochs"]
    assert flags["output_dir"].opts == ["--output"]
    assert (flags["bf16"].opts, flags["bf16"].secondary_opts) == (["--bf16"], ["--no-bf16"])


def test_a_plan_has_no_flag_that_changes_nothing_about_it(tmp_path: Path) -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    run, plan = ({option.name for option in commands[name].params} for name in ("finetune", "plan"))
    left_out = {"plan", "output_dir", "overwrite", "resume", "report_to", "log_dir", "provider_wait_s"}
    assert (run - plan, plan - run) == (left_out, {"out", "as_json", "price_per_gb", "price_per_hour"})
    (tmp_path / "d.jsonl").write_text('{"text": "owl"}')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text("{}")
    recipe = loaded(f"data: {tmp_path}/d.jsonl\noutput_dir: {tmp_path}/out\nplan: {tmp_path}/none.json", tmp_path)
    check_recipe_early(recipe, is_run=False)
    with pytest.raises(ConfigurationError, match="holds an adapter already"):
        check_recipe_early(recipe)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    text = (
        NEEDED + "max_steps: 7\nkeep_best: true\nbatch_size: 2\nlearning_rate: 1e-2\nverify: null\nurl: grpcs://x:1\n"
    )
    recipe = loaded(text, tmp_path, max_steps=9, keep_best=False, data=Path("e.jsonl"), batch_size=None)
    assert (recipe.max_steps, recipe.keep_best, recipe.data) == (9, False, Path("e.jsonl"))
    assert (recipe.batch_size, recipe.learning_rate) == (2, 1e-2)
    assert loaded(NEEDED + "max_steps: 7", tmp_path, num_epochs=2.0).max_steps is None
    assert loaded(NEEDED + "num_epochs: 2", tmp_path, max_steps=7).num_epochs == RunRecipe().num_epochs
    assert (recipe.seed, recipe.verify, recipe.url) == (0, None, ["grpcs://x:1"])
    assert loaded(NEEDED + "identity: [a, b]", tmp_path).identity == [Path("a"), Path("b")]
    assert load_recipe(KIND, {"data": Path("d"), "output_dir": Path("o"), "eval_data": "0.1"}, None).eval_data == 0.1
    assert loaded(NEEDED + "eval_data: held/out.jsonl", tmp_path).eval_data == Path("held/out.jsonl")
    assert loaded(NEEDED + "log_dir: ~/x", tmp_path).log_dir == Path.home() / "x"


def test_both_names_of_a_length_in_a_file_are_refused_also_with_a_default(tmp_path: Path) -> None:
    recipe = loaded(NEEDED + "max_steps: 2\nnum_epochs: 3", tmp_path)
    with pytest.raises(ConfigurationError, match="has no effect beside max_steps"):
        check_recipe_early(recipe)
    alone = loaded(NEEDED + "max_steps: 2", tmp_path)
    assert alone.given() == {"max_steps": 2}


def test_how_checkpointing_is_named(tmp_path: Path) -> None:
    assert loaded(NEEDED + "checkpointing: none", tmp_path).options().checkpointing is None
    assert loaded(NEEDED + "checkpointing: replies", tmp_path).options().checkpointing == "replies"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_step: 7", "'max_step' is no option: the nearest is max_steps"),
        ("epochs: 7", "'epochs' is no option: the nearest is num_epochs"),
        ("learning-rate: 7", "'learning-rate' is no option: the nearest is learning_rate"),
        ("qqq: 7", "'qqq' is no option: docs/finetune.md (All options) lists them"),
        ("7: 7", "7 is no option: docs/finetune.md (All options) lists them"),
        ("lr: 7", "'lr' is no option: the nearest is learning_rate"),
        ("out: 7", "'out' is no option: the nearest is output_dir"),
        (f"max_steps: {SECRET}", "max_steps: input should be a valid integer"),
        (f"checkpointing: {SECRET}", "checkpointing: input should be 'auto', 'none', 'replies' or 'recompute'"),
        (f"log_dir: ~{SECRET}/x", "log_dir: ~ must stand for the folder of a user"),
        pytest.param("log_dir: " + "[" * 3000, "is no YAML file", id="deep"),
        ("max_steps: [1", "is no YAML file, see line "),
        (f"!!python/object/apply:os.system ['{SECRET}']", "is no YAML file"),
        ("!!map [max_steps]", "is no YAML file, see line 1"),
        (f"- {SECRET}", "expected options with values"),
        ("max_steps: 7\nmax_steps: 8", ": 'max_steps' comes twice"),
        ("peft_config: {r: 4, r: 8}", ": 'r' comes twice"),
        ("peft_config: rank", "peft_config: write the adapter's settings, as in peft_config: {r: 8, "),
        ("peft_config: [8]", "peft_config: write the adapter's settings, as in peft_config: {r: 8, "),
        ("batch_size: true", "batch_size: expected a value other than true and false"),
        ("output_dir: null", "name a folder for the adapter: --output"),
        ("data: null", "name a data set: tenant finetune DATA"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(text: str, expected: str, tmp_path: Path) -> None:
    needed = NEEDED if not text.endswith("null") else "".join(
        line + "\n" for line in NEEDED.splitlines() if not line.startswith(text.split(":")[0])
    )  # fmt: skip
    with pytest.raises(ConfigurationError) as failure:
        loaded(text if text.startswith(("!", "-")) else needed + text, tmp_path)
    assert expected in str(failure.value)
    assert "\n" not in str(failure.value)
    assert SECRET not in str(failure.value)


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no file .*none\.yaml \(--config\)"):
        load_recipe(KIND, {}, tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("evaluations", "num_waits", "covered"),
    [
        ([], 0, "hints, model and training"),
        ([Evaluation(1, 0.5)], 0, "hints, model, training and evaluations"),
        ([Evaluation(1, 0.5)], 2, "hints, model, training, evaluations and waits for the provider"),
    ],
)
def test_the_last_line_says_what_its_seconds_cover(
    evaluations: list[Evaluation], num_waits: int, covered: str, tmp_path: Path
) -> None:
    """They are not those of the whole command, which also starts, checks the provider and reads the data."""
    result = FinetuneResult(
        tmp_path, [2.0, 1.0], 9, 0, 0, 155.2, evaluations=evaluations, num_waits=num_waits, hint_bytes=1
    )
    assert summary_of(result).endswith(f"  155 s for {covered}")


def summary_of(result: FinetuneResult) -> str:
    said: list[str] = []
    client: Any = SimpleNamespace(finetune=lambda *_, **__: result)
    finetune_command(RunRecipe(output_dir=result.adapter_dir), client, said.append)
    return said[0]


def test_the_summary_names_hints_only_where_some_were_fetched() -> None:
    run = FinetuneResult(Path("a"), [2.0, 1.0], 9, 1_240_000_000, 910_000_000, 5.0, hint_bytes=600_000_000)
    assert summary_of(run).splitlines() == [
        "adapter a", "loss 2.0000 -> 1.0000 (the first and the last step)",
        "tokens 9  1.2 GB sent, 910.0 MB received, of it hints 600.0 MB  5 s for hints, model and training",
    ]  # fmt: skip
    last = summary_of(replace(run, hint_bytes=0)).splitlines()[-1]
    assert last == "tokens 9  1.2 GB sent, 910.0 MB received  5 s for model and training"


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([3.0, 1.0] + [2.0] * 17, "3.0000 -> 2.0000 (the first and the last step)"),
        # the last batch lies above the first one by chance
        ([2.0, 4.0] + [2.0] * 16 + [1.0, 2.5], "3.0000 -> 1.7500 (means of the first and the last 2 steps)"),
        ([2.0] * 20 + [5.0] * 960 + [1.0] * 20, "2.0000 -> 1.0000 (means of the first and the last 20 steps)"),
    ],
)
def test_the_summary_compares_means_of_steps(losses: list[float], said: str) -> None:
    assert summary_of(FinetuneResult(Path("a"), losses, 9, 0, 0, 5.0)).splitlines()[1] == f"loss {said}"


def test_the_summary_of_a_single_value_shows_no_change() -> None:
    run = FinetuneResult(Path("a"), [2.0], 9, 0, 0, 5.0, evaluations=[Evaluation(3, 0.5)], adapter_step=3)
    assert summary_of(run).splitlines()[1:3] == ["loss 2.0000", "evaluation loss 0.5000 at step 3  adapter of step 3"]
    run = replace(run, evaluations=[Evaluation(3, 0.5), Evaluation(6, 0.4)])
    assert (
        summary_of(run).splitlines()[2] == "evaluation loss 0.5000 -> 0.4000  least 0.4000 at step 6  adapter of step 3"
    )


def test_the_adapters_settings() -> None:
    stock = peft_config_of(RunRecipe())
    assert isinstance(stock, LoraConfig)
    assert (stock.r, stock.lora_alpha, stock.target_modules, stock.task_type) == (16, 32, "all-linear", "CAUSAL_LM")
    ranked = peft_config_of(RunRecipe(rank=4, peft_config={"lora_dropout": 0.1, "target_modules": ["q_proj"]}))
    assert (ranked.r, ranked.lora_alpha, ranked.lora_dropout, ranked.target_modules) == (4, 8, 0.1, {"q_proj"})
    assert peft_config_of(RunRecipe(rank=4, peft_config={"lora_alpha": 64})).lora_alpha == 64
    other = {"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []}
    assert isinstance(peft_config_of(RunRecipe(peft_config=other)), IA3Config)


def test_a_flag_for_the_rank_replaces_that_of_the_file(tmp_path: Path) -> None:
    recipe = loaded(NEEDED + "peft_config: {r: 8, lora_alpha: 64, lora_dropout: 0.1}", tmp_path, rank=4)
    config: Any = peft_config_of(recipe)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 8, 0.1)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (RunRecipe(rank=4, peft_config={"r": 8}), "rank and r of peft_config say the same: leave one of them out"),
        (RunRecipe(peft_config={"rr": 4}), "peft_config: 'rr' is no option: the nearest is r"),
        (RunRecipe(peft_config={"rank": 4}), "peft_config: 'rank' is no option: the nearest is r"),
        (RunRecipe(peft_config={"alpha": 4}), "peft_config: 'alpha' is no option: the nearest is lora_alpha"),
        (
            RunRecipe(peft_config={"qqq": 4}),
            "peft_config: 'qqq' is no option: PEFT's documentation of LoraConfig lists them$",
        ),
        (RunRecipe(peft_config={"peft_type": "LORAA"}), "peft_config: 'LORAA' is no peft_type: the nearest is LORA$"),
        (RunRecipe(peft_config={"peft_type": "qqq"}), "peft_config: 'qqq' is no peft_type: docs/peft.md lists them$"),
        (RunRecipe(rank=4, peft_config={"peft_type": "IA3"}), r"rank \(--rank\) is LoRA's, and peft_config names IA3"),
        (RunRecipe(peft_config={"r": 4, "layers_pattern": "x"}), "PEFT cannot put this adapter on the model"),
    ],
)
def test_adapters_settings_that_cannot_be(recipe: Recipe, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=expected) as failure:
        peft_config_of(recipe)
    assert "\n" not in str(failure.value)


def test_a_kind_that_there_is_not_is_told_early(tmp_path: Path) -> None:
    recipe = loaded(NEEDED + "peft_config: {peft_type: LROA}", tmp_path)
    with pytest.raises(ConfigurationError, match=r"'LROA' is no peft_type: the nearest is LORA$"):
        check_recipe_early(recipe)


def test_the_names_of_every_kinds_settings_are_read_from_pefts_source() -> None:
    for name, kind in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        known = (kind.__name__, {each.name for each in dataclasses.fields(kind)})
        found, keys = peft_fields(name.value)
        assert (found, set(keys)) == known
    assert peft_fields("NONE") == ("", [])
    assert set(peft_types()) == {name.value for name in PEFT_TYPE_TO_CONFIG_MAPPING}


@pytest.fixture
def at_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provides a folder with the repository's examples in it, as the working folder."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_recipe_of_the_examples(chat_folder: Path, at_root: Path) -> None:
    """The command runs the recipe, with flags for another model, mask and rank, and for shorter runs and rows. A
    character is a token of the tiny model; the examples' longest row still fits its context of 128 tokens."""
    words = [
        "finetune",
        "--config",
        "examples/recipe.yaml",
        "--url",
        f"inproc:{chat_folder}",
        "--verify",
        str(chat_folder),
    ]
    words += [
        "--mask",
        "off",
        "--max-steps",
        "3",
        "--eval-steps",
        "1",
        "--save-steps",
        "1",
        "--max-length",
        "128",
        "--rank",
        "2",
    ]
    done = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert re.search(r"adapter adapters/harborlight-recipe$", done.output, re.M), done.output
    assert "evaluation loss " in done.output
    config = json.loads((at_root / "adapters/harborlight-recipe/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (2, 4, 0.05)
    assert list((at_root / "logs/harborlight-recipe").glob("events.out.tfevents.*"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--config", "recipe.yaml"], "inference_mode of peft_config makes an adapter that is not trained"),
        (["--max-steps", "2", "--epochs", "3"], "num_epochs (--epochs) has no effect beside max_steps"),
        (["--learning-rate", "0"], "learning_rate must be positive, got 0.0"),
        (["--output", "x" * 250], "expected a name of at most 242 bytes for the adapter's folder"),
        (["--output", "dangling"], "dangling is a link to nothing"),
        (["--output", "there"], "there holds an adapter already"),
        (["--report-to", "wandb"], "report_to must be 'tensorboard' or None"),
        (["--log-dir", "dangling/logs"], "dangling is a link to nothing"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_would_fail_later_is_said_before_a_provider_is_asked(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """There is no provider at this address, and to connect first would fail with that error."""
    monkeypatch.chdir(tmp_path)
    Path("dangling").symlink_to("nowhere")
    Path("there").mkdir()
    Path("there", "adapter_config.json").write_text("{}")
    Path("recipe.yaml").write_text("peft_config: {r: 4, inference_mode: true}")
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = ["data.jsonl", "--url", "grpc://127.0.0.1:1", "--mask", "off", *words]
    given += [] if "--output" in words else ["--output", "out"]
    monkeypatch.setattr(sys, "argv", ["tenant", "finetune", *given])
    with pytest.raises(SystemExit):
        cli.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_the_command_says_one_line(at_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (at_root / "recipe.yaml").write_text(NEEDED + "max_stepz: 3")
    (at_root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (at_root / "x").mkdir()
    for words, expected in (
        (["--config", "recipe.yaml"], "recipe.yaml: 'max_stepz' is no option: the nearest is max_steps"),
        (["data.jsonl"], "name a folder for the adapter: --output"),
        (
            ["data.jsonl", "--output", "out", "--url", "inproc:x", "--eval-data", "7"],
            "eval_data must be a data set or a part",
        ),
        (
            ["data.jsonl", "--output", "out", "--url", "inproc:x", "--eval-data", "no.jsonl"],
            "there is no file no.jsonl",
        ),
    ):
        monkeypatch.setattr(sys, "argv", ["tenant", "finetune", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        (line,) = capsys.readouterr().err.splitlines()
        assert end.value.code == 1
        assert line.startswith("tenant: ")
        assert expected in line
