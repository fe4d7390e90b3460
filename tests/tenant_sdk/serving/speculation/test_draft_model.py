"""Tests what a draft model computes, how many steps it saves or costs, and that it changes no answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tenant_sdk import Speculation, TenantClient
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.speculation.draft import DraftModel
from tests.support.engines import TIMEOUT_S
from tests.support.spies import results_of
from tests.support.tiny_models import CONFIGS, PROMPTS, make_model, open_client, save_random

NEW_TOKENS = 13
NUM_DRAFTED = 3


@pytest.fixture
def itself(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


Count = Callable[[PreTrainedModel | None], int]


@pytest.fixture
def count_steps(client: TenantClient, monkeypatch: pytest.MonkeyPatch) -> Count:
    """Returns a function that answers a prompt with a draft, checks the answer, and returns the number of steps."""
    want = client.generate(PROMPTS[1], max_new_tokens=NEW_TOKENS, eos_token_id=[])

    def count(draft: PreTrainedModel | None) -> int:
        before = client.traffic.calls
        speculation = Speculation(NUM_DRAFTED, draft=draft, draft_tokenizer=client.tokenizer)
        with Engine(client, speculation=speculation) as engine:
            assert engine.submit(PROMPTS[1], max_new_tokens=NEW_TOKENS, eos_token_id=[]).result(TIMEOUT_S) == want
        steps, rest = divmod(client.traffic.calls - before, len(client.connect().groups))
        assert rest == 0
        return steps

    return count


def test_the_model_itself_has_every_token_accepted(count_steps: Count, itself: PreTrainedModel) -> None:
    """The prompt takes one step, which gives the first token, and each later step gives 1 + NUM_DRAFTED tokens."""
    assert count_steps(itself) == 1 + (NEW_TOKENS - 1) // (1 + NUM_DRAFTED)


FORCED = 5
"""The distance, in tokens, of the tokens of an answer that a logits hook chooses. No draft can predict these tokens."""


def forces(num_prompt: int, token_id: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a logits hook that makes every fifth token of an answer, beginning with the third, the given one."""

    def hook(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if (token_ids.shape[1] - num_prompt) % FORCED == 2:
            scores = torch.full_like(scores, -torch.inf)
            scores[0, token_id] = 0.0
        return scores

    return hook


def steps_when_forced(num_new: int) -> int:
    """Returns the number of steps of an answer if the draft predicts all tokens except the forced ones."""
    num_steps, done = 1, 1
    while done < num_new:
        taken = next((n for n in range(1, NUM_DRAFTED + 1) if (done + n - 1) % FORCED == 2), NUM_DRAFTED + 1)
        num_steps, done = num_steps + 1, min(done + taken, num_new)
    return num_steps


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_after_a_rejected_token_it_drafts_from_the_tokens_that_are_there(kind: str, tmp_path: Path) -> None:
    """The draft model's keys and values of rejected tokens are no longer used, in layers with a window as well."""
    folder = make_model(kind, tmp_path / kind)
    with open_client(folder) as opened:
        draft = AutoModelForCausalLM.from_pretrained(folder).eval()
        with Engine(opened, max_running=1, step_tokens=8, speculation=Speculation(NUM_DRAFTED, draft=draft)) as engine:
            num_prompt = engine.submit("who?", max_new_tokens=1).num_prompt_tokens
            hook = forces(num_prompt, opened.tokenizer.convert_tokens_to_ids("~"))
            request = {"max_new_tokens": 40, "eos_token_id": [], "logits_processor": [hook]}
            engine.submit("who?", **request).result(TIMEOUT_S)
            before = opened.traffic.calls
            engine.submit("who?", **request).result(TIMEOUT_S)
            num_steps = (opened.traffic.calls - before) / len(opened.connect().groups)
    assert num_steps == steps_when_forced(40) > 40 / (1 + NUM_DRAFTED)


def test_what_cannot_draft_costs_nothing_but_its_steps(
    count_steps: Count, itself: PreTrainedModel, tmp_path: Path
) -> None:
    """With a draft model that gives NaN, or whose context ends in the middle of the answer, the answer is the same and
    takes no more steps than without a draft."""
    with torch.no_grad():
        next(itself.model.norm.parameters()).fill_(torch.nan)
    assert count_steps(itself) == NEW_TOKENS
    short = CONFIGS["gpt2"].__class__(**{**CONFIGS["gpt2"].to_dict(), "n_positions": 60})
    save_random(short, tmp_path / "short")
    assert count_steps(AutoModelForCausalLM.from_pretrained(tmp_path / "short").eval()) <= NEW_TOKENS


def attention_of(model: Any) -> str:
    return str(model.config._attn_implementation)


def kv_bytes(engine: Engine) -> int:
    """Returns the bytes of the keys and values of 100 tokens."""
    return engine._layout.bytes_for(100)


def test_the_users_model_is_not_changed_and_its_parameters_are_not_copied(
    client: TenantClient, itself: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(10, 20)[None]
    before = itself(ids).logits
    implementation = attention_of(itself)
    made = results_of(monkeypatch, DraftModel, "_make_kv")
    itself.train()
    with Engine(client, speculation=Speculation(2, draft=itself)) as engine:
        engine.submit("who?", max_new_tokens=4).result(TIMEOUT_S)
        shared = engine._loop._runner._drafter._ragged.model
    assert len(made) == 2, "one for the trial, one for the request"
    assert itself.training
    assert attention_of(itself) == implementation != attention_of(shared)
    assert torch.equal(itself.eval()(ids).logits, before)
    own = {name: tensor.data_ptr() for name, tensor in itself.named_parameters()}
    assert {name: tensor.data_ptr() for name, tensor in shared.named_parameters()} == own


def test_prompts_are_read_in_pieces_and_nothing_twice(
    client: TenantClient, itself: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All passes of the draft model together have one row for each token that the draft model has to read, and no pass
    has more rows than a step may have."""
    sizes: list[int] = []
    forward = DraftModel._forward

    def counted(self: DraftModel, pieces: Any, token_ids: list[int], *rest: Any) -> torch.Tensor:
        sizes.append(len(token_ids))
        return forward(self, pieces, token_ids, *rest)

    with Engine(client, step_tokens=8, max_running=1, speculation=Speculation(NUM_DRAFTED, draft=itself)) as engine:
        monkeypatch.setattr(DraftModel, "_forward", counted)
        answer = engine.submit(PROMPTS[1], max_new_tokens=NEW_TOKENS, eos_token_id=[])
        answer.result(TIMEOUT_S)
    assert max(sizes) <= 8
    assert sum(sizes) == answer.num_prompt_tokens + NEW_TOKENS - 2


def test_keys_and_values_of_the_draft_count(client: TenantClient, itself: PreTrainedModel) -> None:
    with Engine(client, speculation=Speculation(2, draft=itself)) as engine:
        with_draft = kv_bytes(engine)
    with Engine(client, speculation=Speculation(2)) as engine:
        assert with_draft == 2 * kv_bytes(engine)
