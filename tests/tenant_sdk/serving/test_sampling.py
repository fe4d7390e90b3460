"""Tests that tokens are drawn as transformers' `generate` draws them, with each request's own settings and random
numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, NoBadWordsLogitsProcessor

from tenant_sdk import TenantClient
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.sampling import Sampler, Sampling, check_defaults
from tests.support.tiny_models import PROMPTS
from wire.errors import ConfigurationError

CPU = torch.device("cpu")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.7},
    {"do_sample": True, "temperature": 1.5, "top_k": 5},
    {"do_sample": True, "top_p": 0.6, "top_k": 0},
    {"do_sample": True, "temperature": 2.0, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.8},
)
NEW_TOKENS = 16


def alone(client: TenantClient, prompt: str, seed: int, settings: dict[str, Any]) -> str:
    torch.manual_seed(seed)
    return client.generate(prompt, max_new_tokens=NEW_TOKENS, **settings)


def test_together_each_request_draws_what_it_draws_alone(client: TenantClient) -> None:
    jobs = [(prompt, 7 + number, SETTINGS[number]) for number, prompt in enumerate(PROMPTS)]
    want = [alone(client, *job) for job in jobs]
    with Engine(client, step_tokens=16, max_running=4) as engine:
        for _ in range(2):
            answers = [
                engine.submit(prompt, max_new_tokens=NEW_TOKENS, seed=seed, **settings)
                for prompt, seed, settings in jobs
            ]
            assert [answer.result(60) for answer in answers] == want
    assert len(set(want)) == len(want)
    assert alone(client, PROMPTS[0], 8, SETTINGS[0]) != want[0], "the seed matters"


def test_without_a_seed_answers_differ(client: TenantClient) -> None:
    with Engine(client) as engine:
        answers = [engine.submit("who?", max_new_tokens=40, do_sample=True, top_k=0) for _ in range(2)]
        assert answers[0].result(60) != answers[1].result(60)


def test_the_checkpoints_settings_count_where_the_request_names_none() -> None:
    defaults = GenerationConfig(temperature=1e-4, top_k=3, repetition_penalty=1.0)
    logits = torch.arange(10.0)
    assert Sampler(Sampling(do_sample=True, seed=1), defaults, CPU).next_token([0], logits) == 9
    own = Sampler(Sampling(do_sample=True, seed=1, temperature=100.0, top_k=0), defaults, CPU)
    assert len({own.next_token([0], logits) for _ in range(100)}) > 5
    assert Sampler(Sampling(), GenerationConfig(repetition_penalty=2.0), CPU).next_token([9], logits) == 8


def test_a_checkpoints_settings_that_are_not_applied_are_refused(client: TenantClient) -> None:
    check_defaults(client.load_model().generation_config)
    check_defaults(GenerationConfig(temperature=0.5, top_k=3, top_p=0.5, repetition_penalty=1.1, min_length=0))
    with pytest.raises(ConfigurationError, match="settings have no_repeat_ngram_size"):
        check_defaults(GenerationConfig(no_repeat_ngram_size=2))


def test_a_hook_sees_the_tokens_and_decides_which_are_allowed(client: TenantClient) -> None:
    seen: list[int] = []

    def only_b(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(token_ids.shape[1])
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, client.tokenizer.convert_tokens_to_ids("b")] = 0.0
        return allowed

    with Engine(client) as engine:
        free = engine.submit("who?", max_new_tokens=5)
        bound = engine.submit("who?", max_new_tokens=5, logits_processor=[only_b])
        assert bound.result(60) == "bbbbb"
        assert free.result(60) == client.generate("who?", max_new_tokens=5)
    prompt = bound.num_prompt_tokens
    assert seen == list(range(prompt, prompt + 5))


def test_a_hook_that_returns_nan_ends_its_own_request(client: TenantClient) -> None:
    with Engine(client) as engine:
        broken = engine.submit("who?", max_new_tokens=5, logits_processor=[lambda _, scores: scores * torch.nan])
        free = engine.submit("who?", max_new_tokens=5)
        with pytest.raises(ConfigurationError, match=r"^a logits_processor returned NaN$"):
            broken.result(60)
        assert free.result(60) == client.generate("who?", max_new_tokens=5)


def test_transformers_own_processors_are_hooks(client: TenantClient) -> None:
    plain = client.generate("who?", max_new_tokens=6)
    banned = client.tokenizer.convert_tokens_to_ids(plain[0])
    processor = NoBadWordsLogitsProcessor([[banned]], eos_token_id=None)
    want = client.generate("who?", max_new_tokens=6, logits_processor=[processor])
    with Engine(client) as engine:
        got = engine.submit("who?", max_new_tokens=6, logits_processor=[processor]).result(60)
    assert got == want
    assert plain[0] not in got


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"do_sample": 1}, "do_sample is True or False"),
        ({"seed": 1.5}, "seed is a whole number"),
        ({"seed": 1 << 64}, "seed is a whole number"),
        ({"do_sample": True, "temperature": -1.0}, "temperature"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"do_sample": True, "top_k": -1}, "top_k"),
        ({"do_sample": True, "top_p": 1.5}, "top_p"),
        ({"do_sample": True, "top_p": "a"}, "top_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logits_processor": (1,)}, "logits_processor is a list of functions"),
    ],
)
def test_settings_that_cannot_be_are_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        Sampler(Sampling(**settings), GenerationConfig(), CPU)
    assert "\n" not in str(refused.value)


def test_a_hook_that_asks_for_it_is_told_each_token_at_once() -> None:
    class Told:
        def __init__(self) -> None:
            self.events: list[tuple[str, int]] = []

        def __call__(self, token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            self.events.append(("asked", token_ids.shape[1]))
            return logits

        def chosen(self, token_id: int) -> None:
            self.events.append(("told", token_id))

    hook = Told()
    sampler = Sampler(Sampling(logits_processor=(hook,)), GenerationConfig(), CPU)
    sampler.fork().next_token([1], torch.arange(9.0))
    assert hook.events == []
    assert [sampler.next_token([1] * number, torch.arange(9.0)) for number in (1, 2)] == [8, 8]
    assert hook.events == [("asked", 1), ("told", 8), ("asked", 2), ("told", 8)]
