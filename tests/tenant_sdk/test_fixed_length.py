"""Tests answers of fixed length, and the options of transformers that would reveal the text by row counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, TemperatureLogitsWarper

from attacks.programs.overflow import Fault
from tenant_sdk import TenantClient
from tenant_sdk.fixed_length import FiniteLogits, cut_at_stop
from tenant_sdk.model.run_state import NotFiniteWarning, RunState
from tenant_sdk.model.send import RemoteExecutor
from tests.support.false_providers import HONEST, Opened
from wire.errors import ConfigurationError, NotFinite
from wire.frame import Direction

FORWARD = Direction.FORWARD
NEW_TOKENS = 8
GROUPS = 9
NUM_CALLS = NEW_TOKENS * GROUPS


@pytest.fixture
def stop(opened: Opened) -> int:
    """Returns the third token of an answer to "who?", which differs from the first two."""
    client, _ = opened()
    model, ids = client.load_model(), torch.tensor([_encoded(client)])
    with torch.no_grad():
        answer = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)  # type: ignore[operator]
    new = answer[0, ids.shape[1] :].tolist()
    assert new[2] not in new[:2], "the model repeats itself: choose another token"
    return int(new[2])


def _encoded(client: TenantClient) -> list[int]:
    from tenant_sdk.generate import encode_prompt

    ids: list[int] = encode_prompt(client.tokenizer, "who?")[0].tolist()
    return ids


@pytest.mark.parametrize("several", [False, True], ids=["one stop token", "several"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_the_calls_are_those_of_the_longest_answer_and_the_text_ends_where_it_did(
    opened: Opened, stop: int, several: bool, do_sample: bool
) -> None:
    client, provider = opened()
    stops: Any = [stop, 1] if several else stop
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "eos_token_id": stops, "top_k": 1} if do_sample else {
        "max_new_tokens": NEW_TOKENS, "eos_token_id": stops
    }  # fmt: skip
    options["do_sample"] = do_sample
    ordinary = client.generate("who?", **options)
    assert len(provider.seen) == 3 * GROUPS
    provider.seen = []
    pieces: list[str] = []
    assert client.generate("who?", fixed_length=True, on_text=pieces.append, **options) == ordinary
    assert "".join(pieces) == ordinary
    assert len(provider.seen) == NUM_CALLS
    assert {rows for *_, rows in provider.seen[GROUPS:]} == {1}
    assert len(set(provider.seen)) <= 2 * GROUPS


@pytest.mark.parametrize("given", ["4711", [[4711], 1], object()], ids=["text", "ragged", "object"])
def test_stop_tokens_that_are_none_are_one_line(opened: Opened, given: Any) -> None:
    client, provider = opened()
    with pytest.raises(ConfigurationError, match=r"^eos_token_id is .* or a list of them, got [a-z]+$"):
        client.generate("who?", max_new_tokens=2, fixed_length=True, eos_token_id=given)
    assert provider.seen == []


def test_the_models_own_stop_tokens_count(opened: Opened, stop: int) -> None:
    client, provider = opened()
    client.generate("who?", max_new_tokens=1)
    assert client.loaded is not None
    client.loaded[1].generation_config.eos_token_id = [1, stop]
    ordinary = client.generate("who?", max_new_tokens=NEW_TOKENS)
    provider.seen = []
    assert client.generate("who?", max_new_tokens=NEW_TOKENS, fixed_length=True) == ordinary
    assert len(provider.seen) == NUM_CALLS


def test_a_generation_config_does_not_end_it_or_guess(opened: Opened) -> None:
    """The provider's generation config must not change the number of calls of an answer of fixed length. Its settings
    could otherwise reveal the text."""
    client, provider = opened()
    client.generate("who?", max_new_tokens=1)
    assert client.loaded is not None
    asked = {"max_time": 1e-9, "stop_strings": ["a"], "min_new_tokens": 3, "num_beams": 2, "early_stopping": True}
    for name, value in {**asked, "prompt_lookup_num_tokens": 3, "use_mtp": True}.items():
        setattr(client.loaded[1].generation_config, name, value)
    provider.seen = []
    client.generate("who?", max_new_tokens=NEW_TOKENS, fixed_length=True)
    assert len(provider.seen) == NUM_CALLS
    for name in asked:
        setattr(client.loaded[1].generation_config, name, None)
    provider.seen = []
    client.generate("aaaaaaaa", max_new_tokens=NEW_TOKENS, eos_token_id=[])
    assert {rows for *_, rows in provider.seen[GROUPS:]} == {1}, "no guesses in a request"


@pytest.mark.parametrize(
    "option",
    [
        {"max_time": 1.0}, {"stop_strings": ["a"]}, {"stopping_criteria": [print]}, {"early_stopping": True},
        {"num_beams": 2}, {"min_new_tokens": 2}, {"min_length": 4}, {"generation_config": GenerationConfig()},
        {"exponential_decay_length_penalty": (2, 1.1)}, {"cache_implementation": "paged"}, {"num_beam_groups": 2},
    ],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_what_would_end_it_early_is_refused(opened: Opened, option: dict[str, Any]) -> None:
    client, provider = opened()
    with pytest.raises(ConfigurationError, match=f"fixed_length .*{next(iter(option))}") as refused:
        client.generate("who?", max_new_tokens=2, fixed_length=True, **option)
    assert "\n" not in str(refused.value)
    assert provider.seen == []


@pytest.mark.parametrize("fixed_length", [False, True])
@pytest.mark.parametrize(
    "option",
    [
        {"prompt_lookup_num_tokens": 3}, {"assistant_model": object()}, {"assistant_tokenizer": object()},
        {"assistant_early_exit": 1}, {"use_mtp": True}, {"is_assistant": True}, {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "high"}, {"token_healing": True}, {"num_assistant_tokens": 4},
        {"generation_config": GenerationConfig(prompt_lookup_num_tokens=3)},
    ],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_options_that_guess_the_text_are_refused(opened: Opened, option: dict[str, Any], fixed_length: bool) -> None:
    client, provider = opened()
    with pytest.raises(
        ConfigurationError, match=r"generate does not take .*rows in a request would depend on the text"
    ):
        client.generate("who?", max_new_tokens=2, fixed_length=fixed_length, **option)
    assert provider.seen == []


def test_options_that_are_off_are_not(opened: Opened) -> None:
    client, _ = opened()
    client.generate("who?", max_new_tokens=2, use_mtp=False, prompt_lookup_num_tokens=None)
    client.generate("who?", max_new_tokens=2, generation_config=GenerationConfig(do_sample=False))


SAMPLING = (
    {"do_sample": False}, {"do_sample": True}, {"do_sample": True, "temperature": 1e-9},
    {"do_sample": True, "top_p": 0.5, "top_k": 3}, {"do_sample": True, "typical_p": 0.5},
    {"do_sample": True, "min_p": 0.1}, {"do_sample": True, "eta_cutoff": 0.1, "repetition_penalty": 1.3},
)  # fmt: skip


@pytest.mark.parametrize("options", SAMPLING, ids=str)
@pytest.mark.parametrize("first", [GROUPS - 1, 2 * GROUPS - 1, 5], ids=["prompt's logits", "a step's logits", "layer"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_answer_goes_on_and_fails_at_its_end(
    opened: Opened, options: dict[str, Any], first: int, wrong: float
) -> None:
    client, provider = opened(Fault(FORWARD, wrong, first))
    pieces: list[str] = []
    with pytest.warns(NotFiniteWarning), pytest.raises(NotFinite, match="nothing came of this run"):
        client.generate("who?", max_new_tokens=NEW_TOKENS, fixed_length=True, on_text=pieces.append, **options)
    assert len(provider.seen) == NUM_CALLS
    assert pieces == []
    provider.fault, provider.seen = HONEST, []
    client.generate("who?", max_new_tokens=NEW_TOKENS, fixed_length=True, **options)
    assert len(provider.seen) == NUM_CALLS, "a later answer starts afresh"


@pytest.mark.parametrize("options", SAMPLING[:2], ids=str)
def test_an_ordinary_answer_stops_at_once(opened: Opened, options: dict[str, Any]) -> None:
    """An answer without a fixed length stops at the first value that is NaN or infinite, even if this is a logit of the
    last token and so in no row that is sent."""
    for first, num_calls in ((5, 6), (GROUPS - 1, GROUPS)):
        client, provider = opened(Fault(FORWARD, math.nan, first))
        with pytest.raises(NotFinite):
            client.generate("who?", max_new_tokens=NEW_TOKENS, **options)
        assert len(provider.seen) == num_calls


def test_with_verify_it_stops_at_once(opened: Opened, chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, provider = opened(arithmetic="ring", verify=chat_folder)
    run = RemoteExecutor.run
    monkeypatch.setattr(RemoteExecutor, "run", lambda *args: run(*args) * math.nan)
    with pytest.raises(NotFinite):
        client.generate("who?", max_new_tokens=NEW_TOKENS, fixed_length=True)
    assert len(provider.seen) == 1


def test_logits_that_overflow_are_drawn_from() -> None:
    run = RunState(may_stop=False)
    logits = torch.tensor([[3e38, -3e38, -math.inf, 0.0]])
    finite = FiniteLogits(run, bounds=True)(torch.ones(1, 1), logits)
    assert not run.sends_zeros
    drawn = TemperatureLogitsWarper(1e-9)(torch.ones(1, 1, dtype=torch.long), finite).softmax(-1)
    assert torch.multinomial(drawn, 1).item() == 0
    assert drawn[0, 2] == 0, "what is not allowed stays so"
    assert torch.equal(FiniteLogits(run, bounds=False)(torch.ones(1, 1), logits), logits)


def test_the_cut_keeps_the_stop_token() -> None:
    assert cut_at_stop([5, 6, 7, 6], (6,)) == [5, 6]
    assert cut_at_stop([5, 6], ()) == [5, 6]


def test_the_command_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from tenant_sdk import cli

    given: list[dict[str, Any]] = []

    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def generate(self, *args: Any, **options: Any) -> None:
            given.append(options)

    monkeypatch.setattr("tenant_sdk.TenantClient", lambda *_, **__: Client())
    (tmp_path / "config.json").write_text("{}")
    runner, command = CliRunner(), ["generate", "who?", "--url", f"inproc:{tmp_path}"]
    assert runner.invoke(cli.app, [*command, "--fixed-length"]).exit_code == 0
    assert runner.invoke(cli.app, command).exit_code == 0
    assert [options["fixed_length"] for options in given] == [True, False]
