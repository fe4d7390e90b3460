"""Tests the double of a provider that users' tests take: what it answers, what a script can do, and what it records."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tenant_sdk import (
    ConfigurationError,
    DeadlineExceeded,
    Engine,
    MalformedFrame,
    NotFinite,
    NotVerifiedWarning,
    ProviderAwayWarning,
    QuotaExceeded,
    TenantClient,
    Unauthenticated,
    Unavailable,
    VeilbaseError,
    VerificationFailed,
    testing,
)
from tenant_sdk.testing import Corrupt, Delay, Drop, Fail, ProviderCall, ScriptedProvider, save_tiny_model
from tests.support.lattice import PLAIN
from tests.support.training import QUICK, ROWS, lora
from wire.errors import WireCode, error_from_code

NUM_GROUPS = 9
"""The number of calls of a forward pass: four for each of two layers, and one for the head."""
pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.NotPrivateWarning")


@pytest.fixture(scope="module")
def provider() -> Iterator[ScriptedProvider]:
    with ScriptedProvider() as made:
        yield made


@pytest.fixture(autouse=True)
def _honest_again(provider: ScriptedProvider) -> Iterator[None]:
    provider.forget_calls()
    yield
    provider.handler = None


@pytest.fixture(scope="module")
def client(provider: ScriptedProvider) -> TenantClient:
    return provider.client(**PLAIN)


def at(number: int, action: testing.Action) -> testing.CallHandler:
    """Returns a handler that takes an action on one call."""
    return lambda call: action if call.number == number else None


def asked(client: TenantClient) -> str:
    return client.generate("who?", max_new_tokens=3, eos_token_id=[])


# ---- the model -------------------------------------------------------------------------------------------------------


def test_a_misspelt_attribute_is_no_silent_script() -> None:
    with ScriptedProvider() as provider, pytest.raises(AttributeError, match="handlr"):
        provider.handlr = lambda call: Drop()  # type: ignore[attr-defined]


def test_what_is_not_scripted_is_the_models_own_answer(client: TenantClient, provider: ScriptedProvider) -> None:
    model = AutoModelForCausalLM.from_pretrained(provider.model).eval()
    ids = AutoTokenizer.from_pretrained(provider.model)("who is it?", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(client.load_model()(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_tiny_model_is_made_from_its_seed_alone_and_leaves_the_callers_random_state(tmp_path: Path) -> None:
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    made = [
        save_tiny_model(tmp_path / name, seed, num_hidden_layers=1) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert torch.equal(torch.rand(3), want)
    a, b, c = ((folder / "model.safetensors").read_bytes() for folder in made)
    assert a == b != c
    assert AutoModelForCausalLM.from_pretrained(made[0]).config.num_hidden_layers == 1


def test_a_tokenizer_gives_back_its_text() -> None:
    tokenizer, text = testing.character_tokenizer(), "".join(map(chr, range(32, 127))) + "\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.convert_tokens_to_ids(list(testing.SPECIAL_TOKENS)) == list(range(len(testing.SPECIAL_TOKENS)))


def test_another_model_is_served_by_its_folder(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "mine", seed=3, num_hidden_layers=1)
    with ScriptedProvider(model=folder) as provider, provider.client(**PLAIN) as client:
        assert client.connect().model_id == "mine"
        assert provider.model == folder


def test_the_main_job_with_the_default_mask_and_every_reply_checked(tmp_path: Path) -> None:
    with ScriptedProvider() as provider, provider.client() as client:
        result = client.finetune(ROWS, lora(), tmp_path / "a", **{**QUICK, "max_steps": 2})
        answer = client.generate("who?", result.adapter_dir, max_new_tokens=2, eos_token_id=[])
    assert answer
    assert (client.mask, client.is_verified) == ("lattice", True)
    assert {call.purpose for call in provider.calls} == {"product"}, "hints are computed from the trusted weights"
    assert {call.direction for call in provider.calls} == {"forward", "backward"}


@pytest.mark.filterwarnings("ignore::tenant_sdk.NotVerifiedWarning")
def test_shares_go_to_two_providers() -> None:
    with ScriptedProvider() as one, ScriptedProvider() as other:
        with TenantClient([one.url, other.url], mask="shares", cache=Path(str(one.model)).parent / "cache") as client:
            asked(client)
        assert len(one.calls) == len(other.calls) > 0
    with ScriptedProvider(seed=1) as one, ScriptedProvider(seed=2) as other:
        client = TenantClient([one.url, other.url], mask="shares")
        with pytest.raises(ConfigurationError, match="do not serve the same weights"):
            client.connect()


# ---- records ---------------------------------------------------------------------------------------------------------


def test_calls_are_recorded_in_order_with_shapes_and_names(client: TenantClient, provider: ScriptedProvider) -> None:
    seen: list[ProviderCall] = []
    provider.handler = seen.append
    client.load_model()(torch.arange(7)[None])
    assert seen == provider.calls
    assert [call.number for call in seen] == list(range(NUM_GROUPS))
    first, last = seen[0], seen[-1]
    of_layer = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    assert first == ProviderCall(0, 0, of_layer, "forward", "product", 7, 32, 64, torch.float32)
    assert (last.layers, last.num_rows, last.cols, last.reply_cols) == (("lm_head",), 7, 32, 128)
    provider.forget_calls()
    assert provider.calls == []


def test_a_record_is_frozen_and_holds_no_numbers_of_the_request(
    client: TenantClient, provider: ScriptedProvider
) -> None:
    asked(client)
    call = provider.calls[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        call.num_rows = 3  # type: ignore[misc]
    kinds = {type(each) for each in dataclasses.astuple(call)}
    assert kinds == {int, str, tuple, torch.dtype}


def test_calls_of_many_threads_are_numbered_once_each(provider: ScriptedProvider) -> None:
    with provider.client(**PLAIN) as client:
        models = [client.load_model() for _ in range(4)]
        provider.forget_calls()
        threads = [threading.Thread(target=model, args=(torch.ones(1, 3, dtype=torch.int64),)) for model in models]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert [call.number for call in provider.calls] == list(range(4 * NUM_GROUPS))


# ---- scripts ---------------------------------------------------------------------------------------------------------


def test_a_verified_client_refuses_the_least_lie_and_sends_nothing_more(provider: ScriptedProvider) -> None:
    with provider.client() as client:
        asked(client)
        provider.forget_calls()
        provider.handler = at(4, Corrupt())
        with pytest.raises(VerificationFailed):
            asked(client)
        assert len(provider.calls) == 5


def test_an_unverified_client_computes_with_a_lie(client: TenantClient, provider: ScriptedProvider) -> None:
    def with_nan(reply: torch.Tensor) -> torch.Tensor:
        reply[0, 0] = torch.nan
        return reply

    provider.handler = at(NUM_GROUPS - 1, Corrupt(with_nan))
    with pytest.raises(NotFinite):
        asked(client)
    provider.handler = None
    asked(client)  # the honest reply was not written to


@pytest.mark.parametrize("change", [lambda reply: reply[:, 1:], lambda reply: reply.double(), lambda reply: None])
def test_a_reply_of_another_shape_is_malformed(
    client: TenantClient, provider: ScriptedProvider, change: Callable[[torch.Tensor], Any]
) -> None:
    provider.handler = at(0, Corrupt(change))
    with pytest.raises(MalformedFrame):
        asked(client)


@pytest.mark.parametrize("kind", [Unavailable, QuotaExceeded, Unauthenticated])
def test_a_class_of_errors_comes_with_the_text_that_users_see(
    client: TenantClient, provider: ScriptedProvider, kind: type[VeilbaseError]
) -> None:
    provider.handler = at(2, Fail(kind))
    with pytest.raises(kind) as failed:
        asked(client)
    assert str(failed.value) in {str(error_from_code(code, 2)) for code in WireCode}
    asked(client)


def test_an_error_comes_as_it_was_given_and_anew_each_time(client: TenantClient, provider: ScriptedProvider) -> None:
    provider.handler = lambda call: Fail(given)
    given, came = Unavailable("gone for tea", 3.0), []
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"^gone for tea$") as failed:
            asked(client)
        came.append(failed.value)
    assert [each.retry_s for each in came] == [3.0, 3.0]
    assert len({id(each) for each in (*came, given)}) == 3


@pytest.mark.parametrize("error", [NotFinite, ConfigurationError("mine"), VerificationFailed, ValueError("x")])
def test_an_error_that_no_provider_can_cause_is_refused(error: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^expected an error that a provider can answer with .*, got \w+$"):
        Fail(error)


def test_an_error_comes_where_the_reply_is_read_and_others_under_way_are_not_hurt(
    client: TenantClient, provider: ScriptedProvider
) -> None:
    """The engine sends for several requests; the one failed step ends them, and the next request is answered."""
    want = asked(client)
    with Engine(client) as engine:
        provider.handler = at(len(provider.calls) + 3, Fail(Unavailable))
        with pytest.raises(Unavailable):
            engine.submit("who?", max_new_tokens=3, eos_token_id=[]).result(60)
        assert engine.submit("who?", max_new_tokens=3, eos_token_id=[]).result(60) == want


def test_a_delay_is_waited_for_and_one_beyond_the_deadline_is_not(
    client: TenantClient, provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, waited = asked(client), []
    provider.forget_calls()
    monkeypatch.setattr(time, "sleep", waited.append)
    provider.handler = at(3, Delay(20.0))
    assert asked(client) == want
    assert len(waited) == 1
    assert 10 < waited[0] <= 20
    provider.handler = lambda call: Delay(40.0)
    with pytest.raises(DeadlineExceeded, match="no complete answer to request"):
        asked(client)
    assert len(waited) == 1


def test_a_dropped_call_is_a_deadline_at_once(client: TenantClient, provider: ScriptedProvider) -> None:
    provider.handler = at(1, Drop())
    with pytest.raises(DeadlineExceeded, match="no complete answer to request 1 within its deadline"):
        asked(client)
    assert len(provider.calls) == 2


def test_a_handler_may_wait_and_may_raise(client: TenantClient, provider: ScriptedProvider) -> None:
    reached, may_go = threading.Event(), threading.Event()

    def hold(call: ProviderCall) -> None:
        reached.set()
        assert may_go.wait(60)

    provider.handler, answers = hold, []
    thread = threading.Thread(target=lambda: answers.append(asked(client)))
    thread.start()
    assert reached.wait(60)
    assert answers == []
    may_go.set()
    thread.join(60)
    assert len(answers) == 1

    def refuse(call: ProviderCall) -> None:
        raise AssertionError("backward was not expected")

    provider.handler = refuse
    with pytest.raises(AssertionError, match="backward was not expected"):
        asked(client)


@pytest.mark.parametrize("answer", ["drop", Unavailable("raised, not returned"), True])
def test_what_is_no_action_is_a_mistake_of_the_test(
    client: TenantClient, provider: ScriptedProvider, answer: Any
) -> None:
    provider.handler = lambda call: answer
    with pytest.raises(TypeError, match="expected a handler's None, Delay, Corrupt, Fail or Drop, got"):
        asked(client)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_delay_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="expected a delay of 0 seconds or more"):
        Delay(seconds)


def test_a_run_waits_for_a_provider_that_comes_back(
    client: TenantClient, provider: ScriptedProvider, tmp_path: Path
) -> None:
    lost: list[int] = []

    def lose_one(call: ProviderCall) -> Fail | None:
        if lost or call.number < 40:  # in the middle of the third step
            return None
        lost.append(call.number)
        return Fail(Unavailable)

    provider.handler = lose_one
    options: dict[str, Any] = {**QUICK, "max_steps": 3, "save_steps": 1, "provider_wait_s": 30}
    with pytest.warns(ProviderAwayWarning):
        result = client.finetune(ROWS, lora(), tmp_path / "a", **options)
    assert (lost, len(result.losses)) == ([40], 3)


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_the_end_closes_clients_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ScriptedProvider() as provider:
        own = provider.client(**PLAIN)
        other = TenantClient(provider.url, mask="off", cache=tmp_path / "cache", progress=False)
        asked(own)
        asked(other)
        assert len(list(tmp_path.glob("veilbase-testing-*"))) == 1
    provider.close()  # once more does no harm
    assert list(tmp_path.glob("veilbase-testing-*")) == []
    with pytest.raises(ConfigurationError, match="this client was closed"):
        asked(own)
    with pytest.raises(Unavailable, match="the ScriptedProvider was closed"):
        asked(other)
    with pytest.raises(ConfigurationError, match="expected the URL of a ScriptedProvider that is open in this process"):
        TenantClient(provider.url, mask="off").connect()


def test_options_are_those_of_a_client(provider: ScriptedProvider) -> None:
    with pytest.raises(ConfigurationError, match="did you mean lattice"):
        provider.client(mask="latice")
    with pytest.warns(NotVerifiedWarning), provider.client(verify=False) as client:
        assert not client.is_verified
    with provider.client(verify=provider.model) as client:
        assert client.is_verified
