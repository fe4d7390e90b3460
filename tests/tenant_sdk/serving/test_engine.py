"""Tests that the engine streams, ends, cancels, delays and fails each request independently, and refuses what it cannot
serve."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tenant_sdk import Speculation, TenantClient
from tenant_sdk.generate import prompt_ids
from tenant_sdk.serving import many
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.kv import kv_layout
from tenant_sdk.serving.requests import Answer
from tests.support.engines import TIMEOUT_S, Gate
from tests.support.saved_adapters import save_adapter
from tests.support.tiny_models import PROMPTS, make_model, open_client
from wire.errors import ConfigurationError, DeadlineExceeded, QuotaExceeded, VeilbaseError

RANKS = {"small": 4, "large": 24, "wide": 64}
"""The rank of each adapter, by the adapter's name."""


@pytest.fixture(scope="module")
def engine(client: TenantClient) -> Iterator[Engine]:
    with Engine(client, step_tokens=16, max_running=4) as made:
        yield made


# ---- text and ends ---------------------------------------------------------------------------------------------------


def test_pieces_come_one_by_one_and_are_the_text(client: TenantClient, engine: Engine) -> None:
    called: list[str] = []
    answer = engine.submit("who?", max_new_tokens=8, eos_token_id=[], on_text=called.append)
    pieces = list(answer)
    shown = [client.tokenizer.decode([token_id], skip_special_tokens=True) for token_id in answer.token_ids]
    assert pieces == [each for each in shown if each]
    assert len(pieces) > 4
    assert pieces == called == list(answer)
    assert "".join(pieces) == answer.result(TIMEOUT_S) == client.generate("who?", max_new_tokens=8, eos_token_id=[])
    assert (answer.finish_reason, answer.is_done, answer.error, len(answer.token_ids)) == ("length", True, None, 8)


def test_messages_are_taken_as_by_generate(client: TenantClient, engine: Engine) -> None:
    messages = [
        {"role": "user", "content": "who?"},
        {"role": "assistant", "content": "me"},
        {"role": "user", "content": "b"},
    ]
    assert engine.submit(messages, max_new_tokens=6).result(TIMEOUT_S) == client.generate(messages, max_new_tokens=6)


def test_a_stop_token_ends_it_as_in_generate(client: TenantClient, engine: Engine) -> None:
    plain = client.generate("who?", max_new_tokens=8, eos_token_id=[])
    stop = client.tokenizer.convert_tokens_to_ids(plain[2])
    answer = engine.submit("who?", max_new_tokens=8, eos_token_id=stop)
    assert answer.result(TIMEOUT_S) == client.generate("who?", max_new_tokens=8, eos_token_id=stop)
    assert answer.finish_reason == "stop"
    assert answer.token_ids.index(stop) == len(answer.token_ids) - 1 < 7


def test_a_stop_string_ends_it_and_is_not_in_it(client: TenantClient, engine: Engine) -> None:
    plain = client.generate("who?", max_new_tokens=8, eos_token_id=[])
    answer = engine.submit("who?", max_new_tokens=8, eos_token_id=[], stop=[plain[2:4], "never"])
    assert answer.result(TIMEOUT_S) == plain[: plain.index(plain[2:4])]
    assert answer.finish_reason == "stop"


def test_done_callbacks_are_called_once_before_or_after(engine: Engine) -> None:
    answer, seen, done = engine.submit("who?", max_new_tokens=2), list[Answer](), threading.Event()
    answer.add_done_callback(lambda each: (seen.append(each), done.set()))  # type: ignore[func-returns-value]
    assert done.wait(TIMEOUT_S)
    answer.add_done_callback(seen.append)
    assert seen == [answer, answer]


def test_result_says_when_it_takes_too_long(client: TenantClient) -> None:
    gate = Gate()
    with Engine(client) as engine:
        answer = engine.submit("who?", max_new_tokens=2, logits_processor=[gate])
        assert gate.reached.wait(TIMEOUT_S)
        with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
            answer.result(0.01)
        gate.open.set()
        answer.result(TIMEOUT_S)


# ---- joining, waiting, cancelling ------------------------------------------------------------------------------------


def test_more_requests_than_fit_wait_and_are_all_answered(client: TenantClient) -> None:
    want = [client.generate(prompt, max_new_tokens=6) for prompt in PROMPTS]
    with Engine(client, step_tokens=16, max_running=16, kv_bytes=40_000) as engine:
        answers = [engine.submit(prompt, max_new_tokens=6) for prompt in PROMPTS * 3]
        assert [answer.result(TIMEOUT_S) for answer in answers] == want * 3


class MostRunning:
    """Acts as a logits hook that notes the most requests that an engine ran at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.num_running = engine, 0

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_running = max(self.num_running, self._engine.status().num_running)
        return scores


def kv_bytes_for(client: TenantClient, num_tokens: int, speculation: Speculation | None = None) -> int:
    layout = kv_layout(client.load_model(), "fp32", 64)
    twice = speculation is not None and speculation.draft is not None
    return layout.bytes_for(num_tokens) * (2 if twice else 1)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("drafts", [None, "lookup", "itself"])
def test_preempted_requests_get_the_tokens_that_they_would_have_got(
    kind: str, drafts: str | None, tmp_path: Path
) -> None:
    """Greedy and drawn answers, with penalties and stop strings, are the same with room for all requests and with room
    for only a few, so that most are preempted and computed again."""
    folder = make_model(kind, tmp_path / kind)
    draft = AutoModelForCausalLM.from_pretrained(folder).eval() if drafts == "itself" else None
    speculation = None if drafts is None else Speculation(2, draft=draft)
    requests: list[dict[str, Any]] = [{"prompt": prompt, "eos_token_id": []} for prompt in PROMPTS]
    requests += [{**each, "do_sample": True, "temperature": 0.8, "seed": seed} for seed, each in enumerate(requests)]
    requests += [{**requests[0], "repetition_penalty": 1.3}, {**requests[1], "stop": ["ab", "q"]}]
    got: list[list[list[int]]] = []
    with open_client(folder) as client:
        for num_tokens in (4096, 200):
            size = kv_bytes_for(client, num_tokens, speculation)
            with Engine(client, step_tokens=64, kv_bytes=size, speculation=speculation) as engine:
                answers = [engine.submit(max_new_tokens=24, **each) for each in requests]
                for answer in answers:
                    answer.result(TIMEOUT_S)
                got.append([answer.token_ids for answer in answers])
                num_preemptions = engine.status().num_preemptions
            assert (num_preemptions > 0) == (num_tokens == 200)
    assert got[0] == got[1]


def test_preempted_requests_under_a_mask_get_the_same_tokens(tmp_path: Path) -> None:
    with open_client(make_model("llama", tmp_path / "llama"), "lattice") as client:
        want = [client.generate(prompt, max_new_tokens=20, eos_token_id=[]) for prompt in PROMPTS]
        with Engine(client, step_tokens=64, kv_bytes=kv_bytes_for(client, 120)) as engine:
            answers = [engine.submit(prompt, max_new_tokens=20, eos_token_id=[]) for prompt in PROMPTS]
            assert [answer.result(TIMEOUT_S) for answer in answers] == want
            assert engine.status().num_preemptions > 0


def test_who_is_preempted_shows_in_numbers_of_tokens_only(client: TenantClient) -> None:
    """Other texts of the same lengths make the same steps."""
    seen: list[list[list[tuple[int, int, int]]]] = []
    for swapped in (False, True):
        prompts = [prompt[::-1] if swapped else prompt for prompt in PROMPTS]
        steps, is_held, all_are_in = list[list[tuple[int, int, int]]](), threading.Event(), threading.Event()

        @contextmanager
        def held(is_held: threading.Event = is_held, all_are_in: threading.Event = all_are_in) -> Iterator[None]:
            is_held.set()
            assert all_are_in.wait(TIMEOUT_S)
            yield

        with Engine(client, step_tokens=64, kv_bytes=kv_bytes_for(client, 120), during_step=held) as engine:
            plan = engine.scheduler.plan

            def noted(now: float, plan: Any = plan, steps: Any = steps) -> Any:
                step = plan(0.0)
                steps.append([(segment.request, segment.start, segment.num_rows) for segment in step.segments])
                return step

            engine.submit("b", max_new_tokens=2, eos_token_id=[])
            assert is_held.wait(TIMEOUT_S)  # Its first step is planned, and waits for the others.
            engine.scheduler.plan = noted  # type: ignore[method-assign]
            seeds = {"do_sample": True, "temperature": 0.9, "seed": int(swapped)}
            answers = [engine.submit(prompt, max_new_tokens=30, eos_token_id=[], **seeds) for prompt in prompts]
            all_are_in.set()
            texts = [answer.result(TIMEOUT_S) for answer in answers]
            assert engine.status().num_preemptions > 0
        seen.append([step for step in steps if step])
        assert len(set(texts)) > 1
    assert seen[0] == seen[1]


def test_a_preempted_prompt_gives_the_same_mean_and_finds_its_kept_prompt(client: TenantClient) -> None:
    text = "where is it, and since when, and for how much longer?"
    with Engine(client, step_tokens=64) as engine:
        want = engine.submit(text, max_new_tokens=30, pools=True, eos_token_id=[])
        want.result(TIMEOUT_S)
    with Engine(client, step_tokens=64, kv_bytes=kv_bytes_for(client, 130), prefix_bytes=1 << 20) as engine:
        engine.submit(text, max_new_tokens=1).result(TIMEOUT_S)
        answers = [engine.submit(text, max_new_tokens=30, eos_token_id=[], pools=pools) for pools in (False, True)]
        assert [answer.result(TIMEOUT_S) for answer in answers] == [want.result()] * 2
        assert engine.status().num_preemptions > 0
        assert answers[0].num_reused_tokens > 0
    assert want.mean_hidden is not None
    assert answers[1].mean_hidden is not None
    torch.testing.assert_close(answers[1].mean_hidden, want.mean_hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("fixed_length", "num_running"), [(False, 16), (True, 2)])
def test_sixteen_run_where_two_would_fit_in_whole(client: TenantClient, fixed_length: bool, num_running: int) -> None:
    """Only requests whose rows go on to the limit in any case reserve all at once, and are never computed again."""
    limit = client.context_length - num_tokens_of(client, "b")
    size = kv_bytes_for(client, 2 * client.context_length)
    with Engine(client, step_tokens=64, kv_bytes=size, max_running=16) as engine:
        most = MostRunning(engine)
        options: dict[str, Any] = {"fixed_length": fixed_length, "logits_processor": [most]}
        answers = [engine.submit("b", max_new_tokens=limit, **options) for _ in range(16)]
        for answer in answers[:4]:
            answer.result(TIMEOUT_S)
        assert most.num_running == num_running
        assert not (fixed_length and engine.status().num_preemptions)


def test_without_a_limit_an_answer_fills_what_there_is(client: TenantClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length limit is the first of the engine's own, the checkpoint's, and what context and memory leave."""
    num_prompt = num_tokens_of(client, "b")
    model = client.load_model()
    monkeypatch.setattr(client, "load_model", lambda: model)
    room = client.context_length - num_prompt
    some = kv_layout(model, "fp32", 16).bytes_for(60)
    for options, new, whole, want in (
        ({}, None, None, room),
        ({"default_new_tokens": 9}, 5, None, 9),
        ({}, 7, None, 7),
        ({}, None, num_prompt + 11, 11),
        ({}, None, num_prompt, room),
        ({"kv_bytes": some}, None, None, 60 - num_prompt + 1),
        ({"max_context": 50}, None, None, 50 - num_prompt),
        ({"default_new_tokens": 1 << 20}, None, None, room),
    ):
        model.generation_config.max_new_tokens, model.generation_config.max_length = new, whole
        with Engine(client, step_tokens=16, **{"default_new_tokens": None, **options}) as engine:
            answer = engine.submit("b", eos_token_id=[])
            answer.result(TIMEOUT_S)
        assert (len(answer.token_ids), answer.finish_reason) == (want, "length")


def num_tokens_of(client: TenantClient, prompt: str) -> int:
    return len(prompt_ids(client.tokenizer, prompt))


def test_requests_join_while_others_are_answered_from_many_threads(client: TenantClient, engine: Engine) -> None:
    want = {prompt: client.generate(prompt, max_new_tokens=10) for prompt in PROMPTS}
    got: dict[int, str] = {}

    def ask(number: int) -> None:
        got[number] = engine.submit(PROMPTS[number % len(PROMPTS)], max_new_tokens=10).result(TIMEOUT_S)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert got == {number: want[PROMPTS[number % len(PROMPTS)]] for number in range(18)}


def test_two_engines_at_once_do_not_meet(client: TenantClient, tmp_path: Path) -> None:
    with ExitStack() as opened:
        other = opened.enter_context(open_client(make_model("gemma2", tmp_path / "gemma", seed=3)))
        clients = (client, other)
        want = [[each.generate(prompt, max_new_tokens=10) for prompt in PROMPTS] for each in clients]
        engines = [opened.enter_context(Engine(each, step_tokens=16, max_running=4)) for each in clients]
        answers = [[engine.submit(prompt, max_new_tokens=10) for prompt in PROMPTS] for engine in engines]
        assert [[answer.result(TIMEOUT_S) for answer in some] for some in answers] == want


def test_a_model_of_the_same_client_is_not_changed(client: TenantClient, engine: Engine) -> None:
    before = client.generate("who?", max_new_tokens=8)
    engine.submit("who?", max_new_tokens=8).result(TIMEOUT_S)
    assert client.generate("who?", max_new_tokens=8) == before


def test_cancel_ends_one_and_leaves_the_others(client: TenantClient) -> None:
    gate, want = Gate(), client.generate("why so?", max_new_tokens=6)
    with Engine(client, max_running=2, step_tokens=16) as engine:
        running = engine.submit("who?", max_new_tokens=50, eos_token_id=[], logits_processor=[gate])
        other = engine.submit("why so?", max_new_tokens=6)
        waiting = engine.submit("b", max_new_tokens=6)
        assert gate.reached.wait(TIMEOUT_S)
        waiting.cancel()
        running.cancel()
        gate.open.set()
        assert waiting.result(TIMEOUT_S) == ""
        assert len(running.result(TIMEOUT_S)) < 50
        assert {running.finish_reason, waiting.finish_reason} == {"cancelled"}
        assert other.result(TIMEOUT_S) == want
        running.cancel()
        assert running.finish_reason == "cancelled"


def test_closing_ends_what_is_not_complete_and_refuses_more(client: TenantClient) -> None:
    gate, engine = Gate(), Engine(client, max_running=1)
    running = engine.submit("who?", max_new_tokens=50, logits_processor=[gate])
    waiting = engine.submit("who?", max_new_tokens=5)
    assert gate.reached.wait(TIMEOUT_S)
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open.set()
    closing.join(TIMEOUT_S)
    for answer in (running, waiting):
        with pytest.raises(ConfigurationError, match="closed before the answer was complete"):
            answer.result(TIMEOUT_S)
    with pytest.raises(ConfigurationError, match="this engine was closed"):
        engine.submit("who?")
    engine.close()


def test_too_many_waiting_are_refused(client: TenantClient) -> None:
    gate = Gate()
    with Engine(client, max_running=1, max_waiting=2) as engine:
        engine.submit("who?", max_new_tokens=5, logits_processor=[gate])
        assert gate.reached.wait(TIMEOUT_S)
        answers = [engine.submit("who?", max_new_tokens=5) for _ in range(2)]
        with pytest.raises(QuotaExceeded, match="2 requests wait already"):
            engine.submit("who?", max_new_tokens=5)
        gate.open.set()
        assert len({answer.result(TIMEOUT_S) for answer in answers}) == 1


# ---- failures of one request -----------------------------------------------------------------------------------------


def failing(*_: Any) -> Any:
    raise RuntimeError("secret text")


@pytest.mark.parametrize("bad", [{"logits_processor": [failing]}, {"on_text": failing}], ids=["hook", "on_text"])
def test_code_of_the_users_that_raises_ends_its_own_request(
    client: TenantClient, engine: Engine, bad: dict[str, Any]
) -> None:
    want = client.generate("why so?", max_new_tokens=6)
    answer = engine.submit("who?", max_new_tokens=6, **bad)
    other = engine.submit("why so?", max_new_tokens=6)
    with pytest.raises(VeilbaseError, match=r"failed \(RuntimeError\)") as failed:
        answer.result(TIMEOUT_S)
    assert "secret" not in str(failed.value)
    assert isinstance(answer.error, VeilbaseError)
    assert other.result(TIMEOUT_S) == want
    with pytest.raises(VeilbaseError, match="failed"):
        list(answer)


def test_on_text_that_raises_at_the_end_or_a_callback_that_raises_ends_nothing_else(
    client: TenantClient, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    plain = client.generate("who?", max_new_tokens=8, eos_token_id=[])
    held = plain[-1] + "never"  # the last piece is held back for it, and handed out at the end

    def only_at_the_end(text: str) -> None:
        if text == plain[-1]:
            failing()

    answer = engine.submit("who?", max_new_tokens=8, eos_token_id=[], stop=held, on_text=only_at_the_end)
    with pytest.raises(VeilbaseError, match=r"failed \(RuntimeError\)"):
        answer.result(TIMEOUT_S)
    gate = Gate()
    other = engine.submit("who?", max_new_tokens=2, logits_processor=[gate])
    other.add_done_callback(failing)
    gate.open.set()
    other.result(TIMEOUT_S)
    assert engine.submit("who?", max_new_tokens=8, eos_token_id=[]).result(TIMEOUT_S) == plain
    assert "a callback of an answer failed (RuntimeError)" in caplog.text
    assert "secret" not in caplog.text


def test_a_hook_that_allows_nothing_ends_its_own_request(client: TenantClient, engine: Engine) -> None:
    def nothing(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf)

    answer = engine.submit("who?", max_new_tokens=6, do_sample=True, logits_processor=[nothing])
    other = engine.submit("why so?", max_new_tokens=6)
    with pytest.raises(VeilbaseError, match="failed"):
        answer.result(TIMEOUT_S)
    assert other.result(TIMEOUT_S) == client.generate("why so?", max_new_tokens=6)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"prompt": []}, "the conversation is empty"),
        ({"prompt": "x" * 200}, "prompt and answer together may have 128"),
        ({"prompt": "who?", "max_new_tokens": 127}, "ask for at most"),
        ({"prompt": "who?", "max_new_tokens": 0}, "max_new_tokens must be a positive whole number"),
        ({"prompt": "who?", "adapter": "support"}, "there is no adapter 'support'"),
        ({"prompt": "who?", "stop": [""]}, "stop is a text"),
        ({"prompt": "who?", "stop": 3}, "stop is a text"),
        ({"prompt": "who?", "eos_token_id": "x"}, "eos_token_id"),
        ({"prompt": "who?", "fixed_length": 1}, "fixed_length is True or False"),
        ({"prompt": "who?", "top_p": 2.0, "do_sample": True}, "top_p"),
        ({"prompt": "who?", "caller": ["acme"]}, "caller is a text, got list"),
        ({"prompt": "who?", "stop": ["ab"] * 2049}, "at most 4096 characters together"),
    ],
)
def test_requests_that_cannot_be_are_refused_in_one_line(engine: Engine, request_: dict[str, Any], said: str) -> None:
    with pytest.raises(VeilbaseError, match=said) as refused:
        engine.submit(**request_)
    assert "\n" not in str(refused.value)


def test_a_request_larger_than_the_kv_budget_is_refused_and_others_are_answered(client: TenantClient) -> None:
    with Engine(client, kv_bytes=20_000) as engine:
        with pytest.raises(ConfigurationError, match="bytes of KV, the engine has 20000"):
            engine.submit("who?", max_new_tokens=110)
        assert engine.submit("who?", max_new_tokens=4).result(TIMEOUT_S) == client.generate("who?", max_new_tokens=4)


# ---- engines that cannot be ------------------------------------------------------------------------------------------


def test_an_engine_takes_a_folder_of_adapters_and_a_store_that_was_not_told_whom_to_wake(
    client: TenantClient, tmp_path: Path
) -> None:
    save_adapter(client.load_model(), tmp_path / "one", seed=1)
    want = client.generate("who?", adapter=tmp_path / "one", max_new_tokens=4)
    for given in (tmp_path, str(tmp_path), lambda model, _: AdapterStore(model, tmp_path)):
        with Engine(client, given) as engine:
            assert len(engine.submit("who?", adapter="one", max_new_tokens=4).result(TIMEOUT_S)) == len(want)
            assert re.search(r"^adapters that fit +of rank 16 on .* disk 1 found", engine.explain(), re.MULTILINE)
    with pytest.raises(ConfigurationError, match="a folder, or a function"):
        Engine(client, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_bytes": 100}, "nothing could be answered"),
        ({"kv_dtype": "int4"}, "kv_dtype is one of"),
        ({"max_running": 0}, "max_running must be"),
        ({"step_tokens": 2}, "step_tokens"),
        ({"max_waiting": 0}, "max_waiting must be"),
    ],
)
def test_settings_that_cannot_be(client: TenantClient, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Engine(client, **options)


def test_explain_says_what_fits_and_what_shows(client: TenantClient, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine(client, kv_bytes=200_000, max_running=16) as engine:
        text = engine.explain()
        assert capsys.readouterr().out == text + "\n"
        num_bytes = 128 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, their size, bytes
        assert f"16 at most; in 0 MB of KV (float32) {200_000 // num_bytes} of 128 tokens" in text
    assert "the provider sees" in text
    assert "adapters with DoRA" in text
    assert "adapters that fit" not in text, "there are none"
    assert all(len(line.split("  ", 1)) == 2 for line in text.splitlines())


# ---- many at once ----------------------------------------------------------------------------------------------------


def test_generate_many(client: TenantClient, capfd: pytest.CaptureFixture[str]) -> None:
    want = [client.generate(prompt, max_new_tokens=6) for prompt in PROMPTS]
    assert client.generate_many(PROMPTS, max_new_tokens=6, max_running=4, step_tokens=16) == want
    assert "answering" in capfd.readouterr().err
    assert client.generate_many([], progress=False) == []
    assert client.generate_many(PROMPTS[:2], [None, None], 6, False) == want[:2]
    assert capfd.readouterr().err == ""


def test_generate_many_refuses_in_one_line(client: TenantClient, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="prompts is a list of prompts, got str"):
        client.generate_many("who?")
    with pytest.raises(ConfigurationError, match="one adapter for each of 2 prompts, got 1"):
        client.generate_many(["a", "b"], ["x"])
    with pytest.raises(ConfigurationError, match=r"^prompts\[1\]: there is no adapter folder nope$"):
        client.generate_many(["a", "b"], [None, "nope"], progress=False)
    wrong: dict[str, Any]
    for wrong, advice in (
        ({"adapter": ["x", "y"]}, "adapter: the nearest is adapters"),
        ({"max_new_token": 6}, "max_new_token: the nearest is max_new_tokens"),
        ({"qqq": 6}, "qqq: its docstring lists them"),
    ):
        with pytest.raises(ConfigurationError, match=f"^generate_many does not take {advice}$"):
            client.generate_many(["a", "b"], **wrong)
    many.check_options(dict.fromkeys(many.OF_THE_STORE))  # or the nearest to each would be itself
    folders = [tmp_path / "there/x", tmp_path / "here/y"]
    for folder in folders:
        folder.mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="lie in one folder, got 2 folders"):
        client.generate_many(["a", "b"], folders, progress=False)


def test_generate_many_with_an_adapter_for_each_prompt(client: TenantClient, tmp_path: Path) -> None:
    model = client.load_model()
    folders = [save_adapter(model, tmp_path / name, seed, r=rank) for seed, (name, rank) in enumerate(RANKS.items())]
    asked = [None, *folders, folders[0], str(folders[1])]
    want = [client.generate(prompt, each, max_new_tokens=6) for prompt, each in zip(PROMPTS, asked, strict=False)]
    assert len({*want}) == len(want)
    assert client.generate_many(PROMPTS[: len(want)], asked[: len(want)], 6, False) == want
