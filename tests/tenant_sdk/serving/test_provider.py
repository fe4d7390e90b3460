"""Tests what the provider sees of the engine's steps, and what happens if it fails or lies in the middle of a step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk import Speculation, TenantClient
from tenant_sdk.model.run_state import NotFiniteWarning
from tenant_sdk.serving.engine import Engine
from tenant_sdk.testing import CallHandler, Corrupt, Fail, ScriptedProvider
from tests.support.engines import TIMEOUT_S, Gate
from tests.support.lattice import PLAIN, TOY_MASK
from tests.support.providers import make_served_model, serving
from tests.support.spies import before_requests
from wire.errors import NotFinite, QuotaExceeded, TransportError, Unavailable, VeilbaseError, VerificationFailed

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
GROUPS = 9
"""The number of calls of a step: four for each of two layers and one for the head."""


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[ScriptedProvider]:
    with ScriptedProvider(model=folder) as made:
        yield made


@pytest.fixture
def opened(served: ScriptedProvider) -> Iterator[Callable[..., tuple[TenantClient, ScriptedProvider]]]:
    clients: list[TenantClient] = []

    def make(**options: Any) -> tuple[TenantClient, ScriptedProvider]:
        clients.append(served.client(**{**PLAIN, **options}))
        return clients[-1], served

    served.forget_calls()
    yield make
    served.handler = None
    for client in clients:
        client.close()


def row_counts(provider: ScriptedProvider) -> list[int]:
    """Returns the number of rows of each product so far."""
    return [call.num_rows for call in provider.calls if call.purpose == "product"]


Opened = Callable[..., tuple[TenantClient, ScriptedProvider]]


def answer_alone(
    client: TenantClient, provider: ScriptedProvider, prompt: str, **options: Any
) -> tuple[str, list[int]]:
    """Returns an engine's answer to one prompt, and the numbers of rows of its calls."""
    provider.forget_calls()
    with Engine(client, step_tokens=16) as engine:
        text = engine.submit(prompt, **options).result(TIMEOUT_S)
    return text, row_counts(provider)


# ---- row counts ------------------------------------------------------------------------------------------------------


def test_a_step_makes_the_calls_of_one_pass_whatever_is_in_it(opened: Opened) -> None:
    client, provider = opened()
    with Engine(client, step_tokens=16) as engine:
        answers = [engine.submit("who?", max_new_tokens=5, eos_token_id=[]) for _ in range(3)]
        for answer in answers:
            answer.result(TIMEOUT_S)
    seen = row_counts(provider)
    steps = [seen[at : at + GROUPS] for at in range(0, len(seen), GROUPS)]
    assert len(seen) % GROUPS == 0
    assert all(len(set(step[:-1])) == 1 for step in steps)
    assert all(step[-1] <= step[0] <= 16 for step in steps)
    prompt = answers[0].num_prompt_tokens
    assert sum(step[0] for step in steps) == 3 * (prompt + 4)
    assert sum(step[-1] for step in steps) == 3 * 5


def test_with_fixed_length_the_rows_are_those_of_the_longest_answer(opened: Opened) -> None:
    client, provider = opened()
    plain, whole = answer_alone(client, provider, "who?", max_new_tokens=8, eos_token_id=[])
    stop = client.tokenizer.convert_tokens_to_ids(plain[2])
    short, early = answer_alone(client, provider, "who?", max_new_tokens=8, eos_token_id=stop)
    assert len(early) < len(whole)
    for options in ({"eos_token_id": stop}, {"eos_token_id": [], "stop": plain[2]}):
        text, seen = answer_alone(client, provider, "who?", max_new_tokens=8, fixed_length=True, **options)
        assert seen == whole
        assert text == short if "stop" not in options else text == plain[: plain.index(plain[2])]


def forbid_all(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scores, -torch.inf)


@pytest.mark.parametrize("fails", ["hook", "on_text", "nothing allowed"])
def test_with_fixed_length_the_rows_do_not_show_that_code_of_the_users_fails(opened: Opened, fails: str) -> None:
    client, provider = opened()
    _, whole = answer_alone(client, provider, "who?", max_new_tokens=8, eos_token_id=[])
    calls: list[int] = []

    def raises_at_third(*_: Any) -> torch.Tensor:
        calls.append(0)
        if len(calls) == 3:
            raise RuntimeError("secret text")
        return _[-1]  # type: ignore[no-any-return]

    options: dict[str, Any] = {
        "hook": {"logits_processor": [raises_at_third]},
        "on_text": {"on_text": raises_at_third},
        "nothing allowed": {"logits_processor": [forbid_all], "do_sample": True},
    }[fails]
    provider.forget_calls()
    with Engine(client, step_tokens=16) as engine:
        answer = engine.submit("who?", max_new_tokens=8, eos_token_id=[], fixed_length=True, **options)
        with pytest.raises(VeilbaseError, match=r"of this request failed \(RuntimeError\)"):
            answer.result(TIMEOUT_S)
    assert row_counts(provider) == whole
    assert len(calls) in (0, 3)  # After the failure it is not called again.


def test_padded_prompts_show_no_length_and_give_the_answers_of_generate(opened: Opened) -> None:
    client, provider = opened(pad_rows=24)
    seen = []
    for prompt in ("who?", "where is it now?", "a"):
        want = client.generate(prompt, max_new_tokens=6, eos_token_id=[])
        text, rows = answer_alone(client, provider, prompt, max_new_tokens=6, eos_token_id=[])
        assert text == want
        seen.append(rows)
    assert seen[0] == seen[1] == seen[2]
    assert sum(seen[0][::GROUPS]) == 24 + 5


def test_a_hit_shows_as_fewer_rows_and_never_with_fixed_length(opened: Opened) -> None:
    client, provider = opened()
    prompt = "what did they say about the copper owl, and since when?"
    seen: list[tuple[int, int]] = []
    with Engine(client, step_tokens=16, prefix_bytes=1 << 20) as engine:
        for fixed_length in (False, True, False, True):
            provider.forget_calls()
            answer = engine.submit(prompt, max_new_tokens=4, eos_token_id=[], fixed_length=fixed_length)
            answer.result(TIMEOUT_S)
            seen.append((sum(row_counts(provider)[::GROUPS]), answer.num_reused_tokens))
    whole = answer.num_prompt_tokens + 3
    hit = (answer.num_prompt_tokens - 1) // 16 * 16
    assert seen == [(whole, 0), (whole, 0), (whole - hit, hit), (whole, 0)]


# ---- values that are not finite --------------------------------------------------------------------------------------


def spoil_first_row(wrong: float, step: int, at_group: int) -> CallHandler:
    """Returns a handler that makes the first number of one reply wrong, in one step. This number is in the first row,
    which belongs to the first request."""

    def spoil(reply: torch.Tensor) -> torch.Tensor:
        reply[0, 0] = wrong
        return reply

    return lambda call: Corrupt(spoil) if call.number == step * GROUPS + at_group else None


@pytest.mark.parametrize("at_group", range(GROUPS))
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_value_that_is_not_finite_ends_its_own_request_alone(opened: Opened, wrong: float, at_group: int) -> None:
    client, provider = opened()
    want = [client.generate(prompt, max_new_tokens=8, eos_token_id=[]) for prompt in ("who?", "why so?")]
    gate = Gate()
    with Engine(client, step_tokens=32) as engine:
        hold = engine.submit("b", max_new_tokens=1, logits_processor=[gate])
        assert gate.reached.wait(TIMEOUT_S)
        answers = [engine.submit(prompt, max_new_tokens=8, eos_token_id=[]) for prompt in ("who?", "why so?")]
        provider.forget_calls()
        provider.handler = spoil_first_row(wrong, step=3, at_group=at_group)
        gate.open.set()
        hold.result(TIMEOUT_S)
        assert answers[1].result(TIMEOUT_S) == want[1]
        with pytest.raises(NotFinite, match="a value of this request was NaN or infinite"):
            answers[0].result(TIMEOUT_S)
        assert len(row_counts(provider)) % GROUPS == 0, "the step was computed to its end"
        provider.handler = None
        assert engine.submit("who?", max_new_tokens=8, eos_token_id=[]).result(TIMEOUT_S) == want[0]


def test_with_fixed_length_nobody_sees_that_a_request_is_lost(opened: Opened) -> None:
    client, provider = opened()
    options: dict[str, Any] = {"max_new_tokens": 8, "fixed_length": True}
    _, whole = answer_alone(client, provider, "who?", **options)
    for at_group in range(GROUPS):
        provider.forget_calls()
        provider.handler = spoil_first_row(math.nan, step=2, at_group=at_group)
        with Engine(client, step_tokens=16) as engine, warnings.catch_warnings():
            warnings.simplefilter("error", NotFiniteWarning)
            answer = engine.submit("who?", **options)
            with pytest.raises(NotFinite):
                answer.result(TIMEOUT_S)
        assert row_counts(provider) == whole


def test_a_lost_request_sends_nothing_of_its_own_any_more(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of the same length are lost in the same step. From the next step on, they send the same rows."""
    client, provider = opened()
    sent: list[list[Any]] = []
    before_requests(monkeypatch, lambda call, payload: sent[-1].append(payload.rows(call).clone()))
    for prompt in ("who?", "zzz!"):
        sent.append([])
        provider.forget_calls()
        provider.handler = spoil_first_row(math.nan, step=2, at_group=0)
        with Engine(client, step_tokens=64) as engine, pytest.raises(NotFinite):
            engine.submit(prompt, max_new_tokens=8, fixed_length=True).result(TIMEOUT_S)
        assert len(sent[-1]) == len(provider.calls)
    first, second = sent
    assert not torch.equal(first[2 * GROUPS], second[2 * GROUPS])
    for mine, other in zip(first[3 * GROUPS :], second[3 * GROUPS :], strict=True):
        assert torch.equal(mine, other)
        assert torch.isfinite(mine).all()


# ---- a provider that fails -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [Unavailable("the provider went away"), QuotaExceeded("too much")], ids=["gone", "quota"]
)
def test_a_provider_that_fails_in_a_step_ends_the_requests_of_that_step(opened: Opened, error: VeilbaseError) -> None:
    client, provider = opened()
    want = client.generate("why so?", max_new_tokens=6)
    with Engine(client, max_running=2, step_tokens=16) as engine:
        provider.forget_calls()
        provider.handler = lambda call: Fail(error) if call.number == 3 * GROUPS + 4 else None
        failing = [engine.submit("who?", max_new_tokens=30, eos_token_id=[]) for _ in range(2)]
        waiting = engine.submit("why so?", max_new_tokens=6)
        for answer in failing:
            with pytest.raises(type(error)) as failed:
                answer.result(TIMEOUT_S)
            assert "\n" not in str(failed.value)
        assert waiting.result(TIMEOUT_S) == want


@pytest.mark.parametrize("speculation", [None, Speculation(3)], ids=["plain", "speculation"])
def test_after_a_wrong_reply_that_was_noticed_everything_ends(
    opened: Opened, folder: Path, speculation: Speculation | None
) -> None:
    client, provider = opened(weights="int8", mask="lattice", mask_options=TOY_MASK, verify=folder, arithmetic="ring")
    with Engine(client, max_running=1, speculation=speculation) as engine:
        gate = Gate()
        answers = [engine.submit("who?", max_new_tokens=4, logits_processor=[gate]) for _ in range(2)]
        assert gate.reached.wait(TIMEOUT_S)
        num_calls = len(row_counts(provider))
        provider.handler = lambda call: Corrupt(lambda reply: reply + 1) if call.purpose == "product" else None
        gate.open.set()
        for answer in answers:
            with pytest.raises(VerificationFailed):
                answer.result(TIMEOUT_S)
        assert len(row_counts(provider)) == num_calls + 1, "nothing is sent after it"
        with pytest.raises(VerificationFailed):
            engine.submit("who?")


def test_a_client_that_is_closed_ends_what_is_left(opened: Opened) -> None:
    client, _ = opened(weights="int8", mask="lattice", mask_options=TOY_MASK, arithmetic="ring")
    engine = Engine(client)
    engine.submit("who?", max_new_tokens=2).result(TIMEOUT_S)
    client.close()
    with pytest.raises(VeilbaseError) as failed:
        engine.submit("who?", max_new_tokens=4).result(TIMEOUT_S)
    assert "\n" not in str(failed.value)
    engine.close()


def test_over_the_network_a_provider_that_comes_back_is_used_again(folder: Path, tmp_path: Path) -> None:
    served_model = make_served_model(folder, "int8")
    with serving(served_model) as server:
        port, gate = server.port, Gate()
        client = TenantClient(f"grpc://127.0.0.1:{port}", mask="off", cache=tmp_path / "cache", progress=False)
        want = client.generate("why so?", max_new_tokens=6)
        engine = Engine(client, step_tokens=16)
        assert engine.submit("why so?", max_new_tokens=6).result(TIMEOUT_S) == want
        running = engine.submit("who?", max_new_tokens=20, eos_token_id=[], logits_processor=[gate])
        assert gate.reached.wait(TIMEOUT_S)
    gate.open.set()
    with pytest.raises(TransportError) as failed:
        running.result(TIMEOUT_S)
    assert "\n" not in str(failed.value)
    with serving(served_model, port):
        assert engine.submit("why so?", max_new_tokens=6).result(TIMEOUT_S) == want
        engine.close()
        client.close()
