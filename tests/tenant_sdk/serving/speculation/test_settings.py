"""Tests which settings of speculation are refused, each with one line, and what an engine's `explain` says about
speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

from tenant_sdk import Speculation, TenantClient
from tenant_sdk.serving.engine import Engine
from tenant_sdk.testing import character_tokenizer
from tests.support.saved_adapters import save_adapter
from tests.support.tiny_models import make_model
from wire.errors import ConfigurationError


@pytest.fixture(scope="module")
def draft(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def refusal(said: str, **settings: Any) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        Speculation(**settings)
    assert "\n" not in str(refused.value)


def engine_refusal(client: TenantClient, said: str, **options: Any) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        Engine(client, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("num_drafted", [0, -1, True, 2.0, "4", None])
def test_numbers_of_drafted_tokens_that_cannot_be(num_drafted: Any) -> None:
    refusal("num_drafted must be a positive whole number", num_drafted=num_drafted)


def test_drafts_that_cannot_be(client: TenantClient, draft: PreTrainedModel, tmp_path: Path) -> None:
    refusal("draft is a transformers model, got str", draft="smollm2")
    refusal("draft is a model at the tenant: a remote one", draft=client.load_model())
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(draft.name_or_path), save_adapter(draft, tmp_path / "adapter", 0)
    )
    refusal("got PeftModelForCausalLM: merge an adapter into its model", draft=adapted)


def test_another_tokenizer_is_refused(client: TenantClient, draft: PreTrainedModel, tmp_path: Path) -> None:
    other = character_tokenizer()
    other.add_tokens(["owl"])
    said = "the draft has another tokenizer than the remote model"
    engine_refusal(client, said, speculation=Speculation(draft=draft, draft_tokenizer=other))
    folder = make_model("gpt2", tmp_path / "other")
    other.save_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder)
    engine_refusal(client, said, speculation=Speculation(draft=saved))
    Engine(client, speculation=Speculation(draft=saved, draft_tokenizer=client.tokenizer)).close()


def test_a_tokenizer_that_is_not_known_is_asked_for(
    client: TenantClient, draft: PreTrainedModel, tmp_path: Path
) -> None:
    said = "the draft's tokenizer is not where the draft was loaded from: pass it as draft_tokenizer"
    draft.save_pretrained(tmp_path / "bare")
    bare = AutoModelForCausalLM.from_pretrained(tmp_path / "bare")
    engine_refusal(client, said, speculation=Speculation(draft=bare))
    fresh = AutoModelForCausalLM.from_config(draft.config)
    fresh.name_or_path = ""
    engine_refusal(client, said, speculation=Speculation(draft=fresh))
    wrong = Speculation(draft=draft, draft_tokenizer="a path")
    engine_refusal(client, "draft_tokenizer is a transformers tokenizer, got str", speculation=wrong)


def test_a_draft_that_an_engine_cannot_run_is_refused(client: TenantClient, draft: PreTrainedModel) -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=128, hidden_size=16, num_hidden_layers=1, state_size=4))
    speculation = Speculation(draft=mamba, draft_tokenizer=client.tokenizer)
    engine_refusal(client, "this draft cannot be used: the engine does not serve mamba", speculation=speculation)
    broken = AutoModelForCausalLM.from_pretrained(draft.name_or_path)
    broken.lm_head = None
    speculation = Speculation(draft=broken)
    engine_refusal(client, r"this draft cannot be used: it fails on one token \(TypeError\)", speculation=speculation)


def test_a_step_has_room_for_the_rows_of_all_answers(client: TenantClient) -> None:
    said = r"step_tokens \(16\) must be at least max_running \(4\) times 1 \+ num_drafted \(5\)"
    engine_refusal(client, said, step_tokens=16, max_running=4, speculation=Speculation(4))
    Engine(client, step_tokens=16, max_running=4, speculation=Speculation(3)).close()
    engine_refusal(client, "speculation is a Speculation or None, got int", speculation=4)


def test_fixed_length_is_refused(client: TenantClient) -> None:
    with Engine(client, speculation=Speculation(2)) as engine:
        with pytest.raises(ConfigurationError, match="fixed_length does not go with speculation"):
            engine.submit("who?", fixed_length=True)
        assert engine.submit("who?", max_new_tokens=2, fixed_length=False).result(60)
    with pytest.raises(ConfigurationError, match="fixed_length does not go with speculation"):
        client.generate_many(["who?"], progress=False, fixed_length=True, speculation=Speculation(2))


@pytest.mark.parametrize("option", ["prompt_lookup_num_tokens", "assistant_model", "num_assistant_tokens", "use_mtp"])
def test_generate_points_to_the_engine(client: TenantClient, option: str) -> None:
    with pytest.raises(ConfigurationError, match=f"does not take {option}: .*: an Engine with speculation= keeps it"):
        client.generate("who?", **{option: 3})
    with pytest.raises(ConfigurationError, match=r"does not take penalty_alpha: .* the provider sees it$"):
        client.generate("who?", penalty_alpha=0.5)


def test_explain_says_what_shows(client: TenantClient, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(client, speculation=Speculation(3)) as engine:
        text = engine.explain()
    assert "4 rows for each answer, whatever is drafted" in text
    assert "The number of steps of an answer shows how many drafted tokens were accepted" in text
    assert "fixed_length" not in text
    with Engine(client) as engine:
        plain = engine.explain()
    assert "a row for each answer" in plain
    assert "drafted" not in plain


def test_settings_do_not_print_a_model(draft: PreTrainedModel) -> None:
    assert repr(Speculation(3, draft=draft)) == "Speculation(num_drafted=3)"
